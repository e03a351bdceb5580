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

from memcalc.planner.columns import Candidate, Confirmed, Inquiry, Part, Replays, evaluate, ordered
from memcalc.terms.head import loss_of
from memcalc.terms.lengths import rows_of

if TYPE_CHECKING:
    from memcalc.grid import Grid

CELLS = 1 << 18
"""Strategies times values that are evaluated at once."""
POINTS = (16, 1024)
"""Fewest and most values of a column."""
TRIED = 8
"""Strategies beyond the first that are replayed in search of the fastest that fits."""


@dataclass(frozen=True)
class Question:
    """What is asked: ascending values, and the pairs of micro-batch and sequence length that each stands for."""

    values: Sequence[int]
    micro_batches: tuple[int, ...] = ()
    """Beside a sequence length that is asked for."""
    seq_len: int = 0
    """Beside a micro-batch that is asked for."""

    def pairs(self, places: Sequence[int]) -> list[tuple[int, int]]:
        """Micro-batches and lengths at some places of the values."""
        values = [self.values[place] for place in places]
        if self.seq_len:
            return [(value, self.seq_len) for value in values]
        return [(micro, value) for micro in self.micro_batches for value in values]

    def at(self, candidate: Candidate, place: int) -> Candidate:
        """A candidate's strategy at another place; its batch stays that of as many accumulated micro-batches."""
        value = self.values[place]
        if not self.seq_len:
            return replace(candidate, seq_len=value)
        return replace(candidate, micro_batch=value)

    def of(self, part: Part) -> tuple[int, ...]:
        """The value that each entry of a part's last axis stands for."""
        return part.grid.micro_batches if self.seq_len else part.grid.lengths


@dataclass(frozen=True)
class Solution:
    """The answer: a place among the values (-1 where nothing fits), and the strategies on both sides of it."""

    place: int
    best: Confirmed | None
    beyond: Confirmed | None
    searched: int
    replayed: int


