"""Ranges of a predicted step: how far steps of a source that nobody had looked at lie from the prediction.

What counts are runs by constants that were fitted without their source, and published speeds that no constant was
fitted on (presets/runs/unfitted). The unit is the source (hierarchical conformal prediction: Lee, Barber, Willett
2023, arXiv:2306.06342; Dunn, Wasserman, Ramdas 2022, arXiv:1809.07441): each of its k runs weighs 1 / (1 + (k - 1) r),
r being their intraclass correlation (the design effect of Kish 1965, Survey Sampling, section 5.4).

The shape of all ranges is that of the whole, the middle 90% of ln(measured / predicted) of all dense jobs of which
enough is measured. Each kind of job has a factor on it, the least that holds 90% of a source that shape and factor were
made without, and 90% of those that nothing is fitted on where these are nine or more. A kind of fewer than nine
sources, which cannot tell their 90th percentile, is no narrower than the whole. What too few runs have in common with a
job is told by memcalc/timing/forecast.py, which looks at no speed: such runs make the range of what is outside.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fits.reserve import alike, quantile
from fits.throughput import Job, built
from memcalc.runs import read_unfitted
from memcalc.specs.step_time import StepTimeTable, Support
from memcalc.timing.forecast import ONE_GPU, OUTSIDE, UNFITTED, doubts_of, kinds_of, traits_of
from memcalc.timing.rates import Constants, hardware_of, rates_by
from memcalc.timing.times import seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memcalc.formulas import Array

COVERAGE = 0.9
LOW, HIGH = (1 - COVERAGE) / 2, (1 + COVERAGE) / 2
TOLD = 9
"""Sources from which on one of them is expected beyond the 90th percentile: 1 / (1 - 0.9) - 1."""
SHARES = np.arange(COVERAGE, 1.0, 0.01)
OFFLOAD = (-0.5, 1.0)
"""Range of a time that no range is fitted for: from half to twice."""
KINDS = ("one GPU", "data parallel", "model parallel", "fp8", "adapters", OUTSIDE, "MoE")


@dataclass(frozen=True)
class Sample:
    """One published run."""

    job: Job
    error: float
    """ln(measured / predicted)."""
    fresh: bool = False
    """No constant is fitted on its source, which nobody had looked at."""

    @property
    def kind(self) -> str:
        """As the forecast has it where nothing is in doubt."""
        return kinds_of(self.job.model, self.job.grid)[0]


def unfitted_jobs() -> list[Job]:
    """The published speeds that no constant is fitted on; each of them has a job."""
    left: Counter[str] = Counter()
    jobs = list(built(read_unfitted().run, left))
    assert not left, left
    return jobs


def step_of(job: Job, constants: Constants) -> float:
    """The predicted step [s]."""
    hardware = hardware_of(job.gpu, job.node, job.grid)
    return float(np.asarray(seconds(job.work, hardware, rates_by(constants, job.gpu, job.grid)).step).item())


def unfitted(constants: Constants) -> list[Sample]:
    """Those speeds beside what constants predict."""
    return [Sample(job, math.log(job.measured / step_of(job, constants)), True) for job in unfitted_jobs()]


def support_of(samples: Sequence[Sample]) -> tuple[Support, ...]:
    """Runs and sources of dense models by what they have in common."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for sample in samples:
        if sample.kind not in UNFITTED:
            traits = traits_of(sample.job.grid, sample.job.gpu, sample.job.node)
            for each in {*traits.items(), ("framework", traits["framework"].removesuffix(ONE_GPU) + ONE_GPU)}:
                found[each].append(sample.job.source)
    rows = sorted(found.items())
    return tuple(
        Support(trait=trait, name=name, runs=len(sources), sources=len(set(sources))) for (trait, name), sources in rows
    )


class Errors:
    """Errors of some runs beside their sources, where each weighs by how alike those of its source are."""

    def __init__(self, errors: Array, sources: Array, correlation: float) -> None:
        self.errors, self.sources, self.correlation = errors, sources, correlation
        names, places, counts = np.unique(sources, return_inverse=True, return_counts=True)
        self.names = list(names)
        self.weights = 1 / (1 + (counts[places] - 1) * correlation) if len(sources) else np.empty(0)

    def where(self, chosen: Array) -> Errors:
        """Some of them."""
        return Errors(self.errors[chosen], self.sources[chosen], self.correlation)

    def without(self, source: str) -> Errors:
        """Those of all other sources."""
        return self.where(self.sources != source)

    def at(self, share: float) -> float:
        """The least error up to which a share of the weight lies."""
        return quantile(self.errors, self.weights, share)

    def mean(self, values: Array) -> float:
        """Of one value for each, by weight."""
        return float(np.average(values, weights=self.weights))


