"""``memcalc probe``: jobs one after another, each in a process of its own, from a plan to a runs file."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from memcalc import catalog
from memcalc._version import __version__
from memcalc.errors import InputError, UnknownNameError
from memcalc.files import output_path, replacing
from memcalc.journal import SUFFIX, Journal, Listener, Progress, remove
from memcalc.probe.measure.environment import Environment, look, preset_of
from memcalc.probe.measure.planning import CPU_GPU, Planned, Target, plan_jobs
from memcalc.probe.measure.process import Forks, Starter, run_job, time_limit
from memcalc.probe.measure.records import probed_job, record_error, runs_file
from memcalc.results.probe import Probed, ProbedJob
from memcalc.units import parse_count

DEVICES = ("cuda", "cpu")
OUTPUT = "probe.toml"
"""The runs file, where none is named."""
_STATUSES = {"oom": "oom", "crash": "failed"}


def probe(
    *,
    device: str = "cuda",
    gpu: str | None = None,
    suite: str = "full",
    minutes: float | str | None = None,
    ranks: int | str | None = None,
    dry_run: bool = False,
    output: str | None = None,
    force: bool = False,
    preset_dirs: Iterable[str] = (),
    on_progress: Listener | None = None,
) -> Probed:
    """Measure this machine, or list what would be measured.

    Results go to a runs file, by way of a journal beside it: the same call continues an interrupted probe. ``gpu`` is
    a preset's name; without it the driver's name of the GPU is looked up. After ``minutes`` no further job is begun.
    ``ranks`` processes run the jobs of several GPUs; as many as there are when left out.
    Raises :class:`memcalc.errors.InputError` for a machine that cannot be probed.
    """
    if device not in DEVICES:
        raise UnknownNameError("device", device, "must be cuda, cpu or (for a module) fake", DEVICES)
    budget = None if minutes is None else _minutes(minutes)
    target = _target(device, gpu, tuple(preset_dirs), dry_run=dry_run)
    rank_count = parse_count(ranks, "ranks") if ranks is not None else target.environment.gpus
    if dry_run:
        return _answer(target, suite, list(_dry_run_rows(plan_jobs(suite, target, rank_count), budget)), dry_run=True)
    path, journal_path = _output_paths(output or OUTPUT, force)
    planned = plan_jobs(suite, target, rank_count)
    machine = target.environment.machine(device)
    with Journal(journal_path, "probe", machine, partial(_other_machine, machine), _today()) as journal:
        resumed = sum(journal.get(entry.job.digest) is not None for entry in planned)
        with Forks() as start:
            rows, results = _run_all(planned, target, journal, budget, on_progress, start)
        _write(path, results, target, journal.begun)
        if not any(row.status in {"waiting", "failed"} for row in rows):
            journal.remove()
    return _answer(target, suite, rows, dry_run=False, output=str(output or OUTPUT), resumed=resumed)


# ------------------------------------------------------------------------------------------------------------- request


def _minutes(value: float | str) -> float:
    """Return a budget [s]."""
    try:
        minutes = float(value)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 1e6:
        raise InputError("minutes", value, "must be a number above 0")
    return 60 * minutes


def _target(device: str, gpu: str | None, preset_dirs: tuple[str, ...], *, dry_run: bool) -> Target:
    """Return what is probed; a dry run for a GPU that is named looks at no machine."""
    gpu_preset = catalog.gpu(gpu, preset_dirs) if gpu is not None else None
    environment = Environment() if dry_run and (gpu_preset is not None or device == "cpu") else look(device)
    if gpu_preset is None:
        if device == "cuda":
            gpu_preset = preset_of(environment.name, environment.memory, preset_dirs)
        else:
            gpu_preset = catalog.gpu(CPU_GPU, preset_dirs)
    return Target(device, gpu_preset, environment)


def _output_paths(output: str, force: bool) -> tuple[Path, Path]:
    """Return runs file and journal; a runs file with a journal beside it is continued."""
    journal = Path(output).with_name(Path(output).name + SUFFIX)
    path = output_path(output, force or journal.is_file())
    journal = path.with_name(path.name + SUFFIX)
    if force:
        remove(journal)
    return path, journal


def _other_machine(machine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Describe what differs between this machine and that of a journal."""
    mine = json.loads(json.dumps(dict(machine)))  # tuples as the lists that a journal has
    differ = sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
    return f"it was begun with another {', '.join(differ)}; give --force to begin anew, or another --output"


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()


