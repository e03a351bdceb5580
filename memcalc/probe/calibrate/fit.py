"""The fit: overheads, then what is structural, then the reserve, then times; each kept if held-back rows gain by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import __version__, catalog, validation
from memcalc.errors import MemcalcError, MissingError
from memcalc.probe.calibrate import operations, overheads, reserves, structure
from memcalc.probe.calibrate.jobs import TimedJob, timed_job
from memcalc.probe.calibrate.rows import Row, check, counted, gpu_of, listed, predicted, split
from memcalc.probe.calibrate.times import FEWEST, TimeFit, priors_of
from memcalc.results.calibrate import Calibrated, CalibratedFigure
from memcalc.specs.calibration import Calibration, FittedConstant, Gain, Left, Residual
from memcalc.terms.overhead import DEFAULT_CONTEXT, libraries_of, workspaces_of

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.specs.hardware import GPU
    from memcalc.specs.runs import Run, RunsFile

__all__ = ["Progress", "calibrated", "refused"]

JUDGES = 3
"""Held-back figures below which nothing that was fitted on noise is believed."""
OTHER_CARD = 0.1
"""A capacity further from the preset's than this share is that of another card of the same name."""
SIZES = ("context", "workspace", "world", "group")


@dataclass(frozen=True)
class Progress:
    """How many rows are predicted."""

    done: int
    jobs: int
    resumed: int = 0
    now: str = "rows"


@dataclass
class _Found:
    """What has been found so far."""

    chip: GPU
    runs: RunsFile
    dirs: tuple[str, ...]
    known: dict[str, Any] = field(default_factory=dict)
    """Fields of the calibration: what is kept."""
    figures: list[CalibratedFigure] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    residuals: list[Residual] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def calibration(self, **head: Any) -> Calibration:
        """The calibration as far as it is known."""
        words = {"schema": "memcalc.calibration/1", "gpu": self.chip.name, "memcalc": __version__}
        return Calibration.model_validate({**words, "rows": 0, "held_back": 0, **self.known, **head})

    def presets(self) -> validation.Presets:
        """Presets with what is known so far."""
        return validation.Presets(self.dirs, self.calibration())

    def leave(self, part: Any, reason: str) -> None:
        """Say why a part stays as it is."""
        self.left.append(Left(part=part, reason=reason))


