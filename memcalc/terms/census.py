"""Parameters of a model on one rank, as columns over the layouts and stages of a grid."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.census import model_count
from memcalc.formulas.optimizer import shard

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.model import Model


@dataclass(frozen=True, eq=False)
class Census:
    """What a rank holds before any sharding over data-parallel ranks [elements]; each column is computed once."""

    model: Model
    grid: Grid

    @cached_property
    def layers(self) -> tuple[Array, ...]:
        """Blocks of each group on each stage."""
        starts, start = [], 0
        for group in self.model.groups:
            starts.append(start)
            start += group.count
        return tuple(
            self.grid.layers(first, group.count, start) for first, group in zip(starts, self.model.groups, strict=True)
        )

    @cached_property
    def block_dense(self) -> tuple[Array, ...]:
        """Parameters of one block of each group on a rank, routed experts left out."""
        tp = self.grid.degree("tp")
        return tuple(shard(c.attention + c.mlp, tp) + c.replicated for _, c in model_count(self.model).groups)

    @cached_property
    def block_experts(self) -> tuple[Array, ...]:
        """Routed experts' parameters of one block of each group on a rank."""
        ranks = self.grid.degree("tp") * self.grid.degree("ep")
        return tuple(shard(c.experts, ranks) for _, c in model_count(self.model).groups)

    @cached_property
    def largest_block(self) -> Array:
        """Parameters of the largest block on a rank."""
        blocks = [d + e for d, e in zip(self.block_dense, self.block_experts, strict=True)]
        return np.maximum.reduce(np.broadcast_arrays(*blocks))

    @cached_property
    def root(self) -> Array:
        """Parameters outside the blocks: embedding and what precedes the blocks, norm and head, by stage.

        A tied embedding has a copy on the first and on the last stage of a pipeline.
        """
        count, tp = model_count(self.model), self.grid.degree("tp")
        first = shard(count.embedding, tp) + count.outside_first
        tied_copy = shard(count.embedding, tp) * (self.grid.degree("pp") > 1) * self.model.tied
        last = shard(count.head, tp) + count.outside_last + count.final_norm + tied_copy
        return first * self.grid.is_first + last * self.grid.is_last

    @cached_property
    def blocks(self) -> Array:
        """Parameters of the stage's blocks, routed experts left out."""
        return sum((n * d for n, d in zip(self.layers, self.block_dense, strict=True)), np.int64(0))

    @cached_property
    def experts(self) -> Array:
        """Routed experts' parameters of the stage."""
        return sum((n * e for n, e in zip(self.layers, self.block_experts, strict=True)), np.int64(0))

    @cached_property
    def parameters(self) -> Array:
        """All parameters of the stage."""
        return self.blocks + self.root + self.experts_or_none

    @cached_property
    def largest_tensor(self) -> Array:
        """Elements of the largest single tensor on a rank."""
        return shard(model_count(self.model).largest_tensor, self.grid.degree("tp"))

    def sharded(self, dense: Array, experts: Array, where: Array | bool) -> Array:
        """Elements on a rank, divided over its data-parallel (or expert-data-parallel) ranks where ``where`` holds."""
        ranks, expert_ranks = np.where(where, self.grid.ranks, 1), np.where(where, self.grid.expert_ranks, 1)
        return shard(dense, ranks) + shard(experts, expert_ranks)

    @property
    def experts_or_none(self) -> Array:
        """Routed experts' parameters, as a scalar zero where the model has none, so that no axis is touched for it."""
        return self.experts if self.model.is_moe else np.int64(0)
