"""The two jobs of a comparison: whatever names a job, as the options of :func:`memcalc.estimate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memcalc import api
from memcalc.convert.document import parse_document, read_text
from memcalc.errors import FileError, InputError, MissingError, UnknownNameError
from memcalc.files import there
from memcalc.handoff.saved import chosen, dirs_of, load, record_from
from memcalc.planner.answer import strategy_of
from memcalc.planner.job import flat_options, split_options, value_text
from memcalc.planner.request import boolean, flag
from memcalc.preflight.job import read_files
from memcalc.preflight.merge import merge
from memcalc.results.changes import SideKind
from memcalc.results.check import Check
from memcalc.results.estimates import Estimate
from memcalc.results.plans import Plan, Plans, SavedPlan
from memcalc.specs.job import JobRecord
from memcalc.specs.options import FIELDS, FLAGS, SETTINGS, WORDS
from memcalc.specs.strategy import Strategy
from memcalc.units import parse_count

Given = str | Mapping[str, Any] | Estimate | Plan | SavedPlan
"""What may be compared: a text as on the command line, options, or an answer of this library."""
READABLE = (
    "memcalc.saved-plan/2, memcalc.plan/1, memcalc.estimate/1, memcalc.check/1, memcalc.rl/1 or memcalc.rl-plans/1"
)
"""Schemas of answers that may be compared."""
PRESETS = ("model", "gpu", "node")
"""Options that name a preset or a file."""
NAMES = (*PRESETS, *WORDS, *FIELDS, *SETTINGS)
"""Names that a text may give values."""


@dataclass(frozen=True)
class DiffInput:
    """A job of a comparison."""

    name: str
    """As it was given."""
    kind: SideKind
    """What it was given as."""
    options: Mapping[str, Any]
    """By keyword or dotted field, ``model``, ``gpu`` and ``node`` among them; nothing is None."""
    defaults: frozenset[str] = frozenset()
    """Options that no file states: its framework's own, and a global batch that follows from its parts."""
    remarks: tuple[str, ...] = ()
    """What was noticed while its files were read."""

    @property
    def stated(self) -> frozenset[str]:
        """The options that the user or a file states."""
        return frozenset(self.options) - self.defaults


@dataclass(frozen=True)
class _Source:
    """What was given, before the options that count for both jobs override it."""

    name: str
    kind: SideKind
    read: Callable[[Mapping[str, Any]], DiffInput] = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of a strategy given as options, those."""
    dirs: tuple[str, ...] = ()
    """Folders with presets of the user's own that its job names."""


def read_inputs(
    a: Given, b: Given, options: Mapping[str, Any], dirs: tuple[str, ...]
) -> tuple[DiffInput, DiffInput, tuple[str, ...]]:
    """Return both jobs, and the folders with presets of the user's own: those given, or those of both jobs.

    ``options`` count for both jobs and override what a file states. A strategy given as options changes the other job,
    where that is a file or a plan; else it stands on ``options`` alone.
    """
    first, second = _source("A", a, dirs), _source("B", b, dirs)
    dirs = dirs or tuple(dict.fromkeys((*first.dirs, *second.dirs)))
    return _read(first, second, options), _read(second, first, options), dirs


def _read(source: _Source, other: _Source, options: Mapping[str, Any]) -> DiffInput:
    if source.kind == "words" and other.kind != "words":
        return replace(other.read({**options, **source.options}), name=source.name, kind="words")
    result = source.read(options)
    absent = [f"--{name}" for name in ("model", "gpu") if name not in result.options]
    if absent:
        raise MissingError(f"{result.name} names no model or GPU. Pass {' and '.join(absent)}.")
    return result


def _source(side: str, given: Given, dirs: tuple[str, ...]) -> _Source:
    """What is compared, by its type, or for a text by what it leads to."""
    if isinstance(given, SavedPlan):
        return _of_plan(f"plan {given.plan.rank}", "saved plan", given.plan, dirs)
    if isinstance(given, Plan):
        return _of_plan(side, "plans", given, dirs)
    if isinstance(given, Estimate):
        return _of_job(side, "estimate", given.job, given.strategy, dirs)
    if isinstance(given, Mapping):
        return _of_options(flat_options(given))
    if is_options(given):
        return _of_options(parse_options(given, side))
    path, _, number = given.rpartition("#") if "#" in given and not there(Path(given)) else (given, "", "")
    schema = schema_of(path) if path.endswith(".json") and there(Path(path)) else ""
    if schema:
        return _of_answer(given, path, schema, number, dirs)
    return _of_files(given, file_names(given, side), dirs)


def _of_options(options: Mapping[str, Any]) -> _Source:
    name = text_of(options) or "the job as it is"
    return _Source(name, "words", lambda shared: DiffInput(name, "words", {**shared, **options}), options)


def _of_files(name: str, paths: tuple[str, ...], dirs: tuple[str, ...]) -> _Source:
    """A job's own files, read as ``memcalc check`` does."""
    configs = read_files(paths)

    def read(options: Mapping[str, Any]) -> DiffInput:
        job = merge(configs, split_options(options), dirs)
        merged = flat_options(job.keywords)
        follows = {"global_batch"} - {*job.origins, *options}
        findings = [*((config, finding) for config in configs for finding in config.findings), *job.findings]
        return DiffInput(
            name,
            "files",
            merged,
            frozenset([*(option for option, (_, setting) in job.origins.items() if setting.default), *follows]),
            tuple(
                f"{config.document.path.name} line {config.document.line(finding.key_path)}: "
                f"{finding.code}: {finding.message}"
                for config, finding in findings
                if finding.severity != "note"
            ),
        )

    return _Source(name, "files", read)


