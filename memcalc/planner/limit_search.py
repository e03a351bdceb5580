"""The inverse questions: the largest sequence, micro-batch or model that fits, and the fewest GPUs.

A closed form gives the boundary in two passes over a column of values. A replay of the allocator, which is what
``estimate`` asks for its verdict, then moves it: the answer fits, and at the next value no open strategy does. A
strategy whose allocated bytes alone do not fit needs no replay, because none reserves less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.planner.limit_grid import (
    Chunk,
    LimitCandidate,
    LimitJob,
    SimulatedLimit,
    SimulationCache,
    evaluate,
    ordered,
)
from memcalc.terms.head import loss_of
from memcalc.terms.settings import rows_of

if TYPE_CHECKING:
    from memcalc.grid import Grid

CELLS = 1 << 18
"""Strategies times values that are evaluated at once."""
POINTS = (16, 1024)
"""Fewest and most values of a column."""
TRIED = 8
"""Strategies beyond the first that are replayed in search of the fastest that fits."""


@dataclass(frozen=True)
class LimitQuestion:
    """What is asked: ascending values, and the pairs of micro-batch and sequence length that each stands for."""

    values: Sequence[int]
    micro_batches: tuple[int, ...] = ()
    """Beside a sequence length that is asked for."""
    seq_len: int = 0
    """Beside a micro-batch that is asked for."""

    def pairs(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Micro-batches and lengths at some places of the values."""
        values = [self.values[index] for index in places]
        if self.seq_len:
            return [(value, self.seq_len) for value in values]
        return [(micro, value) for micro in self.micro_batches for value in values]

    def at(self, candidate: LimitCandidate, index: int) -> LimitCandidate:
        """A candidate's strategy at another place; its batch stays that of as many accumulated micro-batches."""
        value = self.values[index]
        if not self.seq_len:
            return replace(candidate, seq_len=value)
        return replace(candidate, micro_batch=value)

    def of(self, part: Chunk) -> tuple[int, ...]:
        """The value that each entry of a part's last axis stands for."""
        return part.grid.micro_batches if self.seq_len else part.grid.lengths


@dataclass(frozen=True)
class LimitSolution:
    """The answer: a place among the values (-1 where nothing fits), and the strategies on both sides of it."""

    index: int
    best: SimulatedLimit | None
    beyond: SimulatedLimit | None
    searched: int
    replayed: int


