"""Memory over one step: by phase, and by stage of a pipeline."""

from __future__ import annotations

from memcalc.report.page.markup import Html, cell, el, gib, percent, section, table
from memcalc.results import Estimate

__all__ = ["step"]


def step(found: Estimate, chart: Html) -> Html:
    """Return the phases of a step, drawn where something draws, and as tables."""
    parts = [_phases(found, closed=bool(chart))]
    if len(found.stages) > 1:
        parts.append(_stages(found))
    intro = f"Allocated memory rises and falls with the phases; the peak stands at {found.peak.phase}."
    return section("step", "Over one step", chart, *parts, intro=intro)


def _phases(found: Estimate, *, closed: bool) -> Html:
    usable = found.budget.usable
    rows = [
        el(
            "tr",
            cell(name, head=True),
            cell(gib(size), right=True),
            cell(f"{percent(size, usable)}%", right=True),
            el(
                "td",
                el("span", el("span", style=f"width:{min(100, 100 * size / usable):.2f}%"), class_="meter"),
                aria_hidden="true",
            ),
            class_="peak" if name == found.peak.phase else None,
        )
        for name, size in found.phases.items()
    ]
    heads = [("phase", "", False), ("allocated", "GiB", True), ("of usable", "", True), ("", "", False)]
    shown = table(f"Allocated by phase; {gib(usable)} GiB are usable.", heads, rows, name="phases")
    return el("details", el("summary", "The phases as a table"), shown) if closed else shown


def _stages(found: Estimate) -> Html:
    rows = [
        el(
            "tr",
            cell(str(one.stage), head=True, right=True),
            cell(str(one.layers), right=True),
            *(cell(gib(size), right=True) for size in (one.allocated, one.reserved, one.device)),
            cell(one.phase),
            class_="peak" if one.stage == found.peak.stage else None,
        )
        for one in found.stages
    ]
    sizes = [(name, "GiB", True) for name in ("allocated", "reserved", "device")]
    heads = [("stage", "", True), ("layers", "", True), *sizes, ("peak phase", "", False)]
    return table("Peaks of the pipeline stages.", heads, rows, name="stages")
