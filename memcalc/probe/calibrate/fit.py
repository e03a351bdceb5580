"""Fit a calibration: overheads, structural errors, reserve, times; each is written if held-back rows gain by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import catalog, validation
from memcalc._version import __version__
from memcalc.errors import MemcalcError, MissingError
from memcalc.files import array_of_tables, pairs
from memcalc.journal import Listener, Progress
from memcalc.probe.calibrate import overheads, reserves
from memcalc.probe.calibrate.rows import (
    Error,
    Row,
    allocated_errors,
    check,
    correlations,
    counted,
    gpu_of,
    listed,
    phase_errors,
    predicted,
    split,
    structural,
)
from memcalc.probe.calibrate.times import (
    FEWEST,
    TimedJob,
    TimeFit,
    constants_of,
    priors_of,
    priors_with,
    timed_job,
    unused_timings,
)
from memcalc.results.probe import Calibrated, CalibratedFigure
from memcalc.specs.calibration import Calibration, FittedConstant, Gain, Left, Residual
from memcalc.terms.overhead import figure_of, sizes_of, workspaces_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memcalc.formulas import Array
    from memcalc.specs.hardware import GPU
    from memcalc.specs.runs import Run, RunsFile

JUDGES = 3
"""Held-back figures that are needed to judge a fit."""
SIZES = ("context", "workspace", "world", "group")


@dataclass
class _FitResult:
    """The calibration as far as it is fitted, its figures, and what is left as shipped."""

    gpu: GPU
    runs: RunsFile
    preset_dirs: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of the calibration that are written."""
    figures: list[CalibratedFigure] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    residuals: list[Residual] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def calibration(self, **head: Any) -> Calibration:
        """The calibration as far as it is fitted."""
        identity = {"schema": "memcalc.calibration/1", "gpu": self.gpu.name, "memcalc": __version__}
        return Calibration.model_validate({**identity, "rows": 0, "held_back": 0, **self.fields, **head})

    def presets(self) -> validation.Presets:
        """Presets with the calibration so far."""
        return validation.Presets(self.preset_dirs, self.calibration())

    def leave(self, part: Any, reason: str) -> None:
        """Record why a part stays as shipped."""
        self.left.append(Left(part=part, reason=reason))


def calibrated(
    runs: RunsFile, gpu: str | None = None, preset_dirs: tuple[str, ...] = (), on_progress: Listener | None = None
) -> Calibrated:
    """Fit a calibration of one GPU to measured runs.

    Raises :class:`memcalc.errors.CombinationError` for rows that contradict each other, and
    :class:`memcalc.errors.MissingError` for too few of them, saying how many each figure needs.
    """
    plain = validation.Presets(preset_dirs)
    gpu_preset = gpu_of(runs, gpu, plain)
    runs_of_gpu, notes = _usable_runs(runs, gpu_preset, plain)
    check(runs_of_gpu, gpu_preset)
    rows = list(_watched(predicted(runs_of_gpu, plain), len(runs_of_gpu), "rows", on_progress))
    result = _FitResult(gpu_preset, runs, preset_dirs, notes=notes)
    fitting, held_back = split(rows)
    _overheads(result, fitting, held_back)
    if result.fields:
        repeated = _watched(predicted(runs_of_gpu, result.presets()), len(runs_of_gpu), "rows again", on_progress)
        by_id = {row.run.id: row for row in repeated}
        fitting, held_back = ([by_id[row.run.id] for row in part] for part in (fitting, held_back))
    _structure(result, [*fitting, *held_back], plain)
    _reserve(result, fitting, held_back)
    _times(result, fitting, held_back)
    used = [row for row in fitting if _contributes(row, result)]
    ids = {row.run.id for row in rows}
    return Calibrated(
        version=__version__,
        gpu=gpu_preset.name,
        figures=tuple(result.figures),
        calibration=result.calibration(
            rows=len(used),
            held_back=len(held_back),
            left=tuple(result.left),
            gain=tuple(result.gains),
            residual=tuple(result.residuals),
            note=tuple(result.notes),
            **_provenance(result, [row.run for row in used]),
        ),
        not_predicted=tuple(run.id for run in runs_of_gpu if run.id not in ids),
    )


