"""The constants of the step-time model on one GPU, fitted to its timed steps.

Timed operations: efficiency by size, and from those of the sizes that jobs have the constants of the model.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import api, catalog, validation
from memcalc.calibrations import OF_GPU
from memcalc.specs.calibration import FittedConstant
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.timing.rates import Rates, hardware_of, kernel_arch, links, peak_flops, rates_by
from memcalc.timing.times import seconds
from memcalc.timing.work import Work, work_of
from memcalc.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.specs.runs import Rate, Run, RunsFile
    from memcalc.specs.step_time import StepTimeTable
    from memcalc.timing.rates import Hardware


@dataclass(frozen=True)
class TimedJob:
    """One timed run as a grid of one strategy."""

    run: Run
    model: Model
    grid: Grid
    gpu: GPU
    node: Node

    @property
    def speed(self) -> float:
        """Throughput as published [tokens/s a GPU]."""
        return self.run.tokens_per_second_per_gpu or np.nan

    @property
    def measured(self) -> float:
        """The step [s]."""
        fixed = self.grid.fixed
        if self.run.tokens_per_second_per_gpu is None and self.run.seconds is not None:
            return self.run.seconds
        return fixed.global_batch * fixed.seq_len / self.run.gpus / self.speed

    @cached_property
    def work(self) -> Work:
        """What a step does."""
        return work_of(ModelOnGrid(self.model, self.grid), self.node)


def timed_job(run: Run, gpu: GPU, presets: validation.Presets) -> TimedJob:
    """A run on a GPU as a job."""
    options, settings = validation.job_of(run)
    strategy = api.single(model=validation.model_of(run, presets), gpu=gpu, settings=settings, **options)
    job = validation.on_network(strategy.job, run, presets)
    return TimedJob(run, job.model, strategy.grid, job.gpu, job.node)


@dataclass(frozen=True)
class Stack:
    """Jobs along the layout axis of one grid."""

    work: Work
    hardware: Hardware

    @classmethod
    def of(cls, jobs: Sequence[TimedJob]) -> Stack:
        """All jobs at once."""
        stages = max(job.grid.num_stages for job in jobs)
        hardware = [hardware_of(job.gpu, job.node, job.grid) for job in jobs]
        return cls(stacked([job.work for job in jobs], stages), stacked(hardware, 1))


def stacked(parts: Sequence[Any], stages: int) -> Any:
    """Records of arrays as one record whose arrays have the jobs along the layout axis."""
    if isinstance(parts[0], tuple):
        made: Any = type(parts[0])
        return made(*(stacked(values, stages) for values in zip(*parts, strict=True)))
    arrays = [np.asarray(part, dtype=float) for part in parts]
    arrays = [array.reshape((1,) * 7) if array.ndim == 0 else array for array in arrays]
    wide = any(array.shape[1] > 1 for array in arrays)
    return np.concatenate([_padded(array, stages if wide else 1) for array in arrays])


def _padded(array: Array, stages: int) -> Array:
    """Stages that a job lacks do nothing."""
    if array.shape[1] in {1, stages}:
        return np.broadcast_to(array, (1, stages, 1, 1, 1, 1, 1))
    return np.pad(array, [(0, stages - array.shape[1]) if axis == 1 else (0, 0) for axis in range(7)])


def along(values: Iterable[float]) -> Array:
    """A column over jobs."""
    return np.asarray(list(values), dtype=float).reshape(-1, 1, 1, 1, 1, 1, 1)


FEWEST = 10
"""Timed rows below which no constant is fitted on them."""
NOISE = (0.01, 0.05, 0.3)
"""|ln(predicted / measured)| beyond which an error counts as its size, not as its square: at least, before the rows
are fitted, and at most. The rows' own median deviation, as a standard deviation, stands between."""
DETERMINED = 0.5
"""The rows determine a constant where they leave at most this share of the spread that it had before."""
LEAST_SPREAD = 0.15
"""Of the logarithm of a constant before any row of this GPU: cards of one kind differ by cooling and power."""
LEAST_ROWS = 5
"""Rows whose time a constant must change."""
STEADY = 1.5
"""A constant whose refits differ by more than this factor is not determined."""
NEAR = 3.0
"""A constant further than this factor from the shipped one is rejected: it compensates for something not modelled."""
FOLDS = 5
"""Refits, each without a part of the rows' families, that give a constant's range."""
SHARES = ("hidden", "window")
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


