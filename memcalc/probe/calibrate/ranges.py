"""How far measured reserved and device memory lies from the prediction, and the range that holds a share of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import validation
from memcalc.specs.calibration import FittedReserve

if TYPE_CHECKING:
    from memcalc.results import Estimate
    from memcalc.specs.reserve import Reserve
    from memcalc.specs.runs import Figure, Run

__all__ = ["COVERAGE", "FEWEST", "Slack", "crossed", "fitted_range", "limit_of", "range_of", "slack_of", "widening_of"]

COVERAGE = 0.95
FEWEST = 20
"""Figures below which no range is fitted."""

FAR, FAR_LEAST = 10 * 1.4826, 0.1
"""What makes an outlier: median absolute deviations (ten standard deviations of a normal spread), and a least share."""
EXCEPTION = 0.1
"""Outliers are at most this share of the rows, or one; more are what the machine does."""

Range = Callable[[Sequence[float]], tuple[float, float]]


@dataclass(frozen=True)
class Slack:
    """One measured figure beside its prediction without any reserve."""

    run: str
    source: str
    """What is left out together when ranges are cross-validated."""
    allocator: str
    measured: int
    predicted: int
    """What mechanisms give, reserved [bytes]."""
    beside: int
    """Context and libraries in the measured figure [bytes]."""
    strict: bool
    """Every setting was read in the source: what a user knows of his own job."""

    def error(self, middle: float) -> float:
        """Measured / predicted - 1, with a slack of the allocator added to the prediction."""
        return self.measured / (self.predicted * (1 + middle) + self.beside) - 1

    @property
    def slack(self) -> float:
        """The allocator's part of the measured figure over the prediction - 1."""
        return (self.measured - self.beside) / self.predicted - 1


def slack_of(run: Run, estimate: Estimate, source: str, middle: float) -> Slack:
    """The reserved figure of a run, or else that of the device; ``middle`` is what its estimate has added."""
    figures = run.measured.figures
    name: Figure = "reserved" if "reserved" in figures else "device"
    predicted = validation.figures_of(run, estimate)["reserved"]
    beside = estimate.budget.context + estimate.budget.libraries if name == "device" else 0
    allocator = estimate.interval.allocator
    return Slack(run.id, source, allocator, figures[name], round(predicted / (1 + middle)), beside, run.grade != "B")


def range_of(errors: Sequence[float]) -> tuple[float, float]:
    """The range that holds the middle 95% of errors, wider where there are few (split conformal prediction)."""
    outside = (1 - COVERAGE) / 2
    count = len(errors)
    ordered = np.sort(np.asarray(errors))
    low = ordered[max(int(np.floor(outside * (count + 1))) - 1, 0)]
    high = ordered[min(int(np.ceil((1 - outside) * (count + 1))) - 1, count - 1)]
    return float(low), float(high)


def limit_of(errors: Sequence[float]) -> tuple[float, float]:
    """The one-sided range that holds the lower 95% of errors."""
    count = len(errors)
    ordered = np.sort(np.asarray(errors))
    return -np.inf, float(ordered[min(int(np.ceil(COVERAGE * (count + 1))) - 1, count - 1)])


def crossed(rows: Sequence[Slack], middle: float, widening: float, fitted: Range) -> float:
    """Share of residuals within the range fitted on all other sources, widened."""
    inside = 0
    for source in {row.source for row in rows}:
        others = [row.error(middle) for row in rows if row.source != source]
        low, high = (widening * end for end in fitted(others))
        inside += sum(low <= row.error(middle) <= high for row in rows if row.source == source)
    return inside / len(rows)


def widening_of(rows: Sequence[Slack], middle: float, fitted: Range) -> float:
    """The least widening, in steps of 1%, with which the cross-validated coverage is claimed; infinite from ten on."""
    steps = (k / 100 for k in range(100, 1000))
    return next((step for step in steps if crossed(rows, middle, step, fitted) >= COVERAGE), np.inf)


def fitted_range(rows: Sequence[Slack], middle: float) -> Mapping[str, Any]:
    """The fields of a :class:`~memcalc.specs.reserve.Reserve` for the figures of one class of allocator."""
    errors, widening = [row.error(middle) for row in rows], widening_of(rows, middle, range_of)
    low, high = (widening * end for end in range_of(errors))
    limit = widening_of(rows, middle, limit_of) * limit_of(errors)[1]
    return {
        "name": rows[0].allocator,
        "low": low,
        "middle": middle,
        "high": high,
        "limit": limit,
        "coverage": COVERAGE,
        "crossed": crossed(rows, middle, widening, range_of),
        "figures": len(rows),
        "sources": len({row.source for row in rows}),
    }


def outliers(rows: Sequence[Slack], middle: float) -> list[str]:
    """Runs so far from the others that they were misread, or shared their GPU; none where they are no exception."""
    errors = np.array([row.error(middle) for row in rows])
    away = np.abs(errors - np.median(errors))
    far = away > max(FAR * float(np.median(away)), FAR_LEAST)
    few = far.sum() <= max(EXCEPTION * len(rows), 1)
    return [row.run for row, out in zip(rows, far, strict=True) if out] if few else []


def own_reserve(rows: Sequence[Slack], middle: float) -> FittedReserve | None:
    """The range of a user's own figures, with what is predicted always in it; None where no range holds them."""
    found = fitted_range(rows, middle)
    if not np.isfinite([found["low"], found["high"], found["limit"]]).all():
        return None
    low, high, limit = min(found["low"], 0.0), max(found["high"], 0.0), max(found["limit"], 0.0)
    ends = {"low": low, "high": high, "limit": limit, "middle": middle, "crossed": found["crossed"]}
    rounded = {name: round(value, 4) for name, value in ends.items()}
    source = f"memcalc calibrate on {len(rows)} figures of {found['sources']} kinds of jobs"
    return FittedReserve.model_validate({**found, **rounded, "source": source})


def score(known: Reserve, row: Slack) -> tuple[float, bool, float]:
    """Interval score of a figure, whether the range holds it, and the range's width; all over the prediction.

    The score is the width, and 2 / (1 - coverage) times what the figure lies outside: it is least for the range that
    was promised (Gneiting and Raftery 2007, doi:10.1198/016214506000001437, section 6.2).
    """
    error, width = row.error(known.middle), known.high - known.low
    outside = max(known.low - error, 0.0) + max(error - known.high, 0.0)
    return width + 2 / (1 - known.coverage) * outside, outside == 0, width
