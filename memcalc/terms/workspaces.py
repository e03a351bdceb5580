"""Memory that libraries take from the caching allocator for good: workspaces, gather buffers, dummy gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import ALWAYS, Term
from memcalc.specs.block import MixtureOfExperts, Mlp

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.specs.block import Attention, Block
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Workspaces

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
    yield Term("buffers", "BLAS workspaces", handles, ALWAYS, "2 handles · W", HANDLES, {"W": handle})
    if grid.fixed.kernels == "te":
        yield gather_buffer_term(census)
    if grid.habits.engine:
        yield from engine_terms(census, workspaces.engine)


def plain_products(census: ModelOnGrid) -> Array:
    """1 where PyTorch itself multiplies matrices: the output layer, and materialised scores."""
    grid = census.grid
    return np.maximum(grid.is_last, int(grid.fixed.attention in ("eager", "math")))


def gather_buffer_term(census: ModelOnGrid) -> Term:
    """The output layer's input, gathered under sequence parallelism into a buffer that is never freed."""
    grid = census.grid
    gathered = grid.width("compute") * grid.tokens * census.model.hidden * (grid.sequence_shard > 1)
    inputs = {"w": grid.width("compute"), "T": grid.tokens, "h": census.model.hidden}
    title, formula = "gathered input of the output layer", "w · T · h"
    return Term("buffers", title, gathered * grid.is_last, ALWAYS, formula, BUFFER, inputs)


def engine_terms(census: ModelOnGrid, engine: int) -> Iterator[Term]:
    """TransformerEngine's workspaces and dummy weight gradients."""
    grid = census.grid
    yield Term("buffers", "TransformerEngine's workspace", np.full((1,) * 7, engine), ALWAYS, "W", ENGINE)
    routed = routed_here(census)
    streams = GROUPED_STREAMS * engine * routed
    yield Term("buffers", "workspaces of the grouped products", streams, ALWAYS, "4 streams · W", ENGINE)
    if grid.fixed.wgrad_fusion:
        title, formula = "dummy weight gradients", "w · sum over distinct shapes"
        bytes_ = grid.width("compute") * dummy_elements(census)
        yield Term("buffers", title, bytes_, ALWAYS, formula, DUMMIES, {"w": grid.width("compute")})


def routed_here(census: ModelOnGrid) -> Array:
    """1 on stages with experts."""
    layers = zip(census.model.groups, census.layers, strict=True)
    return np.minimum(sum((n for group, n in layers if group.block.is_moe), np.int64(0)), 1)


def dummy_elements(census: ModelOnGrid) -> Array:
    """Elements of one weight of each distinct shape that a rank has."""
    here: dict[Shape, Array] = {}
    for group, layers in zip(census.model.groups, census.layers, strict=True):
        for shape in shapes_of(group.block):
            here[shape] = np.maximum(here.get(shape, np.int64(0)), np.minimum(layers, 1))
    total: Array = np.int64(0)
    for (rows, columns, divided), there in here.items():
        total = total + rows * columns // census.divisor(divided) * there
    width = census.model.embedding_dim or census.model.hidden
    return total + census.vocab * width // census.grid.degree("tp") * (census.grid.is_last * census.model.head)


def shapes_of(block: Block) -> list[Shape]:
    """Weights of a block whose gradients are added in place: all but router and norms."""
    return [*attention_shapes(block.attention, block.hidden), *mlp_shapes(block.mlp, block.hidden)]


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
