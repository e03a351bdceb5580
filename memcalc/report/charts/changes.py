"""Charts of a job that is changed, as stacked bars: each change between two GPUs, and the stages of a ladder."""

from __future__ import annotations

import re
import textwrap
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from memcalc.report.charts import Chart
from memcalc.report.charts.parts import (
    LIMIT,
    beyond,
    drop_overlaps,
    heading,
    is_narrow,
    keep_inside,
    legend,
    line_key,
    patch_key,
    stacked,
)
from memcalc.report.diff import brief, headline
from memcalc.report.estimate import MOODS
from memcalc.report.ladder import bars_of, verdict_of
from memcalc.report.palette import COMPONENTS, INK
from memcalc.report.palette import MOODS as SHADES
from memcalc.report.tables import gib
from memcalc.results.names import component_name
from memcalc.units import GIB, format_count, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from memcalc.report.tables import Bars, BarsRow
    from memcalc.results.changes import Diff, DiffFigures, DiffStep, Ladder, LadderReading


_BAR, _STEP = 0.72, 0.5
_SMALL = 8.5
_MORE: dict[str, Any] = {"facecolor": INK["muted"].light, "edgecolor": INK["muted"].light}
_LESS: dict[str, Any] = {"facecolor": INK["page"].light, "edgecolor": INK["muted"].light, "hatch": "////"}
"""What a change adds and what it gives back: apart without any colour, and no component's hue."""
_PAPER: dict[str, Any] = {"facecolor": INK["page"].light, "edgecolor": "none", "pad": 0.6}
"""Behind words, so that no line crosses them."""


def diff_chart(result: Diff) -> Chart:
    """Return the chart of ``memcalc diff``."""
    text = headline(result)
    about = f"A: {result.a.name}. B: {result.b.name}."

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        heading(figure, text, about, MOODS[result.b.figures.verdict])
        _frame(axes, result, narrow=is_narrow(figure))
        begin = stacked(axes, 0, _parts(result.a.figures), _BAR, "a-")
        end = stacked(axes, len(result.steps) + 1, _parts(result.b.figures), _BAR, "b-")
        _too_large(axes, result)
        label = _steps(axes, result)
        _limits(axes, result)
        legend(figure, _keys(result))
        keep_inside(axes, begin, result.a.figures.capacity / GIB)
        keep_inside(axes, end, result.b.figures.capacity / GIB)
        drop_overlaps(label)

    rows = len(result.steps) + 2
    size, narrow = (9.0, 2.5 + 0.5 * rows), (4.0, 3.9 + 0.62 * rows)
    return Chart("diff", _alt(result, text, about), draw, size, narrow, _tips(result))


def _parts(figures: DiffFigures) -> list[tuple[str, int]]:
    return [(name, int(size)) for name, size in figures.components.model_dump().items()]


def _points(result: Diff) -> list[DiffFigures]:
    return [result.a.figures, *(step.after for step in result.steps), result.b.figures]


def _frame(axes: Axes, result: Diff, *, narrow: bool) -> None:
    """Names of the rows, before their bars or where there is little room above them; the axis from zero."""
    names = [
        f"A · {gib(result.a.figures.device)}",
        *(f"{index} · {brief(step)}" for index, step in enumerate(result.steps, 1)),
        f"B · {gib(result.b.figures.device)}",
    ]
    if narrow:
        for index, name in enumerate(names):
            axes.text(0, index - 0.4, name, ha="left", va="bottom", fontsize=_SMALL, bbox=_PAPER)
    axes.set_yticks([] if narrow else range(len(names)), [] if narrow else names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(names) - 0.4, -0.8 if narrow else -0.6)
    points = _points(result)
    axes.set_xlim(0, max(max(point.device, point.capacity) for point in points) / GIB * 1.03)
    axes.set_xlabel("memory of one GPU [GiB]")
    axes.xaxis.grid(visible=True)


def _steps(axes: Axes, result: Diff) -> list[Text]:
    """Draw what each change adds or gives back, from where the one before it ended; return the words."""
    text = []
    points = _points(result)
    for index, (step, (before, after)) in enumerate(zip(result.steps, pairwise(points), strict=False), 1):
        low, high = sorted((before.device / GIB, after.device / GIB))
        (patch,) = axes.barh(index, high - low, _STEP, left=low, **(_MORE if step.cost.device > 0 else _LESS))
        patch.set_gid(f"step-{index}")
        text.append(_said(axes, index, step, low, high))
    for index, point in enumerate(points[:-1]):
        axes.vlines(point.device / GIB, index, index + 1, color=INK["muted"].light, linewidth=0.9, zorder=0.5)
    return text


