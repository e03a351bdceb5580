"""Terms of the buffers: what is gathered for compute, what waits to be reduced, autocast's copies, workspaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.gradients import gradient_bytes, reduce_bucket_bytes, reduce_scatter_input_bytes
from memcalc.ledger import ALWAYS, Term
from memcalc.terms.activations import BACKWARD, groups_of

if TYPE_CHECKING:
    from memcalc.terms.census import Census

COMPUTING = ("forward", "loss", "backward-last", "backward-first")
FSDP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py, torch 2.13"
DEEPSPEED = "deepspeed/runtime/zero/config.py edaa722"


def buffer_terms(census: Census, workspace: int) -> Iterator[Term]:
    """All terms of the buffers; ``workspace`` is that of one BLAS handle [bytes]."""
    gather = census.grid.habits.gather
    if gather == "blocks":
        yield from block_gather_terms(census)
        yield from block_reduction_terms(census)
    if gather == "live":
        yield from live_gather_terms(census)
    if census.grid.width("cached").any():
        yield autocast_term(census)
    yield Term(
        "buffers",
        "BLAS workspaces",
        np.full((1,) * 7, 2 * workspace),
        ALWAYS,
        "2 handles · W",
        "PyTorch aten/src/ATen/cuda/CublasHandlePool.cpp: 8.125 MiB, 32 MiB from compute capability 9.0",
        {"W": workspace},
    )


def block_gather_terms(census: Census) -> Iterator[Term]:
    """FSDP: the root unit is whole from forward to the end of backward, blocks come one by one with a prefetch."""
    grid = census.grid
    width, block = grid.width("compute") * (grid.zero >= 2), census.largest_block
    blocks, resharded = census.blocks + census.experts_or_none, grid.zero == 3
    inputs = {"w": width, "P_root": census.root, "P_block": block, "P_blocks": blocks}
    one, kept = width * block, width * blocks * (1 - resharded)
    root = "gathered embedding, norm and head"
    yield Term("buffers", root, width * census.root, COMPUTING, "w · P_root", FSDP, inputs)
    until_last = ("forward", "loss", "backward-last")
    yield Term("buffers", "gathered blocks", kept, until_last, "w · P_blocks", FSDP, inputs)
    # FSDP frees a block after its backward whether or not it was freed after forward
    first, last = one * (1 - resharded), one * resharded
    yield Term("buffers", "gathered first block", first, ("backward-first",), "w · P_block", FSDP, inputs)
    yield Term("buffers", "gathered block", last, ("forward", "loss"), "w · P_block", FSDP, inputs)
    prefetched = "gathered block and the prefetched one"
    yield Term("buffers", prefetched, 2 * last, BACKWARD, "2 · w · P_block", FSDP, inputs)


def block_reduction_terms(census: Census) -> Iterator[Term]:
    """FSDP: one block's gradients, whole, and their flat copy on the way to the reduce-scatter."""
    grid, block = census.grid, census.largest_block
    width = grid.width("compute") * (grid.zero >= 2)
    gradients = gradient_bytes(block, width)
    inputs = {"w": width, "P_block": block}
    yield Term("buffers", "unsharded gradients of a block", gradients, BACKWARD, "w · P_block", FSDP, inputs)
    reduce_width = np.maximum(width, 4 if grid.fixed.reduce_dtype == "fp32" else 2)
    reduce_width = np.where(grid.width("parameter") == 2, 2, reduce_width)
    scatter = reduce_scatter_input_bytes(block, reduce_width, grid.ranks) * (grid.zero >= 2)
    inputs = {"w_reduce": reduce_width, "P_block": block}
    yield Term("buffers", "reduce-scatter input of a block", scatter, BACKWARD, "w_reduce · P_block", FSDP, inputs)


def live_gather_terms(census: Census) -> Iterator[Term]:
    """ZeRO: stage 3 gathers up to 10⁹ parameters; stages 1 to 3 reduce through buckets."""
    grid, parameters = census.grid, census.parameters
    width = grid.width("compute")
    gathered = width * np.minimum(parameters, 10**9) * (grid.zero == 3)
    yield Term(
        "buffers",
        "gathered parameters",
        gathered,
        COMPUTING,
        "w · min(P, 10⁹) at stage 3",
        f"{DEEPSPEED}: stage3_max_live_parameters",
        {"w": width, "P": parameters},
    )
    bucket = np.minimum(parameters, grid.habits.bucket_elements)
    held = reduce_bucket_bytes(bucket, width, grid.habits.buckets) * (grid.zero >= 1)
    yield Term(
        "buffers",
        "reduction buckets",
        held,
        BACKWARD,
        "2 · w · min(P, 5·10⁸)",
        f"{DEEPSPEED}: reduce_bucket_size, overlap_comm",
        {"w": width, "P": parameters},
    )


def autocast_term(census: Census) -> Term:
    """16-bit copies of the fp32 weights that autograd keeps from forward to backward; none of a checkpointed block."""
    grid = census.grid
    per_block = [d + e for d, e in zip(census.block_dense, census.block_experts, strict=True)]
    kept = [a.field("whole") + a.field("partial") for a in groups_of(census)]
    elements = census.root + sum(n * p for n, p in zip(kept, per_block, strict=True))
    return Term(
        "buffers",
        "autocast's 16-bit weight copies",
        grid.width("cached") * elements,
        ("forward", "loss", "backward-last"),
        "w · P of blocks that are not checkpointed",
        "PyTorch aten/src/ATen/autocast_mode.cpp, cached_cast",
        {"w": grid.width("cached"), "P": elements},
    )
