"""Presets: their names as people type them, the sentence for what none is, and the folders and tables they lie in."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources.abc import Traversable
from typing import Any, Literal, NamedTuple

from memcalc.errors import FileError, InputError, UnknownNameError, nearest
from memcalc.files import asks

_FORM = r"hf|chat|instruct|thinking|base|it|pt|sft|dpo|grpo|rlvr|tldr|abliterated"
_FORM_AT_END = re.compile(rf"-({_FORM})$")
_FORM_WITHIN = re.compile(rf"-({_FORM})(?=-|$)")
"""What is said of a model's training, and changes no size; numbers are not: they tell versions and sizes apart."""
_BITS = r"\d-?bits?|int[48]|nf4|fp4|g\d+"
_STORED = {
    "bnb": re.compile(rf"-(unsloth-)?(bnb|bitsandbytes)(-({_BITS}|bf16|fp16))*$"),
    "gptq": re.compile(rf"-gptq(-({_BITS}|w4a16|bf16|fp16))*$"),
    "awq": re.compile(rf"-awq(-({_BITS}))*$"),
    "aqlm": re.compile(r"-aqlm(-\dbit)?(-\dx\d+)?(-pv)?$"),
    "nvfp4": re.compile(r"-nvfp4(a16)?$"),
    "int": re.compile(rf"-(quantized\.)?(w\da\d+|{_BITS})$"),
    "": re.compile(r"-(bf16|fp16|fp32|fp8(-(block|dynamic|kv))?|mxfp4|dequantized|unsloth)$"),
}
"""How a repository's name ends by the form its weights are stored in; those of the last are expanded when loaded."""
_SIZE = re.compile(r"(?<![a-z\d.])(?:\d+x)?\d+(?:\.\d+)?[bm](?![a-z\d])")
_MOST_LISTED = 8


def key(name: str) -> str:
    """A name as presets and aliases are looked up."""
    return name.strip().casefold().replace(" ", "-").replace("_", "-")


def has_size(name: str) -> bool:
    """Whether a name says a number of parameters beside what it is called.

    >>> has_size("llama-2-7b"), has_size("mixtral-8x7b"), has_size("mistral"), has_size("7b")
    (True, True, False, False)
    """
    return _SIZE.fullmatch(name) is None and _SIZE.search(name) is not None


def stored_as(name: str) -> tuple[str, str]:
    """Split a name into the model's own and the form in which its weights stay quantised, empty where they do not.

    >>> stored_as("llama-3-8b-instruct-bnb-4bit"), stored_as("qwen3-8b-fp8"), stored_as("llama-2-7b")
    (('llama-3-8b-instruct', 'bnb'), ('qwen3-8b', ''), ('llama-2-7b', ''))
    """
    forms = list(_unstored(name))
    return forms[-1][0], next((form for _, form in forms if form), "")


def _unstored(name: str) -> Iterator[tuple[str, str]]:
    """A name as forms of storage are taken off its end, each with the one that was taken off."""
    yield name, ""
    for form, pattern in _STORED.items():
        if match := pattern.search(name):
            shorter = name[: match.start()]
            yield shorter, form
            yield from (pair for pair in _unstored(shorter) if pair[0] != shorter)
            return


def shortened(name: str) -> Iterator[str]:
    """A model's name without its owner, and what is left as its stored form and its forms of training are taken off.

    Nothing else is ever taken off, so that what is left says the same size and version, or is no preset's name.

    >>> list(shortened("mistralai/Mistral-7B-Instruct-v0.3"))
    ['mistral-7b-instruct-v0.3', 'mistral-7b-v0.3']
    >>> list(shortened("unsloth/Meta-Llama-3-8B-Instruct-bnb-4bit"))[-2:]
    ['meta-llama-3-8b', 'llama-3-8b']
    """
    plain = key(name.rstrip("/").rpartition("/")[2])
    names = [form for form, _ in _unstored(plain)]
    while match := _FORM_AT_END.search(names[-1]):
        names.append(names[-1][: match.start()])
    names.append(_FORM_WITHIN.sub("", names[-1]))
    both = (form for text in names for form in (text, text.removeprefix("meta-")))
    yield from dict.fromkeys(form for form in both if form)


