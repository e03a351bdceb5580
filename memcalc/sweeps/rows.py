"""The row of a job, filled from an answer or an error; and the table as a file, row by row for a million rows."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from memcalc import api
from memcalc._version import __version__
from memcalc.errors import CombinationError, MemcalcError, UnknownNameError
from memcalc.files import OutputError, output_path, plain_cell, replacing
from memcalc.planner.job import value_text
from memcalc.planner.request import batch_of, check_words, in_tokens
from memcalc.specs.job import SETTING, Mode
from memcalc.sweeps.space import PRESETS
from memcalc.units import GIB

if TYPE_CHECKING:
    from pyarrow import DataType

    from memcalc.results.estimates import Estimate
    from memcalc.results.plans import Plan, Plans
    from memcalc.specs.strategy import Strategy
    from memcalc.sweeps.space import SweepJob

Kind = Literal["text", "whole", "number", "flag"]
Row = list[Any]
"""The values of one job in the order of the columns; None where there is none."""
_SECONDS = ("step", "compute", "host", "recompute", "communication", "offload", "bubble")
STATUSES = ("fits", "tight", "does-not-fit", "error")


@dataclass(frozen=True)
class Column:
    """A name that carries its unit, and what its values are; docs/cli.md has the meaning of each."""

    name: str
    kind: Kind


_BY_KIND: tuple[tuple[Kind, str], ...] = (
    ("whole", "job"),
    ("text", "status reason asked model gpu"),
    ("whole", "gpus"),
    ("text", "node"),
    ("whole", "seq_len global_batch"),
    ("text", "framework precision optimizer optimizer_impl"),
    ("flag", "optimizer_in_backward"),
    ("whole", "zero dp tp"),
    ("flag", "sp"),
    ("whole", "pp"),
    ("text", "pp_schedule"),
    ("whole", "vpp cp"),
    ("text", "cp_kind"),
    ("whole", "ep dp_replicate"),
    ("text", "recompute offload offload_to attention loss kernels compile lora adapter_dtype also_train quantize"),
    ("flag", "autocast"),
    ("whole", "micro_batch accumulation_steps parameters active_parameters"),
    ("whole", "allocated_bytes reserved_bytes device_bytes"),
    ("text", "peak_phase"),
    ("whole", "peak_stage device_low_bytes device_high_bytes capacity_bytes host_memory_bytes tier_memory_bytes"),
    ("number", "step_s tokens_per_second_per_gpu mfu compute_s host_s recompute_s communication_s offload_s bubble_s"),
    ("whole", "searched feasible"),
    ("text", "warnings command"),
)
COLUMNS = tuple(Column(name, kind) for kind, names in _BY_KIND for name in names.split())
"""The same for both modes and every sweep; fields below `set` follow, under their own names."""


def columns_of(settings: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns of a sweep that names these fields without an option."""
    return (*COLUMNS, *(Column(name, "text") for name in settings))


@dataclass(frozen=True)
class Task:
    """Some jobs for one worker."""

    mode: Mode
    preset_dirs: tuple[str, ...]
    columns: tuple[str, ...]
    jobs: tuple[SweepJob, ...]
    version: str = __version__


def rows_of(task: Task) -> tuple[float, list[Row]]:
    """Return the seconds that the jobs took, and a row for each; it runs in a worker."""
    if task.version != __version__:
        raise CombinationError(
            "scheduler", __version__, f"its workers must have memcalc {task.version}, as this process has"
        )
    started = time.perf_counter()
    rows = [_answered_row(task, job) for job in task.jobs]
    return time.perf_counter() - started, rows


def error_row(task: Task, job: SweepJob, sentence: str) -> Row:
    """Return the row of a job that has no answer."""
    return _row_of(task, job, {**_given_columns(job), "status": "error", "reason": sentence})


def _answered_row(task: Task, job: SweepJob) -> Row:
    try:
        values = (_plan_columns if task.mode == "plan" else _estimate_columns)(task, job)
    except MemcalcError as error:
        return error_row(task, job, " ".join(str(error).split()))
    except Exception as error:  # noqa: BLE001 - one job that the program cannot answer must not end the other million
        return error_row(task, job, " ".join(f"unexpected {type(error).__name__}: {error}".split()))
    return _row_of(task, job, {**_given_columns(job), **values, **job.presets})


def _row_of(task: Task, job: SweepJob, values: Mapping[str, Any]) -> Row:
    named = {"job": job.index + 1, "asked": job.varied, "reason": "", "warnings": "", "command": "", **values}
    return [named.get(name) for name in task.columns]


def _given_columns(job: SweepJob) -> dict[str, Any]:
    request = check_words({name: value for name, value in job.options.items() if name not in PRESETS}, job.settings)
    columns: dict[str, Any] = {f"{SETTING}{name}": str(value) for name, value in job.settings.items()}
    columns |= job.presets
    columns |= {name: _cell(value) for name, value in request.given.items() if name not in {"fields", "global_batch"}}
    # a number of tokens is sequences only where their length is known
    with contextlib.suppress(MemcalcError):
        if "global_batch" in request.given and (
            "seq_len" in request.given or not in_tokens(request.given["global_batch"])
        ):
            columns["global_batch"] = batch_of(request, request.given.get("seq_len", 1))
    return columns