def priors_of(gpu: GPU) -> list[Prior]:
    """The shipped constants that count for a GPU, those of kinds of kernels and links as they are."""
    table = catalog.step_time()
    of_gpu = [Prior(name, gpu.name, *_shipped(table, name, gpu), "-") for name in OF_GPU]
    others = [row for row in table.constant if row.name not in OF_GPU and row.low < row.high]
    return of_gpu + [Prior(row.name, row.of, row.value, _spread(row.low, row.high), row.unit) for row in others]


def _shipped(table: StepTimeTable, name: str, gpu: GPU) -> tuple[float, float]:
    """A constant of the GPU, of its architecture, or of any, with its spread."""
    rows = {row.of: row for row in table.constant if row.name == name}
    row = next(rows[scope] for scope in (gpu.name, kernel_arch(gpu), "any") if scope in rows)
    return row.value, _spread(row.low, row.high)


def _spread(low: float, high: float) -> float:
    return max(float(np.log(high / low)) / 2, LEAST_SPREAD)


@dataclass(frozen=True)
class ConstantLookup:
    """Constants by name, as :func:`memcalc.timing.rates.rates_by` looks them up."""

    by_key: Mapping[Key, float]
    used: set[Key] = field(default_factory=set)
    """Those that were read."""

    def value(self, name: str, *of: str) -> float:
        """The value of the first of the things named."""
        key = next((name, scope) for scope in of if (name, scope) in self.by_key)
        self.used.add(key)
        return self.by_key[key]


