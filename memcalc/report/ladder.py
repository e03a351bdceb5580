"""A ladder as a document: what fits from which stage on, then each reading with its bars, its stages and its parts."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.estimate import MOODS, briefly, warned
from memcalc.report.plan_words import assumed
from memcalc.report.plan_words import speed as rate_of
from memcalc.report.tables import (
    Bars,
    BarsRow,
    Block,
    Code,
    Column,
    Line,
    Listing,
    Report,
    Table,
    facts,
    gib,
    header,
    made,
    said,
    trimmed,
)
from memcalc.results.changes import Ladder, LadderReading, LadderStage
from memcalc.results.estimates import StepTime
from memcalc.results.names import phase_name
from memcalc.specs.job import command_line
from memcalc.units import format_count

NAMES = {
    "pure-16-bit": "pure 16-bit", "fp32-master": "fp32 master", "autocast": "autocast", "fp32": "fp32",
}  # fmt: skip
"""Readings as they are said."""
_ROW = 80
"""Letters above which a screen does not say why something is left out."""
CUT = 2
"""A bar beyond this many times the larger of the capacity and the middle stage is cut, so that the others are seen."""
_DATA = (
    *header("reading | stage > | change | precision | storage"),
    *(
        Column(name, "bytes", right=True)
        for name in (
            "parameters", "gradients", "optimizer", "activations", "buffers", "reserve", "context",
            "allocated", "reserved", "device", "saved",
        )
    ),
    *header("peak phase | verdict | speed > | tok/s/GPU >"),
    *(Column(name, "s", right=True) for name in ("step", "low", "high")),
    *header("MFU [%] > | validated | host memory [bytes] > | command"),
)  # fmt: skip


def report(result: Ladder) -> Report:
    """Return the answer of ``memcalc ladder``."""
    blocks: list[Block] = [*_head(result)]
    for mode in result.readings:
        blocks += _reading(result, mode)
    return made(result, _data(result), *blocks, *_foot(result), screen=_screen(result))


def _screen(result: Ladder) -> Iterator[Block]:
    """Yield what a terminal shows: one reading, that of mixed precision where there are several."""
    named = {mode.name: mode for mode in result.readings}
    mode = named.get("fp32-master") or result.readings[0]
    *_, title = _head(result)
    others = [other for other in result.readings if other is not mode]
    yield Line(verdict_of(result, mode), "verdict", _mood(mode))
    yield title
    yield bars_of(result, mode)._replace(compact=True, legend=True)
    stages = _stages(mode)
    columns = tuple(column._replace(unit="") for column in stages.columns)
    hidden = {"peak at", "total"}
    if len({stage.verdict for stage in mode.stages}) == 1:
        hidden.add("verdict")
    if not any(stage.host_memory for stage in mode.stages):
        hidden.add("host")
    indices = [index for index, column in enumerate(columns) if column.title not in hidden]
    yield stages._replace(columns=columns, titled=False).keep(indices)
    for other in others:
        sizes = " → ".join(gib(stage.peak.device, 1) for stage in other.stages)
        yield said("Or", f"--reading {other.name}", f"{sizes} GiB")
    for line in _left_out(result):
        what, _, why = line.text.partition(": ")
        yield line if len(line.text) <= _ROW else Line(f"{what}: {why.partition(': ')[0]}. Why: -v")
    yield from warned(briefly(note for note, names in _warnings(result).items() if NAMES[mode.name] in names))
    stated = {"framework", "seq_len", "optimizer_impl", "loss", "kernels"}
    yield from assumed({name: text for name, text in result.assumptions.items() if name not in stated})
    yield from _next(result)
    sizes = "saved" if "host" in hidden else "saved, host"
    yield Line(f"{sizes} in GiB; speed × the stage before · -v: all readings, components", "faint")


def _next(result: Ladder) -> Iterator[Block]:
    """Yield, where no stage fits, the line that searches what no usual stage changes, such as layouts."""
    if all(mode.first is None for mode in result.readings):
        yield Code("Next, what would fit", command_line(result.job.model_copy(update={"query": {}}), "plan"))


def _mood(mode: LadderReading) -> str:
    return "bad" if mode.first is None else MOODS[mode.stages[mode.first].verdict]


def _left_out(result: Ladder) -> Iterator[Line]:
    for note in result.left_out:
        yield Line(f"Left out: {note}.")
    for mode in result.readings:
        for note in mode.left_out:
            yield Line(f"Left out of {NAMES[mode.name]}: {note}")


def verdict_of(result: Ladder, mode: LadderReading) -> str:
    """Return the first stage that fits, in one sentence, and which do not fit after it."""
    name, capacity = NAMES[mode.name], f"{gib(result.capacity, 1)} GiB"
    if mode.first is None:
        least = min(mode.stages, key=lambda stage: stage.peak.device)
        needed = f"smallest is stage {least.stage}, {gib(least.peak.device, 1)} of {capacity}"
        return f"does not fit · {name}: {needed}"
    stage = mode.stages[mode.first]
    change = stage.change or stage.strategy.precision
    where = f"from {f'stage {stage.stage}' if stage.stage else 'the start'} ({change})"
    after = [str(later.stage) for later in mode.stages[stage.stage :] if later.verdict == "does-not-fit"]
    but = f"; stage {', '.join(after)} does not" if after else ""
    return f"{stage.verdict} · {name}: {where}, {gib(stage.peak.device, 1)} of {capacity}{but}"


def label_of(stage: LadderStage) -> str:
    """Return a stage's number and what it changes; the precision at the start."""
    return f"{stage.stage}  {'+ ' + stage.change if stage.change else 'start, ' + stage.strategy.precision}"


