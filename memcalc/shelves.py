"""Presets where they lie: a folder of TOML files, or tables of one; and the one reader of TOML, within bounds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources.abc import Traversable
from typing import Any, Literal

from memcalc.errors import FileError, InputError
from memcalc.preset_names import key

Kind = Literal["model", "gpu", "node"]

KINDS: tuple[Kind, ...] = ("model", "gpu", "node")
_LARGEST_FILE = 1 << 20
_MOST_DOTS = 500
"""In one line: the standard library's parser needs the square of the parts of a dotted key, hours for a megabyte."""
_ALIASES = "aliases"


@dataclass(frozen=True)
class Folder:
    """Presets as files. Only names that the folder itself lists are ever opened, so none can lead out of it."""

    root: Traversable

    def names(self, kind: Kind) -> Mapping[str, Traversable]:
        """The presets of a kind by name."""
        return self._listed[kind]

    @cached_property
    def _listed(self) -> dict[Kind, dict[str, Traversable]]:
        return {kind: dict(self._scan(kind)) for kind in KINDS}

    def _scan(self, kind: Kind) -> Iterator[tuple[str, Traversable]]:
        folder = self.root / f"{kind}s"
        if folder.is_dir():
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
                stem, dot, suffix = entry.name.rpartition(".")
                if dot and suffix == "toml" and stem != _ALIASES:
                    yield key(stem), entry

    def read(self, kind: Kind, name: str) -> dict[str, Any]:
        """What a preset says; a file is parsed once."""
        if (kind, name) not in self._parsed:
            self._parsed[kind, name] = read_toml(self._listed[kind][name])
        return self._parsed[kind, name]

    @cached_property
    def _parsed(self) -> dict[tuple[Kind, str], dict[str, Any]]:
        return {}

    def mentions(self, kind: Kind, name: str, pattern: re.Pattern[bytes]) -> bool:
        """Whether the text of a preset has something in it: parsing all of them takes a third of a second."""
        return pattern.search(_read(self._listed[kind][name])) is not None

    def aliases(self, kind: Kind) -> dict[str, str]:
        """The presets' other names, with the preset that each is."""
        if (kind, _ALIASES) not in self._parsed:
            path = self.root / f"{kind}s" / f"{_ALIASES}.toml"
            self._parsed[kind, _ALIASES] = self._read_aliases(path) if path.is_file() else {}
        return self._parsed[kind, _ALIASES]

    @staticmethod
    def _read_aliases(path: Traversable) -> dict[str, str]:
        data = read_toml(path)
        wrong = next((alias for alias, target in data.items() if not isinstance(target, str)), None)
        if wrong is not None:
            raise InputError(str(path), wrong, 'must be alias = "name"')
        return {key(alias): key(target) for alias, target in data.items()}


@dataclass(frozen=True)
class Tables:
    """Presets as tables of one file, `memcalc.toml`."""

    data: Mapping[str, Any] = field(repr=False)

    def names(self, kind: Kind) -> Mapping[str, Any]:
        """The presets of a kind by name."""
        return {key(name): table for name, table in self.data.get(kind, {}).items()}

    def read(self, kind: Kind, name: str) -> dict[str, Any]:
        """What a preset says."""
        return dict(self.names(kind)[name])

    def mentions(self, kind: Kind, name: str, pattern: re.Pattern[bytes]) -> bool:  # noqa: ARG002
        """Whether a preset may have something in it; tables are parsed already."""
        return name in self.names(kind)

    def aliases(self, kind: Kind) -> dict[str, str]:
        """The presets' other names, with the preset that each is."""
        listed = {name: table.get("aliases") for name, table in self.names(kind).items()}
        return {key(str(alias)): name for name, aliases in listed.items() for alias in aliases or ()}


Shelf = Folder | Tables


def read_toml(path: Traversable) -> dict[str, Any]:
    """Return the content of a TOML file of at most 1 MiB, or raise FileError saying why it cannot be had."""
    import tomllib

    try:
        return tomllib.loads(_read(path).decode())
    except UnicodeDecodeError:
        raise FileError("file", str(path), "must be UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise FileError("file", str(path), f"must be TOML: {error}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits; brackets nested by the thousand
        raise FileError("file", str(path), "must be TOML with numbers and nesting of a usual size") from None


def _read(path: Traversable) -> bytes:
    if not path.is_file():
        raise FileError("file", str(path), "must be an existing regular file")
    try:
        with path.open("rb") as stream:
            content = bytes(stream.read(_LARGEST_FILE + 1))
    except OSError as error:
        raise FileError("file", str(path), error.strerror or "it must be readable") from None
    if len(content) > _LARGEST_FILE:
        raise FileError("file", str(path), "must be at most 1 MiB")
    if any(line.count(b".") > _MOST_DOTS for line in content.split(b"\n")):
        raise FileError("file", str(path), f"must have at most {_MOST_DOTS} dots in a line")
    return content
