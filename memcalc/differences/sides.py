"""One side of a comparison: whatever names a job, as the words of :func:`memcalc.estimate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memcalc import api
from memcalc.convert.document import parsed
from memcalc.convert.reading import read_text
from memcalc.differences.texts import PLACES, flat_words, is_words, parts_of, split, text_of, words_in
from memcalc.errors import FileError, InputError, MissingError
from memcalc.files import there
from memcalc.handoff.saved import chosen, load, record_of, words_of
from memcalc.handoff.words import typed
from memcalc.planner.answer import strategy_of
from memcalc.preflight.gather import gathered
from memcalc.preflight.join import joined
from memcalc.results import Check, Estimate, Plan, Plans, SavedPlan
from memcalc.results.diff import SideKind
from memcalc.specs.strategy import Strategy
from memcalc.units import parse_count

__all__ = ["Given", "Side", "sides"]

Given = str | Mapping[str, Any] | Estimate | Plan | SavedPlan
"""What a side may be: a text as on the command line, words, or an answer of this library."""
READABLE = "memcalc.saved-plan/1, memcalc.plan/1, memcalc.estimate/1 or memcalc.check/1"


@dataclass(frozen=True)
class Side:
    """A job in words."""

    name: str
    kind: SideKind
    words: Mapping[str, Any]
    """By word or dotted field, ``model``, ``gpu`` and ``node`` among them; nothing is None."""
    defaults: frozenset[str] = frozenset()
    """Those that no file says: its framework's own, and a global batch that follows from its parts."""
    remarks: tuple[str, ...] = ()

    @property
    def said(self) -> frozenset[str]:
        """The words that somebody said."""
        return frozenset(self.words) - self.defaults


@dataclass(frozen=True)
class _Source:
    """What was given, before the words of the options have their way over it."""

    name: str
    kind: SideKind
    read: Callable[[Mapping[str, Any]], Side] = field(repr=False)
    words: Mapping[str, Any] = field(default_factory=dict)
    """Of a strategy in words, those."""


def sides(a: Given, b: Given, words: Mapping[str, Any], dirs: tuple[str, ...]) -> tuple[Side, Side]:
    """Return both sides; ``words`` count for both, and have their way over what a file says.

    A strategy in words changes the other side, where that is a file or a plan; else it stands on ``words`` alone.
    """
    first, second = _source("A", a, dirs), _source("B", b, dirs)
    return _side(first, second, words), _side(second, first, words)


def _side(own: _Source, other: _Source, words: Mapping[str, Any]) -> Side:
    if own.kind == "words" and other.kind != "words":
        return replace(other.read({**words, **own.words}), name=own.name, kind="words")
    side = own.read(words)
    absent = [f"--{name}" for name in ("model", "gpu") if name not in side.words]
    if absent:
        raise MissingError(f"{side.name} does not say which job it is of: give {' and '.join(absent)}.")
    return side


def _source(place: str, given: Given, dirs: tuple[str, ...]) -> _Source:
    """What a side is, by its type, or for a text by what it leads to."""
    if isinstance(given, SavedPlan):
        return _of_saved(f"plan {given.plan.rank}", given, 0, dirs)
    if isinstance(given, Plan | Estimate):
        kind: SideKind = "estimate" if isinstance(given, Estimate) else "plans"
        return _of_line(place, kind, given.command, given.strategy, dirs)
    if isinstance(given, Mapping):
        return _of_words(flat_words(given))
    if is_words(given):
        return _of_words(words_in(given, place))
    path, _, number = given.rpartition("#") if "#" in given and not there(Path(given)) else (given, "", "")
    schema = _schema(path) if path.endswith(".json") and there(Path(path)) else ""
    if schema:
        return _of_answer(given, path, schema, number, dirs)
    return _of_files(given, parts_of(given, place), dirs)


def _of_words(own: Mapping[str, Any]) -> _Source:
    name = text_of(own) or "the job as it is"
    return _Source(name, "words", lambda words: Side(name, "words", {**words, **own}), own)


