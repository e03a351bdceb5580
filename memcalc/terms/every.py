"""Blocks that keep everything between checkpointed ones: where the largest moments of backward are then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.grid import AXES, column
from memcalc.ledger import Term
from memcalc.terms.activations import full, groups_of, largest
from memcalc.terms.kept import INVENTORY
from memcalc.trace.template import total, trace

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.census import Census


def block_copies(activations: GroupActivations) -> Array:
    """Bytes of the 16-bit weight copies that autocast makes for one block, by precision."""
    found = []
    for setting in activations.settings:
        records = trace(activations.group.block, setting, "full").records
        copies = total(record for record in records if record.kind == "weight copy" and setting.autocast)
        found.append(full(activations.evaluate(copies, np.int64(0))))
    return np.concatenate(np.broadcast_arrays(*found), axis=AXES.index("precision"))


def spacing(grid: Grid) -> Array:
    """Of how many blocks one is checkpointed, along the recompute axis; 1 where blocks are alike."""
    return column([p.count if p.kind == "every" else 1 for p in grid.policies], "recompute")


def every_terms(census: Census) -> Iterator[Term]:
    """The first checkpointed block's backward, where it needs more than the first block's.

    Before it are blocks that keep everything, whose gradients are still to come.
    """
    groups, number = groups_of(census), spacing(census.grid)
    if np.all(number == 1):
        return
    more = largest([beyond_the_first(census, activations, index) for index, activations in enumerate(groups)])
    title, formula = "blocks that keep everything, before the first checkpointed one", "(k - 1) · (A_kept - G_block)"
    yield Term("activations", title, more, ("backward-first",), formula, INVENTORY, {"k": number}, in_events=True)


def beyond_the_first(census: Census, activations: GroupActivations, index: int) -> Array:
    """Bytes by which that moment exceeds a checkpointed block's backward alone; negative where no moment needs those.

    FSDP 2 counts the first block's kept tensors of its own accord (:func:`memcalc.terms.fsdp2.reduction_terms`).
    """
    grid, number = census.grid, spacing(census.grid)
    chosen = np.flatnonzero(number > 1)

    def of(array: Array) -> Array:
        return array if array.shape[AXES.index("recompute")] == 1 else array[:, :, :, chosen]

    number = of(number)
    counted = (grid.zero_from(2) & (grid.habits.gather == "blocks") & (not grid.habits.flat_units)).astype(np.int64)
    before = number - 1 - np.minimum(counted, number - 1)
    sharded = grid.zero_from(2) & (grid.habits.full_shard or not grid.persistent_gradients)
    own = census.sharded(census.block_dense[index], census.block_experts[index], sharded)
    gradients = census.width("gradient") * own * ((grid.accumulation == 1) & (not grid.persistent_gradients))
    treated, whole = of(activations.over("backward_peaks")), activations.over("backward_peaks", whole=True)
    each = activations.whole_block + block_copies(activations) - gradients
    there = np.minimum(of(activations.field("treated")), 1) * activations.exists
    more = np.maximum(whole - treated, before * each) * there
    found = np.zeros((*more.shape[:3], len(grid.policies), *more.shape[4:]), dtype=np.int64)
    found[:, :, :, chosen] = more
    return found


def kept_by_first(activations: GroupActivations) -> Array:
    """Bytes that a stage's first block keeps for backward, for one micro-batch."""
    treated = (activations.field("treated") > 0) & (spacing(activations.grid) == 1)
    return np.where(treated, activations.treated_block, activations.whole_block) * activations.exists


def kept_by_last(activations: GroupActivations) -> Array:
    """Bytes that a stage's last block keeps for backward, for one micro-batch."""
    treated = activations.is_treated == 1
    return np.where(treated, activations.treated_block, activations.whole_block) * activations.exists


def made_by_last(activations: GroupActivations) -> Array:
    """Bytes that the last block's forward adds to what stands before it, at its largest moment."""
    return kept_by_last(activations) + activations.forward


def gone_before(activations: GroupActivations) -> Array:
    """Bytes less in the working set and the kept tensors, once the last block's backward is over."""
    kept, number = kept_by_last(activations), spacing(activations.grid)
    if np.all(number == 1):
        return kept
    again = activations.over("backward_peaks") - activations.treated_block
    once = activations.over("backward_peaks", whole=True) - activations.whole_block
    before = np.where(number == 1, activations.is_treated, (activations.layers - 1) % number == 0)
    last = np.where(activations.is_treated == 1, again, once)
    return kept + (last - np.where(before == 1, again, once)) * activations.exists