def is_hub_id(name: str) -> bool:
    """Whether a name may be that of a repository on the Hub, OWNER/NAME, perhaps with @REVISION.

    >>> is_hub_id("Qwen/Qwen2.5-7B"), is_hub_id("Qwen/Qwen2.5-7B@main"), is_hub_id("./config"), is_hub_id("a/b/c")
    (True, True, False, False)
    """
    owner_and_name = name.partition("@")[0]
    return (
        re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", owner_and_name, re.ASCII) is not None
        and re.search(r"--|\.\.|\.(json|toml|git)$", owner_and_name) is None
    )


def unknown(kind: str, name: str, names: Iterable[str], aliases: Mapping[str, str]) -> UnknownNameError:
    """The error for a name that no preset of a kind has: all that begin with it, or the nearest.

    >>> print(unknown("gpu", "a100", ["a100-40g", "a100-80g", "a10"], {}))
    unknown gpu 'a100': it may be a100-40g or a100-80g.
    >>> print(unknown("gpu", "h100/l40s", ["h100", "l40s"], {}))
    unknown gpu 'h100/l40s': must be one GPU; memcalc sweep compares several: gpu = ["h100", "l40s"] under [jobs].
    """
    known = sorted(names)
    begun = [other for other in known if other.startswith(f"{key(name)}-")]
    if 1 < len(begun) <= _MOST_LISTED:
        return UnknownNameError(kind, name, f"it may be {', '.join(begun[:-1])} or {begun[-1]}")
    several = re.split("[/,]", name) if kind == "gpu" and not name.endswith(".toml") else []
    if len(several) > 1 and all(key(each) in {*known, *aliases} for each in several):
        listed = ", ".join(f'"{each}"' for each in several)
        allowed = f"must be one GPU; memcalc sweep compares several: gpu = [{listed}] under [jobs]"
        return UnknownNameError(kind, name, allowed)
    allowed = f"must be one that `memcalc {kind}s` lists, or a .toml file"
    if kind != "model":
        like = nearest(name, {*known, *aliases})
        return UnknownNameError(kind, name, allowed, suggestion=aliases.get(like or "", like))
    if is_hub_id(name):
        where = "it is no preset and not in the local Hub cache"
        allowed = f"{where}; nothing is downloaded: give the path of its config.json"
    like = mistyped(name, {*known, *aliases})
    return UnknownNameError(kind, name, allowed, suggestion=aliases.get(like or "", like))


def unlike(name: str, differs: str) -> UnknownNameError:
    """The error for a repository that is known to have no preset's sizes."""
    allowed = f"no preset has its sizes ({differs}): give the path of its config.json"
    return UnknownNameError("model", name, allowed)


def mistyped(name: str, names: Iterable[str]) -> str | None:
    """The one of some models' names that another may be a slip of: the same numbers, and words that differ by a slip.

    >>> mistyped("lama-2-7b", ["llama-2-7b", "llama-2-13b"])
    'llama-2-7b'
    >>> mistyped("mamba-2.8b", ["gemma-2b", "pythia-2.8b"]), mistyped("gemma-3-270m", ["gemma-3-27b"])
    (None, None)
    """
    wanted = next(reversed([*shortened(name)]), "")
    spelt, numbers = _parts(wanted)
    for other in sorted(names, key=lambda other: (len(other), other)):
        theirs, counted = _parts(other)
        if numbers and numbers == counted and len(spelt) == len(theirs) and all(map(_slip, spelt, theirs)):
            return other
    return None


def _parts(name: str) -> tuple[list[str], list[str]]:
    """The words of a name, and its numbers with their units."""
    numbers = re.findall(r"(?:\d+x)?\d+(?:\.\d+)?(?:[bmk](?![a-z]))?", key(name))
    return re.findall(r"[a-z]+", re.sub(r"(?<=\d)[bmk](?![a-z])|(?<=\d)x(?=\d)", " ", key(name))), numbers


def _slip(word: str, other: str) -> bool:
    """Whether one word is another with a letter too many, too few or doubled, or two that changed places."""
    if word == other or (len(word) == len(other) and sorted(word) == sorted(other)):
        return True
    short, long = sorted((word, other), key=len)
    return len(long) == len(short) + 1 and any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


