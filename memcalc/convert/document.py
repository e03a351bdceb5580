"""A config as plain data, with the place in the text of each of its values: JSON, YAML, TOML, flags of a command.

The text is read complete and within bounds, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from memcalc.errors import FileError
from memcalc.files import regular

KeyPath = tuple[str | int, ...]
"""Keys and indices that lead to a value."""
DEEPEST = 64
"""Tables within tables; the deepest known config has 6."""
LARGEST_FILE = 1 << 20
"""Bytes; the configs of the frameworks themselves have a hundredth of it."""


class Span(NamedTuple):
    """Where a value stands in the text [characters]: that of its key, then its own begin and end."""

    key: int
    begin: int
    end: int


def read_text(path: Path) -> str:
    """Return the text of a regular UTF-8 file of at most 1 MiB, or raise FileError saying why it cannot be had."""
    with regular(path) as stream:
        content = stream.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise FileError("file", str(path), "must be at most 1 MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileError("file", str(path), "must be UTF-8 text") from None
    if "\0" in text:
        raise FileError("file", str(path), "must be text, without NUL characters")
    return text


def inside(path: Path, folder: Path) -> bool:
    """Return whether `path`, links followed, lies in `folder` or below it."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links; a name that is no name
        return False


Kind = Literal["json", "yaml", "toml", "flags", "shell"]
_ENDINGS: dict[str, Kind] = {
    ".json": "json", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "shell", ".slurm": "shell",
    ".sbatch": "shell",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """Plain data of one config; `spans` tells where each value stands, for a line number and for an edit."""

    path: Path
    kind: Kind
    text: str
    data: Any
    find_spans: Callable[[], dict[KeyPath, Span]] = field(default=dict, repr=False, compare=False)
    """Looked for on demand: a config that fits needs no line numbers."""
    unknown: Mapping[KeyPath, str] = field(default_factory=dict)
    """Flags whose value only a run of the script could tell, and the variable that has it."""
    part: bool = False
    """Whether it is a part of a larger text, such as the flags of a script's command."""
    twice: Mapping[KeyPath, int] = field(default_factory=dict)
    """Keys of a YAML text that stand more than once, with the line of the last, which counts."""

    @cached_property
    def spans(self) -> dict[KeyPath, Span]:
        """The place of each value in the text."""
        return self.find_spans()

    def line(self, key_path: KeyPath) -> int:
        """Return the line of a value, or of the nearest table around it, counted from 1."""
        while key_path and key_path not in self.spans:
            key_path = key_path[:-1]
        return self.text.count("\n", 0, self.spans[key_path].key) + 1 if key_path else 1


def read_document(path: Path) -> Document:
    """Read one config file; what it is follows from its ending, and without a known one from its text.

    Raises :class:`memcalc.errors.FileError` for whatever is not text of one of the formats within the bounds.
    """
    text = read_text(path)
    return parse_document(path, text, kind_of(path, text))


def kind_of(path: Path, text: str) -> Kind:
    """What a text is, by the ending of its file, and without a known one by how it begins."""
    guessed: Kind = "json" if text.lstrip()[:1] == "{" else "shell"
    return _ENDINGS.get(path.suffix.lower(), guessed)


def parse_document(path: Path, text: str, kind: Kind) -> Document:
    """Return a text of a known kind as a document; a config is a table, never a list or a value alone."""
    if kind == "json":
        return Document(path, kind, text, _table(path, _json(path, text)), lambda: _json_spans(text))
    if kind == "toml":
        return Document(path, kind, text, _toml(path, text), lambda: _toml_spans(text))
    if kind == "yaml":
        data, spans, twice = read_yaml(path, text)
        return Document(path, kind, text, _table(path, data), lambda: spans, twice=twice)
    return Document(path, "shell", text, {})


def _table(path: Path, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise FileError("file", str(path), "must be a table of settings with their values")
    return data


def overlay(below: Document, over: Document) -> Document:
    """Return a document whose values another one replaces, key by key: flags over the file that they name."""
    data = _overlaid(below.data, over.data)
    for key_path in over.unknown:
        *tables, last = key_path
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
        message = f"must be JSON: {error.msg}, line {error.lineno} column {error.colno}"
        raise FileError("file", str(path), message) from None
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
        raise FileError("file", str(path), f"has the key {twice[:60]!r} twice")
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
        level = [value for table in level for value in _inner(table)]
        if not level:
            return data
    raise FileError("file", str(path), f"must nest at most {DEEPEST} tables")


def _inner(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [inner for inner in values if isinstance(inner, dict | list)]


def _json_spans(text: str) -> dict[KeyPath, Span]:
    """Find the values of a text that is known to be JSON of a usual depth."""
    spans: dict[KeyPath, Span] = {}
    decoder = json.JSONDecoder()

    def blank(at: int) -> int:
        while text[at] in " \t\n\r":
            at += 1
        return at

    def value(at: int, key_path: KeyPath, key: int) -> int:
        begin = blank(at)
        end = table(begin + 1, key_path) if text[begin] in "{[" else decoder.raw_decode(text, begin)[1]
        spans[key_path] = Span(begin if key < 0 else key, begin, end)
        return end

    def table(at: int, key_path: KeyPath) -> int:
        named, index = text[at - 1] == "{", 0
        at = blank(at)
        while text[at] not in "}]":
            if named:
                name, after = decoder.raw_decode(text, at)
                end = value(text.index(":", after) + 1, (*key_path, name), at)
            else:
                end, index = value(at, (*key_path, index), -1), index + 1
            at = blank(end)
            at = blank(at + 1) if text[at] == "," else at
        return at + 1

    value(0, (), -1)
    return spans


def _toml_spans(text: str) -> dict[KeyPath, Span]:
    """Find the keys that stand alone on a line under a plain table heading: all that the frameworks' own files have."""
    import re

    spans: dict[KeyPath, Span] = {}
    heading: KeyPath = ()
    at = 0
    for line in text.splitlines(keepends=True):
        if table := re.match(r"\s*\[([^\[\]]+)\]\s*(#.*)?$", line):
            heading = tuple(part.strip(" \"'") for part in table[1].split("."))
            spans[heading] = Span(at + table.start(1), at, at + len(line.rstrip()))
        elif pair := re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=\s*(\"[^\"]*\"|'[^']*'|[^#\n]*?)\s*(#.*)?$", line):
            keys = tuple(part.strip(" \"'") for part in pair[1].split("."))
            spans[(*heading, *keys)] = Span(at + pair.start(1), at + pair.start(2), at + pair.end(2))
        at += len(line)
    return spans


MOST_VALUES = 50_000
"""In one file, aliases counted as often as they are used; the largest known config has 400."""
_PLAIN = "tag:yaml.org,2002:"
_TABLES = frozenset({f"{_PLAIN}map", f"{_PLAIN}seq"})


def read_yaml(path: Path, text: str) -> tuple[Any, dict[KeyPath, Span], dict[KeyPath, int]]:
    """Return the plain data of a YAML text, where each value stands, and the keys that stand more than once.

    Of those the last counts, as for PyYAML. Raises :class:`memcalc.errors.FileError` for Python tags and the like, more
    than one document, keys that are no texts, nesting beyond 64, and aliases that stand for more than 50,000 values in
    all.
    """
    yaml = _library(path)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(path, yaml, loader, text)
        node = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1} column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not well formed"
        raise FileError("file", str(path), f"must be YAML: {problem}{where}") from None
    if node is None:
        return {}, {}, {}
    walk = _Walk(path, yaml, loader)
    return walk.value(node, ()), walk.spans, walk.twice


def _library(path: Path = Path("*.yaml")) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise FileError("file", str(path), "YAML needs PyYAML: pip install 'memcalc[configs]'") from None
    return yaml


def _check_depth(path: Path, yaml: Any, loader: Any, text: str) -> None:
    """Refuse deep nesting from the events, which come one by one: composing is recursive."""
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise FileError("file", str(path), f"must nest at most {DEEPEST} tables")


class _Walk:
    """Nodes to plain data."""

    def __init__(self, path: Path, yaml: Any, loader: Any) -> None:
        self.path, self.yaml = path, yaml
        self.construct = loader("").construct_object
        self.spans: dict[KeyPath, Span] = {}
        self.twice: dict[KeyPath, int] = {}
        self.left = MOST_VALUES

    def value(self, node: Any, key_path: KeyPath, key: int | None = None) -> Any:
        """Return one node as plain data."""
        self._count(node, key_path)
        begin, end = node.start_mark.index, node.end_mark.index
        self.spans.setdefault(key_path, Span(begin if key is None else key, begin, end))
        if not isinstance(node, self.yaml.ScalarNode) and node.tag not in _TABLES:
            raise self._wrong(node, f"must have plain values, without the tag {node.tag[:60]}")
        if isinstance(node, self.yaml.MappingNode):
            return self._table(node, key_path)
        if isinstance(node, self.yaml.SequenceNode):
            return [self.value(item, (*key_path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _count(self, node: Any, key_path: KeyPath) -> None:
        """Refuse what stands for too many values or too deep; a table that is brought in counts, be it empty."""
        self.left -= 1
        if self.left < 0:
            raise self._wrong(node, f"must be at most {MOST_VALUES:,} values")
        if len(key_path) > DEEPEST:
            raise self._wrong(node, f"must nest at most {DEEPEST} tables")

    def _table(self, node: Any, key_path: KeyPath) -> dict[str, Any]:
        pairs: dict[str, tuple[Any, Any]] = {}
        merged: dict[str, Any] = {}
        for key, item in node.value:
            if key.tag == f"{_PLAIN}merge":
                merged |= self._merged(item, key_path)
                continue
            name = self._key(key)
            if name in pairs:
                self._count(key, key_path)
                self.twice[*key_path, name] = key.start_mark.line + 1
            pairs[name] = (key, item)
        table = {name: self.value(item, (*key_path, name), key.start_mark.index) for name, (key, item) in pairs.items()}
        return {**merged, **table}

    def _merged(self, item: Any, key_path: KeyPath) -> dict[str, Any]:
        """Return what `<<:` brings in; of several tables the first has its way."""
        tables = item.value if isinstance(item, self.yaml.SequenceNode) else [item]
        merged: dict[str, Any] = {}
        for table in tables:
            if not isinstance(table, self.yaml.MappingNode):
                raise self._wrong(table, "<<: must bring in a table")
            brought = (*key_path, "<<")
            self._count(table, brought)
            merged = {**self._table(table, brought), **merged}
        return merged

    def _key(self, node: Any) -> str:
        value = self._scalar(node) if isinstance(node, self.yaml.ScalarNode) else None
        if value is None or isinstance(value, float):
            raise self._wrong(node, "must have texts as keys")
        return str(value)

    def _scalar(self, node: Any) -> Any:
        if not node.tag.startswith(_PLAIN) or node.tag.removeprefix(_PLAIN) == "binary":
            raise self._wrong(node, f"must have plain values, without the tag {node.tag[:60]}")
        try:
            value = self.construct(node)
        except (ValueError, OverflowError, self.yaml.YAMLError):
            raise self._wrong(node, "must have values of a usual size") from None
        return value if value is None or isinstance(value, bool | int | float | str) else str(value)

    def _wrong(self, node: Any, reason: str) -> FileError:
        return FileError("file", str(self.path), f"{reason} (line {node.start_mark.line + 1})")


def write_yaml(data: Any) -> str:
    """Return plain data as YAML, in its own order."""
    text: str = _library().safe_dump(data, sort_keys=False, default_flow_style=None, width=120)
    return text


def write_flow(value: Any) -> str:
    """Return a value as YAML on one line, as it may stand in a list too."""
    style = {"default_flow_style": True, "width": 1 << 20, "allow_unicode": True, "sort_keys": False}
    text: str = _library().safe_dump([value], **style)
    return text.strip()[1:-1]