class Ranges:
    """The range of each kind of job."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.support = support_of(samples)
        table = StepTimeTable(constant=(), span=(), gpus={}, support=self.support)
        self.kinds = np.array([self._kind(sample, table) for sample in samples])
        self.samples = list(samples)
        errors, sources = np.array([s.error for s in samples]), np.array([s.job.source for s in samples])
        counted = self.kinds != "offload"
        groups = [errors[counted & (sources == name)].tolist() for name in sorted(set(sources[counted]))]
        self.every = Errors(errors, sources, alike(groups))
        self.whole = self.every.where(np.isin(self.kinds, [k for k in KINDS if k not in (OUTSIDE, *UNFITTED)]))

    @staticmethod
    def _kind(sample: Sample, table: StepTimeTable) -> str:
        job = sample.job
        doubts = doubts_of(table, job.model, job.grid, job.gpu, job.node)
        return OUTSIDE if doubts and sample.kind not in UNFITTED else sample.kind

    @staticmethod
    def ends(whole: Errors) -> tuple[float, float]:
        """The middle share of the whole; the predicted step itself is always possible."""
        return min(whole.at(LOW), -1e-3), max(whole.at(HIGH), 1e-3)

    @cached_property
    def scores(self) -> Errors:
        """Of each run the factor at which the whole, made without its source, holds it."""
        found = np.empty(len(self.samples))
        for name in self.every.names:
            own = self.every.sources == name
            low, high = self.ends(self.whole.without(name))
            errors = self.every.errors[own]
            found[own] = np.where(errors < 0, errors / low, errors / high)
        return Errors(found, self.every.sources, self.every.correlation)

    @staticmethod
    def factor(scores: Errors, share: float, sources: int) -> float:
        """What holds a share of runs; of few sources no less than that of the whole."""
        return max(scores.at(share), 1.0 if sources < TOLD else 0.0)

    def crossed(self, scores: Errors, share: float) -> Array:
        """Whether each run lies in the range that was made without its source."""
        count = len(scores.names)
        inside = np.empty(len(scores.errors), dtype=bool)
        for name in scores.names:
            own, others = scores.sources == name, scores.without(name)
            inside[own] = scores.errors[own] <= (self.factor(others, share, count) if count > 1 else 1.0)
        return inside

    def of(self, kind: str) -> tuple[tuple[float, float], Array]:
        """The range of a kind, and whether each of its runs lies in that made without its source."""
        scores = self.scores.where(self.kinds == kind)
        fresh = np.array([sample.fresh for sample in self.samples])[self.kinds == kind]
        held = ((share, self.crossed(scores, share)) for share in SHARES)
        share, inside = next((s, i) for s, i in held if self.enough(scores, i, fresh) or s == SHARES[-1])
        factor, (low, high) = self.factor(scores, share, len(scores.names)), self.ends(self.whole)
        return (
            math.floor(1000 * math.expm1(factor * low)) / 1000,
            math.ceil(1000 * math.expm1(factor * high)) / 1000,
        ), inside

    def held(self) -> tuple[list[Sample], Array, Array]:
        """Runs but for those of offload, their kinds, and whether each lies in a range made without its source."""
        inside = np.zeros(len(self.samples), dtype=bool)
        for kind in KINDS:
            inside[self.kinds == kind] = self.of(kind)[1]
        counted = np.flatnonzero(self.kinds != "offload")
        return [self.samples[place] for place in counted], self.kinds[counted], inside[counted]

    @staticmethod
    def enough(scores: Errors, inside: Array, fresh: Array) -> bool:
        """Whether as many are held as is claimed, also of sources that nothing is fitted on where there are enough."""
        new = scores.where(fresh)
        told = len(new.names) < TOLD or new.mean(inside[fresh]) >= COVERAGE
        return told and scores.mean(inside) >= COVERAGE

    def tables(self) -> Iterator[str]:
        """All of them as TOML, then where they were measured."""
        for kind in KINDS:
            yield self._table(kind)
        own = self.every.where(self.kinds == "offload")
        inside = int(np.sum((np.expm1(own.errors) >= OFFLOAD[0]) & (np.expm1(own.errors) <= OFFLOAD[1])))
        basis = f"half to twice: {inside} of {len(own.errors)} published runs of {_sources(own)} lie within"
        counts = {"rows": len(own.errors), "sources": len(own.names)}
        yield table("span", name="offload", low=OFFLOAD[0], high=OFFLOAD[1], coverage=0.0, **counts, basis=basis)
        for row in self.support:
            yield table("support", **row.model_dump())

    def _table(self, kind: str) -> str:
        own, ((low, high), crossed) = self.every.where(self.kinds == kind), self.of(kind)
        ratios, runs = np.expm1(own.errors), len(own.errors)
        what = {"adapters": "runs with adapters", "fp8": "fp8 runs"}.get(kind, f"{kind} runs")
        said = {
            OUTSIDE: f"{runs} runs of {_sources(own)} with something of which too little is measured",
            "MoE": f"{runs} runs of {_sources(own)}, none of which was fitted on",
        }
        shares = [float(np.mean(crossed[own.sources == name])) for name in own.names]
        return table(
            "span", name=kind, low=low, high=high, coverage=COVERAGE, rows=runs, sources=len(own.names),
            basis=said.get(kind, f"validated on {runs} {what} of {_sources(own)}"),
            median=round(float(np.median(np.abs(np.expm1(-own.errors)))), 4),
            inside=round(float(np.mean((low <= ratios) & (ratios <= high))), 3),
            crossed=round(own.mean(crossed), 3),
            by_source=round(float(np.mean(shares)), 3),
        )  # fmt: skip


def _sources(own: Errors) -> str:
    return f"{len(own.names)} source{'s' * (len(own.names) > 1)}"


def table(kind: str, **values: float | str) -> str:
    """One table of an array as TOML."""
    lines = [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in values.items()]
    return "\n".join([f"[[{kind}]]", *lines]) + "\n"
