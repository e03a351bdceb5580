"""Measured runs beside their predictions: errors of the figures, wrong verdicts, coverage of the interval."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from memcalc import api, calibrations, catalog
from memcalc._version import __version__
from memcalc.errors import CombinationError, MemcalcError, UnknownNameError
from memcalc.results.comparison import (
    ErrorGroup,
    RunReason,
    RunScore,
    RunThroughput,
    RunUnknown,
    RunVerdict,
    TargetResult,
    ThroughputGroup,
    Validation,
    ValidationSummary,
)
from memcalc.specs.flat import from_flat
from memcalc.specs.options import WORDS
from memcalc.specs.runs import GRADES, Measured
from memcalc.specs.strict import FIGURES
from memcalc.throughputs import orders_of, step_ranges, throughput_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memcalc.planner.job import PlanJob
    from memcalc.results.estimates import Estimate
    from memcalc.specs.calibration import Calibration
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.specs.runs import Run, RunsFile, Target
    from memcalc.specs.strict import Figure

_OF_A_RUN = ("id", "group", "grade", "gpu", "gpus", "rank", "source", "software")


def validate(
    runs: RunsFile,
    preset_dirs: Iterable[str] = (),
    *,
    calibration: str | None = calibrations.NONE,
    on_progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Predict every run and compare; a run that cannot be predicted is listed with the sentence that refused it.

    ``calibration`` is a file, which counts for the runs of its GPU; None takes the user's own of each GPU.
    ``on_progress`` is told how many runs of how many are predicted.
    """
    comparison = _Comparison()
    presets = Presets(tuple(preset_dirs), calibration)
    texts = presets.said({run.gpu for run in runs.run})
    for index, run in enumerate(runs.run):
        if on_progress is not None:
            on_progress(index, len(runs.run))
        try:
            estimate = predict(run, presets)
            comparison.add(run, estimate)
        except MemcalcError as error:
            comparison.not_modelled.append(RunReason(id=run.id, reason=str(error)))
    return comparison.answer(runs).model_copy(update={"calibrations": texts})


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
    remaining = tuple(
        run
        for run in runs.run
        if not (strict and run.assumed) and group in {None, run.group} and run.grade.startswith(grade or "")
    )
    return runs.model_copy(update={"run": remaining if figure is None else tuple(_only(remaining, figure))})


def _only(runs: Iterable[Run], figure: Figure) -> Iterator[Run]:
    for run in runs:
        if figure in run.measured.figures:
            size = run.measured.figures[figure]
            yield run.model_copy(update={"measured": Measured.model_validate({figure: size})})


OTHER_CARD = 0.1
"""A capacity further from the preset's than this share is that of another card of the same name."""


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
        self.node: Callable[[str, str], Node | None] = cache(self._node)

    def _gpu(self, name: str) -> GPU:
        chip = catalog.gpu(name, self.dirs)
        if self.given is not None:
            return chip.calibrated(self.given) if self.given.gpu == chip.name else chip
        return calibrations.applied(chip, None, look=self.look)[0]

    def _node(self, group: str, arch: str) -> Node | None:
        """The nodes that a group of published runs ran on, of those with GPUs of an architecture."""
        listed = (node for node in catalog.nodes(self.dirs) if group and group in node.runs)
        return next((node for node in listed if catalog.gpu(node.gpu, self.dirs).arch == arch), None)

    def said(self, names: Iterable[str]) -> tuple[str, ...]:
        """What is said of the calibrations that count for GPUs; one that is given must be of one of them."""
        calibrated: dict[str, Calibration | None] = {}
        for name in names:
            with suppress(MemcalcError):  # the run that names it says so
                chip = self.gpu(name)
                calibrated[chip.name] = chip.calibration
        if self.given is not None and self.given.gpu not in calibrated:
            allowed = f"it was measured on {self.given.gpu}, and the runs on {', '.join(sorted(calibrated)) or 'none'}"
            raise CombinationError("calibration", self.given.gpu, allowed)
        return tuple(calibration.said for _, calibration in sorted(calibrated.items()) if calibration is not None)


def card_of(run: Run, presets: Presets) -> GPU:
    """The GPU of a run; where its memory is another card's of the same name, that card.

    >>> from types import SimpleNamespace as Some
    >>> card_of(Some(gpu="h100", gpu_memory=95 * 2**30), Presets()).name
    'h100-96g'
    """
    chip, size = presets.gpu(run.gpu), run.gpu_memory
    if size is None or abs(size / chip.memory_bytes - 1) <= OTHER_CARD:
        return chip
    others = [presets.gpu(name) for name in catalog.names("gpu", presets.dirs) if name.startswith(f"{chip.name}-")]
    near = min([chip, *others], key=lambda card: abs(size / card.memory_bytes - 1))
    return near if abs(size / near.memory_bytes - 1) <= OTHER_CARD else chip


