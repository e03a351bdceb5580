"""A ladder as a document: what fits from which stage on, then each reading with its bars, its stages and its parts."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.estimate import MOODS
from memcalc.report.render import Report
from memcalc.report.tables import Bars, BarsRow, Block, Code, Column, Document, Line, Listing, Table, facts, gib
from memcalc.results import Ladder, LadderReading, LadderStage
from memcalc.units import format_count

__all__ = ["NAMES", "bars_of", "label_of", "report", "verdict_of"]

NAMES = {
    "pure-16-bit": "pure 16-bit", "fp32-master": "fp32 master", "autocast": "autocast", "fp32": "fp32",
}  # fmt: skip
"""Readings as they are said."""
CUT = 2
"""A bar beyond this many times the larger of the capacity and the middle stage is cut, so that the others are seen."""
_DATA = (
    Column("reading"),
    Column("stage", right=True),
    Column("change"),
    Column("precision"),
    Column("storage"),
    *(
        Column(name, "bytes", right=True)
        for name in (
            "parameters", "gradients", "optimizer", "activations", "buffers", "reserve", "context",
            "allocated", "reserved", "device", "saved",
        )
    ),
    Column("peak phase"),
    Column("verdict"),
    Column("speed"),
    Column("tok/s/GPU", right=True),
    Column("validated"),
    Column("host memory", "bytes", right=True),
    Column("command"),
)  # fmt: skip


def report(result: Ladder) -> Report:
    """Return the answer of ``memcalc ladder``."""
    blocks: list[Block] = [*_head(result)]
    for reading in result.readings:
        blocks += _reading(result, reading)
    document = Document((*blocks, *_foot(result)), _data(result))
    return Report(document, result.model_dump(mode="json", by_alias=True))


def verdict_of(result: Ladder, reading: LadderReading) -> str:
    """Return the first stage that fits, in one sentence, and which do not fit after it."""
    name, whole = NAMES[reading.name], f"{gib(result.capacity, 1)} GiB"
    if reading.first is None:
        least = min(reading.stages, key=lambda stage: stage.peak.device)
        needed = f"stage {least.stage} needs the least, {gib(least.peak.device, 1)} of {whole}"
        return f"does not fit · {name}: no stage fits; {needed}"
    stage = reading.stages[reading.first]
    start = f"from the start, in {stage.strategy.precision}"
    place = f"first at stage {stage.stage}, {stage.change}" if stage.stage else start
    after = [str(one.stage) for one in reading.stages[stage.stage :] if one.verdict == "does-not-fit"]
    but = f"; stage {', '.join(after)} does not" if after else ""
    return f"{stage.verdict} · {name}: {place}: {gib(stage.peak.device, 1)} of {whole}{but}"


def label_of(stage: LadderStage) -> str:
    """Return a stage's number and what it changes; the precision at the start."""
    return f"{stage.stage}  {'+ ' + stage.change if stage.change else 'start, ' + stage.strategy.precision}"


def parts_of(stage: LadderStage) -> tuple[tuple[str, int], ...]:
    """Return the parts of ``device`` [bytes] in the order in which they are stacked."""
    inside = [(name, int(size)) for name, size in stage.components.model_dump().items()]
    return (*inside, ("context", stage.context))


