"""Fit of presets/reserve.toml: how far measured reserved and device memory lies from the prediction.

Run ``python -m fits.reserve`` in this folder's parent after a change of predictions. The residuals measured / predicted
- 1 of shipped runs of grade A, by class of allocator, give the range that holds 95% of them. It is then widened until
ranges that were fitted without a source (a document that runs were read from) hold 95% of that source's figures too.

On today's allocator each kind of job has a range of its own, shrunk toward that of all kinds: an end is
Z q_kind + (1 - Z) q_all with Z = n / (n + m), the credibility of n figures (Buehlmann 1967, Experience rating and
credibility, ASTIN Bulletin 4:199; of quantiles Pitselis 2013, Quantile credibility models, Insurance: Mathematics and
Economics 52:477). Figures of one document are no independent ones: each of k counts as 1 / (1 + (k - 1) r), r being
their intraclass correlation (the design effect of Kish 1965, Survey Sampling, section 5.4); n is the sum. m is that of
the least interval score on documents left out. A kind with enough figures to tell is widened until 95% of those of a
document that was left out lie within; one with hardly any has the range of all. What has its weights
offloaded, under ZeRO-3 or FSDP 1, ends where the highest of the reports in tests/fits/offload_reports.py lies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fits import offload_reports
from memcalc import catalog, validation
from memcalc.errors import MemcalcError
from memcalc.frameworks import habits_of
from memcalc.probe.calibrate.reserves import (
    COVERAGE,
    FEWEST,
    ReserveSample,
    fitted_range,
    limit_of,
    range_of,
    reserve_sample,
)
from memcalc.results.estimates import Estimate
from memcalc.runs import read_runs
from memcalc.specs.runs import Run
from memcalc.terms.overhead import KINDS, REPORTED, Choice, kind_of

FILE = Path(__file__).resolve().parents[2] / "presets" / "reserve.toml"
CLASSES = ("caching", "2021")
SHIFTED = ("2021",)
"""Classes whose allocator is not replayed, so that its slack is added to the prediction."""
UNLIMITED = 1 << 50
"""Bytes of a card that is never full."""
APART = "caching"
"""The class whose kinds of jobs are told apart."""
FEW = 5
"""Figures below which a kind has the range of all, and of grade A below which those partly assumed count too."""
STRENGTHS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Of all kinds, in independent figures."""
LOW, HIGH, LIMIT = (1 - COVERAGE) / 2, (1 + COVERAGE) / 2, COVERAGE


def residuals(among: Callable[[Run], bool] = lambda _: True) -> list[ReserveSample]:
    """Residuals of shipped runs that may be fitted on, or some ``among`` them, with a reserved or a device figure.

    A job of the probe's suite counts once: its requests, and so what is reserved, are alike on all cards.
    """
    runs, presets, found, suite = read_runs().run, validation.Presets(), [], set()
    for run in filter(among, runs):
        if run.not_fitted or not {"reserved", "device"} & set(run.measured.figures):
            continue
        job = run.id.partition("/")[2] if run.source.startswith("memcalc probe") else run.id
        if job in suite:
            continue
        suite.add(job)
        try:
            estimate = validation.predict(run, presets)
            if estimate.interval.allocator in SHIFTED:  # on its own card it would be cut off at what that has
                estimate = validation.predict(run.model_copy(update={"gpu_memory": UNLIMITED}), presets)
            found.append(_residual(run, estimate))
        except MemcalcError:
            continue
    return found


def _residual(run: Run, estimate: Estimate) -> ReserveSample:
    sample = reserve_sample(run, estimate, document(run.source), catalog.reserve(estimate.interval.allocator).middle)
    s = estimate.strategy
    choice = Choice(run.gpus, s.zero, s.offload, s.compile, s.expandable_segments)
    return replace(sample, kind=kind_of(habits_of(s.framework), choice))


def document(source: str) -> str:
    """The document of a source: its repository and path, or the commit whose message it is."""
    repository, _, rest = source.partition(" ")
    path = re.split(r"[,@(]| message| row | case | rank ", rest)[0].strip()
    return f"{repository.partition('@')[0]} {path.rpartition('/')[0] if path.endswith('.out') else path}"


def counted(rows: Sequence[ReserveSample], fewest: int) -> list[ReserveSample]:
    """Those of grade A, and where there are too few of them the others too."""
    strict = [row for row in rows if row.strict]
    return strict if len(strict) >= fewest else list(rows)


class Range(NamedTuple):
    """Ends of a range, its one-sided limit, and the share of them that a kind's own figures make."""

    low: float
    high: float
    limit: float
    weight: float

    def widened(self, factor: float, limit: float) -> Range:
        """Times a factor, and the limit times another; it needs not be above the range that holds as many."""
        high = factor * self.high
        return Range(factor * self.low, high, min(limit * self.limit, high), self.weight)