class TimeFit:
    """Timed jobs of one GPU, and the constants that fit them."""

    def __init__(self, jobs: Sequence[TimedJob], families: Sequence[str], priors: Sequence[Prior]) -> None:
        self.jobs, self.families, self.priors = list(jobs), np.array(families), list(priors)
        self.measured = np.array([job.measured for job in jobs])
        self.stack = Stack.of(jobs)
        self.noise = NOISE[1]
        given = {(row.name, row.of): row.value for row in catalog.step_time().constant}
        self.shipped = given | {prior.key: prior.value for prior in priors_of(jobs[0].gpu)}

    def residuals(self, values: Mapping[Key, float]) -> Array:
        """ln(predicted / measured) of every job by constants; what is not given is as shipped."""
        lookup = ConstantLookup({**self.shipped, **values})
        rates = [rates_by(lookup, job.gpu, job.grid) for job in self.jobs]
        # Each is a number, or a column over the one precision of its job
        columns = {name: along(np.asarray(getattr(r, name)).item() for r in rates) for name in Rates._fields}
        times = seconds(self.stack.work, self.stack.hardware, Rates(**columns))
        return np.asarray(np.log(times.step.reshape(-1) / self.measured))

    @cached_property
    def used(self) -> list[Prior]:
        """The constants that some job asks for."""
        lookup = ConstantLookup(self.shipped)
        for job in self.jobs:
            rates_by(lookup, job.gpu, job.grid)
        return [prior for prior in self.priors if prior.key in lookup.used]

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

        solution = least_squares(rows, start, loss="soft_l1", x_scale=spread, ftol=1e-10, xtol=1e-10, max_nfev=200)
        deviation = np.sqrt(np.diag(np.linalg.inv(solution.jac.T @ solution.jac)))
        return np.asarray(solution.x), deviation

    def fit(self) -> list[FittedConstant]:
        """The constants that the jobs determine, each with its range over refits that leave families out."""
        all_jobs = np.ones(len(self.jobs), dtype=bool)
        shipped = {prior.key: prior.value for prior in self.priors}
        x, _ = self.solve(self.used, all_jobs, shipped)
        residuals = self.residuals({prior.key: prior.lowered(each) for prior, each in zip(self.used, x, strict=True)})
        self.noise = float(np.clip(1.4826 * np.median(np.abs(residuals)), NOISE[0], NOISE[2]))
        x, deviations = self.solve(self.used, all_jobs, shipped)
        determined = [
            prior
            for prior, deviation in zip(self.used, deviations, strict=True)
            if deviation <= DETERMINED * prior.spread and self._rows_using(prior) >= LEAST_ROWS
        ]
        while determined:
            x, _ = self.solve(determined, all_jobs, shipped)
            by_prior = list(zip(determined, zip(x, *self._refits(determined, shipped), strict=True), strict=True))
            firm = [prior for prior, fitted in by_prior if _is_firm(prior, fitted)]
            if len(firm) == len(determined):
                return [self._constant(prior, fitted) for prior, fitted in by_prior]
            determined = firm
        return []

    def _refits(self, determined: Sequence[Prior], shipped: Mapping[Key, float]) -> list[Array]:
        """The same constants without a part of the families in turn."""
        names = sorted(set(self.families))
        parts = [np.isin(self.families, names[fold::FOLDS]) for fold in range(min(FOLDS, len(names)))]
        return [self.solve(determined, ~part, shipped)[0] for part in parts if not part.all()]

    def _constant(self, prior: Prior, fitted: Sequence[float]) -> FittedConstant:
        """The constant of the fit, with the range of the refits behind it."""
        values = [prior.lowered(each) for each in fitted]
        rows = self._rows_using(prior)
        prior_note = f", with {prior.source} as prior" if prior.source else ""
        return FittedConstant(
            name=prior.name,
            of=prior.of,
            value=rounded(values[0]),
            unit=prior.unit,
            low=rounded(min(values)),
            high=rounded(max(values)),
            source=f"fitted on {rows} timed steps{prior_note}",
            rows=rows,
        )

    def _rows_using(self, prior: Prior) -> int:
        """Jobs whose time depends on a constant."""
        higher = {prior.key: prior.lowered(prior.raised(self.shipped[prior.key]) + 0.1)}
        return int(np.sum(np.abs(self.residuals(higher) - self.residuals({})) > 1e-9))


def _is_firm(prior: Prior, fitted: Sequence[float]) -> bool:
    """Whether a constant is the same in all refits, and near enough to be the same thing that was shipped."""
    values = [prior.lowered(x) for x in fitted]
    return max(values) <= STEADY * min(values) and max(values[0] / prior.value, prior.value / values[0]) <= NEAR


def rounded(value: float) -> float:
    """A value with three digits, as it is written: its range is wider than the fourth."""
    return float(f"{value:.3g}")


FEWEST_TIMINGS = 3
"""Sizes that must have been timed."""
LARGE_PRODUCT = 1024
"""Least dimension of a product that counts: rows, columns and inner dimension of a job's linear layers."""
LONG = 2048
"""Least sequence of attention that counts [tokens]."""
LARGE_MESSAGE = 16 * MIB
"""Least message that counts: below it latency and not the rate is seen [bytes]."""
SPREAD = 0.1
"""Standard deviation of the logarithm of a constant from timed operations: in a job a kernel's rate differs."""
WIDTH = {"bf16": 2, "fp16": 2, "fp32": 4, "tf32": 4, "fp8": 1}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
READ = ("matmul", "attention", "attention-backward", *COLLECTIVES)