def predict(run: Run, presets: Presets | None = None) -> Estimate:
    """Estimate the job of a run, on its GPU with the stated capacity and context."""
    presets = presets or Presets()
    chip = card_of(run, presets)
    stated = {"memory_bytes": run.gpu_memory, "context_bytes": run.context, "eager_context_bytes": run.context}
    stated = {name: size for name, size in stated.items() if size is not None}
    options, settings = job_of(run)
    single = api.single(
        model=model_of(run, presets),
        gpu=chip.model_copy(update=stated) if stated else chip,
        settings=settings,
        preset_dirs=presets.dirs,
        **options,
    )
    return replace(single, job=on_network(single.job, run, presets)).estimate()


def on_network(job: PlanJob, run: Run, presets: Presets) -> PlanJob:
    """The job on the nodes that its published group ran on, with the network that the run itself states."""
    node = presets.node(run.group, job.gpu.arch) or job.node
    stated = {"internode_bytes_per_s_per_gpu": run.network, "adapters": run.adapters}
    stated = {name: value for name, value in stated.items() if value is not None}
    return replace(job, node=node.model_copy(update=stated))


def model_of(run: Run, presets: Presets) -> Model:
    """Return the model of a run."""
    return presets.model(run.model) if isinstance(run.model, str) else from_flat({"name": run.id, **run.model})


