"""The plans: the front as a chart, all of them as a table, and each in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc import report
from memcalc.report.estimate import strategy_words
from memcalc.report.page.markup import Html, begun, cell, code, el, facts, gib, join, percent, section, table
from memcalc.report.tables import Table
from memcalc.results import Plan, Plans, Review
from memcalc.specs.strategy import Strategy
from memcalc.units import format_seconds

__all__ = ["plans"]

_AFTER = "allocated"
"""The first column of the data that is a figure of the plan, not a part of its strategy."""
_FIGURES = ("peak", "used", "verdict", "tok/s/GPU", "MFU")
_TIMES = ("compute", "recompute", "communication", "offload", "optimizer", "bubble")
_CORE = ("framework", "precision", "optimizer", "zero", "recompute", "offload")
_DEGREES = ("dp", "tp", "pp", "cp", "ep")
_DEFAULT = Strategy().model_dump()


def plans(review: Review, chart: Html) -> Html:
    """Return the plans of a search, or those of a saved file."""
    found = review.plans
    if found is not None:
        chosen = review.chosen.rank if review.chosen else 1
        parts = [
            chart,
            _table(found, chosen),
            *(_panel(one, found.plans[0], opened=one.rank == chosen) for one in found.plans),
        ]
        return section("plans", "Plans", *parts, intro=_intro(found, drawn=bool(chart)), class_="plans")
    first = review.chosen
    own = [] if first is None else [_panel(first, first, opened=True)]
    fallback = [_panel(one, first or one, opened=False, fallback=True) for one in review.fallback]
    said = "The saved plan, and what it goes back to where it does not run, in this order."
    return section("plans", "Plans", *own, *fallback, intro=review.no_fallback or said, class_="plans")


def _intro(found: Plans, *, drawn: bool) -> Html:
    front = ", ".join(f"#{rank}" for rank in found.pareto)
    said = f"{found.searched:,} strategies searched, {found.feasible:,} fit; below are {len(found.plans)} of them."
    more = f" No other plan is both smaller and faster than {front}." if front else ""
    leads = f" Choose one in the {'chart or the ' if drawn else ''}table to see all of it."
    return join(said, more, el("span", leads, class_="screen"))


def _table(found: Plans, chosen: int) -> Html:
    data = report.of_plans(found).document.data
    places = list(_shown(data))
    heads = [(data.columns[p].title, data.columns[p].unit, data.columns[p].right) for p in places]
    rows = [
        el(
            "tr",
            *_cells(data, places, row),
            data_plan=str(one.rank),
            class_="chosen" if one.rank == chosen else None,
        )
        for row, one in zip(data.rows, found.plans, strict=True)
    ]
    same = ", ".join(_same(data, places))
    caption = f"Ranked by {found.objective}." + (f" The same in all: {same}." if same else "")
    return table(caption, heads, rows, name="plan-table", sortable=True)


def _shown(data: Table) -> Iterator[int]:
    """Yield the places of what a plan is told by: its main figures, then what differs in the strategies."""
    titles = [column.title for column in data.columns]
    yield titles.index("#")
    for place, title in enumerate(titles):
        if title in _FIGURES and (title != "verdict" or len({row[place] for row in data.rows}) > 1):
            yield place
    for place, title in enumerate(titles[: titles.index(_AFTER)]):
        if title == "batch" or (title not in {"#", "global batch"} and len({row[place] for row in data.rows}) > 1):
            yield place


def _same(data: Table, shown: Sequence[int]) -> Iterator[str]:
    """Yield the parts of the strategy that all plans share and that are no plain one or none."""
    titles = [column.title for column in data.columns]
    for place, title in enumerate(titles[: titles.index(_AFTER)]):
        value = data.rows[0][place]
        if place not in shown and value not in {"1", "none", "no", "cpu"} and title != "schedule":
            yield f"{title} {value}"


def _cells(data: Table, places: Sequence[int], row: tuple[str, ...]) -> Iterator[Html]:
    for place in places:
        column, value = data.columns[place], row[place]
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


def _panel(one: Plan, first: Plan, *, opened: bool, fallback: bool = False) -> Html:
    name = f"fallback-{one.rank}" if fallback else f"plan-{one.rank}"
    label = f"Fallback {one.rank}" if fallback else f"#{one.rank}"
    figures = f"{gib(one.peak.device)} GiB · {one.time.tokens_per_second_per_gpu:.0f} tok/s/GPU"
    head = el(
        "summary",
        el("b", label, class_="rank"),
        el("span", strategy_words(one.strategy), class_="words"),
        el("span", figures, class_="number"),
    )
    body = el(
        "div",
        el("p", begun(one.why)),
        el("p", el("strong", "Special: "), "; ".join(one.special), class_="special") if one.special else "",
        el(
            "div",
            el("div", el("h4", "Strategy"), _strategy(one, first)),
            el(
                "div",
                el("div", el("h4", "Memory"), _memory(one)),
                el("div", el("h4", "Time of a step"), _time(one)),
                class_="figures",
            ),
            class_="columns",
        ),
        code(one.command, f"{name}-command"),
        id=name,
        class_="body",
    )
    return el("details", head, body, class_="plan", data_plan=None if fallback else str(one.rank), open=opened)


def _strategy(one: Plan, first: Plan) -> Html:
    """Return what always matters of a strategy, and what is not at its default; what is not the first's stands out."""
    rows, others = dict(_rows(one)), dict(_rows(first))
    items = (
        el("div", el("dt", name), el("dd", value), class_=None if others.get(name) == value else "differs")
        for name, value in rows.items()
    )
    return join(el("dl", *items, class_="facts"), el("p", "Every other field has its default.", class_="small"))


def _rows(one: Plan) -> Iterator[tuple[str, str]]:
    values = one.strategy.model_dump()
    yield from ((name, _value(values[name])) for name in _CORE)
    yield "ranks", " · ".join(f"{name}\N{NO-BREAK SPACE}{values[name]}" for name in _DEGREES)
    batch = f"{one.strategy.micro_batch} × {one.accumulation_steps} accumulated × {one.data_parallel} ranks"
    yield "batch", f"{batch} = {one.global_batch}"
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


def _memory(one: Plan) -> Html:
    peak = one.peak
    values = {name: f"{gib(getattr(peak, name))} GiB" for name in ("device", "reserved", "allocated")}
    values |= {"peak at": peak.phase, "verdict": one.verdict.replace("-", " ")}
    if one.strategy.pp > 1:
        values["peak in stage"] = str(peak.stage)
    values |= {
        name: f"{gib(size)} GiB a node"
        for name, size in (("host memory", one.host_memory), (one.strategy.offload_to, one.tier_memory))
        if size
    }
    return facts(values)


def _time(one: Plan) -> Html:
    time = one.time
    values = {"step": f"{format_seconds(time.step)} ({format_seconds(time.low)} to {format_seconds(time.high)})"}
    for name in _TIMES:
        seconds = getattr(time, name)
        if seconds:
            values[name] = f"{format_seconds(seconds)}, {percent(seconds, time.step)}%"
    values |= {
        "throughput": f"{time.tokens_per_second_per_gpu:.0f} tokens/s per GPU",
        "MFU": f"{100 * time.mfu:.1f}%",
        "GPU-hours": f"{one.gpu_hours:.4g}",
        "basis": time.basis,
    }
    return facts(values)
