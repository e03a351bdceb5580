"""A ladder as stacked bars, a panel for each reading, all on one scale from zero with the GPU's capacity."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from memcalc.report.charts import Chart
from memcalc.report.charts.parts import LIMIT, heading, is_narrow, legend, line_key, patch_key
from memcalc.report.ladder import bars_of, verdict_of
from memcalc.report.palette import COMPONENTS, INK, MOODS
from memcalc.report.tables import gib
from memcalc.results.names import component_name
from memcalc.units import GIB, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memcalc.report.tables import Bars, BarsRow
    from memcalc.results.ladder import Ladder, LadderReading

_WIDE, _SLIM = (9.0, 0.46, 0.92), (4.0, 0.72, 1.2)
"""Inches: the figure's width, the height of a bar with its words, and that of what stands above a panel."""
_ENDS = 1.9
"""Inches above and below all panels."""
_WORDS = 0.36
"""Room for what is said beside the longest bar, as a share of the scale."""
_TITLE, _SMALL, _SMALLER = 10.5, 8.5, 7.5


def chart(result: Ladder) -> Chart:
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
    return Chart("ladder", alt, draw, _size(panels, *_WIDE), _size(panels, *_SLIM), _tips(panels))


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
    _write(axes, start + end * 0.012, index - up, _said(row, end), _SMALL, MOODS[row.mood].light)
    _write(axes, start + end * 0.012, index + up, row.says, _SMALLER, INK["muted"].light)


def _above(axes: Axes, row: BarsRow, index: int, end: float) -> None:
    _write(axes, end * 0.008, index - 0.33, _wrapped(row.label, 56), _SMALL, INK["text"].light)
    says = f", {row.says}" if row.says else ""
    _write(axes, end * 0.008, index - 0.07, _said(row, end) + says, _SMALLER, MOODS[row.mood].light)


def _wrapped(text: str, width: int) -> str:
    """A text in lines, broken also at the commas between a stage's words.

    >>> print(_wrapped("at stage 2, recompute=full,micro-batch=2", 27))
    at stage 2, recompute=full,
    micro-batch=2
    """
    filled = textwrap.fill(re.sub(",(?! )", ",\0 ", text), width, break_on_hyphens=False)
    return filled.replace("\0 ", "").replace("\0", "")


def _said(row: BarsRow, end: float) -> str:
    return f"{row.verdict}, bar cut" if row.size / GIB > end else row.verdict


def _write(axes: Axes, x: float, y: float, text: str, size: float, colour: str) -> None:
    ground = {"facecolor": INK["page"].light, "edgecolor": "none", "pad": 0.4}
    if text:
        axes.text(x, y, text, va="center", fontsize=size, color=colour, bbox=ground)


def _broken(axes: Axes, index: float, end: float) -> None:
    axes.text(
        end * 0.985, index, "//", va="center", ha="right", fontsize=17, fontweight="bold", color=INK["page"].light
    )  # fmt: skip


def _tips(panels: list[tuple[LadderReading, Bars]]) -> dict[str, str]:
    return {
        f"{mode.name}-{index}-{name}": f"{mode.precision}, stage {row.label}: {name} {gib(size)} GiB"
        for mode, block in panels
        for index, row in enumerate(block.rows)
        for name, size in row.parts
    }
