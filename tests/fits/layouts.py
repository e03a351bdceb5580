"""How good the step-time model is on the published sweeps over layouts, none of which it was fitted on.

``python -m fits.layouts`` in this folder's parent prints, with the constants of presets/step_time.json: errors by
source, what has no job and why, and how well the layouts of each sweep are put in order.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fits.orders import FIRST, LEAST, Order
from fits.step_time import Fit, shipped
from fits.throughput import Job, built, layout_runs, reason_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memcalc.formulas import Array


@dataclass(frozen=True)
class Said:
    """The jobs of the sweeps, what is said of them, and what has none."""

    jobs: list[Job]
    reasons: list[str]
    """Why each may not be fitted on; empty where it may."""
    steps: Array
    """Predicted [s]."""
    skipped: dict[str, Counter[str]]
    """By source, why rows that ran have no job."""

    @classmethod
    def of_all(cls) -> Said:
        """Predict every row that ran and can be said."""
        jobs: list[Job] = []
        skipped: dict[str, Counter[str]] = {}
        runs = layout_runs()
        for source in dict.fromkeys(run.group for run in runs):
            skipped[source] = Counter()
            jobs += built((run for run in runs if run.group == source), skipped[source])
        steps = Fit(jobs).steps(shipped()[None])[0]
        return cls(jobs, [reason_out(job) for job in jobs], steps, skipped)

    @property
    def errors(self) -> Array:
        """Said over measured steps, less one."""
        return self.steps / np.array([job.measured for job in self.jobs]) - 1


# ------------------------------------------------------------------------------------------------------------- errors


def summary(errors: Array) -> str:
    """Median and 90th percentile of |error|, and the median error [%]."""
    if not len(errors):
        return "-"
    sizes = np.abs(errors)
    return f"{100 * np.median(sizes):.1f} / {100 * np.quantile(sizes, 0.9):.1f} ({100 * np.median(errors):+.1f})"


def by_source(said: Said) -> Iterator[tuple[str, ...]]:
    """Of each source: rows with a job, their errors, and the same without those that may not be fitted on."""
    names = np.array([f"{job.source}{', MoE' * job.model.is_moe}" for job in said.jobs])
    fair = np.array([reason in {"", "mixture of experts"} for reason in said.reasons])
    for name in dict.fromkeys(names):
        own = names == name
        clean = own & fair
        yield name, str(own.sum()), summary(said.errors[own]), str(clean.sum()), summary(said.errors[clean])


def left(said: Said) -> Iterator[tuple[str, ...]]:
    """What has no job, then what has one and may not be fitted on."""
    for source, reasons in said.skipped.items():
        yield from ((source, "no job", reason, str(count)) for reason, count in sorted(reasons.items()))
    pairs = Counter((job.source, why) for job, why in zip(said.jobs, said.reasons, strict=True) if why)
    yield from ((source, "not fitted", reason, str(count)) for (source, reason), count in sorted(pairs.items()))


# -------------------------------------------------------------------------------------------------------------- order


def orders(said: Said, source: str, *, fitted_alone: bool) -> list[Order]:
    """The sweeps of a source, one for each kernel of attention, each of some layouts."""
    rows: dict[tuple[str, str], list[int]] = {}
    for index, job in enumerate(said.jobs):
        if job.source == source and not (fitted_alone and said.reasons[index]):
            rows.setdefault((job.run.sweep, job.run.software), []).append(index)
    measured = np.array([job.measured for job in said.jobs])
    return [Order.of(measured[own], said.steps[own]) for own in rows.values() if len(own) >= LEAST]


def order_row(name: str, found: Sequence[Order]) -> tuple[str, ...]:
    """Several sweeps as one row."""
    right, pairs = sum(order.right for order in found), sum(order.pairs for order in found)
    return (
        name,
        str(len(found)),
        str(sum(order.layouts for order in found)),
        f"{100 * right / pairs:.1f}% of {pairs}",
        f"{np.median([order.tau for order in found]):.2f}",
        f"{100 * np.mean([order.regret for order in found]):.1f}%",
        f"{sum(order.place == 1 for order in found)}",
        f"{sum(order.place <= FIRST for order in found)}",
    )


def by_sweep(said: Said) -> Iterator[tuple[str, ...]]:
    """The sources that swept layouts, with and without what may not be fitted on."""
    for source in ("Hagemann 2023", "nanotron"):
        yield order_row(f"{source}, all", orders(said, source, fitted_alone=False))
        yield order_row(f"{source}, fitted alone", orders(said, source, fitted_alone=True))


# --------------------------------------------------------------------------------------------------------- the report


def table(heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    """Rows under their heads, in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def report(said: Said) -> str:
    """Everything."""
    errors = ("source", "jobs", "median / p90 (bias) [%]", "may be fitted", "median / p90 (bias) [%]")
    ranks = ("sweeps", "number", "layouts", "pairs in order", "tau", "regret", "best first", f"best in {FIRST}")
    return "\n".join(
        (
            table(errors, by_source(said)),
            table(("source", "what", "why", "rows"), left(said)),
            table(ranks, by_sweep(said)),
        )
    )


if __name__ == "__main__":
    sys.stdout.write(report(Said.of_all()))
