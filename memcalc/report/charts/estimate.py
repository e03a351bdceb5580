"""One GPU at the peak, as a stacked bar against its capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.report.charts.picture import Chart
from memcalc.report.estimate import bar_of, head_of
from memcalc.report.palette import COMPONENTS, INK
from memcalc.report.tables import gib
from memcalc.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memcalc.results import Estimate

__all__ = ["chart"]


def chart(result: Estimate) -> Chart:
    """Return the chart of ``memcalc estimate``."""
    bar = bar_of(result)
    verdict, title = (line.text for line in head_of(result))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        reached = 0.0
        for name, size in bar.parts:
            (patch,) = axes.barh(
                0, size / GIB, left=reached, color=COMPONENTS[name].light, edgecolor=INK["page"].light, label=name
            )
            patch.set_gid(name)
            reached += size / GIB
        axes.axvline(bar.capacity / GIB, color=INK["limit"].light, linestyle="--", linewidth=1.4)
        axes.set_yticks([])
        axes.set_xlim(0, max(bar.capacity / GIB, reached) * 1.02)
        axes.set_xlabel("memory of one GPU [GiB]")
        axes.set_title(verdict)
        axes.legend(ncols=len(bar.parts), loc="upper center", bbox_to_anchor=(0.5, -0.35), fontsize=8)

    tips = {name: f"{name} {gib(size)} GiB" for name, size in bar.parts}
    return Chart("estimate", f"{title}: {verdict}", draw, (9, 2.2), tips)
