"""Jobs of post-training one after another: the phase that holds most of each, stacked by role, against the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.report.charts import Chart
from memcalc.report.charts.parts import LIMIT, beyond, heading, keep_inside, legend, line_key, patch_key, stacked
from memcalc.report.diff import brief
from memcalc.report.estimate import MOODS
from memcalc.report.palette import MOODS as SHADES
from memcalc.report.palette import ROLES
from memcalc.report.rl_steps import headline, ladder_head, roles_at, stage_label
from memcalc.report.tables import gib
from memcalc.results.posttraining import RlDiff, RlFigures, RlLadder
from memcalc.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.66
_ROW = 0.46
"""Inches of a job."""
_LONGEST = 1.6
"""Of the capacity, where the axis ends at the latest: a job that needs more says so."""


def chart(result: RlDiff | RlLadder) -> Chart:
    """Return the chart of ``memcalc ladder`` or ``memcalc diff`` of post-training."""
    if isinstance(result, RlLadder):
        verdict, title = ladder_head(result)
        points = [(stage_label(at, step), step.after) for at, step in enumerate(result.steps)]
        return _chart("rl-ladder", verdict.text, title.text, points)
    points = [("A", result.start)]
    points += [(f"{at}  {brief(step)}", step.after) for at, step in enumerate(result.steps, 1)]
    if len(points) > 1:
        points[-1] = (f"{points[-1][0]} = B", points[-1][1])
    return _chart("rl-diff", headline(result), f"A: {result.names[0]}. B: {result.names[1]}.", points)


def _chart(name: str, text: str, subject: str, points: list[tuple[str, RlFigures]]) -> Chart:
    capacity = max(point.capacity for _, point in points)
    most = max(point.allocated for _, point in points)
    reach = min(max(capacity, most) * 1.03, capacity * _LONGEST) / GIB

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        heading(figure, text, subject, MOODS[points[-1][1].verdict])
        _frame(axes, points, reach)
        drawn = []
        for at, (_, point) in enumerate(points):
            drawn += stacked(axes, at, roles_at(point), _BAR, f"job-{at}-")
            if point.allocated > point.capacity:
                beyond(axes, at, _BAR, point.capacity, point.allocated)
            axes.plot([point.capacity / GIB] * 2, [at - 0.5, at + 0.5], **LIMIT)
        legend(figure, _keys(points))
        keep_inside(axes, [part for part in drawn if part[2].get_x() + part[2].get_width() <= reach], reach)

    tips = {
        f"job-{at}-{role}": f"{label}, {point.binding}: {role} {gib(size)} GiB"
        for at, (label, point) in enumerate(points)
        for role, size in roles_at(point)
    }
    listed = "; ".join(f"{label} {gib(point.allocated)} in {point.binding}" for label, point in points)
    alt = f"{subject} {text}. The phase that holds most on one GPU of {gib(capacity)} GiB, in GiB: {listed}."
    rows = len(points) * _ROW
    return Chart(name, alt, draw, (9, 1.9 + rows), (4.2, 2.9 + rows), tips)


def _frame(axes: Axes, points: list[tuple[str, RlFigures]], reach: float) -> None:
    labels = [f"{label}\n{gib(point.allocated, 1)} in {point.binding}" for label, point in points]
    axes.set_yticks(list(range(len(points))), labels)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(points) - 0.5, -0.5)
    axes.set_xlim(0, reach)
    axes.set_xlabel("memory of one GPU in the phase that holds most [GiB]")
    axes.xaxis.grid(visible=True)


def _keys(points: list[tuple[str, RlFigures]]) -> list[object]:
    there = {role for _, point in points for role, _ in roles_at(point)}
    keys: list[object] = [patch_key(role, ROLES[role].light) for role in ROLES if role in there]
    if any(point.allocated > point.capacity for _, point in points):
        keys.append(patch_key("missing", "none", edgecolor=SHADES["bad"].light, hatch="////"))
    rooms = " or ".join(dict.fromkeys(gib(point.capacity) for _, point in points))
    return [*keys, line_key(f"capacity {rooms} GiB", **LIMIT)]
