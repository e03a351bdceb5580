"""Terms of the buffers: what is gathered for compute, what waits to be reduced, autocast's copies, workspaces.

Terms of FSDP 1: flat parameters that are gathered unit by unit, and what its hooks keep alive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.grid import column
from memcalc.ledger import ALWAYS, COMPUTING, Term
from memcalc.specs.block import MixtureOfExperts, Mlp
from memcalc.terms.activations import add_all, groups_of
from memcalc.terms.adapted_layers import pairs_of
from memcalc.terms.adapters import Base, folded_adapters, trained
from memcalc.terms.every_k_blocks import block_copies, copies_in_part
from memcalc.terms.fsdp2 import Units, fsdp2_terms
from memcalc.terms.gradients import accumulates_whole
from memcalc.terms.pipeline import engine_terms, schedule_terms
from memcalc.terms.settings import enters_units_again, in_tiles
from memcalc.terms.zero import zero_terms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.adapters import Lora
    from memcalc.specs.block import Attention, Block
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Workspaces


# Memory that libraries take from the caching allocator for good: workspaces, gather buffers, dummy gradients.


HANDLES = "PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp: 8.125 MiB, 32 MiB on compute capability 9.0"
ENGINE = "TransformerEngine c188b533 pytorch/cpp_extensions/gemm.py: 32 MiB from compute capability 9.0, else 4"
DUMMIES = "TransformerEngine c188b533 pytorch/module/base.py, get_dummy_wgrad: one for each shape in the process"
BUFFER = "Megatron-LM 23e00ed core/tensor_parallel/layers.py: get_global_memory_buffer, mpu"
GROUPED_STREAMS = 4
Shape = tuple[int, int, str]
"""Rows and columns of a weight, and which of the two tensor parallelism divides: rows, columns, experts' rows …"""


def workspace_terms(census: ModelOnGrid, workspaces: Workspaces) -> Iterator[Term]:
    """Everything of a process that its matrix products keep."""
    grid = census.grid
    handle = workspaces.handle if grid.fixed.blas_workspace is None else grid.fixed.blas_workspace
    used = plain_products(census) if grid.habits.engine else np.ones((1,) * 7, dtype=np.int64)
    handles = 2 * handle * used * grid.habits.handle_workspaces
    yield Term("buffers", "BLAS workspaces", handles, ALWAYS, "2 handles · W", HANDLES, {"W": handle}, by_thread=True)
    if grid.fixed.kernels == "te":
        yield gather_buffer_term(census)
    if grid.habits.engine:
        yield from library_terms(census, workspaces.engine)


def plain_products(census: ModelOnGrid) -> Array:
    """1 where PyTorch itself multiplies matrices: the output layer, materialised scores, Megatron-Bridge's adapters."""
    grid = census.grid
    everywhere = grid.fixed.attention in ("eager", "math") or grid.fixed.lora_classes.startswith("bridge")
    return np.maximum(grid.is_last, int(everywhere))


def gather_buffer_term(census: ModelOnGrid) -> Term:
    """The output layer's input, gathered under sequence parallelism into a buffer that is never freed.

    Where its weight is frozen, into a tensor that goes with the product (``linear_with_frozen_weight``).
    """
    grid, trained_head = census.grid, census.grid.fixed.adapters is None
    gathered = grid.width("compute") * grid.tokens * census.model.hidden * (grid.sequence_shard > 1) * trained_head
    inputs = {"w": grid.width("compute"), "T": grid.tokens, "h": census.model.hidden}
    title, formula = "gathered input of the output layer", "w · T · h"
    return Term("buffers", title, gathered * grid.is_last, ALWAYS, formula, BUFFER, inputs)


