"""Memory by component: every term by component, with its formula, the values put in, and its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from memcalc import report
from memcalc.evidence import words_of
from memcalc.report.accuracy import in_percent
from memcalc.report.estimate import inputs_of, sized
from memcalc.report.page.markup import Html, cell, code, el, facts, join, section, swatch, table
from memcalc.report.plan_words import time_facts
from memcalc.report.tables import Column, gib, header, percent
from memcalc.results.details import Evidence
from memcalc.results.estimates import Estimate, OffGpuTerm, TermFacts
from memcalc.results.names import PHASES, component_name, phase_name, phase_range
from memcalc.results.plans import Review
from memcalc.specs.job import command_line
from memcalc.units import signed

_FIRST = 8
"""Terms of a component that stand there at once; smaller ones open below them."""
_TIERS = {"host": "host memory", "nvme": "NVMe", "cxl": "CXL memory"}
_INTRO = join(
    "At the peak. ",
    el("span", "Hover, focus or tap a term for its formula and source. ", class_="screen"),
    "Terms in brackets are not allocated at the peak.",
)


def breakdown(estimate: Estimate) -> Html:
    """Return the terms of an estimate by component, and those off the GPU."""
    terms = (*estimate.terms, *estimate.outside, *estimate.off_gpu)
    entries = [_Term(term, f"term-{index}") for index, term in enumerate(terms)]
    inside = len(estimate.terms)
    beyond = inside + len(estimate.outside)
    on_gpu, outside, off = entries[:inside], entries[inside:beyond], entries[beyond:]
    parts = sorted(estimate.components.model_dump().items(), key=lambda part: -part[1])
    groups = [_component(estimate, name, size, on_gpu, opened=index < 1) for index, (name, size) in enumerate(parts)]
    return section(
        "bytes", "Memory by component", *groups, _context(estimate, outside), *_off_gpu(estimate, off), intro=_INTRO
    )


class _Term(NamedTuple):
    """A term, and the id of what explains it."""

    facts: TermFacts
    name: str


def _component(estimate: Estimate, name: str, size: int, entries: list[_Term], *, opened: bool) -> Html:
    members = sorted(
        (entry for entry in entries if entry.facts.component == name),
        key=lambda entry: _order(entry.facts, estimate.peak.phase),
    )
    head = _head(swatch(name), name, size, estimate.peak.device)
    if not members:
        return el("div", head, class_=f"component plain c-{name}")
    first, rest = members[:_FIRST], members[_FIRST:]
    body = [_list(first, estimate)]
    if rest:
        more = f"{len(rest)} smaller terms" if len(rest) > 1 else "1 smaller term"
        body.append(el("details", el("summary", more), _list(rest, estimate), class_="more"))
    return el("details", el("summary", head), *body, class_=f"component c-{name}", open=opened)


def _order(term: TermFacts, peak: str) -> tuple[bool, int]:
    return bool(term.phases) and peak not in term.phases, -term.bytes


def _head(mark: Html, name: str, size: int, device: int) -> Html:
    return el(
        "span",
        el("span", mark, component_name(name), class_="name"),
        el("span", gib(size), el("span", " GiB", class_="unit"), class_="number"),
        el("span", f"{percent(size, device)}%", class_="number share"),
        el("span", el("span", style=f"width:{100 * size / device:.2f}%"), class_="meter", aria_hidden="true"),
        class_="line",
    )


def _context(estimate: Estimate, entries: list[_Term]) -> Html:
    size, budget = estimate.peak.device - estimate.peak.reserved, estimate.budget
    head = _head(swatch("context"), "context", size, estimate.peak.device)
    text = f"outside the allocator: {gib(budget.context)} GiB context, {gib(budget.libraries)} GiB communicators"
    note = el("p", text, class_="small")
    if not entries:
        return el("div", head, note, class_="component plain c-context")
    return el("details", el("summary", head), note, _list(entries, estimate), class_="component c-context", open=False)


def _list(entries: list[_Term], estimate: Estimate) -> Html:
    return el("ul", *(_row(entry, estimate) for entry in entries), class_="terms")


def _row(entry: _Term, estimate: Estimate) -> Html:
    term = entry.facts
    alive = not term.phases or estimate.peak.phase in term.phases
    width = min(100.0, 100 * term.bytes / estimate.peak.device)
    return el(
        "li",
        el("button", term.name, type="button", class_="term-name", aria_describedby=entry.name),
        el("span", sized(term.bytes) if alive else f"({sized(term.bytes)})", class_="number"),
        el("span", el("span", style=f"width:{width:.2f}%"), class_="meter", aria_hidden="true") if alive else "",
        _why(entry),
        class_="term" if alive else "term absent",
    )


def _why(entry: _Term) -> Html:
    term = entry.facts
    phases = phase_range(term.phases, PHASES) or "all phases"
    rows = [("formula", term.formula), ("values", inputs_of(term)), ("bytes", f"{term.bytes:,}")]
    rows += [("allocated in", phases), ("source", term.source)]
    items = (el("div", el("dt", label), el("dd", value)) for label, value in rows if value.strip())
    return el("dl", *items, class_="why", id=entry.name)


def _off_gpu(estimate: Estimate, entries: list[_Term]) -> Iterator[Html]:
    for tier, label in _TIERS.items():
        members = [entry for entry in entries if isinstance(entry.facts, OffGpuTerm) and entry.facts.tier == tier]
        if members:
            needed = estimate.host_memory if tier == "host" else estimate.tier_memory
            text = f"Offloaded to {label}: {gib(needed)} GiB per node. Per rank:"
            yield el("details", el("summary", text), _list(members, estimate), class_="component off", open=True)


def step(estimate: Estimate, chart: Html) -> Html:
    """Return the phases of a step, drawn where something draws, and as tables; then what its time is spent on."""
    parts = [_phases(estimate, closed=bool(chart))]
    if len(estimate.stages) > 1:
        parts.append(_stages(estimate))
    if estimate.time is not None:
        parts += [el("h3", "Time of a step"), facts(time_facts(estimate.time))]
    intro = f"Peak: {phase_name(estimate.peak.phase)}."
    return section("step", "One training step", chart, *parts, intro=intro)


def _phases(estimate: Estimate, *, closed: bool) -> Html:
    usable = estimate.budget.usable
    rows = [
        el(
            "tr",
            cell(phase_name(name), head=True),
            cell(gib(size), right=True),
            cell(f"{percent(size, usable)}%", right=True),
            el(
                "td",
                el("span", el("span", style=f"width:{min(100, 100 * size / usable):.2f}%"), class_="meter"),
                aria_hidden="true",
            ),
            class_="peak" if name == estimate.peak.phase else None,
        )
        for name, size in estimate.phases.items()
    ]
    columns = (*header("phase | allocated [GiB] > | of usable >"), Column(""))
    shown = table(f"Allocated by phase; {gib(usable)} GiB usable.", columns, rows, name="phases")
    return el("details", el("summary", "The phases as a table"), shown) if closed else shown


def _stages(estimate: Estimate) -> Html:
    rows = [
        el(
            "tr",
            cell(str(stage.stage), head=True, right=True),
            cell(str(stage.layers), right=True),
            *(cell(gib(size), right=True) for size in (stage.allocated, stage.reserved, stage.device)),
            cell(phase_name(stage.phase)),
            class_="peak" if stage.stage == estimate.peak.stage else None,
        )
        for stage in estimate.stages
    ]
    columns = header("stage > | layers > | allocated [GiB] > | reserved [GiB] > | total [GiB] > | peak phase")
    return table("Peaks of the pipeline stages.", columns, rows, name="stages")


_FORMS = {"markdown": "Markdown", "latex": "LaTeX", "csv": "CSV"}


def settings(review: Review) -> Html:
    """Return every word of the job by who chose it: the user, the search, or memcalc by default."""
    groups = (
        ("You set", review.given, "given"),
        ("The search chose", review.searched, "searched"),
        ("Defaults", review.assumptions, "default"),
    )
    lists = [
        el("div", el("h3", text), facts({name.replace("_", " "): value for name, value in values.items()}), class_=kind)
        for text, values, kind in groups
        if values
    ]
    intro = "Check these; each has an option of the same name."
    return section("assumed", "Assumptions", el("div", *lists, class_="columns"), intro=intro)


def accuracy(evidence: Evidence) -> Html:
    """Return what measured runs say of this kind of job, and plainly where there are none."""
    parts: list[str] = [el("p", *_speaks(evidence))]
    if evidence.figures:
        rows = [
            el(
                "tr",
                cell(component_name(figure.figure), head=True),
                cell(str(figure.count), right=True),
                *(
                    cell(f"{in_percent(error)}%", right=True)
                    for error in (figure.median_abs_error, figure.p90_abs_error, figure.worst)
                ),
            )
            for figure in evidence.figures
        ]
        columns = header("figure | measured > | median > | p90 > | worst >")
        parts.append(table("Absolute error of the prediction, by figure.", columns, rows, name="errors"))
        parts.append(el("p", *_verdicts(evidence)))
    parts.append(el("p", _range(evidence)))
    return section("accuracy", "Accuracy for this kind of job", *parts)


def _speaks(evidence: Evidence) -> Iterator[str]:
    yield "This kind of job: "
    yield el("b", words_of(evidence.kind))
    yield ". "
    if evidence.nearest is None:
        yield el("strong", "No measured runs of this kind or framework.", class_="none")
    elif evidence.differs:
        yield el("strong", "No measured runs of this kind.", class_="none")
        yield f" Closest: {_counted(evidence.runs)} of another: "
        for index, word in enumerate(words_of(evidence.nearest).split(", ")):
            yield ", " if index else ""
            yield el("b", word) if word in evidence.differs else word
        yield "."
    else:
        yield f"{_counted(evidence.runs)} of this kind, compared with what memcalc predicts:"


def _counted(number: int) -> str:
    return f"{number} measured run{'' if number == 1 else 's'}"


def _verdicts(evidence: Evidence) -> Iterator[str]:
    if evidence.ran_out:
        fits = evidence.false_fits
        yield f"{fits} of {evidence.ran_out} out-of-memory runs {_was(fits)} predicted to fit. "
    else:
        yield "None ran out of memory, so false fits are untested. "
    if evidence.ran:
        rejects = evidence.false_rejects
        yield f"{rejects} of {evidence.ran} that ran {_was(rejects)} predicted not to fit."


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _range(evidence: Evidence) -> str:
    of_kind = f"of the kind {evidence.ranged_kind}" if evidence.ranged_kind else "whatever the kind of job"
    ends = f"{signed(100 * evidence.low, 1)}% to {signed(100 * evidence.high, 1)}%"
    return (
        f"The {100 * evidence.coverage:.0f}% range ({ends}) is fitted to {evidence.ranged} measurements from "
        f"{evidence.documents} sources, {of_kind}. "
        f"On sources left out of the fit it covered {100 * evidence.crossed:.1f}%."
    )


def reproduce(review: Review) -> Html:
    """Return the commands that come to the same."""
    lines = [("This page", review.command)]
    if review.plans is not None:
        lines.append(("The search, in a terminal", review.plans.command))
    if review.estimate is not None:
        lines.append(("This strategy, term by term", command_line(review.estimate.job, "explain")))
    parts = [join(el("h3", text), code(line, f"command-{index}")) for index, (text, line) in enumerate(lines)]
    notes = [el("p", note, class_="small") for note in review.notes]
    return section("reproduce", "Reproduce it", *parts, *notes)


def copies(review: Review) -> Html:
    """Return the answer in the formats that go into other documents, to be copied."""
    subjects = []
    if review.estimate is not None:
        subjects.append(("estimate", "The estimate", report.of_estimate(review.estimate)))
    if review.plans is not None:
        subjects.append(("plan", "The plans", report.of_plans(review.plans)))
    return copies_of(subjects)


def copies_of(subjects: Iterable[tuple[str, str, report.Report]]) -> Html:
    """Return documents to be copied, each with its id and its heading."""
    parts = []
    for name, text, document in subjects:
        texts = {form: report.render(document, form) for form in _FORMS}
        buttons = [
            el("button", f"Copy {label}", type="button", class_="copy", data_copies=f"{name}-{form}", hidden=True)
            for form, label in _FORMS.items()
        ]
        shown = [
            el(
                "details",
                el("summary", label),
                el(
                    "pre",
                    texts[form],
                    id=f"{name}-{form}",
                    tabindex="0",
                    role="region",
                    aria_label=f"{text} as {label}",
                ),
            )
            for form, label in _FORMS.items()
        ]
        parts.append(el("div", el("h3", text), el("div", *buttons, class_="buttons"), *shown))
    intro = "As --format markdown, latex and csv write them."
    return section("copy", "Copy the tables", el("div", *parts, class_="columns"), intro=intro, class_="copies")
