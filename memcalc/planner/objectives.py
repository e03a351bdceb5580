"""What makes one plan better than another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from memcalc.grid import column

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid, Layout

Objective = Literal["throughput", "memory", "gpus", "cost", "simplicity"]
NEARLY = 1.05
"""Among plans up to so much slower than the fastest the simplest is chosen."""


@dataclass(frozen=True)
class Goal:
    """An objective, and the critical batch size [tokens] where statistical efficiency counts too."""

    name: Objective = "throughput"
    critical_batch: float | None = None

    def waste(self, global_batch: int, seq_len: int) -> float:
        """Tokens needed for the same loss, over those at a small batch: 1 + B / B_crit (arXiv:1812.06162, eq. 2.11)."""
        return 1.0 + (global_batch * seq_len / self.critical_batch if self.critical_batch else 0.0)


@dataclass(frozen=True)
class Rank:
    """What strategies are ranked by; with ``fastest`` (by number of GPUs) the simplest of those nearly as fast."""

    goal: Goal
    fastest: Mapping[int, float] | None = None

    def keys(self, grid: Grid, rows: slice, over: Array, time: Array) -> Array:
        """The key of each strategy of a block, infinite where it does not fit; the lower, the better."""
        if self.goal.name == "memory":
            return np.where(time < np.inf, over, np.inf)
        fixed = grid.fixed
        each = time * (self.goal.waste(fixed.global_batch, fixed.seq_len) / (fixed.global_batch * fixed.seq_len))
        if self.fastest is None:
            return each
        bound = self.fastest.get(grid.layouts[rows.start].gpus, np.inf)
        parts = np.broadcast_to(moving_parts(grid)[rows], (rows.stop - rows.start, 1, *grid.shape[2:])).reshape(-1)
        return np.where(each <= NEARLY * bound, parts + each / (2 * bound), np.inf)


def moving_parts(grid: Grid) -> Array:
    """How many things a strategy has that plain training on one GPU has not, over the grid."""
    layouts = column([_of_layout(layout) for layout in grid.layouts], "layout")
    recompute = column([policy.kind != "none" for policy in grid.policies], "recompute")
    zero = column([stage > 0 for stage in grid.zeros], "zero") * (grid.ranks > 1)
    return layouts + recompute + zero + column([len(choice) for choice in grid.offloads], "offload")


def _of_layout(layout: Layout) -> int:
    degrees = layout.dp, layout.tp, layout.pp, layout.cp, layout.ep
    return sum(degree > 1 for degree in degrees) + layout.sp
