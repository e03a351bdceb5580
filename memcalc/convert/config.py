"""What one file says of a job, in memcalc's words: the record that every reader gives and the reading that makes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from memcalc.convert.document import Document, Place
from memcalc.convert.facts import FACTS
from memcalc.errors import InputError, nearest, shown
from memcalc.planner.request import WORDS
from memcalc.planner.settings import FIELDS

__all__ = ["Config", "Finding", "Reading", "Reference", "Said", "Severity"]

Severity = Literal["error", "warning", "note"]
_ABSENT: Any = object()
KNOWN_WORDS = frozenset({*WORDS, *FIELDS, *FACTS})
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


@dataclass(frozen=True)
class Said:
    """One thing that a file says, or leaves to its framework's default."""

    word: str
    """A word of :func:`memcalc.estimate`, a dotted field of ``--set``, or a fact of :mod:`memcalc.convert.facts`."""
    value: Any
    field: str
    """As it is called in the file."""
    default: bool = False
    """The framework's default: the file does not say it."""
    place: Place = ()
    unknown: str = ""
    """The variable that has the value when the script runs; empty where the value is known."""


@dataclass(frozen=True)
class Finding:
    """One remark on a file."""

    severity: Severity
    code: str
    field: str
    message: str
    suggestion: str = ""
    place: Place = ()


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


@dataclass(frozen=True)
class Config:
    """What one file says of a job."""

    document: Document
    format: str
    said: tuple[Said, ...]
    findings: tuple[Finding, ...] = ()
    references: tuple[Reference, ...] = ()

    def get(self, word: str, default: Any = None) -> Any:
        """The value of a word, or the default where the file does not say it."""
        return next((one.value for one in self.said if one.word == word), default)


