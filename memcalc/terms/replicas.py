"""Terms of hybrid sharding (HSDP): what FSDP 2 holds while replicas of the shards all-reduce their gradients.

The all-reduce is in place, on the output of the reduce-scatter and in the dtype of the reduction. A unit keeps that
output until backward ends (``FSDPParamGroup._all_reduce_state``). So it costs nothing where the output becomes the
gradient itself, and a second set of sharded gradients where it is cast, copied to the host, or added to those of an
earlier micro-batch.

Source: ``torch/distributed/fsdp/_fully_shard/`` of PyTorch 2.13: ``_fsdp_collectives.py`` (foreach_reduce) and
``_fsdp_param_group.py`` (post_backward, finalize_backward).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import Term
from memcalc.terms.adapters import trained
from memcalc.terms.fsdp2 import Units
from memcalc.terms.gradients import accumulates_whole

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.terms.model_on_grid import ModelOnGrid

ALL_REDUCE = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13: AllReduceState"


def held_by_replicas(grid: Grid) -> Array:
    """1 where units hold what they reduced: FSDP 2's, with replicas between which it is all-reduced."""
    replicated = (grid.degree("dp_replicate") > 1) & grid.zero_from(2) & (grid.fixed.fsdp_schedule != "simple")
    return np.asarray(replicated).astype(np.int64)


def copies_reduced(census: ModelOnGrid) -> Array:
    """1 where the gradient is another tensor than what was reduced: cast to the dtype of its shard, or on the host."""
    cast = census.grid.reduce_width != trained(census).width("gradient")
    return np.maximum(np.asarray(cast).astype(np.int64), census.grid.offloaded("params"))


def keeps_reduced(census: ModelOnGrid) -> Array:
    """1 where outputs of reduce-scatters stay beside the gradients until a micro-batch's backward ends."""
    grid = census.grid
    once = (grid.accumulation == 1) | (accumulates_whole(census) == 1) | (Units(census).pipelined == 1)
    return held_by_replicas(grid) * np.maximum(np.asarray(~once).astype(np.int64), copies_reduced(census))


def replica_terms(census: ModelOnGrid) -> Iterator[Term]:
    """What is kept of the reduced gradients, of all units but those whose backward is still to come."""
    grid, updated = census.grid, trained(census)
    if not np.any(held_by_replicas(grid)):
        return
    outer = updated.embedding if Units(updated).split else updated.root
    blocks = updated.blocks + updated.experts_or_none
    done = {
        "backward-first": np.maximum(blocks + updated.root - outer - 2 * updated.largest_block, 0),
        "backward-end": blocks + updated.root - outer,
    }
    title = "reduced gradients, kept until backward ends"
    for phase, elements in done.items():
        local = updated.sharded(elements - updated.experts_or_none, updated.experts_or_none, where=True)
        bytes_ = grid.reduce_width * np.maximum(local, 0) * keeps_reduced(census)
        inputs = {"w_reduce": grid.reduce_width, "P": elements, "N": grid.ranks}
        formula = "w_reduce · ⌈P / N⌉"
        yield Term("buffers", title, bytes_, (phase,), formula, ALL_REDUCE, inputs, "reduce-scatter", in_events=True)
