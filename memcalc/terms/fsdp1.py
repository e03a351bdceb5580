"""Terms of FSDP 1: flat parameters that are gathered unit by unit, and what its hooks keep alive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import COMPUTING, Term
from memcalc.terms.activations import add_all, groups_of
from memcalc.terms.adapters import Base, trained
from memcalc.terms.settings import enters_units_again

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.model_on_grid import ModelOnGrid

FLAT = "torch/distributed/fsdp/_runtime_utils.py and _flat_param.py, torch 2.4 to 2.13"


def prefetches(census: ModelOnGrid) -> Array:
    """1 where backward gathers the next block beside the running one.

    Only blocks whose forward built a graph are gathered ahead (``_needs_pre_backward_unshard``), which those under a
    reentrant checkpoint around the unit have not; and where adapters are units of their own, the next unit is one of
    them.
    """
    grid = census.grid
    if grid.fixed.adapters is not None and not grid.habits.mixed_units:
        return np.int64(0)
    return 1 - checkpointed(census) if enters_units_again(grid) else np.int64(1)


def checkpointed(census: ModelOnGrid) -> Array:
    """1 where the policy checkpoints the blocks."""
    last = groups_of(census)[-1]
    return np.minimum(add_all([group.field("treated") for group in (last.stack.groups if last.stack else (last,))]), 1)


def flat_unit_terms(census: ModelOnGrid) -> Iterator[Term]:
    """What is gathered for compute, and what is reduced."""
    for term in (*flat_gather_terms(census), *flat_reduction_terms(census)):
        yield replace(term, in_events=True)


def flat_gather_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The root unit is whole from forward to the end of backward; of the blocks one is, and in backward the next."""
    grid = census.grid
    base, sharded = Base(census), grid.zero_from(2)
    root, block = base.root * sharded, base.largest_block * sharded
    inputs = {"w": base.width, "P_root": census.root, "P_block": census.largest_block}
    yield Term("buffers", "gathered embedding, norm and head", root, COMPUTING, "w · P_root", FLAT, inputs)
    resharded = grid.zero == 3
    saved = base.all_blocks * sharded * (1 - resharded)
    phases = ("forward-last", "forward", "loss", "backward-last")
    yield Term("buffers", "gathered blocks", saved, phases, "w · P_blocks", FLAT, inputs)
    forward, backward = block * resharded, block * resharded * (1 + prefetches(census))
    yield Term("buffers", "gathered block of forward", forward, ("forward-last",), "w · P_block", FLAT, inputs)
    title, formula = "gathered block and the prefetched one", "(1 + prefetched) · w · P_block"
    yield Term("buffers", title, backward, ("backward-last",), formula, FLAT, inputs)
    yield Term("buffers", "gathered first block", block, ("backward-first",), "w · P_block", FLAT, inputs)


def flat_reduction_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The root's gradients: one by one, and again as the one flat tensor that the views' backward makes of them."""
    grid, updated = census.grid, trained(census)
    width = (
        np.minimum(updated.width("gradient"), grid.width("compute")) if updated is census else updated.width("gradient")
    )
    flat = 2 * width * updated.root * grid.zero_from(2)
    inputs = {"w": width, "P_root": updated.root}
    yield Term(
        "buffers", "root's gradients and their flat copy", flat, ("backward-end",), "2 · w · P_root", FLAT, inputs
    )