def constants_of(runs: RunsFile, gpu: GPU) -> list[FittedConstant]:
    """The constants that timed operations give: medians over the sizes that jobs have."""
    probes = {probe.id for probe in runs.probe if probe.gpu == gpu.name}
    rates = [rate for rate in runs.rate if rate.probe in probes]
    node = catalog.node_for(gpu)
    inside, between = links(gpu, node)
    messages = [rate for rate in rates if rate.kind in COLLECTIVES and rate.work >= LARGE_MESSAGE]
    shares = {
        ("matmul", gpu.name): list(_matmul_shares(rates, gpu)),
        ("attention", gpu.name): list(_attention_shares(rates, gpu)),
        ("inside", "any"): [_speed(rate) / inside for rate in messages if 1 < rate.gpus <= node.gpus],
        ("between", "any"): [_speed(rate) / between for rate in messages if rate.gpus > node.gpus],
    }
    return [_constant(name, of, values) for (name, of), values in shares.items() if len(values) >= FEWEST_TIMINGS]


def _constant(name: str, of: str, shares: Sequence[float]) -> FittedConstant:
    values = np.array(shares)
    return FittedConstant(
        name=name,
        of=of,
        value=rounded(float(np.median(values))),
        unit="-",
        low=rounded(float(values.min())),
        high=rounded(float(values.max())),
        source=f"median of {len(values)} timed operations",
        rows=len(values),
    )


def _speed(rate: Rate) -> float:
    return rate.work / rate.seconds


def _matmul_shares(rates: Iterable[Rate], gpu: GPU) -> Iterator[float]:
    """The share of the peak that products reach, without their operands' traffic, as the model counts both."""
    passes = catalog.step_time().value("operand_passes", "any")
    for rate in rates:
        sizes = [rate.shape.get(name, 0) for name in ("m", "n", "k")]
        if rate.kind != "matmul" or min(sizes) < LARGE_PRODUCT or rate.dtype not in {"bf16", "fp16"}:
            continue
        m, n, k = sizes
        operands = WIDTH[rate.dtype] * (m * n + n * k + m * k)
        compute_seconds = rate.seconds - passes * operands / gpu.bandwidth_bytes_per_s
        yield rate.work / max(compute_seconds, rate.seconds / 2) / peak_flops(gpu, rate.dtype)


def _attention_shares(rates: Iterable[Rate], gpu: GPU) -> Iterator[float]:
    """The share of the peak that attention reaches, forward and backward together, as a step runs it."""
    pairs: dict[tuple[str, tuple[tuple[str, int], ...]], dict[str, Rate]] = defaultdict(dict)
    for rate in rates:
        if rate.kind in {"attention", "attention-backward"} and rate.shape.get("seq", 0) >= LONG:
            pairs[rate.dtype, tuple(sorted(rate.shape.items()))][rate.kind] = rate
    for (dtype, _), both in sorted(pairs.items()):
        if len(both) == 2 and dtype in {"bf16", "fp16"}:
            yield (
                sum(rate.work for rate in both.values())
                / sum(rate.seconds for rate in both.values())
                / peak_flops(gpu, dtype)
            )


def priors_with(priors: Iterable[Prior], constants: Iterable[FittedConstant]) -> list[Prior]:
    """The priors, moved to where operations were timed."""
    known = {(constant.name, constant.of): constant for constant in constants}
    return [
        replace(prior, value=constant.value, spread=SPREAD, source=constant.source, rows=constant.rows)
        if (constant := known.get(prior.key))
        else prior
        for prior in priors
    ]


def unused_timings(runs: RunsFile, gpu: GPU) -> list[str]:
    """Name the timed operations that no constant of the model uses."""
    probes = {probe.id for probe in runs.probe if probe.gpu == gpu.name}
    kinds = sorted({rate.kind for rate in runs.rate if rate.probe in probes and rate.kind not in READ})
    if not kinds:
        return []
    return [f"rates of {', '.join(kinds)} were read and not used: the model takes them from the data sheet."]
