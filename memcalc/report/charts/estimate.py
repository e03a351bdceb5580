"""One GPU at the peak as a stacked bar against its capacity, and below it what is allocated in each phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.report.charts import Chart
from memcalc.report.charts.parts import (
    LIMIT,
    USABLE,
    beyond,
    drop_overlaps,
    heading,
    keep_inside,
    legend,
    line_key,
    patch_key,
    stacked,
)
from memcalc.report.estimate import MOODS, bar_of, head_of
from memcalc.report.palette import COMPONENTS, INK
from memcalc.report.palette import MOODS as SHADES
from memcalc.report.tables import gib, percent
from memcalc.results.names import component_name, phase_name
from memcalc.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

    from memcalc.results.estimates import Estimate

_BAR, _PHASE = 1.2, 0.62
_FIRST = 1.9
"""Where the first phase stands below the bar."""
_RANGE: dict[str, Any] = {
    "color": INK["text"].light,
    "linewidth": 1.4,
    "marker": "|",
    "markersize": 9,
    "markeredgewidth": 1.6,
}


def chart(result: Estimate) -> Chart:
    """Return the chart of ``memcalc estimate``."""
    verdict, title = (line.text for line in head_of(result))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        heading(figure, verdict, title, MOODS[result.verdict])
        _frame(axes, result)
        device = stacked(axes, 0, bar_of(result).parts, _BAR, "part-")
        free, text = _limits(axes, result)
        _phases(axes, result)
        legend(figure, _keys(result))
        keep_inside(axes, [*device, *free], result.budget.capacity / GIB)
        drop_overlaps(text)

    tips = {f"part-{name}": _sized(result, name, size) for name, size in bar_of(result).parts}
    tips |= {
        f"phase-{phase}-{name}": f"{phase_name(phase)}: {name} {gib(size)} GiB"
        for phase, sizes in _by_phase(result).items()
        for name, size in sizes.items()
    }
    return Chart("estimate", _alt(result, verdict, title), draw, (9, 5.2), (4, 6.4), tips)


def _by_phase(result: Estimate) -> dict[str, dict[str, int]]:
    """The phases of the stage where the peak stands."""
    return result.stages[result.peak.stage].phases


def _sized(result: Estimate, name: str, size: int) -> str:
    return f"{component_name(name)} {gib(size)} GiB ({percent(size, result.peak.device)}%)"


def _reach(result: Estimate) -> float:
    """The end of the axis [GiB]."""
    return max(result.budget.capacity, result.peak.device, result.interval.high) / GIB * 1.03


def _frame(axes: Axes, result: Estimate) -> None:
    phases = _by_phase(result)
    marked = {result.peak.phase: " (peak)"}
    axes.set_yticks(
        [0, _FIRST - 0.85, *(_FIRST + index for index in range(len(phases)))],
        [f"one GPU  {gib(result.peak.device)}", "allocated, by phase:"]
        + [f"{phase_name(name)}{marked.get(name, '')}  {gib(sum(sizes.values()))}" for name, sizes in phases.items()],
    )
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(_FIRST + len(phases) - 1 + 0.5, -1.6)
    axes.set_xlim(0, _reach(result))
    axes.set_xlabel("memory [GiB]")
    axes.xaxis.grid(visible=True)


def _limits(axes: Axes, result: Estimate) -> tuple[list[tuple[str, int, Rectangle]], list[Text]]:
    """Draw the capacity, what is free or missing, and the predicted range; return the free part and the words."""
    capacity, device = result.budget.capacity, result.peak.device
    axes.axvline(capacity / GIB, **LIMIT)
    low, high = result.interval.low / GIB, result.interval.high / GIB
    axes.plot([low, high], [-0.82, -0.82], gid="range", **_RANGE)
    right = capacity / GIB < _reach(result) / 2
    text, side = f"GPU: {gib(capacity)} GiB", "left" if right else "right"
    named = axes.annotate(
        text, (capacity / GIB, -1.32), (4 if right else -4, 0), textcoords="offset points", ha=side, va="center",
        fontsize=8.5,
    )  # fmt: skip
    if device >= capacity:
        beyond(axes, 0, _BAR, capacity, device)
        missing = axes.text(
            _reach(result), -1.32, f"over by {gib(device - capacity)} GiB", ha="right", va="center", fontsize=8.5,
            fontweight="bold", color=SHADES["bad"].light,
        )  # fmt: skip
        return [], [named, missing]
    free = capacity - device
    (patch,) = axes.barh(0, free / GIB, _BAR, left=device / GIB, color=INK["free"].light, edgecolor=INK["rule"].light)
    return [("headroom", free, patch)], [named]


def _phases(axes: Axes, result: Estimate) -> None:
    phases = _by_phase(result)
    for index, (phase, sizes) in enumerate(phases.items()):
        stacked(axes, _FIRST + index, sizes.items(), _PHASE, f"phase-{phase}-")
    ends = (_FIRST - 0.5, _FIRST + len(phases) - 0.5)
    axes.vlines(result.budget.usable / GIB, *ends, **USABLE)


def _keys(result: Estimate) -> list[object]:
    budget, device = result.budget, result.peak.device
    keys = [patch_key(_sized(result, name, size), COMPONENTS[name].light) for name, size in bar_of(result).parts]
    if device < budget.capacity:
        free = budget.capacity - device
        keys.append(patch_key(f"headroom {gib(free)} GiB", INK["free"].light, edgecolor=INK["rule"].light))
    else:
        missing = f"over by {gib(device - budget.capacity)} GiB"
        keys.append(patch_key(missing, "none", edgecolor=SHADES["bad"].light, hatch="////"))
    span = f"{gib(result.interval.low)}–{gib(result.interval.high)}"
    return [
        *keys,
        line_key(f"capacity {gib(budget.capacity)} GiB", **LIMIT),
        line_key(f"usable for tensors {gib(budget.usable)} GiB", **USABLE),
        line_key(f"95% range {span} GiB", **_RANGE),
    ]


def _alt(result: Estimate, verdict: str, title: str) -> str:
    parts = ", ".join(f"{component_name(name)} {gib(size)}" for name, size in bar_of(result).parts)
    phases = "; ".join(f"{phase_name(name)} {gib(sum(sizes.values()))}" for name, sizes in _by_phase(result).items())
    return (
        f"{title}: {verdict}. One GPU at the peak in GiB: {parts}; it has {gib(result.budget.capacity)}, "
        f"of which {gib(result.budget.usable)} for tensors. Allocated by phase in GiB: {phases}."
    )
