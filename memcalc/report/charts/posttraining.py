"""A GPU in post-training, stacked by role against its capacity: in each phase of a step, or of several jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.report.charts import Chart
from memcalc.report.charts.parts import LIMIT, beyond, heading, keep_inside, legend, line_key, patch_key, stacked
from memcalc.report.diff import brief
from memcalc.report.estimate import MOODS
from memcalc.report.palette import INK, ROLES
from memcalc.report.palette import MOODS as SHADES
from memcalc.report.posttraining import head_of, roles_in
from memcalc.report.rl_steps import headline, ladder_head, roles_at, stage_label
from memcalc.report.tables import gib
from memcalc.results.posttraining import Rl, RlDiff, RlLadder
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memcalc.results.estimates import Verdict
    from memcalc.results.posttraining import RlFigures, RlPhase

_BAR = 0.66
_ROW = 0.46
"""Inches of a row."""
_LONGEST = 1.6
"""Of the capacity, where the axis ends at the latest: what needs more says so."""
_RESERVED: dict[str, Any] = {"color": INK["text"].light, "linewidth": 1.4}


class _Row(NamedTuple):
    label: str
    tip: str
    """What a pointer's tip begins with."""
    roles: Sequence[tuple[str, int]]
    """Bytes of each."""
    allocated: int
    capacity: int
    line: tuple[int, float, dict[str, Any]]
    """Bytes at which a line stands, how far up and down from the middle, and its look."""


class _Picture(NamedTuple):
    name: str
    kind: str
    """What a row is, for the ids of its parts."""
    rows: list[_Row]
    verdict: str
    title: str
    mood: Verdict
    axis: str
    alt: str
    lines: list[tuple[str, dict[str, Any]]]
    """What each kind of line is."""
    reach: float
    """The end of the axis [GiB]."""
    limit: int | None = None
    """The capacity that all rows share [bytes]."""

    def draw(self, figure: Figure) -> None:
        """Fill a figure."""
        axes = figure.subplots()
        heading(figure, self.verdict, self.title, MOODS[self.mood])
        _frame(axes, self)
        drawn = []
        for at, row in enumerate(self.rows):
            drawn += stacked(axes, at, row.roles, _BAR, f"{self.kind}-{at}-")
            if row.allocated > row.capacity:
                beyond(axes, at, _BAR, row.capacity, row.allocated)
            size, half, look = row.line
            axes.plot([size / GIB] * 2, [at - half, at + half], **look)
        if self.limit is not None:
            axes.axvline(self.limit / GIB, **LIMIT)
        legend(figure, [*_keys(self.rows), *(line_key(text, **look) for text, look in self.lines)])
        keep_inside(axes, [part for part in drawn if part[2].get_x() + part[2].get_width() <= self.reach], self.reach)

    def chart(self) -> Chart:
        """Return it, with a tip on each role of a row."""
        tips = {
            f"{self.kind}-{at}-{role}": f"{row.tip}: {role} {gib(size)} GiB"
            for at, row in enumerate(self.rows)
            for role, size in row.roles
        }
        height = len(self.rows) * _ROW
        return Chart(self.name, self.alt, self.draw, (9, 1.9 + height), (4.2, 2.9 + height), tips)


def chart(result: Rl | RlDiff | RlLadder) -> Chart:
    """Return the chart of ``memcalc rl``, or of ``memcalc ladder`` or ``memcalc diff`` of post-training."""
    if isinstance(result, Rl):
        return _phases(result).chart()
    if isinstance(result, RlLadder):
        verdict, title = ladder_head(result)
        points = [(stage_label(at, step), step.after) for at, step in enumerate(result.steps)]
        return _jobs("rl-ladder", verdict.text, title.text, points).chart()
    points = [("A", result.start)]
    points += [(f"{at}  {brief(step)}", step.after) for at, step in enumerate(result.steps, 1)]
    if len(points) > 1:
        points[-1] = (f"{points[-1][0]} = B", points[-1][1])
    return _jobs("rl-diff", headline(result), f"A: {result.names[0]}. B: {result.names[1]}.", points).chart()


def _phases(result: Rl) -> _Picture:
    verdict, title = (line.text for line in list(head_of(result))[:2])
    capacity, names = result.capacity, roles_in(result)
    rows = [
        _Row(
            _label(phase, result),
            phase.name,
            [(name, phase.roles[name]) for name in names if name in phase.roles],
            phase.allocated,
            capacity,
            (phase.device, _BAR / 2, _RESERVED),
        )
        for phase in result.phases
    ]
    phases = "; ".join(
        f"{phase.name} {gib(phase.allocated)}: "
        + ", ".join(f"{name} {gib(size)}" for name, size in phase.roles.items())
        for phase in result.phases
    )
    alt = f"{title}: {verdict}. One GPU of {gib(capacity)} GiB by phase and role in GiB: {phases}."
    lines = [("with what allocators reserve", _RESERVED), (f"capacity {gib(capacity)} GiB", LIMIT)]
    reach = _reach(capacity, max(phase.device for phase in result.phases))
    axis = "memory of one GPU [GiB]"
    return _Picture("posttraining", "phase", rows, verdict, title, result.verdict, axis, alt, lines, reach, capacity)


def _jobs(name: str, text: str, subject: str, points: list[tuple[str, RlFigures]]) -> _Picture:
    """The phase that holds most of each job."""
    rows = [
        _Row(
            f"{label}\n{gib(point.allocated, 1)} in {point.binding}",
            f"{label}, {point.binding}",
            roles_at(point),
            point.allocated,
            point.capacity,
            (point.capacity, 0.5, LIMIT),
        )
        for label, point in points
    ]
    capacity = max(point.capacity for _, point in points)
    listed = "; ".join(f"{label} {gib(point.allocated)} in {point.binding}" for label, point in points)
    alt = f"{subject} {text}. The phase that holds most on one GPU of {gib(capacity)} GiB, in GiB: {listed}."
    rooms = " or ".join(dict.fromkeys(gib(point.capacity) for _, point in points))
    reach = _reach(capacity, max(point.allocated for _, point in points))
    axis = "memory of one GPU in the phase that holds most [GiB]"
    lines = [(f"capacity {rooms} GiB", LIMIT)]
    return _Picture(name, "job", rows, text, subject, points[-1][1].verdict, axis, alt, lines, reach)


def _reach(capacity: int, most: int) -> float:
    """The end of the axis [GiB]."""
    return min(max(capacity, most) * 1.03, capacity * _LONGEST) / GIB


def _label(phase: RlPhase, result: Rl) -> str:
    where = "" if phase.gpus == "shared" else f", {phase.gpus} GPUs"
    binding = " (binds)" if phase.name == result.binding else ""
    return f"{phase.name}{where}{binding}  {gib(phase.allocated, 1)}"


def _frame(axes: Axes, picture: _Picture) -> None:
    count = len(picture.rows)
    axes.set_yticks(list(range(count)), [row.label for row in picture.rows])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlim(0, picture.reach)
    axes.set_xlabel(picture.axis)
    axes.xaxis.grid(visible=True)


def _keys(rows: list[_Row]) -> list[object]:
    there = {role for row in rows for role, _ in row.roles}
    keys: list[object] = [patch_key(role, ROLES[role].light) for role in ROLES if role in there]
    if any(row.allocated > row.capacity for row in rows):
        keys.append(patch_key("missing", "none", edgecolor=SHADES["bad"].light, hatch="////"))
    return keys