def schema_of(path: str) -> str:
    """The schema of one of our own answers in JSON; empty for every other file."""
    schema = parse_document(Path(path), read_text(Path(path)), "json").data.get("schema")
    return schema if isinstance(schema, str) and schema.startswith("memcalc.") else ""


def _of_answer(name: str, path: str, schema: str, number: str, dirs: tuple[str, ...]) -> _Source:
    """An answer that was saved; ``number`` is of a list of plans the rank, of a saved plan what it can go back to."""
    index = parse_count(number, "number after #") if number else None
    if schema.startswith("memcalc.saved-plan/"):
        return _of_plan(name, "saved plan", chosen(load(path, preset_dirs=dirs), index or 0), dirs)
    text = read_text(Path(path))
    if schema == "memcalc.plan/1":
        plans = record_from(Plans, path, text).plans
        plan = next((plan for plan in plans if plan.rank == (1 if index is None else index)), None)
        if plan is None:
            raise InputError("number after #", number or "1", f"must be from 1 to {len(plans)}, the plans of {path}")
        return _of_plan(name, "plans", plan, dirs)
    if index is not None:
        raise InputError("number after #", number, f"{path} holds one job only")
    if schema == "memcalc.estimate/1":
        estimate = record_from(Estimate, path, text)
    elif schema == "memcalc.check/1":
        estimate = record_from(Check, path, text).estimate
    else:
        raise FileError("file", path, f"must be {READABLE}, or a job's own file, not {schema[:40]!r}")
    return _of_job(name, "estimate", estimate.job, estimate.strategy, dirs)


def _of_plan(name: str, kind: SideKind, plan: Plan, dirs: tuple[str, ...]) -> _Source:
    return _of_job(name, kind, plan.job, plan.strategy, dirs)


def _of_job(name: str, kind: SideKind, job: JobRecord, strategy: Strategy, dirs: tuple[str, ...]) -> _Source:
    """The job of an answer, if it still comes to the strategy that the answer has."""
    if job.module:
        raise InputError("file", name, "a module of one's own is compared from its recorded model, given with --model")
    dirs = dirs_of(job, dirs)
    options = flat_options({option: value for option, value in job.keywords().items() if option != "preset_dirs"})
    now, was = (
        strategy_of(api.single(preset_dirs=dirs, **split_options(options)).grid).model_dump(),
        strategy.model_dump(),
    )
    other = next((field for field in was if was[field] != now[field]), None)
    if other is not None:
        allowed = f"{name} resolves to {now[other]!r} in this version; create it again"
        raise InputError(f"strategy.{other}", was[other], allowed)
    return _Source(name, kind, lambda shared: DiffInput(name, kind, {**options, **shared}), dirs=dirs)


# ----------------------------------------------------------------------------------------------------- options as text


def is_options(text: str) -> bool:
    """Whether a text is a strategy as options, and no file.

    >>> is_options("zero=3,recompute=full"), is_options(""), is_options("ds_config.json")
    (True, True, False)
    """
    return not text or ("=" in text and not there(Path(text)) and not there(Path(text.partition(",")[0])))


def parse_options(text: str, side: str) -> dict[str, Any]:
    """Return a strategy that is given as options; a part without a name belongs to the list before it.

    >>> parse_options("zero=3,offload=optimizer,params,sp=false", "A")
    {'zero': '3', 'offload': 'optimizer,params', 'sp': False}
    """
    options: dict[str, Any] = {}
    name = ""
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if equals:
            name = _option_name(key, side)
            if name in options:
                raise InputError(f"{flag(name)} of {side}", value, "is given twice")
            options[name] = value.strip()
        elif name:
            options[name] += f",{part.strip()}"
        else:
            raise InputError(side, text, "must be a file, or words with values, such as zero=3,recompute=full")
    return {name: boolean(value, name) if name in FLAGS else value for name, value in options.items()}


def _option_name(key: str, side: str) -> str:
    """Return an option by the name of the library, or a dotted field."""
    plain = key.strip().removeprefix("--")
    for name in (plain, plain.replace("-", "_")):
        if name in NAMES:
            return SETTINGS.get(name, name)
    raise UnknownNameError(
        f"word of {side}", plain, "must be a word of the options, such as zero or micro-batch", NAMES
    )


def file_names(text: str, side: str) -> tuple[str, ...]:
    """Return the files that a text names, joined by commas; one whose name has commas is itself."""
    if there(Path(text)):
        return (text,)
    paths = tuple(part.strip() for part in text.split(","))
    absent = next((path for path in paths if not there(Path(path))), None)
    if absent is not None:
        allowed = "is neither a file nor settings such as zero=3,recompute=full"
        raise InputError(side, absent, allowed)
    return paths


def text_of(options: Mapping[str, Any]) -> str:
    """Return options as one text.

    >>> text_of({"zero": 3, "offload": ("optimizer", "params")})
    'zero=3,offload=optimizer,params'
    """
    return ",".join(f"{name}={value_text(value)}" for name, value in options.items())
