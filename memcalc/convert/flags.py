"""The flags of a command as a document: `--name value`, `--name=value`, `--name`, in any order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from memcalc.convert.document import Document, Place, Span
from memcalc.convert.shell import Word

__all__ = ["flag_document", "place_of"]


def place_of(flag: str) -> Place:
    """The place of a flag: a hyphen is an underscore, a dot leads into a table.

    >>> place_of("--training.seq-len")
    ('training', 'seq_len')
    """
    return tuple(flag.lstrip("-+~").replace("-", "_").split("."))


def flag_document(path: Path, text: str, words: Iterable[Word], *, pairs: bool = False) -> Document:
    """Return the flags among some words of a script; words before the first flag belong to nobody.

    A flag without a value is True, one with several has a list, of one that stands twice the last holds. With `pairs`,
    `key=value` is a flag too. A flag that is there only if a run decides so is unknown.
    """
    data: dict[str, Any] = {}
    spans: dict[Place, Span] = {}
    unknown: dict[Place, str] = {}
    for flag, values in _grouped(words, pairs):
        place = place_of(flag.text)
        doubts = [word.unknown for word in (flag, *values) if word.unknown]
        if doubts:
            unknown[place] = doubts[0]
        else:
            unknown.pop(place, None)
            _put(data, place, [value.text for value in values])
        spans[place] = _span(flag, values)
    return Document(path, "flags", text, data, lambda: spans, unknown, part=True)


def _grouped(words: Iterable[Word], pairs: bool) -> list[tuple[Word, list[Word]]]:
    groups: list[tuple[Word, list[Word]]] = []
    for word in words:
        name, equals, _ = word.text.partition("=")
        if re.match(r"--\w", name) or (pairs and equals and re.fullmatch(r"[+~]{0,2}[A-Za-z_][\w.]*", name)):
            at = len(name) + 1
            value = [Word(word.text[at:], word.places[at:], word.unknown)] if equals else []
            groups.append((Word(name, word.places[: len(name)], "" if equals else word.unknown), value))
        elif groups:
            groups[-1][1].append(word)
    return groups


def _put(data: dict[str, Any], place: Place, values: list[str]) -> None:
    table = data
    for key in place[:-1]:
        inner = table.setdefault(str(key), {})
        table = inner if isinstance(inner, dict) else {}
    table[str(place[-1])] = True if not values else values[0] if len(values) == 1 else values


def _span(flag: Word, values: list[Word]) -> Span:
    """Where flag and value stand; begin is -1 where the value cannot be edited in one piece."""
    key = flag.places[0] if flag.places else -1
    pieces = [value.span for value in values]
    if not values:
        end = flag.places[-1] + 1 if flag.places else -1
        return Span(key, end, end)
    if any(piece is None or piece[0] < 0 for piece in pieces):
        return Span(key, -1, -1)
    return Span(key, pieces[0][0], pieces[-1][1])  # type: ignore[index]
