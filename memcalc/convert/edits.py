"""The smallest change of a text that gives a config other values: what was written by hand stays as it was.

An edited file is read again: it must have the old data with the changes and nothing else, or the edit is refused.
"""

from __future__ import annotations

import functools
import json
import operator
import re
import shlex
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from memcalc.convert.document import Document, KeyPath, Span, parse_document, write_flow
from memcalc.errors import CombinationError, FileError

_FLAG = re.compile(r"[+~]{0,2}[\w.-]+")
_BETWEEN = re.compile(r"(?:[ \t=\"']|\\\r?\n)*")
_PROPERTIES = re.compile(r"(?:[&!]\S*[ \t]+)+")


class Piece(NamedTuple):
    """Begin and end in the old text, and what stands there in the new one."""

    begin: int
    end: int
    text: str


def apply_pieces(text: str, pieces: Iterable[Piece]) -> str:
    """Return a text with pieces, which do not overlap, put in."""
    for piece in sorted(pieces, reverse=True):
        text = text[: piece.begin] + piece.text + text[piece.end :]
    return text


def dotted(key_path: KeyPath) -> str:
    """A place as a message has it."""
    return ".".join(map(str, key_path))


def refusal(document: Document, key_path: KeyPath, value: Any, reason: str) -> CombinationError:
    """The error for a value that has no place of its own."""
    return CombinationError(f"{document.path.name}: {dotted(key_path)}", value, reason)


def table_of(document: Document, key_path: KeyPath, value: Any) -> tuple[KeyPath, dict[Any, Any]]:
    """Return the table that a new value goes into: the deepest that is there.

    A null on the way is no table: its own place is returned, for a table to stand there.
    """
    at: KeyPath = ()
    data = document.data
    for key in key_path:
        if not isinstance(data, dict):
            break
        if key not in data or at == key_path[:-1]:
            return at, data
        at, data = (*at, key), data[key]
    if data is None:
        return at, {}
    raise refusal(document, key_path, value, "its parent key holds a value, not a table")


def in_tables(key_path: KeyPath, value: Any) -> Any:
    """A value in the tables that lead to it."""
    for key in reversed(key_path):
        value = {str(key): value}
    return value


def line_begin(text: str, at: int) -> int:
    """Where the line of a place begins."""
    return text.rfind("\n", 0, at) + 1


def line_end(text: str, at: int) -> int:
    """Where the next line begins, or the end of the text."""
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1


def json_piece(document: Document, key_path: KeyPath, value: Any) -> Piece:
    """Return the piece that sets, adds or removes one value."""
    text, spans = document.text, document.spans
    if key_path in spans:
        span = spans[key_path]
        if span.begin < 0:
            raise refusal(document, key_path, value, "its value is computed in the script")
        if value is None:
            return _without_comma(document, key_path, span.end, None)
        return Piece(span.begin, span.end, json.dumps(value))
    at, table = table_of(document, key_path, value)
    span = spans[at]
    rest = key_path[len(at) :]
    if not table:
        return Piece(span.begin, span.end, json.dumps(in_tables(rest, value)))
    last = spans[(*at, list(table)[-1])]
    begin = line_begin(text, last.key)
    alone = not text[begin : last.key].strip()
    eol = "\r\n" if text[:begin].endswith("\r\n") else "\n"
    between = eol + text[begin : last.key] if alone and begin else " "
    return Piece(last.end, last.end, f",{between}{json.dumps(str(rest[0]))}: {json.dumps(in_tables(rest[1:], value))}")


def _without_comma(document: Document, key_path: KeyPath, end: int, blanks: str | None) -> Piece:
    """Take a value away with one of the commas beside it and the blanks behind; the last one leaves an empty table."""
    text, span, around = document.text, document.spans[key_path], document.spans[key_path[:-1]]
    after = text[end:].lstrip()
    if after.startswith(","):
        return Piece(span.key, len(text) - len(after[1:].lstrip(blanks)), "")
    before = text[: span.key].rstrip()
    if before.endswith(","):
        return Piece(len(before) - 1, end, "")
    return Piece(around.begin + 1, around.end - 1, "")


