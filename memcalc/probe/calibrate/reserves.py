"""The reserve of one GPU: how far its reserved and device figures lie from what mechanisms predict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import catalog, validation
from memcalc.specs.calibration import FittedReserve, Gain, Left

if TYPE_CHECKING:
    from memcalc.probe.calibrate.rows import Row
    from memcalc.results.estimates import Estimate
    from memcalc.specs.runs import Run
    from memcalc.specs.step_time import Reserve
    from memcalc.specs.strict import Figure

COVERAGE = 0.95
FEWEST = 20
"""Figures below which no range is fitted."""

FAR, FAR_LEAST = 10 * 1.4826, 0.1
"""What makes an outlier: median absolute deviations (ten standard deviations of a normal spread), and a least share."""
EXCEPTION = 0.1
"""Outliers are at most this share of the rows, or one; more are what the machine does."""

Range = Callable[[Sequence[float]], tuple[float, float]]


@dataclass(frozen=True)
class ReserveSample:
    """One measured figure, and its prediction without any reserve."""

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
    """Every setting is stated by the source, as in a user's own job."""
    kind: str = ""
    """The kind of job, where ranges are told apart by it."""

    def error(self, middle: float) -> float:
        """Measured / predicted - 1, with a slack of the allocator added to the prediction."""
        return self.measured / (self.predicted * (1 + middle) + self.beside) - 1

    @property
    def slack(self) -> float:
        """The allocator's part of the measured figure over the prediction - 1."""
        return (self.measured - self.beside) / self.predicted - 1


def reserve_sample(run: Run, estimate: Estimate, source: str, middle: float) -> ReserveSample:
    """The reserved figure of a run, or else that of the device; ``middle`` is what its estimate has added."""
    figures = run.measured.figures
    name: Figure = "reserved" if "reserved" in figures else "device"
    predicted = validation.figures_of(run, estimate)["reserved"]
    beside = estimate.budget.context + estimate.budget.libraries if name == "device" else 0
    allocator = estimate.interval.allocator
    return ReserveSample(
        run.id, source, allocator, figures[name], round(predicted / (1 + middle)), beside, run.grade != "B"
    )


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


def crossed(rows: Sequence[ReserveSample], middle: float, widening: float, fitted: Range) -> float:
    """Share of residuals within the range fitted on all other sources, widened."""
    inside = 0
    for source in {row.source for row in rows}:
        others = [row.error(middle) for row in rows if row.source != source]
        low, high = (widening * end for end in fitted(others))
        inside += sum(low <= row.error(middle) <= high for row in rows if row.source == source)
    return inside / len(rows)


def widening_of(rows: Sequence[ReserveSample], middle: float, fitted: Range) -> float:
    """The least widening, in steps of 1%, with which the cross-validated coverage is claimed; infinite from ten on."""
    steps = (k / 100 for k in range(100, 1000))
    return next((step for step in steps if crossed(rows, middle, step, fitted) >= COVERAGE), np.inf)


def fitted_range(rows: Sequence[ReserveSample], middle: float) -> Mapping[str, Any]:
    """The fields of a :class:`~memcalc.specs.step_time.Reserve` for the figures of one class of allocator."""
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


def outliers(rows: Sequence[ReserveSample], middle: float) -> list[str]:
    """Runs so far from the others that they were misread, or shared their GPU; none where they are no exception."""
    errors = np.array([row.error(middle) for row in rows])
    away = np.abs(errors - np.median(errors))
    far = away > max(FAR * float(np.median(away)), FAR_LEAST)
    few = far.sum() <= max(EXCEPTION * len(rows), 1)
    return [row.run for row, out in zip(rows, far, strict=True) if out] if few else []


def own_reserve(rows: Sequence[ReserveSample], middle: float) -> FittedReserve | None:
    """The range of a user's own figures, with what is predicted always in it; None where no range holds them."""
    fields = fitted_range(rows, middle)
    if not np.isfinite([fields["low"], fields["high"], fields["limit"]]).all():
        return None
    low, high, limit = min(fields["low"], 0.0), max(fields["high"], 0.0), max(fields["limit"], 0.0)
    ends = {"low": low, "high": high, "limit": limit, "middle": middle, "crossed": fields["crossed"]}
    rounded = {name: round(value, 4) for name, value in ends.items()}
    source = f"memcalc calibrate on {len(rows)} figures of {fields['sources']} kinds of jobs"
    return FittedReserve.model_validate({**fields, **rounded, "source": source})


def score(known: Reserve, row: ReserveSample) -> tuple[float, bool, float]:
    """Interval score of a figure, whether the range holds it, and the range's width; all over the prediction.

    The score is the width, and 2 / (1 - coverage) times what the figure lies outside: it is least for the range that
    was promised (Gneiting and Raftery 2007, doi:10.1198/016214506000001437, section 6.2).
    """
    error, width = row.error(known.middle), known.high - known.low
    outside = max(known.low - error, 0.0) + max(error - known.high, 0.0)
    return width + 2 / (1 - known.coverage) * outside, outside == 0, width


