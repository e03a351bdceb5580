"""From rows to jobs: what each needs of the GPU and of the clock, and what is left out and why.

The jobs of a probe that are no training steps on one GPU: the machine itself, and what several ranks do together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memcalc.errors import MemcalcError
from memcalc.probe.measure.process import START_S, ProbeJob
from memcalc.probe.measure.suite import SHARDED, TELLING, Row, config_of, rows_of
from memcalc.specs.flat import from_flat
from memcalc.specs.runs import Run
from memcalc.terms.parameters import model_count
from memcalc.units import GIB
from memcalc.validation import predict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.probe.measure.environment import Environment
    from memcalc.results.estimates import Estimate
    from memcalc.specs.hardware import GPU


CPU_GPU = "a100-80g"
"""The GPU preset of a CPU's runs where none is named: what is allocated does not depend on it."""
_CPU_STEP_S = 12.0
_LARGEST = 1024
"""Blocks or sequences to which a row grows."""
_REACHED = 0.35
"""Share of the peak rate, only for rough needs of time."""
_STEPS_S, _FEWEST, _MOST = 2.0, 5, 12
"""As :mod:`memcalc.probe.live.steps` trains: at least and at most so many steps, and about so long [s]."""


@dataclass(frozen=True)
class Target:
    """What the jobs run on."""

    device: str
    gpu: GPU
    environment: Environment

    @property
    def capacity(self) -> int:
        """Of the GPU [bytes]."""
        return self.environment.memory or self.gpu.memory_bytes

    @property
    def free(self) -> int:
        """What other processes leave of it [bytes]."""
        return self.capacity - self.environment.used


@dataclass(frozen=True)
class Planned:
    """A job, what is expected of it, and why it does not run, if it does not."""

    job: ProbeJob
    run: Run | None = None
    """A training run without its figures; none for a measurement of the machine."""
    estimate: Estimate | None = None
    skip: str = ""
    meant_to_fail: bool = False
    """It shall run out of memory."""


def plan_jobs(suite: str, target: Target, ranks: int) -> list[Planned]:
    """Return the jobs of a suite in their order: the machine, the most telling steps, its rates, all other steps."""
    steps = [planned for row in rows_of(suite, target.device, target.gpu) for planned in _planned_row(row, target)]
    first = len(TELLING) if target.device == "cuda" else 0
    machine = [] if suite == "steps" else list(_machine(target, ranks))
    context = [planned for planned in machine if planned.job.kind == "machine"]
    others = [planned for planned in machine if planned.job.kind != "machine"]
    return [*context, *steps[:first], *others, *steps[first:]]


def run_without_figures(job: ProbeJob, target: Target) -> Run:
    """Return the run of a job without its figures."""
    stated = job.settings["run"]
    other = target.device == "cuda" and target.capacity != target.gpu.memory_bytes
    return Run.model_validate(
        {
            **stated,
            "strategy": {**stated["strategy"], **_environment_fields(target)},
            "id": job.id,
            "source": "memcalc probe",
            "grade": "A" if target.device == "cuda" else "B",
            "gpu": target.gpu.name,
            "gpus": job.ranks,
            "gpu_memory": target.capacity if other else None,
        }
    )