class Kinds:
    """Residuals by kind of job, the range of each shrunk toward that of all."""

    def __init__(self, rows: Sequence[ReserveSample]) -> None:
        self.all = counted(rows, FEWEST)
        by_kind = {kind: counted([row for row in rows if row.kind == kind], FEW) for kind in KINDS}
        self.own = {kind: members for kind, members in by_kind.items() if len(members) >= FEW}
        self.correlation = correlation(self.all)
        self.strength = min(STRENGTHS, key=self.score)

    def range_of(self, kind: str, strength: float, without: str = "") -> Range:
        """The range of a kind, fitted without a source."""
        own, base = ([r for r in rows if r.source != without] for rows in (self.own[kind], self.all))
        every = [row.error(0.0) for row in base]
        ends = np.array([*range_of(every), limit_of(every)[1]])
        weights, errors = self._weights(own), np.array([row.error(0.0) for row in own])
        share = weights.sum() / (weights.sum() + strength)
        if own:
            ends = share * np.array([quantile(errors, weights, q) for q in (LOW, HIGH, LIMIT)]) + (1 - share) * ends
        return Range(min(ends[0], 0.0), max(ends[1], 0.0), max(ends[2], 0.0), float(share))

    def _weights(self, rows: Sequence[ReserveSample]) -> np.ndarray:
        sizes = Counter(row.source for row in rows)
        return np.array([1 / (1 + (sizes[row.source] - 1) * self.correlation) for row in rows])

    def crossed(self, kind: str, strength: float) -> list[tuple[float, Range]]:
        """Each figure of a kind beside the range that was fitted without its source."""
        known = {source: self.range_of(kind, strength, source) for source in {row.source for row in self.own[kind]}}
        return [(row.error(0.0), known[row.source]) for row in self.own[kind]]

    def score(self, strength: float) -> float:
        """Mean interval score on sources left out (Gneiting and Raftery 2007, doi:10.1198/016214506000001437)."""
        pairs = [pair for kind in self.own for pair in self.crossed(kind, strength)]
        outside = [max(r.low - error, 0.0) + max(error - r.high, 0.0) for error, r in pairs]
        return float(
            np.mean([r.high - r.low + 2 / (1 - COVERAGE) * o for (_, r), o in zip(pairs, outside, strict=True)])
        )

    def widening(self, kind: str) -> tuple[float, float]:
        """The least factors, in steps of 1%, with which range and limit hold 95% of figures of sources left out."""
        pairs = self.crossed(kind, self.strength)
        if len(pairs) < FEWEST:
            return 1.0, 1.0
        steps = [k / 100 for k in range(100, 1000)]
        held = (lambda f: np.mean([f * r.low <= e <= f * r.high for e, r in pairs]),
                lambda f: np.mean([e <= f * r.limit for e, r in pairs]))  # fmt: skip
        return tuple(next(f for f in steps if share(f) >= COVERAGE) for share in held)

    def entries(self) -> Iterable[list[str]]:
        """The lines of each kind with figures of its own."""
        for kind, own in self.own.items():
            factor, limit = self.widening(kind)
            known = self.range_of(kind, self.strength).widened(factor, limit)
            inside = [factor * r.low <= error <= factor * r.high for error, r in self.crossed(kind, self.strength)]
            yield lines(APART, kind, known._asdict(), 0.0, float(np.mean(inside)), own)


def correlation(rows: Sequence[ReserveSample]) -> float:
    """How much alike figures of one source are."""
    return alike(
        [[row.error(0.0) for row in group] for _, group in groupby(sorted(rows, key=by_source), key=by_source)]
    )


def alike(groups: Sequence[Sequence[float]]) -> float:
    """The intraclass correlation of a one-way analysis of variance."""
    sizes, total = np.array([len(group) for group in groups]), sum(map(len, groups))
    middle = np.mean([error for group in groups for error in group])
    between = sum(len(g) * (np.mean(g) - middle) ** 2 for g in groups) / (len(groups) - 1)
    within = sum(np.sum((np.array(g) - np.mean(g)) ** 2) for g in groups) / (total - len(groups))
    size = (total - np.sum(sizes**2) / total) / (len(groups) - 1)
    return float(max((between - within) / (between + (size - 1) * within), 0.0))


def by_source(row: ReserveSample) -> str:
    return row.source


def quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """The least value up to which a share of the weight lies."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, share - 1e-12)), len(values) - 1)])


def lines(
    name: str, kind: str, ends: Mapping[str, float], middle: float, crossed: float, own: Sequence[ReserveSample]
) -> list[str]:
    """One entry of the file."""
    sources = len({row.source for row in own})
    return [
        "[[reserve]]",
        f'name = "{name}"',
        *([f'kind = "{kind}"', f"weight = {ends['weight']:.3f}"] if kind else []),
        f"low = {ends['low']:.4f}",
        f"middle = {middle:.4f}",
        f"high = {ends['high']:.4f}",
        f"limit = {ends['limit']:.4f}",
        f"coverage = {COVERAGE}",
        f"crossed = {crossed:.3f}",
        f"figures = {len(own)}",
        f"sources = {sources}",
        f'source = "tests/fits/reserve.py on {len(own)} figures of {sources} sources in presets/runs"',
    ]


def fit(rows: Iterable[ReserveSample]) -> str:
    """The text of presets/reserve.toml."""
    rows = list(rows)
    entries = []
    for name in CLASSES:
        own = counted([row for row in rows if row.allocator == name], FEWEST)
        middle = float(np.median([row.slack for row in own])) if name in SHIFTED else 0.0
        found = fitted_range(own, middle)
        entries.append(lines(name, "", found, middle, found["crossed"], own))
        if name == APART:
            reported = offload_reports.entries(found["low"])
    entries += Kinds([row for row in rows if row.allocator == APART and row.kind not in REPORTED]).entries()
    entries += reported
    head = "# Written by tests/fits/reserve.py from presets/runs; do not edit.\n"
    return "\n".join([head, *("\n".join(entry) + "\n" for entry in entries)])


if __name__ == "__main__":
    FILE.write_text(fit(residuals()))
