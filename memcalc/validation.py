"""Measured runs beside their predictions: errors of the figures, wrong verdicts, coverage of the interval."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import __version__, api, calibrations, catalog, results
from memcalc.errors import CombinationError, MemcalcError, UnknownNameError
from memcalc.planner.request import WORDS
from memcalc.specs.flat import from_flat
from memcalc.specs.runs import FIGURES, GRADES, Measured

if TYPE_CHECKING:
    from memcalc.specs.calibration import Calibration
    from memcalc.specs.hardware import GPU
    from memcalc.specs.model import Model
    from memcalc.specs.runs import Figure, Run, RunsFile, Target

__all__ = ["Presets", "chosen", "job_of", "model_of", "predict", "summary_of", "validate"]


def validate(
    runs: RunsFile,
    preset_dirs: Iterable[str] = (),
    *,
    calibration: str | None = calibrations.NONE,
    on_progress: Callable[[int, int], None] | None = None,
) -> results.Validation:
    """Predict every run and compare; a run that cannot be predicted is listed with the sentence that refused it.

    ``calibration`` is a file, which counts for the runs of its GPU; None takes the user's own of each GPU.
    ``on_progress`` is told how many runs of how many are predicted.
    """
    comparison = _Comparison()
    presets = Presets(tuple(preset_dirs), calibration)
    said = presets.said({run.gpu for run in runs.run})
    for place, run in enumerate(runs.run):
        if on_progress is not None:
            on_progress(place, len(runs.run))
        try:
            estimate = predict(run, presets)
            comparison.add(run, estimate)
        except MemcalcError as error:
            comparison.not_modelled.append(results.RunReason(id=run.id, reason=str(error)))
    return comparison.answer(runs).model_copy(update={"calibrations": said})


def chosen(
    runs: RunsFile,
    *,
    strict: bool = False,
    group: str | None = None,
    grade: str | None = None,
    figure: Figure | None = None,
) -> RunsFile:
    """Return the file with only some of its runs and figures.

    Parameters
    ----------
    strict : leave out runs with a field that was filled from context [-]
    group : only this group [-]
    grade : only grades that begin so; A keeps A- too [-]
    figure : score this figure alone, and only runs that have it [-]

    Raises :class:`memcalc.errors.UnknownNameError` for a group or a grade that no run can have.
    """
    groups = sorted({run.group for run in runs.run})
    if group is not None and group not in groups:
        raise UnknownNameError("group", group, f"must be one of {', '.join(groups)}", groups)
    if grade not in {None, *GRADES}:
        raise UnknownNameError("grade", str(grade), f"must be one of {', '.join(GRADES)}", GRADES)
    kept = tuple(
        run
        for run in runs.run
        if not (strict and run.assumed) and group in {None, run.group} and run.grade.startswith(grade or "")
    )
    return runs.model_copy(update={"run": kept if figure is None else tuple(_only(kept, figure))})


def _only(runs: Iterable[Run], figure: Figure) -> Iterator[Run]:
    """Yield the runs that have a figure, without their others."""
    for run in runs:
        if figure in run.measured.figures:
            size = run.measured.figures[figure]
            yield run.model_copy(update={"measured": Measured.model_validate({figure: size})})


# ------------------------------------------------------------------------------------------------------------ one run


class Presets:
    """Models and GPUs by name, each read once; GPUs with their calibration, where one is given or looked for."""

    def __init__(self, dirs: tuple[str, ...] = (), calibration: str | Calibration | None = calibrations.NONE) -> None:
        self.dirs = dirs
        named = calibration if isinstance(calibration, str) and calibration != calibrations.NONE else None
        ready = None if calibration is None or isinstance(calibration, str) else calibration
        self.given = ready if named is None else calibrations.read(named)
        self.look = calibration is None
        self.model: Callable[[str], Model] = cache(lambda name: api.load_model(name, dirs))
        self.gpu: Callable[[str], GPU] = cache(self._gpu)

    def _gpu(self, name: str) -> GPU:
        chip = catalog.gpu(name, self.dirs)
        if self.given is not None:
            return chip.calibrated(self.given) if self.given.gpu == chip.name else chip
        return calibrations.applied(chip, None, look=self.look)[0]

    def said(self, names: Iterable[str]) -> tuple[str, ...]:
        """What is said of the calibrations that count for GPUs; one that is given must be of one of them."""
        found: dict[str, Calibration | None] = {}
        for name in names:
            with suppress(MemcalcError):  # the run that names it says so
                chip = self.gpu(name)
                found[chip.name] = chip.calibration
        if self.given is not None and self.given.gpu not in found:
            allowed = f"it was measured on {self.given.gpu}, and the runs on {', '.join(sorted(found)) or 'none'}"
            raise CombinationError("calibration", self.given.gpu, allowed)
        return tuple(one.said for _, one in sorted(found.items()) if one is not None)


def predict(run: Run, presets: Presets | None = None) -> results.Estimate:
    """Estimate the job of a run, on its GPU with the stated capacity and context."""
    presets = presets or Presets()
    chip = presets.gpu(run.gpu)
    stated = {"memory_bytes": run.gpu_memory, "context_bytes": run.context, "eager_context_bytes": run.context}
    stated = {name: size for name, size in stated.items() if size is not None}
    words, settings = job_of(run)
    return api.estimate(
        model=model_of(run, presets),
        gpu=chip.model_copy(update=stated) if stated else chip,
        settings=settings,
        preset_dirs=presets.dirs,
        **words,
    )


def model_of(run: Run, presets: Presets) -> Model:
    """Return the model of a run."""
    return presets.model(run.model) if isinstance(run.model, str) else from_flat({"name": run.id, **run.model})


def job_of(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the words of a run for :func:`memcalc.estimate`, and its other fields as settings by dotted name."""
    words: dict[str, Any] = {"gpus": run.gpus}
    settings: dict[str, Any] = {}
    for table, values in (("workload", run.workload), ("strategy", run.strategy)):
        for name, value in values.items():
            if name in WORDS:
                words[name] = value
            else:
                settings[f"{table}.{name}"] = value
    return words, settings