def calibrated(
    runs: RunsFile,
    gpu: str | None = None,
    preset_dirs: tuple[str, ...] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> Calibrated:
    """Fit a calibration of one GPU to measured runs.

    Raises :class:`memcalc.errors.CombinationError` for rows that contradict each other, and
    :class:`memcalc.errors.MissingError` for too few of them, saying how many each figure needs.
    """
    plain = validation.Presets(preset_dirs)
    chip = gpu_of(runs, gpu, plain)
    own, notes = _own(runs, chip, plain)
    check(own, chip)
    rows = list(_watched(predicted(own, plain), len(own), "rows", on_progress))
    found = _Found(chip, runs, preset_dirs, notes=notes)
    fit, held = split(rows)
    _overheads(found, fit, held)
    if found.known:
        anew = _watched(predicted(own, found.presets()), len(own), "rows again", on_progress)
        again = {row.run.id: row for row in anew}
        fit, held = ([again[row.run.id] for row in part] for part in (fit, held))
    _structure(found, [*fit, *held], plain)
    _reserve(found, fit, held)
    _times(found, fit, held)
    used = [row for row in fit if _counts(row, found)]
    known = {row.run.id for row in rows}
    return Calibrated(
        version=__version__,
        gpu=chip.name,
        figures=tuple(found.figures),
        calibration=found.calibration(
            rows=len(used),
            held_back=len(held),
            left=tuple(found.left),
            gain=tuple(found.gains),
            residual=tuple(found.residuals),
            note=tuple(found.notes),
            **_provenance(found, [row.run for row in used]),
        ),
        not_predicted=tuple(run.id for run in own if run.id not in known),
    )


def _watched(
    rows: Iterable[Row], count: int, now: str, on_progress: Callable[[Progress], None] | None
) -> Iterator[Row]:
    """Yield rows as they are predicted, and tell of each."""
    for done, row in enumerate(rows, 1):
        if on_progress is not None:
            on_progress(Progress(done, count, now=now))
        yield row


def _counts(row: Row, found: _Found) -> bool:
    """Whether a row has a figure that something written stands on."""
    run, known = row.run, found.known
    ranged = "reserve" in known and bool({"reserved", "device"} & set(run.measured.figures))
    timed = "constant" in known and (run.seconds or run.tokens_per_second_per_gpu) is not None
    return ranged or timed or (row.beside is not None and any(name in known for name in SIZES))


def _own(runs: RunsFile, chip: GPU, presets: validation.Presets) -> tuple[list[Run], list[str]]:
    """The runs of the card that trained to their end, and what is said of the others."""
    named = [run for run in runs.run if presets.gpu(run.gpu).name == chip.name]
    other = [run for run in named if run.gpu_memory and abs(run.gpu_memory / chip.memory_bytes - 1) > OTHER_CARD]
    out = [run for run in named if run.outcome == "oom"]
    notes = []
    if other:
        said = f"of another card called {chip.name}, by their capacity"
        notes.append(f"{counted(other)} {said}: not used.")
    if out:
        notes.append(f"{counted(out)} of jobs that ran out of memory: their figures are bounds, and not used.")
    versions = {probe.torch for probe in runs.probe if presets.gpu(probe.gpu).name == chip.name}
    if len(versions) > 1:
        notes.append(f"rows of several versions of torch were taken together: {', '.join(sorted(versions))}.")
    left = {run.id for run in (*other, *out)}
    return [run for run in named if run.id not in left], notes


def _provenance(found: _Found, runs: Sequence[Run]) -> dict[str, Any]:
    """Where the rows come from."""
    own = [probe for probe in found.runs.probe if catalog.gpu(probe.gpu, found.dirs).name == found.chip.name]
    days = sorted(probe.date for probe in own)
    ids = {probe.id for probe in own}
    sources = {run.source.partition(" ")[0].partition("@")[0] for run in runs if run.probe not in ids}
    texts = {name: tuple(sorted({getattr(p, name) for p in own} - {""})) for name in ("torch", "cuda", "driver")}
    ends = {"first": days[0], "last": days[-1]} if days else {}
    return {"probes": tuple(sorted(ids)), "sources": tuple(sorted(sources)), **texts, **ends}


# ---------------------------------------------------------------------------------------------------------- the parts


def _overheads(found: _Found, fit: Sequence[Row], held: Sequence[Row]) -> None:
    """Context, workspace and communicators; where held-back rows have them, they must gain."""
    measured = overheads.overheads_of(fit, found.runs, found.chip)
    found.left += measured.left
    found.residuals += measured.residuals
    found.notes += measured.notes
    if not measured.sizes:
        return
    found.known.update(measured.sizes)
    again = {row.run.id: row for row in predicted([row.run for row in held], found.presets())}
    gains = list(overheads.gains_of(held, [again[row.run.id] for row in held]))
    found.gains += gains
    worse = {gain.part for gain in gains if not gain.better}
    shipped = _shipped_sizes(found.chip)
    for name, size in measured.sizes.items():
        part = "communicators" if name in {"world", "group"} else name
        kept = part not in worse
        found.figures.append(
            CalibratedFigure.model_validate(
                {"part": part, "name": name, "unit": "bytes", "shipped": shipped[name], "fitted": size.bytes}
                | {"low": size.low, "high": size.high, "rows": size.rows, "written": kept}
            )
        )
        if not kept:
            del found.known[name]
            found.leave(part, f"{name}: held-back rows are predicted no better with it")
    silent = [name for name in SIZES[:1] if name in found.known and not any(gain.part == name for gain in gains)]
    found.notes += [f"no held-back row shows the {name}: it was read, and not judged." for name in silent]


def _shipped_sizes(chip: GPU) -> dict[str, float]:
    libraries = libraries_of(chip)
    sizes = (chip.context_bytes or DEFAULT_CONTEXT, workspaces_of(chip).handle, libraries.world, libraries.group)
    return dict(zip(SIZES, map(float, sizes), strict=True))


def _structure(found: _Found, rows: Sequence[Row], presets: validation.Presets) -> None:
    """Report what no figure may absorb: errors of the allocated bytes, which are never fitted."""
    errors = structure.allocated_errors(rows)
    told = list(structure.structural(errors, "allocated"))
    shared = {name for residual in told for name in residual.rows}
    told += structure.correlations([error for error in errors if error.row.run.id not in shared], presets)
    for phase, ones in structure.phase_errors(rows).items():
        rest = [error for error in ones if error.row.run.id not in shared]
        told += structure.structural(rest, "phase", f"phase {phase}, ")
    found.residuals += told


def _reserve(found: _Found, fit: Sequence[Row], held: Sequence[Row]) -> None:
    """The range of each class of allocator, without the rows whose allocated figure is structurally wrong."""
    wrong = {name for one in found.residuals if one.kind == "allocated" for name in one.rows}
    fit, held = ([row for row in part if row.run.id not in wrong] for part in (fit, held))
    fitted, left, far = reserves.reserves_of(fit)
    found.left += left
    if far:
        found.notes.append(f"outliers that the range was fitted without: {', '.join(sorted(far))}.")
    gains = {gain.figure: gain for gain in reserves.gains_of(held, fitted)}
    kept = []
    for one in fitted:
        gain = gains.get(f"reserved, device ({one.name})")
        if gain is None or gain.rows < JUDGES:
            count = gain.rows if gain else 0
            found.leave("reserve", f"{one.name}: {count} held-back figures, and {JUDGES} are needed to judge it")
            continue
        found.gains.append(gain)
        if gain.better:
            kept.append(one)
        else:
            found.leave("reserve", f"{one.name}: held-back figures are predicted no better with it")
        known = catalog.reserve(one.name)
        for name in ("low", "middle", "high", "limit"):
            value = getattr(one, name)
            found.figures.append(
                CalibratedFigure.model_validate(
                    {"part": "reserve", "name": f"{one.name} {name}", "unit": "-", "shipped": getattr(known, name)}
                    | {"fitted": value, "rows": one.figures, "written": gain.better}
                )
            )
    if kept:
        found.known["reserve"] = tuple(kept)
    if fitted and wrong:
        found.notes.append(f"the reserve was fitted without {counted(wrong)} whose allocated error is structural.")


def _times(found: _Found, fit: Sequence[Row], held: Sequence[Row]) -> None:
    """The constants of the step-time model."""
    timed = operations.constants_of(found.runs, found.chip)
    found.notes += operations.unused(found.runs, found.chip)
    jobs = [_timed(part, found) for part in (fit, held)]
    counts = [len(part) for part in jobs]
    if counts[0] < FEWEST or counts[1] < JUDGES:
        said = f"step time: {counts[0]} timed rows to fit on and {counts[1]} held back: {FEWEST} and {JUDGES} needed"
        if timed:
            found.notes.append(f"{said}; {listed(one.name for one in timed)} stand on timed operations alone.")
            found.known["constant"] = tuple(timed)
            _told(found, timed, kept=True)
        else:
            found.leave("step time", said)
        return
    priors = operations.priors_with(priors_of(found.chip), timed)
    solver = TimeFit([job for _, job in jobs[0]], [row.family for row, _ in jobs[0]], priors)
    constants = [*solver.fit()]
    fitted = {(one.name, one.of) for one in constants}
    constants += [one for one in timed if (one.name, one.of) not in fitted]
    values = {(one.name, one.of): one.value for one in constants}
    gain, before, after = _gain(jobs[1], values)
    if constants:
        found.gains.append(gain)
        _told(found, constants, kept=gain.better)
    else:
        found.leave("step time", "step time: the rows tell no constant more firmly than it is shipped")
    if gain.better:
        found.known["constant"] = tuple(constants)
    elif constants:
        found.leave("step time", "step time: held-back rows are predicted no better with it")
        values, after = {}, before
    every = [*jobs[0], *jobs[1]]
    away = np.concatenate([np.expm1(solver.residuals(values)), after])
    errors = [structure.Error(row, float(value)) for (row, _), value in zip(every, away, strict=True)]
    found.residuals += structure.structural(errors, "step time")


def _timed(rows: Iterable[Row], found: _Found) -> list[tuple[Row, TimedJob]]:
    """The rows that are timed; those that offload, and mixtures of experts, have no constant of their own."""
    presets, jobs = validation.Presets(found.dirs), []
    for row in rows:
        run = row.run
        fed = "global_batch" in {**run.workload, **run.strategy}  # seconds are of a step, whose batch must be known
        known = run.tokens_per_second_per_gpu is not None or (run.seconds is not None and fed)
        if not known or row.estimate.strategy.offload:
            continue
        try:
            job = timed_job(run, found.chip, presets)
        except MemcalcError:
            continue
        if not job.model.is_moe:
            jobs.append((row, job))
    return jobs


def _gain(jobs: Sequence[tuple[Row, TimedJob]], values: dict[tuple[str, str], float]) -> tuple[Gain, Array, Array]:
    """What held-back steps say, and their errors before and after."""
    solver = TimeFit([job for _, job in jobs], [row.family for row, _ in jobs], priors_of(jobs[0][1].gpu))
    before, after = (np.expm1(solver.residuals(known)) for known in ({}, values))
    medians = [float(np.median(np.abs(errors)).round(4)) for errors in (before, after)]
    p90 = [float(np.quantile(np.abs(errors), 0.9).round(4)) for errors in (before, after)]
    gain = Gain.model_validate({
        "part": "step time", "figure": "step time", "unit": "share", "rows": len(jobs),
        "median": tuple(medians), "p90": tuple(p90), "better": medians[1] < medians[0],
    })  # fmt: skip
    return gain, before, after


def _told(found: _Found, constants: Iterable[FittedConstant], *, kept: bool) -> None:
    """Put constants beside the shipped ones."""
    shipped = {prior.key: prior.value for prior in priors_of(found.chip)}
    for one in constants:
        found.figures.append(
            CalibratedFigure.model_validate(
                {"part": "step time", "name": f"{one.name} ({one.of})", "unit": one.unit, "fitted": one.value}
                | {"shipped": shipped.get((one.name, one.of)), "low": one.low, "high": one.high, "rows": one.rows}
                | {"written": kept}
            )
        )


def refused(answer: Calibrated) -> None:
    """Refuse rows of which no figure could be fitted at all."""
    if not answer.figures:
        reasons = "; ".join(one.reason for one in answer.calibration.left)
        raise MissingError(f"too few rows of {answer.gpu} for any figure: {reasons}.")