def flag_piece(document: Document, key_path: KeyPath, value: Any) -> Piece:
    """Change a flag's value where it was written, or add the flag after the last one."""
    spans = document.spans
    if key_path not in spans:
        return _flag_added(document, key_path, value)
    span = spans[key_path]
    if value is None or value is False:
        return _flag_without(document, key_path, span)
    if span.begin < 0:
        raise refusal(document, key_path, value, "its value is computed in the script")
    text = _flag_text(value)
    if isinstance(value, bool) and not document.text[span.begin : span.begin + 1].isupper():
        text = text.lower()
    if span.begin == span.end:
        return Piece(span.begin, span.end, "" if value is True else f" {text}")
    return Piece(span.begin, span.end, text)


def _flag_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(_flag_text(item) for item in value)
    return shlex.quote(str(value))


def _flag_end(document: Document, span: Span) -> int | None:
    """Where a flag and its value end if they stand side by side, as written; None where they do not."""
    match = _FLAG.match(document.text, span.key) if span.key >= 0 else None
    if match is None:
        return None
    if span.begin == span.end:
        return span.end if span.end == match.end() else None
    between = _BETWEEN.match(document.text, match.end())
    if span.begin < 0 or between is None or not match.end() < between.end() <= span.begin <= between.end():
        return None
    quote = document.text[span.begin - 1]
    return span.end + (quote in "\"'" and document.text[span.end : span.end + 1] == quote)


def _flag_without(document: Document, key_path: KeyPath, span: Span) -> Piece:
    """Take a flag away; a continued line of its own goes whole."""
    text, end = document.text, _flag_end(document, span)
    if end is None:
        raise refusal(document, key_path, None, "its flag and its value are put together in the script")
    begin, after = line_begin(text, span.key), line_end(text, end)
    if not text[begin : span.key].strip() and text[end:after].strip() == "\\":
        return Piece(begin, after, "")
    return Piece(len(text[: span.key].rstrip(" \t")), end, "")


def _flag_added(document: Document, key_path: KeyPath, value: Any) -> Piece:
    written = [(span.key, end) for span in document.spans.values() if (end := _flag_end(document, span)) is not None]
    if not written:
        raise refusal(document, key_path, value, f"{document.path.name} has no flags beside which it could stand")
    key, end = max(written)
    names = " ".join(_flag_name(document, at)[2:] for at, _ in written)
    name = dotted(key_path).replace("_", "-") if names.count("-") > names.count("_") else dotted(key_path)
    if _flag_name(document, key).startswith("--"):
        return Piece(end, end, f" --{name}" + ("" if value is True else f" {_flag_text(value)}"))
    return Piece(end, end, f" {name}={_flag_text(value)}")


def _flag_name(document: Document, at: int) -> str:
    match = _FLAG.match(document.text, at)
    return match[0] if match else ""


def yaml_piece(document: Document, key_path: KeyPath, value: Any) -> Piece:
    """Return the piece that sets, adds or removes one value."""
    if key_path not in document.spans:
        return _yaml_added(document, key_path, value)
    span = document.spans[key_path]
    if span.begin < span.key:
        raise refusal(document, key_path, value, "it is an alias of another value")
    return _yaml_without(document, key_path) if value is None else _yaml_set(document, key_path, value)


def _yaml_set(document: Document, key_path: KeyPath, value: Any) -> Piece:
    """Replace a value; a block under its key becomes one on the key's line."""
    text, span = document.text, document.spans[key_path]
    begin, end = span.begin, _yaml_end(document, key_path)
    if match := _PROPERTIES.match(text, begin, max(end, begin)):
        begin = match.end()
    flow = write_flow(value)
    if "\n" in text[span.key : begin] and key_path and isinstance(key_path[-1], str):
        colon = re.compile(r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^:\n\"']+)\s*:").match(text, span.key)
        begin = colon.end() if colon else begin
        return Piece(begin, end, f" {flow}")
    return Piece(begin, end, f" {flow}" if begin == end or text[begin - 1 : begin] == ":" else flow)


