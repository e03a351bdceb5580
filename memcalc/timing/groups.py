"""Which ranks of a group share a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import Node


def in_node(grid: Grid, node: Node, ranks: Array, stride: Array) -> Array:
    """Ranks of a group that share a node, where neighbours of the group are ``stride`` ranks apart."""
    return np.maximum(np.minimum(ranks, node.gpus // np.minimum(stride, node.gpus)), 1) + 0 * grid.degree("tp")