def _watched(rows: Iterable[Row], count: int, now: str, on_progress: Listener | None) -> Iterator[Row]:
    """Yield rows as they are predicted, and report each to the listener."""
    for done, row in enumerate(rows, 1):
        if on_progress is not None:
            on_progress(Progress(done, count, now=now))
        yield row


def _contributes(row: Row, result: _FitResult) -> bool:
    """Whether a figure of the row is behind something that is written."""
    run, fields = row.run, result.fields
    ranged = "reserve" in fields and bool({"reserved", "device"} & set(run.measured.figures))
    timed = "constant" in fields and (run.seconds or run.tokens_per_second_per_gpu) is not None
    return ranged or timed or (row.beside is not None and any(name in fields for name in SIZES))


def _usable_runs(runs: RunsFile, gpu: GPU, presets: validation.Presets) -> tuple[list[Run], list[str]]:
    """The runs of the card that trained to their end, and what is said of the others."""
    of_gpu = [run for run in runs.run if presets.gpu(run.gpu).name == gpu.name]
    other = [
        run for run in of_gpu if run.gpu_memory and abs(run.gpu_memory / gpu.memory_bytes - 1) > validation.OTHER_CARD
    ]
    out_of_memory = [run for run in of_gpu if run.outcome == "oom"]
    notes = []
    if other:
        reason = f"of another card called {gpu.name}, by their capacity"
        notes.append(f"{counted(other)} {reason}: not used.")
    if out_of_memory:
        jobs = f"{counted(out_of_memory)} of jobs that ran out of memory"
        notes.append(f"{jobs}: their figures are bounds, and not used.")
    versions = {probe.torch for probe in runs.probe if presets.gpu(probe.gpu).name == gpu.name}
    if len(versions) > 1:
        notes.append(f"rows of several versions of torch were taken together: {', '.join(sorted(versions))}.")
    excluded = {run.id for run in (*other, *out_of_memory)}
    return [run for run in of_gpu if run.id not in excluded], notes


def _provenance(result: _FitResult, runs: Sequence[Run]) -> dict[str, Any]:
    """Probes, sources, versions and dates of the rows."""
    probes = [
        probe for probe in result.runs.probe if catalog.gpu(probe.gpu, result.preset_dirs).name == result.gpu.name
    ]
    days = sorted(probe.date for probe in probes)
    ids = {probe.id for probe in probes}
    sources = {run.source.partition(" ")[0].partition("@")[0] for run in runs if run.probe not in ids}
    texts = {name: tuple(sorted({getattr(p, name) for p in probes} - {""})) for name in ("torch", "cuda", "driver")}
    ends = {"first": days[0], "last": days[-1]} if days else {}
    return {"probes": tuple(sorted(ids)), "sources": tuple(sorted(sources)), **texts, **ends}


# ---------------------------------------------------------------------------------------------------------- the parts


def _overheads(result: _FitResult, fitting: Sequence[Row], held_back: Sequence[Row]) -> None:
    """Fit context, workspace and communicators; those of held-back rows must be predicted better."""
    measured = overheads.overheads_of(fitting, result.runs, result.gpu)
    result.left += measured.left
    result.residuals += measured.residuals
    result.notes += measured.notes
    if not measured.sizes:
        return
    result.fields.update(measured.sizes)
    by_id = {row.run.id: row for row in predicted([row.run for row in held_back], result.presets())}
    gains = list(overheads.gains_of(held_back, [by_id[row.run.id] for row in held_back]))
    result.gains += gains
    worse = {gain.part for gain in gains if not gain.better}
    shipped = _shipped_sizes(result.gpu)
    for name, size in measured.sizes.items():
        part = "communicators" if name in {"world", "group"} else name
        written = part not in worse
        result.figures.append(
            CalibratedFigure.model_validate(
                {"part": part, "name": name, "unit": "bytes", "shipped": shipped[name], "fitted": size.bytes}
                | {"low": size.low, "high": size.high, "rows": size.rows, "written": written}
            )
        )
        if not written:
            del result.fields[name]
            result.leave(part, f"{name}: held-back rows are predicted no better with it")
    silent = [name for name in SIZES[:1] if name in result.fields and not any(gain.part == name for gain in gains)]
    result.notes += [f"no held-back row shows the {name}: it was read, and not judged." for name in silent]


