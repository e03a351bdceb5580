"""Strategies of an inverse question, evaluated for many values of what is asked at once, and confirmed by replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.errors import InputError
from memcalc.ledger import Ledger
from memcalc.planner import axes
from memcalc.planner import request as rq
from memcalc.planner.job import Job
from memcalc.planner.peaks import Peaks, peaks_of
from memcalc.planner.rooms import rooms_of
from memcalc.planner.search import legal
from memcalc.sums import computed
from memcalc.terms import Census, build_ledger, overhead_of
from memcalc.terms.head import loss_of
from memcalc.terms.lengths import runs
from memcalc.terms.overhead import group_bytes
from memcalc.terms.states import state_terms
from memcalc.timing import rates_for, step_times
from memcalc.units import parse_count

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Fixed, Grid, Layout
    from memcalc.planner.request import Request
    from memcalc.specs.hardware import GPU, Node
    from memcalc.terms import Overhead

ROUNDING = 16
"""Bytes by which limits that are rounded to whole bytes may differ."""
BATCH = "micro-batch x data-parallel ranks, one micro-batch a step: more need no less memory"


@dataclass(frozen=True)
class Inquiry(Job):
    """A job of which an inverse question is asked; ``safe`` asks for the verdict fits, not tight."""

    safe: bool = False

    @cached_property
    def batch(self) -> tuple[int, int]:
        """What an optimizer step is fed: sequences, or where they follow from the micro-batch 0, and tokens."""
        raw = self.request.given.get("global_batch")
        if raw is None:
            return 0, 0
        if isinstance(raw, str) and raw.strip().lower().endswith(("token", "tokens")):
            return 0, max(parse_count(raw, "global-batch"), 1)
        return rq.batch_of(self.request, 1), 0

    def with_words(self, **words: Any) -> Request:
        """The request with some words given, as a copy that takes notes of its own; without the batch."""
        return rq.Request({**self.request.given, "global_batch": None, **words})

    def open(self, gpus: Sequence[int], seq_len: int) -> list[Grid]:
        """All that the request leaves open on any of some numbers of GPUs: a grid for each precision.

        A precision stands alone, because attention kernels and defaults follow from it.
        """
        request = self.with_words(seq_len=seq_len)
        spaces = [grid for count in gpus for grid in axes.space(request, self.model, self.gpu, self.node, count)]
        self.request.assumptions.update(request.assumptions)
        if not spaces:
            return []
        layouts = tuple(dict.fromkeys(layout for space in spaces for layout in space.layouts))
        grids = []
        for precision in spaces[0].precisions:
            fixed = self.fixed(precision, seq_len)
            if fixed is not None:
                grids.append(replace(spaces[0], fixed=fixed, precisions=(precision,), layouts=layouts))
        return grids

    def fixed(self, precision: str, seq_len: int) -> Fixed | None:
        """What strategies of a precision share at a length; None where they are impossible and others are open."""
        request = self.with_words(precision=precision, seq_len=seq_len)
        _, habits = rq.habits_for(request)
        try:
            fixed = axes.fixed_part(request, habits, self.model, self.gpu, [precision], 1)
        except InputError:
            if self.request.given.get("precision") is not None:
                raise
            return None
        sequences, tokens = self.batch
        return replace(fixed, global_batch=sequences, global_tokens=tokens)


@dataclass(frozen=True)
class Candidate:
    """One strategy with all that it is fed."""

    framework: str
    layout: Layout
    precision: str
    recompute: str
    zero: int
    offload: tuple[str, ...]
    micro_batch: int
    seq_len: int
    global_batch: int
    least: int = field(compare=False, default=0)
    """Lower bound of what is reserved, with the communicators [bytes]."""

    @property
    def words(self) -> dict[str, Any]:
        """The words of ``estimate`` that a search has chosen."""
        layout = self.layout
        return {
            "gpus": layout.gpus,
            "seq_len": self.seq_len,
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "framework": self.framework,
            "precision": self.precision,
            "zero": self.zero,
            "recompute": self.recompute,
            **{n: d for n in ("tp", "pp", "cp", "ep") if (d := getattr(layout, n)) > 1},
            **({"sp": layout.sp} if layout.tp > 1 else {}),
            **({"pp_schedule": layout.schedule} if layout.pp > 1 else {}),
            **({"vpp": layout.vpp} if layout.vpp > 1 else {}),
            "offload": self.offload,
        }


@dataclass(frozen=True)
class Part:
    """A grid of one precision and one run of lengths, evaluated."""

    grid: Grid
    census: Census
    reserved: Array
    """Closed form, with the communicators [bytes]."""
    least: Array
    """Allocated at the peak, with the communicators: no replay reserves less [bytes]."""
    allowed: Array
    """Legal, and within the host's memory."""
    overhead: Overhead

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis, one stage."""
        return (self.grid.shape[0], 1, *self.grid.shape[2:])

    def limit(self, *, safe: bool) -> int:
        """The largest prediction that gets the wanted verdict [bytes]."""
        return self.overhead.safe if safe else self.overhead.usable

    def fitting(self, *, safe: bool, closed: bool) -> Array:
        """Strategies that fit by the closed form, or (not ``closed``) that no lower bound rules out."""
        size = self.reserved if closed else self.least - ROUNDING
        return np.broadcast_to(self.allowed & (size <= self.limit(safe=safe)), self.shape)

    def candidate(self, index: Sequence[int]) -> Candidate:
        """The strategy at an index."""
        grid, i = self.grid, tuple(index)
        batch = np.broadcast_to(grid.global_batch, self.shape)[i]
        return Candidate(
            grid.fixed.framework, grid.layouts[i[0]], grid.precisions[i[2]], grid.recomputes[i[3]], grid.zeros[i[4]],
            grid.offloads[i[5]], grid.micro_batches[i[6]], grid.lengths[i[6]], int(batch),
            int(np.broadcast_to(self.least, self.shape)[i]),
        )  # fmt: skip

    def candidates(self, mask: Array) -> Iterator[Candidate]:
        """The strategies of a mask."""
        return (self.candidate(index) for index in np.argwhere(mask).tolist())

    def speeds(self, gpu: GPU, node: Node) -> Array:
        """Tokens a second and GPU of each strategy."""
        grid = self.grid
        tokens = grid.global_batch * grid.seq_len / grid.degree("gpus")
        return np.broadcast_to(tokens / step_times(self.census, gpu, node, rates_for(gpu, grid)).step, self.shape)

    def narrowed(self, mask: Array) -> Grid | None:
        """The grid with only those values of its axes that some strategy of the mask has."""
        if not mask.any():
            return None
        kept = [np.flatnonzero(mask.any(axis=tuple(a for a in range(7) if a != axis))) for axis in (0, 3, 4, 5)]
        names = ("layouts", "recomputes", "zeros", "offloads")
        values: Any = {n: tuple(getattr(self.grid, n)[i] for i in k) for n, k in zip(names, kept, strict=True)}
        return replace(self.grid, **values)


def evaluate(job: Inquiry, grids: Sequence[Grid], pairs: Sequence[tuple[int, int]]) -> list[Part]:
    """Every strategy of some grids at each pair of micro-batch and sequence length; the lengths ascend."""
    return [_part(job, grid) for open_ in grids for grid in _runs(job, open_, pairs)]


def _runs(job: Inquiry, grid: Grid, pairs: Sequence[tuple[int, int]]) -> Iterator[Grid]:
    """A grid for each run of lengths on which the same code runs."""
    lengths = sorted({length for _, length in pairs})
    for run in runs(job.model, loss_of(grid), lengths):
        fixed = job.fixed(grid.precisions[0], run[0])
        if fixed is not None:
            here = [pair for pair in pairs if run[0] <= pair[1] <= run[-1]]
            micro, seq_lens = (tuple(column) for column in zip(*here, strict=True))
            yield replace(grid, fixed=fixed, micro_batches=micro, seq_lens=seq_lens)


def _part(job: Inquiry, grid: Grid) -> Part:
    overhead = overhead_of(job.gpu, grid)
    census = Census(job.model, grid)
    ledger = build_ledger(census, overhead.workspaces, detail=False)
    reserved, least = _figures(ledger)
    beside = group_bytes(job.gpu, grid)
    allowed = legal(grid) & (grid.degree("cp") <= grid.seq_len)
    for room in rooms_of(census, job.node):
        allowed = allowed & (np.max(computed(room.held), axis=1, keepdims=True) <= room.most)
    return Part(grid, census, reserved + beside, least + beside, allowed, overhead)


def _figures(ledger: Ledger) -> tuple[Array, Array]:
    """Reserved bytes of the stage that reserves most, and what is allocated there."""
    reserved, allocated = np.broadcast_arrays(ledger.reserved(), ledger.peak())
    top = np.argmax(reserved, axis=1, keepdims=True)
    return np.take_along_axis(reserved, top, axis=1), np.take_along_axis(allocated, top, axis=1)


def ordered(parts: Sequence[Part], mask: Callable[[Part], Array]) -> list[Candidate]:
    """The strategies of a mask, those with the smallest lower bound first."""
    return sorted((c for part in parts for c in part.candidates(mask(part))), key=lambda c: c.least)


@dataclass(frozen=True)
class Confirmed:
    """A candidate with the figures that ``estimate`` gives for it."""

    candidate: Candidate
    census: Census
    ledger: Ledger
    peaks: Peaks
    assumptions: dict[str, str]


class Replays:
    """Candidates confirmed as ``estimate`` would, each once."""

    def __init__(self, job: Inquiry) -> None:
        self.job = job
        self.known: dict[Candidate, Confirmed | None] = {}

    def of(self, candidate: Candidate) -> Confirmed | None:
        """The figures of a candidate; None where ``estimate`` refuses it."""
        if candidate not in self.known:
            self.known[candidate] = self._run(candidate, detail=False)
        return self.known[candidate]

    def reported(self, candidate: Candidate) -> Confirmed | None:
        """The same, tensor by tensor as ``estimate`` adds them up, to the last byte."""
        return self._run(candidate, detail=True)

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate gets the wanted verdict."""
        found = self.of(candidate)
        return found is not None and found.peaks.verdict in (("fits",) if self.job.safe else ("fits", "tight"))

    def _run(self, candidate: Candidate, *, detail: bool) -> Confirmed | None:
        job, request = self.job, self.job.with_words(**candidate.words)
        try:
            grid = axes.one_strategy(request, job.model, job.gpu, job.node)
        except InputError:
            return None
        overhead = overhead_of(job.gpu, grid, grid.layouts[0])
        census = Census(job.model, grid)
        ledger = build_ledger(census, overhead.workspaces, detail=detail)
        return Confirmed(candidate, census, ledger, peaks_of(census, ledger, overhead), request.assumptions)


def states_fit(job: Inquiry, grids: Sequence[Grid], micro_batch: int, seq_len: int) -> bool:
    """Whether the states alone leave any strategy possible: they are a part of every phase's sum."""
    for grid in grids:
        one = replace(grid, recomputes=grid.recomputes[:1], micro_batches=(micro_batch,), seq_lens=(seq_len,))
        overhead = overhead_of(job.gpu, one)
        least = Ledger(state_terms(Census(job.model, one))).peak() + group_bytes(job.gpu, one) - ROUNDING
        limit = overhead.safe if job.safe else overhead.usable
        if np.any(np.min(least, axis=1) <= limit):
            return True
    return False
