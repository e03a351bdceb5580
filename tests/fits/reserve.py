"""Fit of presets/reserve.toml: how far measured reserved and device memory lies from the prediction, by allocator.

Run ``python tests/fits/reserve.py`` after a change of predictions. The residuals measured / predicted - 1 of shipped
runs of grade A, by class of allocator, give the range that holds 95% of them. It is then widened until ranges that were
fitted without a source (a document that runs were read from) hold 95% of that source's figures too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from memcalc import catalog, validation
from memcalc.convert.runs import read_runs
from memcalc.errors import MemcalcError
from memcalc.results import Estimate
from memcalc.specs.runs import Run

FILE = Path(__file__).resolve().parents[2] / "presets" / "reserve.toml"
COVERAGE = 0.95
FEWEST = 20
"""Figures of grade A below which a class is fitted on all grades."""
CLASSES = ("caching", "2021")
SHIFTED = ("2021",)
"""Classes whose allocator is not replayed, so that its slack is added to the prediction."""

Range = Callable[[Sequence[float]], tuple[float, float]]


@dataclass(frozen=True)
class Residual:
    """One measured figure beside its prediction without any reserve."""

    run: str
    source: str
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


def residuals() -> list[Residual]:
    """Residuals of all shipped runs that have a reserved or a device figure."""
    runs, presets, found = read_runs().run, validation.Presets(), []
    for run in runs:
        if not {"reserved", "device"} & set(run.measured.figures):
            continue
        try:
            found.append(_residual(run, validation.predict(run, presets)))
        except MemcalcError:
            continue
    return found


def _residual(run: Run, estimate: Estimate) -> Residual:
    figures = run.measured.figures
    name = "reserved" if "reserved" in figures else "device"
    predicted = validation.figures_of(run, estimate)["reserved"]
    allocator = estimate.interval.allocator
    middle = catalog.reserve(allocator).middle
    beside = estimate.budget.context + estimate.budget.libraries if name == "device" else 0
    source = document(run.source)
    return Residual(run.id, source, allocator, figures[name], round(predicted / (1 + middle)), beside, run.grade != "B")


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


def crossed(rows: Sequence[Residual], middle: float, widening: float, fitted: Range) -> float:
    """Share of residuals within the range fitted on all other sources, widened."""
    inside = 0
    for source in {row.source for row in rows}:
        others = [row.error(middle) for row in rows if row.source != source]
        low, high = (widening * end for end in fitted(others))
        inside += sum(low <= row.error(middle) <= high for row in rows if row.source == source)
    return inside / len(rows)


def widening_of(rows: Sequence[Residual], middle: float, fitted: Range) -> float:
    """The least widening, in steps of 1%, with which the cross-validated coverage is what is claimed."""
    return next(k / 100 for k in range(100, 1000) if crossed(rows, middle, k / 100, fitted) >= COVERAGE)


def document(source: str) -> str:
    """The document of a source: its repository and path, or the commit whose message it is."""
    repository, _, rest = source.partition(" ")
    path = re.split(r"[,@(]| message| row | case | rank ", rest)[0].strip()
    return f"{repository.partition('@')[0]} {path.rpartition('/')[0] if path.endswith('.out') else path}"


def fit(rows: Iterable[Residual]) -> str:
    """The text of presets/reserve.toml."""
    rows = list(rows)
    parts = ["# Written by tests/fits/reserve.py from presets/runs; do not edit.\n"]
    for name in CLASSES:
        every = [row for row in rows if row.allocator == name]
        strict = [row for row in every if row.strict]
        own = strict if len(strict) >= FEWEST else every
        middle = float(np.median([row.slack for row in own])) if name in SHIFTED else 0.0
        errors, widening = [row.error(middle) for row in own], widening_of(own, middle, range_of)
        low, high = (widening * end for end in range_of(errors))
        limit = widening_of(own, middle, limit_of) * limit_of(errors)[1]
        sources = len({row.source for row in own})
        lines = [
            "[[reserve]]",
            f'name = "{name}"',
            f"low = {low:.4f}",
            f"middle = {middle:.4f}",
            f"high = {high:.4f}",
            f"limit = {limit:.4f}",
            f"coverage = {COVERAGE}",
            f"crossed = {crossed(own, middle, widening, range_of):.3f}",
            f"figures = {len(own)}",
            f"sources = {sources}",
            f'source = "tests/fits/reserve.py on {len(own)} figures of {sources} sources in presets/runs"',
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(fit(residuals()))
