"""Weights that TransformerEngine quantises for 8-bit and 4-bit products, and what stands for the 16-bit ones.

Each linear layer of a block keeps a quantised copy of its weight, along the directions of forward and backward, from
its first micro-batch on; the embedding, the head, norms and routers have none. With ``--fp8-param-gather`` that copy is
the weight itself.

Sources: TransformerEngine d0067d0d ``pytorch/module/base.py`` (``quantize_weight``) and ``pytorch/csrc/quantizer.cpp``;
Megatron-LM d98e8a64 ``core/extensions/transformer_engine.py`` (``is_first_microbatch``) and
``core/distributed/param_and_grad_buffer.py`` (gathered 8-bit weights of MXFP8 pass through the gradient buffer).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.optimizer_states import shard
from memcalc.formulas.quantization import narrow_bytes
from memcalc.grid import column
from memcalc.ledger import ALWAYS, Term
from memcalc.terms.matrices import block_matrices

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.specs.block import Block
    from memcalc.terms.model_on_grid import ModelOnGrid

SOURCE = "TransformerEngine d0067d0d pytorch/module/base.py, quantize_weight; pytorch/csrc/quantizer.cpp"
WHOLE = ("q_a", "kv_a")
"""Matrices that tensor parallelism does not divide: latent attention's down projections."""


def quantised_weight_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The quantised copies of all weights of a stage that are multiplied so."""
    grid, recipe = census.grid, census.grid.recipe
    narrow = column([name.startswith("fp8") for name in grid.precisions], "precision")
    if recipe is None or not narrow.any():
        return
    width = recipe.weight_bytes(transposes=grid.fixed.float8_transposes)
    elements = quantised_elements(census)
    bytes_ = narrow * np.asarray(narrow_bytes(elements, width.numerator, width.denominator))
    inputs = {"w": float(width), "P_linear": elements}
    yield Term("parameters", "quantised weights", bytes_, ALWAYS, "w · P_linear", SOURCE, inputs)


def replaced_elements(census: ModelOnGrid) -> Array:
    """Weights that have no 16-bit form beside their quantised one [elements]."""
    stored = census.grid.narrow_weights
    return stored * quantised_elements(census) if stored.any() else np.int64(0)


def quantised_elements(census: ModelOnGrid) -> Array:
    """Weights of a stage's linear layers on a rank [elements]."""
    tp, total = census.grid.degree("tp"), np.int64(0)
    experts = census.grid.expert_tp * census.grid.degree("ep")
    for group, layers in zip(census.model.groups, census.layers, strict=True):
        divided, replicated, routed = elements_of(group.block)
        total = total + layers * (shard(divided, tp) + replicated + shard(routed, experts))
    predictors = census.grid.fixed.mtp * shard(2 * census.model.hidden**2, tp) * census.grid.is_last
    return total + predictors


def elements_of(block: Block) -> tuple[int, int, int]:
    """A block's weights that are quantised: those that TP divides, those that it does not, and routed experts'."""
    matrices = [matrix for matrix in block_matrices(block) if matrix.target != "router"]
    routed = sum(matrix.elements for matrix in matrices if matrix.routed)
    replicated = sum(matrix.elements for matrix in matrices if matrix.target in WHOLE)
    return sum(matrix.elements for matrix in matrices) - routed - replicated, replicated, routed
