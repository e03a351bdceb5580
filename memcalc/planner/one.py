"""A job of one strategy: every default resolved and checked first, then its figures and its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.planner import answer, axes
from memcalc.planner.job import Job
from memcalc.planner.timed import time_of
from memcalc.terms import overhead_of

if TYPE_CHECKING:
    from memcalc import results
    from memcalc.grid import Grid

__all__ = ["One"]


@dataclass(frozen=True)
class One:
    """One strategy of a job, as the grid whose axes have length one."""

    job: Job
    grid: Grid
    command: str
    """The line that reproduces its estimate."""

    @classmethod
    def of(cls, job: Job, command: str) -> One:
        """The one strategy of a job.

        Raises :class:`memcalc.errors.CombinationError` where it is impossible.
        """
        return cls(job, axes.one_strategy(job.request, job.model, job.gpu, job.node), command)

    def estimate(self, *, timeline: bool = False) -> results.Estimate:
        """The answer of ``memcalc estimate``; with ``timeline`` also one step, allocation by allocation."""
        job, grid = self.job, self.grid
        overhead = overhead_of(job.gpu, grid, grid.layouts[0])
        return answer.estimate_of(
            job.model, grid, job.gpu, job.node, overhead, job.request, self.command, timeline=timeline
        )

    def time(self) -> results.StepTime:
        """The predicted step, also of a strategy that does not fit."""
        return time_of(self.job.model, self.grid, self.job.gpu, self.job.node)
