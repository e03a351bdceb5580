"""Pieces of a text and what stands there instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from memcalc.convert.document import Document, Place
from memcalc.errors import CombinationError

__all__ = ["Piece", "applied", "line_begin", "line_end", "named", "nested", "refused", "table_of"]


class Piece(NamedTuple):
    """Begin and end in the old text, and what stands there in the new one."""

    begin: int
    end: int
    text: str


def applied(text: str, pieces: Iterable[Piece]) -> str:
    """Return a text with pieces, which do not overlap, put in."""
    for piece in sorted(pieces, reverse=True):
        text = text[: piece.begin] + piece.text + text[piece.end :]
    return text


def named(place: Place) -> str:
    """A place as a message has it."""
    return ".".join(map(str, place))


def refused(document: Document, place: Place, value: Any, said: str) -> CombinationError:
    """The error for a value that has no place of its own."""
    return CombinationError(f"{document.path.name}: {named(place)}", value, said)


def table_of(document: Document, place: Place, value: Any) -> tuple[Place, dict[Any, Any]]:
    """Return the table that a new value goes into: the deepest that is there.

    A null on the way is no table: its own place is returned, for a table to stand there.
    """
    at: Place = ()
    data = document.data
    for key in place:
        if not isinstance(data, dict):
            break
        if key not in data or at == place[:-1]:
            return at, data
        at, data = (*at, key), data[key]
    if data is None:
        return at, {}
    raise refused(document, place, value, "it would stand in a table, and there is a value")


def nested(place: Place, value: Any) -> Any:
    """A value in the tables that lead to it."""
    for key in reversed(place):
        value = {str(key): value}
    return value


def line_begin(text: str, at: int) -> int:
    """Where the line of a place begins."""
    return text.rfind("\n", 0, at) + 1


def line_end(text: str, at: int) -> int:
    """Where the next line begins, or the end of the text."""
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1
