"""The smallest edit of a job's own files that makes it fit."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from memcalc import api
from memcalc.convert.config import Config
from memcalc.convert.document import Document, Place
from memcalc.convert.edits import edited, edited_parts
from memcalc.convert.formats import format_named
from memcalc.convert.formats.base import Format, changes
from memcalc.convert.job import Job
from memcalc.errors import MemcalcError
from memcalc.preflight.gather import gathered
from memcalc.preflight.join import Joined, joined
from memcalc.results import CheckEdit, CheckFix, Estimate, Plan

__all__ = ["smallest_fix"]

_WORDS = ("micro_batch", "recompute", "zero", "offload")
"""What an edit may change, in the order in which equal edits are preferred: none changes what is learned."""
_UNTOUCHED = (
    "framework", "precision", "optimizer", "tp", "pp", "cp", "ep", "attention", "loss", "kernels", "lora", "quantize",
)  # fmt: skip
"""What the edited files must say as before."""
_STAY = ("precision", "optimizer", "recompute", "zero", "tp", "pp", "cp", "ep", "micro_batch")
"""What a search would try, and an edit leaves as it is unless it is one of the words above."""


def smallest_fix(
    paths: tuple[str, ...],
    configs: tuple[Config, ...],
    job: Joined,
    estimate: Estimate,
    given: Mapping[str, Any],
    dirs: tuple[str, ...],
) -> CheckFix | None:
    """Return the edit of the fewest settings that makes the job fit, of those the fastest; None where there is none.

    What is predicted to be fast by times that no run has validated, such as those of offload, comes after the others.

    The global batch stays. Each edit is proved: the files as edited are read, joined and estimated again. One that is
    tight is taken where none fits.
    """
    tight: CheckFix | None = None
    open_words = _choices(configs, estimate, given)
    for count in range(1, len(open_words) + 1):
        sets = combinations(open_words, count)
        plans = [plan for words in sets for plan in _plans(words, open_words, job, estimate, dirs)]
        for plan in sorted(plans, key=lambda plan: (not plan.time.validated, plan.time.step)):
            fix = _proved(plan, paths, configs, estimate, given, dirs)
            if fix is not None and fix.verdict == "fits":
                return fix
            tight = tight or fix
    return tight


def _choices(configs: tuple[Config, ...], estimate: Estimate, given: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The words that some file of the job can say, and the user did not pin, with the values that are tried."""
    found: dict[str, tuple[Any, ...]] = {}
    for word in _WORDS:
        if given.get(word) is not None:
            continue
        for config in configs:
            values = format_named(config.format).choices
            if word in values:
                found[word] = found.get(word) or (_smaller(estimate) if word == "micro_batch" else values[word])
    return {word: values for word, values in found.items() if values}


def _smaller(estimate: Estimate) -> tuple[int, ...]:
    """Smaller micro-batches that divide the ranks' share of the batch."""
    share = estimate.workload.micro_batch * estimate.workload.accumulation_steps
    return tuple(size for size in range(1, estimate.workload.micro_batch) if share % size == 0)


def _plans(
    words: tuple[str, ...],
    choices: Mapping[str, tuple[Any, ...]],
    job: Joined,
    estimate: Estimate,
    dirs: tuple[str, ...],
) -> Iterator[Plan]:
    """Yield the fastest strategy that fits when some words are free and all else stays."""
    own = {name: job.facts[name] for name in ("model", "gpu", "node") if job.facts.get(name) is not None}
    said = {name: value for name, value in job.words.items() if value not in (None, ())}
    stays = {name: getattr(estimate.strategy, name) for name in _STAY}
    stays["offload"] = ",".join(estimate.strategy.offload) or "none"
    whole = "zero" in words or estimate.strategy.zero >= 2  # what is not sharded does not leave the GPU
    free = {word: "/".join(str(one) for one in choices[word] if whole or "params" not in str(one)) for word in words}
    asked = {**stays, **said, "global_batch": estimate.workload.global_batch, **free}
    try:
        answer = api.plan(**own, **asked, settings=job.settings, preset_dirs=dirs, top=1, advice=False)
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
    from memcalc.preflight.answer import estimated

    old = Job.of(before)
    new = Job.of(before.model_copy(update={
        "strategy": plan.strategy,
        "workload": before.workload.model_copy(update={
            "micro_batch": plan.strategy.micro_batch, "accumulation_steps": plan.accumulation_steps,
        }),
    }))  # fmt: skip
    try:
        wanted = [(config.document, _own(config.document, format_named(config.format), old, new)) for config in configs]
        if not any(found for _, found in wanted):
            return None
        texts = _needed(wanted, lambda texts: joined(gathered(paths, texts), given, dirs))
        after = estimated(joined(gathered(paths, texts), given, dirs), dirs)
    except MemcalcError:
        return None
    if after.verdict == "does-not-fit" or after.workload.global_batch != before.workload.global_batch:
        return None
    if any(getattr(after.strategy, name) != getattr(before.strategy, name) for name in _UNTOUCHED):
        return None
    return CheckFix(
        changes=tuple(_changes(before, after)),
        edits=tuple(_edit(document, texts[path]) for path, document in _first_of(configs).items() if path in texts),
        peak=after.peak.device,
        verdict=after.verdict,
    )


Wanted = list[tuple[Document, dict[Place, Any]]]


def _texts(wanted: Wanted) -> dict[Path, str]:
    """Return the edited text of each file that says something differently for the new job."""
    files: dict[Path, Wanted] = {}
    for document, found in wanted:
        if found:
            files.setdefault(document.path, []).append((document, found))
    return {path: edited_parts(parts) if len(parts) > 1 else edited(*parts[0]) for path, parts in files.items()}


def _needed(wanted: Wanted, read: Callable[[dict[Path, str]], Joined]) -> dict[Path, str]:
    """Return the edited texts, without changes that say nothing which the files do not say anyhow.

    What would be added goes first; a value that the file leaves to another one (`auto`) stays so.
    """
    whole = _said(read(_texts(wanted)))
    for at, (document, found) in enumerate(wanted):
        for place in sorted(found, key=lambda place: place in document.spans):
            fewer = [*wanted]
            fewer[at] = document, {key: value for key, value in wanted[at][1].items() if key != place}
            if _said(read(_texts(fewer))) == whole:
                wanted = fewer
    return _texts(wanted)


def _said(job: Joined) -> tuple[Any, ...]:
    facts = {name: value for name, value in job.facts.items() if name != "checkpoints_wrapped"}
    return job.words, job.settings, facts, sorted((finding.code, finding.field) for _, finding in job.findings)


def _own(document: Document, form: Format, old: Job, new: Job) -> dict[Place, Any]:
    named = {
        form.spelling(document, ".".join(map(str, place))): value for place, value in changes(form, old, new).items()
    }
    places = {tuple(key.split(".")): value for key, value in named.items() if key}
    return {place: value for place, value in places.items() if value is not None or place in document.spans}


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
    return (",".join(value) or "none") if isinstance(value, tuple) else str(value)


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
