"""Plans by memory and speed among all that was searched; the nearest changes where none fits."""

from __future__ import annotations

import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.report.charts import Chart
from memcalc.report.charts.parts import LIMIT, Placed, heading, is_narrow, legend, line_key, patch_key, place
from memcalc.report.palette import INK, SERIES
from memcalc.report.plan_words import rate_range
from memcalc.report.tables import gib
from memcalc.specs.options import DEGREES
from memcalc.units import GIB, format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from memcalc.results.plans import Plan, Plans

_CLOSE, _CROWD = 0.85, 6
"""Share of the highest throughput from which plans are drawn again, larger, where there are as many."""
_FRONT: dict[str, Any] = {"color": INK["muted"].light, "linewidth": 1.2}
_CLOUD: dict[str, Any] = {
    "marker": "o", "markersize": 2.4, "linestyle": "none", "markeredgewidth": 0, "alpha": 0.45, "zorder": 1,
}  # fmt: skip
_RANGE: dict[str, Any] = {"linewidth": 1.1, "alpha": 0.55, "solid_capstyle": "butt", "zorder": 1.8}
_HEADROOM = 1.06


class _Kind(NamedTuple):
    """How a plan is marked: its shape says whether its speed is checked, a hollow one that it is tight."""

    shape: str
    hollow: bool


_SHAPES = {"o": "plan, speed checked", "s": "plan, speed unchecked", "D": "plan with offload, speed unchecked"}


def chart(result: Plans) -> Chart:
    """Return the chart of ``memcalc plan``."""
    if not result.plans:
        return nothing_chart(result)
    first = result.plans[0]
    count = len(result.plans)
    text = f"{count} plan{'s' * (count > 1)} among {result.feasible:,} strategies that fit"
    subject, hues = _subject(result), _hues(result)
    crowd = [plan for plan in result.plans if _speed(plan) >= _CLOSE * max(map(_speed, result.plans))]
    zoomed = crowd if len(crowd) >= _CROWD else []

    def draw(figure: Figure) -> None:
        heading(figure, f"Memory and speed: {text}", subject)
        panels = 2 if zoomed else 1
        shape = (panels, 1) if is_narrow(figure) else (1, panels)
        total, *close = figure.subplots(*shape, squeeze=False).flat
        lines = _whole(total, result)
        closer = [_closer(axes, total, result, zoomed) for axes in close]
        legend(figure, _keys(result))
        short = is_narrow(figure) or bool(zoomed)
        placed = [
            Placed(total, _name(plan, hues, short=short), *_at(plan), named=plan not in zoomed) for plan in result.plans
        ]
        place(figure, placed, lines)
        for axes, drawn in zip(close, closer, strict=True):
            place(figure, [Placed(axes, _name(plan, hues, short=True), *_at(plan)) for plan in zoomed], drawn)

    tips = {f"plan-{plan.rank}": _told(plan) for plan in result.plans}
    tips |= {f"close-{plan.rank}": _told(plan) for plan in zoomed}
    listed = " ".join(f"{_told(plan)}." for plan in result.plans)
    front = ", ".join(f"#{rank}" for rank in result.pareto)
    alt = f"{subject}. {text}, the first with {_speed(first):.0f} tok/s/GPU. Pareto-optimal: {front}. {listed}"
    rows = 2 if zoomed else 1
    return Chart("plan", alt, draw, (9, 5.4), (4, 4.6 + 3.2 * rows), tips)


def _name(plan: Plan, hues: dict[int, str], *, short: bool) -> str:
    """Return what stands beside a plan: its rank, and what it is listed for or its number of GPUs."""
    if len(hues) > 1:
        return f"#{plan.rank}: {plan.gpus} GPU{'s' * (plan.gpus > 1)}"
    what = "" if short else next(iter(plan.special), "")
    return f"#{plan.rank} {what}".strip()


def _subject(result: Plans) -> str:
    model, counts = result.model, sorted({plan.gpus for plan in result.plans})
    gpus = " or ".join(map(str, counts))
    return (
        f"{model.name} ({format_count(model.parameters)}) on {gpus} × {result.hardware.gpu}, "
        f"sequence length {result.seq_len}, ranked by {result.objective}. {_told(result.plans[0])}"
    )


