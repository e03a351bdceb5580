"""What divides a tensor over ranks, and whether it exists at all: the meaning of :data:`memcalc.trace.tape.Shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc.specs.block import MixtureOfExperts

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.block import Block
    from memcalc.trace.tape import Shard


def ranks(grid: Grid, shard: Shard) -> Array:
    """What divides a tensor."""
    tp = grid.degree("tp")
    divisors = {
        "none": np.int64(1),
        "tp": tp,
        "tp if batched": tp,
        "tp if cp": tp,
        "gathered": np.int64(1),
        "part if tp": tp,
        "full if tp": np.int64(1),
        "routed ffn": tp,
        "sp": grid.sequence_shard,
        "rows if ep": grid.sequence_shard,
        "ep": grid.degree("ep"),
        "full if sp": np.int64(1),
        "rows": tp // grid.expert_tp,
        "rows if sorted": tp // grid.expert_tp,
        "experts": grid.degree("ep") * grid.expert_tp,
    }
    return divisors[shard]


def present(grid: Grid, shard: Shard, block: Block) -> Array:
    """1 where a tensor exists: some are copies that are made under a condition alone."""
    conditions = {
        "full if sp": lambda: grid.sequence_shard > 1,
        "tp if batched": lambda: grid.micro_batch > 1,
        "tp if cp": lambda: grid.degree("cp") > 1,
        "part if tp": lambda: grid.degree("tp") > 1,
        "full if tp": lambda: grid.degree("tp") > 1,
        "rows if ep": lambda: (grid.degree("ep") > 1) | (grid.expert_tp > 1),
        "rows if sorted": lambda: (grid.degree("ep") > 1) & (local_experts(grid, block) > 1),
    }
    return conditions[shard]().astype(np.int64) if shard in conditions else np.int64(1)


def local_experts(grid: Grid, block: Block) -> Array:
    """Routed experts on a rank."""
    experts = block.mlp.experts if isinstance(block.mlp, MixtureOfExperts) else 1
    return np.maximum(experts // grid.degree("ep"), 1)


def routed_rows(tokens: Array, block: Block, overload: float = 1.0) -> Array:
    """Tokens that pass the experts, each once for each of its experts, every expert with the same number of them.

    With an ``overload`` the experts of the fullest rank have that many times their equal share, rounded up for each as
    Megatron-LM rounds a capacity (core/transformer/moe/moe_utils.py at d98e8a6, get_capacity).
    """
    if not isinstance(block.mlp, MixtureOfExperts):
        return np.int64(0)
    experts, topk = block.mlp.experts, block.mlp.topk
    if overload == 1:
        return experts * -(-tokens * topk // experts)
    return np.asarray(experts * np.ceil(tokens * topk / experts * overload)).astype(np.int64)
