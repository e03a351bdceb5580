"""Terms of the states: parameters, gradients, optimizer, and what the optimizer step adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas import gradients as g
from memcalc.formulas.optimizer import OPTIMIZERS, factored_bytes, master_bytes, moment_bytes, shard, step_temporary
from memcalc.ledger import ALWAYS, Term

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.terms.census import Census

EARLY = ("forward", "loss", "backward-last")


def state_terms(census: Census) -> Iterator[Term]:
    """All terms of the states."""
    yield from parameter_terms(census)
    yield from gradient_terms(census)
    if census.grid.habits.gradient_copy:
        yield bucket_term(census)
    yield from optimizer_terms(census)
    if not census.grid.fixed.optimizer_in_backward:
        yield from step_terms(census)


def sharded_from(grid: Grid, stage: int) -> Array:
    """Where a ZeRO stage of at least ``stage`` shards over the data-parallel ranks; all states wherever FSDP is on."""
    return (grid.zero >= stage) | (grid.habits.full_shard & (grid.zero >= 2))


def parameter_elements(census: Census) -> Array:
    """Weights that a rank keeps between steps [elements]."""
    return census.sharded(census.blocks + census.root, census.experts_or_none, sharded_from(census.grid, 3))


def gradient_elements(census: Census) -> Array:
    """Gradients that a rank keeps for the step [elements]."""
    return census.sharded(census.blocks + census.root, census.experts_or_none, sharded_from(census.grid, 2))


def updated_elements(census: Census) -> Array:
    """Parameters whose optimizer states a rank holds [elements]."""
    return census.sharded(census.blocks + census.root, census.experts_or_none, sharded_from(census.grid, 1))


def parameter_terms(census: Census) -> Iterator[Term]:
    """The persistent weights."""
    grid = census.grid
    yield Term(
        "parameters",
        "weights",
        grid.width("parameter") * parameter_elements(census) * (1 - grid.offloaded("params")),
        ALWAYS,
        "w · ⌈P / N⌉",
        grid.habits.source,
        {"w": grid.width("parameter"), "P": census.parameters, "N": shards(grid, 3)},
    )


def shards(grid: Grid, stage: int) -> Array:
    """Ranks over which a state is divided, where the ZeRO stage is at least ``stage``."""
    return np.where(sharded_from(grid, stage), grid.ranks, 1)


def gradient_terms(census: Census) -> Iterator[Term]:
    """Gradients by phase: one block's where the optimizer steps in backward, else all that have been reduced."""
    grid, width = census.grid, census.grid.width("gradient")
    source = grid.habits.source
    if grid.fixed.optimizer_in_backward:
        block = g.gradient_bytes(census.largest_block, width)
        inputs = {"w": width, "P_block": census.largest_block}
        during = ("backward-last", "backward-first")
        yield Term("gradients", "gradients of one block", block, during, "w · P_block", source, inputs)
        return
    whole = g.gradient_bytes(gradient_elements(census), width) * (1 - offloaded_gradients(grid))
    inputs = {"w": width, "P": census.parameters, "N": shards(grid, 2)}
    yield Term(
        "gradients",
        "gradients at the first block's backward",
        np.maximum(whole - late_gradients(census), 0),
        ("backward-first",),
        "w · ⌈(P - P_root - 2·P_block) / N⌉ in the first micro-batch, w · ⌈P / N⌉ after it",
        source,
        inputs,
    )
    yield Term("gradients", "gradients", whole, ("step",), "w · ⌈P / N⌉", source, inputs)
    kept = (grid.accumulation > 1) | grid.habits.persistent_gradients
    formula = "w · ⌈P / N⌉ where gradients accumulate or live in one buffer"
    yield Term("gradients", "gradients of earlier micro-batches", whole * kept, EARLY, formula, source, inputs)


def late_gradients(census: Census) -> Array:
    """Bytes that FSDP has not yet reduced when the first block's backward runs: the root's, and two blocks'."""
    grid = census.grid
    if grid.habits.gather != "blocks":
        return np.int64(0)
    late = census.sharded(census.root + 2 * census.largest_block, np.int64(0), where=True)
    return grid.width("gradient") * late * (grid.zero >= 2) * (grid.accumulation == 1)


def bucket_term(census: Census) -> Term:
    """DDP's all-reduce buckets, a second copy of all gradients."""
    width = census.grid.width("gradient")
    copy = g.ddp_bucket_bytes(census.parameters, width)
    inputs = {"w": width, "P": census.parameters}
    return Term("buffers", "all-reduce buckets", copy, ALWAYS, "w · P", census.grid.habits.source, inputs)


