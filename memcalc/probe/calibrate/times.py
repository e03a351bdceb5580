"""The constants of the step-time model on one GPU: those that its timed steps and operations tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memcalc import catalog
from memcalc.calibrations import OF_GPU
from memcalc.probe.calibrate.jobs import Stack, along
from memcalc.specs.calibration import FittedConstant
from memcalc.timing.rates import Rates, rates_by
from memcalc.timing.times import seconds

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.probe.calibrate.jobs import TimedJob
    from memcalc.specs.hardware import GPU
    from memcalc.specs.step_time import StepTimeTable

__all__ = ["FEWEST", "Prior", "TimeFit", "priors_of", "rounded"]

FEWEST = 10
"""Timed rows below which no constant is fitted on them."""
NOISE = (0.01, 0.05, 0.3)
"""|ln(predicted / measured)| beyond which an error counts as its size, not as its square: at least, before the rows
are fitted, and at most. The rows' own median deviation, as a standard deviation, stands between."""
TOLD = 0.5
"""A constant is told by the rows where they leave at most this share of the spread that it had before."""
LEAST_SPREAD = 0.15
"""Of the logarithm of a constant before any row of this GPU: cards of one kind differ by cooling and power."""
LEAST_ROWS = 5
"""Rows whose time a constant must change."""
STEADY = 1.5
"""Refits in which a constant differs by more than this factor do not tell it."""
NEAR = 3.0
"""A constant further than this factor from the shipped one stands for something that the model lacks."""
FOLDS = 5
"""Refits, each without a part of the rows' families, that give a constant's range."""
SHARES = ("overlap", "overlap_step")
"""Constants between 0 and 1: their odds are fitted."""

Key = tuple[str, str]


@dataclass(frozen=True)
class Prior:
    """Where a constant is expected before the rows are looked at: as shipped, or as operations were timed."""

    name: str
    of: str
    value: float
    spread: float
    """Standard deviation of its logarithm, or of that of its odds."""
    unit: str
    source: str = ""
    """Set where operations gave it."""
    rows: int = 0

    @property
    def key(self) -> Key:
        """What it is looked up by."""
        return self.name, self.of

    def raised(self, value: float) -> float:
        """A value as it is fitted."""
        return float(np.log(value / (1 - value)) if self.name in SHARES else np.log(value))

    def lowered(self, x: float) -> float:
        """The value again."""
        return float(1 / (1 + np.exp(-x)) if self.name in SHARES else np.exp(x))


def priors_of(chip: GPU) -> list[Prior]:
    """The shipped constants that count for a GPU, those of kinds of kernels and links as they are."""
    table = catalog.step_time()
    of_chip = [Prior(name, chip.name, *_shipped(table, name, chip), "-") for name in OF_GPU]
    others = [row for row in table.constant if row.name not in OF_GPU and row.low < row.high]
    return of_chip + [Prior(row.name, row.of, row.value, _spread(row.low, row.high), row.unit) for row in others]


def _shipped(table: StepTimeTable, name: str, chip: GPU) -> tuple[float, float]:
    """A constant of the GPU, of its architecture, or of any, with its spread."""
    rows = {row.of: row for row in table.constant if row.name == name}
    row = next(rows[one] for one in (chip.name, chip.arch.split()[0], "any") if one in rows)
    return row.value, _spread(row.low, row.high)


def _spread(low: float, high: float) -> float:
    return max(float(np.log(high / low)) / 2, LEAST_SPREAD)


@dataclass(frozen=True)
class Values:
    """Constants by name, as :func:`memcalc.timing.rates.rates_by` asks for them."""

    known: Mapping[Key, float]
    asked: set[Key] = field(default_factory=set)
    """Those that were read."""

    def value(self, name: str, *of: str) -> float:
        """The value of the first of the things named."""
        key = next((name, one) for one in of if (name, one) in self.known)
        self.asked.add(key)
        return self.known[key]


