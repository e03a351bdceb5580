"""What one file states of a job, under memcalc's names: the record that a reader returns, and how it is made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from memcalc.catalog import read_toml
from memcalc.convert.document import Document, KeyPath, parse_document
from memcalc.errors import InputError, nearest, shown
from memcalc.specs.options import FIELDS, WORDS, options_of
from memcalc.specs.posttraining import RlInputs

Severity = Literal["error", "warning", "note"]
_ABSENT: Any = object()
ROLE_KEYS = {f"rl.{option.name}": option.meaning for option in options_of(RlInputs)}
"""What files say of post-training: the options of ``memcalc rl``."""
JOB_KEYS: dict[str, str] = {**read_toml(files("memcalc.convert") / "job.toml"), **ROLE_KEYS}
"""What files say of a job that is no option of :func:`memcalc.estimate` itself, but from which options follow."""
OPTION_NAMES = frozenset({*WORDS, *FIELDS, *JOB_KEYS})
_OFF: tuple[Any, ...] = (None, False, 0, "", "none", "no", "off", [], {})
"""Values that turn nothing on."""
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


COMMITS = {"axolotl": "axolotl 067b021c8", "llamafactory": "LLaMA-Factory ff6d4d12e", "trl": "TRL f2cd57710"}
"""By format: whose folder it is, and the commit at which it was read."""


@cache
def _tables() -> dict[str, Any]:
    return read_toml(files("memcalc.convert") / "shipped.toml")


def shipped(form: str, path: str) -> Document | None:
    """The config that a framework ships under a path, or one that ends in it; None where it ships none.

    >>> shipped("llamafactory", "/app/examples/deepspeed/ds_z3_config.json").data["zero_optimization"]["stage"]
    3
    >>> shipped("trainer", "examples/deepspeed/ds_z3_config.json") is None
    True
    """
    if form not in COMMITS:
        return None
    for name, data in _tables()[form].items():
        if f"/{path}".endswith(f"/{name}"):
            return parse_document(Path(path), json.dumps(data), "json")
    return None


@dataclass(frozen=True)
class Setting:
    """One setting of a job that a file states or leaves to its framework's default."""

    name: str
    """An option of :func:`memcalc.estimate`, a dotted field of ``--set``, or one of :data:`JOB_KEYS`."""
    value: Any
    field: str
    """As it is called in the file."""
    default: bool = False
    """The framework's default: the file does not say it."""
    key_path: KeyPath = ()
    unknown: str = ""
    """The variable that has the value when the script runs; empty where the value is known."""
    reason: str = ""
    """Why the value leaves an option open, as a sentence goes on after the field; empty where only a run knows it."""
    usual: str = ""
    """The framework's own value of the field where that is its default, as the file would say it; empty if unknown."""


@dataclass(frozen=True)
class Finding:
    """One remark on a file."""

    severity: Severity
    code: str
    field: str
    message: str
    suggestion: str = ""
    key_path: KeyPath = ()


@dataclass(frozen=True)
class Reference:
    """Another config that a file names, or that a command gives as flags."""

    format: str
    """The format's name; empty where it follows from the file."""
    path: str = ""
    document: Document | None = None
    field: str = ""
    over: Document | None = None
    """Flags that have their way over what the file at `path` says."""
    sure: bool = True
    """Whether the format is known; else the file is of it only where its keys tell that."""
    unknown: str = ""
    """What of the path only a run can tell, such as the name of a variable; empty where all of it is known."""


