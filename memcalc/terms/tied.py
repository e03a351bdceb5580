"""Gradients of a weight that is both embedding and head, on ranks that keep it whole.

Autograd hands a weight's gradient on when all its uses have given theirs: the head's waits for the embedding's through
the whole of backward. The engine adds the two out of place, since the head's is a transposed view.

Source: PyTorch 2.13 ``torch/csrc/autograd/input_buffer.cpp`` (accumulate) and ``functions/accumulate_grad.h``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.census import model_count
from memcalc.formulas.optimizer import shard
from memcalc.ledger import Term

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.terms.census import Census

SOURCE = "torch/csrc/autograd/input_buffer.cpp (accumulate), torch 2.13"


def tied_terms(census: Census) -> Iterator[Term]:
    """What waits, and the sum beside its two parts where it is made; the first part is counted as the head's."""
    grid = census.grid
    elsewhere = grid.persistent_gradients or grid.habits.zero_optimizer is not None
    if not census.model.tied or elsewhere or grid.fixed.lora is not None or grid.fixed.optimizer_in_backward:
        return
    matrix = shard(model_count(census.model).embedding + census.padding, grid.degree("tp"))
    here = whole(grid) * matrix * census.width("gradient") * bool(census.model.head)
    earlier = accumulating(grid)
    # The term of the head has it in the first micro-batch's backward-last
    waiting = (("backward-last", earlier), ("backward-first", np.int64(1)))
    inputs = {"w": census.width("gradient"), "P_head": matrix}
    title, formula = "gradient of the head, which waits for the embedding's", "w · P_head"
    for phase, where in waiting:
        yield Term("gradients", title, here * where, (phase,), formula, SOURCE, inputs)
    title, formula = "gradients of embedding and head, and their sum", "w · P_head · (2, or 3 beside an earlier one)"
    yield Term("gradients", title, here * (2 + earlier), ("backward-end",), formula, SOURCE, inputs)


def whole(grid: Grid) -> Array:
    """1 where embedding and head are one weight of a rank, and not a part of one."""
    sharded = grid.zero_from(2) & (grid.habits.gather == "blocks")
    return np.asarray((~grid.ends_apart & ~sharded) * grid.is_first)


def accumulating(grid: Grid) -> Array:
    """1 where gradients of earlier micro-batches, or zeros, are there."""
    kept = ((grid.accumulation > 1) & (not grid.fixed.longest_first)) | grid.habits.zeroes_gradients
    return np.asarray(kept).astype(np.int64)
