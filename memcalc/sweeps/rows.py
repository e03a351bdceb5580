"""One job, one row: what its columns are, and how an answer or an error fills them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from memcalc import __version__, api
from memcalc.errors import CombinationError, MemcalcError
from memcalc.planner.request import batch_of, check_words
from memcalc.specs.sweep import SETTING, Mode
from memcalc.sweeps.space import PRESETS

if TYPE_CHECKING:
    from memcalc.results import Estimate, Plans
    from memcalc.specs.strategy import Strategy
    from memcalc.sweeps.space import Job

__all__ = ["COLUMNS", "STATUSES", "Column", "Kind", "Row", "Task", "columns_of", "error_row", "rows_of"]

Kind = Literal["text", "whole", "number", "flag"]
Row = list[Any]
"""The values of one job in the order of the columns; None where there is none."""
STATUSES = ("fits", "tight", "does-not-fit", "error")


@dataclass(frozen=True)
class Column:
    """A name that carries its unit, what its values are, and what it says."""

    name: str
    kind: Kind
    says: str


def _several(kind: Kind, says: str, names: str) -> list[Column]:
    return [Column(name, kind, says) for name in names.split()]


COLUMNS: tuple[Column, ...] = (
    Column("job", "whole", "number of the job, from 1, in the order of the product"),
    Column("status", "text", "fits, tight, does-not-fit (then with a reason) or error (then with the sentence)"),
    Column("reason", "text", "why it does not fit, and the smallest change that would; or what is wrong with the job"),
    Column("asked", "text", "the words that differ between the jobs, as they were written"),
    *_several("text", "the job, as it was written", "model gpu"),
    Column("gpus", "whole", "the job"),
    Column("node", "text", "the job, or the usual one"),
    *_several("whole", "the job; sequences are counted", "seq_len global_batch"),
    *_several("text", "the strategy", "framework precision optimizer optimizer_impl"),
    Column("optimizer_in_backward", "flag", "the strategy"),
    *_several("whole", "the strategy", "zero dp tp"),
    Column("sp", "flag", "the strategy"),
    Column("pp", "whole", "the strategy"),
    Column("pp_schedule", "text", "the strategy"),
    *_several("whole", "the strategy", "vpp cp"),
    Column("cp_kind", "text", "the strategy"),
    Column("ep", "whole", "the strategy"),
    *_several("text", "the strategy", "recompute offload offload_to attention loss kernels compile"),
    *_several("text", "the strategy", "lora adapter_dtype also_train quantize"),
    Column("autocast", "flag", "the strategy"),
    *_several("whole", "the strategy", "micro_batch accumulation_steps"),
    *_several("whole", "parameters of the model", "parameters active_parameters"),
    *_several("whole", "the peak of the fullest stage, as each is read", "allocated_bytes reserved_bytes device_bytes"),
    Column("peak_phase", "text", "where the peak stands"),
    Column("peak_stage", "whole", "where the peak stands"),
    *_several("whole", "the range of `device_bytes`; estimate only", "device_low_bytes device_high_bytes"),
    Column("capacity_bytes", "whole", "what the GPU has"),
    Column("host_memory_bytes", "whole", "host memory that a node needs"),
    Column("tier_memory_bytes", "whole", "NVMe or CXL memory that a node needs"),
    *_several("number", "a step's time; plan only", "step_s"),
    *_several("number", "speed; plan only", "tokens_per_second_per_gpu mfu"),
    *_several("number", "parts of a step; plan only", "compute_s recompute_s communication_s offload_s bubble_s"),
    *_several("whole", "strategies of the search; plan only", "searched feasible"),
    Column("warnings", "text", "what the answer does not know"),
    Column("command", "text", "the estimate that explains the row; where nothing fits, the plan that was asked for"),
)
"""The same for both modes and every sweep; fields below `set` follow, under their own names."""


def columns_of(settings: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns of a sweep that names these fields without an option."""
    return (*COLUMNS, *(Column(name, "text", "a field without an option") for name in settings))


@dataclass(frozen=True)
class Task:
    """Some jobs for one worker."""

    mode: Mode
    preset_dirs: tuple[str, ...]
    columns: tuple[str, ...]
    jobs: tuple[Job, ...]
    version: str = __version__


def rows_of(task: Task) -> tuple[float, list[Row]]:
    """Return the seconds that the jobs took, and a row for each; it runs in a worker."""
    if task.version != __version__:
        raise CombinationError(
            "scheduler", __version__, f"its workers must have memcalc {task.version}, as this process has"
        )
    started = time.perf_counter()
    rows = [_row(task, job) for job in task.jobs]
    return time.perf_counter() - started, rows


def error_row(task: Task, job: Job, sentence: str) -> Row:
    """Return the row of a job that has no answer."""
    return _arranged(task, job, {**_asked(job), "status": "error", "reason": sentence})


