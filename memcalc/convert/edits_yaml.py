"""Edits of YAML."""

from __future__ import annotations

import re
from typing import Any

from memcalc.convert.document import Document, Place
from memcalc.convert.edits_pieces import Piece, line_begin, line_end, nested, refused, table_of
from memcalc.convert.yaml_text import write_flow

__all__ = ["yaml_piece"]

_PROPERTIES = re.compile(r"(?:[&!]\S*[ \t]+)+")


def yaml_piece(document: Document, place: Place, value: Any) -> Piece:
    """Return the piece that sets, adds or removes one value."""
    if place not in document.spans:
        return _added(document, place, value)
    span = document.spans[place]
    if span.begin < span.key:
        raise refused(document, place, value, "it is an alias of another value")
    return _without(document, place) if value is None else _set(document, place, value)


def _set(document: Document, place: Place, value: Any) -> Piece:
    """Replace a value; a block under its key becomes one on the key's line."""
    text, span = document.text, document.spans[place]
    begin, end = span.begin, _end(document, place)
    if match := _PROPERTIES.match(text, begin, max(end, begin)):
        begin = match.end()
    said = write_flow(value)
    if "\n" in text[span.key : begin] and place and isinstance(place[-1], str):
        colon = re.compile(r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^:\n\"']+)\s*:").match(text, span.key)
        begin = colon.end() if colon else begin
        return Piece(begin, end, f" {said}")
    return Piece(begin, end, f" {said}" if begin == end or text[begin - 1 : begin] == ":" else said)


def _end(document: Document, place: Place) -> int:
    """Where a value ends: a block ends with its last value, before comments that follow."""
    text, span = document.text, document.spans[place]
    if text[span.begin : span.begin + 1] in ("{", "["):
        return span.end
    value = document.data
    for key in place:
        value = value[key]
    if isinstance(value, dict | list) and value:
        inner = [(*place, key) for key in (value if isinstance(value, dict) else range(len(value)))]
        return max([_end(document, one) for one in inner if one in document.spans] or [span.end])
    return max(span.begin, span.begin + len(text[span.begin : span.end].rstrip()))


def _in_flow(document: Document, place: Place) -> bool:
    span = document.spans.get(place)
    return span is not None and document.text[span.begin : span.begin + 1] in ("{", "[")


def _without(document: Document, place: Place) -> Piece:
    text, span = document.text, document.spans[place]
    if any(_in_flow(document, place[:depth]) for depth in range(len(place))):
        return _without_in_flow(document, place)
    around = document.spans[place[:-1]]
    begin, end = line_begin(text, span.key), _end(document, place)
    table = document.data
    for key in place[:-1]:
        table = table[key]
    if len(table) == 1 and place[:-1]:
        return _set(document, place[:-1], {} if isinstance(table, dict) else [])
    if len(table) == 1:
        return Piece(around.begin, line_end(text, end), "{}\n")
    if text[begin : span.key].strip():
        raise refused(document, place, None, "it begins an item of a list")
    return Piece(begin, line_end(text, end), "")


def _without_in_flow(document: Document, place: Place) -> Piece:
    """Take a value away with one of the commas beside it."""
    text, span, around = document.text, document.spans[place], document.spans[place[:-1]]
    end = _end(document, place)
    after = end + len(text[end:]) - len(text[end:].lstrip())
    if text[after : after + 1] == ",":
        follows = after + 1
        return Piece(span.key, follows + len(text[follows:]) - len(text[follows:].lstrip(" \t")), "")
    before = text[: span.key].rstrip()
    if before.endswith(","):
        return Piece(len(before) - 1, end, "")
    return Piece(around.begin + 1, around.end - 1, "")


def _added(document: Document, place: Place, value: Any) -> Piece:
    """Put a new key behind the last one of its table."""
    text = document.text
    at, table = table_of(document, place, value)
    rest = place[len(at) :]
    own = [key for key in table if (*at, key) in document.spans]
    if not own:
        return _first(document, at, rest, value)
    if any(_in_flow(document, at[:depth]) for depth in range(len(at) + 1)):
        end = max(_end(document, (*at, key)) for key in own)
        return Piece(end, end, f", {write_flow(nested(rest, value))[1:-1]}")
    last = document.spans[(*at, own[-1])]
    column = " " * (last.key - line_begin(text, last.key))
    end = line_end(text, max(_end(document, (*at, own[-1])) - 1, last.key))
    eol = "\r\n" if text[:end].endswith("\r\n") else "\n"
    lines = [f"{column}{'  ' * depth}{write_flow(str(key))}:" for depth, key in enumerate(rest)]
    lines[-1] += f" {write_flow(value)}"
    return Piece(end, end, ("" if text[:end].endswith("\n") else eol) + eol.join(lines) + eol)


def _first(document: Document, at: Place, rest: Place, value: Any) -> Piece:
    """Put a key into a table that is empty or null, or into an empty file."""
    said = write_flow(nested(rest, value))
    if at in document.spans and at:
        return _set(document, at, nested(rest, value))
    if at in document.spans:
        span = document.spans[at]
        return Piece(span.begin, span.end, said)
    text = document.text
    lead = "" if not text or text.endswith("\n") else "\n"
    return Piece(len(text), len(text), f"{lead}{write_flow(str(rest[0]))}: {write_flow(nested(rest[1:], value))}\n")
