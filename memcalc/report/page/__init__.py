"""One answer as a page of HTML that stands alone: no network, no script but its own, all of it readable without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memcalc import report
from memcalc._version import __version__
from memcalc.report.page import head, markup, sections
from memcalc.report.page.markup import Html, begun, cell, code, el, facts, join, section, table
from memcalc.report.page.sections import breakdown, step
from memcalc.report.plan_words import strategy_words, time_facts
from memcalc.report.tables import Table, gib
from memcalc.results.names import component_name, phase_name
from memcalc.results.plans import Plan, Plans, Review
from memcalc.specs.options import DEGREES
from memcalc.specs.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memcalc.results.estimates import Estimate
    from memcalc.results.plans import SavedPlan
    from memcalc.results.posttraining import Rl, RlPlans
    from memcalc.specs.model import Model


def page(
    answer: Estimate | Plans | SavedPlan | Rl | RlPlans,
    *,
    rank: int | str | None = None,
    title: str = "",
    note: str = "",
    model: Model | None = None,
    preset_dirs: Iterable[str] = (),
) -> str:
    """Return an estimate, plans, a saved plan or post-training as a page of HTML for a design document or a review.

    Of plans the one of `rank` is shown byte by byte, the first when left out. `title` and `note` head the page; blank
    lines part the note. `model` is the recorded one, where the plans are of one.
    """
    from memcalc.handoff.review import review_of, roles_of
    from memcalc.report.page.roles import role_page
    from memcalc.results.posttraining import Rl, RlPlans

    if isinstance(answer, Rl | RlPlans):
        return role_page(*roles_of(answer, rank), title=title, note=note)
    return page_of(review_of(answer, rank=rank, model=model, preset_dirs=preset_dirs), title=title, note=note)


def page_of(review: Review, *, title: str = "", note: str = "") -> str:
    """Return a review as a page."""
    text = title or head.title_of(review)
    sections = _sections(review)
    links = head.contents([(name, label) for name, label, _ in sections])
    main = el("main", head.answer(review), links, *(part for _, _, part in sections), id="main")
    skip = el("a", "Skip to the answer", href="#main", class_="skip")
    undrawn = "" if markup.draws() else el("p", markup.UNDRAWN)
    closing = el("footer", el("p", f"Made by memcalc {__version__}. Figures are predictions."), undrawn)
    status = el("p", id="status", role="status", class_="status")
    body = el(
        "body", skip, head.heading(review, text, note), main, closing, status, el("script", Html(markup.script()))
    )
    return f"<!doctype html>\n{el('html', markup.head(text), body, lang='en')}\n"


def said_of(review: Review) -> tuple[bool, str]:
    """Return whether it fits, and the verdict in one line."""
    fits = head.verdict_of(review) != "does-not-fit"
    if review.subject == "closest" and review.plans is not None:
        return fits, f"does not fit · {review.plans.too_large}"
    return fits, "" if review.estimate is None else head.spoken(review.estimate)


def _front(review: Review) -> Html:
    result = review.plans
    return markup.chart("plan", result) if result is not None and len(result.plans) > 1 else Html("")


def _sections(review: Review) -> list[tuple[str, str, Html]]:
    """Return the parts below the answer: id, name in the contents, element."""
    result, parts = review.estimate, []
    if review.chosen is not None:
        parts.append(("plans", "Plans", plans(review, _front(review))))
    if result is not None:
        parts.append(("bytes", "Bytes", breakdown(result)))
        parts.append(
            ("step", "One step", step(result, markup.chart("timeline", result) if result.timeline else Html("")))
        )
    parts.append(("assumed", "Assumptions", sections.settings(review)))
    if review.evidence is not None:
        parts.append(("accuracy", "Accuracy", sections.accuracy(review.evidence)))
    parts.append(("reproduce", "Reproduce", sections.reproduce(review)))
    parts.append(("copy", "Copy", sections.copies(review)))
    return parts


_AFTER = "allocated"
"""The first column of the data that is a figure of the plan, not a part of its strategy."""
_FIGURES = ("peak", "used", "verdict", "tok/s/GPU", "MFU")
_CORE = ("framework", "precision", "optimizer", "zero", "recompute", "offload")
_DEGREES = ("dp", *DEGREES)
_DEFAULT = Strategy().model_dump()


def plans(review: Review, chart: Html) -> Html:
    """Return the plans of a search, or those of a saved file."""
    result = review.plans
    if result is not None:
        chosen = review.chosen.rank if review.chosen else 1
        parts = [
            chart,
            _table(result, chosen),
            *(_panel(plan, result.plans[0], opened=plan.rank == chosen) for plan in result.plans),
        ]
        return section("plans", "Plans", *parts, intro=_intro(result, drawn=bool(chart)), class_="plans")
    first = review.chosen
    panels = [] if first is None else [_panel(first, first, opened=True)]
    fallback = [_panel(plan, first or plan, opened=False, fallback=True) for plan in review.fallback]
    text = "The saved plan and its fallbacks, in order."
    return section("plans", "Plans", *panels, *fallback, intro=review.no_fallback or text, class_="plans")


def _intro(result: Plans, *, drawn: bool) -> Html:
    front = ", ".join(f"#{rank}" for rank in result.pareto)
    text = f"{len(result.plans)} of {result.feasible:,} strategies that fit ({result.searched:,} searched)."
    more = f" Pareto-optimal: {front}." if front else ""
    leads = f" Select one in the {'chart or the ' if drawn else ''}table for details."
    return join(text, more, el("span", leads, class_="screen"))


def _table(result: Plans, chosen: int) -> Html:
    data = report.of_plans(result).document.data
    places = list(_shown(data))
    rows = [
        el("tr", *_cells(data, places, row), data_plan=str(plan.rank), class_="chosen" if plan.rank == chosen else None)
        for row, plan in zip(data.rows, result.plans, strict=True)
    ]
    same = ", ".join(_same(data, places))
    caption = f"Ranked by {result.objective}." + (f" All plans: {same}." if same else "")
    return table(caption, data.keep(places).columns, rows, name="plan-table", sortable=True)


def _shown(data: Table) -> Iterator[int]:
    """Yield the places of what a plan is told by: its main figures, then what differs in the strategies."""
    titles = [column.title for column in data.columns]
    yield titles.index("#")
    for index, title in enumerate(titles):
        if title in _FIGURES and (title != "verdict" or len({row[index] for row in data.rows}) > 1):
            yield index
    for index, title in enumerate(titles[: titles.index(_AFTER)]):
        if title == "batch" or (title not in {"#", "global batch"} and len({row[index] for row in data.rows}) > 1):
            yield index


def _same(data: Table, shown: Sequence[int]) -> Iterator[str]:
    """Yield the parts of the strategy that all plans share and that are no plain one or none."""
    titles = [column.title for column in data.columns]
    for index, title in enumerate(titles[: titles.index(_AFTER)]):
        value = data.rows[0][index]
        if index not in shown and value not in {"1", "none", "no", "cpu"} and title != "schedule":
            yield f"{title} {value}"


def _cells(data: Table, places: Sequence[int], row: tuple[str, ...]) -> Iterator[Html]:
    for index in places:
        column, value = data.columns[index], row[index]
        if column.title == "#":
            link = el("a", f"#{value}", href=f"#plan-{value}", class_="plan-link")
            yield el("th", link, scope="row", class_="number", data_sort=value)
        elif column.title == "used":
            bar = el(
                "span",
                el("span", style=f"width:{min(100.0, float(value or 0)):.0f}%"),
                class_="meter",
                aria_hidden="true",
            )
            yield el("td", bar, f" {value}", class_="number metered", data_sort=value)
        elif column.title == "verdict":
            yield el("td", value, class_=f"mood-{value}")
        else:
            yield cell(value, right=column.right)


def _panel(plan: Plan, first: Plan, *, opened: bool, fallback: bool = False) -> Html:
    name = f"fallback-{plan.rank}" if fallback else f"plan-{plan.rank}"
    label = f"Fallback {plan.rank}" if fallback else f"#{plan.rank}"
    figures = f"{gib(plan.peak.device)} GiB · {plan.time.tokens_per_second_per_gpu:.0f} tok/s/GPU"
    summary = el(
        "summary",
        el("b", label, class_="rank"),
        el("span", ", ".join(strategy_words(plan.strategy)), class_="words"),
        el("span", figures, class_="number"),
    )
    body = el(
        "div",
        el("p", begun(plan.why)),
        el("p", el("strong", "Best at: "), "; ".join(plan.special), class_="special") if plan.special else "",
        el(
            "div",
            el("div", el("h4", "Strategy"), _strategy(plan, first)),
            el(
                "div",
                el("div", el("h4", "Memory"), _memory(plan)),
                el("div", el("h4", "Time of a step"), _time(plan)),
                class_="figures",
            ),
            class_="columns",
        ),
        code(plan.command, f"{name}-command"),
        id=name,
        class_="body",
    )
    return el("details", summary, body, class_="plan", data_plan=None if fallback else str(plan.rank), open=opened)


def _strategy(plan: Plan, first: Plan) -> Html:
    """Return what always matters of a strategy, and what is not at its default; what is not the first's stands out."""
    rows, others = dict(_rows(plan)), dict(_rows(first))
    items = (
        el("div", el("dt", name), el("dd", value), class_=None if others.get(name) == value else "differs")
        for name, value in rows.items()
    )
    return join(el("dl", *items, class_="facts"), el("p", "Other fields: default.", class_="small"))


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    values = plan.strategy.model_dump()
    yield from ((name, _value(values[name])) for name in _CORE)
    yield "ranks", " · ".join(f"{name}\N{NO-BREAK SPACE}{values[name]}" for name in _DEGREES)
    batch = f"{plan.strategy.micro_batch} × {plan.accumulation_steps} accumulation × {plan.data_parallel} ranks"
    yield "batch", f"{batch} = {plan.global_batch}"
    known = {*_CORE, *_DEGREES, "micro_batch"}
    yield from (
        (name.replace("_", " "), _value(value))
        for name, value in values.items()
        if name not in known and value != _DEFAULT[name]
    )


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _memory(plan: Plan) -> Html:
    peak = plan.peak
    values = {component_name(name): f"{gib(getattr(peak, name))} GiB" for name in ("device", "reserved", "allocated")}
    values |= {"peak at": phase_name(peak.phase), "verdict": plan.verdict.replace("-", " ")}
    if plan.strategy.pp > 1:
        values["peak in stage"] = str(peak.stage)
    values |= {
        name: f"{gib(size)} GiB per node"
        for name, size in (("host memory", plan.host_memory), (plan.strategy.offload_to, plan.tier_memory))
        if size
    }
    return facts(values)


def _time(plan: Plan) -> Html:
    values = time_facts(plan.time)
    basis = values.pop("basis")
    return facts({**values, "GPU-hours": f"{plan.gpu_hours:.4g}", "basis": basis})
