"""TOML as text: tables of plain values, for the files that memcalc writes itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def array_of_tables(name: str, tables: Iterable[Mapping[str, Any]]) -> str:
    """Return ``[[name]]`` tables, one after another.

    >>> print(array_of_tables("run", [{"id": "a", "gpus": 8, "measured": {"allocated": 2**30}}]))
    [[run]]
    id = "a"
    gpus = 8
    measured = { allocated = 1073741824 }
    <BLANKLINE>
    """
    return "\n".join(f"[[{name}]]\n{pairs(table)}" for table in tables)


def document_text(data: Mapping[str, Any]) -> str:
    """Return tables within tables, each under a heading of its own.

    >>> print(document_text({"a": {"b": 1, "c": {"d": "e"}}}))
    [a]
    b = 1
    <BLANKLINE>
    [a.c]
    d = "e"
    <BLANKLINE>
    """
    return "\n".join(_sections(data, ""))


def _sections(table: Mapping[str, Any], heading: str) -> Iterator[str]:
    plain = pairs({key: value for key, value in table.items() if not isinstance(value, Mapping)})
    if heading or plain:
        yield (f"[{heading}]\n" if heading else "") + plain
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _sections(value, f"{heading}.{_key(key)}" if heading else _key(key))


def pairs(table: Mapping[str, Any]) -> str:
    """Return the lines of one table; what is None is left out."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items() if value is not None)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(value: str) -> str:
    # A JSON string is a basic TOML string, but for the one control character that JSON leaves as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    """Return a value as it stands after an equals sign."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inner} }}" if inner else "{}"
    return f"[{', '.join(map(_value, value))}]"
