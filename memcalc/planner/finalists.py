"""The best strategies of a search, replayed: what the allocator reserves decides which of them run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from memcalc.grid import Grid
from memcalc.planner.answer import strategy_of
from memcalc.planner.peaks import Peaks, peaks_of
from memcalc.planner.replayed import UnsafeError
from memcalc.terms import build_ledger, overhead_of
from memcalc.terms.census import Census

if TYPE_CHECKING:
    from memcalc.ledger import Ledger
    from memcalc.planner.job import Job
    from memcalc.planner.search import Found
    from memcalc.specs.strategy import Strategy
    from memcalc.terms import Overhead


@dataclass(frozen=True)
class Finalist:
    """A strategy that the search found, with its replayed figures."""

    found: Found
    single: Grid
    peaks: Peaks

    @property
    def is_tight(self) -> bool:
        """Whether the upper end of its range does not fit."""
        return self.peaks.verdict == "tight"

    @property
    def strategy(self) -> Strategy:
        """The strategy, every field resolved."""
        return strategy_of(self.found.grid, self.found.index)


def finalists(job: Job, candidates: Iterable[Found], wanted: int) -> list[Finalist]:
    """The first that a replay lets run, in their order; tight ones come last, and only where too few fit.

    From an iterator no more is taken than is needed.
    """
    safe: list[Finalist] = []
    others: list[Found | Finalist] = []
    for found in candidates if wanted else ():
        one = _replayed(job, found)
        if isinstance(one, Finalist) and one.peaks.verdict == "fits":
            safe.append(one)
        else:
            others.append(one)
        if len(safe) == wanted:
            return safe
    whole = (one if isinstance(one, Finalist) else finalist(job, one) for one in others)
    tight = (one for one in whole if one.is_tight)
    return [*safe, *islice(tight, wanted - len(safe))]


def safe_ones(job: Job, candidates: Iterable[Found]) -> list[Finalist]:
    """Those that a replay calls safe."""
    found = (_replayed(job, candidate) for candidate in candidates)
    return [one for one in found if isinstance(one, Finalist) and one.peaks.verdict == "fits"]


def _replayed(job: Job, found: Found) -> Finalist | Found:
    """One found strategy, replayed; as it was where the replay ended since it is tight or does not fit."""
    try:
        return finalist(job, found, only_safe=True)
    except UnsafeError:
        return found


def finalist(job: Job, found: Found, *, only_safe: bool = False) -> Finalist:
    """One found strategy, replayed; with ``only_safe`` UnsafeError may say that it is tight or does not fit."""
    census, ledger, overhead = single_ledger(job, found)
    return Finalist(found, census.grid, peaks_of(census, ledger, overhead, only_safe=only_safe))


def single_ledger(job: Job, found: Found) -> tuple[Census, Ledger, Overhead]:
    """The ledger of one found strategy alone, with all its pipeline stages."""
    overhead = overhead_of(job.gpu, found.grid, found.layout)
    census = Census(job.model, single_grid(found))
    return census, build_ledger(census, overhead.workspaces, detail=False), overhead


def single_grid(found: Found) -> Grid:
    """The grid of one found strategy alone, with all its pipeline stages."""
    grid, i = found.grid, found.index
    return Grid(
        grid.fixed,
        (grid.layouts[i[0]],),
        (grid.precisions[i[2]],),
        (grid.recomputes[i[3]],),
        (grid.zeros[i[4]],),
        (grid.offloads[i[5]],),
        (grid.micro_batches[i[6]],),
        every_stage=True,
    )
