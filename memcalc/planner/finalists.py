"""The best strategies of a search, replayed: what the allocator reserves decides which of them run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.grid import Grid
from memcalc.planner.answer import strategy_of
from memcalc.planner.peaks import Peaks, peaks_of
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
    tight: list[Finalist] = []
    for found in candidates if wanted else ():
        one = finalist(job, found)
        if one.peaks.verdict != "does-not-fit":
            (tight if one.is_tight else safe).append(one)
        if len(safe) == wanted:
            break
    return [*safe, *tight][:wanted]


def finalist(job: Job, found: Found) -> Finalist:
    """One found strategy, replayed."""
    census, ledger, overhead = single_ledger(job, found)
    return Finalist(found, census.grid, peaks_of(census, ledger, overhead))


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
