"""The smallest edits of a job's own files that make it fit."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from memcalc import api
from memcalc.convert.config import Config
from memcalc.convert.document import Document, KeyPath
from memcalc.convert.edits import edit_document, edit_parts
from memcalc.convert.formats import get_format
from memcalc.convert.formats.base import ConfigJob, Format, config_changes
from memcalc.errors import MemcalcError
from memcalc.preflight.job import MergedJob, estimate_merged, read_files
from memcalc.preflight.lints import whole_gradients
from memcalc.preflight.merge import merge
from memcalc.results.check import CheckEdit, CheckFix
from memcalc.results.estimates import Estimate
from memcalc.results.plans import Plan
from memcalc.specs.options import DEGREES

WHOLE = "whole_accumulation"
"""Whether gradients are reduced after a step's last micro-batch alone, and whole until then: a field, not a word."""
_EDITED = (WHOLE, "micro_batch", "recompute", "zero", "offload", "compile")
"""What an edit may change, in the order in which equal edits are preferred: none changes what is learned."""
_BY_HAND = ("micro_batch", "recompute")
"""What the user can change wherever it is said: in a format that is not edited, or in code."""
MOST = 3
"""Edits that are named."""
_UNTOUCHED = (
    "framework", "precision", "optimizer", *DEGREES, "attention", "loss", "kernels", "lora", "quantize",
)  # fmt: skip
"""What the edited files must say as before."""
_STAY = ("precision", "optimizer", "recompute", "zero", *DEGREES, "micro_batch")
"""What a search would try, and an edit leaves as it is unless it is one of those above."""


def smallest_fixes(
    paths: tuple[str, ...],
    configs: tuple[Config, ...],
    job: MergedJob,
    estimate: Estimate,
    given: Mapping[str, Any],
    dirs: tuple[str, ...],
) -> tuple[CheckFix, ...]:
    """Return up to :data:`MOST` changes that make the job fit: of the fewest settings first, of those the fastest.

    Of as many settings, edits of files come before what the user changes, which no file that is edited says.
    """
    choices = _choices(configs, estimate, given)
    edits = _edits_that_fit(choices, paths, configs, job, estimate, given, dirs)
    least = min((count for count, _ in edits), default=len(_BY_HAND))
    enough = len(edits) == MOST and least > 1
    hands = () if enough else _by_hand(choices if edits else {}, least, paths, job, estimate, given, dirs)
    return tuple(fix for _, fix in sorted([*edits, *hands], key=lambda pair: pair[0]))[:MOST]


def _edits_that_fit(
    choices: Mapping[str, tuple[Any, ...]],
    paths: tuple[str, ...],
    configs: tuple[Config, ...],
    job: MergedJob,
    estimate: Estimate,
    given: Mapping[str, Any],
    dirs: tuple[str, ...],
) -> list[tuple[int, CheckFix]]:
    """Return up to :data:`MOST` edits, each behind how many settings it changes.

    What is predicted to be fast by times that no run has validated, such as those of offload, comes after the others.
    Edits of one setting more than the first needs are the last that are looked at.

    The global batch stays. Each edit is proved: the files as edited are read, merged and estimated again. One
    that is tight is taken where none fits, unless the job is tight as it is.
    """
    fixes: list[tuple[int, CheckFix]] = []
    tight: tuple[int, CheckFix] | None = None
    last = None
    for count in range(1, len(choices) + 1):
        if last is not None and count > last:
            break
        plans = [plan for names in combinations(choices, count) for plan in _plans(names, choices, job, estimate, dirs)]
        for plan in sorted(plans, key=lambda plan: (not plan.time.validated, plan.time.step)):
            fix = _proved(plan, paths, configs, estimate, given, dirs)
            if fix is None or any(fix.changes == other.changes for _, other in fixes):
                continue
            if fix.verdict == "fits":
                fixes.append((count, fix))
                last = last or count + 1
            else:
                tight = tight or (count, fix)
            if len(fixes) == MOST:
                return fixes
    return [tight] if tight is not None and not fixes and estimate.verdict == "does-not-fit" else fixes


