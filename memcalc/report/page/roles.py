"""Post-training on a page: the phases as bars stacked by role, the table of both, and what belongs beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from memcalc._version import __version__
from memcalc.report import posttraining, rl_steps
from memcalc.report.estimate import MOODS
from memcalc.report.page import markup, sections
from memcalc.report.page.head import contents, verdict_title
from memcalc.report.page.live import plain_table
from memcalc.report.page.markup import Html, begun, code, el, facts, join, section
from memcalc.report.posttraining import head_of, roles_in
from memcalc.report.tables import Line, Table, gib, percent
from memcalc.results.posttraining import Rl, RlDiff, RlPhase, RlPlan, RlPlans, RlRemedy
from memcalc.specs.job import JobRecord, command_line

Linking = Callable[[JobRecord], str]
"""What makes a link of a job."""
_COLUMNS = 8
"""Columns of the plans on the page that changes: those that decide."""


# ----------------------------------------------------------------------------------------------------------- the bars


def role_class(name: str) -> str:
    """Return the class of a role.

    >>> role_class("reward model")
    'r-reward-model'
    """
    return f"r-{name.replace(' ', '-')}"


def phase_bars(result: Rl) -> Html:
    """Return a bar for each phase, stacked by role, with the line of what the GPU has."""
    end = max(result.capacity, *(phase.allocated for phase in result.phases))
    rows = [_phase_bar(result, phase, end) for phase in result.phases]
    keys = [
        el("li", el("span", class_=f"swatch {role_class(name)}", aria_hidden="true"), name) for name in roles_in(result)
    ]
    text = el("figcaption", f"One GPU in each phase of a step, GiB; dashed: its {gib(result.capacity, 1)} GiB.")
    return el("figure", text, el("ul", *rows, class_="phases"), el("ul", *keys, class_="legend"), class_="gpu")


def _phase_bar(result: Rl, phase: RlPhase, end: int) -> Html:
    sizes = [(name, phase.roles[name]) for name in roles_in(result) if name in phase.roles]
    pieces = [
        el("span", class_=role_class(name), style=f"width:{100 * size / end:.3f}%", title=f"{name} {gib(size)} GiB")
        for name, size in sizes
    ]
    limit = el("span", class_="room", style=f"left:{100 * result.capacity / end:.3f}%")
    where = "" if phase.gpus == "shared" else f" ({phase.gpus} GPUs)"
    name = el("span", f"{phase.name}{where}", class_="phase")
    drawn = el("span", el("span", *pieces, class_="held"), limit, class_="drawn", aria_hidden="true")
    labels = ", ".join(f"{role} {gib(size)}" for role, size in sizes)
    size = el("span", gib(phase.allocated, 1), el("span", f": {labels}", class_="unseen"), class_="number")
    over = "bad" if phase.allocated > result.capacity else "binding" if phase.name == result.binding else None
    return el("li", name, drawn, size, class_=over)


def verdict_line(result: Rl) -> Html:
    """Return the verdict, and the memory of the binding phase beside the capacity."""
    title = el("span", *verdict_title(result.verdict), class_="title")
    return el("p", title, " ", el("strong", _used(result)), class_=f"verdict {MOODS[result.verdict]}")


def _used(result: Rl) -> str:
    size = result.capacity - result.headroom
    over = f", over by {gib(-result.headroom, 1)}" if result.headroom < 0 else ""
    share = f"{percent(size, result.capacity)}%{over}"
    return f"{gib(size, 1)} of {gib(result.capacity, 1)} GiB per GPU in {result.binding} ({share})"


def _tables(result: Rl) -> list[Table]:
    return [block for block in posttraining.report(result).document.blocks if isinstance(block, Table)]


# -------------------------------------------------------------------------------------------------- a page that changes


def role_parts(result: Rl) -> dict[str, Any]:
    """Return what follows a control: verdict, bars, the engines in a line, warnings, and the job as a command."""
    notes = [result.reason] if result.reason else []
    return {
        "verdict": result.verdict,
        "sentence": f"{result.verdict.replace('-', ' ')}: {_used(result)}",
        "head": verdict_line(result),
        "bar": phase_bars(result),
        "speed": el("p", _engines(result), class_="speed"),
        "warnings": _listed((*notes, *result.warnings)),
        "assumed": {name.replace("_", "-"): value for name, value in result.assumptions.items()},
        "command": result.command,
        "device": result.capacity - result.headroom,
        "capacity": result.capacity,
    }


def _engines(result: Rl) -> str:
    rollout = result.rollout
    if rollout is None:
        return f"{result.algorithm} generates nothing; trained by {result.trainer}."
    largest = "none" if rollout.largest_utilization is None else f"{rollout.largest_utilization:g}"
    rounds = "" if rollout.rounds is None else f" · {rollout.rounds} round{'s' * (rollout.rounds > 1)} per step"
    return (
        f"{rollout.engines} engine{'s' * (rollout.engines > 1)}, each {rollout.concurrency:.0f} samples at once"
        f"{rounds} · utilization {rollout.utilization:g}, at most {largest}"
    )


def _listed(sentences: tuple[str, ...]) -> Html:
    return el("ul", *(el("li", begun(sentence)) for sentence in sentences)) if sentences else Html("")


def role_terms(result: Rl) -> dict[str, str]:
    """Return the table of phases and roles, and what the engines hold."""
    tables = [plain_table(table, f"roles-{index}") for index, table in enumerate(_tables(result))]
    return {"terms": el("section", *tables)}


def role_notes(result: Rl) -> dict[str, str]:
    """Return what was noticed in dropped files of post-training."""
    return {"summary": posttraining.summary(result), "findings": _listed(result.warnings)}


def role_plans(result: RlPlans, link: Linking) -> dict[str, Any]:
    """Return the plans, or what would fit where none does, each with the link to its job."""
    if not result.plans:
        nearest = result.nearest
        reason = nearest.reason if nearest else "nothing fits"
        rows = [_remedy(remedy, link) for remedy in nearest.remedies] if nearest else []
        listed = el("ul", *rows, class_="remedies") if rows else el("p", "No single change makes it fit.")
        return {"title": "What would fit", "count": "", "plans": join(el("p", begun(reason)), listed)}
    data = next(block for block in posttraining.plans_report(result).document.blocks if isinstance(block, Table))
    columns = data.columns[:_COLUMNS]
    rows = [_plan(columns, row, plan, link) for row, plan in zip(data.rows, result.plans, strict=True)]
    return {
        "title": "Best plans",
        "count": f"{result.fitting:,} of {result.searched:,} jobs fit",
        "plans": markup.table(
            f"{data.title}. Choose one to put it into the controls.", columns, rows, name="plan-table"
        ),
    }


def _plan(columns: tuple[Any, ...], row: tuple[str, ...], plan: RlPlan, link: Linking) -> Html:
    button = el("button", row[0], type="button", class_="load", data_link=link(plan.job))
    cells = [el("th", button, scope="row", class_="number")]
    for column, value in list(zip(columns, row, strict=False))[1:]:
        side = "number" if column.right else None
        cells.append(el("td", value, class_=side, data_label=column.title if value else "none"))
    return el("tr", *cells)


def _remedy(remedy: RlRemedy, link: Linking) -> Html:
    button = el("button", remedy.change, type="button", class_="load", data_link=link(remedy.job))
    return el("li", button, " ", el("span", f"{gib(remedy.device, 1)} GiB · {remedy.verdict}", class_="small"))


def role_difference(result: RlDiff) -> dict[str, str]:
    """Return what is different between two jobs, and the bars of the first."""
    tables = [block for block in rl_steps.of_diff(result).document.blocks if isinstance(block, Table)]
    rows = [plain_table(block, f"diff-{index}") for index, block in enumerate(tables[:3])]
    title = el("h2", "Compared: A is the job that was pinned, B that of the controls")
    lead = el("p", begun(rl_steps.headline(result)), class_="lead")
    return {"difference": join(title, lead, verdict_line(result.a), phase_bars(result.a), *rows)}


# ------------------------------------------------------------------------------------------- a page that stands alone


def said_of(result: Rl, plans: RlPlans | None) -> tuple[bool, str]:
    """Return whether it fits, and the verdict in one line."""
    if plans is not None and not plans.plans:
        reason = plans.nearest.reason if plans.nearest else ""
        return False, f"does not fit · closest: {reason}"
    return result.verdict != "does-not-fit", next(head_of(result)).text


def role_page(result: Rl, plans: RlPlans | None = None, *, title: str = "", note: str = "") -> str:
    """Return a job of post-training, and the plans that it is one of, as a page of HTML that stands alone."""
    hardware = result.hardware
    text = title or f"{result.algorithm} of {result.model.name} on {hardware.gpus} × {hardware.gpu}"
    parts = list(_sections(result, plans))
    links = contents([(name, label) for name, label, _ in parts])
    main = el("main", _answer(result, plans), links, *(part for _, _, part in parts), id="main")
    skip = el("a", "Skip to the answer", href="#main", class_="skip")
    undrawn = "" if markup.draws() else el("p", markup.UNDRAWN)
    closing = el("footer", el("p", f"Made by memcalc {__version__}. Figures are predictions."), undrawn)
    status = el("p", id="status", role="status", class_="status")
    head = el(
        "header",
        el("h1", text),
        el("p", f"{list(head_of(result))[1].text}.", class_="job"),
        *(el("p", part, class_="note") for part in note.split("\n\n") if part.strip()),
    )
    body = el("body", skip, head, main, closing, status, el("script", Html(markup.script())))
    return f"<!doctype html>\n{el('html', markup.head(text), body, lang='en')}\n"


def _answer(result: Rl, plans: RlPlans | None) -> Html:
    lines = list(head_of(result))[2:]
    parts: list[Html] = [el("h2", *verdict_title(result.verdict), id="answer-title")]
    if plans is not None and not plans.plans:
        parts.append(el("h3", "Closest job"))
    parts.append(
        el("p", el("strong", _used(result)), f". {begun(result.reason)}." if result.reason else "", class_="lead")
    )
    parts += [el("p", line.text) for line in lines]
    parts += [el("p", _engines(result)), phase_bars(result)]
    if result.warnings:
        parts.append(el("div", el("h3", "Notes"), _listed(result.warnings), class_="warnings"))
    return el("section", *parts, id="answer", class_=f"answer {MOODS[result.verdict]}", aria_labelledby="answer-title")


def _sections(result: Rl, plans: RlPlans | None) -> Iterator[tuple[str, str, Html]]:
    """Yield the parts below the answer: id, name in the contents, element."""
    if plans is not None:
        yield "plans", "Plans", _plans(plans)
    tables = [plain_table(table, f"roles-{index}") for index, table in enumerate(_tables(result))]
    chart = markup.chart("posttraining", result)
    intro = f"The peak is the largest phase, never their sum: {result.binding}."
    yield "phases", "Phases", section("phases", "Phases and roles", chart, *tables, intro=intro)
    given = {name: value for name, value in _words(result.job).items() if name not in result.assumptions}
    groups = (("You set" if plans is None else "Set or searched", given), ("Defaults", result.assumptions))
    lists = [
        el("div", el("h3", text), facts({name.replace("_", " "): value for name, value in values.items()}))
        for text, values in groups
        if values
    ]
    intro = "Check these; each has an option of the same name."
    yield "assumed", "Assumptions", section("assumed", "Assumptions", el("div", *lists, class_="columns"), intro=intro)
    lines = [("This page", command_line(result.job, "report", "--estimate")), ("The job", result.command)]
    lines += [("The search, in a terminal", plans.command)] if plans is not None else []
    commands = [join(el("h3", text), code(line, f"command-{index}")) for index, (text, line) in enumerate(lines)]
    yield "reproduce", "Reproduce", section("reproduce", "Reproduce it", *commands)
    subjects = [("job", "The job", posttraining.report(result))]
    subjects += [("plan", "The plans", posttraining.plans_report(plans))] if plans is not None else []
    yield "copy", "Copy", sections.copies_of(subjects)


def _words(job: JobRecord) -> dict[str, str]:
    labels = {"model": job.model, "gpu": job.gpu, "node": job.node, **job.options}
    return {name: str(value) for name, value in labels.items() if value is not None}


def _plans(plans: RlPlans) -> Html:
    document = posttraining.plans_report(plans).document
    tables = [plain_table(block, "plan-table") for block in document.blocks if isinstance(block, Table)]
    grounds = [el("p", line.text, class_="small") for line in document.blocks if isinstance(line, Line) and line.label]
    lead = next(block.text for block in document.blocks if isinstance(block, Line))
    return section("plans", "Plans", *tables, *grounds, intro=begun(lead))
