"""Edits of the flags of a command, in the script that has them."""

from __future__ import annotations

import re
import shlex
from typing import Any

from memcalc.convert.document import Document, Place, Span
from memcalc.convert.edits_pieces import Piece, line_begin, line_end, named, refused

__all__ = ["flag_piece"]

_FLAG = re.compile(r"[+~]{0,2}[\w.-]+")
_BETWEEN = re.compile(r"(?:[ \t=\"']|\\\r?\n)*")


def flag_piece(document: Document, place: Place, value: Any) -> Piece:
    """Change a flag's value where it was written, or add the flag after the last one."""
    spans = document.spans
    if place not in spans:
        return _added(document, place, value)
    span = spans[place]
    if value is None or value is False:
        return _without(document, place, span)
    if span.begin < 0:
        raise refused(document, place, value, "its value is put together in the script and cannot be edited alone")
    said = _said(value)
    if isinstance(value, bool) and not document.text[span.begin : span.begin + 1].isupper():
        said = said.lower()
    if span.begin == span.end:
        return Piece(span.begin, span.end, "" if value is True else f" {said}")
    return Piece(span.begin, span.end, said)


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(_said(one) for one in value)
    return shlex.quote(str(value))


def _written(document: Document, span: Span) -> int | None:
    """Where a flag and its value end if they stand side by side, as written; None where they do not."""
    match = _FLAG.match(document.text, span.key) if span.key >= 0 else None
    if match is None:
        return None
    if span.begin == span.end:
        return span.end if span.end == match.end() else None
    between = _BETWEEN.match(document.text, match.end())
    if span.begin < 0 or between is None or not match.end() < between.end() <= span.begin <= between.end():
        return None
    quote = document.text[span.begin - 1]
    return span.end + (quote in "\"'" and document.text[span.end : span.end + 1] == quote)


def _without(document: Document, place: Place, span: Span) -> Piece:
    """Take a flag away; a continued line of its own goes whole."""
    text, end = document.text, _written(document, span)
    if end is None:
        raise refused(document, place, None, "its flag and its value are put together in the script")
    begin, after = line_begin(text, span.key), line_end(text, end)
    if not text[begin : span.key].strip() and text[end:after].strip() == "\\":
        return Piece(begin, after, "")
    return Piece(len(text[: span.key].rstrip(" \t")), end, "")


def _added(document: Document, place: Place, value: Any) -> Piece:
    written = [(span.key, end) for span in document.spans.values() if (end := _written(document, span)) is not None]
    if not written:
        raise refused(document, place, value, f"{document.path.name} has no flags beside which it could stand")
    key, end = max(written)
    names = " ".join(_name(document, at)[2:] for at, _ in written)
    name = named(place).replace("_", "-") if names.count("-") > names.count("_") else named(place)
    lead = "" if not _name(document, key).startswith("--") else "--"
    if lead:
        return Piece(end, end, f" --{name}" + ("" if value is True else f" {_said(value)}"))
    return Piece(end, end, f" {name}={_said(value)}")


def _name(document: Document, at: int) -> str:
    match = _FLAG.match(document.text, at)
    return match[0] if match else ""
