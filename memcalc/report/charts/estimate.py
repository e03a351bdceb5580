"""Charts of one job: its GPU at the peak with what each phase allocates, and memory over one step on each stage."""

from __future__ import annotations

import textwrap
from itertools import accumulate, pairwise
from operator import add
from typing import TYPE_CHECKING, Any

from memcalc.report.charts import Chart
from memcalc.report.charts.parts import (
    LIMIT,
    USABLE,
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

    from memcalc.results.details import Timeline
    from memcalc.results.estimates import Estimate, StagePeak


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


_PARTS = {
    "forward-last": "forward", "forward": "loss", "loss": "loss", "backward-last": "backward",
    "backward-end": "backward", "step": "step",
}  # fmt: skip
"""What the parts of a step are called, by the phase that begins."""
_NO_REPLAY = "no curve: this era's allocator\nis not simulated"
_RESERVE: dict[str, Any] = {"facecolor": COMPONENTS["reserve"].light, "alpha": 0.3}
_TOP: dict[str, Any] = {"color": INK["text"].light, "linewidth": 0.9}


def timeline_chart(result: Estimate) -> Chart:
    """Return the memory timeline of an estimate that was asked for one."""
    shown = result.timeline
    title = head_of(result)[1].text
    text = f"one step on {_where(result)}"

    def draw(figure: Figure) -> None:
        narrow = is_narrow(figure)
        heading(figure, f"Memory over {text}{_beyond(result)}", title, "bad" if _beyond(result) else "")
        axes = _panels(figure, result, narrow=narrow)
        texts = []
        for (bars, curve), line in zip(axes, shown, strict=True):
            _bars(bars, result.stages[line.stage])
            if line.events:
                texts.append(_curve(curve, line))
            _over_time_frame(bars, curve, result, line)
        _below(axes, result, narrow=narrow)
        legend(figure, _over_time_keys(result))
        for group in texts:
            drop_overlaps(group)

    rows = len(shown)
    return Chart(
        "timeline",
        _over_time_alt(result, text, title),
        draw,
        (9, 2.6 + 1.9 * rows),
        (4, 2.4 + 4.2 * rows),
        _tips(result),
    )


def _where(result: Estimate) -> str:
    count, shown = len(result.stages), [line.stage for line in result.timeline]
    if count == 1:
        return "one GPU"
    if len(shown) == count:
        return f"each of {count} pipeline stages"
    listed = ", ".join(map(str, shown[:-1]))
    return f"stages {listed} and {shown[-1]} of 0 to {count - 1} (first, middle, last, and that of the peak)"


def _beyond(result: Estimate) -> str:
    """What is said where a request could not be met on some stage."""
    if all(line.limited or not line.events for line in result.timeline):
        return "" if result.verdict != "does-not-fit" else ": does not fit"
    return ": does not fit, and is drawn as on a GPU without a limit"


def _panels(figure: Figure, result: Estimate, *, narrow: bool) -> list[tuple[Axes, Axes]]:
    """Two panels a stage: phases, and the curve; one above the other on a narrow screen. All have the same y axis."""
    rows = len(result.timeline)
    if narrow:
        flat = figure.subplots(2 * rows, 1, sharey=True, squeeze=False)[:, 0]
        return list(zip(flat[::2], flat[1::2], strict=True))
    grid = figure.subplots(rows, 2, sharey=True, squeeze=False, width_ratios=[1, 2.1])
    return [(row[0], row[1]) for row in grid]


def _bars(axes: Axes, stage: StagePeak) -> None:
    for index, (phase, sizes) in enumerate(stage.phases.items()):
        reached = 0
        for name, size in sizes.items():
            (patch,) = axes.bar(
                index, size / GIB, 0.72, bottom=reached / GIB, color=COMPONENTS[name].light,
                edgecolor=INK["page"].light, linewidth=0.5,
            )  # fmt: skip
            patch.set_gid(f"stage-{stage.stage}-{phase}-{name}")
            reached += size
    axes.set_xticks(
        range(len(stage.phases)), [*map(phase_name, stage.phases)], rotation=40, ha="right", rotation_mode="anchor"
    )
    axes.tick_params(axis="x", length=0, labelsize=8)


def _curve(axes: Axes, line: Timeline) -> list[Text]:
    """Draw what is held after each allocation and free, stacked by component, and what is reserved beyond it."""
    at, gid = line.position, f"curve-{line.stage}"
    allocated, reserved = ([size / GIB for size in sizes] for sizes in (line.allocated, line.reserved))
    axes.fill_between(at, allocated, reserved, linewidth=0, gid=f"{gid}-reserve", **_RESERVE)
    heights = accumulate(line.components.values(), lambda low, more: [*map(add, low, more)])
    for name, sizes in reversed([*zip(line.components, heights, strict=True)]):  # the lowest part covers the others
        if any(line.components[name]):
            above = [size / GIB for size in sizes]
            corners = (at[0], *at, at[-1]), (0, *above, 0)
            axes.fill(*corners, color=COMPONENTS[name].light, linewidth=0, gid=f"{gid}-{name}")
    axes.plot(at, allocated, gid=f"{gid}-allocated", **_TOP)
    return _parts(axes, line)


def _parts(axes: Axes, line: Timeline) -> list[Text]:
    has_head = any(part.phase == "forward" for part in line.parts)
    starts: list[tuple[int, str, int]] = []
    for part in line.parts:
        name = _PARTS[part.phase] if part.phase != "loss" or has_head else "backward"
        if not starts or starts[-1][1:] != (name, part.micro_batch):
            starts.append((part.position, name, part.micro_batch))
    texts = []
    for (start, name, micro_batch), (end, *_) in pairwise([*starts, (line.events, "", 0)]):
        if name == "backward":
            axes.axvspan(start, end, color=INK["free"].light, linewidth=0, zorder=0)
        axes.axvline(start, color=INK["muted"].light, linewidth=0.6, zorder=0.5)
        text = "step" if micro_batch < 0 else f"{name[0].upper()}{micro_batch + 1}"
        texts.append(
            axes.text(
                end if micro_batch < 0 else (start + end) / 2,
                1.01,
                text,
                transform=axes.get_xaxis_transform(),
                ha="right" if micro_batch < 0 else "center",
                va="bottom",
                fontsize=8,
                color=INK["muted"].light,
            )
        )
    return texts


def _over_time_frame(bars: Axes, curve: Axes, result: Estimate, line: Timeline) -> None:
    budget, stage = result.budget, result.stages[line.stage]
    reserved = [max(other.reserved, default=0) for other in result.timeline]
    top = max(budget.capacity, *reserved, *(other.allocated for other in result.stages)) / GIB * 1.04
    for axes in (bars, curve):
        axes.axhline(budget.capacity / GIB, **LIMIT)
        axes.axhline(budget.usable / GIB, **USABLE)
        axes.set_ylim(0, top)
        axes.yaxis.grid(visible=True)
    bars.set_ylabel("memory [GiB]")
    bars.set_title(_named(result, stage), fontsize=8.5)
    if not line.events:
        curve.cla()
        curve.set_ylim(0, top)
        curve.set_axis_off()
        curve.text(0.5, 0.5, _NO_REPLAY, transform=curve.transAxes, ha="center", va="center", color=INK["muted"].light)
        return
    curve.set_xlim(0, line.events)


def _below(axes: list[tuple[Axes, Axes]], result: Estimate, *, narrow: bool) -> None:
    """Name the phases and what runs to the right, once for all stages where they stand below each other."""
    for bars, _ in axes[:-1] if not narrow else ():
        bars.set_xticklabels([])
    drawn = max(line.micro_batches for line in result.timeline)
    count = result.workload.accumulation_steps
    some = f"; first {drawn} of {count} micro-batches" if count > drawn else ""
    first = f"allocations and frees, in the order of one step{some}"
    text = "\n".join([*textwrap.wrap(first, 48 if narrow else 80), "F forward, L head and loss, B backward"])
    for _, curve in axes if narrow else axes[-1:]:
        curve.set_xlabel(text, fontsize=8.5)


def _named(result: Estimate, stage: StagePeak) -> str:
    flight = f"{stage.in_flight} micro-batch{'es' * (stage.in_flight > 1)} in flight"
    name = f"stage {stage.stage}, {stage.layers} layers, {flight}" if len(result.stages) > 1 else "by phase"
    return f"{name}\npeak {gib(stage.allocated)} GiB: {phase_name(stage.phase)}"


def _over_time_keys(result: Estimate) -> list[object]:
    budget, replayed = result.budget, []
    if any(line.events for line in result.timeline):
        replayed = [patch_key("reserved, not allocated", **_RESERVE), line_key("allocated", **_TOP)]
    return [
        *(patch_key(name, COMPONENTS[name].light) for name in result.timeline[0].components),
        *replayed,
        line_key(f"capacity {gib(budget.capacity)} GiB", **LIMIT),
        line_key(f"usable for tensors {gib(budget.usable)} GiB", **USABLE),
    ]


def _tips(result: Estimate) -> dict[str, str]:
    return {
        f"stage-{line.stage}-{phase}-{name}": f"{phase_name(phase)}: {name} {gib(size)} GiB"
        for line in result.timeline
        for phase, sizes in result.stages[line.stage].phases.items()
        for name, size in sizes.items()
    }


def _over_time_alt(result: Estimate, text: str, title: str) -> str:
    stages = []
    for line in result.timeline:
        stage = result.stages[line.stage]
        phases = "; ".join(f"{phase_name(phase)} {gib(sum(sizes.values()))}" for phase, sizes in stage.phases.items())
        curve = f"; simulated, it reserves up to {gib(line.peak_reserved)}" if line.events else ""
        stages.append(f"Stage {stage.stage}, allocated by phase in GiB: {phases}{curve}.")
    figures = f"{' '.join(stages)} The GPU has {gib(result.budget.capacity)} GiB."
    return f"{title}. Memory over {text}{_beyond(result)}. {figures}"
