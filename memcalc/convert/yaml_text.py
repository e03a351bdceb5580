"""YAML within bounds: no tags but the plain ones, no alias that makes much of little, and each value's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memcalc.convert.document import DEEPEST, Place, Span
from memcalc.errors import FileError, InputError

__all__ = ["read_yaml", "write_flow", "write_yaml"]

MOST_VALUES = 50_000
"""In one file, aliases counted as often as they are used; the largest known config has 400."""
_PLAIN = "tag:yaml.org,2002:"
_TABLES = frozenset({f"{_PLAIN}map", f"{_PLAIN}seq"})


def read_yaml(path: Path, text: str) -> tuple[Any, dict[Place, Span]]:
    """Return the plain data of a YAML text, and where each value stands.

    Raises :class:`memcalc.errors.FileError` for Python tags and the like, more than one document, keys that stand
    twice or are no texts, nesting beyond 64, and aliases that stand for more than 50,000 values in all.
    """
    yaml = _library()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_depth(path, yaml, loader, text)
        node = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1} column {mark.column + 1}" if mark else ""
        said = getattr(error, "problem", None) or "not well formed"
        raise FileError("file", str(path), f"must be YAML: {said}{where}") from None
    if node is None:
        return {}, {}
    walk = _Walk(path, yaml, loader)
    return walk.value(node, ()), walk.spans


def _library() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise InputError("file", "YAML", "reading it needs PyYAML: pip install 'memcalc[configs]'") from None
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
        self.spans: dict[Place, Span] = {}
        self.left = MOST_VALUES

    def value(self, node: Any, place: Place, key: int | None = None) -> Any:
        """Return one node as plain data."""
        self.left -= 1
        if self.left < 0:
            raise self._wrong(node, f"must stand for at most {MOST_VALUES:,} values")
        if len(place) > DEEPEST:
            raise self._wrong(node, f"must nest at most {DEEPEST} tables")
        begin, end = node.start_mark.index, node.end_mark.index
        self.spans.setdefault(place, Span(begin if key is None else key, begin, end))
        if not isinstance(node, self.yaml.ScalarNode) and node.tag not in _TABLES:
            raise self._wrong(node, f"must have plain values, without the tag {node.tag[:60]}")
        if isinstance(node, self.yaml.MappingNode):
            return self._table(node, place)
        if isinstance(node, self.yaml.SequenceNode):
            return [self.value(item, (*place, index)) for index, item in enumerate(node.value)]
        return self._scalar(node)

    def _table(self, node: Any, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, item in node.value:
            if key.tag == f"{_PLAIN}merge":
                merged |= self._merged(item, place)
                continue
            name = self._key(key)
            if name in found:
                raise self._wrong(key, f"must have each key once in a table, not {name[:60]!r} twice")
            found[name] = self.value(item, (*place, name), key.start_mark.index)
        return {**merged, **found}

    def _merged(self, item: Any, place: Place) -> dict[str, Any]:
        """Return what `<<:` brings in; of several tables the first has its way."""
        tables = item.value if isinstance(item, self.yaml.SequenceNode) else [item]
        found: dict[str, Any] = {}
        for table in tables:
            if not isinstance(table, self.yaml.MappingNode):
                raise self._wrong(table, "<<: must bring in a table")
            found = {**self._table(table, (*place, "<<")), **found}
        return found

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

    def _wrong(self, node: Any, said: str) -> FileError:
        return FileError("file", str(self.path), f"{said} (line {node.start_mark.line + 1})")


def write_yaml(data: Any) -> str:
    """Return plain data as YAML, in its own order."""
    text: str = _library().safe_dump(data, sort_keys=False, default_flow_style=None, width=120)
    return text


def write_flow(value: Any) -> str:
    """Return a value as YAML on one line, as it may stand in a list too."""
    text: str = _library().safe_dump(
        [value], default_flow_style=True, width=1 << 20, allow_unicode=True, sort_keys=False
    )
    return text.strip()[1:-1]