@dataclass(frozen=True)
class Config:
    """What one file says of a job."""

    document: Document
    format: str
    settings: tuple[Setting, ...]
    findings: tuple[Finding, ...] = ()
    references: tuple[Reference, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a word, or the default where the file does not say it."""
        return next((setting.value for setting in self.settings if setting.name == name), default)


@dataclass
class ConfigReader:
    """Reads a document key by key; keys that were not read are reported.

    Keys are dotted, as in ``zero_optimization.stage``. A value of the wrong kind raises
    :class:`memcalc.errors.InputError`; numbers may be texts, since flags and YAML's ``5e-5`` are.
    """

    document: Document
    format: str
    """The format's name, for the record."""
    software: str
    """Whose defaults and keys these are, with the version that was read, such as `DeepSpeed 0.19`."""
    settings: list[Setting] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    taken: set[KeyPath] = field(default_factory=set)
    usual: dict[str, str] = field(default_factory=dict)
    """Defaults that were asked for, as the file would say them."""

    def has(self, key: str) -> bool:
        """Whether the file has the key, with a value that is not null."""
        return self.raw(key) is not None

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it stands; null is absent."""
        key_path = split_key(key)
        value = _at(self.document.data, key_path)
        self.taken.add(key_path)
        return default if value is _ABSENT or value is None else value

    def integer(self, key: str, default: int | None = None, low: int = 0) -> int | None:
        """A whole number of at least `low`; ``auto`` is absent, as the Trainer fills it in."""
        self._usual(key, default)
        value = self.raw(key, default)
        if value is None or value == "auto":
            return default
        number = _number(value)
        if number is None or number != int(number) or not low <= number < 10**15:
            raise self.error(key, value, f"must be a whole number from {low}")
        return int(number)

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number."""
        self._usual(key, default)
        value = self.raw(key, default)
        if value is None or value == "auto":
            return default
        number = _number(value)
        if number is None:
            raise self.error(key, value, "must be a number")
        return number

    def flag(self, key: str, default: bool | None = False) -> bool | None:
        """A truth value, also as text."""
        self._usual(key, default)
        value = self.raw(key, default)
        if value is None or value == "auto":
            return default
        text = str(value).lower()
        if text not in (*_TRUE, *_FALSE) or isinstance(value, float):
            raise self.error(key, value, "must be true or false")
        return text in _TRUE

    def text(self, key: str, default: str = "") -> str:
        """A text; numbers and truth values become one."""
        self._usual(key, default or None)
        value = self.raw(key, default)
        if isinstance(value, dict | list):
            raise self.error(key, value, "must be a text")
        return str(value)

    def one_of(self, key: str, names: Mapping[str, Any], default: Any = None, *, fold: bool = True) -> Any:
        """What one of the known names stands for; the default where the key is absent."""
        self._usual(key, next((name for name, meaning in names.items() if meaning == default and name), None))
        value = self.raw(key)
        if value is None:
            return default
        wanted = str(value).lower() if fold else str(value)
        table = {(name.lower() if fold else name): meaning for name, meaning in names.items()}
        if wanted not in table:
            raise InputError(self.label(key), str(value), f"must be one of {', '.join(names)}", names)
        return table[wanted]

    def _usual(self, key: str, default: Any) -> None:
        """Note a default of the framework under its key."""
        if default is not None:
            self.usual[key] = str(default).lower() if isinstance(default, bool) else str(default)

    def table(self, key: str) -> dict[str, Any]:
        """A nested table; empty where it is absent."""
        value = self.raw(key, {})
        if not isinstance(value, dict):
            raise self.error(key, value, "must be a table")
        return value

    def options(self, key: str) -> dict[str, Any]:
        """A table, which flags have as JSON, its values as texts."""
        value = self.raw(key)
        if isinstance(value, str) and value.strip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.error(key, value, "must be JSON") from None
        if value is not None and not isinstance(value, dict):
            raise self.error(key, value, "must be a table")
        booleans = {"true": True, "false": False}
        return {name: booleans.get(str(option).lower(), option) for name, option in (value or {}).items()}

    def items(self, key: str) -> list[Any]:
        """A list; a single value, or a text with commas or blanks, is one too."""
        value = self.raw(key, [])
        if isinstance(value, str):
            return [part for part in value.replace(",", " ").split() if part]
        return value if isinstance(value, list) else [value]

    def set(self, name: str, value: Any, key: str, *, default: bool = False) -> None:
        """Set an option from `key`, or from the framework's default where the file does not have it.

        With ``default`` another file's value goes first although this file has the key.
        """
        if name not in OPTION_NAMES:
            raise KeyError(name)
        key_path = split_key(key)
        unknown = self.document.unknown.get(key_path, "")
        default = default or (not unknown and _at(self.document.data, key_path) in (_ABSENT, None))
        usual = self.usual.get(key, "")
        self.settings.append(Setting(name, value, key, default, key_path, unknown, usual=usual))

    def fact(self, name: str, value: Any, of: str) -> None:
        """Set what holds of any file of this kind, whatever its keys are."""
        self.settings.append(Setting(name, value, of))

    def set_integer(self, name: str, key: str, default: int | None = None, low: int = 1) -> None:
        """Set an option from a whole number; nothing is set where there is neither a value nor a default."""
        value = self.integer(key, default, low)
        if value is not None:
            self.set(name, value, key)

    def ask(self, name: str, key: str, unknown: str, reason: str = "") -> None:
        """Note that the value of a key, `unknown`, does not determine an option: the user is asked for it.

        ``reason`` says why where it is not that only a run knows the value.
        """
        self.settings.append(Setting(name, None, key, False, split_key(key), unknown or "-", reason))

    def note(self, severity: Severity, code: str, key: str, message: str, suggestion: str = "") -> None:
        """Add a finding about a key."""
        self.findings.append(Finding(severity, code, key, message, suggestion, split_key(key)))

    def refer(
        self, format_name: str, key: str, path: str = "", document: Document | None = None, over: Document | None = None
    ) -> None:
        """Note another config that belongs to the job; flags `over` it have their way."""
        self.references.append(Reference(format_name, path, document, key, over))

    def harmless(self, *keys: str) -> None:
        """Keys that change no byte on the GPU; one that ends in a dot stands for its whole table."""
        for key_path in _leaves(self.document.data):
            if any(_under(key_path, key) for key in keys):
                self.taken.add(key_path)

    def not_modelled(self, keys: Mapping[str, str], unless: Iterable[Any] = (False, None, 0, "", "none")) -> None:
        """Warn of each key that changes memory in a way that is not modelled, with what it does."""
        off = [str(value).lower() for value in unless]
        for key, says in keys.items():
            value = self.raw(key)
            if value is not None and value not in ({}, []) and str(value).lower() not in off:
                message = f"{key} {shown(value)} changes memory but is not counted: {says}"
                self.note("warning", "MC002", key, message)

    def not_counted(self, keys: Mapping[str, Mapping[str, Any]], counted: Iterable[str] = ()) -> None:
        """Say of each key whose value is not its framework's default what it changes, which is not counted.

        A key has what it ``moves``, what it does (``says``), and a ``default`` where that is not off, or several.
        Nothing is said of those that are ``counted`` all the same, or from which an option was set.
        """
        used = {*counted, *(setting.field for setting in self.settings if setting.name != "framework")}
        for key, row in keys.items():
            value = _at(self.document.data, split_key(key))
            if value is _ABSENT:
                continue
            self.raw(key)
            default = row.get("default", _OFF)
            quiet = [None, "auto", default, *(default if isinstance(default, list | tuple) else ())]
            if key in used or any(_plain(value) == _plain(other) for other in quiet):
                continue
            stated = "" if isinstance(value, dict | list) else f" {shown(value)}"
            severity: Severity = "warning" if row["moves"].startswith("memory") else "note"
            message = f"{key}{stated} changes {row['moves']} and is not counted: {row['says']}"
            self.note(severity, "MC002", key, message)

    def unread(self) -> dict[str, Any]:
        """The keys at the top of the document that nothing has asked for, with their values."""
        return {str(key): value for key, value in self.document.data.items() if (key,) not in self.taken}

    def finish(self, known: Iterable[str] = ()) -> Config:
        """The record; a key that was not asked for is a warning, with the nearest one that is known."""
        names = {*known, *(".".join(map(str, key_path)) for key_path in self.taken)}
        tables = {taken[:depth] for taken in self.taken for depth in range(1, len(taken))}
        for key_path in _leaves(self.document.data):
            if not any(key_path[: len(taken)] == taken for taken in self.taken):
                key = ".".join(map(str, key_path))
                value = _at(self.document.data, key_path)
                if key_path in tables and value not in (None, "auto", {}, []):
                    raise self.error(key, value, "must be a table")
                like = nearest(key, names)
                message = f"{key} is not a setting of {self.software} that memcalc knows; ignored"
                self.note("warning", "MC001", key, message, f"did you mean {like}?" if like else "")
        return Config(self.document, self.format, tuple(self.settings), tuple(self.findings), tuple(self.references))

    def label(self, key: str) -> str:
        """How a message calls a key: with its file and line."""
        return f"{self.document.path.name} line {self.document.line(split_key(key))}: {key}"

    def error(self, key: str, value: Any, allowed: str) -> InputError:
        """An error about the value of a key."""
        return InputError(self.label(key), value, allowed)


def split_key(key: str) -> KeyPath:
    """Return the path of a dotted key; a number is an index."""
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _at(data: Any, key_path: KeyPath) -> Any:
    for key in key_path:
        if isinstance(data, dict):
            data = data.get(key, _ABSENT) if key in data else data.get(str(key), _ABSENT)
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return _ABSENT
    return data


def _leaves(data: Any) -> list[KeyPath]:
    """Return the places of all values that are no tables, and of empty tables."""
    leaves: list[KeyPath] = []
    waiting: list[tuple[KeyPath, Any]] = [((), data)]
    while waiting:
        key_path, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [((*key_path, key), inner) for key, inner in value.items()]
        elif key_path:
            leaves.append(key_path)
    return leaves[::-1]


def _under(key_path: KeyPath, key: str) -> bool:
    begin = split_key(key.rstrip("."))
    return key_path[: len(begin)] == begin if key.endswith(".") else key_path == begin


def _plain(value: Any) -> Any:
    """A value as flags, YAML and JSON compare: numbers by their size, all other by their text."""
    number = _number(value)
    return str(value).lower() if number is None else number


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        return None
    return number if abs(number) < 1e300 else None
