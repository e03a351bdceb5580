"""What ranks send each other: volumes of one micro-batch or one step, with the links that they take.

Ranks are numbered with TP innermost, then CP and EP, then DP, the pipeline outermost, as Megatron-LM (core
``parallel_state.py``: order tp-cp-ep-dp-pp) and torchtitan (``parallel_dims.py``) lay them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas import communication as comm
from memcalc.terms.adapters import AdapterCensus

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import Node
    from memcalc.terms import Census
    from memcalc.timing.blocks import BlockWork


@dataclass(frozen=True)
class Message:
    """One kind of traffic of a rank."""

    volume: Array
    """Bytes that the rank sends."""
    calls: Array
    """Collectives."""
    ranks: Array
    """Ranks of the group."""
    in_node: Array
    """Those of them that share a node."""


@dataclass(frozen=True)
class Messages:
    """All traffic of a step."""

    tensor: Message
    """Reductions over tensor-parallel ranks, of a micro-batch."""
    tensor_beside: Message
    """Those of them that run beside the gradient of a weight."""
    tensor_again: Message
    """The same of what is computed again."""
    context: Message
    expert: Message
    expert_again: Message
    pipeline: Message
    sharding: Message
    """Gathers and reductions over data-parallel ranks of a micro-batch (FSDP, ZeRO-3)."""
    gradients: Message
    """Reductions over data-parallel ranks of a step."""


def messages_of(census: Census, blocks: list[BlockWork], node: Node) -> Messages:
    """The traffic of every strategy of a grid."""
    grid = census.grid
    tensor, beside, tensor_again = _tensor(census, blocks, node)
    expert, expert_again = _expert(grid, blocks, node)
    sharding, gradients = _data(census, blocks, node)
    return Messages(
        tensor, beside, tensor_again, _context(grid, blocks, node), expert, expert_again,
        _pipeline(census, node), sharding, gradients,
    )  # fmt: skip


def in_node(grid: Grid, node: Node, ranks: Array, stride: Array) -> Array:
    """Ranks of a group that share a node, where neighbours of the group are ``stride`` ranks apart."""
    return np.maximum(np.minimum(ranks, node.gpus // np.minimum(stride, node.gpus)), 1) + 0 * grid.degree("tp")


def _message(grid: Grid, node: Node, volume: Array, calls: Array, ranks: Array, stride: Array) -> Message:
    return Message(np.asarray(volume), np.asarray(calls), ranks, in_node(grid, node, ranks, stride))


def _width(grid: Grid) -> Array:
    return np.minimum(grid.width("compute"), 4)


def _tensor(census: Census, blocks: list[BlockWork], node: Node) -> tuple[Message, Message, Message]:
    """Two reductions forward and two backward for each block, one for embedding and one for head."""
    grid, ranks = census.grid, census.grid.degree("tp")
    volume: Array = np.zeros((1,) * 7, dtype=np.int64)
    volume_again, calls, calls_again = volume, volume, volume
    many = (ranks > 1).astype(np.int64)
    for b in blocks:
        one = comm.tensor_parallel_bytes(b.activations.tokens, b.activations.group.block.hidden, 2, ranks, 1)
        volume, calls = volume + 2 * b.layers * one, calls + 2 * b.layers * many
        volume_again, calls_again = volume_again + b.reductions_again * one, calls_again + b.reductions_again * many
    ends = comm.tensor_parallel_bytes(grid.tokens, census.model.hidden, 2, ranks, 1) * (grid.is_first + grid.is_last)
    stride = np.int64(1)
    beside = int(grid.habits.overlaps_input_gradients)
    return (
        _message(grid, node, volume * (2 - beside) + ends, calls * (2 - beside), ranks, stride),
        _message(grid, node, volume * beside, calls * beside, ranks, stride),
        _message(grid, node, volume_again, calls_again, ranks, stride),
    )


def _context(grid: Grid, blocks: list[BlockWork], node: Node) -> Message:
    """Keys and values of the other ranks: once forward, and with their gradients twice backward."""
    ranks, tp = grid.degree("cp"), grid.degree("tp")
    volume: Array = np.zeros((1,) * 7, dtype=np.int64)
    calls = volume
    for b in blocks:
        own = 2 * 2 * b.activations.tokens * b.activations.group.block.attention.kv_dim // tp
        volume = volume + b.layers * comm.context_parallel_bytes(own, ranks)
        calls = calls + 3 * b.layers * (ranks > 1)
    return _message(grid, node, volume, calls, ranks, tp)


def _expert(grid: Grid, blocks: list[BlockWork], node: Node) -> tuple[Message, Message]:
    """Tokens to their experts and back, forward and backward."""
    ranks = grid.degree("ep")
    volume: Array = np.zeros((1,) * 7, dtype=np.int64)
    volume_again, calls, calls_again = volume, volume, volume
    many = (ranks > 1).astype(np.int64)
    for b in blocks:
        block = b.activations.group.block
        if not block.is_moe:
            continue
        topk = getattr(block.mlp, "topk", 1)
        own = b.activations.tokens // grid.sequence_shard
        one = comm.expert_parallel_bytes(own, block.hidden, 2, ranks, topk=topk, exchanges=1)
        volume, calls = volume + 4 * b.layers * one, calls + 4 * b.layers * many
        volume_again, calls_again = volume_again + b.reductions_again * one, calls_again + b.reductions_again * many
    stride = grid.degree("tp")
    return (
        _message(grid, node, volume, calls, ranks, stride),
        _message(grid, node, volume_again, calls_again, ranks, stride),
    )


def _pipeline(census: Census, node: Node) -> Message:
    """Activations to the next stage and gradients back; ranks of two stages are as far apart as a stage is large."""
    grid = census.grid
    stages, chunks = grid.degree("pp"), grid.degree("vpp")
    engine = grid.habits.pipeline_engine != "none"
    shards = grid.sequence_shard if engine or not grid.habits.vocab_parallel else grid.degree("tp")
    volume = comm.pipeline_bytes(grid.tokens, census.model.hidden, 2, chunks, shards) * (stages > 1)
    stride = grid.degree("tp") * grid.ranks
    return _message(grid, node, volume, 2 * chunks * (stages > 1), np.minimum(stages, 2), stride)


# ------------------------------------------------------------------------------------------------------- data parallel


def _data(census: Census, blocks: list[BlockWork], node: Node) -> tuple[Message, Message]:
    """Gathers and reductions over data-parallel ranks: those of each micro-batch, and those of a step."""
    grid = census.grid
    ranks, stride = grid.ranks, grid.degree("tp")
    gathered, reduced = _volumes(census)
    each, every = _repeats(grid)
    layers = sum((b.layers for b in blocks), np.int64(0)) + 1
    many = (ranks > 1).astype(np.int64)
    units = _units(grid, blocks, layers)
    return (
        _message(grid, node, each[0] * gathered + each[1] * reduced, (each[0] + each[1]) * units * many, ranks, stride),
        _message(grid, node, every[0] * gathered + every[1] * reduced, (every[0] + every[1]) * many, ranks, stride),
    )


def _units(grid: Grid, blocks: list[BlockWork], layers: Array) -> Array:
    """Collectives of one pass: one for each block under FSDP, one for each parameter under ZeRO-3 of DeepSpeed."""
    if grid.habits.gather != "live":
        return layers
    return layers + sum((b.layers * (2 * len(b.matrices) + 4) for b in blocks), np.int64(0))


def _volumes(census: Census) -> tuple[Array, Array]:
    """Bytes that a rank sends in one gather of all its weights, and in one reduction of all gradients."""
    grid = census.grid
    width = grid.width("compute") * (0.5 if grid.fixed.float8_all_gather else 1.0)
    if grid.fixed.quantize.startswith(("nf4", "gptq-int4")):
        width = np.full(width.shape, 0.5)
    elif grid.fixed.quantize in {"int8", "gptq-int8"}:
        width = np.full(width.shape, 1.0)
    trained = census if grid.fixed.lora is None else AdapterCensus(census.model, grid)
    reduce = grid.reduce_width if grid.habits.full_shard else trained.width("gradient")
    return _over(census) * width, _over(trained) * reduce


def _over(census: Census) -> Array:
    """Elements that one rank sends where all are gathered over its data-parallel ranks."""
    grid = census.grid
    dense = comm.all_gather_bytes(census.blocks + census.root, grid.ranks)
    return dense + comm.all_gather_bytes(census.experts_or_none, grid.expert_ranks)


def _repeats(grid: Grid) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Gathers and reductions of each micro-batch, and of each step, by sharding stage.

    FSDP 2 under a pipeline gathers once a step and reduces after the last micro-batch. Stage 2 of DeepSpeed reduces
    each micro-batch, its stage 3 and FSDP's gather before forward and backward of each.
    """
    zero, full = grid.zero, grid.habits.full_shard
    alone = (grid.degree("pp") == 1).astype(np.int64)
    if full:
        gathers, sharded = np.where(zero == 3, 2, 1), (zero >= 2).astype(np.int64)
        each = sharded * alone * gathers, sharded * alone
        return each, (sharded * (1 - alone), sharded * (1 - alone) + 2 * (1 - sharded))
    third = (zero == 3).astype(np.int64)
    second = ((zero == 2) & (grid.habits.zero_optimizer is not None)).astype(np.int64) * alone
    reductions = np.where(zero == 0, 2, 1) * (1 - third) * (1 - second)
    return (2 * third, third + second), (((zero == 1) | (zero == 2)).astype(np.int64), reductions)