def _of_files(name: str, paths: tuple[str, ...], dirs: tuple[str, ...]) -> _Source:
    """A job's own files, read as ``memcalc check`` does."""
    configs = gathered(paths)

    def read(words: Mapping[str, Any]) -> Side:
        job = joined(configs, split(words), dirs)
        own = {place: job.facts[place] for place in PLACES if job.facts.get(place) is not None}
        told = flat_words({**own, **job.words, **job.settings})
        follows = {"global_batch"} - {*job.origins, *words}
        return Side(
            name,
            "files",
            {word: value for word, value in told.items() if value != ()},
            frozenset([*(word for word, (_, one) in job.origins.items() if one.default), *follows]),
            tuple(
                f"{config.document.path.name} line {config.document.line(one.place)}: {one.code}: {one.message}"
                for config, one in [*((config, one) for config in configs for one in config.findings), *job.findings]
                if one.severity != "note"
            ),
        )

    return _Source(name, "files", read)


def _schema(path: str) -> str:
    """The schema of one of our own answers in JSON; empty for every other file."""
    data = parsed(Path(path), read_text(Path(path)), "json").data
    schema = data.get("schema")
    return schema if isinstance(schema, str) and schema.startswith("memcalc.") else ""


def _of_answer(name: str, path: str, schema: str, number: str, dirs: tuple[str, ...]) -> _Source:
    """An answer that was saved; ``number`` is of a list of plans the rank, of a saved plan what it can go back to."""
    place = parse_count(number, "number after #") if number else None
    if schema == "memcalc.saved-plan/1":
        return _of_saved(name, load(path, preset_dirs=dirs), place or 0, dirs)
    if schema == "memcalc.plan/1":
        plans = record_of(Plans, path, read_text(Path(path))).plans
        plan = next((one for one in plans if one.rank == (1 if place is None else place)), None)
        if plan is None:
            raise InputError("number after #", number or "1", f"must be from 1 to {len(plans)}, the plans of {path}")
        return _of_line(name, "plans", plan.command, plan.strategy, dirs)
    if place is not None:
        raise InputError("number after #", number, f"{path} holds one job alone")
    text = read_text(Path(path))
    if schema == "memcalc.estimate/1":
        estimate = record_of(Estimate, path, text)
    elif schema == "memcalc.check/1":
        estimate = record_of(Check, path, text).estimate
    else:
        raise FileError("file", path, f"must be {READABLE}, or a job's own file, not {schema[:40]!r}")
    return _of_line(name, "estimate", estimate.command, estimate.strategy, dirs)


def _of_saved(name: str, saved: SavedPlan, fallback: int, dirs: tuple[str, ...]) -> _Source:
    job = saved.job
    places = {"model": job.model, "gpu": job.gpu, "node": job.node}
    own = flat_words({**places, **words_of(saved, fallback), "settings": job.settings})
    return _settled(name, "saved plan", own, chosen(saved, fallback).strategy, dirs)


def _of_line(name: str, kind: SideKind, command: str, strategy: Strategy, dirs: tuple[str, ...]) -> _Source:
    """The job of the command that reproduces an answer."""
    try:
        line = typed(command)
    except (ValueError, IndexError):  # quotes that do not close, a word without its value
        raise FileError("file", name, "its command must be a line that memcalc wrote") from None
    if "module" in line.words:
        raise InputError("file", name, "a module of one's own is compared from its recorded model, given with --model")
    places = {"model": line.model, "gpu": line.gpu, "node": line.node}
    return _settled(name, kind, flat_words({**places, **line.words, "settings": line.settings}), strategy, dirs)


def _settled(name: str, kind: SideKind, own: Mapping[str, Any], strategy: Strategy, dirs: tuple[str, ...]) -> _Source:
    """A saved answer, if its words still come to the strategy that it has."""
    now = strategy_of(api.single(preset_dirs=dirs, **split(own)).grid).model_dump()
    was = strategy.model_dump()
    other = next((word for word in was if was[word] != now[word]), None)
    if other is not None:
        said = f"the words of {name} come to {now[other]!r} with this version of memcalc: make it anew"
        raise InputError(f"strategy.{other}", was[other], said)
    return _Source(name, kind, lambda words: Side(name, kind, {**own, **words}))