def parts_of(stage: LadderStage) -> tuple[tuple[str, int], ...]:
    """Return the parts of ``device`` [bytes] in the order in which they are stacked."""
    inside = [(name, int(size)) for name, size in stage.components.model_dump().items()]
    return (*inside, ("context", stage.context))


def end_of(result: Ladder) -> int:
    """Return the end of the scale [bytes]: that of the largest stage, but where one dwarfs the others."""
    sizes = sorted(stage.peak.device for mode in result.readings for stage in mode.stages)
    most = CUT * max(result.capacity, sizes[len(sizes) // 2])
    return max(result.capacity, min(sizes[-1], most))


def bars_of(result: Ladder, mode: LadderReading) -> Bars:
    """Return a reading's stages as bars; all readings have the same scale."""
    rows = tuple(
        BarsRow(label_of(stage), parts_of(stage), _short(stage), MOODS[stage.verdict], _effect(stage))
        for stage in mode.stages
    )
    return Bars(rows, result.capacity, end_of(result), result.hardware.gpu, legend=mode is result.readings[0])


def _short(stage: LadderStage) -> str:
    return f"{gib(stage.peak.device, 1)} GiB, {stage.verdict.replace('-', ' ')}"


def _effect(stage: LadderStage) -> str:
    if not stage.stage:
        return ""
    less = f"{'−' if stage.saved >= 0 else '+'}{gib(abs(stage.saved), 1)} GiB"
    return less if stage.speed is None else f"{less}, {_times(stage.speed)}× speed"


def _times(speed: float) -> str:
    return f"{speed:.2f}" if speed < 2 else f"{speed:.1f}"


def _head(result: Ladder) -> Iterator[Line]:
    hardware = result.hardware
    for mode in result.readings:
        yield Line(verdict_of(result, mode), "verdict", _mood(mode))
    strategy = result.readings[0].stages[0].strategy
    subject = f"{result.model.name} ({format_count(result.model.parameters)} parameters)"
    index = f"{hardware.gpus} × {hardware.gpu}: {strategy.framework}, sequence length {result.seq_len}"
    kind = " (usual tuning order, until it fits)" if result.recipe else ""
    yield Line(f"{subject} on {index}{kind}", "title")


def _reading(result: Ladder, mode: LadderReading) -> Iterator[Block]:
    yield Line(f"{NAMES[mode.name]} ({mode.precision})", "heading")
    yield Line(f"Keeps {mode.storage.said}. {_widths(mode)}")
    yield bars_of(result, mode)
    yield _stages(mode)
    yield _parts(mode)


def _widths(mode: LadderReading) -> str:
    storage, strategy = mode.storage, mode.stages[-1].strategy
    main = "main weight" if strategy.precision_aware else "fp32 master"
    named = (("weight", storage.parameter), (main, storage.master), ("gradient", storage.gradient))
    listed = [f"{name} {size}" for name, size in named if size]
    if not strategy.precision_aware:  # whose moments the sentence before names
        listed.append(f"AdamW's moments {storage.moment} + {storage.moment}")
    copies = f"; its copy under autocast {storage.cached}" if storage.cached else ""
    of = "trained parameter" if strategy.lora else "parameter"
    return f"Bytes per {of}: {', '.join(listed)}{copies}."


def _stages(mode: LadderReading) -> Table:
    columns = header(
        "# > | stage | total [GiB] > | saved [GiB] > | speed [×] > | tok/s/GPU [90% range] > | "
        "host [GiB/node] >2 | peak at <3 | verdict"
    )
    table = Table(f"Stages, {NAMES[mode.name]}", columns, tuple(_stage(stage) for stage in mode.stages))
    wide = [index for index, column in enumerate(columns) if column.title == "host"]
    page = table.keep([*(index for index in range(len(columns)) if index not in wide), *wide])
    return table._replace(pasted=trimmed(page, len(columns) - len(wide), [f"stage {row[0]}" for row in table.rows]))


def _stage(stage: LadderStage) -> tuple[str, ...]:
    speed = "" if stage.speed is None else _times(stage.speed)
    return (
        str(stage.stage),
        stage.change or f"start, {stage.strategy.precision}",
        gib(stage.peak.device),
        gib(stage.saved).replace("-", "−") if stage.stage else "",
        speed,
        "" if stage.time is None else rate_of(stage.time),
        gib(stage.host_memory, 1) if stage.host_memory else "",
        phase_name(stage.peak.phase),
        stage.verdict.replace("-", " "),
    )


def _parts(mode: LadderReading) -> Table:
    """Components at the peak; what is not GiB stands in the other table."""
    titles = ("params", "grads", "optim", "activ", "buffers", "cache", "context, comm.")
    columns = (
        Column("#", right=True),
        *(Column(title, "GiB", right=True) for title in titles),
        *header("total [GiB] > | reserved [GiB] >1 | allocated [GiB] >1"),
    )
    rows = tuple(
        (
            str(stage.stage),
            *(gib(size) for _, size in parts_of(stage)),
            *(gib(size) for size in (stage.peak.device, stage.peak.reserved, stage.peak.allocated)),
        )
        for stage in mode.stages
    )
    return Table(f"At the peak, {NAMES[mode.name]}", columns, rows)


def _foot(result: Ladder) -> Iterator[Block]:
    yield from _left_out(result)
    for note in dict.fromkeys(_also(result)):
        yield Line(note)
    yield Line("Speed is relative to the previous stage, also where a stage does not fit.", "faint")
    if any(mode.stages[0].strategy.precision == "fp32" for mode in result.readings):
        yield Line("fp32 matmuls run without TF32 (PyTorch's default).", "faint")
    for note, names in _warnings(result).items():
        of = "" if len(names) == len(result.readings) else f"{', '.join(names)}: "
        yield Line(f"Warning: {of}{note}", "warning")
    yield from facts("Assumed", result.assumptions)
    yield Code("Reproduce with", result.command)
    yield Listing("Stage commands", "sh", "\n".join(_commands(result)))


def _also(result: Ladder) -> Iterator[str]:
    for mode in result.readings:
        for stage in mode.stages:
            listed = ", ".join(f"{name} {text}" for name, text in stage.also.items())
            if listed:
                yield f"Stage {stage.stage} also changes defaults: {listed}."


def _warnings(result: Ladder) -> dict[str, list[str]]:
    match: dict[str, list[str]] = {}
    for mode in result.readings:
        for note in mode.warnings:
            match.setdefault(note, []).append(NAMES[mode.name])
    return match


def _commands(result: Ladder) -> list[str]:
    """Return each stage's line once: readings may share their start."""
    return list(dict.fromkeys(stage.command for mode in result.readings for stage in mode.stages))


def _data(result: Ladder) -> Table:
    rows = tuple(_row(mode, stage) for mode in result.readings for stage in mode.stages)
    return Table("Ladder", _DATA, rows)


def _timed(time: StepTime) -> list[str]:
    """Return the throughput, the step with its range [s], the share of the peak, and whether runs validate it."""
    seconds = [f"{end:.4g}" for end in (time.step, time.low, time.high)]
    rate, share = f"{time.tokens_per_second_per_gpu:.0f}", f"{100 * time.mfu:.1f}"
    return [rate, *seconds, share, str(time.validated).lower()]


def _row(mode: LadderReading, stage: LadderStage) -> tuple[str, ...]:
    peak, time = stage.peak, stage.time
    return (
        mode.name,
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
        *(_timed(time) if time is not None else [""] * 6),
        str(stage.host_memory),
        stage.command,
    )
