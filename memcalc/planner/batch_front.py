"""The front in three axes where the global batch is searched: memory, throughput, statistical efficiency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.errors import MemcalcError
from memcalc.planner import axes
from memcalc.planner.choice import Choice, simplest
from memcalc.planner.search import Wanted
from memcalc.planner.shortlist import shortlists

if TYPE_CHECKING:
    from memcalc.planner.finalists import SimulatedPlan
    from memcalc.planner.job import PlanJob
    from memcalc.planner.ranking import Objective


def with_batches(job: PlanJob, gpus: int, rows: list[Choice], goal: Objective, most: int) -> list[Choice]:
    """The rows, and the plan of each other global batch that none of them beats in all three axes."""
    if goal.critical_batch is None or "global_batch" not in job.request.choices or not rows:
        return rows
    listed = list(rows)
    for plan in _of_each_batch(job, gpus, goal):
        figures = _figures(plan)
        beaten = any(all(a <= b for a, b in zip(_figures(row.plan), figures, strict=True)) for row in listed)
        if not beaten:
            listed.append(
                Choice(plan, ("larger batch" if figures[2] > _figures(rows[0].plan)[2] else "smaller batch",))
            )
    return [*listed[:1], *listed[len(rows) :], *listed[1 : len(rows)]][:most]


def _of_each_batch(job: PlanJob, gpus: int, goal: Objective) -> Iterator[SimulatedPlan]:
    for batch in axes.batches(job.request, job.model, gpus):
        try:
            short = shortlists(job.pinned(global_batch=batch), [gpus], Wanted(goal)).get(gpus)
        except MemcalcError:
            continue  # no layout divides it
        plan = simplest(short) if short else None
        if plan is not None:
            yield plan


def _figures(plan: SimulatedPlan) -> tuple[float, float, float]:
    """Bytes, the negative throughput, and the batch, which waste grows with: less is better in each."""
    candidate = plan.candidate
    return plan.peaks.top.device, -candidate.tokens_per_second_per_gpu, candidate.grid.fixed.global_batch