def end_of(result: Ladder) -> int:
    """Return the end of the scale [bytes]: that of the largest stage, but where one dwarfs the others."""
    sizes = sorted(stage.peak.device for reading in result.readings for stage in reading.stages)
    most = CUT * max(result.capacity, sizes[len(sizes) // 2])
    return max(result.capacity, min(sizes[-1], most))


def bars_of(result: Ladder, reading: LadderReading) -> Bars:
    """Return a reading's stages as bars; all readings have the same scale."""
    rows = tuple(
        BarsRow(label_of(stage), parts_of(stage), _short(stage), MOODS[stage.verdict], _effect(stage))
        for stage in reading.stages
    )
    return Bars(rows, result.capacity, end_of(result), result.hardware.gpu, legend=reading is result.readings[0])


def _short(stage: LadderStage) -> str:
    return f"{gib(stage.peak.device, 1)} GiB, {stage.verdict.replace('-', ' ')}"


def _effect(stage: LadderStage) -> str:
    if not stage.stage:
        return ""
    less = f"{gib(abs(stage.saved), 1)} GiB {'less' if stage.saved >= 0 else 'more'}"
    return less if stage.speed is None else f"{less}, speed × {_times(stage.speed)}"


def _times(speed: float) -> str:
    return f"{speed:.2f}" if speed < 2 else f"{speed:.1f}"


def _head(result: Ladder) -> Iterator[Line]:
    hardware = result.hardware
    for reading in result.readings:
        mood = "bad" if reading.first is None else MOODS[reading.stages[reading.first].verdict]
        yield Line(verdict_of(result, reading), "verdict", mood)
    strategy, unit = result.readings[0].stages[0].strategy, "token" if result.seq_len == 1 else "tokens"
    subject = f"{result.model.name} ({format_count(result.model.parameters)} parameters)"
    place = f"{hardware.gpus} × {hardware.gpu}: {strategy.framework}, {result.seq_len} {unit} a sequence"
    kind = "; the usual order of tuning, which ends where it fits" if result.recipe else ""
    yield Line(f"{subject} on {place}{kind}", "title")


def _reading(result: Ladder, reading: LadderReading) -> Iterator[Block]:
    yield Line(f"{NAMES[reading.name]} ({reading.precision})", "heading")
    yield Line(f"Keeps {reading.storage.said}. {_widths(reading)}")
    yield bars_of(result, reading)
    yield _stages(reading)
    yield _parts(reading)


def _widths(reading: LadderReading) -> str:
    kept = reading.storage
    named = (("weight", kept.parameter), ("fp32 master", kept.master), ("gradient", kept.gradient))
    listed = [f"{name} {size}" for name, size in named if size]
    listed.append(f"AdamW's moments {kept.moment} + {kept.moment}")
    copies = f"; its copy under autocast {kept.cached}" if kept.cached else ""
    of = "trained parameter" if reading.stages[-1].strategy.lora else "parameter"
    return f"Bytes a {of}: {', '.join(listed)}{copies}."


def _stages(reading: LadderReading) -> Table:
    columns = (
        Column("#", right=True),
        Column("stage"),
        Column("device", "GiB", right=True),
        Column("saved", "GiB", right=True),
        Column("speed", "×", right=True),
        Column("tok/s/GPU", right=True, priority=1),
        Column("host", "GiB a node", right=True, priority=2),
        Column("peak at", priority=3),
        Column("verdict"),
    )
    return Table(f"Stages, {NAMES[reading.name]}", columns, tuple(_stage(stage) for stage in reading.stages))


def _stage(stage: LadderStage) -> tuple[str, ...]:
    speed = "" if stage.speed is None else _times(stage.speed)
    return (
        str(stage.stage),
        stage.change or f"start, {stage.strategy.precision}",
        gib(stage.peak.device),
        gib(stage.saved) if stage.stage else "",
        speed,
        "" if stage.time is None else f"{stage.time.tokens_per_second_per_gpu:.0f}",
        gib(stage.host_memory, 1),
        stage.peak.phase,
        stage.verdict.replace("-", " "),
    )


def _parts(reading: LadderReading) -> Table:
    """Components at the peak; what is not GiB stands in the other table."""
    titles = ("params", "grads", "optim", "activ", "buffers", "reserve", "context")
    columns = (
        Column("#", right=True),
        *(Column(title, "GiB", right=True) for title in titles),
        Column("device", "GiB", right=True),
        Column("reserved", "GiB", right=True, priority=1),
        Column("allocated", "GiB", right=True, priority=1),
    )
    rows = tuple(
        (
            str(stage.stage),
            *(gib(size) for _, size in parts_of(stage)),
            *(gib(size) for size in (stage.peak.device, stage.peak.reserved, stage.peak.allocated)),
        )
        for stage in reading.stages
    )
    return Table(f"At the peak, {NAMES[reading.name]}", columns, rows)


def _foot(result: Ladder) -> Iterator[Block]:
    for said in result.left_out:
        yield Line(f"Left out: {said}.")
    for reading in result.readings:
        for said in reading.left_out:
            yield Line(f"Left out of {NAMES[reading.name]}: {said}")
    for said in dict.fromkeys(_also(result)):
        yield Line(said)
    yield Line("Speed is predicted, beside the stage before, also for stages that do not fit.", "faint")
    if any(reading.stages[0].strategy.precision == "fp32" for reading in result.readings):
        yield Line("fp32 multiplies without TF32, which PyTorch leaves off by default.", "faint")
    for said, names in _warnings(result).items():
        of = "" if len(names) == len(result.readings) else f"{', '.join(names)}: "
        yield Line(f"Warning: {of}{said}", "warning")
    yield from facts("Assumed", result.assumptions)
    yield Code("Reproduce with", result.command)
    yield Listing("Each stage by itself", "sh", "\n".join(_commands(result)))


def _also(result: Ladder) -> Iterator[str]:
    for reading in result.readings:
        for stage in reading.stages:
            listed = ", ".join(f"{name} {said}" for name, said in stage.also.items())
            if listed:
                yield f"Stage {stage.stage} also changes defaults: {listed}."


def _warnings(result: Ladder) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for reading in result.readings:
        for said in reading.warnings:
            found.setdefault(said, []).append(NAMES[reading.name])
    return found


def _commands(result: Ladder) -> list[str]:
    """Return each stage's line once: readings may share their start."""
    return list(dict.fromkeys(stage.command for reading in result.readings for stage in reading.stages))


def _data(result: Ladder) -> Table:
    rows = tuple(_row(reading, stage) for reading in result.readings for stage in reading.stages)
    return Table("Ladder", _DATA, rows)


def _row(reading: LadderReading, stage: LadderStage) -> tuple[str, ...]:
    peak, time = stage.peak, stage.time
    return (
        reading.name,
        str(stage.stage),
        stage.change,
        stage.strategy.precision,
        stage.storage.kind,
        *(str(size) for _, size in parts_of(stage)),
        str(peak.allocated),
        str(peak.reserved),
        str(peak.device),
        str(stage.saved),
        peak.phase,
        stage.verdict,
        "" if stage.speed is None else f"{stage.speed:.4f}",
        "" if time is None else f"{time.tokens_per_second_per_gpu:.0f}",
        "" if time is None else str(time.validated).lower(),
        str(stage.host_memory),
        stage.command,
    )
