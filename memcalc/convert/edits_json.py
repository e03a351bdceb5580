"""Edits of JSON."""

from __future__ import annotations

import json
from typing import Any

from memcalc.convert.document import Document, Place
from memcalc.convert.edits_pieces import Piece, line_begin, nested, refused, table_of

__all__ = ["json_piece"]


def json_piece(document: Document, place: Place, value: Any) -> Piece:
    """Return the piece that sets, adds or removes one value."""
    text, spans = document.text, document.spans
    if place in spans:
        span = spans[place]
        if span.begin < 0:
            raise refused(document, place, value, "its value is put together and cannot be edited alone")
        return Piece(span.begin, span.end, json.dumps(value)) if value is not None else _without(document, place)
    at, table = table_of(document, place, value)
    span = spans[at]
    rest = place[len(at) :]
    if not table:
        return Piece(span.begin, span.end, json.dumps(nested(rest, value)))
    last = spans[(*at, list(table)[-1])]
    begin = line_begin(text, last.key)
    alone = not text[begin : last.key].strip()
    eol = "\r\n" if text[:begin].endswith("\r\n") else "\n"
    between = eol + text[begin : last.key] if alone and begin else " "
    return Piece(last.end, last.end, f",{between}{json.dumps(str(rest[0]))}: {json.dumps(nested(rest[1:], value))}")


def _without(document: Document, place: Place) -> Piece:
    """Take a value away with one of the commas beside it; the last one leaves an empty table."""
    text, span, around = document.text, document.spans[place], document.spans[place[:-1]]
    end = span.end + len(text[span.end :]) - len(text[span.end :].lstrip())
    if text[end] == ",":
        after = end + 1
        return Piece(span.key, after + len(text[after:]) - len(text[after:].lstrip()), "")
    before = text[: span.key].rstrip()
    if before.endswith(","):
        return Piece(len(before) - 1, span.end, "")
    return Piece(around.begin + 1, around.end - 1, "")
