"""An answer as a cell of a notebook shows it: the bar and the table of a report, with the style that they need."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from memcalc import report
from memcalc.report import diff as differences
from memcalc.report.estimate import components_of
from memcalc.report.page import markup
from memcalc.report.page.head import gpu_bar
from memcalc.report.page.live import plain_table, plan_table, verdict_line
from memcalc.report.page.markup import Html, begun, el, join
from memcalc.report.step_time import time_lines
from memcalc.report.tables import Line, Table
from memcalc.results.diff import Diff
from memcalc.results.estimates import Answer, Estimate
from memcalc.results.plans import Plans

if TYPE_CHECKING:
    from collections.abc import Iterable


def cell_of(answer: Answer) -> str | None:
    """Return an estimate, plans or a difference as HTML; None for an answer that has no picture."""
    if isinstance(answer, Estimate):
        parts = [*_estimate(answer), plain_table(components_of(answer), "memcalc-parts")]
    elif isinstance(answer, Plans):
        parts = _plans(answer)
    elif isinstance(answer, Diff):
        parts = _difference(answer)
    else:
        return None
    return el("div", el("style", Html(_style())), *parts, class_="memcalc-cell")


def _estimate(estimate: Estimate) -> list[Html]:
    lines = (el("p", line.text) for line in time_lines(estimate))
    return [verdict_line(estimate), gpu_bar(estimate), *lines]


def _plans(plans: Plans) -> list[Html]:
    blocks = report.of_plans(plans).document.blocks
    head = _lines(block for block in blocks if isinstance(block, Line) and block.role in {"verdict", "title"})
    return [*head, plain_table(plan_table(plans), "memcalc-plans")] if plans.plans else head


def _difference(result: Diff) -> list[Html]:
    tables = [block for block in differences.report(result).document.blocks if isinstance(block, Table)]
    sides = [
        join(el("p", el("b", name)), *_estimate(side.estimate)) for name, side in (("A", result.a), ("B", result.b))
    ]
    lead = el("p", el("b", begun(differences.headline(result))))
    return [lead, *sides, *(plain_table(table, f"memcalc-diff-{index}") for index, table in enumerate(tables[:2]))]


def _lines(lines: Iterable[Line]) -> list[Html]:
    return [el("p", el("b", line.text) if line.role == "verdict" else line.text) for line in lines]


@cache
def _style() -> str:
    """Return the rules of the bar, for this cell alone; a notebook says itself whether it is dark."""
    light, dark = (markup.colours(side) for side in ("light", "dark"))
    themes = f"[data-jp-theme-light=false] .memcalc-cell,.vscode-dark .memcalc-cell{{{dark}}}"
    return f".memcalc-cell{{{light}}}\n{themes}\n.memcalc-cell{{{markup.bar_style()}{markup.read('notebook.css')}}}"
