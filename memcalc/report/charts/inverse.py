"""Memory against the value that was asked for, with the last that fits; or the answer beside what lies beyond it."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from memcalc.report.charts import Chart
from memcalc.report.charts.parts import LIMIT, drop_overlaps, heading, legend, line_key, patch_key
from memcalc.report.estimate import MOODS
from memcalc.report.inverse import UNITS, head_of, margin
from memcalc.report.palette import COMPONENTS, INK, SERIES
from memcalc.report.palette import MOODS as SHADES
from memcalc.report.plan_words import strategy_words
from memcalc.report.tables import gib
from memcalc.results.names import component_name
from memcalc.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from memcalc.results.plans import CurvePoint, Inverse

_DOTS: dict[str, Any] = {"color": INK["text"].light, "marker": "o", "markersize": 4, "linewidth": 1}
_FLUSHED: dict[str, Any] = {
    "color": INK["text"].light, "marker": "o", "markersize": 5, "linestyle": "none",
    "markerfacecolor": INK["page"].light,
}  # fmt: skip
_MISS: dict[str, Any] = {
    "color": SHADES["bad"].light, "marker": "X", "markersize": 8, "linestyle": "none",
    "markeredgecolor": INK["page"].light,
}  # fmt: skip
_ANSWER: dict[str, Any] = {"color": SHADES["good"].light, "linewidth": 1.6}


def chart(result: Inverse) -> Chart:
    """Return the chart of ``memcalc max`` and ``memcalc min``."""
    return _curve(result) if result.curve else _bars(result)


def _heading(figure: Figure, result: Inverse) -> None:
    text, subject = (line.text for line in head_of(result))
    best = result.best
    label = f"; {', '.join(strategy_words(best.strategy))}" if best else f"; {result.limit}"
    heading(figure, text, subject + label, MOODS[best.verdict] if best else "bad")


def _alt(result: Inverse) -> str:
    text, subject = (line.text for line in head_of(result))
    known = [(best.value, best.peak.device, best.verdict) for best in (result.best,) if best is not None]
    known += [(miss.value, miss.device, miss.verdict) for miss in result.beyond]
    values = [(point.value, point.device, point.verdict) for point in result.curve] or known
    points = "; ".join(f"{value}: {gib(size)} GiB, {verdict.replace('-', ' ')}" for value, size, verdict in values)
    return f"{subject}: {text}. One GPU has {gib(result.capacity)} GiB. {points}."


def _curve(result: Inverse) -> Chart:
    points = result.curve

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _heading(figure, result)
        _areas(axes, points)
        axes.axhline(result.capacity / GIB, **LIMIT)
        texts = _marks(axes, result)
        axes.set_xlim(0, 1.02 * points[-1].value)
        axes.set_ylim(0, max(result.capacity, *(point.device for point in points)) / GIB * 1.12)
        axes.set_xlabel(UNITS[result.what])
        axes.set_ylabel("memory of one GPU [GiB]")
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        axes.locator_params(axis="x", nbins=6, integer=True)
        axes.yaxis.grid(visible=True)
        legend(figure, _keys(result))
        drop_overlaps(texts)

    tips = {f"point-{index}": _told(result, point) for index, point in enumerate(points)}
    return Chart("max", _alt(result), draw, (9, 5), (4, 5.6), tips)


def _told(result: Inverse, point: CurvePoint) -> str:
    fits = point.verdict.replace("-", " ")
    return f"{point.value} {UNITS[result.what]}: {gib(point.device)} GiB, {fits}"


def _stack(point: CurvePoint) -> dict[str, int]:
    """The parts of the device figure [bytes]."""
    parts = point.components.model_dump()
    return {**parts, "context": point.device - sum(parts.values())}


def _areas(axes: Axes, points: tuple[CurvePoint, ...]) -> None:
    values = [point.value for point in points]
    rows = [_stack(point) for point in points]
    heights = [[*accumulate(row.values())] for row in rows]
    for index, name in reversed([*enumerate(rows[0])]):  # the lowest part covers the others
        if any(row[name] for row in rows):
            tops = [height[index] / GIB for height in heights]
            axes.fill_between(values, tops, color=COMPONENTS[name].light, linewidth=0, gid=f"area-{name}")


def _marks(axes: Axes, result: Inverse) -> list[Text]:
    points = result.curve
    axes.plot([point.value for point in points], [point.device / GIB for point in points], gid="device", **_DOTS)
    for index, point in enumerate(points):
        look = _FLUSHED if point.retries and point.verdict != "does-not-fit" else _DOTS
        axes.plot([point.value], [point.device / GIB], gid=f"point-{index}", **look)
    texts: list[Text] = []
    top, right = axes.get_xaxis_transform(), points[-1].value
    if result.best is not None:
        value = int(result.best.value)
        axes.axvspan(value, 1.02 * right, color=INK["free"].light, linewidth=0, zorder=0)
        axes.axvline(value, gid="answer", **_ANSWER)
        left = value > right / 2
        text = axes.annotate(
            f"{value:,} {result.best.verdict}", (value, 0.985), (-5 if left else 5, 0), xycoords=top,
            textcoords="offset points",
            ha="right" if left else "left", va="top", fontweight="bold",
        )  # fmt: skip
        texts.append(text)
    for miss in result.beyond:
        axes.plot([int(miss.value)], [miss.device / GIB], gid="miss", zorder=4, **_MISS)
    return texts


def _keys(result: Inverse) -> list[Any]:
    points = result.curve
    used = [name for name in _stack(points[0]) if any(_stack(point)[name] for point in points)]
    keys = [patch_key(component_name(name), COMPONENTS[name].light) for name in used]
    keys.append(line_key("computed", **_DOTS))
    if any(point.retries and point.verdict != "does-not-fit" for point in points):
        keys.append(line_key("fits, but frees its cache (slow)", **_FLUSHED))
    if result.best is not None:
        keys.append(line_key(f"limit: {int(result.best.value):,}", **_ANSWER))
    for miss in result.beyond:
        says = margin(miss.device, miss.verdict, result.capacity, miss.missing)
        keys.append(line_key(f"{int(miss.value):,}, {says}", **_MISS))
    return [*keys, line_key(f"capacity {gib(result.capacity)} GiB", **LIMIT)]


def _named(result: Inverse, value: int | str) -> str:
    return f"{value} GPU{'s' * (value != 1)}" if result.what == "gpus" else str(value)


def _rest(look: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in look.items() if name != "facecolor"}


def _bars(result: Inverse) -> Chart:
    rows = [(best.value, best.peak.device, best.verdict) for best in (result.best,) if best is not None]
    rows += [(miss.value, miss.device, miss.verdict) for miss in result.beyond]
    looks: dict[str, dict[str, Any]] = {
        "fits": {"facecolor": SERIES[0].light},
        "tight": {"facecolor": SHADES["close"].light},
        "does-not-fit": {"facecolor": "none", "edgecolor": SHADES["bad"].light, "hatch": "////"},
    }

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _heading(figure, result)
        for index, (_, size, verdict) in enumerate(rows):
            axes.barh(index, size / GIB, 0.6, gid=f"value-{index}", **looks[verdict])
        axes.axvline(result.capacity / GIB, **LIMIT)
        axes.set_yticks(range(len(rows)), [f"{_named(result, value)}: {gib(size)}" for value, size, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, max(result.capacity, *(size for _, size, _ in rows)) / GIB * 1.04)
        axes.set_xlabel("memory of one GPU [GiB]")
        axes.xaxis.grid(visible=True)
        there = [name for name in looks if any(verdict == name for *_, verdict in rows)]
        keys = [patch_key(name.replace("-", " "), looks[name]["facecolor"], **_rest(looks[name])) for name in there]
        legend(figure, [*keys, line_key(f"capacity {gib(result.capacity)} GiB", **LIMIT)])

    tips = {
        f"value-{index}": f"{value}: {gib(size)} GiB, {verdict.replace('-', ' ')}"
        for index, (value, size, verdict) in enumerate(rows)
    }
    return Chart("max", _alt(result), draw, (9, 2.4 + 0.4 * len(rows)), (4, 3.2 + 0.4 * len(rows)), tips)
