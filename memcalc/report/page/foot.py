"""The lower part of a page: what was taken as given, how right it is, what reproduces it, and what to copy."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc import report
from memcalc.evidence import words_of
from memcalc.report.accuracy import signed
from memcalc.report.page.markup import Html, cell, code, el, facts, join, section, table
from memcalc.results import Evidence, Review

__all__ = ["accuracy", "copies", "reproduce", "settings"]

_FORMS = {"markdown": "Markdown", "latex": "LaTeX", "csv": "CSV"}


def settings(review: Review) -> Html:
    """Return every word of the job by who chose it: the user, the search, or memcalc by default."""
    groups = (
        ("You said", review.given, "given"),
        ("The search chose", review.searched, "searched"),
        ("Taken by default", review.assumptions, "default"),
    )
    lists = [
        el("div", el("h3", said), facts({name.replace("_", " "): value for name, value in values.items()}), class_=kind)
        for said, values, kind in groups
        if values
    ]
    intro = "A default that is wrong for your job changes the answer: each of them is an option of the same name."
    return section("assumed", "What is assumed", el("div", *lists, class_="columns"), intro=intro)


def accuracy(found: Evidence) -> Html:
    """Return what measured runs say of this kind of job, and plainly where there are none."""
    parts: list[str] = [el("p", *_speaks(found))]
    if found.figures:
        rows = [
            el(
                "tr",
                cell(one.figure, head=True),
                cell(str(one.count), right=True),
                *(
                    cell(f"{signed(error, sign=False)}%", right=True)
                    for error in (one.median_abs_error, one.p90_abs_error, one.worst)
                ),
            )
            for one in found.figures
        ]
        heads = [
            ("figure", "", False),
            ("measured", "", True),
            ("median", "", True),
            ("p90", "", True),
            ("worst", "", True),
        ]
        parts.append(table("Absolute error of the prediction, by figure.", heads, rows, name="errors"))
        parts.append(el("p", *_verdicts(found)))
    parts.append(el("p", _range(found)))
    return section("accuracy", "How right is this", *parts)


def _speaks(found: Evidence) -> Iterator[str]:
    yield "This kind of job: "
    yield el("b", words_of(found.kind))
    yield ". "
    if found.nearest is None:
        yield el("strong", "No measured run of this kind, nor of its framework, is shipped.", class_="none")
    elif found.differs:
        yield el("strong", "No measured run is of this kind.", class_="none")
        yield f" The nearest are {_counted(found.runs)} of another: "
        for place, word in enumerate(words_of(found.nearest).split(", ")):
            yield ", " if place else ""
            yield el("b", word) if word in found.differs else word
        yield "."
    else:
        yield f"{_counted(found.runs)} of this kind, compared with what memcalc predicts:"


def _counted(number: int) -> str:
    return f"{number} measured run{'' if number == 1 else 's'}"


def _verdicts(found: Evidence) -> Iterator[str]:
    if found.ran_out:
        yield f"Of {found.ran_out} that ran out of memory, {found.false_fits} {_was(found.false_fits)} said to fit. "
    else:
        yield "None of them ran out of memory, so that none tests for a false fit. "
    if found.ran:
        yield f"Of {found.ran} that ran, {found.false_rejects} {_was(found.false_rejects)} said not to fit."


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def _range(found: Evidence) -> str:
    return (
        f"The range of reserved and device memory ({_signed(found.low)} to {_signed(found.high)}) stands on "
        f"{found.ranged} measured figures of {found.documents} documents, whatever the kind of job, and was made to "
        f"hold {100 * found.coverage:.0f}% of them; ranges fitted without a document held {100 * found.crossed:.1f}% "
        "of that document's."
    )


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}%".replace("-", "−")


def reproduce(review: Review) -> Html:
    """Return the commands that come to the same."""
    lines = [("This page", review.command)]
    if review.plans is not None:
        lines.append(("The search, in a terminal", review.plans.command))
    if review.estimate is not None:
        lines.append(
            ("This strategy, term by term", review.estimate.command.replace("memcalc estimate", "memcalc explain", 1))
        )
    parts = [join(el("h3", said), code(line, f"command-{place}")) for place, (said, line) in enumerate(lines)]
    notes = [el("p", note, class_="small") for note in review.notes]
    return section("reproduce", "Reproduce it", *parts, *notes)


def copies(review: Review) -> Html:
    """Return the answer in the formats that go into other documents, to be copied."""
    subjects = []
    if review.estimate is not None:
        subjects.append(("estimate", "The estimate", report.of_estimate(review.estimate)))
    if review.plans is not None:
        subjects.append(("plan", "The plans", report.of_plans(review.plans)))
    parts = []
    for name, said, document in subjects:
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
                    aria_label=f"{said} as {label}",
                ),
            )
            for form, label in _FORMS.items()
        ]
        parts.append(el("div", el("h3", said), el("div", *buttons, class_="buttons"), *shown))
    intro = "The same as --format markdown, latex and csv write."
    return section("copy", "Into another document", el("div", *parts, class_="columns"), intro=intro, class_="copies")