def library_terms(census: ModelOnGrid, engine: int) -> Iterator[Term]:
    """TransformerEngine's workspaces and dummy weight gradients."""
    grid = census.grid
    yield Term("buffers", "TransformerEngine's workspace", np.full((1,) * 7, engine), ALWAYS, "W", ENGINE)
    routed = routed_here(census)
    streams = GROUPED_STREAMS * engine * routed
    yield Term("buffers", "workspaces of the grouped products", streams, ALWAYS, "4 streams · W", ENGINE)
    if has_dummies(grid):
        title, formula = "dummy weight gradients", "w · sum over distinct shapes"
        bytes_ = grid.width("compute") * add_all(dummies(census))
        yield Term("buffers", title, bytes_, ALWAYS, formula, DUMMIES, {"w": grid.width("compute")}, in_events=True)


def routed_here(census: ModelOnGrid) -> Array:
    """1 on stages with experts."""
    layers = zip(census.model.groups, census.layers, strict=True)
    return np.minimum(sum((n for group, n in layers if group.block.is_moe), np.int64(0)), 1)


def has_dummies(grid: Grid) -> bool:
    """Whether products add to the gradients themselves, and hand autograd dummies."""
    return bool(grid.habits.engine and grid.fixed.wgrad_fusion)


def dummies(census: ModelOnGrid) -> list[Array]:
    """Elements of one trained weight of each distinct shape, where a rank has it."""
    lora = census.grid.fixed.adapters
    if lora is not None:
        return adapter_dummies(census, lora)
    here: dict[Shape, Array] = {}
    for group, layers in zip(census.model.groups, census.layers, strict=True):
        for shape in shapes_of(group.block):
            here[shape] = np.maximum(here.get(shape, np.int64(0)), np.minimum(layers, 1))
    width = census.model.embedding_dim or census.model.hidden
    head = census.vocab * width // census.grid.degree("tp") * (census.grid.is_last * census.model.head)
    return [*(rows * n // census.divisor(divided) * there for (rows, n, divided), there in here.items()), head]


def adapter_dummies(census: ModelOnGrid, lora: Lora) -> list[Array]:
    """The same of adapters, each shape once by its elements."""
    groups = zip(census.model.groups, census.layers, strict=True)
    listed = [
        low.rows * low.columns * np.minimum(n, 1) for g, n in groups for low in pairs_of(g.block, lora, census.grid)
    ]
    return list({np.asarray(elements).tobytes(): elements for elements in listed}.values())


def shapes_of(block: Block) -> list[Shape]:
    """Weights of a block whose gradients are added in place: all but router and norms."""
    return [
        *attention_shapes(block.own_attention, block.hidden),
        *(mlp_shapes(block.mlp, block.hidden) if block.mlp else ()),
    ]


def attention_shapes(spec: Attention, hidden: int) -> list[Shape]:
    """Weights of grouped-query or latent attention."""
    latent = spec.latent
    if latent is None:
        return [(spec.q_dim + 2 * spec.kv_dim, hidden, "rows"), (hidden, spec.q_dim, "columns")]
    rank, up = latent.q_lora_rank, spec.heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    queries: list[Shape] = (
        [(rank, hidden, "whole"), (spec.q_dim, rank, "rows")] if rank else [(spec.q_dim, hidden, "rows")]
    )
    down: Shape = (latent.kv_lora_rank + latent.qk_rope_head_dim, hidden, "whole")
    return [*queries, down, (up, latent.kv_lora_rank, "rows"), (hidden, spec.heads * latent.v_head_dim, "columns")]


def mlp_shapes(spec: Mlp | MixtureOfExperts, hidden: int) -> list[Shape]:
    """Weights of a dense MLP, or of one expert and the shared ones."""
    matrices = 2 if spec.gated else 1
    if isinstance(spec, Mlp):
        return [(matrices * spec.ffn, hidden, "rows"), (hidden, spec.ffn, "columns")]
    listed: list[Shape] = [(matrices * spec.ffn, hidden, "expert rows"), (hidden, spec.ffn, "expert columns")]
    shared = spec.shared_ffn
    if shared and shared != spec.ffn:
        # shared experts as wide as a routed one share its dummies
        listed += [(matrices * shared, hidden, "rows"), (hidden, shared, "columns")]
    return listed


# Terms of hybrid sharding (HSDP): what FSDP 2 holds while replicas of the shards all-reduce their gradients.
#
# The all-reduce is in place, on the output of the reduce-scatter and in the dtype of the reduction. A unit keeps that
# output until backward ends (``FSDPParamGroup._all_reduce_state``). So it costs nothing where the output becomes the
# gradient itself, and a second set of sharded gradients where it is cast, copied to the host, or added to those of an
# earlier micro-batch.
#
# Source: ``torch/distributed/fsdp/_fully_shard/`` of PyTorch 2.13: ``_fsdp_collectives.py`` (foreach_reduce) and
# ``_fsdp_param_group.py`` (post_backward, finalize_backward).


ALL_REDUCE = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.13: AllReduceState"


def held_by_replicas(grid: Grid) -> Array:
    """1 where units hold what they reduced: FSDP 2's, with replicas between which it is all-reduced."""
    replicated = (grid.degree("dp_replicate") > 1) & grid.zero_from(2) & (grid.fixed.fsdp_schedule != "simple")
    return np.asarray(replicated).astype(np.int64)


def copies_reduced(census: ModelOnGrid) -> Array:
    """1 where the gradient is another tensor than what was reduced: cast to the dtype of its shard, or on the host."""
    cast = census.grid.reduce_width != trained(census).width("gradient")
    return np.maximum(np.asarray(cast).astype(np.int64), census.grid.offloaded("params"))


def keeps_reduced(census: ModelOnGrid) -> Array:
    """1 where outputs of reduce-scatters stay beside the gradients until a micro-batch's backward ends."""
    grid = census.grid
    once = (grid.accumulation == 1) | (accumulates_whole(census) == 1) | (Units(census).pipelined == 1)
    return held_by_replicas(grid) * np.maximum(np.asarray(~once).astype(np.int64), copies_reduced(census))


def replica_terms(census: ModelOnGrid) -> Iterator[Term]:
    """What is kept of the reduced gradients, of all units but those whose backward is still to come."""
    grid, updated = census.grid, trained(census)
    if not np.any(held_by_replicas(grid)):
        return
    outer = updated.embedding if Units(updated).split else updated.root
    blocks = updated.blocks + updated.experts_or_none
    done = {
        "backward-first": np.maximum(blocks + updated.root - outer - 2 * updated.largest_block, 0),
        "backward-end": blocks + updated.root - outer,
    }
    title = "reduced gradients, kept until backward ends"
    for phase, elements in done.items():
        local = updated.sharded(elements - updated.experts_or_none, updated.experts_or_none, where=True)
        bytes_ = grid.reduce_width * np.maximum(local, 0) * keeps_reduced(census)
        inputs = {"w_reduce": grid.reduce_width, "P": elements, "N": grid.ranks}
        formula = "w_reduce · ⌈P / N⌉"
        yield Term("buffers", title, bytes_, (phase,), formula, ALL_REDUCE, inputs, "reduce-scatter", in_events=True)


def buffer_terms(census: ModelOnGrid, workspaces: Workspaces) -> Iterator[Term]:
    """All terms of the buffers."""
    gather = census.grid.habits.gather
    if gather == "blocks":
        if census.grid.habits.flat_units:
            yield from flat_unit_terms(census)
        else:
            yield from (*fsdp2_terms(census), *replica_terms(census))
    if census.grid.habits.zero_optimizer is not None:
        yield from zero_terms(census)
    if census.grid.habits.pipeline_engine != "none":
        yield from engine_terms(census)
    if census.grid.width("cached").any():
        yield from autocast_terms(census)
    if census.grid.fixed.adapters is not None:
        yield from adapter_copies_terms(census)
    if any(setting.end_weight and setting.autocast for setting in census.settings) and not in_tiles(census.grid):
        title, source = "autocast's 16-bit copy of the head", "PEFT 0.21 utils/other.py:212; ATen/autocast_mode.cpp"
        inputs = {"P_head": census.head}
        yield Term("buffers", title, 2 * census.head, ("forward", "loss"), "2 · P_head", source, inputs)
    yield from workspace_terms(census, workspaces)
    yield from schedule_terms(census)


def adapter_copies_terms(census: ModelOnGrid) -> Iterator[Term]:
    """16-bit copies of fp32 adapters: kept while autocast is on, until the loss; backward needs some for longer.

    FSDP's views are no leaves, and only leaves are kept (``cached_cast``); fused functions drop copies of their own.
    """
    grid, trained_model, groups = census.grid, trained(census), groups_of(census)
    on = column([grid.fixed.autocast or name.endswith("-autocast") for name in grid.precisions], "precision")
    made = on * (trained_model.width("parameter") == 4) * (grid.fixed.lora_kernels != "fused")
    leaves = 1 - (grid.zero_from(2) & grid.habits.full_shard)
    source, phases = "PyTorch aten/src/ATen/autocast_mode.cpp, cached_cast", ("forward-last", "forward")
    folded = folded_adapters(census)  # these are cast by PEFT, for each fold
    parameters = trained_model.parameters - add_all([n * f for n, f in zip(census.layers, folded, strict=True)])
    per_block = [d + e for d, e in zip(trained_model.block_dense, trained_model.block_experts, strict=True)]
    title, inputs = "autocast's copies of the adapters", {"P_trained": parameters}
    yield Term("buffers", title, 2 * parameters * made * leaves, phases, "2 · P_trained", source, inputs)
    cast = [size - alone for size, alone in zip(per_block, folded, strict=True)]
    saved = add_all([a.field("whole") * size for a, size in zip(groups, cast, strict=True)])
    title, formula = ("autocast's copies of the adapters, for backward", "2 · P_trained of blocks without a checkpoint")
    inputs = {"P_trained": saved}
    yield Term("buffers", title, 2 * saved * made, ("loss", "backward-last"), formula, source, inputs)


def autocast_terms(census: ModelOnGrid) -> Iterator[Term]:
    """16-bit copies of fp32 matrices: those that backward needs, and in forward, until autocast ends, the cache of all.

    A checkpointed block's graph keeps none, and the cache none of weights that need no gradient. Rows of an embedding
    are looked up, not multiplied, and grouped products of experts are on no list of autocast's.
    """
    grid, groups, source = census.grid, groups_of(census), "PyTorch aten/src/ATen/autocast_mode.cpp, cached_cast"
    copies = [block_copies(activations) for activations in groups]
    for_backward = [
        a.field("whole") * size + a.field("treated") * copies_in_part(a) for a, size in zip(groups, copies, strict=True)
    ]
    trained = column([setting.trainable for setting in census.settings], "precision")
    rest = [
        (a.layers * size - needed) * trained * (not a.group.block.weight_views)
        for a, size, needed in zip(groups, copies, for_backward, strict=True)
    ]
    saved, cache = add_all(for_backward), add_all(rest) * leaves(grid)
    in_events, phases = copies_in_events(census), ("forward-last", "forward")
    title, formula = "autocast's cache of 16-bit weight copies", "2 · P_cast of checkpointed blocks"
    yield Term("buffers", title, cache, phases, formula, source, {"P_cast": cache // 2}, grows=True)
    title, formula = "autocast's 16-bit weight copies", "2 · P_cast of blocks that are not checkpointed"
    inputs, longer = {"P_cast": saved // 2}, (*phases, "loss", "backward-last")
    yield Term("buffers", title, saved, longer, formula, source, inputs, in_events=in_events)
    head, width = census.head * (grid.width("cached") > 0) * (not in_tiles(grid)), grid.width("cached")
    title, phases, inputs = "autocast's 16-bit copy of the head", ("forward", "loss"), {"P_head": census.head}
    yield Term("buffers", title, width * head, phases, "2 · P_head", source, inputs, in_events=in_events)


def leaves(grid: Grid) -> Array:
    """1 where weights as modules use them are leaves of the graph, of which alone autocast's cache keeps copies.

    FSDP 2's are parameters (torch 2.13 _fully_shard/_fsdp_param.py, ``init_unsharded_param``). FSDP 1's are views of a
    flat one (_flat_param.py, ``_use_unsharded_views``), and SimpleFSDP computes each where it is used.
    """
    if grid.habits.gather == "blocks" and not grid.habits.flat_units and grid.fixed.fsdp_schedule != "simple":
        return np.int64(1)
    return 1 - (grid.zero_from(2) & grid.habits.full_shard)


def copies_in_events(census: ModelOnGrid) -> bool:
    """Whether executions of blocks and head have autocast's copies among their tensors: recorded, compiled ones not."""
    recorded = census.model.recording is not None or any(g.block.recorded is not None for g in census.model.groups)
    return not recorded and all(setting.autocast and not setting.compiled for setting in census.settings)


FLAT = "torch/distributed/fsdp/_runtime_utils.py and _flat_param.py, torch 2.4 to 2.13"


def prefetches(census: ModelOnGrid) -> Array:
    """1 where backward gathers the next block beside the running one.

    Only blocks whose forward built a graph are gathered ahead (``_needs_pre_backward_unshard``), which those under a
    reentrant checkpoint around the unit have not; and where adapters are units of their own, the next unit is one of
    them.
    """
    grid = census.grid
    if grid.fixed.adapters is not None and not grid.habits.mixed_units:
        return np.int64(0)
    return 1 - checkpointed(census) if enters_units_again(grid) else np.int64(1)


def checkpointed(census: ModelOnGrid) -> Array:
    """1 where the policy checkpoints the blocks."""
    last = groups_of(census)[-1]
    return np.minimum(add_all([group.field("treated") for group in (last.stack.groups if last.stack else (last,))]), 1)


def flat_unit_terms(census: ModelOnGrid) -> Iterator[Term]:
    """What is gathered for compute, and what is reduced."""
    for term in (*flat_gather_terms(census), *flat_reduction_terms(census)):
        yield replace(term, in_events=True)


def flat_gather_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The root unit is whole from forward to the end of backward; of the blocks one is, and in backward the next."""
    grid = census.grid
    base, sharded = Base(census), grid.zero_from(2)
    root, block = base.root * sharded, base.largest_block * sharded
    inputs = {"w": base.width, "P_root": census.root, "P_block": census.largest_block}
    yield Term("buffers", "gathered embedding, norm and head", root, COMPUTING, "w · P_root", FLAT, inputs)
    resharded = grid.zero == 3
    saved = base.all_blocks * sharded * (1 - resharded)
    phases = ("forward-last", "forward", "loss", "backward-last")
    yield Term("buffers", "gathered blocks", saved, phases, "w · P_blocks", FLAT, inputs)
    forward, backward = block * resharded, block * resharded * (1 + prefetches(census))
    yield Term("buffers", "gathered block of forward", forward, ("forward-last",), "w · P_block", FLAT, inputs)
    title, formula = "gathered block and the prefetched one", "(1 + prefetched) · w · P_block"
    yield Term("buffers", title, backward, ("backward-last",), formula, FLAT, inputs)
    yield Term("buffers", "gathered first block", block, ("backward-first",), "w · P_block", FLAT, inputs)


def casts_to_reduce(census: ModelOnGrid) -> Array:
    """1 where a unit's flat gradient is cast before it is reduced (``_post_backward_hook``): to fp32 from 16 bits."""
    grid = census.grid
    return np.asarray((grid.reduce_width != grid.width("compute")) & grid.zero_from(2)).astype(np.int64)


def flat_reduction_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The root's gradients: one by one, and again as the one flat tensor that the views' backward makes of them.

    A copy that is cast to be reduced comes when the parts and the gathered root are gone, and is no more than they.
    """
    grid, updated = census.grid, trained(census)
    width = (
        np.minimum(updated.width("gradient"), grid.width("compute")) if updated is census else updated.width("gradient")
    )
    flat = 2 * width * updated.root * grid.zero_from(2)
    inputs = {"w": width, "P_root": updated.root}
    yield Term(
        "buffers", "root's gradients and their flat copy", flat, ("backward-end",), "2 · w · P_root", FLAT, inputs
    )
