"""A config that a script writes itself, by a here-document, as a document whose values stand in the script."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from memcalc.convert.document import Document, Place, Span, kind_of, parsed
from memcalc.convert.shell import Word, Written
from memcalc.convert.shell_values import MARK

__all__ = ["written_document"]

_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|' + MARK)


def written_document(path: Path, text: str, written: Written) -> Document:
    """Return what a script writes to a file; `path` and `text` are the script's own.

    A value that only a run can tell is unknown, and an edit of a value goes where it stands in the script.
    """
    kind = kind_of(Path(written.name), written.text.text)
    body = _quoted(written.text) if kind in ("json", "toml") else written.text
    inner = parsed(Path(f"{path.name}: {Path(written.name).name}"), body.text, kind)
    unknown: dict[Place, str] = {}
    data = _known(inner.data, (), unknown, written.text.unknown)
    return Document(path, kind, text, data, lambda: _moved(inner.spans, body.places), unknown, part=True)


def _quoted(word: Word) -> Word:
    """Put quotes around the marks of unknown parts that have none: JSON and TOML need them."""
    if MARK not in word.text:
        return word
    text, places, at = list[str](), list[int](), 0
    for match in _QUOTED.finditer(word.text):
        if match[0] == MARK:
            text += [word.text[at : match.start()], f'"{MARK}"']
            places += [*word.places[at : match.start()], -1, -1, -1]
            at = match.end()
    return replace(word, text="".join([*text, word.text[at:]]), places=(*places, *word.places[at:]))


def _known(data: Any, place: Place, unknown: dict[Place, str], name: str) -> Any:
    """The data without what is not known, whose places are noted."""
    if isinstance(data, dict):
        inner = {key: _known(value, (*place, key), unknown, name) for key, value in data.items()}
        return {key: value for key, value in inner.items() if (*place, key) not in unknown}
    if isinstance(data, str) and MARK in data:
        unknown[place] = name
    return data


def _moved(spans: dict[Place, Span], places: tuple[int, ...]) -> dict[Place, Span]:
    """Spans in the script of values in what it writes; begin is -1 where a value is not written in one piece."""
    found: dict[Place, Span] = {}
    for place, span in spans.items():
        inner = places[span.begin : span.end]
        whole = bool(inner) and inner[0] >= 0 and inner == tuple(range(inner[0], inner[0] + len(inner)))
        key = places[span.key] if span.key < len(places) else -1
        found[place] = Span(max(key, 0), *((inner[0], inner[-1] + 1) if whole else (-1, -1)))
    return found
