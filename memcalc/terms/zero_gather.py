"""What ZeRO's stage 3 holds of the whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.census import model_count
from memcalc.frameworks.zero import Zero
from memcalc.ledger import ALWAYS, BACKWARD, Term

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.terms.census import Census

COORDINATOR = "DeepSpeed v0.12.3 runtime/zero/partitioned_param_coordinator.py"
AROUND = ("forward", "loss")


def era(grid: Grid) -> Zero:
    """The habits of the framework's ZeRO."""
    return grid.habits.zero_optimizer or Zero()


def gather_terms(census: Census) -> Iterator[Term]:
    """Whole weights: those used again soon, the module at work and the prefetch, and the small ones all the time."""
    grid, width = census.grid, census.grid.width("compute")
    # one rank has all of it: a gather is then a view (NoGatherHandle), unless weights come from the host
    copied = (grid.ranks > 1) | (grid.offloaded("params") == 1)
    on = width * ((grid.zero == 3) & copied)
    small = persistent(census)
    inputs = {
        "w": width,
        "P_small": small,
        "P": census.parameters,
        "P_block": census.largest_block,
        "W": window(census),
    }
    title, source = "parameters that stay whole", f"{COORDINATOR}: ds_persist"
    yield Term("buffers", title, on * small, ALWAYS, "w · P_small", source, inputs)
    ahead = prefetched(grid)
    room = np.maximum(census.parameters - small, 0)
    around = np.minimum(census.head + window(census) + ahead, room)
    title, formula = "gathered head and the blocks used again soon", "w · min(P, P_head + W + prefetch)"
    yield Term("buffers", title, on * around, AROUND, formula, f"{COORDINATOR}: __params_to_release", inputs)
    block = np.minimum(census.largest_block + ahead, room)
    title, formula = "gathered block and the prefetch", "w · min(P, P_block + prefetch)"
    yield Term("buffers", title, on * block, ("forward-last", "backward-first"), formula, COORDINATOR, inputs)
    last = np.minimum(np.maximum(window(census), census.largest_block) + ahead, room)
    title, formula = "gathered last blocks and the prefetch", "w · min(P, max(W, P_block) + prefetch)"
    yield Term("buffers", title, on * last, BACKWARD[:1], formula, COORDINATOR, inputs)


def prefetched(grid: Grid) -> int:
    """Elements gathered ahead: a bucket, where so many may be live."""
    zero = era(grid)
    bucket = zero.prefetch_bucket if grid.fixed.zero_prefetch_bucket is None else grid.fixed.zero_prefetch_bucket
    live = zero.max_live if grid.fixed.max_live_parameters is None else grid.fixed.max_live_parameters
    return min(bucket, live)


def window(census: Census) -> Array:
    """Elements of the last blocks that are not released between forward and backward.

    A block is kept where what is used between its forward and its backward, head and later blocks each twice, is less
    than ``stage3_max_reuse_distance``.
    """
    return np.minimum(
        np.maximum(era(census.grid).max_reuse // 2 - census.head, 0), census.blocks + census.experts_or_none
    )


def persistent(census: Census) -> Array:
    """Elements of norms and biases, which are below ``stage3_param_persistence_threshold`` where the hidden size is.

    Of a recorded model those of all tensors of the blocks that are.
    """
    grid, model = census.grid, census.model
    zero = era(grid)
    told = grid.fixed.persistence_threshold
    least = zero.persistence if told is None else told
    if model.recording is not None:
        small = [sum(n for n in block.tensors if n < least) for block in model.recorded_blocks]
        return sum((n * size for n, size in zip(census.layers, small, strict=True)), np.int64(0))
    if model.hidden >= least:
        return np.int64(0)
    counts = [n * c.replicated for n, (_, c) in zip(census.layers, model_count(model).groups, strict=True)]
    return sum(counts, np.int64(0))
