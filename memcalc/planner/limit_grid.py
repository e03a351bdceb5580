"""Strategies of an inverse question, evaluated for many values of what is asked at once, and confirmed by replays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.errors import InputError
from memcalc.frameworks.capability import SPLITS
from memcalc.ledger import Ledger, computed
from memcalc.planner import axes, defaults
from memcalc.planner.budget import capacity, pools_of
from memcalc.planner.costs import legal, safe_limits
from memcalc.planner.job import PlanJob
from memcalc.planner.occasions import fails_beside, with_beside
from memcalc.planner.request import Request, batch_of, in_tokens, tokens_of
from memcalc.planner.stage_peaks import REPLAYED_STAGES, Peaks, UnsafeError, has_observed, peaks_of
from memcalc.specs.options import DEGREES
from memcalc.terms.build import build_ledger
from memcalc.terms.head import loss_of
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import group_bytes, overhead_of
from memcalc.terms.pipeline import blocks_before_backward, in_flight
from memcalc.terms.settings import runs
from memcalc.terms.states import state_terms
from memcalc.timing import rates_for, step_times

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid, Layout
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.options import SharedSettings
    from memcalc.terms.overhead import Overhead

DECIDED = ("loss", "reduce_dtype", "autocast", "etp", *SPLITS)
"""Fields that follow from layout, precision and sharding, so that a space has them for each."""
ROUNDING = 16
"""Bytes by which limits that are rounded to whole bytes may differ."""
BATCH = "one micro-batch per rank"
ALIKE = 256
"""Candidates in a row whose refusal is that of the job."""


@dataclass(frozen=True)
class LimitJob(PlanJob):
    """A job of which an inverse question is asked; ``safe`` asks for the verdict fits, not tight."""

    safe: bool = True
    by_share: bool = False
    """Whether a GPU may use its share of its node's memory alone, as where fewer GPUs than a node has are asked for."""

    @cached_property
    def batch(self) -> tuple[int, int]:
        """What an optimizer step is fed: sequences, or where they follow from the micro-batch 0, and tokens."""
        raw = self.request.given.get("global_batch")
        if raw is None:
            return 0, 0
        if in_tokens(raw):
            return 0, max(tokens_of(raw, self.request.given.get("seq_len", 0)), 1)
        return batch_of(self.request, self.request.given.get("seq_len", 1)), 0

    def with_words(self, split: Mapping[str, Any] | None = None, **options: Any) -> Request:
        """The request with some words given, as a copy that takes notes of its own; without the batch.

        ``split`` has the fields by which pipeline stages are unequal.
        """
        fields = {**self.request.given["fields"], **(split or {})}
        given = {**self.request.given, "global_batch": None, **options, "fields": fields}
        return replace(self.request, given=given, assumptions={}, choices={})

    def open(self, gpus: Sequence[int], seq_len: int) -> list[Grid]:
        """All that the request leaves open on any of some numbers of GPUs: a grid for each precision.

        A precision stands alone, because attention kernels and defaults follow from it.
        """
        request = self.with_words(seq_len=seq_len)
        spaces = [grid for count in gpus for grid in axes.space(request, self.model, self.gpu, self.node, count)]
        self.request.assumptions.update(request.assumptions)
        if not spaces:
            return []
        parts: dict[tuple[Any, ...], dict[Layout, None]] = {}
        for space in spaces:
            decided = tuple((name, getattr(space.fixed, name)) for name in DECIDED)
            for precision in space.precisions:
                key = (precision, space.recomputes, space.zeros, space.offloads, decided)
                parts.setdefault(key, {}).update(dict.fromkeys(space.layouts))
        grids = []
        for (precision, recomputes, zeros, offloads, decided), layouts in parts.items():
            fixed = self.fixed(precision, seq_len, dict(decided))
            if fixed is not None:
                varied = {"recomputes": recomputes, "zeros": zeros, "offloads": offloads, "layouts": tuple(layouts)}
                grids.append(replace(spaces[0], fixed=fixed, precisions=(precision,), **varied))
        return grids

    def fixed(self, precision: str, seq_len: int, decided: Mapping[str, Any]) -> SharedSettings | None:
        """What strategies of a precision share at a length; None where they are impossible and others are open."""
        request = self.with_words(precision=precision, seq_len=seq_len)
        _, habits = defaults.habits_for(request)
        try:
            fixed = axes.fixed_part(request, habits, self.model, self.gpu, [precision], 1)
        except InputError:
            if self.request.given.get("precision") is not None:
                raise
            return None
        sequences, tokens = self.batch
        return fixed.model_copy(update={"global_batch": sequences, "global_tokens": tokens, **decided})


