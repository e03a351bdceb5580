"""The network between nodes that a source does not state, from its own runs and no model of time.

``python -m fits.networks`` in this folder's parent prints it. The same layout with the same micro-batch on two numbers
of GPUs differs in how many micro-batches a rank takes: what of the step does not shrink with them is the reduction of
gradients, the gather of weights, and the optimizer. Its growth with the bytes that leave a node is the rate of a node.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fits.throughput import Job, built, layout_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

SPREAD = 0.01
"""How far two steps of the same layout are apart by chance [-]."""


@dataclass(frozen=True)
class Fixed:
    """What of a layout's step does not shrink with its micro-batches."""

    seconds: float
    spread: float
    """Of the seconds, where each step is known to within :data:`SPREAD` [s]."""
    sent: float
    """Bytes of gradients and weights that leave each node in a step."""

    @classmethod
    def of(cls, small: Job, large: Job) -> Fixed:
        """By one layout on fewer and on more GPUs."""
        rounds = [float(np.max(job.grid.accumulation)) + job.grid.layouts[0].pp - 1 for job in (small, large)]
        shares = np.array([-rounds[1], rounds[0]]) / (rounds[0] - rounds[1])
        steps = np.array([small.measured, large.measured])
        messages = large.work.messages
        sent = float(np.max(messages.gradients.volume) + np.max(messages.parameters.volume))
        return cls(float(shares @ steps), SPREAD * float(np.hypot(*(shares * steps))), sent * large.grid.layouts[0].tp)


def pairs(jobs: Iterable[Job]) -> Iterator[Fixed]:
    """Layouts that ran on two numbers of GPUs over nodes, the smallest and the largest."""
    rows: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        layout = job.grid.layouts[0]
        if layout.tp * layout.dp > job.node.gpus_per_host:
            shape = layout.tp, layout.pp, layout.sp, job.grid.micro_batches, job.grid.recomputes
            rows.setdefault((job.model.name, job.grid.fixed, *shape), []).append(job)
    for own in rows.values():
        small, large = min(own, key=lambda job: job.run.gpus), max(own, key=lambda job: job.run.gpus)
        if small.run.gpus < large.run.gpus:
            yield Fixed.of(small, large)


def node_rate(known: Sequence[Fixed]) -> float:
    """The rate at which a node sends, by weighted least squares; a step's other parts are the intercept [bytes/s]."""
    sent, seconds, spread = np.array([(each.sent, each.seconds, each.spread) for each in known]).T
    slope, _ = np.polyfit(sent, seconds, 1, w=1 / spread)
    return float(1 / slope)


def interval(known: Sequence[Fixed], draws: int = 2000) -> tuple[float, float]:
    """The rates that 95% of as many layouts, drawn from these, give [bytes/s]."""
    drawn = np.random.default_rng(0).integers(len(known), size=(draws, len(known)))
    low, high = np.quantile([node_rate([known[place] for place in each]) for each in drawn], (0.025, 0.975))
    return float(low), float(high)


if __name__ == "__main__":
    layouts = list(pairs(built((run for run in layout_runs() if run.group == "Hagemann 2023"), Counter())))
    for each in layouts:
        sys.stdout.write(f"{each.sent / 1e9:6.0f} GB a node: {each.seconds:5.1f} s, to within {each.spread:.1f}\n")
    low, high = interval(layouts)
    sys.stdout.write(f"{node_rate(layouts) / 1e9:.0f} GB/s a node ({low / 1e9:.0f} to {high / 1e9:.0f})\n")
