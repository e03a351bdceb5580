"""A config as plain data, with the place in the text of each of its values: JSON, YAML, TOML, flags of a command."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from memcalc.convert.reading import read_text
from memcalc.errors import FileError

__all__ = ["DEEPEST", "Document", "Kind", "Place", "Span", "document", "kind_of", "overlaid", "parsed"]

Kind = Literal["json", "yaml", "toml", "flags", "shell"]
Place = tuple[str | int, ...]
"""Keys and indices that lead to a value."""
DEEPEST = 64
"""Tables within tables; the deepest known config has 6."""
_ENDINGS: dict[str, Kind] = {".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}


class Span(NamedTuple):
    """Where a value stands in the text [characters]: that of its key, then its own begin and end."""

    key: int
    begin: int
    end: int


@dataclass(frozen=True)
class Document:
    """Plain data of one config; `spans` tells where each value stands, for a line number and for an edit."""

    path: Path
    kind: Kind
    text: str
    data: Any
    find_spans: Callable[[], dict[Place, Span]] = field(default=dict, repr=False, compare=False)
    """Looked for on demand: a config that fits needs no line numbers."""
    unknown: Mapping[Place, str] = field(default_factory=dict)
    """Flags whose value only a run of the script could tell, and the variable that has it."""
    part: bool = False
    """Whether it is a part of a larger text, such as the flags of a script's command."""

    @cached_property
    def spans(self) -> dict[Place, Span]:
        """The place of each value in the text."""
        return self.find_spans()

    def line(self, place: Place) -> int:
        """Return the line of a value, or of the nearest table around it, counted from 1."""
        while place and place not in self.spans:
            place = place[:-1]
        return self.text.count("\n", 0, self.spans[place].key) + 1 if place else 1


def document(path: Path) -> Document:
    """Read one config file; what it is follows from its ending, and without a known one from its text.

    Raises :class:`memcalc.errors.FileError` for whatever is not text of one of the formats within the bounds.
    """
    text = read_text(path)
    return parsed(path, text, kind_of(path, text))


def kind_of(path: Path, text: str) -> Kind:
    """What a text is, by the ending of its file, and without a known one by how it begins."""
    guessed: Kind = "json" if text.lstrip()[:1] == "{" else "shell"
    return _ENDINGS.get(path.suffix.lower(), guessed)


def parsed(path: Path, text: str, kind: Kind) -> Document:
    """Return a text of a known kind as a document; a config is a table, never a list or a value alone."""
    if kind == "json":
        return Document(path, kind, text, _table(path, _json(path, text)), lambda: _json_spans(text))
    if kind == "toml":
        return Document(path, kind, text, _toml(path, text), lambda: _toml_spans(text))
    if kind == "yaml":
        from memcalc.convert.yaml_text import read_yaml

        data, spans = read_yaml(path, text)
        return Document(path, kind, text, _table(path, data), lambda: spans)
    return Document(path, "shell", text, {})


def _table(path: Path, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise FileError("file", str(path), "must be a table of settings with their values")
    return data


def overlaid(below: Document, over: Document) -> Document:
    """Return a document whose values another one replaces, key by key: flags over the file that they name."""
    data = _overlaid(below.data, over.data)
    for place in over.unknown:
        *tables, last = place
        table = data
        for key in tables:
            table = table.setdefault(key, {})
        table.pop(last, None)
    return replace(below, data=data, unknown={**below.unknown, **over.unknown})


def _overlaid(below: Any, over: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(over, dict):
        return over
    return {**below, **{key: _overlaid(below.get(key, {}), value) for key, value in over.items()}}


def _json(path: Path, text: str) -> Any:
    try:
        data = json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
    except json.JSONDecodeError as error:
        said = f"must be JSON: {error.msg}, line {error.lineno} column {error.colno}"
        raise FileError("file", str(path), said) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError("file", str(path), "must be JSON with numbers and nesting of a usual size") from None
    return _shallow(path, data)


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice, as DeepSpeed does (runtime/config_utils.py)."""
    table = dict(pairs)
    if len(table) < len(pairs):
        from collections import Counter

        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise FileError("file", str(path), f"must have each key once in a table, not {twice[:60]!r} twice")
    return table


def _toml(path: Path, text: str) -> Any:
    import tomllib

    if any(line.count(".") > DEEPEST * 4 for line in text.split("\n")):
        # the parser needs the square of the parts of a dotted key: hours for a megabyte
        raise FileError("file", str(path), f"must have at most {DEEPEST * 4} dots in a line")
    try:
        return _shallow(path, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise FileError("file", str(path), f"must be TOML: {error}") from None
    except (ValueError, RecursionError):
        raise FileError("file", str(path), "must be TOML with numbers and nesting of a usual size") from None


def _shallow(path: Path, data: Any) -> Any:
    """Refuse what no config of a framework nests; walked without recursion."""
    level = [data]
    for _ in range(DEEPEST):
        level = [value for one in level for value in _inner(one)]
        if not level:
            return data
    raise FileError("file", str(path), f"must nest at most {DEEPEST} tables")


def _inner(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in values if isinstance(one, dict | list)]


def _json_spans(text: str) -> dict[Place, Span]:
    """Find the values of a text that is known to be JSON of a usual depth."""
    found: dict[Place, Span] = {}
    decoder = json.JSONDecoder()

    def blank(at: int) -> int:
        while text[at] in " \t\n\r":
            at += 1
        return at

    def value(at: int, place: Place, key: int) -> int:
        begin = blank(at)
        end = table(begin + 1, place) if text[begin] in "{[" else decoder.raw_decode(text, begin)[1]
        found[place] = Span(begin if key < 0 else key, begin, end)
        return end

    def table(at: int, place: Place) -> int:
        named, index = text[at - 1] == "{", 0
        at = blank(at)
        while text[at] not in "}]":
            if named:
                name, after = decoder.raw_decode(text, at)
                end = value(text.index(":", after) + 1, (*place, name), at)
            else:
                end, index = value(at, (*place, index), -1), index + 1
            at = blank(end)
            at = blank(at + 1) if text[at] == "," else at
        return at + 1

    value(0, (), -1)
    return found


def _toml_spans(text: str) -> dict[Place, Span]:
    """Find the keys that stand alone on a line under a plain table heading: all that the frameworks' own files have."""
    import re

    found: dict[Place, Span] = {}
    heading: Place = ()
    at = 0
    for line in text.splitlines(keepends=True):
        if table := re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line):
            heading = tuple(part.strip(" \"'") for part in table[1].split("."))
            found[heading] = Span(at + table.start(1), at, at + len(line.rstrip()))
        elif pair := re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=\s*(\"[^\"]*\"|'[^']*'|[^#\n]*?)\s*(#.*)?$", line):
            keys = tuple(part.strip(" \"'") for part in pair[1].split("."))
            found[(*heading, *keys)] = Span(at + pair.start(1), at + pair.start(2), at + pair.end(2))
        at += len(line)
    return found