def _shipped_sizes(gpu: GPU) -> dict[str, float]:
    known = sizes_of(gpu)
    sizes = (gpu.context_bytes or figure_of(gpu, "context").bytes, workspaces_of(gpu).handle, known.world, known.group)
    return dict(zip(SIZES, map(float, sizes), strict=True))


def _structure(result: _FitResult, rows: Sequence[Row], presets: validation.Presets) -> None:
    """Report what no figure may absorb: errors of the allocated bytes, which are never fitted."""
    errors = allocated_errors(rows)
    residuals = list(structural(errors, "allocated"))
    shared = {name for residual in residuals for name in residual.rows}
    residuals += correlations([error for error in errors if error.row.run.id not in shared], presets)
    for phase, of_phase in phase_errors(rows).items():
        remaining = [error for error in of_phase if error.row.run.id not in shared]
        residuals += structural(remaining, "phase", f"phase {phase}, ")
    result.residuals += residuals


def _reserve(result: _FitResult, fitting: Sequence[Row], held_back: Sequence[Row]) -> None:
    """The range of each class of allocator, without the rows whose allocated figure is structurally wrong."""
    structural = {name for error in result.residuals if error.kind == "allocated" for name in error.rows}
    fitting, held_back = ([row for row in part if row.run.id not in structural] for part in (fitting, held_back))
    fitted, left, far = reserves.reserves_of(fitting)
    result.left += left
    if far:
        result.notes.append(f"outliers that the range was fitted without: {', '.join(sorted(far))}.")
    gains = {gain.figure: gain for gain in reserves.gains_of(held_back, fitted)}
    accepted = []
    for reserve in fitted:
        gain = gains.get(f"reserved, device ({reserve.name})")
        if gain is None or gain.rows < JUDGES:
            count = gain.rows if gain else 0
            result.leave("reserve", f"{reserve.name}: {count} held-back figures, and {JUDGES} are needed to judge it")
            continue
        result.gains.append(gain)
        if gain.better:
            accepted.append(reserve)
        else:
            result.leave("reserve", f"{reserve.name}: held-back figures are predicted no better with it")
        shipped = catalog.reserve(reserve.name)
        for name in ("low", "middle", "high", "limit"):
            values = {"unit": "-", "shipped": getattr(shipped, name), "fitted": getattr(reserve, name)}
            figure = {"part": "reserve", "name": f"{reserve.name} {name}", **values, "rows": reserve.figures}
            result.figures.append(CalibratedFigure.model_validate({**figure, "written": gain.better}))
    if accepted:
        result.fields["reserve"] = tuple(accepted)
    if fitted and structural:
        rows = counted(structural)
        result.notes.append(f"the reserve was fitted without {rows} whose allocated error is structural.")