def _speed(plan: Plan) -> float:
    return plan.time.tokens_per_second_per_gpu


def _span(plan: Plan) -> tuple[float, float]:
    """The range of a plan's throughput [tokens/s]."""
    return _speed(plan) * plan.time.step / plan.time.high, _speed(plan) * plan.time.step / plan.time.low


def _at(plan: Plan) -> tuple[float, float]:
    return _speed(plan), plan.peak.device / GIB


def _kind(plan: Plan) -> _Kind:
    shape = "o" if plan.time.validated else "D" if plan.strategy.offload else "s"
    return _Kind(shape, plan.verdict == "tight")


def _hues(result: Plans) -> dict[int, str]:
    counts = sorted({plan.gpus for plan in result.plans})
    return {count: SERIES[index % len(SERIES)].light for index, count in enumerate(counts)}


def _look(kind: _Kind, hue: str) -> dict[str, Any]:
    return {
        "marker": kind.shape, "markersize": 6.5 if kind.shape == "o" else 5.8, "color": hue, "linestyle": "none",
        "markerfacecolor": INK["page"].light if kind.hollow else hue, "markeredgewidth": 1.5,
    }  # fmt: skip


def _searched(axes: Axes, result: Plans, prefix: str) -> list[Line2D]:
    """Draw what the search found for each number of GPUs as a cloud, and its frontier; return the frontiers."""
    lines = []
    for count, hue in _hues(result).items():
        known = [item for item in result.cloud if item.gpus == count]
        cloud = [(item.tokens_per_second_per_gpu, item.device / GIB) for item in known]
        if cloud:
            axes.plot(*zip(*cloud, strict=True), color=hue, gid=f"{prefix}-cloud-{count}", **_CLOUD)
        front = sorted((item.tokens_per_second_per_gpu, item.device / GIB) for item in known if item.frontier)
        if len(front) > 1:
            steps = [front[0], *((x, y) for (left, _), (right, y) in pairwise(front) for x in (left, right))]
            (line,) = axes.plot(*zip(*steps, strict=True), zorder=1.5, gid=f"{prefix}-front-{count}", **_FRONT)
            lines.append(line)
    return lines


def _points(axes: Axes, result: Plans, plans: list[Plan], prefix: str) -> list[Line2D]:
    """Draw what was searched, and the plans with the ranges of their speed; return the lines."""
    hues, lines = _hues(result), _searched(axes, result, prefix)
    for plan in plans:
        _, size = _at(plan)
        lines += axes.plot(
            _span(plan), (size, size), color=hues[plan.gpus], gid=f"{prefix}-range-{plan.rank}", **_RANGE
        )
    for plan in plans:
        (drawn,) = axes.plot(*_at(plan), **_look(_kind(plan), hues[plan.gpus]))
        drawn.set_gid(f"{prefix}-{plan.rank}")
    return lines


def _whole(axes: Axes, result: Plans) -> list[Line2D]:
    """Draw all plans, both axes from zero; return the lines."""
    lines = _points(axes, result, list(result.plans), "plan")
    lines.append(axes.axhline(result.capacity / GIB, **LIMIT))
    fastest = [item.tokens_per_second_per_gpu for item in result.cloud]
    axes.set_xlim(0, max([*(_span(plan)[1] for plan in result.plans), *fastest]) * _HEADROOM)
    axes.set_ylim(0, result.capacity / GIB * 1.1)
    axes.grid(visible=True)
    axes.set_xlabel("speed [tok/s/GPU]")
    axes.set_ylabel("memory per GPU [GiB]")
    return lines


def _closer(axes: Axes, total: Axes, result: Plans, plans: list[Plan]) -> list[Line2D]:
    """Draw the crowd again, and say that its axes do not begin at zero; return the lines."""
    from matplotlib.patches import Rectangle

    lines = _points(axes, result, plans, "close")
    (left, right), (low, high) = (_margins(values) for values in zip(*map(_at, plans), strict=True))
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    if low < result.capacity / GIB < high:
        axes.axhline(result.capacity / GIB, **LIMIT)
    axes.grid(visible=True)
    axes.set_xlabel("speed [tok/s/GPU]")
    axes.set_title("Zoomed in (axes do not start at 0)", fontsize=8.5, fontweight="normal")
    box = Rectangle((left, low), right - left, high - low, fill=False, edgecolor=INK["muted"].light, linewidth=0.9)
    total.add_patch(box)
    return lines


