"""What the update of states below fp32 copies, and what it reads and writes, on one rank (Megatron-LM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.narrow_states import state_traffic, widened_bytes
from memcalc.formulas.optimizer_states import shard
from memcalc.frameworks.precision_aware import stores_remainders, widened
from memcalc.grid import column
from memcalc.ledger import ALWAYS, Term
from memcalc.terms.moments import largest_share, optimizer_moments, rank_weights, sharded_from, updated_elements

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.terms.model_on_grid import ModelOnGrid

SOURCE = "TransformerEngine d0067d0d pytorch/optimizers/fused_adam.py, get_unscaled_state and step"


def narrow_moments_term(census: ModelOnGrid) -> Term:
    """Adam's moments, each in its own width."""
    inputs = {
        "w_1": census.width("moment"),
        "w_2": census.width("second_moment"),
        "P": census.parameters,
        "N": np.where(sharded_from(census.grid, 1), census.grid.ranks, 1),
    }
    bytes_ = optimizer_moments(census)
    return Term("optimizer", "adamw moments", bytes_, ALWAYS, "(w_1 + w_2) · ⌈P / N⌉", SOURCE, inputs)


def widened_term(census: ModelOnGrid) -> Term:
    """The fp32 copies of narrow states, of the largest group of parameters."""
    copied = [widened(census.grid.fixed, name, census.grid.habits) for name in census.grid.precisions]
    states = column([len(dtypes) for dtypes in copied], "precision")
    through = column(["bf16" in dtypes for dtypes in copied], "precision")
    group, largest = largest_group(census), largest_share(census)
    bytes_ = np.asarray(widened_bytes(group, largest, states, through))
    inputs = {"k": states, "P_g": group, "P_max": largest}
    formula = "4 · k · P_g + 2 · P_max, the last for bf16 alone"
    return Term("optimizer", "fp32 copies of narrow states", bytes_, ("step",), formula, SOURCE, inputs)


def largest_group(census: ModelOnGrid) -> Array:
    """Parameters of the largest group of one optimizer on a rank [elements].

    Dense weights and experts have optimizers that step one after another, and what has no weight decay, vectors, is a
    group of its own (Megatron-LM d98e8a64 core/optimizer/__init__.py, ``_get_param_groups``).
    """
    sharded = sharded_from(census.grid, 1)
    sums: dict[bool, Array] = {False: np.int64(0), True: np.int64(0)}
    for each in rank_weights(census):
        sums[each.routed] = sums[each.routed] + each.number * each.weight.elements
    ranks, expert_ranks = (np.where(sharded, n, 1) for n in (census.grid.ranks, census.grid.expert_ranks))
    return np.maximum(shard(sums[False], ranks), shard(sums[True], expert_ranks))


def update_traffic(census: ModelOnGrid) -> Array:
    """What the update of moments and main weights reads and writes, with the 16-bit weight that it makes [bytes]."""
    per_element = column([_traffic(census.grid, name) for name in census.grid.precisions], "precision")
    return np.asarray(updated_elements(census) * per_element)


def _traffic(grid: Grid, precision: str) -> int:
    """Of one element: the low 16 bits of a main weight are read with its bf16 weight."""
    fixed = grid.fixed
    copied = widened(fixed, precision, grid.habits)
    moments = sum(state_traffic(name, widened=name in copied) for name in (fixed.exp_avg_dtype, fixed.exp_avg_sq_dtype))
    main = state_traffic(fixed.main_params_dtype, widened=fixed.main_params_dtype in copied)
    weight = grid.habits.widths[precision].parameter
    return moments + (2 * weight + 2 * 2 if stores_remainders(fixed, precision, grid.habits) else main + weight)
