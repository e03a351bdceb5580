"""Where the bytes stand: every term by component, with its formula, the values put in, and its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.report.estimate import inputs_of, sized
from memcalc.report.page.markup import Html, el, gib, join, percent, section, swatch
from memcalc.results import Estimate, OffGpuTerm, TermFacts

__all__ = ["breakdown"]

_FIRST = 8
"""Terms of a component that stand there at once; smaller ones open below them."""
_TIERS = {"host": "host memory", "nvme": "NVMe", "cxl": "CXL memory"}
_INTRO = join(
    "At the peak. ",
    el("span", "Rest on a term, reach it with the keyboard or tap it for its formula and source. ", class_="screen"),
    "Terms that are not alive at the peak come last, in brackets.",
)


def breakdown(found: Estimate) -> Html:
    """Return the terms of an estimate by component, and those off the GPU."""
    told = [_Term(term, f"term-{place}") for place, term in enumerate((*found.terms, *found.off_gpu))]
    own, off = told[: len(found.terms)], told[len(found.terms) :]
    parts = sorted(found.components.model_dump().items(), key=lambda part: -part[1])
    groups = [_component(found, name, size, own, opened=place < 1) for place, (name, size) in enumerate(parts)]
    return section("bytes", "Where the bytes stand", *groups, _context(found), *_off_gpu(found, off), intro=_INTRO)


class _Term(NamedTuple):
    """A term, and the id of what explains it."""

    facts: TermFacts
    name: str


def _component(found: Estimate, name: str, size: int, told: list[_Term], *, opened: bool) -> Html:
    own = sorted(
        (one for one in told if one.facts.component == name), key=lambda one: _order(one.facts, found.peak.phase)
    )
    head = _head(swatch(name), name, size, found.peak.device)
    if not own:
        return el("div", head, class_=f"component plain c-{name}")
    first, rest = own[:_FIRST], own[_FIRST:]
    body = [_list(first, found)]
    if rest:
        more = f"{len(rest)} smaller terms" if len(rest) > 1 else "1 smaller term"
        body.append(el("details", el("summary", more), _list(rest, found), class_="more"))
    return el("details", el("summary", head), *body, class_=f"component c-{name}", open=opened)


def _order(term: TermFacts, peak: str) -> tuple[bool, int]:
    return bool(term.phases) and peak not in term.phases, -term.bytes


def _head(mark: Html, name: str, size: int, device: int) -> Html:
    return el(
        "span",
        el("span", mark, name, class_="name"),
        el("span", gib(size), el("span", " GiB", class_="unit"), class_="number"),
        el("span", f"{percent(size, device)}%", class_="number share"),
        el("span", el("span", style=f"width:{100 * size / device:.2f}%"), class_="meter", aria_hidden="true"),
        class_="line",
    )


def _context(found: Estimate) -> Html:
    size, budget = found.peak.device - found.peak.reserved, found.budget
    head = _head(swatch("context"), "context", size, found.peak.device)
    said = f"outside the allocator: {gib(budget.context)} GiB CUDA context, {gib(budget.libraries)} GiB libraries"
    return el("div", head, el("p", said, class_="small"), class_="component plain c-context")


def _list(told: list[_Term], found: Estimate) -> Html:
    return el("ul", *(_row(one, found) for one in told), class_="terms")


def _row(one: _Term, found: Estimate) -> Html:
    term = one.facts
    alive = not term.phases or found.peak.phase in term.phases
    width = min(100.0, 100 * term.bytes / found.peak.device)
    return el(
        "li",
        el("button", term.name, type="button", class_="term-name", aria_describedby=one.name),
        el("span", sized(term.bytes) if alive else f"({sized(term.bytes)})", class_="number"),
        el("span", el("span", style=f"width:{width:.2f}%"), class_="meter", aria_hidden="true") if alive else "",
        _why(one),
        class_="term" if alive else "term absent",
    )


def _why(one: _Term) -> Html:
    term = one.facts
    phases = ", ".join(term.phases) if term.phases else "every phase"
    rows = [("formula", term.formula), ("values", inputs_of(term)), ("bytes", f"{term.bytes:,}")]
    rows += [("alive in", phases), ("source", term.source)]
    kept = (el("div", el("dt", label), el("dd", value)) for label, value in rows if value.strip())
    return el("dl", *kept, class_="why", id=one.name)


def _off_gpu(found: Estimate, told: list[_Term]) -> Iterator[Html]:
    for tier, place in _TIERS.items():
        own = [one for one in told if isinstance(one.facts, OffGpuTerm) and one.facts.tier == tier]
        if own:
            needed = found.host_memory if tier == "host" else found.tier_memory
            said = f"Off the GPU: {place}, {gib(needed)} GiB a node. One rank's terms:"
            yield el("details", el("summary", said), _list(own, found), class_="component off", open=True)