@dataclass(frozen=True)
class LimitCandidate:
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
    split: tuple[tuple[str, Any], ...] = ()
    """The fields by which pipeline stages are unequal."""
    least: int = field(compare=False, default=0)
    """Lower bound of what is reserved, with the communicators [bytes]."""
    origin: tuple[Chunk, tuple[int, ...]] | None = field(compare=False, default=None, repr=False)
    """The part and the index where it was evaluated; None where it was moved to another value since."""

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
            **{n: d for n in DEGREES if (d := getattr(layout, n)) > 1},
            **({"sp": layout.sp} if layout.tp > 1 else {}),
            **({"pp_schedule": layout.schedule} if layout.pp > 1 else {}),
            **({"vpp": layout.vpp} if layout.vpp > 1 else {}),
            "offload": self.offload,
        }


@dataclass(frozen=True)
class Chunk:
    """A grid of one precision and one run of lengths, evaluated."""

    grid: Grid
    census: ModelOnGrid
    ledger: Ledger
    reserved: Array
    """Closed form, with the communicators [bytes]."""
    least: Array
    """Allocated at the peak, with the communicators: no replay reserves less [bytes]."""
    allowed: Array
    """Legal, and within the host's memory."""
    cramped: Array
    """Legal, and beyond the host's memory."""
    overhead: Overhead
    safe: Array
    """The largest prediction that fits at the upper end of the range of its kind of job [bytes]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis, one stage."""
        return (self.grid.shape[0], 1, *self.grid.shape[2:])

    def limit(self, *, safe: bool) -> Array:
        """The largest prediction that gets the wanted verdict [bytes]."""
        return self.safe if safe else np.int64(self.overhead.usable)

    def fitting(self, *, safe: bool, closed: bool) -> Array:
        """Strategies that fit by the closed form, or (not ``closed``) that no lower bound rules out."""
        size = self.reserved if closed else self.least - ROUNDING
        return np.broadcast_to(self.allowed & (size <= self.limit(safe=safe)), self.shape)

    def host_short(self, job: LimitJob, gpus: int) -> tuple[int, int] | None:
        """What a strategy on so many GPUs that fits but for the host needs of it per GPU, and may have [bytes].

        The least need; None where there is no such strategy.
        """
        pools = pools_of(self.census, job.node, by_share=job.by_share) if capacity(job.node, "host") else ()
        beyond = self.cramped & (self.least <= self.limit(safe=job.safe)) & (self.grid.degree("gpus") == gpus)
        if not pools or not np.any(beyond):
            return None
        need, most = np.max(computed(pools[0].need), axis=1, keepdims=True), int(np.max(pools[0].most))
        needs = np.broadcast_to(need, beyond.shape)[beyond & (need > most)]
        return (int(needs.min()), most) if needs.size else None

    def candidate(self, index: Sequence[int]) -> LimitCandidate:
        """The strategy at an index."""
        grid, i = self.grid, tuple(index)
        batch = np.broadcast_to(grid.global_batch, self.shape)[i]
        split = tuple((name, value) for name in SPLITS if (value := getattr(grid.fixed, name)))
        return LimitCandidate(
            grid.fixed.framework, grid.layouts[i[0]], grid.precisions[i[2]], grid.recomputes[i[3]], grid.zeros[i[4]],
            grid.offloads[i[5]], grid.micro_batches[i[6]], grid.lengths[i[6]], int(batch), split,
            int(np.broadcast_to(self.least, self.shape)[i]), (self, i),
        )  # fmt: skip

    def speeds(self, gpu: GPU, node: Node) -> Array:
        """Tokens a second and GPU of each strategy."""
        grid = self.grid
        tokens = grid.global_batch * grid.seq_len / grid.degree("gpus")
        return np.broadcast_to(tokens / step_times(self.census, gpu, node, rates_for(gpu, grid)).step, self.shape)

    @cached_property
    def stage_inputs(self) -> tuple[Array, ...]:
        """What a step's events on a stage are written from and a pipeline's schedule decides, over the grid.

        The index of the stage comes first. Terms that the writer makes itself, block by block, follow from the rest.
        """
        grid, rows = self.grid, self.census.rows
        kinds = [*zip(rows.distinct, rows.chunks, strict=True)]
        alike = np.asarray([kinds.index(kind) for kind in kinds])
        sizes = [term.bytes for term in (*self.ledger.terms, *self.ledger.holes) if not term.in_events]
        passes = in_flight(grid), blocks_before_backward(self.census)
        arrays = (grid.stage, grid.is_first, grid.is_last, *passes, alike[rows.index], *sizes)
        return tuple(np.broadcast_to(array, grid.shape) for array in arrays)

    def footprints(self, index: tuple[int, ...]) -> dict[int, Hashable]:
        """By stage, what decides on the events of a strategy there; equal for schedules that make no difference to it.

        Of those stages alone that are replayed whatever the schedule, and that are looked at.
        """
        layout = self.grid.layouts[index[0]]
        if layout.pp == 1 or layout.pp > REPLAYED_STAGES or has_observed(self.ledger):
            return {}
        alike = replace(layout, schedule="", vpp=1)
        rows = [(index[0], row, *index[2:]) for row in range(len(self.grid.rows[index[0]]))]
        inputs = (tuple(int(array[row]) for array in self.stage_inputs) for row in rows)
        return {values[0]: (id(self), alike, index[2:], values) for values in inputs}

    def narrowed(self, mask: Array) -> Grid | None:
        """The grid with only those values of its axes that some strategy of the mask has."""
        if not mask.any():
            return None
        remaining = [np.flatnonzero(mask.any(axis=tuple(a for a in range(7) if a != axis))) for axis in (0, 3, 4, 5)]
        names = ("layouts", "recomputes", "zeros", "offloads")
        values: Any = {n: tuple(getattr(self.grid, n)[i] for i in k) for n, k in zip(names, remaining, strict=True)}
        return replace(self.grid, **values)