def _margins(values: tuple[float, ...]) -> tuple[float, float]:
    low, high = min(values), max(values)
    space = 0.14 * (high - low) or 0.02 * high
    return low - space, high + space


def _keys(result: Plans) -> list[Any]:
    hues, keys = _hues(result), []
    text = INK["text"].light
    only = text if len(hues) > 1 else next(iter(hues.values()))
    keys += [
        line_key(f"{_SHAPES[kind.shape]}{', tight' * kind.hollow}", **_look(kind, only))
        for kind in sorted({_kind(plan) for plan in result.plans})
    ]
    keys.append(line_key("range of its speed", color=only, **_RANGE))
    if len(hues) > 1:
        keys += [line_key(f"{n} GPU{'s' * (n > 1)}", **_look(_Kind("o", False), hue)) for n, hue in hues.items()]
    if result.cloud:
        keys.append(line_key("searched, fits", color=only, **_CLOUD))
        keys.append(line_key("Pareto front: no other is both smaller and faster", **_FRONT))
    keys.append(line_key(f"capacity {gib(result.capacity)} GiB", **LIMIT))
    return keys


def _told(plan: Plan) -> str:
    tight = ", tight" if plan.verdict == "tight" else ""
    speed = f"{rate_range(_speed(plan), *_span(plan))} tok/s/GPU"
    return f"#{plan.rank} ({_words(plan)}) {speed}, {gib(plan.peak.device)} GiB{tight}"


def _words(plan: Plan) -> str:
    strategy = plan.strategy
    degrees = [f"{name.replace('_', '-')} {n}" for name in DEGREES if (n := getattr(strategy, name)) > 1]
    offload = [f"offload {'+'.join(strategy.offload)}"] if strategy.offload else []
    text = [f"{plan.gpus} GPU{'s' * (plan.gpus > 1)}", f"zero {strategy.zero}", *degrees]
    return ", ".join([*text, f"recompute {strategy.recompute}", *offload, f"micro-batch {strategy.micro_batch}"])


_OTHER_GPU = "--gpu "


def nothing_chart(result: Plans) -> Chart:
    """Return the chart of ``memcalc plan`` where nothing fits."""
    changes = [change for change in result.nearest if change.verdict != "does-not-fit"]
    here = [index for index, change in enumerate(changes) if _OTHER_GPU not in change.change]

    def draw_nothing(figure: Figure) -> None:
        axes = figure.subplots()
        heading(figure, "Nothing fits; these changes would", result.too_large, "bad")
        for index, change in enumerate(changes):
            axes.barh(index, change.device / GIB, 0.6, color=SERIES[0].light, gid=f"change-{index}")
        for index in here:
            axes.vlines(result.capacity / GIB, index - 0.42, index + 0.42, **LIMIT)
        names = [textwrap.fill(change.change, 18 if is_narrow(figure) else 44) for change in changes]
        axes.set_yticks(range(len(changes)), [f"{n}  {gib(c.device)}" for n, c in zip(names, changes, strict=True)])
        axes.set_ylim(len(changes) - 0.4, -0.6)
        axes.set_xlim(0, max([result.capacity, *(change.device for change in changes)]) / GIB * 1.05)
        axes.set_xlabel("memory per GPU [GiB]", loc="right")
        axes.xaxis.grid(visible=True)
        keys = [patch_key("with the change", SERIES[0].light)]
        limit = f"capacity {gib(result.capacity)} GiB; another GPU has its own"
        legend(figure, [*keys, line_key(limit, **LIMIT)])

    listed = "; ".join(f"{change.change} {gib(change.device)} GiB" for change in changes) or "none is known"
    alt = f"Nothing fits: {result.too_large} Changes that would: {listed}."
    tips = {f"change-{index}": f"{c.change}: {gib(c.device)} GiB" for index, c in enumerate(changes)}
    return Chart("plan", alt, draw_nothing, (9, 2.4 + 0.4 * len(changes)), (4, 3.2 + 0.6 * len(changes)), tips)
