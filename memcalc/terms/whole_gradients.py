"""Gradients that FSDP leaves whole on each rank: those not synchronised yet, and those of mixed flat parameters.

Source: torch/distributed/fsdp/_runtime_utils.py of PyTorch 2.1 to 2.13 (``_post_backward_hook`` returns before the
reduction under ``no_sync``) and _flat_param.py (with ``use_orig_params`` a flat parameter needs a gradient where one of
its parameters does, and the views' backward makes it whole).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import KEPT, Term
from memcalc.terms.activations import groups_of, largest
from memcalc.terms.adapters import trained

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.census import Census

SOURCE = "torch/distributed/fsdp/_runtime_utils.py, _post_backward_hook; _flat_param.py, use_orig_params"


def accumulates_whole(census: Census) -> Array:
    """1 where gradients of earlier micro-batches are whole."""
    grid = census.grid
    told = grid.fixed.whole_accumulation
    whole = grid.habits.whole_accumulation if told is None else told
    return np.asarray((grid.accumulation > 1) & grid.zero_from(2) & grid.habits.full_shard & whole).astype(np.int64)


def whole_gradient_terms(census: Census) -> Iterator[Term]:
    """Unsharded gradients, beside which sharded ones do not exist yet."""
    grid, where = census.grid, accumulates_whole(census)
    if not np.any(where):
        return
    # FSDP 2 casts what it adds up to the dtype of the reduction (_fsdp_param.py, to_accumulated_grad_if_needed)
    width = grid.width("compute") if grid.habits.flat_units else grid.reduce_width
    blocks, root = flat_blocks(census), flat_root(census)
    inputs = {"w": width, "P_blocks": blocks, "P_root": root}
    whole = width * (blocks + root) * where
    title, formula = "unsharded gradients of earlier micro-batches", "w · P of flat parameters that are trained"
    if not grid.fixed.longest_first:
        yield Term("buffers", title, whole, (*KEPT, "backward-first", "backward-end"), formula, SOURCE, inputs)
        return
    first = width * (blocks - census.largest_block) * where
    title = "unsharded gradients of the first micro-batch"
    yield Term("buffers", title, first, ("backward-first",), f"{formula} - w · P_block", SOURCE, inputs)
    # A later micro-batch has hardly any activations, but all of these: two gathered blocks, and one's gradient twice
    later = whole + 4 * width * census.largest_block * where
    title, formula = "whole gradients and the running block in a later, short micro-batch", "w · (P + 4 · P_block)"
    yield Term("buffers", title, later, ("backward-end",), formula, SOURCE, inputs)


def flat_blocks(census: Census) -> Array:
    """Parameters of the blocks' units whose gradients are whole [elements].

    Frozen ones stand beside adapters where a flat parameter has both; PEFT's wrapping policy keeps them apart.
    """
    updated = trained(census)
    inside = census.blocks + census.experts_or_none
    if not census.grid.habits.mixed_units:
        return updated.blocks + updated.experts_or_none
    return inside if updated is census else (inside + updated.blocks) * (updated.blocks > 0)


def flat_root(census: Census) -> Array:
    """Parameters of the root's flat parameter, where one of them is trained [elements]."""
    updated = trained(census)
    if not census.grid.habits.mixed_units:
        return updated.root
    return census.root if updated is census else (census.root + updated.root) * (updated.root > 0)


def block_gradient_terms(census: Census) -> Iterator[Term]:
    """The gradients of a block's weights, the frozen ones among them, and the flat tensor that is made of all.

    They stand together when the block's backward is over, so that only what is more than its working set counts.
    """
    grid, updated = census.grid, trained(census)
    if updated is census or not grid.habits.mixed_units:
        return
    flat = 2 * grid.width("compute") * census.largest_block * grid.zero_from(2)
    groups = groups_of(census)
    inputs = {"w": grid.width("compute"), "P_block": census.largest_block}
    title, formula = (
        "gradient of a block's flat parameter and its parts",
        "2 · w · P_block - working set of its backward",
    )
    for phase, working in (("backward-last", [g.last for g in groups]), ("backward-first", [g.first for g in groups])):
        bytes_ = np.maximum(flat - largest(working), 0)
        yield Term("buffers", title, bytes_, (phase,), formula, SOURCE, inputs)