class LimitSearch:
    """One inverse question over a column of values."""

    def __init__(self, job: LimitJob, question: LimitQuestion, grids: Sequence[Grid]) -> None:
        self.job, self.question = job, question
        self.grids = list(grids)
        self.resident = [replace(grid, offloads=((),)) for grid in grids if () in grid.offloads]
        """What stays on the GPU, of which a search for the last value that fits may leave nothing."""
        self.replays = SimulationCache(job)
        self.searched = 0
        self.failed: dict[LimitCandidate, int] = {}
        """The first place at which a strategy was seen not to fit; no later one is asked."""

    def solve(self) -> LimitSolution:
        """Find the last value that fits."""
        index = self.boundary(self.grids, closed=True)
        best: LimitCandidate | None = None
        if index >= 0:
            index, best = self._confirmed(index)
        while index + 1 < len(self.question.values):
            rising = next((c for c in self.contenders(index + 1) if self._fits(c, index + 1)), None)
            if rising is None:
                break
            index, best = self._climb(rising, index + 1)
        if best is not None:
            best = self._fastest(index, best)
        return self._solution(index, best)

    def _solution(self, index: int, best: LimitCandidate | None) -> LimitSolution:
        beyond = None
        if index + 1 < len(self.question.values):
            following = self._same(best, index + 1) if best else next(iter(self._smallest()), None)
            beyond = self.replays.reported(following) if following else None
        confirmed = self.replays.reported(best) if best else None
        return LimitSolution(index, confirmed, beyond, self.searched, len(self.replays.known))

    def at(self, candidate: LimitCandidate, index: int) -> SimulatedLimit | None:
        """A strategy at a place as ``estimate`` has it; None where it refuses it."""
        return self.replays.reported(self._same(candidate, index))

    def _smallest(self) -> list[LimitCandidate]:
        return ordered(self._evaluated(self.grids, [0]), lambda part: np.broadcast_to(part.allowed, part.shape))

    def _evaluated(self, grids: Sequence[Grid], places: Sequence[int]) -> list[Chunk]:
        parts = evaluate(self.job, grids, self.question.pairs(places))
        self.searched += (size := sum(part.reserved.size for part in parts))
        if self.job.tally is not None:
            self.job.tally.add(size)
        return parts

    def contenders(self, index: int) -> list[LimitCandidate]:
        """Strategies that no lower bound rules out at a place, those that need least first."""
        parts = self._evaluated(self.grids, [index])
        return ordered(parts, lambda part: part.fitting(safe=self.job.safe, closed=False))

    def boundary(self, grids: Sequence[Grid], *, closed: bool, low: int = -1) -> int:
        """The last place at which some strategy fits, as long as all before it have one; ``low`` is known to."""
        high = len(self.question.values)
        for places in self._columns(low, high):
            low, failed = self._last(grids, places, low, closed=closed)
            if failed is not None:
                high = failed
                break
        grids = self._narrow(grids, low, closed=closed)
        while high - low > 1:
            count = min(self._points(grids), high - low - 1)
            places = np.unique(np.linspace(low + 1, high - 1, count).astype(np.int64)).tolist()
            low, failed = self._last(grids, places, low, closed=closed)
            high = high if failed is None else failed
        return low

    def _columns(self, low: int, high: int) -> list[list[int]]:
        """Places from ``low`` on, ever further apart, in columns that are evaluated at once."""
        count = self._points(self.grids)
        offsets = np.unique(np.geomspace(1, max(high - low - 1, 1), max(count, 40)).astype(np.int64))
        places = (low + offsets).tolist()
        return [places[first : first + count] for first in range(0, len(places), count)]

    def _points(self, grids: Sequence[Grid]) -> int:
        """Values of a column: few where each stands for a trace of its own."""
        if any(rows_of(loss_of(grid)) for grid in grids):
            return 4
        strategies = sum(grid.size // len(grid.micro_batches) for grid in grids)
        strategies *= max(len(self.question.micro_batches), 1)
        return int(min(max(CELLS // max(strategies, 1), POINTS[0]), POINTS[1]))

    def _last(self, grids: Sequence[Grid], places: Sequence[int], low: int, *, closed: bool) -> tuple[int, int | None]:
        """The last of some places up to which all fit, and the first that does not."""
        fitting: set[int] = set()
        for part in self._evaluated(grids, places):
            mask = part.fitting(safe=self.job.safe, closed=closed).any(axis=(0, 1, 2, 3, 4, 5))
            fitting |= {value for value, fits in zip(self.question.of(part), mask, strict=True) if fits}
        for index in places:
            if self.question.values[index] not in fitting:
                return low, index
            low = index
        return low, None

    def _narrow(self, grids: Sequence[Grid], index: int, *, closed: bool) -> Sequence[Grid]:
        """The grids without axis values that no lower bound leaves at a place: more never make them fit."""
        if index < 0:
            return grids
        parts = self._evaluated(grids, [index])
        left = [part.narrowed(part.fitting(safe=self.job.safe, closed=False)) for part in parts]
        remaining = [grid for grid in left if grid is not None]
        if closed:
            self.grids = remaining
        return remaining

    def _confirmed(self, index: int) -> tuple[int, LimitCandidate | None]:
        """The last place up to ``place`` that a replay confirms for the strategy that the closed form likes best."""
        first = self.contenders(index)[0]
        step, high = 1, index + 1
        while index >= 0 and not self._fits(first, index):
            high, index = index, max(index - step, -1)
            step *= 2
        return self._bisected(first, index, high) if index >= 0 else (-1, None)

    def _climb(self, candidate: LimitCandidate, low: int) -> tuple[int, LimitCandidate]:
        part = next(p for p in self._evaluated(self.grids, [low]) if _holds(p.grid, candidate))
        alone = replace(
            part.grid, layouts=(candidate.layout,), recomputes=(candidate.recompute,), zeros=(candidate.zero,),
            offloads=(candidate.offload,),
        )  # fmt: skip
        return self._bisected(candidate, low, self.boundary([alone], closed=False, low=low) + 1)

    def _bisected(self, candidate: LimitCandidate, low: int, high: int) -> tuple[int, LimitCandidate]:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(candidate, middle) else (low, middle)
        return low, self._same(candidate, low)

    def _fits(self, candidate: LimitCandidate, index: int) -> bool:
        """Whether a replay lets a strategy run at a place; more never fits where less does not."""
        strategy = replace(candidate, micro_batch=0, seq_len=0, global_batch=0)
        if self.failed.get(strategy, index + 1) <= index:
            return False
        fits = self.replays.fits(self._same(candidate, index))
        if not fits:
            self.failed[strategy] = index
        return fits

    def _same(self, candidate: LimitCandidate, index: int) -> LimitCandidate:
        """A strategy at another place, with the batch that follows there."""
        moved = self.question.at(candidate, index)
        at_once = moved.layout.dp * moved.micro_batch
        sequences, tokens = self.job.batch
        follows = at_once * max(tokens // (at_once * moved.seq_len), 1)
        return replace(moved, global_batch=sequences or follows, origin=None)

    def _fastest(self, index: int, known: LimitCandidate) -> LimitCandidate:
        candidate = fastest(self.job, self.replays, self._evaluated(self.grids, [index])) or known
        if not candidate.offload or not self.resident:
            return candidate
        return fastest(self.job, self.replays, self._evaluated(self.resident, [index]), closed=False) or candidate


def _holds(grid: Grid, candidate: LimitCandidate) -> bool:
    return candidate.precision in grid.precisions and candidate.layout in grid.layouts


def fastest(
    job: LimitJob, replays: SimulationCache, parts: Sequence[Chunk], *, closed: bool = True
) -> LimitCandidate | None:
    """The fastest that fits by a replay, of those that fit by the closed form, or that no lower bound rules out.

    Tight ones come last, and before them what is offloaded, as in a plan.
    """
    candidates: list[tuple[bool, bool, float, LimitCandidate]] = []
    for part in parts:
        fits, safe = (part.fitting(safe=only, closed=closed) for only in (job.safe, True))
        speeds = part.speeds(job.gpu, job.node)
        places = np.argwhere(fits)
        moved = np.array([bool(items) for items in part.grid.offloads])[places[:, 5]]
        order = np.lexsort((-speeds[fits], moved, ~safe[fits]))[: TRIED + 1]
        for index in places[order].tolist():
            at = tuple(index)
            candidate = part.candidate(index)
            candidates.append((not safe[at], bool(candidate.offload), -float(speeds[at]), candidate))
    candidates.sort(key=lambda entry: entry[:3])
    return next((entry[-1] for entry in candidates[: TRIED + 1] if replays.fits(entry[-1])), None)
