"""A GPU in each phase of a step of post-training, stacked by role, against its capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memcalc.report.charts import Chart
from memcalc.report.charts.parts import LIMIT, beyond, heading, keep_inside, legend, line_key, patch_key, stacked
from memcalc.report.estimate import MOODS
from memcalc.report.palette import INK, ROLES
from memcalc.report.palette import MOODS as SHADES
from memcalc.report.posttraining import head_of, roles_in
from memcalc.report.tables import gib
from memcalc.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memcalc.results.posttraining import Rl, RlPhase

_BAR = 0.66
_ROW = 0.46
"""Inches of a phase."""
_LONGEST = 1.6
"""Of the capacity, where the axis ends at the latest: a phase that needs more says so."""
_RESERVED: dict[str, Any] = {"color": INK["text"].light, "linewidth": 1.4}


def chart(result: Rl) -> Chart:
    """Return the chart of ``memcalc rl``."""
    verdict, title = (line.text for line in list(head_of(result))[:2])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        heading(figure, verdict, title, MOODS[result.verdict])
        _frame(axes, result)
        drawn = []
        for index, phase in enumerate(result.phases):
            sizes = [(name, phase.roles[name]) for name in roles_in(result) if name in phase.roles]
            drawn += stacked(axes, index, sizes, _BAR, f"phase-{index}-")
            if phase.allocated > result.capacity:
                beyond(axes, index, _BAR, result.capacity, phase.allocated)
            axes.plot([phase.device / GIB] * 2, [index - _BAR / 2, index + _BAR / 2], **_RESERVED)
        axes.axvline(result.capacity / GIB, **LIMIT)
        legend(figure, _keys(result))
        reach = _reach(result)
        keep_inside(axes, [part for part in drawn if part[2].get_x() + part[2].get_width() <= reach], reach)

    tips = {
        f"phase-{index}-{name}": f"{phase.name}: {name} {gib(size)} GiB"
        for index, phase in enumerate(result.phases)
        for name, size in phase.roles.items()
    }
    rows = len(result.phases) * _ROW
    return Chart("posttraining", _alt(result, verdict, title), draw, (9, 1.9 + rows), (4.2, 2.9 + rows), tips)


def _reach(result: Rl) -> float:
    """The end of the axis [GiB]."""
    most = max(phase.device for phase in result.phases)
    return min(max(result.capacity, most) * 1.03, result.capacity * _LONGEST) / GIB


def _label(phase: RlPhase, result: Rl) -> str:
    where = "" if phase.gpus == "shared" else f", {phase.gpus} GPUs"
    binding = " (binds)" if phase.name == result.binding else ""
    return f"{phase.name}{where}{binding}  {gib(phase.allocated, 1)}"


def _frame(axes: Axes, result: Rl) -> None:
    axes.set_yticks(list(range(len(result.phases))), [_label(phase, result) for phase in result.phases])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(result.phases) - 0.5, -0.5)
    axes.set_xlim(0, _reach(result))
    axes.set_xlabel("memory of one GPU [GiB]")
    axes.xaxis.grid(visible=True)


def _keys(result: Rl) -> list[object]:
    keys = [patch_key(name, ROLES[name].light) for name in roles_in(result)]
    if any(phase.allocated > result.capacity for phase in result.phases):
        keys.append(patch_key("missing", "none", edgecolor=SHADES["bad"].light, hatch="////"))
    return [
        *keys,
        line_key("with what allocators reserve", **_RESERVED),
        line_key(f"capacity {gib(result.capacity)} GiB", **LIMIT),
    ]


def _alt(result: Rl, verdict: str, title: str) -> str:
    phases = "; ".join(
        f"{phase.name} {gib(phase.allocated)}: "
        + ", ".join(f"{name} {gib(size)}" for name, size in phase.roles.items())
        for phase in result.phases
    )
    return f"{title}: {verdict}. One GPU of {gib(result.capacity)} GiB by phase and role in GiB: {phases}."
