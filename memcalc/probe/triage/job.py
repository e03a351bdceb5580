"""The job behind a failure: its estimate, what is measured beside it, and changes that the estimate proves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memcalc import api
from memcalc.errors import CombinationError, MemcalcError, MissingError
from memcalc.frameworks.capabilities import own_code
from memcalc.probe.triage.message_causes import CAUSES
from memcalc.results.names import phase_name
from memcalc.results.triage import TriageCause, TriageChange, TriageComparison, TriageShare
from memcalc.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from memcalc.results.check import CheckFix
    from memcalc.results.estimates import Estimate

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
"""Options that are tried one by one after those of the causes; first those that change no update."""
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
class TriageJob:
    """A job that was given, as options of an estimate."""

    estimate: Estimate
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    preset_dirs: tuple[str, ...]
    edited: TriageChange | None = None
    """The smallest edit of its files that ``memcalc check`` proves."""


def job_of(
    config: Iterable[str],
    plan: str | None,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
    preset_dirs: tuple[str, ...],
) -> TriageJob | None:
    """Return the job that options, config files or a saved plan describe; None where nothing describes one.

    Raises :class:`memcalc.errors.MissingError` where a part of it is not told.
    """
    paths = tuple(config)
    if plan is not None:
        if paths or options or settings:
            raise CombinationError("plan", plan, "--plan describes the whole job; drop the other job options")
        return _planned(plan, preset_dirs)
    if paths:
        return _configured(paths, options, settings, preset_dirs)
    if not options and not settings:
        return None
    absent = [f"--{name}" for name in ("model", "gpu") if options.get(name) is None]
    if absent:
        raise MissingError(f"incomplete job: add {' and '.join(absent)}, or drop the job options.")
    given = {name: value for name, value in options.items() if value is not None}
    return TriageJob(
        api.estimate(**given, settings=settings, preset_dirs=preset_dirs, advice=False), given, settings, preset_dirs
    )


def _planned(path: str, preset_dirs: tuple[str, ...]) -> TriageJob:
    from memcalc.handoff.saved import dirs_of, estimate_of, load

    saved = load(path, preset_dirs=preset_dirs)
    job = saved.plan.job
    options = {"model": job.model, "gpu": job.gpu, "node": job.node, **job.options}
    dirs = dirs_of(job, preset_dirs)
    return TriageJob(estimate_of(saved, preset_dirs=dirs), options, job.settings, dirs)


def _configured(
    paths: tuple[str, ...], options: Mapping[str, Any], settings: Mapping[str, Any], preset_dirs: tuple[str, ...]
) -> TriageJob:
    """A job from its own files; what ``memcalc check`` would edit is a change that is proved already."""
    from memcalc.preflight import check_estimate
    from memcalc.preflight.job import read_files
    from memcalc.preflight.merge import merge

    given = {name: value for name, value in options.items() if value is not None}
    answer = check_estimate(paths, settings=settings, preset_dirs=preset_dirs, **given)
    job = merge(read_files(paths), {**given, "settings": dict(settings)}, preset_dirs)
    keywords = {name: value for name, value in job.keywords.items() if name != "settings"}
    edited = None
    if answer.fix is not None:
        saves = answer.estimate.peak.device - answer.fix.peak
        edited = TriageChange(
            change=f"{_edited(answer.fix)}: {', '.join(answer.fix.changes)}",
            device=answer.fix.peak, saves=saves, verdict=answer.fix.verdict, enough=True,
        )  # fmt: skip
    return TriageJob(answer.estimate, keywords, job.settings, preset_dirs, edited=edited)


def _edited(fix: CheckFix) -> str:
    return f"edit {', '.join(edit.path for edit in fix.edits)}" if fix.edits else "by hand"


def verdict_of(estimate: Estimate) -> str:
    """The estimate in one sentence."""
    fits = {"fits": "fits", "tight": "is tight", "does-not-fit": "does not fit"}[estimate.verdict]
    peak, capacity = estimate.peak.device / GIB, estimate.budget.capacity / GIB
    return (
        f"the estimate {fits}: {peak:.2f} of {capacity:.2f} GiB per GPU ({estimate.hardware.gpus} × "
        f"{estimate.hardware.gpu}), peak: {phase_name(estimate.peak.phase)}"
    )


def comparison_of(
    estimate: Estimate, shares: tuple[TriageShare, ...], phase: str, measured: Mapping[str, int | None]
) -> tuple[TriageComparison, ...]:
    """Measured and estimated figures; components in the phase that was measured."""
    rows = []
    if shares:
        moment = _PHASES.get(phase, estimate.peak.phase)
        moment = moment if moment in estimate.phases else estimate.peak.phase
        for component, names in _COMPONENTS.items():
            size = sum(share.bytes for share in shares if share.category in names)
            terms = sum(t.bytes for t in estimate.terms if t.component == component and moment in t.phases)
            rows.append(TriageComparison(name=component, measured=size, estimated=terms))
    figures = {
        "allocated": estimate.peak.allocated,
        "reserved": estimate.peak.reserved,
        "device": estimate.peak.device,
        "outside PyTorch": estimate.budget.context + estimate.budget.libraries,
        "capacity": estimate.budget.capacity,
    }
    pairs = ((name, measured.get(name), value) for name, value in figures.items())
    rows += [
        TriageComparison(name=name, measured=size, estimated=value) for name, size, value in pairs if size is not None
    ]
    return tuple(rows)


def changes_of(job: TriageJob, causes: tuple[TriageCause, ...], lacking: int | None) -> tuple[TriageChange, ...]:
    """Changes of one word each that the estimate proves, those enough first, then what can be told.

    Enough is what fits, and saves more than the failed request lacked.
    """
    remedies = [pair for cause in causes if cause.confidence != "possible" for pair in CAUSES[cause.code].options]
    changes = [job.edited] if job.edited is not None else []
    for name, value in dict.fromkeys([*remedies, *_GENERAL]):
        changes += _proved(job, name, value, lacking)
    changes.sort(key=lambda change: (not change.enough, change.own_code, change.verdict != "fits"))
    return tuple(changes[:MOST_CHANGES])


def _proved(job: TriageJob, name: str, value: str, lacking: int | None) -> Iterator[TriageChange]:
    """The first value with which the job fits; where none does, the last one that saves something."""
    before, last = job.estimate, None
    for candidate in _values(before, name, value):
        if str(getattr(before.strategy, name, None)) == candidate:
            continue
        options = {**job.options, "global_batch": before.workload.global_batch, name: candidate}
        try:
            after = api.estimate(**options, settings=job.settings, preset_dirs=job.preset_dirs, advice=False)
        except MemcalcError:  # the framework does not have it
            continue
        saves = before.peak.device - after.peak.device
        if saves <= 0:
            continue
        fits = after.verdict != "does-not-fit"
        last = TriageChange(
            change=f"--{name.replace('_', '-')} {candidate}", device=after.peak.device, saves=saves,
            verdict=after.verdict, enough=fits and (lacking is None or saves >= lacking),
            own_code=not set(own_code(after.strategy)) <= set(own_code(before.strategy)),
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