def evaluate(
    job: LimitJob, grids: Sequence[Grid], pairs: Sequence[tuple[int, int]], gpus: Collection[int] = ()
) -> list[Chunk]:
    """Every strategy of some grids at each pair of micro-batch and sequence length; the lengths ascend.

    With ``gpus`` only the layouts of these numbers, with what is common to all of a grid's.
    """
    parts = (_part(job, grid, gpus) for open_ in grids for grid in _runs(job, open_, pairs))
    return [part for part in parts if part is not None]


def number_of(job: LimitJob, grids: Sequence[Grid], pairs: Sequence[tuple[int, int]], gpus: Collection[int]) -> int:
    """How many strategies :func:`evaluate` would look at."""
    return sum(
        sum(layout.gpus in gpus for layout in grid.layouts) * _per_layout(grid)
        for open_ in grids if gpus
        for grid in _runs(job, open_, pairs)
    )  # fmt: skip


def _per_layout(grid: Grid) -> int:
    axes_but_layouts = grid.precisions, grid.recomputes, grid.zeros, grid.offloads, grid.micro_batches
    return prod(map(len, axes_but_layouts))


def _runs(job: LimitJob, grid: Grid, pairs: Sequence[tuple[int, int]]) -> Iterator[Grid]:
    """A grid for each run of lengths on which the same code runs."""
    lengths = sorted({length for _, length in pairs})
    for run in runs(job.model, loss_of(grid), lengths):
        decided = {name: getattr(grid.fixed, name) for name in DECIDED}
        fixed = job.fixed(grid.precisions[0], run[0], decided)
        if fixed is not None:
            here = [pair for pair in pairs if run[0] <= pair[1] <= run[-1]]
            micro, seq_lens = (tuple(column) for column in zip(*here, strict=True))
            yield replace(grid, fixed=fixed, micro_batches=micro, seq_lens=seq_lens)


def _part(job: LimitJob, grid: Grid, gpus: Collection[int]) -> Chunk | None:
    overhead = overhead_of(job.gpu, grid)
    if gpus:
        grid = replace(grid, layouts=tuple(layout for layout in grid.layouts if layout.gpus in gpus))
        if not grid.layouts:
            return None
    census = job.on(grid)
    ledger = build_ledger(census, overhead.workspaces, detail=False)
    reserved, least = _figures(ledger)
    beside = group_bytes(job.gpu, grid)
    able = allowed = legal(grid) & (grid.degree("cp") <= grid.seq_len)
    for pool in pools_of(census, job.node, by_share=job.by_share):
        allowed = allowed & (np.max(computed(pool.need), axis=1, keepdims=True) <= pool.most)
    safe = safe_limits(grid, job.gpu, [overhead])
    return Chunk(grid, census, ledger, reserved + beside, least + beside, allowed, able & ~allowed, overhead, safe)