def offloaded_gradients(grid: Grid) -> Array:
    """1 where gradient shards live on the host."""
    follow = grid.offloaded("optimizer") * (grid.zero >= 2) * grid.habits.gradients_follow_optimizer
    return np.maximum(follow, grid.offloaded("params") * grid.habits.full_shard)


def offloaded_states(grid: Grid) -> Array:
    """1 where optimizer states live on the host. FSDP's policy moves them with the parameters."""
    return np.maximum(grid.offloaded("optimizer"), grid.offloaded("params") * grid.habits.full_shard)


def optimizer_terms(census: Census) -> Iterator[Term]:
    """Master weights and moments."""
    grid, kind = census.grid, OPTIMIZERS[census.grid.fixed.optimizer]
    here = 1 - offloaded_states(grid)
    inputs = {"P": census.parameters, "N": shards(grid, 1)}
    master = master_bytes(updated_elements(census), grid.width("master"))
    width = {"w": grid.width("master")}
    source = grid.habits.source
    yield Term("optimizer", "fp32 master weights", master * here, ALWAYS, "w · ⌈P / N⌉", source, {**width, **inputs})
    yield Term(
        "optimizer",
        f"{kind.name} moments",
        optimizer_moments(census) * (0 if kind.paged else here),
        ALWAYS,
        "n · w · ⌈P / N⌉, with the scales of 8-bit states",
        kind.source,
        {"n": kind.moments, "w": kind.width or grid.width("moment"), **inputs},
    )


def step_terms(census: Census) -> Iterator[Term]:
    """What the optimizer step allocates and frees again: its temporaries, and DeepSpeed's fp32 gradient copy."""
    grid, kind = census.grid, OPTIMIZERS[census.grid.fixed.optimizer]
    local, here = updated_elements(census), 1 - offloaded_states(grid)
    inputs = {"P": census.parameters, "N": shards(grid, 1)}
    tensor = np.minimum(shard(census.largest_tensor, shards(grid, 1)), local)
    temporary = step_temporary(local, tensor, grid.width("moment"), impl=grid.fixed.optimizer_impl, kind=kind)
    yield Term(
        "optimizer",
        "temporaries of the step",
        temporary * here,
        ("step",),
        "w · (c_all · ⌈P / N⌉ + c_max · P_max)",
        kind.source,
        {"w": grid.width("moment"), "P_max": tensor, **inputs},
    )
    copy = grid.width("step_gradient") * np.minimum(local, 10**9) * here
    source = "DeepSpeed v0.12.3 runtime/zero/stage3.py, _prepare_fp32_grad_for_sub_group"
    yield Term("optimizer", "fp32 copy of the gradients", copy, ("step",), "4 · min(⌈P / N⌉, 10⁹)", source, inputs)


def optimizer_moments(census: Census) -> Array:
    """Bytes of the moments of one rank, wherever they live."""
    grid, kind = census.grid, OPTIMIZERS[census.grid.fixed.optimizer]
    width = grid.width("moment")
    moments = moment_bytes(updated_elements(census), kind, width)
    if kind.matrices_only:
        moments = moments + width * shard(census.root, shards(grid, 1))
    if kind.factored:
        moments = moments + factored_bytes(*_rows_and_columns(census), width)
    return moments


def _rows_and_columns(census: Census) -> tuple[int, int]:
    """Sums of the rows and columns of all matrices of the model."""
    model, rows, columns = census.model, census.model.vocab, census.model.hidden
    for group in model.groups:
        block, experts = group.block, getattr(group.block.mlp, "experts", 1)
        attention = block.attention.q_dim * 2 + 2 * block.attention.kv_dim
        matrices = (2 + bool(block.mlp.gated)) * experts
        rows += group.count * (attention + matrices * block.mlp.ffn)
        columns += group.count * (4 + matrices) * block.hidden
    return rows, columns


def host_states(census: Census) -> Array:
    """Bytes that one rank keeps off the GPU: offloaded weights, gradients, master weights and moments."""
    grid, kind = census.grid, OPTIMIZERS[census.grid.fixed.optimizer]
    weights = grid.width("parameter") * parameter_elements(census) * grid.offloaded("params")
    gradients = grid.width("gradient") * gradient_elements(census) * offloaded_gradients(grid)
    moments = optimizer_moments(census)
    states = (grid.width("master") * updated_elements(census) + (0 if kind.paged else moments)) * offloaded_states(grid)
    return weights + gradients + states + (moments if kind.paged else 0)