def _environment_fields(target: Target) -> dict[str, Any]:
    """Return the strategy's fields that the environment sets: allocator and workspaces; a CPU has no workspaces."""
    from memcalc.frameworks.environment import workspace_bytes

    if target.device == "cpu":
        return {"blas_workspace": 0}
    settings = target.environment.settings
    allocator = ",".join(settings.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    workspace = workspace_bytes(settings.get("CUBLAS_WORKSPACE_CONFIG", ""))
    expandable = "expandable_segments:true" in allocator.lower().replace(" ", "")
    return ({"expandable_segments": True} if expandable else {}) | (
        {} if workspace is None else {"blas_workspace": workspace}
    )


def _machine(target: Target, ranks: int) -> Iterator[Planned]:
    """Yield the measurements of the machine; a CPU's rates and overheads are left out."""
    for job in machine_jobs(target.device, ranks):
        if "run" in job.settings:
            yield _predicted(job, target)
        elif target.device == "cuda":
            short = job.memory > target.free
            yield Planned(job, skip=_too_large(job.memory, target) if short else "")


# -------------------------------------------------------------------------------------------------------------- rows


def _planned_row(row: Row, target: Target) -> Iterator[Planned]:
    """Yield the job of a row, with blocks or micro-batch chosen to fill the GPU where the row has `grows`."""
    job = _job(row, config_of(row.model), target)
    if not row.grows:
        yield _predicted(job, target, row)
        return
    try:
        yield _predicted(_filling_gpu(row, target), target, row)
    except MemcalcError as error:
        yield Planned(job, skip=str(error))


def _predicted(job: ProbeJob, target: Target, row: Row | None = None) -> Planned:
    """Return a job with its prediction, its needs, and why it is left out."""
    run = run_without_figures(job, target)
    try:
        estimate = predict(run)
    except MemcalcError as error:
        return Planned(job, run, skip=str(error))
    on_gpu, fails = target.device == "cuda", row is not None and row.meant_to_fail
    job = replace(job, memory=estimate.peak.device if on_gpu else 0, seconds=job.seconds or _seconds(run, target))
    skip = ""
    if row is not None and row.lora and target.environment.torch and not target.environment.peft:
        skip = "needs peft: pip install peft"
    elif on_gpu and job.memory > target.free and not fails:
        skip = _too_large(job.memory, target)
    return Planned(job, run, estimate, skip, fails)


def _job(row: Row, config: dict[str, Any], target: Target) -> ProbeJob:
    from memcalc.convert.huggingface import flat_table

    run = {
        "model": flat_table(config),
        "workload": row.workload(),
        "strategy": row.strategy(target.environment.framework),
        "group": row.group if target.device == "cuda" else "cpu steps",
    }
    return ProbeJob("step", row.id, {"config": config, "run": run})


def _filling_gpu(row: Row, target: Target) -> ProbeJob:
    """Return the largest job that stays below the wanted share of the capacity, or the smallest above it."""
    budget = row.fill * target.capacity

    def fits(number: int) -> bool:
        return predict(run_without_figures(_sized(row, number, target), target)).peak.device <= budget

    count = 1
    while count < _LARGEST and fits(2 * count):
        count *= 2
    step = count // 2
    while step:
        count += step * fits(count + step)
        step //= 2
    return _sized(row, count + row.meant_to_fail, target)


def _sized(row: Row, number: int, target: Target) -> ProbeJob:
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
    return START_S + step * min(_MOST, max(_FEWEST, 2 + _STEPS_S / step))


def _too_large(memory: int, target: Target) -> str:
    """Describe a job's need and the memory that there is."""
    others = f" (others hold {target.environment.used / GIB:.1f})" if target.environment.used else ""
    return f"needs {memory / GIB:.1f} GiB of {target.capacity / GIB:.1f}{others}"


RATES_S = 45.0
"""Time in which rates are measured [s]."""


@dataclass(frozen=True)
class ShardedRow:
    """One training step on several ranks."""

    model: str
    """A name of :data:`memcalc.probe.measure.suite.SHAPES`."""
    framework: str
    zero: int
    precision: str
    recompute: str
    optimizer_impl: str
    micro_batch: int
    seq_len: int

    def job(self, device: str, ranks: int) -> ProbeJob:
        """Return the job of the row; `ranks` is the number of GPUs."""
        from memcalc.convert.huggingface import flat_table

        config = config_of(self.model)
        run = {
            "model": flat_table(config),
            "gpus": ranks,
            "workload": {
                "seq_len": self.seq_len,
                "micro_batch": self.micro_batch,
                "global_batch": self.micro_batch * ranks,
            },
            "strategy": self.strategy(device),
            "group": f"probe {self.framework}" if device == "cuda" else "cpu steps",
        }
        return ProbeJob("sharded", self.id(ranks), {"config": config, "run": run}, ranks)

    def id(self, ranks: int) -> str:
        """The row in words.

        >>> CPU[0].id(2)
        'tiny-llama/fsdp2-3/bf16-mixed/full/foreach/2x128/2-ranks'
        """
        parts = (self.model, f"{self.framework}-{self.zero}", self.precision, self.recompute, self.optimizer_impl)
        return "/".join((*parts, f"{self.micro_batch}x{self.seq_len}", f"{ranks}-ranks"))

    def strategy(self, device: str) -> dict[str, Any]:
        """Return the strategy of a run; checkpoints are those that are not reentrant."""
        fields: dict[str, Any] = {
            "framework": self.framework,
            "zero": self.zero,
            "precision": self.precision,
            "recompute": self.recompute,
            "attention": "flash" if device == "cuda" else "eager",
            "optimizer": "adamw",
            "optimizer_impl": self.optimizer_impl,
            "kernels": "model",
        }
        fields |= {"checkpoint": "non-reentrant"} if self.recompute != "none" else {}
        fields |= {"reduce_dtype": "fp32"} if self.framework == "fsdp2" else {}
        return fields | ({"blas_workspace": 0} if device == "cpu" else {})


CUDA, CPU = (tuple(ShardedRow(*values) for values in SHARDED[device]) for device in ("cuda", "cpu"))


def machine_jobs(device: str, gpus: int) -> list[ProbeJob]:
    """Return them in their order; those of several ranks only where there are several GPUs.

    >>> [job.kind for job in machine_jobs("cuda", 1)]
    ['machine', 'rates']
    """
    return [*_single_process_jobs(device), *(_collective_jobs(device, gpus) if gpus > 1 else ())]


def _single_process_jobs(device: str) -> Iterator[ProbeJob]:
    """Yield what one process measures; the needs of memory are those of the largest operands."""
    on_gpu = device == "cuda"
    yield ProbeJob("machine", "machine", {}, seconds=START_S + 10, memory=2 * GIB if on_gpu else 0)
    yield ProbeJob("rates", "rates", {"seconds": RATES_S}, seconds=START_S + RATES_S, memory=6 * GIB if on_gpu else 0)


def _collective_jobs(device: str, ranks: int) -> Iterator[ProbeJob]:
    memory = 4 * GIB if device == "cuda" else 0
    yield ProbeJob("collectives", f"collectives/{ranks}-ranks", {}, ranks, seconds=START_S + 30, memory=memory)
    for row in CUDA if device == "cuda" else CPU:
        yield row.job(device, ranks)
