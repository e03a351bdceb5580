"""``memcalc probe``: jobs one after another, each in a process of its own, from a plan to a runs file."""

from __future__ import annotations

import datetime as dt
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcalc import __version__, catalog
from memcalc.errors import InputError, UnknownNameError
from memcalc.files import output_path, replacing
from memcalc.probe.measure.facts import Facts, look, preset_of
from memcalc.probe.measure.journal import JOURNAL, Journal
from memcalc.probe.measure.planning import CPU_GPU, Planned, Target, plan_jobs
from memcalc.probe.measure.process import limit_of, run_job
from memcalc.probe.measure.records import is_record, probed_job, runs_file
from memcalc.results import Probed, ProbedJob
from memcalc.units import parse_count

__all__ = ["DEVICES", "OUTPUT", "Progress", "probe"]

DEVICES = ("cuda", "cpu")
OUTPUT = "probe.toml"
"""The runs file, where none is named."""
_STATUSES = {"oom": "oom", "crash": "failed"}


@dataclass(frozen=True)
class Progress:
    """How far a probe is."""

    done: int
    jobs: int
    resumed: int
    """Results that the journal had at the start."""
    now: str = ""
    """The job that runs."""


Listener = Callable[[Progress], None]


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
    """Measure this machine, or say what would be measured.

    Results go to a runs file, by way of a journal beside it: the same call continues an interrupted probe. ``gpu`` is
    a preset's name; without it the driver's name of the GPU is looked up. After ``minutes`` no further job is begun.
    ``ranks`` processes run the jobs of several GPUs; as many as there are when left out.
    Raises :class:`memcalc.errors.InputError` for a machine that cannot be probed.
    """
    if device not in DEVICES:
        raise UnknownNameError("device", device, "must be cuda, cpu or (for a module) fake", DEVICES)
    budget = None if minutes is None else _minutes(minutes)
    target = _target(device, gpu, tuple(preset_dirs), dry_run=dry_run)
    several = parse_count(ranks, "ranks") if ranks is not None else target.facts.gpus
    if dry_run:
        return _answer(target, suite, list(_until(plan_jobs(suite, target, several), budget)), dry_run=True)
    path, journal = _places(output or OUTPUT, force)
    planned = plan_jobs(suite, target, several)
    with Journal(journal, target.facts.machine(device), _today()) as kept:
        resumed = sum(kept.get(one.job) is not None for one in planned)
        rows, results = _run_all(planned, target, kept, budget, on_progress)
        _write(path, results, target, kept.date)
    if not any(row.status in {"waiting", "failed"} for row in rows):
        journal.unlink()
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
    chip = catalog.gpu(gpu, preset_dirs) if gpu is not None else None
    facts = Facts() if dry_run and (chip is not None or device == "cpu") else look(device)
    if chip is None:
        if device == "cuda":
            chip = preset_of(facts.name, facts.memory, preset_dirs)
        else:
            chip = catalog.gpu(CPU_GPU, preset_dirs)
    return Target(device, chip, facts)


def _places(output: str, force: bool) -> tuple[Path, Path]:
    """Return runs file and journal; a runs file that a journal stands beside is continued."""
    wanted = Path(output)
    journal = wanted.with_name(wanted.name + JOURNAL)
    path = output_path(output, force or journal.is_file())
    journal = path.with_name(path.name + JOURNAL)
    if force:
        journal.unlink(missing_ok=True)
    return path, journal


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()


# ---------------------------------------------------------------------------------------------------------------- jobs


def _until(planned: Iterable[Planned], budget: float | None) -> Iterable[ProbedJob]:
    """Yield what a dry run shows: the jobs in their order, until their needs of time fill the budget."""
    spent = 0.0
    for one in planned:
        if one.skip:
            yield probed_job(one, None, "skipped", one.skip)
        elif budget is not None and spent + one.job.seconds > budget:
            yield probed_job(one, None, "waiting", "beyond the minutes")
        else:
            spent += one.job.seconds
            yield probed_job(one, None, "planned")


def _run_all(
    planned: list[Planned], target: Target, kept: Journal, budget: float | None, on_progress: Listener | None
) -> tuple[list[ProbedJob], list[tuple[Planned, dict[str, Any]]]]:
    """Run what is not known yet; return every job, and the results."""
    begun, resumed = time.monotonic(), sum(kept.get(one.job) is not None for one in planned)
    rows: list[ProbedJob] = []
    results: list[tuple[Planned, dict[str, Any]]] = []
    for one in planned:
        if on_progress is not None:
            on_progress(Progress(len(rows), len(planned), resumed, one.job.id))
        result = kept.get(one.job)
        late = budget is not None and time.monotonic() - begun + one.job.seconds > budget
        if result is None and (one.skip or late):
            status, reason = ("skipped", one.skip) if one.skip else ("waiting", "beyond the minutes")
            rows.append(probed_job(one, None, status, reason))
            continue
        if result is None:
            result = _checked(one, run_job(one.job, target.device, limit_of(one.job)), target)
            kept.append(one.job, result)
        results.append((one, result))
        rows.append(_row(one, result))
    return rows, results


def _checked(planned: Planned, result: dict[str, Any], target: Target) -> dict[str, Any]:
    """Return the result, or a failure where it cannot be written down."""
    wrong = is_record(planned, result, target)
    return {"ok": False, "outcome": "crash", "message": wrong} if wrong else result


def _row(planned: Planned, result: dict[str, Any]) -> ProbedJob:
    if result["ok"]:
        return probed_job(planned, result, "measured")
    return probed_job(planned, result, _STATUSES[result["outcome"]], result["message"].splitlines()[0])


# --------------------------------------------------------------------------------------------------------------- answer


def _write(path: Path, results: list[tuple[Planned, dict[str, Any]]], target: Target, date: str) -> None:
    from memcalc.convert.runs import runs_text

    with replacing(path) as stream:
        stream.write(runs_text(runs_file(results, target, date)).encode())


def _answer(
    target: Target, suite: str, rows: list[ProbedJob], *, dry_run: bool, output: str = "", resumed: int = 0
) -> Probed:
    on_gpu = target.device == "cuda"
    left = [row for row in rows if row.status == ("planned" if dry_run else "waiting")]
    commands = [f"memcalc validate {output}", *([f"memcalc calibrate {output}"] if on_gpu else [])] if output else []
    return Probed(
        version=__version__,
        device=target.device,
        gpu=target.gpu.name,
        name=target.facts.name,
        capacity=target.capacity if on_gpu else 0,
        free=target.free if on_gpu else 0,
        suite=suite,
        dry_run=dry_run,
        jobs=tuple(rows),
        counts=dict(Counter(row.status for row in rows)),
        resumed=resumed,
        need=sum(row.need for row in left),
        output=output,
        commands=tuple(commands),
    )
