"""Gradients of the local DDP that Megatron-LM had in 2021, without contiguous buffers.

After its all-reduce each parameter refers to its gradient a second time (``param.main_grad = param.grad``), and
``zero_grad`` drops the first reference alone: the gradients of the step before live until the next all-reduce. The fp32
gradients of the optimizer's own parameters are replaced, never dropped.

Source: Megatron-LM b4bc51b ``megatron/model/distributed.py`` (``allreduce_gradients``) and
``megatron/optimizer/optimizer.py`` (``zero_grad``, ``_copy_model_grads_to_main_grads``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import ALWAYS, Term
from memcalc.terms.activations import add_all, groups_of
from memcalc.terms.pipeline import boundary, in_flight

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.census import Census

BEFORE_REDUCTION = ("forward-last", "forward", "loss", "backward-last", "backward-first")


def traded(census: Census, in_one_buffer: Array | bool) -> tuple[Array, Array] | None:
    """Where gradients are made by the first backward of a stage alone, and the bytes that it has let go of by then.

    Where every micro-batch is in flight before that, none comes in for the one that has gone.
    """
    grid = census.grid
    made = ~np.asarray(in_one_buffer, dtype=bool) & (not grid.persistent_gradients)
    alone = made & (grid.degree("pp") > 1) & (grid.accumulation > 1) & (grid.accumulation == in_flight(grid))
    if not np.any(alone):
        return None
    sent = boundary(census) * grid.habits.keeps_stage_outputs
    return alone.astype(np.int64), (add_all([group.kept for group in groups_of(census)]) + sent) * alone


def local_gradient_terms(census: Census) -> Iterator[Term]:
    """What the local DDP and its optimizer keep besides the gradients themselves."""
    habits, width, count = census.grid.habits, census.width("gradient"), census.parameters
    inputs = {"w": width, "P": count}
    if habits.main_gradients:
        title, own = "gradients of the optimizer's parameters", habits.main_gradients * count
        yield Term("gradients", title, own, ALWAYS, "4 · P", habits.source, {"P": count})
    if habits.flattened_gradients:
        title = "gradients of the step before"
        yield Term("gradients", title, width * count, BEFORE_REDUCTION, "w · P", habits.source, inputs)
        title = "gradients, flattened for their all-reduce"
        yield Term("gradients", title, width * count, ("backward-end",), "w · P", habits.source, inputs)