CLASSES = ("caching", "2021")
DEVIATION = 1.4826 * 1.2533
"""Standard error of a median over the median absolute deviation and the root of the count, for a normal spread."""
SURE = 3
"""Standard errors from which a shift is no chance."""
FAMILIES = 2
"""Kinds of jobs at least: a range is checked against each without it."""


def reserve_samples(rows: Iterable[Row]) -> list[ReserveSample]:
    """The reserved, or else the device figure of each row that has one."""
    samples = []
    for row in rows:
        if {"reserved", "device"} & set(row.run.measured.figures):
            middle = catalog.reserve(row.estimate.interval.allocator).middle
            samples.append(reserve_sample(row.run, row.estimate, row.family, middle))
    return samples


def reserves_of(rows: Sequence[Row]) -> tuple[list[FittedReserve], list[Left], list[str]]:
    """Fit the range of each class of allocator; return those left as shipped too, and the outliers."""
    samples, fitted, left, outlying = reserve_samples(rows), [], [], []
    for name in CLASSES:
        of_class = [slack for slack in samples if slack.allocator == name]
        families = len({slack.source for slack in of_class})
        if len(of_class) < FEWEST or families < FAMILIES:
            if of_class or name == "caching":
                reason = f"{len(of_class)} reserved or total figures of {families} kinds of jobs, {FEWEST} of 2 needed"
                left.append(Left(part="reserve", reason=f"{name}: {reason}"))
            continue
        middle = round(_fitted_middle(name, rows), 4)
        outlying += outliers(of_class, middle)
        reserve = own_reserve([slack for slack in of_class if slack.run not in outlying], middle)
        if reserve is None:
            reason = "no range holds the figures of a kind of job that was left out"
            left.append(Left(part="reserve", reason=f"{name}: {reason}"))
        else:
            fitted.append(reserve)
    return fitted, left, outlying


def _fitted_middle(name: str, rows: Sequence[Row]) -> float:
    """What the allocator reserves beyond the prediction, from rows whose allocated figure was read too.

    Reserved over allocated, measured over predicted: an error of the allocated figure is in both and cancels, so that a
    wrong term is never taken for slack. Rows without that figure cannot tell the two apart, and leave the shipped one.
    """
    shipped = catalog.reserve(name).middle
    ratios = []
    for row in rows:
        figures = row.run.measured.figures
        if row.estimate.interval.allocator != name or "allocated" not in figures:
            continue
        predicted = validation.figures_of(row.run, row.estimate)
        if "reserved" in figures:
            reserved = figures["reserved"]
        elif "device" in figures:
            reserved = figures["device"] - row.estimate.budget.context - row.estimate.budget.libraries
        else:
            continue
        mechanisms = predicted["reserved"] / (1 + shipped) / predicted["allocated"]
        ratios.append(reserved / figures["allocated"] / mechanisms - 1)
    if len(ratios) < FEWEST:
        return shipped
    middle = float(np.median(ratios))
    noise = float(np.median(np.abs(np.array(ratios) - middle))) * DEVIATION / np.sqrt(len(ratios))
    return middle if abs(middle - shipped) > SURE * noise else shipped


def gains_of(rows: Sequence[Row], fitted: Sequence[FittedReserve]) -> Iterator[Gain]:
    """Score each range and the shipped one on held-back figures; outliers count only for the coverage."""
    samples = reserve_samples(rows)
    for reserve in fitted:
        of_class = [slack for slack in samples if slack.allocator == reserve.name]
        outlying = outliers(of_class, reserve.middle) if of_class else []
        shipped: Reserve = catalog.reserve(reserve.name)
        before, after = ([score(reserve_range, slack) for slack in of_class] for reserve_range in (shipped, reserve))
        if not of_class:
            continue
        errors = np.abs([[slack.error(shipped.middle), slack.error(reserve.middle)] for slack in of_class])
        near = [slack.run not in outlying for slack in of_class]
        scores = [float(np.mean([each for each, _, _ in scored], where=near)) for scored in (before, after)]
        yield Gain.model_validate(
            {
                "part": "reserve",
                "figure": f"reserved, device ({reserve.name})",
                "unit": "share",
                "rows": len(of_class),
                "median": tuple(map(float, np.median(errors, axis=0).round(4))),
                "p90": tuple(map(float, np.quantile(errors, 0.9, axis=0).round(4))),
                "covered": tuple(sum(inside for _, inside, _ in scored) for scored in (before, after)),
                "width": tuple(
                    round(reserve_range.high - reserve_range.low, 4) for reserve_range in (shipped, reserve)
                ),
                "score": tuple(round(each, 4) for each in scores),
                "better": scores[1] < scores[0],
            }
        )