@dataclass
class Reading:
    """A document as it is read: each key that is asked for is understood, and those that are left are reported.

    Keys are dotted, as in ``zero_optimization.stage``. A value of the wrong kind raises
    :class:`memcalc.errors.InputError`; numbers may be texts, since flags and YAML's ``5e-5`` are.
    """

    document: Document
    format: str
    """The format's name, for the record."""
    software: str
    """Whose defaults and keys these are, with the version that was read, such as `DeepSpeed 0.19`."""
    said: list[Said] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    taken: set[Place] = field(default_factory=set)

    # --------------------------------------------------------------------------------------------------- values

    def has(self, key: str) -> bool:
        """Whether the file has the key, with a value that is not null."""
        return self.raw(key) is not None

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it stands; null is absent."""
        place = _place(key)
        found = _at(self.document.data, place)
        self.taken.add(place)
        return default if found is _ABSENT or found is None else found

    def whole(self, key: str, default: int | None = None, low: int = 0) -> int | None:
        """A whole number of at least `low`; ``auto`` is absent, as the Trainer fills it in."""
        value = self.raw(key, default)
        if value is None or value == "auto":
            return default
        number = _number(value)
        if number is None or number != int(number) or not low <= number < 10**15:
            raise self.wrong(key, value, f"must be a whole number from {low}")
        return int(number)

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number."""
        value = self.raw(key, default)
        if value is None or value == "auto":
            return default
        number = _number(value)
        if number is None:
            raise self.wrong(key, value, "must be a number")
        return number

    def flag(self, key: str, default: bool | None = False) -> bool | None:
        """A truth value, also as text."""
        value = self.raw(key, default)
        if value is None or value == "auto":
            return default
        text = str(value).lower()
        if text not in (*_TRUE, *_FALSE) or isinstance(value, float):
            raise self.wrong(key, value, "must be true or false")
        return text in _TRUE

    def text(self, key: str, default: str = "") -> str:
        """A text; numbers and truth values become one."""
        value = self.raw(key, default)
        if isinstance(value, dict | list):
            raise self.wrong(key, value, "must be a text")
        return str(value)

    def one_of(self, key: str, names: Mapping[str, Any], default: Any = None, *, fold: bool = True) -> Any:
        """What one of the known names stands for; the default where the key is absent."""
        value = self.raw(key)
        if value is None:
            return default
        wanted = str(value).lower() if fold else str(value)
        table = {(name.lower() if fold else name): meaning for name, meaning in names.items()}
        if wanted not in table:
            raise InputError(self.called(key), str(value), f"must be one of {', '.join(names)}", names)
        return table[wanted]

    def table(self, key: str) -> dict[str, Any]:
        """A nested table; empty where it is absent."""
        value = self.raw(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "must be a table")
        return value

    def items(self, key: str) -> list[Any]:
        """A list; a single value, or a text with commas or blanks, is one too."""
        value = self.raw(key, [])
        if isinstance(value, str):
            return [part for part in value.replace(",", " ").split() if part]
        return value if isinstance(value, list) else [value]

    # ------------------------------------------------------------------------------------------------- what is said

    def say(self, word: str, value: Any, key: str, *, default: bool = False) -> None:
        """Note what the file says under `key`, or what follows from the framework's default where it does not.

        With ``default`` another file's word goes before it although this one has the key.
        """
        if word not in KNOWN_WORDS:
            raise KeyError(word)
        place = _place(key)
        unknown = self.document.unknown.get(place, "")
        default = default or (not unknown and _at(self.document.data, place) in (_ABSENT, None))
        self.said.append(Said(word, value, key, default, place, unknown))

    def ask(self, word: str, key: str, name: str) -> None:
        """Note that `name`, which is what stands under a key, does not tell a word: it is asked for."""
        self.said.append(Said(word, None, key, False, _place(key), name))

    def note(self, severity: Severity, code: str, key: str, message: str, suggestion: str = "") -> None:
        """Add a finding about a key."""
        self.findings.append(Finding(severity, code, key, message, suggestion, _place(key)))

    def refer(
        self, format_name: str, key: str, path: str = "", document: Document | None = None, over: Document | None = None
    ) -> None:
        """Note another config that belongs to the job; flags `over` it have their way."""
        self.references.append(Reference(format_name, path, document, key, over))

    def harmless(self, *keys: str) -> None:
        """Keys that change no byte on the GPU; one that ends in a dot stands for its whole table."""
        for place in _leaves(self.document.data):
            if any(_under(place, key) for key in keys):
                self.taken.add(place)

    def not_modelled(self, keys: Mapping[str, str], unless: Iterable[Any] = (False, None, 0, "", "none")) -> None:
        """Warn of each key that changes memory in a way that is not modelled, with what it does."""
        off = [str(value).lower() for value in unless]
        for key, says in keys.items():
            value = self.raw(key)
            if value is not None and value not in ({}, []) and str(value).lower() not in off:
                message = f"{key} {shown(value)} changes memory and is not modelled: {says}"
                self.note("warning", "MC002", key, message)

    def finish(self, known: Iterable[str] = ()) -> Config:
        """The record; a key that was not asked for is a warning, with the nearest one that is known."""
        names = {*known, *(".".join(map(str, place)) for place in self.taken)}
        tables = {taken[:depth] for taken in self.taken for depth in range(1, len(taken))}
        for place in _leaves(self.document.data):
            if not any(place[: len(taken)] == taken for taken in self.taken):
                key = ".".join(map(str, place))
                value = _at(self.document.data, place)
                if place in tables and value not in (None, "auto", {}, []):
                    raise self.wrong(key, value, "must be a table")
                like = nearest(key, names)
                message = f"{key} is not a setting of {self.software} that memcalc knows, and counts for nothing here"
                self.note("warning", "MC001", key, message, f"did you mean {like}?" if like else "")
        listed = tuple(self.said), tuple(self.findings), tuple(self.references)
        return Config(self.document, self.format, *listed)

    def called(self, key: str) -> str:
        """How a message calls a key: with its file and line."""
        return f"{self.document.path.name} line {self.document.line(_place(key))}: {key}"

    def wrong(self, key: str, value: Any, allowed: str) -> InputError:
        """An error about the value of a key."""
        return InputError(self.called(key), value, allowed)


def _place(key: str) -> Place:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _at(data: Any, place: Place) -> Any:
    for key in place:
        if isinstance(data, dict):
            data = data.get(key, _ABSENT) if key in data else data.get(str(key), _ABSENT)
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return _ABSENT
    return data


def _leaves(data: Any) -> list[Place]:
    """Return the places of all values that are no tables, and of empty tables."""
    found: list[Place] = []
    waiting: list[tuple[Place, Any]] = [((), data)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [((*place, key), inner) for key, inner in value.items()]
        elif place:
            found.append(place)
    return found[::-1]


def _under(place: Place, key: str) -> bool:
    begin = _place(key.rstrip("."))
    return place[: len(begin)] == begin if key.endswith(".") else place == begin


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(str(value).replace("_", ""))
    except ValueError:
        return None
    return number if abs(number) < 1e300 else None
