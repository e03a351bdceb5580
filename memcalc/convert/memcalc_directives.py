"""Lines `#MEMCALC --model llama-3-8b --seq-len 8192 --set strategy.x=y` of a script: memcalc's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memcalc.convert.config import OPTION_NAMES, Config, ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.shell_values import State, Token
from memcalc.convert.shell_words import Lexer
from memcalc.convert.text import KeyPath, Span, inside
from memcalc.errors import InputError, UnknownNameError
from memcalc.specs.options import CHOICES, FIELDS, FLAGS, NUMBERS
from memcalc.units import parse_count

_LEAD = "#MEMCALC"
_COUNTS = frozenset({*NUMBERS, "nodes", "gpus_per_node", "accumulation", "train_batch", "zero", "vpp"})
"""Words that are joined with others, and so must be numbers."""
_NOT_TYPED = frozenset({"engine", "mixed", "weights"})
"""Facts that only a config states."""
_TYPED = sorted({*OPTION_NAMES, *FLAGS} - set(FIELDS) - _NOT_TYPED)


def directives(document: Document) -> Document:
    """Return the words of these lines as a document; `launch` among them is the number of a launch."""
    data: dict[str, Any] = {}
    spans: dict[KeyPath, Span] = {}
    at = 0
    for line in document.text.splitlines(keepends=True):
        if line.startswith(_LEAD) and line[len(_LEAD) : len(_LEAD) + 1] in (" ", "\t"):
            tokens = _tokens(document, at + len(_LEAD), at + len(line.rstrip()))
            _take(document, tokens, data, spans)
        at += len(line)
    return Document(document.path, "flags", document.text, data, lambda: spans)


def _tokens(document: Document, begin: int, end: int) -> list[Token]:
    """The words of a line; a variable in it would be a mistake, since nothing expands it."""
    lexer = Lexer(document.text[:end], State(document.path.name))
    lexer.at = begin
    tokens: list[Token] = []
    while lexer.at < end:
        if document.text[lexer.at] in " \t\r\n;&|()<>":
            lexer.at += 1
        elif document.text[lexer.at] == "#":
            break
        else:
            tokens += lexer.tokens()
    return tokens


def _take(document: Document, tokens: list[Token], data: dict[str, Any], spans: dict[KeyPath, Span]) -> None:
    at, where = 0, f"{document.path.name}: {_LEAD}"
    while at < len(tokens):
        flag, equals, rest = tokens[at].text.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        value: str | None = rest if equals else None
        bare = name.removeprefix("no_") in FLAGS
        if value is None and not bare and at + 1 < len(tokens) and not tokens[at + 1].text.startswith("--"):
            at += 1
            value = tokens[at].text
        if not flag.startswith("--") or (name not in {*_TYPED, "set", "launch"} and not bare):
            names = [f"--{name.replace('_', '-')}" for name in (*_TYPED, "set")]
            raise UnknownNameError(where, flag, "must be an option of memcalc estimate", names)
        if tokens[at].unknown:
            raise InputError(f"{where} {flag}", tokens[at].unknown, "must be a value: nothing expands it")
        key, setting = _pair(document.path.parent, where, name, flag, value)
        data[key] = setting
        span = tokens[at].span or (0, 0)
        spans[(key,)] = Span(span[0], *span)
        at += 1


def _pair(folder: Path, where: str, name: str, flag: str, value: str | None) -> tuple[str, Any]:
    """The word that an option is, and its value."""
    if name.removeprefix("no_") in FLAGS:
        return name.removeprefix("no_"), not name.startswith("no_")
    if value is None:
        raise InputError(where, flag, "must have a value")
    if name == "calibration" and not any(inside(Path(value), root) for root in (folder, Path())):
        raise InputError(f"{where} {flag}", value, "must lie in the script's folder, or where memcalc runs")
    if name == "set":
        key, equals, value = value.partition("=")
        if not equals:
            raise InputError(f"{where} --set", key, "must be NAME=VALUE, as in strategy.reduce_dtype=bf16")
        if key not in FIELDS:
            raise UnknownNameError(f"{where} --set", key, "must be the dotted name of a field", FIELDS)
        return key.replace(".", "/"), value
    if name in _COUNTS:
        return name, parse_count(value, f"{where} {flag}")
    if name in CHOICES and value not in CHOICES[name]:
        allowed = CHOICES[name]
        raise InputError(f"{where} {flag}", value, f"must be one of {', '.join(allowed)}", allowed)
    return name, value


def read_directives(document: Document) -> Config:
    """Return what these lines say."""
    reader = ConfigReader(document, "launch", "memcalc")
    for key in document.data:
        if key.replace("/", ".") not in OPTION_NAMES:
            where = f"{document.path.name}: {_LEAD}"
            raise UnknownNameError(where, key, "must be an option of memcalc estimate", _TYPED)
        reader.set(key.replace("/", "."), reader.raw(key), key)
    return reader.finish()
