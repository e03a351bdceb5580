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
    from collections.abc import Iterable, Iterator

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


def node_rate(found: Iterable[Fixed]) -> float:
    """The rate at which a node sends, by least squares through nothing sent in no time [bytes/s]."""
    each = [(one.sent / one.spread**2, one.sent, one.seconds) for one in found]
    return sum(w * sent for w, sent, _ in each) / sum(w * taken for w, _, taken in each)


if __name__ == "__main__":
    known = list(pairs(built((run for run in layout_runs() if run.group == "Hagemann 2023"), Counter())))
    for one in known:
        sys.stdout.write(f"{one.sent / 1e9:6.0f} GB a node: {one.seconds:5.1f} s, to within {one.spread:.1f}\n")
    sys.stdout.write(f"{node_rate(known) / 1e9:.0f} GB/s a node\n")