def _times(result: _FitResult, fitting: Sequence[Row], held_back: Sequence[Row]) -> None:
    """The constants of the step-time model."""
    timed = constants_of(result.runs, result.gpu)
    result.notes += unused_timings(result.runs, result.gpu)
    jobs = [_timed(part, result) for part in (fitting, held_back)]
    counts = [len(part) for part in jobs]
    if counts[0] < FEWEST or counts[1] < JUDGES:
        too_few = f"step time: {counts[0]} timed rows to fit on and {counts[1]} held back: {FEWEST} and {JUDGES} needed"
        if timed:
            names = listed(constant.name for constant in timed)
            result.notes.append(f"{too_few}; {names} rest on timed operations only.")
            result.fields["constant"] = tuple(timed)
            _compare_constants(result, timed, written=True)
        else:
            result.leave("step time", too_few)
        return
    priors = priors_with(priors_of(result.gpu), timed)
    solver = TimeFit([job for _, job in jobs[0]], [row.family for row, _ in jobs[0]], priors)
    constants = [*solver.fit()]
    fitted = {(constant.name, constant.of) for constant in constants}
    constants += [constant for constant in timed if (constant.name, constant.of) not in fitted]
    values = {(constant.name, constant.of): constant.value for constant in constants}
    gain, before, after = _gain(jobs[1], values)
    if constants:
        result.gains.append(gain)
        _compare_constants(result, constants, written=gain.better)
    else:
        result.leave("step time", "step time: the rows tell no constant more firmly than it is shipped")
    if gain.better:
        result.fields["constant"] = tuple(constants)
    elif constants:
        result.leave("step time", "step time: held-back rows are predicted no better with it")
        values, after = {}, before
    all_jobs = [*jobs[0], *jobs[1]]
    deviations = np.concatenate([np.expm1(solver.residuals(values)), after])
    errors = [Error(row, float(value)) for (row, _), value in zip(all_jobs, deviations, strict=True)]
    result.residuals += structural(errors, "step time")


def _timed(rows: Iterable[Row], result: _FitResult) -> list[tuple[Row, TimedJob]]:
    """The rows that are timed; those that offload, and mixtures of experts, have no constant of their own."""
    presets, jobs = validation.Presets(result.preset_dirs), []
    for row in rows:
        run = row.run
        # seconds are of a step, whose batch must be known
        has_batch = "global_batch" in {**run.workload, **run.strategy}
        timed = run.tokens_per_second_per_gpu is not None or (run.seconds is not None and has_batch)
        if not timed or row.estimate.strategy.offload:
            continue
        try:
            job = timed_job(run, result.gpu, presets)
        except MemcalcError:
            continue
        if not job.model.is_moe:
            jobs.append((row, job))
    return jobs


def _gain(jobs: Sequence[tuple[Row, TimedJob]], values: dict[tuple[str, str], float]) -> tuple[Gain, Array, Array]:
    """The gain on held-back steps, and their errors before and after."""
    solver = TimeFit([job for _, job in jobs], [row.family for row, _ in jobs], priors_of(jobs[0][1].gpu))
    before, after = (np.expm1(solver.residuals(fitted)) for fitted in ({}, values))
    medians = [float(np.median(np.abs(errors)).round(4)) for errors in (before, after)]
    p90 = [float(np.quantile(np.abs(errors), 0.9).round(4)) for errors in (before, after)]
    gain = Gain.model_validate({
        "part": "step time", "figure": "step time", "unit": "share", "rows": len(jobs),
        "median": tuple(medians), "p90": tuple(p90), "better": medians[1] < medians[0],
    })  # fmt: skip
    return gain, before, after


def _compare_constants(result: _FitResult, constants: Iterable[FittedConstant], *, written: bool) -> None:
    """Append each constant with its shipped value."""
    shipped = {prior.key: prior.value for prior in priors_of(result.gpu)}
    for constant in constants:
        values = {name: getattr(constant, name) for name in ("unit", "low", "high", "rows")}
        values |= {"fitted": constant.value, "shipped": shipped.get((constant.name, constant.of)), "written": written}
        figure = {"part": "step time", "name": f"{constant.name} ({constant.of})", **values}
        result.figures.append(CalibratedFigure.model_validate(figure))


def check_fitted(answer: Calibrated) -> None:
    """Refuse rows of which no figure could be fitted at all."""
    if not answer.figures:
        reasons = "; ".join(left.reason for left in answer.calibration.left)
        raise MissingError(f"too few rows of {answer.gpu} for any figure: {reasons}.")


_TABLES = ("reserve", "constant", "gain", "left", "residual")


def calibration_text(calibration: Calibration) -> str:
    """Return the file: it reads back as the same, and the same rows write it byte for byte."""
    dumped = calibration.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    tables = {name: dumped.pop(name, ()) for name in _TABLES}
    head = "# Written by `memcalc calibrate`; what is not here stays as it is shipped.\n"
    parts = [head + pairs(dumped), *(array_of_tables(name, rows) for name, rows in tables.items() if rows)]
    return "\n".join(parts)
