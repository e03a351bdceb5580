"""Timed runs as jobs of the step-time model, and many of them as one grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import api, validation
from memcalc.terms import Census
from memcalc.timing.rates import hardware_of
from memcalc.timing.work import Work, work_of

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.specs.runs import Run
    from memcalc.timing.rates import Hardware

__all__ = ["Stack", "TimedJob", "along", "stacked", "timed_job"]


@dataclass(frozen=True)
class TimedJob:
    """One timed run as a grid of one strategy."""

    run: Run
    model: Model
    grid: Grid
    gpu: GPU
    node: Node

    @property
    def speed(self) -> float:
        """Throughput as published [tokens/s a GPU]."""
        return self.run.tokens_per_second_per_gpu or np.nan

    @property
    def measured(self) -> float:
        """The step [s]."""
        fixed = self.grid.fixed
        if self.run.tokens_per_second_per_gpu is None and self.run.seconds is not None:
            return self.run.seconds
        return fixed.global_batch * fixed.seq_len / self.run.gpus / self.speed

    @cached_property
    def work(self) -> Work:
        """What a step does."""
        return work_of(Census(self.model, self.grid), self.node)


def timed_job(run: Run, gpu: GPU, presets: validation.Presets) -> TimedJob:
    """A run on a GPU as a job."""
    words, settings = validation.job_of(run)
    one = api.single(model=validation.model_of(run, presets), gpu=gpu, settings=settings, **words)
    return TimedJob(run, one.job.model, one.grid, one.job.gpu, one.job.node)


@dataclass(frozen=True)
class Stack:
    """Jobs along the layout axis of one grid."""

    work: Work
    hardware: Hardware

    @classmethod
    def of(cls, jobs: Sequence[TimedJob]) -> Stack:
        """All jobs at once."""
        stages = max(job.grid.num_stages for job in jobs)
        hardware = [hardware_of(job.gpu, job.node, job.grid) for job in jobs]
        return cls(stacked([job.work for job in jobs], stages), stacked(hardware, 1))


def stacked(parts: Sequence[Any], stages: int) -> Any:
    """Records of arrays as one record whose arrays have the jobs along the layout axis."""
    if is_dataclass(parts[0]):
        made: Any = type(parts[0])
        return made(**{f.name: stacked([getattr(p, f.name) for p in parts], stages) for f in fields(parts[0])})
    arrays = [np.asarray(part, dtype=float) for part in parts]
    arrays = [array.reshape((1,) * 7) if array.ndim == 0 else array for array in arrays]
    wide = any(array.shape[1] > 1 for array in arrays)
    return np.concatenate([_padded(array, stages if wide else 1) for array in arrays])


def _padded(array: Array, stages: int) -> Array:
    """Stages that a job lacks do nothing."""
    if array.shape[1] in {1, stages}:
        return np.broadcast_to(array, (1, stages, 1, 1, 1, 1, 1))
    return np.pad(array, [(0, stages - array.shape[1]) if axis == 1 else (0, 0) for axis in range(7)])


def along(values: Iterable[float]) -> Array:
    """A column over jobs."""
    return np.asarray(list(values), dtype=float).reshape(-1, 1, 1, 1, 1, 1, 1)
