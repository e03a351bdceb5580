"""The job behind a failure: its estimate, what is measured beside it, and changes that the estimate proves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memcalc import api
from memcalc.errors import CombinationError, MemcalcError, MissingError
from memcalc.probe.triage.causes import KNOWN
from memcalc.results import Estimate
from memcalc.results.triage import TriageCause, TriageChange, TriageComparison, TriageShare
from memcalc.units import GIB

__all__ = ["Job", "changes_of", "comparison_of", "job_of", "verdict_of"]

_GENERAL = (
    ("micro_batch", ""),
    ("recompute", "full"),
    ("loss", "fused-linear"),
    ("zero", "1"),
    ("zero", "2"),
    ("zero", "3"),
    ("optimizer_impl", "fused"),
    ("optimizer", "adamw-8bit"),
    ("offload", "optimizer"),
)
"""Words that are tried one by one where the cause has none of its own; those first that change no update."""
_COMPONENTS = {
    "parameters": ("parameters", "gathered weights"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer states",),
    "activations": ("activations", "logits", "attention scores", "evaluation", "temporaries", "backward temporaries",
        "backward", "inputs", "kept from earlier steps"),
    "buffers": ("workspaces", "optimizer temporaries"),
}  # fmt: skip
_PHASES = {
    "forward": "forward-last",
    "loss": "forward",
    "backward": "loss",
    "recompute": "backward-last",
    "optimizer": "step",
}
MOST_CHANGES = 5


@dataclass(frozen=True)
class Job:
    """A job that was given, as words of an estimate."""

    estimate: Estimate
    words: Mapping[str, Any]
    settings: Mapping[str, Any]
    dirs: tuple[str, ...]
    edited: TriageChange | None = None
    """The smallest edit of its files that ``memcalc check`` proves."""


def job_of(
    config: Iterable[str],
    plan: str | None,
    words: Mapping[str, Any],
    settings: Mapping[str, Any],
    dirs: tuple[str, ...],
) -> Job | None:
    """Return the job that options, config files or a saved plan describe; None where nothing describes one.

    Raises :class:`memcalc.errors.MissingError` where a part of it is not told.
    """
    paths = tuple(config)
    if plan is not None:
        if paths or words or settings:
            raise CombinationError("plan", plan, "a saved plan tells the whole job: leave its other options out")
        return _planned(plan, dirs)
    if paths:
        return _configured(paths, words, settings, dirs)
    if not words and not settings:
        return None
    absent = [f"--{name}" for name in ("model", "gpu") if words.get(name) is None]
    if absent:
        raise MissingError(f"the job is told in part: give {' and '.join(absent)} too, or leave the job out.")
    given = {name: value for name, value in words.items() if value is not None}
    return Job(api.estimate(**given, settings=settings, preset_dirs=dirs), given, settings, dirs)


def _planned(path: str, dirs: tuple[str, ...]) -> Job:
    from memcalc.handoff.saved import estimate_of, load, words_of

    saved = load(path, preset_dirs=dirs)
    job = saved.job
    words = {"model": job.model, "gpu": job.gpu, "node": job.node, **words_of(saved)}
    return Job(estimate_of(saved, preset_dirs=dirs), words, job.settings, dirs)


def _configured(
    paths: tuple[str, ...], words: Mapping[str, Any], settings: Mapping[str, Any], dirs: tuple[str, ...]
) -> Job:
    """A job from its own files; what ``memcalc check`` would edit is a change that is proved already."""
    from memcalc.preflight import check
    from memcalc.preflight.gather import gathered
    from memcalc.preflight.join import joined

    given = {name: value for name, value in words.items() if value is not None}
    answer = check(paths, settings=settings, preset_dirs=dirs, **given)
    job = joined(gathered(paths), {**given, "settings": dict(settings)}, dirs)
    own = {name: job.facts[name] for name in ("model", "gpu", "node") if job.facts.get(name) is not None}
    said = {name: value for name, value in job.words.items() if value not in (None, ())}
    edited = None
    if answer.fix is not None:
        saves = answer.estimate.peak.device - answer.fix.peak
        edited = TriageChange(
            change=f"edit {', '.join(edit.path for edit in answer.fix.edits)}: {', '.join(answer.fix.changes)}",
            device=answer.fix.peak, saves=saves, verdict=answer.fix.verdict, enough=True,
        )  # fmt: skip
    return Job(answer.estimate, {**own, **said}, job.settings, dirs, edited=edited)


def verdict_of(estimate: Estimate) -> str:
    """What the estimate says, in one sentence."""
    fits = {"fits": "fits", "tight": "is tight", "does-not-fit": "does not fit"}[estimate.verdict]
    peak, whole = estimate.peak.device / GIB, estimate.budget.capacity / GIB
    return (
        f"the estimate {fits}: {peak:.2f} of {whole:.2f} GiB on each of {estimate.hardware.gpus} "
        f"{estimate.hardware.gpu}, the peak in {estimate.peak.phase}"
    )


def comparison_of(
    estimate: Estimate, shares: tuple[TriageShare, ...], phase: str, measured: Mapping[str, int | None]
) -> tuple[TriageComparison, ...]:
    """Measured figures beside the estimate's; components in the phase that was measured."""
    found = []
    if shares:
        moment = _PHASES.get(phase, estimate.peak.phase)
        moment = moment if moment in estimate.phases else estimate.peak.phase
        for component, names in _COMPONENTS.items():
            size = sum(one.bytes for one in shares if one.category in names)
            terms = sum(t.bytes for t in estimate.terms if t.component == component and moment in t.phases)
            found.append(TriageComparison(name=component, measured=size, estimated=terms))
    figures = {
        "allocated": estimate.peak.allocated,
        "reserved": estimate.peak.reserved,
        "device": estimate.peak.device,
        "outside PyTorch": estimate.budget.context + estimate.budget.libraries,
        "capacity": estimate.budget.capacity,
    }
    pairs = ((name, measured.get(name), value) for name, value in figures.items())
    found += [
        TriageComparison(name=name, measured=size, estimated=value) for name, size, value in pairs if size is not None
    ]
    return tuple(found)