def _said(axes: Axes, index: int, step: DiffStep, low: float, high: float) -> Text:
    """Write what a step costs behind its bar, or before it where more room is there."""
    text = f"{signed(step.cost.device / GIB)} GiB, {signed(100 * step.cost.throughput, 1)}% tokens/s"
    behind = axes.get_xlim()[1] - high > low
    return axes.annotate(
        text, (high if behind else low, index), (6 if behind else -6, 0), textcoords="offset points",
        ha="left" if behind else "right", va="center", fontsize=_SMALL,
        bbox=_PAPER,
    )  # fmt: skip


def _limits(axes: Axes, result: Diff) -> None:
    rows = enumerate(point.capacity for point in _points(result))
    for capacity, group in groupby(rows, key=lambda row: row[1]):
        places = [index for index, _ in group]
        axes.vlines(capacity / GIB, places[0] - 0.5, places[-1] + 0.5, **LIMIT)


def _too_large(axes: Axes, result: Diff) -> None:
    for index, item in ((0, result.a.figures), (len(result.steps) + 1, result.b.figures)):
        if item.device > item.capacity:
            beyond(axes, index, _BAR, item.capacity, item.device)


def _keys(result: Diff) -> list[object]:
    before, after = dict(_parts(result.a.figures)), dict(_parts(result.b.figures))
    keys = [
        patch_key(f"{component_name(name)} {gib(size)} → {gib(after[name])}", COMPONENTS[name].light)
        for name, size in before.items()
    ]
    if result.steps:
        keys += [patch_key("adds", **_MORE), patch_key("saves", **_LESS)]
    rooms = dict.fromkeys(gib(point.capacity) for point in _points(result))
    return [*keys, line_key(f"capacity {' → '.join(rooms)} GiB", **LIMIT)]


def _tips(result: Diff) -> dict[str, str]:
    sides = (("a", result.a.figures), ("b", result.b.figures))
    tips = {
        f"{index}-{name}": f"{index.upper()}: {component_name(name)} {gib(size)} GiB"
        for index, item in sides
        for name, size in _parts(item)
    }
    return tips | {
        f"step-{index}": f"{step.name}: {signed(step.cost.device / GIB)} GiB, then {gib(step.after.device)} GiB"
        for index, step in enumerate(result.steps, 1)
    }


def _alt(result: Diff, text: str, about: str) -> str:
    steps = "; ".join(
        f"{step.name} {signed(step.cost.device / GIB)} GiB and {signed(100 * step.cost.throughput, 1)}% tokens a second"
        for step in result.steps
    )
    rooms = " → ".join(dict.fromkeys(gib(point.capacity) for point in _points(result)))
    return f"{text}. {about} Step by step: {steps or 'nothing'}. The GPU has {rooms} GiB."


_WIDE, _SLIM = (9.0, 0.46, 0.92), (4.0, 0.72, 1.2)
"""Inches: the figure's width, the height of a bar with its words, and that of what stands above a panel."""
_ENDS = 1.9
"""Inches above and below all panels."""
_WORDS = 0.36
"""Room for what is said beside the longest bar, as a share of the scale."""
_TITLE, _SMALLER = 10.5, 7.5


def ladder_chart(result: Ladder) -> Chart:
    """Return the chart of ``memcalc ladder``."""
    panels = [(mode, bars_of(result, mode)) for mode in result.readings]
    hardware = result.hardware
    subject = f"{result.model.name} ({format_count(result.model.parameters)}) on {hardware.gpus} × {hardware.gpu}"

    def draw(figure: Figure) -> None:
        rows = [len(block.rows) for _, block in panels]
        heading(figure, subject, f"memory of one GPU at the peak of each stage, sequence length {result.seq_len}")
        match = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for axes, (mode, block) in zip(match, panels, strict=True):
            _panel(axes, result, mode, block, narrow=is_narrow(figure))
        match[-1].set_xlabel("memory of one GPU [GiB]")
        names = [name for name, _ in panels[0][1].rows[0].parts]
        limit = line_key(f"capacity {gib(result.capacity)} GiB", **LIMIT)
        legend(figure, [*(patch_key(component_name(name), COMPONENTS[name].light) for name in names), limit])

    alt = f"{subject}. " + ". ".join(verdict_of(result, mode) for mode in result.readings)
    return Chart("ladder", alt, draw, _size(panels, *_WIDE), _size(panels, *_SLIM), _ladder_tips(panels))


def _size(panels: list[tuple[LadderReading, Bars]], width: float, bar: float, head: float) -> tuple[float, float]:
    return width, _ENDS + sum(head + bar * len(block.rows) for _, block in panels)