def _yaml_end(document: Document, key_path: KeyPath) -> int:
    """Where a value ends: a block ends with its last value, before comments that follow."""
    text, span = document.text, document.spans[key_path]
    if text[span.begin : span.begin + 1] in ("{", "["):
        return span.end
    value = _data_at(document, key_path)
    if isinstance(value, dict | list) and value:
        inner = [(*key_path, key) for key in (value if isinstance(value, dict) else range(len(value)))]
        return max([_yaml_end(document, path) for path in inner if path in document.spans] or [span.end])
    return max(span.begin, span.begin + len(text[span.begin : span.end].rstrip()))


def _data_at(document: Document, key_path: KeyPath) -> Any:
    return functools.reduce(operator.getitem, key_path, document.data)


def _yaml_in_flow(document: Document, key_path: KeyPath) -> bool:
    span = document.spans.get(key_path)
    return span is not None and document.text[span.begin : span.begin + 1] in ("{", "[")


def _yaml_without(document: Document, key_path: KeyPath) -> Piece:
    text, span = document.text, document.spans[key_path]
    if any(_yaml_in_flow(document, key_path[:depth]) for depth in range(len(key_path))):
        return _without_comma(document, key_path, _yaml_end(document, key_path), " \t")
    around = document.spans[key_path[:-1]]
    begin, end = line_begin(text, span.key), _yaml_end(document, key_path)
    table = _data_at(document, key_path[:-1])
    if len(table) == 1 and key_path[:-1]:
        return _yaml_set(document, key_path[:-1], {} if isinstance(table, dict) else [])
    if len(table) == 1:
        return Piece(around.begin, line_end(text, end), "{}\n")
    if text[begin : span.key].strip():
        raise refusal(document, key_path, None, "it begins an item of a list")
    return Piece(begin, line_end(text, end), "")


def _yaml_added(document: Document, key_path: KeyPath, value: Any) -> Piece:
    """Put a new key behind the last one of its table."""
    text = document.text
    at, table = table_of(document, key_path, value)
    rest = key_path[len(at) :]
    keys = [key for key in table if (*at, key) in document.spans]
    if not keys:
        return _yaml_first(document, at, rest, value)
    if any(_yaml_in_flow(document, at[:depth]) for depth in range(len(at) + 1)):
        end = max(_yaml_end(document, (*at, key)) for key in keys)
        return Piece(end, end, f", {write_flow(in_tables(rest, value))[1:-1]}")
    last = document.spans[(*at, keys[-1])]
    column = " " * (last.key - line_begin(text, last.key))
    end = line_end(text, max(_yaml_end(document, (*at, keys[-1])) - 1, last.key))
    eol = "\r\n" if text[:end].endswith("\r\n") else "\n"
    lines = [f"{column}{'  ' * depth}{write_flow(str(key))}:" for depth, key in enumerate(rest)]
    lines[-1] += f" {write_flow(value)}"
    return Piece(end, end, ("" if text[:end].endswith("\n") else eol) + eol.join(lines) + eol)


def _yaml_first(document: Document, at: KeyPath, rest: KeyPath, value: Any) -> Piece:
    """Put a key into a table that is empty or null, or into an empty file."""
    flow = write_flow(in_tables(rest, value))
    if at in document.spans:
        span = document.spans[at]
        return _yaml_set(document, at, in_tables(rest, value)) if at else Piece(span.begin, span.end, flow)
    text = document.text
    lead = "" if not text or text.endswith("\n") else "\n"
    return Piece(len(text), len(text), f"{lead}{write_flow(str(rest[0]))}: {write_flow(in_tables(rest[1:], value))}\n")


