"""Parts of a page that changes while its reader works, and the cell of a notebook: each answer as elements by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from memcalc import report
from memcalc.report import check as checks
from memcalc.report import diff as differences
from memcalc.report.estimate import MOODS, cache_of, components_of
from memcalc.report.page import markup
from memcalc.report.page.head import gpu_bar, verdict_title
from memcalc.report.page.markup import Html, begun, cell, el, join, table
from memcalc.report.page.sections import breakdown
from memcalc.report.plan_words import time_lines
from memcalc.report.tables import Line, Table, gib, percent
from memcalc.results.changes import Diff
from memcalc.results.check import Check
from memcalc.results.estimates import Answer, Estimate
from memcalc.results.plans import Nearest, Plan, Plans
from memcalc.specs.job import JobRecord

if TYPE_CHECKING:
    from collections.abc import Iterable


Linking = Callable[[JobRecord], str]
"""What makes a link of a job."""


def estimate_parts(estimate: Estimate) -> dict[str, Any]:
    """Return what follows a control: verdict, figures, bar, warnings, and the job as a command."""
    return {
        "verdict": estimate.verdict,
        "sentence": _sentence(estimate),
        "head": verdict_line(estimate),
        "bar": gpu_bar(estimate),
        "speed": el("p", *(begun(line.text) for line in time_lines(estimate)), class_="speed"),
        "warnings": _listed(estimate.warnings),
        "model": f"{estimate.model.name} · {estimate.model.parameters / 1e9:.3g}B parameters",
        "assumed": {name.replace("_", "-"): value for name, value in estimate.assumptions.items()},
        "command": estimate.command,
        "device": estimate.peak.device,
        "capacity": estimate.budget.capacity,
        "rate": 0.0 if estimate.time is None else estimate.time.tokens_per_second_per_gpu,
    }


def verdict_line(estimate: Estimate) -> Html:
    """Return the verdict, and the memory beside the capacity."""
    device, capacity = estimate.peak.device, estimate.budget.capacity
    over = f", over by {gib(device - capacity, 1)}" if device > capacity else ""
    used = f"{gib(device, 1)} of {gib(capacity, 1)} GiB per GPU ({percent(device, capacity)}%{over})"
    title = el("span", *verdict_title(estimate.verdict), class_="title")
    return el("p", title, " ", el("strong", used), class_=f"verdict {MOODS[estimate.verdict]}")


def _sentence(estimate: Estimate) -> str:
    """Return what a screen reader says of a change."""
    used = f"{gib(estimate.peak.device, 1)} of {gib(estimate.budget.capacity, 1)} GiB per GPU"
    return f"{estimate.verdict.replace('-', ' ')}: {used}"


def term_parts(estimate: Estimate) -> dict[str, str]:
    """Return every term, and what is said of the allocator's cache."""
    notes = "".join(el("p", begun(line.text)) for line in cache_of(estimate))
    return {"terms": join(Html(notes), breakdown(estimate))}


def plan_parts(plans: Plans, link: Linking) -> dict[str, Any]:
    """Return the plans, or what would fit where none does, each with the link to its job."""
    if not plans.plans:
        rows = [_remedy(item, link) for item in plans.nearest if item.verdict != "does-not-fit"]
        listed = el("ul", *rows, class_="remedies") if rows else el("p", "No single change makes it fit.")
        return {"title": "What would fit", "count": "", "plans": join(el("p", begun(plans.too_large)), listed)}
    count = f"{plans.feasible:,} of {plans.searched:,} strategies fit"
    ordered = sorted(plans.plans, key=lambda plan: plan.gpus)
    data = plan_table(plans)
    rows = [_plan(data, row, plan, link) for row, plan in zip(data.rows, ordered, strict=True)]
    says = "Choose a plan to put it into the controls. Batch: micro-batch × accumulation steps."
    listed = table(says, data.columns, rows, name="plan-table")
    return {"title": "Best plans", "count": count, "plans": join(listed, _listed(tuple(_cautions(plans))))}


def _cautions(plans: Plans) -> Iterator[str]:
    """Yield why plans are tight, and what they rest on, each reason once with the plans that it is of."""
    reasons: dict[str, list[str]] = {}
    for plan in plans.plans:
        _, tight, reason = plan.why.partition(" Tight: ")
        if tight:
            reasons.setdefault(f"tight, {reason}", []).append(f"#{plan.rank}")
        if plan.unknown:
            says = f"fits only if the {plan.unknown[0]} of node {plans.hardware.node}, which is unknown, suffices."
            reasons.setdefault(says, []).append(f"#{plan.rank}")
    for reason, ranks in reasons.items():
        yield f"{'all plans' if len(ranks) == len(plans.plans) > 1 else ', '.join(ranks)}: {reason}"


def plan_table(plans: Plans) -> Table:
    """Return the table of plans in the fewest columns."""
    data = next(block for block in report.of_plans(plans).document.blocks if isinstance(block, Table))
    return data.narrow or data


def _plan(data: Table, row: tuple[str, ...], plan: Plan, link: Linking) -> Html:
    cells = []
    for index, (column, value) in enumerate(zip(data.columns, row, strict=True)):
        button = el("button", value, type="button", class_="load", data_link=link(plan.job))
        label = el("th", button, scope="row", class_="number")
        side = "number" if column.right else None
        cells.append(
            el("td", value, class_=side, data_label=column.title if value != "-" else "none") if index else label
        )
    return el("tr", *cells)


def _remedy(item: Nearest, link: Linking) -> Html:
    job = item.estimate or item.job
    text = f"{gib(item.device, 1)} GiB · {item.verdict} · {item.tokens_per_second_per_gpu:.0f} tok/s/GPU"
    button = "" if job is None else el("button", item.change, type="button", class_="load", data_link=link(job))
    return el("li", button, " ", el("span", text, class_="small"))


def _listed(sentences: tuple[str, ...]) -> Html:
    return el("ul", *(el("li", begun(sentence)) for sentence in sentences)) if sentences else Html("")


def diff_parts(result: Diff) -> dict[str, str]:
    """Return what is different between two jobs, and the bar of the first."""
    tables = [block for block in differences.report(result).document.blocks if isinstance(block, Table)]
    rows = [plain_table(block, f"diff-{index}") for index, block in enumerate(tables[:2])]
    title = el("h2", "Compared: A is the job that was pinned, B that of the controls")
    lead = el("p", begun(differences.headline(result)), class_="lead")
    return {"difference": join(title, lead, verdict_line(result.a.estimate), gpu_bar(result.a.estimate), *rows)}


def plain_table(data: Table, name: str) -> Html:
    """Return a table of a report as it is."""
    rows = [
        el("tr", *(cell(value, right=column.right) for column, value in zip(data.columns, row, strict=True)))
        for row in data.rows
    ]
    return table(data.title, data.columns, rows, name=name)


def check_parts(result: Check) -> dict[str, str]:
    """Return what was noticed in dropped files, and the edit of them that makes the job fit."""
    return {"summary": result.summary, "findings": join(*_remarks(result))}


def _remarks(result: Check) -> Iterator[Html]:
    for block in checks.report(result).document.blocks:
        is_finding = isinstance(block, Line) and block.text.startswith("  line ")
        if isinstance(block, Line) and (is_finding or any(file.path in block.text for file in result.files)):
            yield el("p", block.text.strip(), class_="finding")
    for edit in result.fix.edits if result.fix else ():
        yield el("pre", edit.diff)


# ------------------------------------------------------------------------------------------------- a cell of a notebook


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
