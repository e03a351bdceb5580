"""From rows to jobs: what each needs of the GPU and of the clock, and what is left out and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memcalc.errors import MemcalcError
from memcalc.formulas.census import model_count
from memcalc.probe.measure.facts import Facts
from memcalc.probe.measure.jobs import Job
from memcalc.probe.measure.machine import machine_jobs
from memcalc.probe.measure.shapes import config_of
from memcalc.probe.measure.suite import TELLING, Row, rows_of
from memcalc.specs.flat import from_flat
from memcalc.specs.runs import Run
from memcalc.units import GIB
from memcalc.validation import predict

if TYPE_CHECKING:
    from memcalc.results import Estimate
    from memcalc.specs.hardware import GPU

__all__ = ["CPU_GPU", "Planned", "Target", "plan_jobs", "unmeasured"]

CPU_GPU = "a100-80g"
"""Whose preset stands in the runs of a CPU where none is named: what is allocated does not depend on it."""
_START_S = 15.0
"""Start of a process, imports, random weights [s]."""
_CPU_STEP_S = 12.0
_LARGEST = 1024
"""Blocks or sequences to which a row grows."""
_REACHED = 0.35
"""Of the peak rate, for rough needs of time alone."""
_STEPS_S, _FEWEST, _MOST = 2.0, 5, 12
"""As :mod:`memcalc.probe.live.steps` trains: at least and at most so many steps, and about so long [s]."""


@dataclass(frozen=True)
class Target:
    """What the jobs run on."""

    device: str
    gpu: GPU
    facts: Facts

    @property
    def capacity(self) -> int:
        """Of the GPU [bytes]."""
        return self.facts.memory or self.gpu.memory_bytes

    @property
    def free(self) -> int:
        """What other processes leave of it [bytes]."""
        return self.capacity - self.facts.used


@dataclass(frozen=True)
class Planned:
    """A job, what is expected of it, and why it does not run, if it does not."""

    job: Job
    run: Run | None = None
    """A training run without its figures; none for a measurement of the machine."""
    estimate: Estimate | None = None
    skip: str = ""
    meant_to_fail: bool = False
    """It shall run out of memory."""


def plan_jobs(suite: str, target: Target, ranks: int) -> list[Planned]:
    """Return the jobs of a suite in their order: the machine, the most telling steps, its rates, all other steps."""
    steps = [planned for row in rows_of(suite, target.device) for planned in _of_row(row, target)]
    first = len(TELLING) if target.device == "cuda" else 0
    machine = [] if suite == "steps" else list(_machine(target, ranks))
    context = [planned for planned in machine if planned.job.kind == "machine"]
    rest = [planned for planned in machine if planned.job.kind != "machine"]
    return [*context, *steps[:first], *rest, *steps[first:]]


def unmeasured(job: Job, target: Target) -> Run:
    """Return the run of a job without its figures."""
    stated = job.settings["run"]
    other = target.device == "cuda" and target.capacity != target.gpu.memory_bytes
    return Run.model_validate(
        {
            **stated,
            "strategy": {**stated["strategy"], **_surroundings(target)},
            "id": job.id,
            "source": "memcalc probe",
            "grade": "A" if target.device == "cuda" else "B",
            "gpu": target.gpu.name,
            "gpus": job.ranks,
            "gpu_memory": target.capacity if other else None,
        }
    )


def _surroundings(target: Target) -> dict[str, Any]:
    """Return what the environment makes of every strategy: its allocator and workspaces; a CPU has no workspaces."""
    from memcalc.convert.environment import workspace_bytes

    if target.device == "cpu":
        return {"blas_workspace": 0}
    settings = target.facts.settings
    allocator = ",".join(settings.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    workspace = workspace_bytes(settings.get("CUBLAS_WORKSPACE_CONFIG", ""))
    expandable = "expandable_segments:true" in allocator.lower().replace(" ", "")
    return ({"expandable_segments": True} if expandable else {}) | (
        {} if workspace is None else {"blas_workspace": workspace}
    )


def _machine(target: Target, ranks: int) -> Iterator[Planned]:
    """Yield the measurements of the machine; a CPU's rates and overheads say nothing of a GPU."""
    for job in machine_jobs(target.device, ranks):
        if "run" in job.settings:
            yield _predicted(job, target)
        elif target.device == "cuda":
            short = job.memory > target.free
            yield Planned(job, skip=_too_large(job.memory, target) if short else "")