def _by_hand(
    choices: Mapping[str, tuple[Any, ...]],
    most: int,
    paths: tuple[str, ...],
    job: MergedJob,
    estimate: Estimate,
    given: Mapping[str, Any],
    dirs: tuple[str, ...],
) -> Iterator[tuple[int, CheckFix]]:
    """Yield changes of up to ``most`` settings that every framework has, where no file that is edited says them."""
    values = {"micro_batch": _smaller(estimate), "recompute": ("full",) * (estimate.strategy.recompute != "full")}
    free = {name: values[name] for name in _BY_HAND if values[name] and name not in choices and given.get(name) is None}
    for count in range(1, min(most, len(free)) + 1):
        for names in combinations(free, count):
            for plan in _plans(names, free, job, estimate, dirs):
                changed = {name: getattr(plan.strategy, name) for name in names}
                batch = {"global_batch": estimate.workload.global_batch}
                try:
                    after = estimate_merged(merge(read_files(paths), {**given, **batch, **changed}, dirs), dirs)
                except MemcalcError:
                    continue
                if after.verdict == "fits" and _keeps(estimate, after):
                    yield count, _fix(estimate, after)


def _choices(configs: tuple[Config, ...], estimate: Estimate, given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The options that some file of the job can state, and the user did not pin, with the values that are tried."""
    choices: dict[str, tuple[Any, ...]] = {}
    for name in _EDITED:
        if given.get(name) is not None or (name == WHOLE and not whole_gradients(estimate)):
            continue
        for config in configs:
            values = get_format(config.format).choices
            if name in values:
                choices[name] = choices.get(name) or (_smaller(estimate) if name == "micro_batch" else values[name])
    return {name: values for name, values in choices.items() if values}


def _smaller(estimate: Estimate) -> tuple[int, ...]:
    """Smaller micro-batches that divide the ranks' share of the batch."""
    share = estimate.workload.micro_batch * estimate.workload.accumulation_steps
    return tuple(size for size in range(1, estimate.workload.micro_batch) if share % size == 0)


def _plans(
    names: tuple[str, ...],
    choices: Mapping[str, tuple[Any, ...]],
    job: MergedJob,
    estimate: Estimate,
    dirs: tuple[str, ...],
) -> Iterator[Plan]:
    """Yield the best strategies that fit when some options are free and all else stays."""
    stays = {name: getattr(estimate.strategy, name) for name in _STAY}
    stays["offload"] = ",".join(estimate.strategy.offload) or "none"
    sharded = "zero" in names or estimate.strategy.zero >= 2  # what is not sharded does not leave the GPU
    free = {
        name: "/".join(str(value) for value in choices[name] if sharded or "params" not in str(value))
        for name in names
        if name != WHOLE
    }
    keywords = {**stays, **job.keywords, "global_batch": estimate.workload.global_batch, **free}
    if WHOLE in names:
        keywords["settings"] = {**(keywords.get("settings") or {}), f"strategy.{WHOLE}": False}
    try:
        answer = api.plan(**keywords, preset_dirs=dirs, top=MOST, advice=False)
    except MemcalcError:  # the framework does not have that combination
        return
    yield from answer.plans


def _proved(
    plan: Plan,
    paths: tuple[str, ...],
    configs: tuple[Config, ...],
    before: Estimate,
    given: Mapping[str, Any],
    dirs: tuple[str, ...],
) -> CheckFix | None:
    """Return the edit that makes the files say a plan, if they then do."""
    old = ConfigJob.of(before)
    new = ConfigJob.of(before.model_copy(update={
        "strategy": plan.strategy,
        "workload": before.workload.model_copy(update={
            "micro_batch": plan.strategy.micro_batch, "accumulation_steps": plan.accumulation_steps,
        }),
    }))  # fmt: skip
    try:
        wanted = [(config.document, _edits(config.document, get_format(config.format), old, new)) for config in configs]
        if not any(values for _, values in wanted):
            return None
        texts = _needed(wanted, lambda texts: merge(read_files(paths, texts), given, dirs))
        after = estimate_merged(merge(read_files(paths, texts), given, dirs), dirs)
    except MemcalcError:
        return None
    if after.verdict == "does-not-fit" or not _keeps(before, after):
        return None
    edits = (_edit(document, texts[path]) for path, document in _first_of(configs).items() if path in texts)
    return _fix(before, after, tuple(edits))


def _keeps(before: Estimate, after: Estimate) -> bool:
    """Whether a change leaves alone what is learned, and what no edit may touch."""
    same = all(getattr(after.strategy, name) == getattr(before.strategy, name) for name in _UNTOUCHED)
    return same and after.workload.global_batch == before.workload.global_batch


def _fix(before: Estimate, after: Estimate, edits: tuple[CheckEdit, ...] = ()) -> CheckFix:
    return CheckFix(
        changes=tuple(_changes(before, after)),
        edits=edits,
        peak=after.peak.device,
        verdict=after.verdict,
        command=after.command,
        **_speeds(after),
    )


def _speeds(estimate: Estimate) -> dict[str, float]:
    """The throughput and its range, where a time is known [tokens/s]."""
    time = estimate.time
    if time is None:
        return {}
    speed = time.tokens_per_second_per_gpu
    return {
        "tokens_per_second_per_gpu": speed,
        "slowest": speed * time.step / time.high,
        "fastest": speed * time.step / time.low,
    }


Wanted = list[tuple[Document, dict[KeyPath, Any]]]


def _texts(wanted: Wanted) -> dict[Path, str]:
    """Return the edited text of each file that says something differently for the new job."""
    files: dict[Path, Wanted] = {}
    for document, values in wanted:
        if values:
            files.setdefault(document.path, []).append((document, values))
    return {path: edit_parts(parts) if len(parts) > 1 else edit_document(*parts[0]) for path, parts in files.items()}


def _needed(wanted: Wanted, read: Callable[[dict[Path, str]], MergedJob]) -> dict[Path, str]:
    """Return the edited texts, without changes that say nothing which the files do not say anyhow.

    What would be added goes first; a value that the file leaves to another one (`auto`) stays so.
    """
    complete = _stated(read(_texts(wanted)))
    for index, (document, values) in enumerate(wanted):
        for key_path in sorted(values, key=lambda key_path: key_path in document.spans):
            fewer = [*wanted]
            fewer[index] = document, {key: value for key, value in wanted[index][1].items() if key != key_path}
            if _stated(read(_texts(fewer))) == complete:
                wanted = fewer
    return _texts(wanted)


def _stated(job: MergedJob) -> tuple[Any, ...]:
    facts = {name: value for name, value in job.facts.items() if name != "checkpoints_wrapped"}
    return job.options, job.settings, facts, sorted((finding.code, finding.field) for _, finding in job.findings)


def _edits(document: Document, form: Format, old: ConfigJob, new: ConfigJob) -> dict[KeyPath, Any]:
    """What a document would state differently for the new job."""
    named = {
        form.spelling(document, ".".join(map(str, key_path))): value
        for key_path, value in config_changes(form, old, new).items()
    }
    values = {tuple(key.split(".")): value for key, value in named.items() if key}
    return {path: value for path, value in values.items() if value is not None or path in document.spans}


def _changes(before: Estimate, after: Estimate) -> Iterator[str]:
    """Yield what is different, in the words of the options."""
    pairs = [
        (name, getattr(before.strategy, name), getattr(after.strategy, name))
        for name in type(before.strategy).model_fields
    ]
    pairs.append(("accumulation", before.workload.accumulation_steps, after.workload.accumulation_steps))
    for name, old, new in pairs:
        if old not in (new, ""):
            yield f"{name.replace('_', '-')} {_shown(old)} → {_shown(new)}"


def _shown(value: Any) -> str:
    """A value as an option has it.

    >>> [_shown(value) for value in ((), ("params", "optimizer"), "", None, True, 8)]
    ['none', 'params,optimizer', 'unset', 'unset', 'true', '8']
    """
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    if value in (None, ""):
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _first_of(configs: tuple[Config, ...]) -> dict[Path, Document]:
    """Each file once: a script has its own document, and those of its commands."""
    return {config.document.path: config.document for config in reversed(configs)}


def _edit(document: Document, text: str) -> CheckEdit:
    name = str(document.path)
    before = document.text.splitlines(keepends=True)
    lines = difflib.unified_diff(before, text.splitlines(keepends=True), name, f"{name} (fits)")
    return CheckEdit(path=name, diff="".join(_ended(line) for line in lines), text=text)


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