# ---------------------------------------------------------------------------------------------------------------- jobs


def _dry_run_rows(planned: Iterable[Planned], budget: float | None) -> Iterable[ProbedJob]:
    """Yield what a dry run shows: the jobs in their order, until their needs of time fill the budget."""
    spent = 0.0
    for entry in planned:
        if entry.skip:
            yield probed_job(entry, None, "skipped", entry.skip)
        elif budget is not None and spent + entry.job.seconds > budget:
            yield probed_job(entry, None, "waiting", "beyond the minutes")
        else:
            spent += entry.job.seconds
            yield probed_job(entry, None, "planned")


def _run_all(
    planned: list[Planned],
    target: Target,
    journal: Journal,
    budget: float | None,
    on_progress: Listener | None,
    start: Starter,
) -> tuple[list[ProbedJob], list[tuple[Planned, dict[str, Any]]]]:
    """Run what the journal does not have; return every job, and the results."""
    begun, resumed = time.monotonic(), sum(journal.get(entry.job.digest) is not None for entry in planned)
    rows: list[ProbedJob] = []
    results: list[tuple[Planned, dict[str, Any]]] = []
    for entry in planned:
        if on_progress is not None:
            on_progress(Progress(len(rows), len(planned), resumed, entry.job.id))
        result = journal.get(entry.job.digest)
        late = budget is not None and time.monotonic() - begun + entry.job.seconds > budget
        if result is None and (entry.skip or late):
            status, reason = ("skipped", entry.skip) if entry.skip else ("waiting", "beyond the minutes")
            rows.append(probed_job(entry, None, status, reason))
            continue
        if result is None:
            result = _checked(entry, run_job(entry.job, target.device, time_limit(entry.job), start), target)
            if result["ok"] or result["outcome"] == "oom":  # a job that crashed is run again
                journal.append([(entry.job.digest, result)])
        results.append((entry, result))
        rows.append(_row(entry, result))
    return rows, results


def _checked(planned: Planned, result: dict[str, Any], target: Target) -> dict[str, Any]:
    """Return the result, or a failure where it cannot be written down."""
    wrong = record_error(planned, result, target)
    return {"ok": False, "outcome": "crash", "message": wrong} if wrong else result


def _row(planned: Planned, result: dict[str, Any]) -> ProbedJob:
    if result["ok"]:
        return probed_job(planned, result, "measured")
    return probed_job(planned, result, _STATUSES[result["outcome"]], result["message"].splitlines()[0])


# --------------------------------------------------------------------------------------------------------------- answer


def _write(path: Path, results: list[tuple[Planned, dict[str, Any]]], target: Target, date: str) -> None:
    from memcalc.runs import runs_text

    with replacing(path) as stream:
        stream.write(runs_text(runs_file(results, target, date)).encode())


def _answer(
    target: Target, suite: str, rows: list[ProbedJob], *, dry_run: bool, output: str = "", resumed: int = 0
) -> Probed:
    on_gpu = target.device == "cuda"
    remaining = [row for row in rows if row.status == ("planned" if dry_run else "waiting")]
    commands = [f"memcalc validate {output}", *([f"memcalc calibrate {output}"] if on_gpu else [])] if output else []
    return Probed(
        version=__version__,
        device=target.device,
        gpu=target.gpu.name,
        name=target.environment.name,
        capacity=target.capacity if on_gpu else 0,
        free=target.free if on_gpu else 0,
        suite=suite,
        dry_run=dry_run,
        jobs=tuple(rows),
        counts=dict(Counter(row.status for row in rows)),
        resumed=resumed,
        need=sum(row.need for row in remaining),
        output=output,
        commands=tuple(commands),
    )
