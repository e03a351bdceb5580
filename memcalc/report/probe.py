"""A probe as a document: what would run, or what was read beside what was predicted, and what to do next."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from memcalc.report.estimate import sized
from memcalc.report.tables import (
    Block,
    Branch,
    Code,
    Column,
    Leaf,
    Line,
    Report,
    Table,
    Tree,
    gib,
    header,
    made,
    percent,
)
from memcalc.results.names import component_name
from memcalc.results.probe import Calibrated, CalibratedFigure, ModuleProbe, Probed, ProbedJob, ProbeFigure, SavedTensor
from memcalc.specs.calibration import Gain
from memcalc.units import MIB, format_count, signed

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
    return made(result, _data(result), *blocks)


def _planned(result: Probed) -> Iterator[Block]:
    yield Line(_machine(result), "title")
    run = [job for job in result.jobs if job.status == "planned"]
    most = max((job.memory for job in run if not job.meant_to_fail), default=0)
    need = f", up to {gib(most, 1)} GiB" if most else ""
    text = f"{len(run)} of {len(result.jobs)} jobs would run, about {_time(result.need)}{need}"
    yield Line(text, "verdict")
    yield Line("Each job runs in its own process. The device is not modified.", "faint")
    columns = (*header("job | GPUs >2 | needs [GiB] > | time [s] >1"), Column("note", priority=9, below=True))
    rows = tuple((job.id, str(job.ranks), _size(job.memory), f"{job.need:.0f}", _note(job)) for job in result.jobs)
    yield Table("Jobs", columns, rows)


def _done(result: Probed) -> Iterator[Block]:
    yield Line(_machine(result), "title")
    counted = ", ".join(f"{result.counts[name]} {text}" for name, text in _STATUSES.items() if result.counts.get(name))
    yield Line(counted, "verdict")
    if result.resumed:
        yield Line(f"{result.resumed} results were there from an earlier call.", "faint")
    measured = [job for job in result.jobs if job.figures]
    if measured:
        yield _steps(measured)
        yield from _errors(measured)
    match = [job for job in result.jobs if job.found]
    if match:
        yield Table("The machine", header("job | found"), tuple((job.id, job.found) for job in match))
    yield from _others(result.jobs)
    if result.counts.get("waiting"):
        yield Line(f"Run the same command to continue (about {_time(result.need)} left).")
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
        columns += [Column(component_name(name), "GiB", right=True), Column("error", "%", right=True)]
    timed = any(job.seconds for job in jobs)
    columns += [Column("worst phase", "%", priority=1), *([Column("time", "ms", right=True, priority=2)] * timed)]
    rows = []
    for job in jobs:
        cells = [job.id]
        for name in known:
            figure = _of(job, name)
            cells += ["", ""] if figure is None else [_size(figure.measured), signed(100 * figure.error, 1)]
        cells.append(_worst_phase(job))
        rows.append((*cells, *([f"{1000 * job.seconds:.1f}" if job.seconds else ""] * timed)))
    return Table("Measured, and how far the prediction is off", tuple(columns), tuple(rows))


def _errors(jobs: Sequence[ProbedJob]) -> Iterator[Block]:
    for name in _FIGURES:
        errors = sorted(abs(figure.error) for job in jobs if (figure := _of(job, name)) is not None)
        if errors:
            middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
            text = f"{component_name(name)}: |error| median {100 * middle:.1f}%, worst {100 * errors[-1]:.1f}%"
            yield Line(f"{text}, of {len(errors)} steps", "text")


def _others(jobs: Sequence[ProbedJob]) -> Iterator[Block]:
    rows = tuple(
        (job.id, _STATUSES[job.status], _note(job)) for job in jobs if job.status not in {"measured", "waiting"}
    )
    if rows:
        yield Table("Without figures", header("job | status | note"), rows)


def _data(result: Probed) -> Table:
    names = (*_FIGURES, *_PHASES)
    columns = [*header("job | kind | status | note | needs [bytes] > | time [s] > | seconds per step >")]
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
    return f"{worst.name} {signed(100 * worst.error, 1)}"


def _note(job: ProbedJob) -> str:
    meant = "meant to run out of memory" if job.meant_to_fail else ""
    return "; ".join(part for part in (job.reason, meant) if part)


def _size(size: int) -> str:
    """Return GiB, with digits that a tiny model's figures need too."""
    return gib(size, 2 if size >= 1 << 30 else 4) if size else ""


