"""From A's memory to B's, one change after another, between both GPUs as stacked bars."""

from __future__ import annotations

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
from memcalc.report.palette import COMPONENTS, INK
from memcalc.report.tables import gib
from memcalc.results.names import component_name
from memcalc.units import GIB, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from memcalc.results.diff import Diff, DiffFigures, DiffStep

_BAR, _STEP = 0.72, 0.5
_SMALL = 8.5
_MORE: dict[str, Any] = {"facecolor": INK["muted"].light, "edgecolor": INK["muted"].light}
_LESS: dict[str, Any] = {"facecolor": INK["page"].light, "edgecolor": INK["muted"].light, "hatch": "////"}
"""What a change adds and what it gives back: apart without any colour, and no component's hue."""
_PAPER: dict[str, Any] = {"facecolor": INK["page"].light, "edgecolor": "none", "pad": 0.6}
"""Behind words, so that no line crosses them."""


def chart(result: Diff) -> Chart:
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
