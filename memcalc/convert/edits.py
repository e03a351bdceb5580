"""The smallest change of a text that gives a config other values: what was written by hand stays as it was."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from memcalc.convert.document import Document, Place
from memcalc.errors import CombinationError

__all__ = ["edited"]


def edited(document: Document, changes: Mapping[Place, Any]) -> str:
    """Return the text of a document with other values at some places; None takes a value away.

    Raises :class:`memcalc.errors.CombinationError` where a value has no place of its own in the text.
    """
    if document.kind == "toml":
        return _toml(document, changes)
    text = document.text
    write = {"json": _json, "yaml": _yaml, "flags": _flag}[document.kind]
    pieces = [write(document, place, value) for place, value in changes.items()]
    for begin, end, new in sorted(pieces, key=lambda piece: piece[:2], reverse=True):
        text = text[:begin] + new + text[end:]
    return text


Piece = tuple[int, int, str]
"""Begin and end in the old text, and what stands there in the new one."""


def _parent(document: Document, place: Place) -> tuple[Place, dict[Any, Any]]:
    """Return the table that a new value goes into: the deepest that is there."""
    at: Place = ()
    data = document.data
    for key in place[:-1]:
        if not isinstance(data, dict) or not isinstance(data.get(key), dict):
            break
        at, data = (*at, key), data[key]
    return at, data if isinstance(data, dict) else {}


def _nested(place: Place, value: Any) -> Any:
    for key in reversed(place):
        value = {str(key): value}
    return value


def _indent(text: str, at: int) -> str:
    begin = text.rfind("\n", 0, at) + 1
    line = text[begin:at]
    return line[: len(line) - len(line.lstrip())]


# --------------------------------------------------------------------------------------------------------------- JSON


def _json(document: Document, place: Place, value: Any) -> Piece:
    text, spans = document.text, document.spans
    if place in spans:
        span = spans[place]
        if value is not None:
            return span.begin, span.end, json.dumps(value)
        return _json_without(text, span.key, span.end)
    at, table = _parent(document, place)
    span = spans[at]
    rest = place[len(at) :]
    if not table:
        return span.begin, span.end, json.dumps(_nested(rest, value))
    last = spans[(*at, list(table)[-1])]
    between = text[text.rfind("\n", 0, last.key) : last.key] if "\n" in text[span.begin : last.key] else " "
    return last.end, last.end, f",{between}{json.dumps(str(rest[0]))}: {json.dumps(_nested(rest[1:], value))}"


def _json_without(text: str, begin: int, end: int) -> Piece:
    """Take a pair away with one of the commas beside it."""
    after = end + len(text[end:]) - len(text[end:].lstrip())
    if text[after] == ",":
        following = after + 1
        return begin, following + len(text[following:]) - len(text[following:].lstrip()), ""
    before = text[:begin].rstrip()
    return (len(before) - 1, end, "") if before.endswith(",") else (begin, end, "")


# --------------------------------------------------------------------------------------------------------------- YAML


def _yaml(document: Document, place: Place, value: Any) -> Piece:
    text, spans = document.text, document.spans
    if place in spans:
        span = spans[place]
        if value is not None:
            return span.begin, max(span.end, span.begin), _yaml_value(value, span.begin == span.end)
        line = text.rfind("\n", 0, span.key) + 1
        end = text.find("\n", span.end)
        return line, len(text) if end < 0 else end + 1, ""
    at, table = _parent(document, place)
    rest = place[len(at) :]
    own = [key for key in table if (*at, key) in spans]
    if not own or text[spans[at].begin : spans[at].begin + 1] == "{":
        raise CombinationError(".".join(map(str, place)), value, f"{document.path.name} has no block table for it")
    last = spans[(*at, own[-1])]
    indent = _indent(text, last.key)
    end = _line_end(text, last.end)
    lead = "" if text[:end].endswith("\n") else "\n"
    lines = [f"{indent}{'  ' * depth}{key}:" for depth, key in enumerate(rest)]
    lines[-1] += f" {_yaml_value(value, False)}"
    return end, end, lead + "\n".join(lines) + "\n"


def _line_end(text: str, at: int) -> int:
    """Return the begin of the line after the last one of a value, whose own end may be that already."""
    at = len(text[:at].rstrip())
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1


def _yaml_value(value: Any, bare: bool) -> str:
    said = json.dumps(value) if not isinstance(value, str) or not value.replace("_", "").isalnum() else value
    said = json.dumps(value) if said in ("true", "false", "null", "yes", "no", "on", "off") and said == value else said
    return f" {said}" if bare else said


# --------------------------------------------------------------------------------------------------------------- TOML


def _toml(document: Document, changes: Mapping[Place, Any]) -> str:
    try:
        import tomlkit
    except ModuleNotFoundError:
        raise CombinationError(
            "file", document.path.name, "editing it needs tomlkit: pip install 'memcalc[configs]'"
        ) from None
    tree: Any = tomlkit.parse(document.text)
    for place, value in changes.items():
        table = tree
        for key in place[:-1]:
            if key not in table:
                table[key] = tomlkit.table()
            table = table[key]
        if value is None:
            table.remove(str(place[-1]))
        else:
            table[str(place[-1])] = value
    return str(tomlkit.dumps(tree))


# -------------------------------------------------------------------------------------------------------------- flags


def _flag(document: Document, place: Place, value: Any) -> Piece:
    """Change a flag's value where it was written, or add the flag after the last one."""
    text, spans = document.text, document.spans
    name = ".".join(map(str, place))
    if place in spans:
        span = spans[place]
        if span.begin < 0:
            raise CombinationError(name, value, "its value is put together in the script and cannot be edited alone")
        if value is None or value is False:
            begin = len(text[: span.key].rstrip(" "))
            return begin, span.end, ""
        return span.begin, span.end, "" if value is True else _flag_value(value)
    if not spans:
        raise CombinationError(name, value, f"{document.path.name} has no flags beside which it could stand")
    end = max(span.end for span in spans.values())
    said = name.replace("_", "-") if _hyphened(document) else name
    return end, end, f" --{said}" + ("" if value is True else f" {_flag_value(value)}")


def _flag_value(value: Any) -> str:
    parts = value if isinstance(value, list | tuple) else (value,)
    return " ".join(shlex.quote(str(part)) for part in parts)


def _hyphened(document: Document) -> bool:
    """Whether the flags that are there have hyphens between their words."""
    words = {".".join(map(str, place)): span.key for place, span in document.spans.items() if "_" in str(place[-1])}
    return any(at >= 0 and document.text.startswith(f"--{name.replace('_', '-')}", at) for name, at in words.items())