def _time(seconds: float) -> str:
    """Return a rough time.

    >>> _time(42), _time(1500)
    ('42 s', '25 min')
    """
    return f"{seconds:.0f} s" if seconds < 2 * _MINUTE else f"{seconds / _MINUTE:.0f} min"


_SIZE = Column("bytes", right=True)
_TENSORS = (*header("part | module <1 | kept by | shape <2 | dtype <2"), _SIZE)


def module_report(result: ModuleProbe) -> Report:
    """Return the answer of ``memcalc probe --device fake``."""
    table = Table("Kept for backward", _TENSORS, tuple(_row(tensor) for tensor in result.tensors))
    tables = _components(result), _phases(result), _parts(result), _tree(result, table)
    blocks = (*_head(result), *tables, *_foot(result))
    return made(result, table, *blocks)


def _head(result: ModuleProbe) -> Iterator[Line]:
    yield Line(f"{sized(result.peak)} allocated at the peak, in {result.peak_phase} ({result.peak_at})", "verdict")
    size = f"{result.module}, {format_count(result.parameters)} trained parameters"
    batch = f"micro-batch {result.micro_batch}" + (f" of {result.seq_len} tokens" if result.seq_len > 1 else "")
    yield Line(f"{size}: {result.precision}, recompute {result.recompute}, {result.optimizer}, {batch}", "title")
    yield Line(f"Second of two steps on fake tensors (torch {result.torch}); the loss is {result.loss}.", "faint")


def _components(result: ModuleProbe) -> Table:
    rows = tuple(
        (name, str(size), percent(size, result.peak)) for name, size in result.components.model_dump().items() if size
    )
    return Table("At the peak", (Column("component"), _SIZE, Column("share", right=True, priority=1)), rows)


def _phases(result: ModuleProbe) -> Table:
    rows = tuple((name, str(result.first_phases[name]), str(size)) for name, size in result.phases.items())
    return Table("Largest sum of live tensors", header("phase | first step [bytes] > | second step [bytes] >"), rows)


def _parts(result: ModuleProbe) -> Table:
    columns = (*header("part | class <1"), *header("parameters > | kept [bytes] >"))
    rows = tuple((part.path, part.name, str(part.parameters), str(part.saved)) for part in result.parts)
    return Table("Parts", columns, rows)


def _tree(result: ModuleProbe, table: Table) -> Tree:
    """What is kept, by module, of the first block of each kind and of what stands outside the blocks."""
    shown = {part.path for part in result.parts if not part.name}
    alike: set[tuple[str, int]] = set()
    for part in result.parts:
        if part.name and (part.name, part.saved) not in alike:
            alike.add((part.name, part.saved))
            shown.add(part.path)
    grouped: dict[str, list[SavedTensor]] = {}
    for tensor in result.tensors:
        if (tensor.part or "the module") in {*shown, "embedding", "between", "head"}:
            grouped.setdefault(tensor.module or tensor.part or "the module", []).append(tensor)
    branches = tuple(
        Branch(module, sized(sum(tensor.bytes for tensor in members)), tuple(_leaf(tensor) for tensor in members))
        for module, members in grouped.items()
    )
    return Tree(branches, table)


def _leaf(item: SavedTensor) -> Leaf:
    shape = "x".join(map(str, item.shape)) or "scalar"
    copy = (f"a copy of {item.weight}",) if item.weight else ()
    return Leaf(item.node, f"{item.bytes} bytes", (f"{shape} {item.dtype}", *copy))


