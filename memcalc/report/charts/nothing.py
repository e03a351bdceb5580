"""Where no plan fits: the memory of the nearest changes that would."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from memcalc.report.charts.parts import LIMIT, heading, is_narrow, legend, line_key, patch_key
from memcalc.report.charts.picture import Chart
from memcalc.report.palette import SERIES
from memcalc.report.tables import gib
from memcalc.units import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memcalc.results import Plans

__all__ = ["chart"]

_OTHER_GPU = "--gpu "


def chart(result: Plans) -> Chart:
    """Return the chart of ``memcalc plan`` where nothing fits."""
    changes = result.nearest
    here = [place for place, change in enumerate(changes) if _OTHER_GPU not in change.change]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        heading(figure, "Nothing fits; these changes would", result.too_large, "bad")
        for place, change in enumerate(changes):
            axes.barh(place, change.device / GIB, 0.6, color=SERIES[0].light, gid=f"change-{place}")
        for place in here:
            axes.vlines(result.capacity / GIB, place - 0.42, place + 0.42, **LIMIT)
        names = [textwrap.fill(change.change, 22 if is_narrow(figure) else 44) for change in changes]
        axes.set_yticks(range(len(changes)), [f"{n}  {gib(c.device)}" for n, c in zip(names, changes, strict=True)])
        axes.set_ylim(len(changes) - 0.4, -0.6)
        axes.set_xlim(0, max([result.capacity, *(change.device for change in changes)]) / GIB * 1.05)
        axes.set_xlabel("memory of one GPU with the change [GiB]")
        axes.xaxis.grid(visible=True)
        keys = [patch_key("with the change", SERIES[0].light)]
        limit = f"the GPU has {gib(result.capacity)} GiB; another GPU has its own"
        legend(figure, [*keys, line_key(limit, **LIMIT)])

    told = "; ".join(f"{change.change} {gib(change.device)} GiB" for change in changes) or "none is known"
    alt = f"Nothing fits: {result.too_large} Changes that would: {told}."
    tips = {f"change-{place}": f"{c.change}: {gib(c.device)} GiB" for place, c in enumerate(changes)}
    return Chart("plan", alt, draw, (9, 2.4 + 0.4 * len(changes)), (4, 3.2 + 0.6 * len(changes)), tips)
