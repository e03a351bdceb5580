"""What ``memcalc validate`` answers: measured figures beside predicted ones, and their errors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.results.estimates import Verdict
from memcalc.specs.model import Frozen
from memcalc.specs.runs import Figure


class RunScore(Frozen):
    """One measured figure beside the predicted one [bytes]; ``error`` is predicted / measured - 1."""

    id: str
    figure: Figure
    measured: int
    predicted: int
    error: float
    within: bool
    """Whether the measured figure lies within the interval, moved from ``device`` at the peak to this figure."""
    group: str
    grade: str
    framework: str
    """Name and era, as the run gives them."""
    gpu: str
    gpus: int
    rank: str
    source: str
    software: str


class RunVerdict(Frozen):
    """Whether a run fitted, and what was said of it."""

    id: str
    group: str
    outcome: Literal["fits", "oom"]
    verdict: Verdict
    device: int
    """Predicted [bytes]."""
    capacity: int
    """Of the GPU [bytes]."""
    wrong: bool
    """A false fit (it ran out of memory, and the verdict is fits), or a false reject."""


class RunUnknown(Frozen):
    """A measured figure whose kind the source does not say, beside the three predicted ones [bytes]; not scored."""

    id: str
    measured: int
    allocated: int
    reserved: int
    device: int


class RunReason(Frozen):
    """A run without a prediction, or one that is explained, and why."""

    id: str
    reason: str


class ErrorSummary(Frozen):
    """The errors of some of the figures; ``None`` where there are none."""

    count: int
    median_abs_error: float | None
    p90_abs_error: float | None
    """90th percentile of |error|, interpolated between the two nearest."""
    worst: float | None
    """The largest |error|."""
    worst_id: str | None


class ErrorGroup(ErrorSummary):
    """The errors of a part of the runs and one figure."""

    by: Literal["group", "framework", "gpu", "figure"]
    name: str
    figure: Figure


class TargetResult(ErrorSummary):
    """An aim, and what was reached."""

    name: str
    figure: Figure
    median_target: float
    p90_target: float
    met: bool | None
    """``None`` where no run counts."""


class ValidationSummary(ErrorSummary):
    """All scored figures, and the verdicts."""

    false_fits: int
    ran_out: int
    """Runs that ran out of memory and have a prediction."""
    false_rejects: int
    ran: int
    """Runs that fitted and have a prediction."""
    covered: int
    """Reserved and device figures within the interval."""
    covered_of: int
    coverage_claim: float | None
    """The coverage that the interval claims; ``None`` where it claims none."""


class Validation(Frozen):
    """The answer of ``memcalc validate``."""

    schema_: Literal["memcalc.validate/1"] = Field(
        default="memcalc.validate/1", alias="schema", serialization_alias="schema"
    )
    version: str
    runs: tuple[RunScore, ...]
    summary: ValidationSummary
    groups: tuple[ErrorGroup, ...]
    targets: tuple[TargetResult, ...]
    verdicts: tuple[RunVerdict, ...]
    unknown: tuple[RunUnknown, ...]
    explained: tuple[RunReason, ...]
    not_modelled: tuple[RunReason, ...]
    left_out: tuple[RunReason, ...]
    calibrations: tuple[str, ...] = ()
    """Those that count for some of the runs."""