def _panel(axes: Axes, result: Ladder, mode: LadderReading, block: Bars, *, narrow: bool) -> None:
    """One reading: the stages from top to bottom; their words stand beside the bars, or above them."""
    end, capacity = block.end / GIB, block.capacity / GIB
    for index, row in enumerate(block.rows):
        _stack(axes, mode, block, index, narrow=narrow)
        if narrow:
            _above(axes, row, index, end)
        else:
            _beside(axes, row, index, end, capacity)
        if row.size > block.end:
            _broken(axes, index + 0.27 * narrow, end)
    for low, high in [(index + 0.06, index + 0.48) for index in range(len(block.rows))] if narrow else [(-0.5, 99)]:
        axes.vlines(capacity, low, high, **LIMIT)
    axes.set_yticks(
        [] if narrow else range(len(block.rows)), [] if narrow else [_wrapped(row.label, 30) for row in block.rows]
    )
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(block.rows) - 0.5, -0.5)
    axes.set_xlim(0, end * (1.02 if narrow else 1 + _WORDS))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end])
    text = _wrapped(verdict_of(result, mode), 46 if narrow else 84)
    caption = _wrapped(f"{mode.precision}: {mode.storage.said}", 60 if narrow else 104)
    axes.set_title(text, loc="left", fontsize=_TITLE - narrow, pad=6 + 1.35 * _SMALL * (caption.count("\n") + 1))
    axes.annotate(
        caption, (0, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=_SMALL,
        color=INK["muted"].light,
    )  # fmt: skip


def _stack(axes: Axes, mode: LadderReading, block: Bars, index: int, *, narrow: bool) -> None:
    """The parts of one stage from zero, cut at the end of the scale."""
    end, reached = block.end / GIB, 0.0
    for name, size in block.rows[index].parts:
        shown = min(size / GIB, end - reached)
        (patch,) = axes.barh(
            index + 0.27 * narrow, shown, 0.34 if narrow else 0.7, left=reached, color=COMPONENTS[name].light,
            edgecolor=INK["page"].light,
        )  # fmt: skip
        patch.set_gid(f"{mode.name}-{index}-{name}")
        reached += shown


def _beside(axes: Axes, row: BarsRow, index: int, end: float, capacity: float) -> None:
    """The verdict beside a bar, beyond the capacity's line where it would lie on it; below, what it saves and costs."""
    reached = min(row.size / GIB, end)
    start = capacity if reached <= capacity < reached + _WORDS * end else reached
    up = 0.17 if row.says else 0.0
    _write(axes, start + end * 0.012, index - up, _ladder_said(row, end), _SMALL, SHADES[row.mood].light)
    _write(axes, start + end * 0.012, index + up, row.says, _SMALLER, INK["muted"].light)


def _above(axes: Axes, row: BarsRow, index: int, end: float) -> None:
    _write(axes, end * 0.008, index - 0.33, _wrapped(row.label, 56), _SMALL, INK["text"].light)
    says = f", {row.says}" if row.says else ""
    _write(axes, end * 0.008, index - 0.07, _ladder_said(row, end) + says, _SMALLER, SHADES[row.mood].light)


def _wrapped(text: str, width: int) -> str:
    """A text in lines, broken also at the commas between a stage's words.

    >>> print(_wrapped("at stage 2, recompute=full,micro-batch=2", 27))
    at stage 2, recompute=full,
    micro-batch=2
    """
    filled = textwrap.fill(re.sub(",(?! )", ",\0 ", text), width, break_on_hyphens=False)
    return filled.replace("\0 ", "").replace("\0", "")


def _ladder_said(row: BarsRow, end: float) -> str:
    return f"{row.verdict}, bar cut" if row.size / GIB > end else row.verdict


def _write(axes: Axes, x: float, y: float, text: str, size: float, colour: str) -> None:
    ground = {"facecolor": INK["page"].light, "edgecolor": "none", "pad": 0.4}
    if text:
        axes.text(x, y, text, va="center", fontsize=size, color=colour, bbox=ground)


def _broken(axes: Axes, index: float, end: float) -> None:
    axes.text(
        end * 0.985, index, "//", va="center", ha="right", fontsize=17, fontweight="bold", color=INK["page"].light
    )  # fmt: skip


def _ladder_tips(panels: list[tuple[LadderReading, Bars]]) -> dict[str, str]:
    return {
        f"{mode.name}-{index}-{name}": f"{mode.precision}, stage {row.label}: {name} {gib(size)} GiB"
        for mode, block in panels
        for index, row in enumerate(block.rows)
        for name, size in row.parts
    }
