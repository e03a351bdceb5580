"""Lines `#MEMCALC --model llama-3-8b --seq-len 8192 --set strategy.x=y` of a script: memcalc's own words."""

from __future__ import annotations

from typing import Any, get_args

from memcalc.convert.config import KNOWN_WORDS, Config, Reading
from memcalc.convert.document import Document, Place, Span
from memcalc.convert.shell_values import State, Word
from memcalc.convert.shell_words import Lexer
from memcalc.errors import InputError, UnknownNameError
from memcalc.planner.request import CHOICES, FLAGS, NUMBERS
from memcalc.planner.settings import FIELDS
from memcalc.units import parse_count

__all__ = ["own_lines", "own_words"]

_LEAD = "#MEMCALC"
_COUNTS = frozenset({*NUMBERS, "nodes", "gpus_per_node", "accumulation", "train_batch", "zero", "vpp"})
"""Words that are joined with others, and so must be numbers."""
_NOT_TYPED = frozenset({"engine", "mixed", "weights"})
"""Facts that only a config states."""
_TYPED = sorted({*KNOWN_WORDS, *FLAGS} - set(FIELDS) - _NOT_TYPED)


def own_lines(document: Document) -> Document:
    """Return the words of these lines as a document; `launch` among them is the number of a launch."""
    data: dict[str, Any] = {}
    spans: dict[Place, Span] = {}
    at = 0
    for line in document.text.splitlines(keepends=True):
        if line.startswith(_LEAD) and line[len(_LEAD) : len(_LEAD) + 1] in (" ", "\t"):
            words = _words(document, at + len(_LEAD), at + len(line.rstrip()))
            _take(document, words, data, spans)
        at += len(line)
    return Document(document.path, "flags", document.text, data, lambda: spans)


def _words(document: Document, begin: int, end: int) -> list[Word]:
    """The words of a line; a variable in it would be a mistake, since nothing expands it."""
    lexer = Lexer(document.text[:end], State(document.path.name))
    lexer.at = begin
    words: list[Word] = []
    while lexer.at < end:
        if document.text[lexer.at] in " \t\r\n;&|()<>":
            lexer.at += 1
        elif document.text[lexer.at] == "#":
            break
        else:
            words += lexer.words()
    return words


def _take(document: Document, words: list[Word], data: dict[str, Any], spans: dict[Place, Span]) -> None:
    at = 0
    while at < len(words):
        flag, equals, rest = words[at].text.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        value: str | None = rest if equals else None
        bare = name.removeprefix("no_") in FLAGS
        if value is None and not bare and at + 1 < len(words) and not words[at + 1].text.startswith("--"):
            at += 1
            value = words[at].text
        if not flag.startswith("--") or (name not in {*_TYPED, "set", "launch"} and not bare):
            names = [f"--{one.replace('_', '-')}" for one in (*_TYPED, "set")]
            raise UnknownNameError(
                f"{document.path.name}: {_LEAD}", flag, "must be an option of memcalc estimate", names
            )
        if words[at].unknown:
            raise InputError(
                f"{document.path.name}: {_LEAD} {flag}", words[at].unknown, "must be a value: nothing expands it"
            )
        key, said = _pair(document, name, flag, value)
        data[key] = said
        span = words[at].span or (0, 0)
        spans[(key,)] = Span(span[0], *span)
        at += 1


def _pair(document: Document, name: str, flag: str, value: str | None) -> tuple[str, Any]:
    """The word that an option is, and its value."""
    where = f"{document.path.name}: {_LEAD}"
    if name.removeprefix("no_") in FLAGS:
        return name.removeprefix("no_"), not name.startswith("no_")
    if value is None:
        raise InputError(where, flag, "must have a value")
    if name == "set":
        key, equals, value = value.partition("=")
        if not equals:
            raise InputError(f"{where} --set", key, "must be NAME=VALUE, as in strategy.reduce_dtype=bf16")
        if key not in FIELDS:
            raise UnknownNameError(f"{where} --set", key, "must be the dotted name of a field", FIELDS)
        return key.replace(".", "/"), value
    if name in _COUNTS:
        return name, parse_count(value, f"{where} {flag}")
    if name in CHOICES and value not in get_args(CHOICES[name]):
        allowed = get_args(CHOICES[name])
        raise InputError(f"{where} {flag}", value, f"must be one of {', '.join(allowed)}", allowed)
    return name, value


def own_words(document: Document) -> Config:
    """Return what these lines say."""
    reading = Reading(document, "launch", "memcalc")
    for key in document.data:
        if key.replace("/", ".") not in KNOWN_WORDS:
            raise UnknownNameError(
                f"{document.path.name}: {_LEAD}", key, "must be an option of memcalc estimate", _TYPED
            )
        reading.say(key.replace("/", "."), reading.raw(key), key)
    return reading.finish()
