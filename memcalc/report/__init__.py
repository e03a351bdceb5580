"""Results in, text out: one document for each answer, rendered in any of eight formats. Nothing is computed here."""

from __future__ import annotations

import csv
import io
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING

from memcalc.errors import InputError, UnknownNameError
from memcalc.files import plain_cell
from memcalc.report.tables import Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from memcalc.report.explain import Folding
    from memcalc.results.check import Check
    from memcalc.results.estimates import Estimate
    from memcalc.results.plans import Plans
    from memcalc.results.triage import Triage

__all__ = [
    "FORMATS",
    "Report",
    "format_for",
    "of_check",
    "of_estimate",
    "of_plans",
    "of_terms",
    "of_triage",
    "render",
    "screen_of",
]


def of_check(check: Check) -> Report:
    """Return the report on a job's own files."""
    from memcalc.report.check import report

    return report(check)


def of_estimate(estimate: Estimate) -> Report:
    """Return the report on an estimate."""
    from memcalc.report.estimate import report

    return report(estimate)


def of_terms(estimate: Estimate, folded: Folding | None = None) -> Report:
    """Return the report on every term of an estimate; `folded` says what a tree tells in one line."""
    from memcalc.report.explain import explanation

    return explanation(estimate, folded)


def of_plans(plans: Plans, *, written: bool = False, starts: bool = False) -> Report:
    """Return the report on ranked plans; `written`: one of them is saved or written by the same command.

    ``starts``: a script that starts the first can be written.
    """
    from memcalc.report.plan import report

    return report(plans, written=written, starts=starts)


def of_triage(triage: Triage, path: str = "") -> Report:
    """Return the report on a failure; `path` is the file as it was given, for a line to paste."""
    from memcalc.report.triage import report

    return report(triage, path)


_SCREENS = {
    "Check": "check", "Diff": "diff", "Estimate": "estimate", "Inverse": "inverse", "Ladder": "ladder", "Plans": "plan",
    "Rl": "posttraining", "Served": "serving", "Triage": "triage",
}  # fmt: skip
"""The module that reports on each kind of answer."""


def screen_of(answer: object) -> str | None:
    """Return an answer as a terminal shows it, without colours; None of a kind that has no screen."""
    module = _SCREENS.get(type(answer).__name__)
    if module is None:
        return None
    report: Report = import_module(f"memcalc.report.{module}").report(answer)
    return render(report, "rich").rstrip("\n")


_ENDINGS = {
    ".md": "markdown", ".csv": "csv", ".json": "json", ".tex": "latex", ".html": "html", ".htm": "html",
    ".svg": "svg", ".xlsx": "xlsx", ".txt": "rich", "": "rich",
}  # fmt: skip
_UNPRINTABLE = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\r\t\x85"}


def render(
    report: Report,
    form: str,
    *,
    width: int = 100,
    colour: bool = False,
    ascii_only: bool = False,
    details: bool = False,
) -> str:
    """Return `report` in the format `form`, ending in a newline; what else is said is of a terminal.

    With `details` a terminal shows all that other formats have.
    """
    if form not in FORMATS:
        raise UnknownNameError("format", form, f"must be one of {', '.join(FORMATS)}", FORMATS)
    if details:
        report = report._replace(document=report.document._replace(screen=()))
    if form == "rich":
        from memcalc.report.terminal import draw

        return draw(report.document, width, colour, ascii_only=ascii_only)
    if form == "plain":
        from memcalc.report.markup import spoken

        return spoken(report.document, ascii_only=ascii_only)
    if form == "svg":
        from memcalc.report.terminal import picture

        return picture(report.document, width)
    return FORMATS[form](report).rstrip("\n").translate(_UNPRINTABLE) + "\n"


def format_for(path: str) -> str:
    """Return the format that a file's ending stands for; a name without one gets the terminal's text.

    >>> format_for("plan.MD"), format_for("plan.txt")
    ('markdown', 'rich')
    """
    ending = PurePath(path).suffix.lower()
    if ending not in _ENDINGS:
        allowed = f"a table ends in {', '.join(filter(None, _ENDINGS))}; --format NAME writes into any file"
        raise InputError("output", path, allowed, _ENDINGS)
    return _ENDINGS[ending]


def _json(report: Report) -> str:
    import json  # costs as much as a plan's table, and is needed for this format alone

    return json.dumps(report.payload, indent=2)


def _csv(report: Report) -> str:
    stream = io.StringIO()
    table = report.document.data
    csv.writer(stream, lineterminator="\n").writerows(
        [plain_cell(cell) for cell in row] for row in [table.headings, *table.rows]
    )
    return stream.getvalue()


def _markdown(report: Report) -> str:
    from memcalc.report.markup import markdown
    from memcalc.report.palette import printable

    return printable(markdown(report.document))


def _latex(report: Report) -> str:
    from memcalc.report.markup import latex
    from memcalc.report.palette import printable

    return printable(latex(report.document))


def _html(report: Report) -> str:
    from memcalc.report.markup import fragment
    from memcalc.report.palette import printable

    return printable(fragment(report.document))


FORMATS: dict[str, Callable[[Report], str]] = {
    "rich": lambda report: render(report, "rich"),
    "plain": lambda report: render(report, "plain"),
    "svg": lambda report: render(report, "svg"),
    "markdown": _markdown,
    "csv": _csv,
    "json": _json,
    "latex": _latex,
    "html": _html,
}
