"""Terms of what stays alive after backward, because a training script still refers to the loss or to the logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import Term
from memcalc.terms.activations import add_all, groups_of
from memcalc.terms.head import loss_of, loss_source, over_vocabularies

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.census import Census

AFTER = ("backward-last", "backward-first", "backward-end", "step")
GRAPH = "bitsandbytes 0.42 autograd/_functions.py (MatMul4Bit: ctx.tensors); torch/csrc/autograd/python_function.cpp"


def held_terms(census: Census) -> Iterator[Term]:
    """The logits until they are bound anew, and what nodes of the graph hold as attributes until the loss is."""
    loss = loss_of(census.grid)
    if loss.held:
        logits = over_vocabularies(census, "held_sum")
        source = loss_source(census.grid)
        yield Term("activations", "logits that the script holds", logits, AFTER, "4 · V · T", source)
        before = logits * (not census.grid.fixed.longest_first)
        title = "logits of the micro-batch before"
        yield Term("activations", title, before, ("forward-last",), "4 · V · T", source)
    blocks = graph_bytes(census)
    if not np.any(blocks):
        return
    title, formula = "inputs of quantised products, held by the graph", "attributes of its nodes"
    yield Term("activations", title, blocks, ("backward-first", "backward-end", "step"), formula, GRAPH)
    if loss.held and not census.grid.fixed.longest_first:
        title = "inputs of quantised products, of the micro-batch before"
        yield Term("activations", title, blocks, ("forward-last", "forward"), formula, GRAPH)


def graph_bytes(census: Census) -> Array:
    """Bytes of the blocks that the graph holds beyond backward."""
    return add_all([group.field("whole") * group.over("held_sum", whole=True) for group in groups_of(census)])