def _cell(value: object) -> Any:
    """Return a value of a strategy as a cell holds it: lists with commas, as they are typed."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return value if isinstance(value, bool | int | float) else str(value)


def _plan_columns(task: Task, job: SweepJob) -> dict[str, Any]:
    answer = api.plan(**job.options, settings=job.settings, preset_dirs=task.preset_dirs, top=1)  # type: ignore[arg-type]
    columns = {
        **_common_columns(answer),
        "gpus": answer.hardware.gpus,
        "seq_len": answer.seq_len,
        "capacity_bytes": answer.capacity,
        "searched": answer.searched,
        "feasible": answer.feasible,
    }
    if not answer.plans:
        enough = (change for change in answer.nearest if change.verdict != "does-not-fit")
        changes = [f"nearest: {change.change}" for change in islice(enough, 1)]
        reason = "; ".join([answer.too_large.rstrip("."), *changes])
        return {**columns, "status": "does-not-fit", "reason": reason, "command": answer.command}
    best = answer.plans[0]
    return {
        **columns,
        **_strategy_columns(best.strategy),
        "status": best.verdict,
        "gpus": best.gpus,
        "global_batch": best.global_batch,
        "accumulation_steps": best.accumulation_steps,
        **_memory_columns(best),
        **{f"{name}_s": getattr(best.time, name) for name in _SECONDS},
        "tokens_per_second_per_gpu": best.time.tokens_per_second_per_gpu,
        "mfu": best.time.mfu,
        "command": best.command,
    }


def _estimate_columns(task: Task, job: SweepJob) -> dict[str, Any]:
    answer = api.estimate(**job.options, settings=job.settings, preset_dirs=task.preset_dirs, advice=False)  # type: ignore[arg-type]
    needs = f"needs {answer.peak.device / GIB:.1f} of {answer.budget.capacity / GIB:.1f} GiB per GPU"
    reason = needs if answer.peak.device > answer.budget.capacity else answer.reason
    return {
        **_common_columns(answer),
        **_strategy_columns(answer.strategy),
        "status": answer.verdict,
        "reason": reason,
        "gpus": answer.hardware.gpus,
        "seq_len": answer.workload.seq_len,
        "global_batch": answer.workload.global_batch,
        "accumulation_steps": answer.workload.accumulation_steps,
        **_memory_columns(answer),
        "device_low_bytes": answer.interval.low,
        "device_high_bytes": answer.interval.high,
        "capacity_bytes": answer.budget.capacity,
        "command": answer.command,
    }


def _common_columns(answer: Plans | Estimate) -> dict[str, Any]:
    return {
        "node": answer.hardware.node,
        "parameters": answer.model.parameters,
        "active_parameters": answer.model.active_parameters,
        "warnings": " ".join(answer.warnings),
    }


def _strategy_columns(strategy: Strategy) -> dict[str, Any]:
    return {name: _cell(value) for name, value in strategy if value is not None}


def _memory_columns(answer: Plan | Estimate) -> dict[str, Any]:
    sizes = {f"{name}_bytes": getattr(answer.peak, name) for name in ("allocated", "reserved", "device")}
    beside = {f"{name}_bytes": getattr(answer, name) for name in ("host_memory", "tier_memory")}
    return {**sizes, **beside, "peak_phase": answer.peak.phase, "peak_stage": answer.peak.stage}


_GROUP = 10_000
"""Rows of a group of a Parquet file."""
Head = dict[str, Any]
"""The fields of a JSON file before its rows."""


def table_path(name: str, force: bool) -> Path:
    """Return the place of a table, before anything is computed: the ending is known, and can be written here."""
    path = output_path(name, force)
    ending = Path(name).suffix.lower()
    if ending not in FORMATS:
        raise UnknownNameError("output ending", ending, f"must be one of {', '.join(FORMATS)}", FORMATS)
    if ending == ".parquet" and find_spec("pyarrow") is None:
        raise OutputError(
            "output", name, "Parquet needs pyarrow (pip install 'memcalc[parquet]'); .csv and .json do not"
        )
    return path


def write_table(path: Path, ending: str, head: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    """Write a table beside `path`, and move it into place."""
    with replacing(path) as stream:
        FORMATS[ending](stream, head, columns, rows)


def text_of(value: object) -> str:
    """Return a cell as text; nothing where there is no value.

    >>> text_of(None), text_of(True), text_of(0.25)
    ('', 'true', '0.25')
    """
    return "" if value is None else value_text(value)


def _csv(stream: BinaryIO, _: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows([plain_cell(text_of(value)) for value in row] for row in rows)
    text.flush()
    text.detach()


def _json(stream: BinaryIO, head: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    stream.write(json.dumps(head, indent=2).removesuffix("\n}").encode() + b',\n  "rows": [')
    between = b"\n    "
    for line in _objects(columns, rows):
        stream.write(between + line)
        between = b",\n    "
    stream.write(b"\n  ]\n}\n")


def _jsonl(stream: BinaryIO, _: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    stream.writelines(line + b"\n" for line in _objects(columns, rows))


def _objects(columns: Sequence[Column], rows: Iterable[Row]) -> Iterator[bytes]:
    names = [column.name for column in columns]
    return (json.dumps(dict(zip(names, row, strict=True))).encode() for row in rows)


def _parquet(stream: BinaryIO, _: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    kinds: dict[str, DataType] = {"text": pa.string(), "whole": pa.int64(), "number": pa.float64(), "flag": pa.bool_()}
    schema = pa.schema([(column.name, kinds[column.kind]) for column in columns])
    left = iter(rows)
    with parquet.ParquetWriter(stream, schema) as writer:
        while group := list(islice(left, _GROUP)):
            cells = zip(schema, zip(*group, strict=True), strict=True)
            writer.write_table(pa.table([pa.array(values, field.type) for field, values in cells], schema))


FORMATS: dict[str, Callable[[BinaryIO, Head, Sequence[Column], Iterable[Row]], None]] = {
    ".csv": _csv,
    ".json": _json,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
"""By the ending of the file."""