def _figures(ledger: Ledger) -> tuple[Array, Array]:
    reserved, allocated = np.broadcast_arrays(ledger.reserved(), ledger.peak())
    top = np.argmax(reserved, axis=1, keepdims=True)
    return np.take_along_axis(reserved, top, axis=1), np.take_along_axis(allocated, top, axis=1)


def ordered(parts: Sequence[Chunk], mask: Callable[[Chunk], Array]) -> list[LimitCandidate]:
    """The strategies of a mask, those with the smallest lower bound first."""
    candidates = (part.candidate(at) for part in parts for at in np.argwhere(mask(part)).tolist())
    return sorted(candidates, key=lambda candidate: candidate.least)


@dataclass(frozen=True)
class SimulatedLimit:
    """A candidate with the figures that ``estimate`` gives for it."""

    candidate: LimitCandidate
    census: ModelOnGrid
    ledger: Ledger
    peaks: Peaks
    assumptions: dict[str, str]


class SimulationCache:
    """Candidates confirmed as ``estimate`` would, each once."""

    def __init__(self, job: LimitJob) -> None:
        self.job = job
        self.known: dict[LimitCandidate, SimulatedLimit | None] = {}
        self.unsafe: set[Hashable] = set()
        """Footprints of stages that reserve more than is safe."""
        self.refused = 0
        """Candidates in a row that were refused for what the job states."""

    def of(self, candidate: LimitCandidate) -> SimulatedLimit | None:
        """The figures of a candidate; None where ``estimate`` refuses it, or it is not safe and has to be."""
        if candidate not in self.known:
            unsafe = not self.unsafe.isdisjoint(_footprints(candidate).values())
            self.known[candidate] = None if unsafe else self._run(candidate, detail=False)
        return self.known[candidate]

    def reported(self, candidate: LimitCandidate) -> SimulatedLimit | None:
        """The same, tensor by tensor as ``estimate`` adds them up, to the last byte."""
        return self._run(candidate, detail=True)

    def fits(self, candidate: LimitCandidate) -> bool:
        """Whether a candidate gets the wanted verdict."""
        limit = self.of(candidate)
        return limit is not None and limit.peaks.verdict in (("fits",) if self.job.safe else ("fits", "tight"))

    def _run(self, candidate: LimitCandidate, *, detail: bool) -> SimulatedLimit | None:
        job, request = self.job, self.job.with_words(dict(candidate.split), **candidate.words)
        try:
            grid = axes.single_strategy(request, job.model, job.gpu, job.node)
        except InputError as error:
            name, stated = error.field.removeprefix("strategy.").replace("-", "_"), job.request.given
            self.refused += name in stated or name in stated["fields"]
            if self.refused == ALIKE:
                raise
            return None
        self.refused = 0
        overhead = overhead_of(job.gpu, grid, grid.layouts[0])
        census = job.on(grid)
        searched = candidate.origin and (candidate.origin[0].grid, candidate.origin[1])
        if not detail and fails_beside(job, census, overhead, searched):
            return None
        ledger = build_ledger(census, overhead.workspaces, detail=detail)
        try:
            peaks = peaks_of(census, ledger, overhead, only_safe=job.safe and not detail)
        except UnsafeError as error:  # whoever asks for its figures has them in detail
            if error.stage in (footprints := _footprints(candidate)):
                self.unsafe.add(footprints[error.stage])
            return None
        peaks = with_beside(peaks, census, job.node) if detail else peaks
        return SimulatedLimit(candidate, census, ledger, peaks, request.assumptions)


def _footprints(candidate: LimitCandidate) -> dict[int, Hashable]:
    part, index = candidate.origin or (None, ())
    return part.footprints(index) if part is not None else {}


def states_fit(job: LimitJob, grids: Sequence[Grid], micro_batch: int, seq_len: int) -> bool:
    """Whether the states alone leave any strategy possible: they are a part of every phase's sum."""
    for grid in grids:
        item = replace(grid, recomputes=grid.recomputes[:1], micro_batches=(micro_batch,), seq_lens=(seq_len,))
        overhead = overhead_of(job.gpu, item)
        least = Ledger(state_terms(job.on(item))).peak() + group_bytes(job.gpu, item) - ROUNDING
        limit = safe_limits(item, job.gpu, [overhead]) if job.safe else overhead.usable
        if np.any(np.min(least, axis=1, keepdims=True) <= limit):
            return True
    return False