def figures_of(run: Run, estimate: results.Estimate) -> Mapping[Figure, int]:
    """Return the predicted figures of the rank that was read [bytes]."""
    place: Any = estimate.peak if run.rank == "max" else estimate.stages[_stage(run, estimate.strategy.pp)]
    return {name: getattr(place, name) for name in FIGURES}


def _stage(run: Run, stages: int) -> int:
    """Return the pipeline stage of the rank that was read; stages are the slowest axis of the ranks.

    So it is in Megatron-LM (core 0.12, `parallel_state.py`: order tp-cp-ep-dp-pp) and torchtitan (the pipeline is the
    outermost dimension of the mesh, `parallel_dims.py`).
    """
    if run.rank in {"last", "first stage"}:
        return stages - 1 if run.rank == "last" else 0
    if run.rank.startswith("stage"):
        place, count = (int(word) for word in run.rank.split() if word.isdigit())
        if count != stages:
            raise CombinationError("rank", run.rank, f"the strategy has {stages} pipeline stages")
        return place - 1
    if int(run.rank) >= run.gpus:
        raise CombinationError("rank", run.rank, f"ranks go from 0 to {run.gpus - 1}")
    return int(run.rank) * stages // run.gpus


# ----------------------------------------------------------------------------------------------------------- all runs


@dataclass
class _Comparison:
    """What has been compared so far."""

    scores: list[results.RunScore] = field(default_factory=list)
    verdicts: list[results.RunVerdict] = field(default_factory=list)
    unknown: list[results.RunUnknown] = field(default_factory=list)
    not_modelled: list[results.RunReason] = field(default_factory=list)
    claim: float | None = None

    def add(self, run: Run, estimate: results.Estimate) -> None:
        """Take in one run; the figures of a run that ran out of memory are bounds, and are not scored."""
        figures = figures_of(run, estimate)
        self.verdicts.append(_verdict(run, estimate))
        self.claim = estimate.interval.coverage
        if run.outcome == "fits":
            self.scores += [_score(run, estimate, name, figures) for name in run.measured.figures]
        if run.measured.unknown is not None:
            beside: dict[str, Any] = {"id": run.id, "measured": run.measured.unknown} | dict(figures)
            self.unknown.append(results.RunUnknown.model_validate(beside))

    def answer(self, runs: RunsFile) -> results.Validation:
        """Return all of it with its summaries."""
        return results.Validation(
            version=__version__,
            runs=tuple(self.scores),
            summary=self._summary(),
            groups=tuple(_groups(self.scores)),
            targets=tuple(_target(target, self.scores, runs) for target in runs.target),
            verdicts=tuple(self.verdicts),
            unknown=tuple(self.unknown),
            explained=_explained(runs),
            not_modelled=tuple(self.not_modelled),
            left_out=tuple(results.RunReason(id=entry.id, reason=entry.reason) for entry in runs.left_out),
        )

    def _summary(self) -> results.ValidationSummary:
        ranged = [score.within for score in self.scores if score.figure != "allocated"]
        wrong = [verdict.outcome for verdict in self.verdicts if verdict.wrong]
        outcomes = [verdict.outcome for verdict in self.verdicts]
        return results.ValidationSummary(
            **summary_of([(score.error, score.id) for score in self.scores]),
            false_fits=wrong.count("oom"),
            ran_out=outcomes.count("oom"),
            false_rejects=wrong.count("fits"),
            ran=outcomes.count("fits"),
            covered=sum(ranged),
            covered_of=len(ranged),
            coverage_claim=self.claim,
        )


