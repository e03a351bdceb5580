"""OmegaConf's interpolation, within bounds: ``${a.b}`` is what stands there, and nothing else is run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from memcalc.convert.document import Document, Place
from memcalc.errors import FileError

__all__ = ["interpolated"]

_NODE = re.compile(r"\$\{([^${}]*)\}")
_PATH = re.compile(r"\.*[A-Za-z_][\w\-]*(?:(?:\.[\w\-]+)|(?:\[\w+\]))*")
DEEPEST = 16
"""Interpolations that lead to one another."""
LONGEST = 1 << 16
"""Characters that a text may become."""


def interpolated(document: Document) -> Document:
    """Return a document with what its interpolations lead to.

    A resolver (``${oc.env:NAME}``), or a key that is not there, is what only a run tells: the value is unknown.
    """
    walk = _Walk(document)
    data = walk.value(document.data, ())
    return replace(document, data=data, unknown={**document.unknown, **walk.unknown})


class _Walk:
    """Through the tables, each text put together."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.unknown: dict[Place, str] = {}

    def value(self, value: Any, place: Place) -> Any:
        """Return a value with its texts put together."""
        if isinstance(value, dict):
            return {key: self.value(inner, (*place, key)) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, (*place, index)) for index, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            return self.text(value, place, 0)
        except LookupError as error:
            self.unknown[place] = str(error.args[0])
            return None

    def text(self, text: str, place: Place, depth: int) -> Any:
        """Put one text together; an interpolation that stands alone keeps the kind of its value."""
        if depth > DEEPEST:
            raise self._wrong(place, "must not refer to itself")
        alone = _NODE.fullmatch(text.strip())
        if alone:
            return self.node(alone[1], place, depth)
        found = _NODE.sub(lambda match: str(self.node(match[1], place, depth)), text)
        if len(found) > LONGEST:
            raise self._wrong(place, "must come to a text of a usual length")
        if "${" in found:
            raise LookupError(text[:60])
        return found

    def node(self, inner: str, place: Place, depth: int) -> Any:
        """Return what one interpolation leads to."""
        path = inner.strip()
        if not _PATH.fullmatch(path):
            raise LookupError(f"${{{inner[:60]}}}")
        found: Any = self.document.data
        climbed = len(path) - len(path.lstrip("."))
        keys = [key for key in re.split(r"[.\[\]]", path) if key]
        if climbed > len(place):
            raise LookupError(f"${{{inner[:60]}}}")
        if climbed:
            keys = [*map(str, place[: len(place) - climbed]), *keys]
        for key in keys:
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            else:
                raise LookupError(f"${{{inner[:60]}}}")
        if isinstance(found, dict | list):
            raise LookupError(f"${{{inner[:60]}}}")  # noqa: TRY004 (it is what the run would look up)
        return self.text(found, tuple(keys), depth + 1) if isinstance(found, str) and "${" in found else found

    def _wrong(self, place: Place, said: str) -> FileError:
        key = ".".join(map(str, place))
        return FileError("file", str(self.document.path), f"{said} (line {self.document.line(place)}: {key})")
