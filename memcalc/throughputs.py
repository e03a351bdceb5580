"""Measured throughput beside the predicted one, and how well the layouts of a sweep are put in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import log
from typing import TYPE_CHECKING

from memcalc import catalog
from memcalc.results.comparison import RunThroughput, StepRange, SweepOrder

if TYPE_CHECKING:
    from memcalc.results.estimates import Estimate
    from memcalc.specs.runs import Run

APART = 0.03
"""Relative difference of two measured speeds from which on their order says something."""
LEAST = 3
"""Layouts of a sweep from which on their order says something."""


def throughput_of(run: Run, estimate: Estimate) -> RunThroughput | None:
    """The throughput of a run beside the predicted one; None where either is missing."""
    measured, time = run.tokens_per_second_per_gpu, estimate.time
    if measured is None or time is None or run.outcome != "fits":
        return None
    predicted = time.tokens_per_second_per_gpu
    low, high = predicted * time.step / time.high, predicted * time.step / time.low
    return RunThroughput(
        id=run.id,
        group=run.group,
        measured=measured,
        predicted=predicted,
        error=predicted / measured - 1,
        low=low,
        high=high,
        within=low <= measured <= high,
        validated=time.validated,
        sweep=run.sweep,
    )


def step_ranges() -> Iterator[StepRange]:
    """The ranges of a step beside their coverage of sources left out."""
    for row in catalog.step_time().span:
        yield StepRange(
            name=row.name,
            low=row.low,
            high=row.high,
            claim=row.coverage,
            crossed=row.crossed,
            by_source=row.by_source,
            runs=row.rows,
            sources=row.sources,
        )


def orders_of(runs: Sequence[RunThroughput]) -> Iterator[SweepOrder]:
    """How each sweep is put in order."""
    sweeps: dict[tuple[str, str], list[RunThroughput]] = {}
    for run in runs:
        if run.sweep:
            sweeps.setdefault((run.group, run.sweep), []).append(run)
    for (group, sweep), layouts in sorted(sweeps.items()):
        if len(layouts) < LEAST:
            continue
        pairs = [(a, b) for a, b in combinations(layouts, 2) if abs(log(a.measured / b.measured)) > APART]
        best, first = max(layouts, key=lambda run: run.measured), max(layouts, key=lambda run: run.predicted)
        yield SweepOrder(
            group=group,
            sweep=sweep,
            layouts=len(layouts),
            pairs=len(pairs),
            right=sum((a.measured > b.measured) == (a.predicted > b.predicted) for a, b in pairs),
            regret=1 - first.measured / best.measured,
            rank=1 + sum(run.predicted > best.predicted for run in layouts),
        )
