"""Blocks that predict further tokens (multi-token prediction), each with the head's loss of its own.

A model has them as its last group of blocks; they stand on the last stage, in its last chunk.

Source: Megatron-LM 23e00ed ``core/transformer/multi_token_prediction.py``, ``core/models/gpt/gpt_model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import KEPT, Term
from memcalc.specs.model import BlockGroup
from memcalc.terms.head import head_kept
from memcalc.terms.pipeline import boundary

if TYPE_CHECKING:
    from memcalc.specs.model import Model
    from memcalc.terms.census import Census

SOURCE = "Megatron-LM 23e00ed core/transformer/multi_token_prediction.py"


def with_predictors(model: Model, count: int) -> Model:
    """The model with ``count`` more blocks, equal to its last one."""
    if not count:
        return model
    last = model.groups[-1]
    extra = BlockGroup(count=count, tower=last.tower, block=last.block)
    return model.model_copy(update={"groups": (*model.groups, extra)})


def prediction_terms(census: Census) -> Iterator[Term]:
    """What the prediction of further tokens keeps beside its blocks: their two inputs, joined, and a loss each."""
    count = census.grid.fixed.mtp
    if not count:
        return
    joined = 4 * count * boundary(census) * census.grid.is_last
    title = "hidden states and embeddings, joined for prediction"
    yield Term("activations", title, joined, KEPT, "4 · w · T · h / t", SOURCE, {"n": count})
    losses = np.asarray(count * head_kept(census))
    title = "losses of the predicted tokens"
    yield Term("activations", title, losses, ("forward", "loss"), "n · kept by the head", SOURCE, {"n": count})