class Search:
    """One inverse question over a column of values."""

    def __init__(self, job: Inquiry, question: Question, grids: Sequence[Grid]) -> None:
        self.job, self.question = job, question
        self.grids = list(grids)
        self.replays = Replays(job)
        self.searched = 0
        self.failed: dict[Candidate, int] = {}
        """The first place at which a strategy was seen not to fit; no later one is asked."""

    def solve(self) -> Solution:
        """Find the last value that fits."""
        place = self.boundary(self.grids, closed=True)
        best: Candidate | None = None
        if place >= 0:
            place, best = self._confirmed(place)
        while place + 1 < len(self.question.values):
            rising = next((c for c in self.contenders(place + 1) if self._fits(c, place + 1)), None)
            if rising is None:
                break
            place, best = self._climb(rising, place + 1)
        if best is not None:
            best = self._fastest(place, best)
        return self._solution(place, best)

    def _solution(self, place: int, best: Candidate | None) -> Solution:
        beyond = None
        if place + 1 < len(self.question.values):
            following = self._same(best, place + 1) if best else next(iter(self._smallest()), None)
            beyond = self.replays.reported(following) if following else None
        confirmed = self.replays.reported(best) if best else None
        return Solution(place, confirmed, beyond, self.searched, len(self.replays.known))

    def at(self, candidate: Candidate, place: int) -> Confirmed | None:
        """A strategy at a place as ``estimate`` has it; None where it refuses it."""
        return self.replays.reported(self._same(candidate, place))

    def _smallest(self) -> list[Candidate]:
        """Strategies at the first value, those that need least first."""
        return ordered(self._evaluated(self.grids, [0]), lambda part: np.broadcast_to(part.allowed, part.shape))

    def _evaluated(self, grids: Sequence[Grid], places: Sequence[int]) -> list[Part]:
        parts = evaluate(self.job, grids, self.question.pairs(places))
        self.searched += (size := sum(part.reserved.size for part in parts))
        if self.job.tally is not None:
            self.job.tally.add(size)
        return parts

    def contenders(self, place: int) -> list[Candidate]:
        """Strategies that no lower bound rules out at a place, those that need least first."""
        parts = self._evaluated(self.grids, [place])
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
        for place in places:
            if self.question.values[place] not in fitting:
                return low, place
            low = place
        return low, None

    def _narrow(self, grids: Sequence[Grid], place: int, *, closed: bool) -> Sequence[Grid]:
        """The grids without axis values that no lower bound leaves at a place: more never make them fit."""
        if place < 0:
            return grids
        parts = self._evaluated(grids, [place])
        left = [part.narrowed(part.fitting(safe=self.job.safe, closed=False)) for part in parts]
        kept = [grid for grid in left if grid is not None]
        if closed:
            self.grids = kept
        return kept

    def _confirmed(self, place: int) -> tuple[int, Candidate | None]:
        """The last place up to ``place`` that a replay confirms for the strategy that the closed form likes best."""
        first = self.contenders(place)[0]
        step, high = 1, place + 1
        while place >= 0 and not self._fits(first, place):
            high, place = place, max(place - step, -1)
            step *= 2
        return self._bisected(first, place, high) if place >= 0 else (-1, None)

    def _climb(self, candidate: Candidate, low: int) -> tuple[int, Candidate]:
        """The last place at which a strategy fits that does at ``low``."""
        part = next(p for p in self._evaluated(self.grids, [low]) if candidate.precision in p.grid.precisions)
        alone = replace(
            part.grid, layouts=(candidate.layout,), recomputes=(candidate.recompute,), zeros=(candidate.zero,),
            offloads=(candidate.offload,),
        )  # fmt: skip
        return self._bisected(candidate, low, self.boundary([alone], closed=False, low=low) + 1)

    def _bisected(self, candidate: Candidate, low: int, high: int) -> tuple[int, Candidate]:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(candidate, middle) else (low, middle)
        return low, self._same(candidate, low)

    def _fits(self, candidate: Candidate, place: int) -> bool:
        """Whether a replay lets a strategy run at a place; more never fits where less does not."""
        strategy = replace(candidate, micro_batch=0, seq_len=0, global_batch=0)
        if self.failed.get(strategy, place + 1) <= place:
            return False
        fits = self.replays.fits(self._same(candidate, place))
        if not fits:
            self.failed[strategy] = place
        return fits

    def _same(self, candidate: Candidate, place: int) -> Candidate:
        """A strategy at another place, with the batch that follows there."""
        moved = self.question.at(candidate, place)
        at_once = moved.layout.dp * moved.micro_batch
        sequences, tokens = self.job.batch
        follows = at_once * max(tokens // (at_once * moved.seq_len), 1)
        return replace(moved, global_batch=sequences or follows)

    def _fastest(self, place: int, known: Candidate) -> Candidate:
        """The fastest strategy that fits at a place; ``known`` does."""
        return fastest(self.job, self.replays, self._evaluated(self.grids, [place])) or known


def fastest(job: Inquiry, replays: Replays, parts: Sequence[Part]) -> Candidate | None:
    """The fastest strategy that fits by the closed form and by a replay, tight ones last."""
    found: list[tuple[bool, float, Candidate]] = []
    for part in parts:
        fits, safe = (part.fitting(safe=only, closed=True) for only in (job.safe, True))
        speeds = part.speeds(job.gpu, job.node)
        places = np.argwhere(fits)
        order = np.lexsort((-speeds[fits], ~safe[fits]))[: TRIED + 1]
        for index in places[order].tolist():
            at = tuple(index)
            found.append((not safe[at], -float(speeds[at]), part.candidate(index)))
    found.sort(key=lambda one: one[:2])
    return next((candidate for _, _, candidate in found[: TRIED + 1] if replays.fits(candidate)), None)
