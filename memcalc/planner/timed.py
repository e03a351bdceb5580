"""The time of one strategy as a result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from memcalc import results
from memcalc.terms import Census
from memcalc.timing import rates_for, step_times
from memcalc.timing.forecast import forecast

if TYPE_CHECKING:
    from memcalc.grid import Grid
    from memcalc.planner.job import Job
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model


def step_time(job: Job, single: Grid, parts: Mapping[str, float]) -> results.StepTime:
    """The step of a grid of one strategy, by its parts [s], with what is said of it."""
    return _said(Census(job.model, single), job.gpu, job.node, parts)


def time_of(model: Model, single: Grid, gpu: GPU, node: Node) -> results.StepTime:
    """The step of a grid of one strategy, predicted."""
    census = Census(model, single)
    times = step_times(census, gpu, node, rates_for(gpu, single))
    return _said(census, gpu, node, {name: float(np.max(getattr(times, name))) for name in times.PARTS})


def _said(census: Census, gpu: GPU, node: Node, parts: Mapping[str, float]) -> results.StepTime:
    step = sum(parts.values())
    return results.StepTime(step=step, **parts, **asdict(forecast(census, gpu, node, step)))


def unvalidated(times: Mapping[str, results.StepTime]) -> list[str]:
    """Which times no published run validates, and why, by the names of their plans."""
    found: dict[str, list[str]] = {}
    for name, time in times.items():
        if not time.validated:
            low, high = time.low / time.step, time.high / time.step
            said = f"{time.basis}; a step may take {low:.1f} to {high:.1f} times as long"
            found.setdefault(said, []).append(name)
    return [f"times of {_listed(names)} are {said}." for said, names in found.items()]


def _listed(names: list[str]) -> str:
    return ", ".join(names)