# Repositories of the Hub by the presets they are: the table presets/hub.toml, and how it is looked up.


@dataclass(frozen=True)
class HubEntry:
    """What the table says of one repository."""

    preset: str = ""
    """The preset whose sizes it has; empty where none has them."""
    missing: str = ""
    """What the repository has beside the preset, which is not counted."""
    differs: str = ""
    """Where no preset has its sizes: in what it differs from which one."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the preset's table that are others here."""
    apart: str = ""
    """What is another by them, as a sentence says it: a vocabulary of 32002."""


class Lookup(NamedTuple):
    """Where a model's name leads."""

    preset: str
    """The preset; empty where there is none."""
    entry: HubEntry = HubEntry()
    """What the table of the Hub says beside."""
    exact: bool = False
    """Whether the name itself stands somewhere: nothing but the owner was taken off."""


@dataclass(frozen=True)
class HubTable:
    """The table: repositories by OWNER/NAME, and models by a name under which any owner holds a copy."""

    entries: Mapping[str, HubEntry] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any], what: str) -> HubTable:
        """Check the content of presets/hub.toml; ``what`` is how an error calls the file."""
        rows: dict[str, HubEntry] = {}
        for name, entry in _rows(data):
            if rows.setdefault(key(name), entry) != entry:
                raise InputError(what, name, "must be in one place")
        return cls(rows)

    def entry(self, name: str) -> HubEntry | None:
        """What is said of a repository, or of a model under any owner."""
        return self.entries.get(key(name))


def _rows(data: Mapping[str, Any]) -> Iterator[tuple[str, HubEntry]]:
    for preset, row in data.get("preset", {}).items():
        yield from _named(row.get("names", ()), HubEntry(preset))
        yield from _named(row.get("parts", ()), HubEntry(preset, missing=row.get("missing", "")))
    for row in data.get("resized", ()):
        yield from _named(row.get("names", ()), HubEntry(row["like"], changes=row["with"], apart=row["differs"]))
    for row in data.get("unlike", ()):
        yield from _named(row.get("names", ()), HubEntry(differs=f"it is {row['like']} but for {row['differs']}"))


def _named(names: Iterable[str], entry: HubEntry) -> Iterator[tuple[str, HubEntry]]:
    return ((name, entry) for name in names)


def forms(name: str) -> Iterator[str]:
    """The names under which a repository's name is looked up, each with its owner and without, the fullest first.

    >>> list(forms("unsloth/mistral-7b-bnb-4bit"))
    ['unsloth/mistral-7b-bnb-4bit', 'mistral-7b-bnb-4bit', 'unsloth/mistral-7b', 'mistral-7b']
    """
    owner = key(name.rpartition("/")[0])
    yield from dict.fromkeys(
        form for short in shortened(name) for form in ((f"{owner}/{short}", short) if owner else (short,))
    )


def by_form(name: str, known: Collection[str], aliases: Mapping[str, str], table: HubTable) -> Lookup | None:
    """Find what a name is with its owner and its forms taken off, one after the other.

    Parameters
    ----------
    name : what was typed [-]
    known : the names of the presets [-]
    aliases : other names of theirs [-]
    table : the repositories that are presets by another name [-]

    """
    for form in forms(name):
        entry = table.entry(form)
        if entry is not None:
            as_written = form.rpartition("/")[2] == key(name).rpartition("/")[2]
            names = () if entry.differs or entry.missing or entry.changes else (form, aliases.get(form, ""))
            return Lookup(next((name for name in names if name in known), entry.preset), entry, exact=as_written)
        if form in known or _is_plain(form, aliases.get(form, ""), known):
            return Lookup(form if form in known else aliases[form])
    return None


def _is_plain(alias: str, preset: str, known: Collection[str]) -> bool:
    """Whether an alias can mean one preset alone: it says a size, and no other preset's name goes on from it."""
    if preset not in known or not has_size(alias):
        return False
    return not any(name != preset and name.startswith(f"{alias}-") for name in known)


# ---------------------------------------------------------------------------------------------------- where presets lie


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
    if not asks(path.is_file):
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