def edit_document(document: Document, changes: Mapping[KeyPath, Any]) -> str:
    """Return the text of a document with other values at some places; None takes a value away.

    Raises :class:`memcalc.errors.CombinationError` where a value has no place of its own in the text.
    """
    if document.part:
        return edit_parts([(document, changes)])
    expected = document.data
    for key_path, value in changes.items():
        expected = _changed(document, expected, key_path, value)
    try:
        result = parse_document(document.path, _edited(document, changes), document.kind)
    except (FileError, KeyError, IndexError, ValueError):
        raise _not_editable(document, changes) from None
    if not _same(result.data, expected):
        raise _not_editable(document, changes)
    return result.text


def edit_parts(parts: Iterable[tuple[Document, Mapping[KeyPath, Any]]]) -> str:
    """Return a text some parts of which are documents, such as a script with the flags of its commands."""
    listed = list(parts)
    pieces = [_piece(document, key_path, value) for document, changes in listed for key_path, value in changes.items()]
    pieces = sorted(set(pieces))
    if any(first.end > second.begin for first, second in pairwise(pieces)):
        raise CombinationError("file", listed[0][0].path.name, "two of its settings are written in one place")
    return apply_pieces(listed[0][0].text, pieces)


def _edited(document: Document, changes: Mapping[KeyPath, Any]) -> str:
    """Change one value after another: each sees what the one before it left."""
    if document.kind == "toml":
        return _toml(document, changes)
    for key_path, value in changes.items():
        if value is not None or key_path in document.spans:
            text = apply_pieces(document.text, [_piece(document, key_path, value)])
            document = parse_document(document.path, text, document.kind)
    return document.text


def _piece(document: Document, key_path: KeyPath, value: Any) -> Piece:
    write = {"json": json_piece, "yaml": yaml_piece, "flags": flag_piece}.get(document.kind)
    if write is None:
        raise refusal(document, key_path, value, "it is not a config with values of its own")
    if document.part and document.kind != "flags" and (value is None or key_path not in document.spans):
        raise refusal(document, key_path, value, "the script that writes the file must say it")
    return write(document, key_path, value)


def _changed(document: Document, data: Any, key_path: KeyPath, value: Any) -> Any:
    """The data with another value at a place; tables that are absent, or null, are made."""
    if not key_path:
        return value
    key, rest = key_path[0], key_path[1:]
    if isinstance(data, list) and isinstance(key, int) and key < len(data):
        if rest or value is not None:
            return [*data[:key], _changed(document, data[key], rest, value), *data[key + 1 :]]
        return [*data[:key], *data[key + 1 :]]
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise refusal(document, key_path, value, "its parent key holds a value, not a table")
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


def _not_editable(document: Document, changes: Mapping[KeyPath, Any]) -> CombinationError:
    listed = ", ".join(dotted(key_path) for key_path in changes)
    reason = f"its form does not allow an edit of {listed}"
    return CombinationError("file", document.path.name, reason)


def _toml(document: Document, changes: Mapping[KeyPath, Any]) -> str:
    try:
        import tomlkit
        from tomlkit.exceptions import TOMLKitError
    except ModuleNotFoundError:
        reason = "editing it needs tomlkit: pip install 'memcalc[configs]'"
        raise CombinationError("file", document.path.name, reason) from None
    try:
        tree: Any = tomlkit.parse(document.text)
        if tomlkit.dumps(tree) != document.text:
            raise _not_editable(document, changes)
        for key_path, value in changes.items():
            _set_toml(tree, key_path, value, tomlkit)
        return str(tomlkit.dumps(tree))
    except (TOMLKitError, TypeError, AttributeError, RecursionError):
        raise _not_editable(document, changes) from None


def _set_toml(tree: Any, key_path: KeyPath, value: Any, tomlkit: Any) -> None:
    table = tree
    for key in key_path[:-1]:
        if not isinstance(key, int) and key not in table:
            if value is None:
                return
            table[key] = tomlkit.inline_table() if isinstance(table, tomlkit.items.InlineTable) else tomlkit.table()
        table = table[key]
    if value is not None:
        table[key_path[-1]] = value
    elif key_path[-1] in table:
        table.remove(key_path[-1])