def job_of(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the words of a run for :func:`memcalc.estimate`, and its other fields as settings by dotted name."""
    options: dict[str, Any] = {"gpus": run.gpus}
    settings: dict[str, Any] = {}
    for table, values in (("workload", run.workload), ("strategy", run.strategy)):
        for name, value in values.items():
            if name in WORDS:
                options[name] = value
            else:
                settings[f"{table}.{name}"] = value
    return options, settings


def figures_of(run: Run, estimate: Estimate) -> Mapping[Figure, int]:
    """Return the predicted figures of the rank that was read [bytes]."""
    fullest = run.rank == "max"
    peak: Any = estimate.peak if fullest else estimate.stages[_stage(run, estimate.strategy.pp)]
    figures: dict[Figure, int] = {name: getattr(peak, name) for name in FIGURES}
    if fullest:  # the rank that allocates most need not be that which reserves most
        figures["allocated"] = max(stage.allocated for stage in estimate.stages)
    return figures


def _stage(run: Run, stages: int) -> int:
    """Return the pipeline stage of the rank that was read; stages are the slowest axis of the ranks.

    So it is in Megatron-LM (core 0.12, `parallel_state.py`: order tp-cp-ep-dp-pp) and torchtitan (the pipeline is the
    outermost dimension of the mesh, `parallel_dims.py`).
    """
    if run.rank in {"last", "first stage"}:
        return stages - 1 if run.rank == "last" else 0
    if run.rank.startswith("stage"):
        number, count = (int(word) for word in run.rank.split() if word.isdigit())
        if count != stages:
            raise CombinationError("rank", run.rank, f"the strategy has {stages} pipeline stages")
        return number - 1
    if int(run.rank) >= run.gpus:
        raise CombinationError("rank", run.rank, f"ranks go from 0 to {run.gpus - 1}")
    return int(run.rank) * stages // run.gpus


@dataclass
class _Comparison:
    scores: list[RunScore] = field(default_factory=list)
    verdicts: list[RunVerdict] = field(default_factory=list)
    unknown: list[RunUnknown] = field(default_factory=list)
    not_modelled: list[RunReason] = field(default_factory=list)
    claim: float | None = None
    speeds: list[RunThroughput] = field(default_factory=list)

    def add(self, run: Run, estimate: Estimate) -> None:
        """Take in one run; the figures of a run that ran out of memory are bounds, and are not scored.

        What failed without saying of what has no verdict either.
        """
        figures = figures_of(run, estimate)
        if run.outcome != "failed":
            self.verdicts.append(_verdict(run, estimate, run.outcome))
        self.claim = estimate.interval.coverage
        speed = throughput_of(run, estimate)
        if speed is not None:
            self.speeds.append(speed)
        if run.outcome == "fits":
            self.scores += [_score(run, estimate, name, figures) for name in run.measured.figures]
        if run.measured.unknown is not None:
            beside: dict[str, Any] = {"id": run.id, "measured": run.measured.unknown} | dict(figures)
            self.unknown.append(RunUnknown.model_validate(beside))

    def answer(self, runs: RunsFile) -> Validation:
        """Return all of it with its summaries."""
        return Validation(
            version=__version__,
            runs=tuple(self.scores),
            summary=self._summary(),
            groups=tuple(_groups(self.scores)),
            targets=tuple(_target(target, self.scores, runs) for target in runs.target),
            verdicts=tuple(self.verdicts),
            throughput=tuple(self.speeds),
            throughput_groups=tuple(_speed_groups(self.speeds)),
            ranges=tuple(step_ranges()),
            orders=tuple(orders_of(self.speeds)),
            unknown=tuple(self.unknown),
            explained=_explained(runs),
            not_modelled=tuple(self.not_modelled),
            left_out=tuple(RunReason(id=entry.id, reason=entry.reason) for entry in runs.left_out),
        )

    def _summary(self) -> ValidationSummary:
        ranged = [score.within for score in self.scores if score.figure != "allocated"]
        wrong = [verdict.outcome for verdict in self.verdicts if verdict.wrong]
        outcomes = [verdict.outcome for verdict in self.verdicts]
        return ValidationSummary(
            **summary_of([(score.error, score.id) for score in self.scores]),
            false_fits=wrong.count("oom"),
            ran_out=outcomes.count("oom"),
            false_rejects=wrong.count("fits"),
            ran=outcomes.count("fits"),
            covered=sum(ranged),
            covered_of=len(ranged),
            coverage_claim=self.claim,
        )


def _verdict(run: Run, estimate: Estimate, outcome: Literal["fits", "oom"]) -> RunVerdict:
    return RunVerdict(
        id=run.id,
        group=run.group,
        outcome=outcome,
        verdict=estimate.verdict,
        device=estimate.peak.device,
        capacity=estimate.budget.capacity,
        wrong=estimate.verdict == {"oom": "fits", "fits": "does-not-fit"}[outcome],
    )


def _score(run: Run, estimate: Estimate, name: Figure, figures: Mapping[Figure, int]) -> RunScore:
    measured, predicted = run.measured.figures[name], figures[name]
    moved = measured + estimate.peak.device - predicted
    return RunScore(
        **{name: getattr(run, name) for name in _OF_A_RUN},
        figure=name,
        measured=measured,
        predicted=predicted,
        error=predicted / measured - 1,
        within=estimate.interval.low <= moved <= estimate.interval.high,
        framework=str(run.strategy.get("framework", estimate.strategy.framework)),
    )


def _explained(runs: RunsFile) -> tuple[RunReason, ...]:
    known = {run.id for run in runs.run}
    listed = ((name, entry.reason) for entry in runs.explained for name in entry.every_id)
    return tuple(RunReason(id=name, reason=reason) for name, reason in listed if name in known)


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


def _groups(scores: Sequence[RunScore]) -> list[ErrorGroup]:
    """Return the errors by group, framework and GPU, each for one figure, and by figure alone."""
    errors_by: dict[tuple[str, str, Figure], list[tuple[float, str]]] = {}
    for score in scores:
        kinds = {"group": score.group, "framework": score.framework, "gpu": score.gpu, "figure": score.figure}
        for by, name in kinds.items():
            errors_by.setdefault((by, name, score.figure), []).append((score.error, score.id))
    return [
        ErrorGroup.model_validate({"by": by, "name": name, "figure": figure, **summary_of(errors)})
        for (by, name, figure), errors in sorted(errors_by.items())
    ]


def _speed_groups(speeds: Sequence[RunThroughput]) -> Iterator[ThroughputGroup]:
    """Return the errors of throughput by group, then of all; beside them what the fit found of a source left out."""
    known = {row.name: row for row in catalog.step_time().error if row.name != "all"}
    for name in (*sorted({speed.group for speed in speeds}), "all"):
        of_group = [speed for speed in speeds if name in {speed.group, "all"}]
        covered = sum(speed.within for speed in of_group)
        yield ThroughputGroup(
            **summary_of([(speed.error, speed.id) for speed in of_group]),
            name=name,
            covered=covered,
            left_out_median=known[name].crossed_median if name in known else None,
            left_out_p90=known[name].crossed_p90 if name in known else None,
        )


def _target(target: Target, scores: Iterable[RunScore], runs: RunsFile) -> TargetResult:
    counted = {run.id for run in runs.run if _counts(target, run)}
    reached = summary_of([(s.error, s.id) for s in scores if s.id in counted and s.figure == target.figure])
    met = None
    if reached["count"]:
        met = reached["median_abs_error"] <= target.median and reached["p90_abs_error"] <= target.p90
    return TargetResult(
        **reached, name=target.name, figure=target.figure, median_target=target.median, p90_target=target.p90, met=met
    )


def _counts(target: Target, run: Run) -> bool:
    wanted = all(_field(run, name) in values for name, values in target.only.items())
    return wanted and not any(_field(run, name) in values for name, values in target.never.items())


def _field(run: Run, name: str) -> Any:
    """Return a field of a run by its dotted name, and "" where the run does not give it."""
    first, _, rest = name.partition(".")
    value = getattr(run, first, "")
    return value.get(rest, "") if rest and isinstance(value, dict) else value