class TimeFit:
    """Timed jobs of one GPU, and the constants that fit them."""

    def __init__(self, jobs: Sequence[TimedJob], families: Sequence[str], priors: Sequence[Prior]) -> None:
        self.jobs, self.families, self.priors = list(jobs), np.array(families), list(priors)
        self.measured = np.array([job.measured for job in jobs])
        self.stack = Stack.of(jobs)
        self.noise = NOISE[1]
        self.shipped = {prior.key: prior.value for prior in priors_of(jobs[0].gpu)}

    def residuals(self, values: Mapping[Key, float]) -> Array:
        """ln(predicted / measured) of every job by constants; what is not given is as shipped."""
        lookup = Values({**self.shipped, **values})
        every = [rates_by(lookup, job.gpu, job.grid) for job in self.jobs]
        # Each is a number, or a column over the one precision of its job
        columns = {f.name: along(np.asarray(getattr(one, f.name)).item() for one in every) for f in fields(Rates)}
        rates = Rates(**columns)
        return np.asarray(np.log(seconds(self.stack.work, self.stack.hardware, rates).step.reshape(-1) / self.measured))

    @cached_property
    def used(self) -> list[Prior]:
        """The constants that some job asks for."""
        lookup = Values(self.shipped)
        for job in self.jobs:
            rates_by(lookup, job.gpu, job.grid)
        return [prior for prior in self.priors if prior.key in lookup.asked]

    def solve(self, free: Sequence[Prior], used: Array, fixed: Mapping[Key, float]) -> tuple[Array, Array]:
        """The free constants, raised, by the jobs that are used, and the spread that is left of each.

        Least squares on the logarithm of times, soft beyond a typical error, with each prior as one further row.
        """
        from scipy.optimize import least_squares

        start = np.array([prior.raised(prior.value) for prior in free])
        spread = np.array([prior.spread for prior in free])

        def rows(x: Array) -> Array:
            values = {prior.key: prior.lowered(each) for prior, each in zip(free, x, strict=True)}
            errors = self.residuals({**fixed, **values})[used] / self.noise
            return np.concatenate([errors, (x - start) / spread])

        found = least_squares(rows, start, loss="soft_l1", x_scale=spread, ftol=1e-10, xtol=1e-10, max_nfev=200)
        left = np.sqrt(np.diag(np.linalg.inv(found.jac.T @ found.jac)))
        return np.asarray(found.x), left

    def fit(self) -> list[FittedConstant]:
        """The constants that the jobs tell, each with its range over refits that leave families out."""
        every = np.ones(len(self.jobs), dtype=bool)
        known = {prior.key: prior.value for prior in self.priors}
        x, _ = self.solve(self.used, every, known)
        away = self.residuals({prior.key: prior.lowered(one) for prior, one in zip(self.used, x, strict=True)})
        self.noise = float(np.clip(1.4826 * np.median(np.abs(away)), NOISE[0], NOISE[2]))
        x, left = self.solve(self.used, every, known)
        told = [prior for prior, share in zip(self.used, left, strict=True) if share <= TOLD * prior.spread]
        told = [prior for prior in told if self._asking(prior) >= LEAST_ROWS]
        while told:
            x, _ = self.solve(told, every, known)
            refits = self._refits(told, known)
            firm = [_firm(prior, [x[place], *(one[place] for one in refits)]) for place, prior in enumerate(told)]
            if all(firm):
                return [self._constant(one, x[place], [r[place] for r in refits]) for place, one in enumerate(told)]
            told = [prior for prior, stays in zip(told, firm, strict=True) if stays]
        return []

    def _refits(self, told: Sequence[Prior], known: Mapping[Key, float]) -> list[Array]:
        """The same constants without a part of the families in turn."""
        names = sorted(set(self.families))
        parts = [np.isin(self.families, names[fold::FOLDS]) for fold in range(min(FOLDS, len(names)))]
        return [self.solve(told, ~part, known)[0] for part in parts if not part.all()]

    def _constant(self, prior: Prior, x: float, refits: Sequence[float]) -> FittedConstant:
        values = [prior.lowered(each) for each in (x, *refits)]
        rows = self._asking(prior)
        beside = f", with {prior.source} as prior" if prior.source else ""
        return FittedConstant(
            name=prior.name,
            of=prior.of,
            value=rounded(values[0]),
            unit=prior.unit,
            low=rounded(min(values)),
            high=rounded(max(values)),
            source=f"fitted on {rows} timed steps{beside}",
            rows=rows,
        )

    def _asking(self, prior: Prior) -> int:
        """Jobs whose time depends on a constant."""
        higher = {prior.key: prior.lowered(prior.raised(self.shipped[prior.key]) + 0.1)}
        return int(np.sum(np.abs(self.residuals(higher) - self.residuals({})) > 1e-9))


def _firm(prior: Prior, found: Sequence[float]) -> bool:
    """Whether a constant is the same in all refits, and near enough to be the same thing that was shipped."""
    values = [prior.lowered(x) for x in found]
    return max(values) <= STEADY * min(values) and max(values[0] / prior.value, prior.value / values[0]) <= NEAR


def rounded(value: float) -> float:
    """A value with three digits, as it is written: its range is wider than the fourth."""
    return float(f"{value:.3g}")
