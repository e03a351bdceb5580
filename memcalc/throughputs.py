"""Measured throughput beside the predicted one, and how well the layouts of a sweep are put in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import log
from typing import TYPE_CHECKING

from memcalc.results.comparison import RunThroughput, SweepOrder

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
        sweep=run.sweep,
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
