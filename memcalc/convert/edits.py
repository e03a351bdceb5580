"""The smallest change of a text that gives a config other values: what was written by hand stays as it was.

An edited file is read again: it must have the old data with the changes and nothing else, or the edit is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from memcalc.convert.document import Document, Place, parsed
from memcalc.convert.edits_flags import flag_piece
from memcalc.convert.edits_json import json_piece
from memcalc.convert.edits_pieces import Piece, applied, named, refused
from memcalc.convert.edits_yaml import yaml_piece
from memcalc.errors import CombinationError, FileError

__all__ = ["edited", "edited_parts"]


def edited(document: Document, changes: Mapping[Place, Any]) -> str:
    """Return the text of a document with other values at some places; None takes a value away.

    Raises :class:`memcalc.errors.CombinationError` where a value has no place of its own in the text.
    """
    if document.part:
        return edited_parts([(document, changes)])
    wanted = document.data
    for place, value in changes.items():
        wanted = _changed(document, wanted, place, value)
    try:
        found = parsed(document.path, _edited(document, changes), document.kind)
    except (FileError, KeyError, IndexError, ValueError):
        raise _whole(document, changes) from None
    if not _same(found.data, wanted):
        raise _whole(document, changes)
    return found.text


def edited_parts(parts: Iterable[tuple[Document, Mapping[Place, Any]]]) -> str:
    """Return a text some parts of which are documents, such as a script with the flags of its commands."""
    listed = list(parts)
    pieces = [_piece(document, place, value) for document, changes in listed for place, value in changes.items()]
    pieces = sorted(set(pieces))
    if any(first.end > second.begin for first, second in pairwise(pieces)):
        raise CombinationError("file", listed[0][0].path.name, "two of its settings are written in one place")
    return applied(listed[0][0].text, pieces)


def _edited(document: Document, changes: Mapping[Place, Any]) -> str:
    """Change one value after another: each sees what the one before it left."""
    if document.kind == "toml":
        return _toml(document, changes)
    for place, value in changes.items():
        if value is not None or place in document.spans:
            text = applied(document.text, [_piece(document, place, value)])
            document = parsed(document.path, text, document.kind)
    return document.text


def _piece(document: Document, place: Place, value: Any) -> Piece:
    write = {"json": json_piece, "yaml": yaml_piece, "flags": flag_piece}.get(document.kind)
    if write is None:
        raise refused(document, place, value, "it is not a config with values of its own")
    if document.part and document.kind != "flags" and (value is None or place not in document.spans):
        raise refused(document, place, value, "the script that writes the file must say it")
    return write(document, place, value)


def _changed(document: Document, data: Any, place: Place, value: Any) -> Any:
    """The data with another value at a place; tables that are absent, or null, are made."""
    if not place:
        return value
    key, rest = place[0], place[1:]
    if isinstance(data, list) and isinstance(key, int) and key < len(data):
        if rest or value is not None:
            return [*data[:key], _changed(document, data[key], rest, value), *data[key + 1 :]]
        return [*data[:key], *data[key + 1 :]]
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise refused(document, place, value, "it would stand in a table, and there is a value")
    if rest:
        if value is None and key not in data:
            return data
        return {**data, key: _changed(document, data.get(key), rest, value)}
    return {name: inner for name, inner in data.items() if name != key} if value is None else {**data, key: value}


def _same(first: Any, other: Any) -> bool:
    """Whether data are equal, kinds of numbers and truth values told apart."""
    if isinstance(first, dict) and isinstance(other, dict):
        return first.keys() == other.keys() and all(_same(value, other[key]) for key, value in first.items())
    if isinstance(first, list) and isinstance(other, list | tuple):
        return len(first) == len(other) and all(map(_same, first, other))
    return type(first) is type(other) and (first == other or repr(first) == repr(other))


def _whole(document: Document, changes: Mapping[Place, Any]) -> CombinationError:
    listed = ", ".join(named(place) for place in changes)
    return CombinationError(
        "file", document.path.name, f"it is written in a way in which {listed} cannot be edited alone"
    )


def _toml(document: Document, changes: Mapping[Place, Any]) -> str:
    try:
        import tomlkit
        from tomlkit.exceptions import TOMLKitError
    except ModuleNotFoundError:
        raise CombinationError(
            "file", document.path.name, "editing it needs tomlkit: pip install 'memcalc[configs]'"
        ) from None
    try:
        tree: Any = tomlkit.parse(document.text)
        if tomlkit.dumps(tree) != document.text:
            raise _whole(document, changes)
        for place, value in changes.items():
            _set_toml(tree, place, value, tomlkit)
        return str(tomlkit.dumps(tree))
    except (TOMLKitError, TypeError, AttributeError, RecursionError):
        raise _whole(document, changes) from None


def _set_toml(tree: Any, place: Place, value: Any, tomlkit: Any) -> None:
    table = tree
    for key in place[:-1]:
        if not isinstance(key, int) and key not in table:
            if value is None:
                return
            table[key] = tomlkit.inline_table() if isinstance(table, tomlkit.items.InlineTable) else tomlkit.table()
        table = table[key]
    if value is not None:
        table[place[-1]] = value
    elif place[-1] in table:
        table.remove(place[-1])
