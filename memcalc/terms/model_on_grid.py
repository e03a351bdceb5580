"""Parameters of a model on one rank, as columns over the layouts and stages of a grid."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from memcalc.formulas.optimizer_states import shard
from memcalc.specs.block import MixtureOfExperts
from memcalc.stages import Rows, blocks_in, rows_of
from memcalc.terms.parameters import model_count
from memcalc.terms.settings import block_settings, gathering_settings
from memcalc.trace.template import TraceCache

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.block import Block
    from memcalc.specs.model import Model
    from memcalc.terms.parameters import ParameterCount
    from memcalc.trace.layers import BlockConfig
    from memcalc.trace.tape import Shard


# What divides a tensor over ranks, and whether it exists at all: the meaning of :data:`memcalc.trace.tape.Shard`.


def ranks(grid: Grid, shard: Shard) -> Array:
    """What divides a tensor."""
    tp = grid.degree("tp")
    divisors = {
        "none": np.int64(1),
        "tp": tp,
        "tp if batched": tp,
        "tp if single": tp,
        "tp if cp": tp,
        "gathered": np.int64(1),
        "part if tp": tp,
        "full if tp": np.int64(1),
        "routed ffn": tp,
        "sp": grid.sequence_shard,
        "rows if ep": grid.sequence_shard,
        "ep": grid.degree("ep"),
        "full if sp": np.int64(1),
        "rows": np.maximum(tp // grid.expert_tp, 1),
        "rows if sorted": np.maximum(tp // grid.expert_tp, 1),
        "experts": grid.degree("ep") * grid.expert_tp,
        "if ep": np.int64(1),
        "unless ep": np.int64(1),
    }
    return divisors[shard]


def present(grid: Grid, shard: Shard, block: Block) -> Array:
    """1 where a tensor exists: some are copies that are made under a condition alone.

    More where ranks of an expert outnumber those of the rest: each has the rows of all of them (Megatron-LM 23e00ed
    transformer/moe/token_dispatcher.py, gather_from_sequence_parallel_region over the expert's tensor-parallel group).
    """
    wider = np.maximum(grid.expert_tp // grid.degree("tp"), 1)
    conditions = {
        "full if sp": lambda: grid.sequence_shard > 1,
        "tp if batched": lambda: grid.micro_batch > 1,
        "tp if single": lambda: grid.micro_batch == 1,
        "tp if cp": lambda: grid.degree("cp") > 1,
        "part if tp": lambda: grid.degree("tp") > 1,
        "full if tp": lambda: grid.degree("tp") > 1,
        "rows if ep": lambda: (grid.degree("ep") > 1) | (grid.expert_tp > 1),
        "rows": lambda: wider,
        "if ep": lambda: grid.degree("ep") > 1,
        "unless ep": lambda: grid.degree("ep") == 1,
        "rows if sorted": lambda: wider * ((grid.degree("ep") > 1) & (local_experts(grid, block) > 1)),
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
    experts = block.mlp.experts
    topk = experts if block.mlp.every_expert else block.mlp.topk
    if overload == 1:
        return experts * -(-tokens * topk // experts)
    return np.asarray(experts * np.ceil(tokens * topk / experts * overload)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class BlockCache:
    """Activations of a model's blocks, once they have been asked for (:func:`memcalc.terms.activations.groups_of`)."""

    groups: list[Any] = field(default_factory=list)
    """Of each group of blocks on one grid, whatever is offloaded."""
    by_sharding: list[Any] = field(default_factory=list)
    """The same over :attr:`memcalc.grid.Grid.ways`, which the parts of a space share."""
    spans: list[tuple[Array, Array]] = field(default_factory=list)
    """The blocks of each model chunk (:meth:`memcalc.grid.Grid.spans`), whatever is offloaded."""
    rows: list[Rows] = field(default_factory=list)
    """The rows of blocks of stages, likewise; none or one."""

    def release(self) -> None:
        """Let the arrays of the groups go at once: they know each other in circles, which only a collector ends."""
        for group in self.groups:
            vars(group).clear()
        self.groups.clear()


@dataclass(frozen=True, eq=False)
class ModelOnGrid:
    """What a rank holds before any sharding over data-parallel ranks [elements]; each column is computed once."""

    model: Model
    grid: Grid
    traces: TraceCache = field(default_factory=TraceCache, repr=False)
    blocks_cache: BlockCache = field(default_factory=BlockCache, repr=False)

    def with_layouts(self, grid: Grid) -> Self:
        """The same over a grid of some of its layouts (:meth:`memcalc.grid.Grid.with_layouts`)."""
        return replace(self, grid=grid, blocks_cache=BlockCache(by_sharding=self.blocks_cache.by_sharding))

    def with_offloads(self, offloads: tuple[tuple[str, ...], ...]) -> Self:
        """The same with another offload axis, on which no tensor of a block depends."""
        return replace(self, grid=self.grid.with_offloads(offloads))

    @cached_property
    def settings(self) -> tuple[BlockConfig, ...]:
        """How blocks run under each precision of the grid."""
        return block_settings(self.grid, self.model)

    @cached_property
    def gathering_settings(self) -> tuple[BlockConfig, ...] | None:
        """The same where only some layouts have sequence parallelism, for those; else None."""
        return gathering_settings(self.grid, self.model)

    @cached_property
    def count(self) -> ParameterCount:
        """Parameters of the whole model by place."""
        return model_count(self.model)

    @cached_property
    def sequence(self) -> tuple[int, ...]:
        """The index of each block's group, from the first block to the last."""
        return self.model.sequence

    @cached_property
    def layers(self) -> tuple[Array, ...]:
        """Blocks of each group on each stage."""
        return tuple(sum(chunks, np.int64(0)) for chunks in self.chunks)

    @cached_property
    def chunks(self) -> tuple[list[Array], ...]:
        """The same, chunk by chunk of each stage."""
        groups = range(len(self.model.groups))
        return tuple(blocks_in(self._spans, [index == group for index in self.sequence]) for group in groups)

    @cached_property
    def rows(self) -> Rows:
        """The blocks of each stage, in their order."""
        known = self.blocks_cache.rows
        if not known:
            known.append(rows_of(self._spans, self.sequence))
        return known[0]

    @property
    def _spans(self) -> list[tuple[Array, Array]]:
        known = self.blocks_cache.spans
        if not known:
            known += self.grid.spans(len(self.sequence))
        return known

    @cached_property
    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """Groups whose blocks run in one loop: those of a tower; blocks that predict further tokens apart."""
        towers: dict[tuple[str, bool], list[int]] = {}
        for index, group in enumerate(self.model.groups):
            predicts = bool(self.grid.fixed.mtp) and index == len(self.model.groups) - 1
            towers.setdefault((group.tower, predicts), []).append(index)
        return tuple(tuple(indices) for indices in towers.values())

    @cached_property
    def vocab(self) -> Array:
        """Rows of the embedding, padded where the framework makes them divisible by TP."""
        rows = np.full_like(self.grid.degree("tp"), self.model.vocab)
        if not self.grid.habits.vocab_multiple:
            return rows
        step = self.grid.habits.vocab_multiple * self.grid.degree("tp")
        return -(-rows // step) * step

    @cached_property
    def padding(self) -> Array:
        """Elements that the padding adds to an embedding."""
        return (self.vocab - self.model.vocab) * (self.model.embedding_dim or self.model.hidden)

    @cached_property
    def block_dense(self) -> tuple[Array, ...]:
        """Parameters of one block of each group on a rank, routed experts left out."""
        tp = self.grid.degree("tp")
        return tuple(shard(c.attention + c.mlp, tp) + c.replicated for _, c in self.count.groups)

    @cached_property
    def block_experts(self) -> tuple[Array, ...]:
        """Routed experts' parameters of one block of each group on a rank, filled up where FSDP 2 does so.

        Who writes expert parallelism divides few experts by their columns, as torchtitan does.
        """
        ranks = self.grid.expert_tp * self.grid.degree("ep")
        experts = [shard(c.experts, ranks) for _, c in self.count.groups]
        if not self.grid.habits.fills_experts:
            return tuple(experts)
        rows, ranks = [local_experts(self.grid, g.block) for g in self.model.groups], self.grid.expert_ranks
        undivided = self.grid.degree("ep") == 1
        return tuple(
            np.where(undivided, count // n * shard(n, ranks) * ranks, count)
            for count, n in zip(experts, rows, strict=True)
        )

    @cached_property
    def largest_block(self) -> Array:
        """Parameters of the largest block on a rank."""
        blocks = [d + e for d, e in zip(self.block_dense, self.block_experts, strict=True)]
        return np.maximum.reduce(np.broadcast_arrays(*blocks))

    @cached_property
    def root(self) -> Array:
        """Parameters outside the blocks: embedding and what precedes the blocks, norm and head, by stage.

        A tied embedding has a second copy where the head stands on another stage.
        """
        count, tp = self.count, self.grid.degree("tp")
        matrix = shard(count.embedding + self.padding, tp)
        first = matrix + count.outside_first
        tied_copy = matrix * self.grid.ends_apart * self.model.tied
        last = (
            shard(count.head + self.padding * bool(count.head), tp) + count.outside_last + count.final_norm + tied_copy
        )
        return first * self.grid.is_first + (last + self.predictors) * self.grid.is_last

    @cached_property
    def predictors(self) -> Array:
        """What predicts further tokens on the last stage, beside its blocks: an embedding, projections and norms."""
        count, hidden, tp = self.grid.fixed.mtp, self.model.hidden, self.grid.degree("tp")
        norms = 3 * hidden * self.model.groups[-1].block.norm.vectors
        copy = self.grid.ends_apart & (not self.model.tied)
        embedding = shard(self.count.embedding + self.padding, tp) * copy * bool(count)
        return count * (shard(2 * hidden * hidden, tp) + norms) + embedding

    @cached_property
    def embedding(self) -> Array:
        """Parameters of the token embedding and what precedes the blocks, by stage."""
        count = self.count
        return (
            shard(count.embedding + self.padding, self.grid.degree("tp")) + count.outside_first
        ) * self.grid.is_first

    @cached_property
    def head(self) -> Array:
        """Parameters whose gradient the loss's backward makes: the head (also where tied) and the final norm."""
        count, tp = self.count, self.grid.degree("tp")
        matrix = count.embedding if self.model.tied and self.model.head else count.head
        return (
            shard(matrix + self.padding * bool(matrix), tp) + count.outside_last + count.final_norm
        ) * self.grid.is_last

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
        return shard(self.count.largest_tensor, self.grid.degree("tp"))

    def divisor(self, kind: str) -> Array:
        """What divides a weight: whole, rows or columns (by TP), expert rows or expert columns (by the experts' TP)."""
        if kind == "whole":
            return np.int64(1)
        return self.grid.expert_tp if kind.startswith("expert") else self.grid.degree("tp")

    def sharded(self, dense: Array, experts: Array, where: Array | bool) -> Array:
        """Elements on a rank, divided over its data-parallel (or expert-data-parallel) ranks where ``where`` holds."""
        ranks, expert_ranks = np.where(where, self.grid.ranks, 1), np.where(where, self.grid.expert_ranks, 1)
        return shard(dense, ranks) + shard(experts, expert_ranks)

    @property
    def suffix(self) -> str:
        """What its terms are told apart by, where several are trained beside each other."""
        return ""

    def width(self, name: str) -> Array:
        """Bytes an element of one copy of a trained parameter, by precision (:class:`memcalc.frameworks.Widths`)."""
        return self.grid.width(name)

    @property
    def experts_or_none(self) -> Array:
        """Routed experts' parameters, as a scalar zero where the model has none, so that no axis is touched for it."""
        return self.experts if self.model.is_moe else np.int64(0)
