"""Fit of presets/reserve.toml: how far measured reserved and device memory lies from the prediction, by allocator.

Run ``python tests/fits/reserve.py`` after a change of predictions. The residuals measured / predicted - 1 of shipped
runs of grade A, by class of allocator, give the range that holds 95% of them. It is then widened until ranges that were
fitted without a source (a document that runs were read from) hold 95% of that source's figures too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from memcalc import catalog, validation
from memcalc.errors import MemcalcError
from memcalc.probe.calibrate.reserves import COVERAGE, FEWEST, ReserveSample, fitted_range, reserve_sample
from memcalc.results.estimates import Estimate
from memcalc.runs import read_runs
from memcalc.specs.runs import Run

FILE = Path(__file__).resolve().parents[2] / "presets" / "reserve.toml"
CLASSES = ("caching", "2021")
SHIFTED = ("2021",)
"""Classes whose allocator is not replayed, so that its slack is added to the prediction."""


def residuals() -> list[ReserveSample]:
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


def _residual(run: Run, estimate: Estimate) -> ReserveSample:
    return reserve_sample(run, estimate, document(run.source), catalog.reserve(estimate.interval.allocator).middle)


def document(source: str) -> str:
    """The document of a source: its repository and path, or the commit whose message it is."""
    repository, _, rest = source.partition(" ")
    path = re.split(r"[,@(]| message| row | case | rank ", rest)[0].strip()
    return f"{repository.partition('@')[0]} {path.rpartition('/')[0] if path.endswith('.out') else path}"


def fit(rows: Iterable[ReserveSample]) -> str:
    """The text of presets/reserve.toml."""
    rows = list(rows)
    parts = ["# Written by tests/fits/reserve.py from presets/runs; do not edit.\n"]
    for name in CLASSES:
        every = [row for row in rows if row.allocator == name]
        strict = [row for row in every if row.strict]
        own = strict if len(strict) >= FEWEST else every
        middle = float(np.median([row.slack for row in own])) if name in SHIFTED else 0.0
        found, sources = fitted_range(own, middle), len({row.source for row in own})
        lines = [
            "[[reserve]]",
            f'name = "{name}"',
            f"low = {found['low']:.4f}",
            f"middle = {middle:.4f}",
            f"high = {found['high']:.4f}",
            f"limit = {found['limit']:.4f}",
            f"coverage = {COVERAGE}",
            f"crossed = {found['crossed']:.3f}",
            f"figures = {len(own)}",
            f"sources = {sources}",
            f'source = "tests/fits/reserve.py on {len(own)} figures of {sources} sources in presets/runs"',
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(fit(residuals()))
