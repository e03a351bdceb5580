"""What ranks send each other: volumes of one micro-batch or one step, with the links that they take.

Ranks are numbered with TP innermost, then CP and EP, then DP, the pipeline outermost, as Megatron-LM (core
``parallel_state.py``: order tp-cp-ep-dp-pp) and torchtitan (``parallel_dims.py``) lay them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.formulas import communication as comm
from memcalc.terms.adapted_layers import adapted_tensors
from memcalc.terms.adapters import trained
from memcalc.terms.gradients import accumulates_whole
from memcalc.terms.zero import prefetched
from memcalc.timing.experts import exchanges, in_node

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import Node
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.timing.blocks import BlockWork
    from memcalc.timing.experts import Exchange
    from memcalc.timing.rates import Hardware, Rates


class Message(NamedTuple):
    """One kind of traffic of a rank."""

    volume: Array
    """Bytes that the rank sends."""
    calls: Array
    """Collectives."""
    ranks: Array
    """Ranks of the group."""
    in_node: Array
    """Those of them that share a node."""


class Messages(NamedTuple):
    """All traffic of a step."""

    tensor: Message
    """Reductions over tensor-parallel ranks, of a micro-batch."""
    tensor_beside: Message
    """Those of them that run beside the gradient of a weight."""
    tensor_again: Message
    """The same of what is computed again."""
    context: Message
    """Keys and values that travel in a ring beside attention."""
    context_waited: Message
    """Those that attention waits for: gathered at once, or exchanged for heads."""
    expert: Exchange
    expert_again: Exchange
    pipeline: Message
    """Activations and gradients between stages, of a micro-batch."""
    chunks_beside: bool
    """Whether chunks of interleaved stages send, reduce and gather beside the passes of others."""
    pipeline_beside: bool
    """Whether they do so between stages."""
    gather: Message
    """One gather of all weights over the ranks that share them, unit by unit (FSDP, ZeRO-3)."""
    reduction: Message
    """One reduction of all gradients over those ranks, unit by unit."""
    between: Message
    """What joins replicas behind it: all-reduces of the reduced shards."""
    repeats: Repeats
    """How often each micro-batch has these."""
    gradients: Message
    """Reductions over data-parallel ranks of a step, bucket by bucket."""
    gradients_between: Message
    """What joins replicas behind them."""
    parameters: Message
    """Gathers of updated weights of a step."""
    gathers_beside: bool
    """Whether these run beside the next forward."""
    broadcasts: Array
    """Ranks that send their part of them one after another."""


class Repeats(NamedTuple):
    """Gathers and reductions of one micro-batch, or of a step, by sharding stage."""

    forward: Array
    """Gathers before or in forward."""
    backward: Array
    """Gathers in backward."""
    reductions: Array


def messages_of(census: ModelOnGrid, blocks: list[BlockWork], node: Node) -> Messages:
    """The traffic of every strategy of a grid."""
    grid = census.grid
    tensor, beside, tensor_again = _tensor(census, blocks, node)
    ring, waited = _context(grid, blocks, node)
    expert, expert_again = exchanges(grid, blocks, node)
    return Messages(
        tensor, beside, tensor_again, ring, waited, expert, expert_again,
        _pipeline(census, node), grid.habits.overlaps_stages, grid.fixed.overlap_p2p is not False,
        *_data(census, blocks, node),
    )  # fmt: skip


def _gathers_beside(grid: Grid) -> bool:
    """Whether updated weights are gathered beside forward.

    DeepSpeed's step ends with the gather (0.19.8 ``stage_1_and_2.py``: ``all_gather_dp_groups``); so does Megatron-LM's
    without ``--overlap-param-gather`` (d98e8a64 ``core/distributed/param_and_grad_buffer.py``: ``async_op``).
    """
    stated = grid.fixed.overlap_param_gather
    return grid.habits.overlaps_gather if stated is None else stated


def _message(grid: Grid, node: Node, volume: Array, calls: Array, ranks: Array, stride: Array) -> Message:
    return Message(np.asarray(volume), np.asarray(calls), ranks, in_node(grid, node, ranks, stride))


def _width(grid: Grid) -> Array:
    return np.minimum(grid.width("compute"), 4)


def _tensor(census: ModelOnGrid, blocks: list[BlockWork], node: Node) -> tuple[Message, Message, Message]:
    """One reduction forward and one backward for attention and for the MLP, one for embedding and one for head."""
    grid, ranks = census.grid, census.grid.degree("tp")
    volume: Array = np.zeros((1,) * 7, dtype=np.int64)
    volume_again, calls, calls_again = volume, volume, volume
    for b in blocks:
        sent, number = _split_block(grid, b)
        volume, calls = volume + b.layers * sent, calls + b.layers * number
        volume_again = volume_again + b.reductions_again * sent // 2
        calls_again = calls_again + b.reductions_again * number // 2
    ends = comm.tensor_parallel_bytes(grid.tokens, census.model.hidden, 2, ranks, 1) * (grid.is_first + grid.is_last)
    ends = ends + _whole_logits(census)
    apart, apart_calls = _reduced_apart(grid, blocks)
    stride = np.int64(1)
    # A frozen layer makes no gradient of its weight, beside which its input's could be reduced
    beside = int(grid.habits.overlaps_input_gradients and grid.fixed.adapters is None)
    return (
        _message(grid, node, volume * (2 - beside) + apart + ends, calls * (2 - beside) + apart_calls, ranks, stride),
        _message(grid, node, volume * beside, calls * beside, ranks, stride),
        _message(grid, node, volume_again, calls_again, ranks, stride),
    )


def _whole_logits(census: ModelOnGrid) -> Array:
    """Bytes of logits that are gathered over the ranks that divide the head, where the loss takes them whole."""
    grid = census.grid
    divided = grid.habits.vocab_parallel or grid.fixed.loss not in {"standard", "fused-kernel", "chunked"}
    if divided or not (census.model.head and census.model.vocab):
        return np.int64(0)
    return comm.all_gather_bytes(2 * grid.tokens * census.vocab, grid.degree("tp")) * grid.is_last


def _reduced_apart(grid: Grid, blocks: list[BlockWork]) -> tuple[Array, Array]:
    """Bytes and calls of backward's reductions beyond one for attention and one for the MLP.

    Each column-parallel layer is told of its input on its own (Scaling 737f855 ``core/nn/linear/utils.py``,
    ``_CopyToModelParallelRegion``; ``core/nn/mlp.py``, ``ParallelSwiGLUMLP``): gate and up reduce the same tensor's
    gradient twice, queries, keys and values, one weight unless they differ in heads, three times.
    """
    volume: Array = np.zeros((1,) * 7, dtype=np.int64)
    if not grid.habits.reduces_each_input:
        return volume, volume
    ranks, calls = grid.degree("tp"), volume
    for b in blocks:
        spec = b.activations.group.block
        attention, gated = spec.attention, getattr(spec.mlp, "gated", False)
        more = int(gated) + 2 * (attention is not None and attention.kv_heads != attention.heads)
        sent = comm.tensor_parallel_bytes(b.activations.tokens, spec.hidden, 2, ranks, 1)
        alone = b.layers * more * (grid.sequence_shard == 1)
        volume, calls = volume + alone * sent, calls + alone * (ranks > 1)
    return volume, calls


def _split_block(grid: Grid, block: BlockWork) -> tuple[Array, Array]:
    """Bytes and calls of one forward's reductions over the ranks that split a block: of attention, and of the MLP.

    Routed experts reduce what reached them over the ranks that split an expert: none where these are not split, one row
    for each copy where they are (Megatron-LM d98e8a64 ``core/transformer/moe/token_dispatcher.py``: all-gather and
    reduce-scatter over ``tp_group`` of the permuted tokens).
    """
    ranks, tokens, spec = grid.degree("tp"), block.activations.tokens, block.activations.group.block
    dense = comm.tensor_parallel_bytes(tokens, spec.hidden, 2, ranks, 1)
    many = (ranks > 1).astype(np.int64)
    more = gathers_of_adapters(grid, block)
    if not spec.is_moe or grid.fixed.moe_dispatcher == "allgather":
        return (4 + more) * dense // 2, (2 + more) * many
    split = grid.expert_tp
    rows = block.activations.units["routed"] * split // ranks
    routed = comm.tensor_parallel_bytes(rows, spec.hidden, 2, split, 1)
    shared = int(getattr(spec.mlp, "shared_ffn", 0) > 0)
    return (2 + 2 * shared + more) * dense // 2 + routed, (1 + shared + more) * many + (split > 1)


def gathers_of_adapters(grid: Grid, block: BlockWork) -> Array:
    """Gathers of whole hidden states that adapters add to a forward, as many as to a backward: Megatron-Bridge's alone.

    B beside a row-parallel layer gathers its outputs, and the gradient is gathered under sequence parallelism; without
    it the gradient before a column-parallel layer's A is reduced on its own (067f987d peft/utils.py).
    """
    lora = grid.fixed.adapters
    if lora is None or not grid.fixed.lora_classes.startswith("bridge"):
        return np.int64(0)
    tensors = adapted_tensors(block.activations.group.block, lora.targets)
    divided = [tensor.divided for tensor in tensors if not tensor.routed]
    return divided.count("columns") + divided.count("rows") * (grid.sequence_shard == 1)


def _context(grid: Grid, blocks: list[BlockWork], node: Node) -> tuple[Message, Message]:
    """Keys and values of the other ranks, in a ring or gathered; or what exchanges the sequence for heads.

    A ring and a gather send them once forward, and with their gradients twice backward; attention runs beside a ring
    alone. All-to-alls send queries, keys, values and output once each way, between nodes by each rank's own adapter; in
    8 bits, as attention reads and makes them, but under MXFP8.
    Sources: TransformerEngine 2.11, ``context_parallel.py``: ``AttnFuncWithCPAndKVP2P``,
    ``AttnFuncWithCPAndKVAllGather``, ``AttnFuncWithCPAndQKVOA2A``.
    """
    ranks, tp = grid.degree("cp"), grid.degree("tp")
    volume: Array = np.zeros((1,) * 7, dtype=np.int64)
    calls, silent = volume, volume
    kind, width = grid.fixed.cp_kind, 1 if grid.fixed.float8_attention and grid.fixed.float8 != "mxfp8" else 2
    here = in_node(grid, node, ranks, tp)
    for b in blocks:
        attention = b.activations.group.block.attention
        if attention is None:
            continue
        if kind == "a2a":
            each = width * b.activations.tokens * (attention.q_dim + attention.kv_dim) // tp
            sent = 4 * comm.all_to_all_bytes(each, ranks)
        else:
            sent = comm.context_parallel_bytes(2 * 2 * b.activations.tokens * attention.kv_dim // tp, ranks)
        volume = volume + b.layers * sent
        calls = calls + (4 if kind == "a2a" else 3) * b.layers * (ranks > 1)
    if kind == "a2a":
        apart = ranks > here
        volume = np.where(apart, volume * (ranks - here) // np.maximum(ranks - 1, 1), volume)
        here = np.where(apart, 1, here)
    moved, still = Message(volume, calls, ranks, here), Message(silent, silent, ranks, here)
    return (moved, still) if kind == "ring" else (still, moved)


def _pipeline(census: ModelOnGrid, node: Node) -> Message:
    """Activations to the next stage and gradients back; ranks of two stages are as far apart as a stage is large."""
    grid = census.grid
    stages, chunks = grid.degree("pp"), grid.degree("vpp")
    engine = grid.habits.pipeline_engine != "none"
    shards = grid.sequence_shard if engine or not grid.habits.vocab_parallel else grid.degree("tp")
    volume = comm.pipeline_bytes(grid.tokens, census.model.hidden, 2, chunks, shards) * (stages > 1)
    stride = grid.degree("tp") * grid.degree("cp") * grid.degree("dp")
    return _message(grid, node, volume, 2 * chunks * (stages > 1), np.minimum(stages, 2), stride)


# ------------------------------------------------------------------------------------------------------- data parallel


def _data(
    census: ModelOnGrid, blocks: list[BlockWork], node: Node
) -> tuple[Message, Message, Message, Repeats, Message, Message, Message, bool, Array]:
    """Gathers and reductions over data-parallel ranks: those of a micro-batch by unit, those of a step by bucket."""
    grid = census.grid
    ranks, stride = grid.ranks, grid.degree("tp")
    gathered, updated, reduced = _volumes(census)
    each, step = _repeats(census)
    layers = sum((b.layers for b in blocks), np.int64(0)) + 1
    many = (ranks > 1).astype(np.int64)
    units = _units(census, blocks, layers) * many
    replicas, apart, joined = _between(census)
    buckets = _buckets(census)
    return (
        _message(grid, node, gathered, units, ranks, stride),
        _message(grid, node, reduced, units, ranks, stride),
        _message(grid, node, joined, layers * (replicas > 1), replicas, apart),
        each,
        _message(grid, node, step.reductions * reduced, step.reductions * many * buckets, ranks, stride),
        _message(grid, node, step.reductions * joined, step.reductions * (replicas > 1) * buckets, replicas, apart),
        _message(grid, node, step.forward * updated, step.forward * many * buckets, ranks, stride),
        _gathers_beside(grid),
        step.forward * many * ranks * (grid.fixed.zero_gather == "broadcast"),
    )


def _between(census: ModelOnGrid) -> tuple[Array, Array, Array]:
    """Replicas, how many ranks two of the same shard are apart, and bytes that a rank sends to join their shards."""
    grid, updated = census.grid, trained(census)
    replicas = grid.degree("dp_replicate")
    width = grid.reduce_width if grid.habits.full_shard else updated.width("gradient")
    shard = updated.sharded(updated.blocks + updated.root, updated.experts_or_none, where=True)
    return replicas, grid.degree("tp") * grid.ranks, comm.all_reduce_bytes(shard, replicas) * width


def _buckets(census: ModelOnGrid) -> Array:
    """Collectives in which the gradients of a step are reduced."""
    grid, updated = census.grid, trained(census)
    bucket, size = grid.habits.bucket, np.asarray(grid.fixed.reduce_bucket_size)
    if grid.fixed.reduce_bucket_size is None:
        width = np.maximum(updated.width("gradient"), 1)
        size = np.maximum(bucket.elements, bucket.elements_per_rank * grid.ranks)
        size = np.maximum(size, bucket.bytes // width)
    elements = updated.blocks + updated.root + updated.experts_or_none
    return np.maximum(-(-elements // np.maximum(size, 1)), 1)


def _units(census: ModelOnGrid, blocks: list[BlockWork], layers: Array) -> Array:
    """Collectives of one pass: one for each block under FSDP.

    ZeRO-3 of DeepSpeed gathers ahead what fills its prefetch bucket, in one collective
    (``partitioned_param_coordinator.py``: ``fetch_sub_module``), and at most parameter by parameter.
    """
    grid = census.grid
    if grid.habits.gather != "live":
        return layers
    each = sum((b.layers * (2 * len(b.matrices) + 4) for b in blocks), np.int64(0))
    elements = census.blocks + census.root + census.experts_or_none
    return layers + np.minimum(each, -(-elements // max(prefetched(grid), 1)))


def _volumes(census: ModelOnGrid) -> tuple[Array, Array, Array]:
    """Bytes that a rank sends in one gather of all its weights, in one of what a step updates, and in one reduction.

    Stages 1 and 2 divide the optimizer, which has what is trained alone: a frozen base is not gathered (Megatron-LM
    d98e8a64 ``core/optimizer/distrib_optimizer.py``; DeepSpeed 0.19.8 ``runtime/zero/stage_1_and_2.py``,
    ``requires_grad``).
    """
    grid = census.grid
    share = 0.5 if grid.recipe is None else grid.recipe.gathered
    width = grid.width("compute") * (share if grid.fixed.float8_all_gather else 1.0)
    if grid.fixed.quantize.startswith(("nf4", "gptq-int4")):
        width = np.full(width.shape, 0.5)
    elif grid.fixed.quantize in {"int8", "gptq-int8"}:
        width = np.full(width.shape, 1.0)
    updated = trained(census)
    reduce = grid.reduce_width if grid.habits.full_shard else grid.habits.reduction_width or updated.width("gradient")
    gathered = _over(census) * width
    frozen = grid.fixed.adapters is not None and not grid.habits.full_shard
    return gathered, _over(updated) * updated.width("parameter") if frozen else gathered, _over(updated) * reduce


def _over(census: ModelOnGrid) -> Array:
    """Elements that one rank sends where all are gathered over its data-parallel ranks."""
    grid = census.grid
    dense = comm.all_gather_bytes(census.blocks + census.root, grid.ranks)
    return dense + comm.all_gather_bytes(census.experts_or_none, grid.expert_ranks)


def _repeats(census: ModelOnGrid) -> tuple[Repeats, Repeats]:
    """Gathers and reductions of each micro-batch, and of each step, by sharding stage.

    FSDP 2 under a pipeline gathers once a step and reduces after the last micro-batch, as FSDP does under ``no_sync``.
    Stage 2 of DeepSpeed reduces each micro-batch, its stage 3 and FSDP's gather before forward and backward of each.
    """
    grid = census.grid
    zero, none = grid.zero, 0 * grid.zero
    alone, third = (grid.degree("pp") == 1).astype(np.int64), (zero == 3).astype(np.int64)
    if grid.habits.full_shard:
        sharded = (zero >= 2).astype(np.int64)
        apart = alone * (1 - accumulates_whole(census))
        each = Repeats(sharded * alone, third * alone, sharded * apart)
        return each, Repeats(sharded * (1 - alone), none, sharded * (1 - apart) + 2 * (1 - sharded))
    second = ((zero == 2) & (grid.habits.zero_optimizer is not None)).astype(np.int64) * alone
    reductions = np.where((zero == 0) | grid.habits.reduces_whole, 2, 1) * (1 - third) * (1 - second)
    gathers = ((zero == 1) | (zero == 2)).astype(np.int64)
    return Repeats(third, third, third + second), Repeats(gathers, none, reductions)


def slowing(message: Message, hardware: Hardware, rates: Rates) -> Array:
    """Share of the time of hidden traffic by which it slows the kernels beside it.

    Between nodes NCCL opens channels, a multiprocessor each, by the adapters that it finds (5067397c
    ``src/graph/search.cc``: ``ncclTopoSearchRecNet``; ``connect.cc``: ``ncclTopoPostset`` doubles them).
    """
    between = rates.hidden_between * hardware.adapters
    return np.where(message.ranks <= message.in_node, rates.hidden, between)


def message_seconds(message: Message, hardware: Hardware, rates: Rates, *, wide: bool = False) -> Array:
    """Time of one kind of traffic where nothing hides it [s]; ``wide`` is that of large messages that stream."""
    share_inside, share_between = (rates.inside, rates.between) if wide else (rates.inside_tensor, rates.between_tensor)
    inside, between = share_inside * hardware.inside, share_between * hardware.between
    rate = comm.group_bandwidth(inside, between, message.ranks, message.in_node)
    step = np.where(message.ranks <= message.in_node, rates.latency, rates.latency_between)
    each = message.calls * (rates.call + step * message.ranks)
    return np.asarray(message.volume / rate + each)