def _row(task: Task, job: Job) -> Row:
    try:
        values = (_planned if task.mode == "plan" else _estimated)(task, job)
    except MemcalcError as error:
        return error_row(task, job, " ".join(str(error).split()))
    except Exception as error:  # noqa: BLE001 - one job that the program cannot answer must not end the other million
        return error_row(task, job, " ".join(f"unexpected {type(error).__name__}: {error}".split()))
    return _arranged(task, job, {**_asked(job), **values, **job.presets})


def _arranged(task: Task, job: Job, values: Mapping[str, Any]) -> Row:
    named = {"job": job.place + 1, "asked": job.asked, "reason": "", "warnings": "", "command": "", **values}
    return [named.get(name) for name in task.columns]


def _asked(job: Job) -> dict[str, Any]:
    """Return the words of a job as columns; what the answer resolves replaces them."""
    request = check_words({name: value for name, value in job.words.items() if name not in PRESETS}, job.settings)
    columns: dict[str, Any] = {f"{SETTING}{name}": str(value) for name, value in job.settings.items()}
    columns |= job.presets
    columns |= {name: _cell(value) for name, value in request.given.items() if name not in {"fields", "global_batch"}}
    # a number of tokens is sequences only where their length is known
    with contextlib.suppress(MemcalcError):
        in_tokens = "token" in str(request.given.get("global_batch"))
        if "global_batch" in request.given and ("seq_len" in request.given or not in_tokens):
            columns["global_batch"] = batch_of(request, request.given.get("seq_len", 1))
    return columns


def _cell(value: object) -> Any:
    """Return a value of a strategy as a cell holds it: lists with commas, as they are typed."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return value if isinstance(value, bool | int | float) else str(value)


def _planned(task: Task, job: Job) -> dict[str, Any]:
    found = api.plan(**job.words, settings=job.settings, preset_dirs=task.preset_dirs, top=1)  # type: ignore[arg-type]
    facts = {
        **_facts(found),
        "gpus": found.hardware.gpus,
        "seq_len": found.seq_len,
        "capacity_bytes": found.capacity,
        "searched": found.searched,
        "feasible": found.feasible,
    }
    if not found.plans:
        changes = [f"nearest: {change.change}" for change in found.nearest[:1]]
        reason = "; ".join([found.too_large.rstrip("."), *changes])
        return {**facts, "status": "does-not-fit", "reason": reason, "command": found.command}
    best = found.plans[0]
    return {
        **facts,
        **_strategy(best.strategy),
        "status": best.verdict,
        "gpus": best.gpus,
        "global_batch": best.global_batch,
        "accumulation_steps": best.accumulation_steps,
        **_peak(best.peak),
        "host_memory_bytes": best.host_memory,
        "tier_memory_bytes": best.tier_memory,
        "step_s": best.time.step,
        "tokens_per_second_per_gpu": best.time.tokens_per_second_per_gpu,
        "mfu": best.time.mfu,
        **{
            f"{name}_s": getattr(best.time, name)
            for name in ("compute", "recompute", "communication", "offload", "bubble")
        },
        "command": best.command,
    }


def _estimated(task: Task, job: Job) -> dict[str, Any]:
    found = api.estimate(**job.words, settings=job.settings, preset_dirs=task.preset_dirs)  # type: ignore[arg-type]
    too_large = f"needs {found.peak.device:,} bytes a GPU of {found.budget.capacity:,}"
    return {
        **_facts(found),
        **_strategy(found.strategy),
        "status": found.verdict,
        "reason": too_large if found.verdict == "does-not-fit" else "",
        "gpus": found.hardware.gpus,
        "seq_len": found.workload.seq_len,
        "global_batch": found.workload.global_batch,
        "accumulation_steps": found.workload.accumulation_steps,
        **_peak(found.peak),
        "device_low_bytes": found.interval.low,
        "device_high_bytes": found.interval.high,
        "capacity_bytes": found.budget.capacity,
        "host_memory_bytes": found.host_memory,
        "tier_memory_bytes": found.tier_memory,
        "command": found.command,
    }


def _facts(found: Plans | Estimate) -> dict[str, Any]:
    """Return what both answers say of model and hardware."""
    return {
        "node": found.hardware.node,
        "parameters": found.model.parameters,
        "active_parameters": found.model.active_parameters,
        "warnings": " ".join(found.warnings),
    }


def _strategy(strategy: Strategy) -> dict[str, Any]:
    return {name: _cell(value) for name, value in strategy if value is not None}


def _peak(peak: Any) -> dict[str, Any]:
    return {
        "allocated_bytes": peak.allocated,
        "reserved_bytes": peak.reserved,
        "device_bytes": peak.device,
        "peak_phase": peak.phase,
        "peak_stage": peak.stage,
    }