def _verdict(run: Run, estimate: results.Estimate) -> results.RunVerdict:
    return results.RunVerdict(
        id=run.id,
        group=run.group,
        outcome=run.outcome,
        verdict=estimate.verdict,
        device=estimate.peak.device,
        capacity=estimate.budget.capacity,
        wrong=estimate.verdict == {"oom": "fits", "fits": "does-not-fit"}[run.outcome],
    )


def _score(run: Run, estimate: results.Estimate, name: Figure, figures: Mapping[Figure, int]) -> results.RunScore:
    measured, predicted = run.measured.figures[name], figures[name]
    moved = measured + estimate.peak.device - predicted
    return results.RunScore(
        id=run.id,
        figure=name,
        measured=measured,
        predicted=predicted,
        error=predicted / measured - 1,
        within=estimate.interval.low <= moved <= estimate.interval.high,
        group=run.group,
        grade=run.grade,
        framework=str(run.strategy.get("framework", estimate.strategy.framework)),
        gpu=run.gpu,
        gpus=run.gpus,
        rank=run.rank,
        source=run.source,
        software=run.software,
    )


def _explained(runs: RunsFile) -> tuple[results.RunReason, ...]:
    """Return one entry for each run that is explained and is among the runs."""
    known = {run.id for run in runs.run}
    listed = ((name, entry.reason) for entry in runs.explained for name in entry.every_id)
    return tuple(results.RunReason(id=name, reason=reason) for name, reason in listed if name in known)


# ---------------------------------------------------------------------------------------------------------- summaries


def summary_of(errors: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Return count, median, 90th percentile and worst of |error|; `errors` are pairs of an error and a run's id.

    >>> summary_of([(-0.1, "a"), (0.3, "b"), (0.2, "c")])["median_abs_error"]
    0.2
    """
    if not errors:
        return dict.fromkeys(("median_abs_error", "p90_abs_error", "worst", "worst_id")) | {"count": 0}
    sizes = [abs(error) for error, _ in errors]
    worst = max(range(len(sizes)), key=sizes.__getitem__)
    return {
        "count": len(sizes),
        "median_abs_error": float(np.quantile(sizes, 0.5)),
        "p90_abs_error": float(np.quantile(sizes, 0.9)),
        "worst": sizes[worst],
        "worst_id": errors[worst][1],
    }


def _groups(scores: Sequence[results.RunScore]) -> list[results.ErrorGroup]:
    """Return the errors by group, framework and GPU, each for one figure, and by figure alone."""
    found: dict[tuple[str, str, Figure], list[tuple[float, str]]] = {}
    for score in scores:
        kinds = {"group": score.group, "framework": score.framework, "gpu": score.gpu, "figure": score.figure}
        for by, name in kinds.items():
            found.setdefault((by, name, score.figure), []).append((score.error, score.id))
    return [
        results.ErrorGroup.model_validate({"by": by, "name": name, "figure": figure, **summary_of(errors)})
        for (by, name, figure), errors in sorted(found.items())
    ]


def _target(target: Target, scores: Iterable[results.RunScore], runs: RunsFile) -> results.TargetResult:
    """Return what was reached of an aim by the runs that it speaks of."""
    counted = {run.id for run in runs.run if _counts(target, run)}
    reached = summary_of([(s.error, s.id) for s in scores if s.id in counted and s.figure == target.figure])
    met = None
    if reached["count"]:
        met = reached["median_abs_error"] <= target.median and reached["p90_abs_error"] <= target.p90
    return results.TargetResult(
        **reached,
        name=target.name,
        figure=target.figure,
        median_target=target.median,
        p90_target=target.p90,
        met=met,
    )


def _counts(target: Target, run: Run) -> bool:
    """Say whether an aim speaks of a run."""
    wanted = all(_field(run, name) in values for name, values in target.only.items())
    return wanted and not any(_field(run, name) in values for name, values in target.never.items())


def _field(run: Run, name: str) -> Any:
    """Return a field of a run by its dotted name, and "" where the run does not give it."""
    first, _, rest = name.partition(".")
    value = getattr(run, first, "")
    return value.get(rest, "") if rest and isinstance(value, dict) else value