# -------------------------------------------------------------------------------------------------------------- rows


def _of_row(row: Row, target: Target) -> Iterator[Planned]:
    """Yield the job of a row, grown to the GPU where the row says so."""
    job = _job(row, config_of(row.model), target)
    if not row.grows:
        yield _predicted(job, target, row)
        return
    try:
        yield _predicted(_grown(row, target), target, row)
    except MemcalcError as error:
        yield Planned(job, skip=str(error))


def _predicted(job: Job, target: Target, row: Row | None = None) -> Planned:
    """Return a job with its prediction, its needs, and why it is left out."""
    run = unmeasured(job, target)
    try:
        estimate = predict(run)
    except MemcalcError as error:
        return Planned(job, run, skip=str(error))
    on_gpu, fails = target.device == "cuda", row is not None and row.meant_to_fail
    job = replace(job, memory=estimate.peak.device if on_gpu else 0, seconds=job.seconds or _seconds(run, target))
    skip = ""
    if row is not None and row.lora and target.facts.torch and not target.facts.peft:
        skip = "needs peft: pip install peft"
    elif on_gpu and job.memory > target.free and not fails:
        skip = _too_large(job.memory, target)
    return Planned(job, run, estimate, skip, fails)


def _job(row: Row, config: dict[str, Any], target: Target) -> Job:
    from memcalc.convert.huggingface import flat_table

    run = {
        "model": flat_table(config),
        "workload": row.workload(),
        "strategy": row.strategy(target.facts.framework),
        "group": row.group if target.device == "cuda" else "cpu steps",
    }
    return Job("step", row.id, {"config": config, "run": run})


def _grown(row: Row, target: Target) -> Job:
    """Return the largest job that stays below the wanted share of the capacity, or the smallest above it."""
    wanted = row.fill * target.capacity

    def fits(number: int) -> bool:
        return predict(unmeasured(_sized(row, number, target), target)).peak.device <= wanted

    most = 1
    while most < _LARGEST and fits(2 * most):
        most *= 2
    step = most // 2
    while step:
        most += step * fits(most + step)
        step //= 2
    return _sized(row, most + row.meant_to_fail, target)


def _sized(row: Row, number: int, target: Target) -> Job:
    """Return the job of a row with so many blocks, or so many sequences a micro-batch."""
    if row.grows == "layers":
        job = _job(row, config_of(row.model, number), target)
    else:
        job = _job(replace(row, micro_batch=number), config_of(row.model), target)
    return replace(job, id=row.id)


def _seconds(run: Run, target: Target) -> float:
    """Return a rough need of time [s]: six operations a parameter and token, eight with recomputation."""
    if target.device == "cpu":
        return _CPU_STEP_S
    model = from_flat(run.model) if isinstance(run.model, dict) else None
    parameters = model_count(model).active if model else 0
    passes = 8 if run.strategy["recompute"] != "none" else 6
    tokens = run.workload["seq_len"] * run.workload["global_batch"] // run.gpus
    peaks = target.gpu.peak_flops
    rate = peaks.get("fp32" if run.strategy["precision"] == "fp32" else "bf16", peaks.get("fp16", 1e13))
    step = float(passes * parameters * tokens / (_REACHED * rate))
    return _START_S + step * min(_MOST, max(_FEWEST, 2 + _STEPS_S / step))


def _too_large(memory: int, target: Target) -> str:
    """Say that a job needs more than there is."""
    beside = f" (others hold {target.facts.used / GIB:.1f})" if target.facts.used else ""
    return f"needs {memory / GIB:.1f} GiB of {target.capacity / GIB:.1f}{beside}"
