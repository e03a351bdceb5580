"""A document in each format. The terminal's is in :mod:`memcalc.report.terminal`."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from memcalc.errors import UnknownNameError
from memcalc.report.tables import Document

__all__ = ["FORMATS", "Report", "format_for", "render"]

_ENDINGS = {
    ".md": "markdown", ".csv": "csv", ".json": "json", ".tex": "latex", ".html": "html", ".htm": "html",
    ".svg": "svg",
}  # fmt: skip
_UNPRINTABLE = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\r\t\x85"}


@dataclass(frozen=True)
class Report:
    """An answer as a document, and as the published JSON."""

    document: Document
    payload: dict[str, Any]


def render(report: Report, form: str, *, width: int = 100, colour: bool = False, ascii_only: bool = False) -> str:
    """Return `report` in the format `form`, ending in a newline; what else is said is of a terminal."""
    if form not in FORMATS:
        raise UnknownNameError("format", form, f"must be one of {', '.join(FORMATS)}", FORMATS)
    if form == "rich":
        from memcalc.report.terminal import draw

        return draw(report.document, width, colour, ascii_only=ascii_only)
    if form == "plain":
        from memcalc.report.plain import spoken

        return spoken(report.document, ascii_only=ascii_only)
    if form == "svg":
        from memcalc.report.picture import picture

        return picture(report.document, width)
    return FORMATS[form](report).rstrip("\n").translate(_UNPRINTABLE) + "\n"


def format_for(path: str) -> str:
    """Return the format that a file's ending stands for.

    >>> format_for("plan.MD"), format_for("plan.txt")
    ('markdown', 'rich')
    """
    return _ENDINGS.get(PurePath(path).suffix.lower(), "rich")


# --------------------------------------------------------------------------------------------------------- JSON and CSV


def _json(report: Report) -> str:
    import json  # costs as much as a plan's table, and is needed for this format alone

    return json.dumps(report.payload, indent=2)


def _csv(report: Report) -> str:
    stream = io.StringIO()
    table = report.document.data
    csv.writer(stream, lineterminator="\n").writerows([table.headings, *table.rows])
    return stream.getvalue()


# ---------------------------------------------------------------------------------- formats with a module of their own


def _markdown(report: Report) -> str:
    from memcalc.report.text import markdown

    return markdown(report.document)


def _latex(report: Report) -> str:
    from memcalc.report.text import latex

    return latex(report.document)


def _html(report: Report) -> str:
    from memcalc.report.fragment import fragment

    return fragment(report.document)


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
