"""A ladder as stacked bars, a panel for each reading, all on one scale from zero with the GPU's capacity."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from memcalc.report.charts.picture import Chart
from memcalc.report.ladder import NAMES, bars_of, verdict_of
from memcalc.report.palette import COMPONENTS, INK, MOODS
from memcalc.report.tables import gib
from memcalc.units import GIB, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memcalc.report.tables import Bars, BarsRow
    from memcalc.results import Ladder, LadderReading

__all__ = ["chart"]

WIDTH, HEAD, FOOT, BAR = 9.0, 0.75, 1.35, 0.42
"""Inches."""
WORDS = 0.36
"""Room for what is said beside the longest bar, as a share of the scale."""
LINE = 92
"""Characters of a line above a panel."""


def chart(result: Ladder) -> Chart:
    """Return the chart of ``memcalc ladder``."""
    panels = [(reading, bars_of(result, reading)) for reading in result.readings]
    hardware = result.hardware
    subject = f"{result.model.name} ({format_count(result.model.parameters)}) on {hardware.gpus} × {hardware.gpu}"

    def draw(figure: Figure) -> None:
        rows = [len(block.rows) for _, block in panels]
        found = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for axes, (reading, block) in zip(found, panels, strict=True):
            _panel(axes, result, reading, block)
        figure.suptitle(subject, x=0.01, ha="left", fontsize=11, fontweight="bold")
        found[-1].set_xlabel("memory of one GPU at the peak [GiB]")
        (line, *parts), (limit, *names) = found[0].get_legend_handles_labels()
        figure.legend([*parts, line], [*names, limit], loc="outside lower center", ncols=4, fontsize=8.5)

    alt = f"{subject}. " + ". ".join(verdict_of(result, reading) for reading in result.readings)
    rows = sum(len(block.rows) for _, block in panels)
    size = (WIDTH, FOOT + HEAD * len(panels) + BAR * rows)
    return Chart("ladder", alt, draw, size, _tips(panels))


def _panel(axes: Axes, result: Ladder, reading: LadderReading, block: Bars) -> None:
    """One reading: the stages from top to bottom."""
    end, capacity = block.end / GIB, block.capacity / GIB
    for place, row in enumerate(block.rows):
        _stack(axes, reading, block, place)
        reached = min(sum(size for _, size in row.parts) / GIB, end)
        beside = capacity if reached <= capacity < reached + WORDS * end else reached
        _say(axes, row, place, beside + end * 0.012, cut=sum(size for _, size in row.parts) > block.end)
    limit = f"{block.limit}, {gib(block.capacity, 1)} GiB"
    axes.axvline(capacity, color=INK["limit"].light, linestyle="--", linewidth=1.4, label=limit)
    axes.set_yticks(range(len(block.rows)), [row.label for row in block.rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(block.rows) - 0.5, -0.5)
    axes.set_xlim(0, end * (1 + WORDS))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= end])
    kept = textwrap.fill(f"{reading.precision}: {reading.storage.said}", LINE)
    axes.set_title(verdict_of(result, reading), loc="left", pad=6 + 12 * (kept.count("\n") + 1))
    axes.annotate(
        kept,
        (0, 1),
        (0, 5),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8.5,
        color=INK["muted"].light,
    )


def _stack(axes: Axes, reading: LadderReading, block: Bars, place: int) -> None:
    """The parts of one stage from zero, cut at the end of the scale."""
    end, reached = block.end / GIB, 0.0
    for name, size in block.rows[place].parts:
        shown = min(size / GIB, end - reached)
        label = name if place == 0 else "_nolegend_"
        (patch,) = axes.barh(
            place, shown, 0.7, left=reached, color=COMPONENTS[name].light, edgecolor=INK["page"].light, label=label
        )
        patch.set_gid(f"{reading.name}-{place}-{name}")
        reached += shown


def _say(axes: Axes, row: BarsRow, place: int, beside: float, *, cut: bool) -> None:
    """The verdict beside a bar, what it saves and costs below it, and a break where the bar is cut."""
    said = f"{row.verdict}, bar cut" if cut else row.verdict
    up = 0.17 if row.says else 0.0
    axes.text(beside, place - up, said, va="center", fontsize=8.5, color=MOODS[row.mood].light)
    axes.text(beside, place + up, row.says, va="center", fontsize=7.5, color=INK["muted"].light)
    if cut:
        style = {"va": "center", "ha": "right", "fontsize": 17, "fontweight": "bold", "color": INK["page"].light}
        axes.text(beside * 0.985, place, "//", **style)


def _tips(panels: list[tuple[LadderReading, Bars]]) -> dict[str, str]:
    """What each part is, where a pointer rests on it."""
    return {
        f"{reading.name}-{place}-{name}": f"{NAMES[reading.name]}, stage {row.label}: {name} {gib(size)} GiB"
        for reading, block in panels
        for place, row in enumerate(block.rows)
        for name, size in row.parts
    }