def changes_of(job: Job, causes: tuple[TriageCause, ...], lacking: int | None) -> tuple[TriageChange, ...]:
    """Changes of one word each that the estimate proves, those enough first, in the order of the causes.

    Enough is what fits, and saves more than the failed request lacked.
    """
    wanted = [pair for one in causes if one.confidence != "possible" for pair in KNOWN[one.code].words]
    found = [job.edited] if job.edited is not None else []
    for name, value in dict.fromkeys([*wanted, *_GENERAL]):
        found += _proved(job, name, value, lacking)
    found.sort(key=lambda one: (not one.enough, one.verdict != "fits"))
    return tuple(found[:MOST_CHANGES])


def _proved(job: Job, name: str, value: str, lacking: int | None) -> Iterator[TriageChange]:
    """The first value with which the job fits; where none does, the last one that saves something."""
    before, last = job.estimate, None
    for word in _values(before, name, value):
        if str(getattr(before.strategy, name, None)) == word:
            continue
        words = {**job.words, "global_batch": before.workload.global_batch, name: word}
        try:
            after = api.estimate(**words, settings=job.settings, preset_dirs=job.dirs)
        except MemcalcError:  # the framework does not have it
            continue
        saves = before.peak.device - after.peak.device
        if saves <= 0:
            continue
        fits = after.verdict != "does-not-fit"
        last = TriageChange(
            change=f"--{name.replace('_', '-')} {word}", device=after.peak.device, saves=saves, verdict=after.verdict,
            enough=fits and (lacking is None or saves >= lacking),
        )  # fmt: skip
        if last.enough:
            break
    if last is not None:
        yield last


def _values(estimate: Estimate, name: str, value: str) -> Iterator[str]:
    """The value, or the micro-batches below the job's that divide its share of the batch, the largest first."""
    if name != "micro_batch":
        if name == "zero" and (int(value) <= estimate.strategy.zero):
            return
        if name == "optimizer" and "8bit" in estimate.strategy.optimizer:
            return
        yield value
        return
    share = estimate.workload.micro_batch * estimate.workload.accumulation_steps
    yield from (str(size) for size in range(estimate.workload.micro_batch - 1, 0, -1) if share % size == 0)