def _row(item: SavedTensor) -> tuple[str, ...]:
    return item.part, item.module, item.node, "x".join(map(str, item.shape)), item.dtype, str(item.bytes)


def _foot(result: ModuleProbe) -> Iterator[Block]:
    yield Line(f"One micro-batch keeps {sized(result.saved)} for backward, weights and their copies left out.")
    for note in result.notes:
        yield Line(f"Note: {note}.", "warning")
    if result.file:
        yield Line(f"The recorded model is in {result.file}.")
        command = f"memcalc plan --model {shlex.quote(result.file)} --gpu a100-80g --gpus 8"
        yield Code("Plan it, also where there is no torch", command)


_KINDS = {"step time": "Systematic error", "workspace": "Differs from its source"}
_COLUMNS = header("part <2 | figure | unit <1 | shipped > | measured > | low >1 | high >1 | rows > | written")
_FIGURE = re.compile(r"\bdevice\b")
_GAIN = header("figure | unit | rows > | median > | p90 > | in range >1 | width [%] >1 | better")


def calibration_report(result: Calibrated) -> Report:
    """Return the answer of ``memcalc calibrate``."""
    table = Table("Figures", _COLUMNS, tuple(_constant_row(figure) for figure in result.figures))
    return made(result, table, *_calibration_blocks(result, table))


def _calibration_blocks(result: Calibrated, table: Table) -> Iterator[Block]:
    match = result.calibration
    yield Line(_said(result), "verdict", "bad" if match.empty else "good")
    yield table
    if match.gain:
        yield Table("Errors of held-back rows, before → after", _GAIN, tuple(_gain(gain) for gain in match.gain))
    for residual in match.residual:
        yield Line(f"{_KINDS.get(residual.kind, 'Structural, and in no figure')}: {residual.says}.", "warning")
    for left in match.left:
        yield Line(f"As shipped: {left.reason}.")
    for note in match.note:
        yield Line(f"Note: {note}", "faint")
    if result.not_predicted:
        count = len(result.not_predicted)
        yield Line(f"{count} rows cannot be predicted and are not used; memcalc validate says why.", "faint")


def _said(result: Calibrated) -> str:
    match = result.calibration
    rows = f"{match.basis}, {match.held_back} held back"
    if match.empty:
        return f"{result.gpu}: the shipped constants already predict best ({rows})"
    parts = dict.fromkeys(figure.part for figure in result.figures if figure.written)
    return f"{result.gpu} · {', '.join(parts)} · {rows} · {match.dates}"


def _constant_row(figure: CalibratedFigure) -> tuple[str, ...]:
    size = figure.unit == "bytes"
    values = [figure.shipped, figure.fitted, figure.low, figure.high]
    cells = ["" if value is None else f"{value / MIB:.1f}" if size else f"{value:.4g}" for value in values]
    unit = "MiB" if size else figure.unit
    return figure.part, figure.name, unit, *cells, str(figure.rows), "yes" if figure.written else "no"


def _gain(gain: Gain) -> tuple[str, ...]:
    scale, unit = (MIB, "MiB") if gain.unit == "bytes" else (0.01, "%")
    errors = [_pair(pair, scale) for pair in (gain.median, gain.p90)]
    inside = "" if gain.covered is None else "{} → {}".format(*gain.covered)
    width = "" if gain.width is None else _pair(gain.width, 0.01)
    return (
        _FIGURE.sub(component_name("device"), gain.figure).replace(" - ", " − "),
        unit,
        str(gain.rows),
        *errors,
        inside,
        width,
        "yes" if gain.better else "no",
    )


def _pair(pair: tuple[float, float], scale: float) -> str:
    before, after = (value / scale for value in pair)
    return f"{before:.1f} → {after:.1f}"
