"""A probe as a document: what would run, or what was read beside what was predicted, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.report.render import Report
from memcalc.report.tables import Block, Code, Column, Document, Line, Table, gib
from memcalc.results import Probed, ProbedJob, ProbeFigure

__all__ = ["report"]

_FIGURES = ("allocated", "reserved", "device")
_PHASES = ("forward", "loss", "backward", "step")
_STATUSES = {
    "planned": "would run",
    "measured": "measured",
    "oom": "ran out of memory",
    "failed": "failed",
    "skipped": "left out",
    "waiting": "not reached",
}
_MINUTE = 60


def report(result: Probed) -> Report:
    """Return the answer of ``memcalc probe``."""
    blocks = tuple(_planned(result) if result.dry_run else _done(result))
    return Report(Document(blocks, _data(result)), result.model_dump(mode="json", by_alias=True))


def _planned(result: Probed) -> Iterator[Block]:
    """Yield what a dry run says."""
    yield Line(_machine(result), "title")
    run = [job for job in result.jobs if job.status == "planned"]
    most = max((job.memory for job in run if not job.meant_to_fail), default=0)
    need = f", the largest {gib(most, 1)} GiB" if most else ""
    said = f"{len(run)} jobs of {len(result.jobs)} would run, in about {_time(result.need)}{need}"
    yield Line(said, "verdict")
    yield Line("Each runs in a process of its own; nothing on the device is changed.", "faint")
    columns = (
        Column("job"),
        Column("GPUs", right=True, priority=2),
        Column("needs", "GiB", right=True),
        Column("time", "s", right=True, priority=1),
        Column("note", priority=9, below=True),
    )
    rows = tuple((job.id, str(job.ranks), _size(job.memory), f"{job.need:.0f}", _note(job)) for job in result.jobs)
    yield Table("Jobs", columns, rows)


def _done(result: Probed) -> Iterator[Block]:
    """Yield what a probe found."""
    yield Line(_machine(result), "title")
    counted = ", ".join(f"{result.counts[name]} {said}" for name, said in _STATUSES.items() if result.counts.get(name))
    yield Line(counted, "verdict")
    if result.resumed:
        yield Line(f"{result.resumed} results were there from an earlier call.", "faint")
    measured = [job for job in result.jobs if job.figures]
    if measured:
        yield _steps(measured)
        yield from _errors(measured)
    found = [job for job in result.jobs if job.found]
    if found:
        yield Table("The machine", (Column("job"), Column("found")), tuple((job.id, job.found) for job in found))
    yield from _others(result.jobs)
    if result.counts.get("waiting"):
        yield Line(f"The same command goes on from here; about {_time(result.need)} are left.")
    yield Line(f"Written to {result.output}.")
    for command in result.commands:
        yield Code("Next", command)


def _machine(result: Probed) -> str:
    if result.device == "cpu":
        return f"Steps of tiny models, counted on a CPU{f' ({result.name})' if result.name else ''}"
    beside = result.capacity - result.free
    taken = f", {gib(beside, 1)} of them taken by others" if beside else ""
    name = f"{result.name} as {result.gpu}" if result.name else result.gpu
    return f"{name}: {gib(result.capacity, 1)} GiB{taken}"


def _steps(jobs: Sequence[ProbedJob]) -> Table:
    """Return the runs: measured size and error of each figure, and the phase that is furthest off."""
    known = [name for name in _FIGURES if any(_of(job, name) for job in jobs)]
    columns = [Column("step")]
    for name in known:
        columns += [Column(name, "GiB", right=True), Column("error", "%", right=True)]
    timed = any(job.seconds for job in jobs)
    columns += [Column("worst phase", "%", priority=1), *([Column("time", "ms", right=True, priority=2)] * timed)]
    rows = []
    for job in jobs:
        cells = [job.id]
        for name in known:
            figure = _of(job, name)
            cells += ["", ""] if figure is None else [_size(figure.measured), _signed(figure.error)]
        cells.append(_worst_phase(job))
        rows.append((*cells, *([f"{1000 * job.seconds:.1f}" if job.seconds else ""] * timed)))
    return Table("Measured, and how far the prediction is off", tuple(columns), tuple(rows))


def _errors(jobs: Sequence[ProbedJob]) -> Iterator[Block]:
    """Yield the middle and the worst of each figure's errors."""
    for name in _FIGURES:
        errors = sorted(abs(figure.error) for job in jobs if (figure := _of(job, name)) is not None)
        if errors:
            middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
            said = f"{name}: |error| median {100 * middle:.1f}%, worst {100 * errors[-1]:.1f}%"
            yield Line(f"{said}, of {len(errors)} steps", "text")


def _others(jobs: Sequence[ProbedJob]) -> Iterator[Block]:
    """Yield what gave no figures, with the reasons."""
    rows = tuple(
        (job.id, _STATUSES[job.status], _note(job)) for job in jobs if job.status not in {"measured", "waiting"}
    )
    if rows:
        yield Table("Without figures", (Column("job"), Column("status"), Column("note")), rows)


def _data(result: Probed) -> Table:
    """Return every job with every figure."""
    names = (*_FIGURES, *_PHASES)
    columns = [Column("job"), Column("kind"), Column("status"), Column("note"), Column("needs", "bytes", right=True)]
    columns += [Column("time", "s", right=True), Column("seconds a step", right=True)]
    for name in names:
        columns += [Column(f"{name} {part}", "bytes", right=True) for part in ("measured", "predicted")]
    rows = []
    for job in result.jobs:
        cells = [job.id, job.kind, job.status, _note(job), str(job.memory), f"{job.need:.0f}"]
        cells.append("" if job.seconds is None else str(job.seconds))
        for name in names:
            figure = _of(job, name)
            cells += ["", ""] if figure is None else [str(figure.measured), str(figure.predicted)]
        rows.append(tuple(cells))
    return Table("Jobs", tuple(columns), tuple(rows))


def _of(job: ProbedJob, name: str) -> ProbeFigure | None:
    return next((figure for figure in job.figures if figure.name == name), None)


def _worst_phase(job: ProbedJob) -> str:
    phases = [figure for figure in job.figures if figure.name in _PHASES]
    if not phases:
        return ""
    worst = max(phases, key=lambda figure: abs(figure.error))
    return f"{worst.name} {_signed(worst.error)}"


def _note(job: ProbedJob) -> str:
    meant = "meant to run out of memory" if job.meant_to_fail else ""
    return "; ".join(part for part in (job.reason, meant) if part)


def _signed(error: float) -> str:
    """Return an error in percent.

    >>> _signed(0.0123), _signed(-0.00001)
    ('+1.2', '+0.0')
    """
    return f"{100 * error + 0.0:+.1f}".replace("-0.0", "+0.0")


def _size(size: int) -> str:
    """Return GiB, with digits that a tiny model's figures need too."""
    return gib(size, 2 if size >= 1 << 30 else 4) if size else ""


def _time(seconds: float) -> str:
    """Return a rough time.

    >>> _time(42), _time(1500)
    ('42 s', '25 min')
    """
    return f"{seconds:.0f} s" if seconds < 2 * _MINUTE else f"{seconds / _MINUTE:.0f} min"
