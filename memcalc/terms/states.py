"""Terms of the states: parameters, gradients, optimizer, and what the optimizer step adds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas import gradients as g
from memcalc.formulas.optimizer_states import master_bytes, shard
from memcalc.formulas.quantization import narrow_bytes
from memcalc.grid import column
from memcalc.ledger import ALWAYS, KEPT, Term
from memcalc.terms.adapters import frozen_terms, scales_term, trained_parts
from memcalc.terms.fsdp2 import Units, in_reduce_pool
from memcalc.terms.gradients import accumulates_whole, beyond_traded, traded
from memcalc.terms.moments import (
    kind_of,
    largest_share,
    narrow_moments_term,
    optimizer_moments,
    sharded_from,
    temporary_bytes,
    turns_of,
    updated_elements,
    widened_term,
)
from memcalc.terms.settings import in_tiles
from memcalc.terms.tensors import elements_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.terms.model_on_grid import ModelOnGrid


# Weights that TransformerEngine quantises for 8-bit and 4-bit products, and what stands for the 16-bit ones.
#
# Each linear layer of a block keeps a quantised copy of its weight, along the directions of forward and backward,
# from its first micro-batch on; the embedding, the head, norms and routers have none. With ``--fp8-param-gather``
# that copy is the weight itself.
#
# Sources: TransformerEngine d0067d0d ``pytorch/module/base.py`` (``quantize_weight``) and
# ``pytorch/csrc/quantizer.cpp``; Megatron-LM d98e8a64 ``core/extensions/transformer_engine.py``
# (``is_first_microbatch``) and ``core/distributed/param_and_grad_buffer.py`` (gathered 8-bit weights of MXFP8 pass
# through the gradient buffer).


SOURCE = "TransformerEngine d0067d0d pytorch/module/base.py, quantize_weight; pytorch/csrc/quantizer.cpp"


def quantised_weight_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The quantised copies of all weights of a stage that are multiplied so."""
    grid, recipe = census.grid, census.grid.recipe
    narrow = column([name.startswith("fp8") for name in grid.precisions], "precision")
    if recipe is None or not narrow.any():
        return
    width = recipe.weight_bytes(transposes=grid.fixed.float8_transposes and grid.fixed.float8_transpose_cache)
    elements = quantised_elements(census)
    bytes_ = narrow * np.asarray(narrow_bytes(elements, width.numerator, width.denominator))
    inputs = {"w": float(width), "P_linear": elements}
    yield Term("parameters", "quantised weights", bytes_, ALWAYS, "w · P_linear", SOURCE, inputs)


def replaced_elements(census: ModelOnGrid) -> Array:
    """Weights that have no 16-bit form beside their quantised one [elements]."""
    stored = census.grid.narrow_weights
    return stored * quantised_elements(census) if stored.any() else np.int64(0)


def quantised_elements(census: ModelOnGrid) -> Array:
    """Weights of a stage's linear layers on a rank [elements]."""
    tp, total = census.grid.degree("tp"), np.int64(0)
    experts = census.grid.expert_tp * census.grid.degree("ep")
    for group, layers in zip(census.model.groups, census.layers, strict=True):
        divided, replicated, routed = elements_of(group.block)
        total = total + layers * (shard(divided, tp) + replicated + shard(routed, experts))
    predictors = census.grid.fixed.mtp * shard(2 * census.model.hidden**2, tp) * census.grid.is_last
    return total + predictors


def state_terms(census: ModelOnGrid) -> Iterator[Term]:
    """All terms of the states."""
    yield from parameter_terms(census)
    for updated in trained_parts(census):
        for term in updated_terms(updated):
            yield replace(term, name=f"{term.name}{updated.suffix}") if updated.suffix else term


def updated_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The states of what is trained: gradients, optimizer, and what the step adds."""
    yield from gradient_terms(census)
    copied = census.grid.copied_gradients
    if np.any(copied):
        yield bucket_term(census, copied)
    yield from optimizer_terms(census)
    if not census.grid.fixed.optimizer_in_backward:
        yield from step_terms(census)


def parameter_elements(census: ModelOnGrid) -> Array:
    """Weights that a rank keeps between steps [elements]."""
    return census.sharded(census.blocks + census.root, census.experts_or_none, sharded_from(census.grid, 3))


def gradient_elements(census: ModelOnGrid) -> Array:
    """Gradients that a rank keeps for the step [elements]."""
    return census.sharded(census.blocks + census.root, census.experts_or_none, sharded_from(census.grid, 2))


def parameter_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The persistent weights on the GPU."""
    yield from weight_terms(census, 1 - census.grid.offloaded("params"))
    if census.grid.fixed.quantize != "none":
        yield scales_term(census)
    yield from quantised_weight_terms(census)


def weight_terms(census: ModelOnGrid, here: Array) -> Iterator[Term]:
    """The persistent weights where ``here`` is 1."""
    grid = census.grid
    if grid.fixed.adapters is not None:
        yield from frozen_terms(census, shards(grid, 3), here, replaced_elements(census))
        return
    elements = parameter_elements(census) - replaced_elements(census)
    yield Term(
        "parameters",
        "weights",
        grid.width("parameter") * elements * here,
        ALWAYS,
        "w · (P - P_linear)" if grid.narrow_weights.any() else "w · ⌈P / N⌉",
        grid.habits.source,
        {"w": grid.width("parameter"), "P": census.parameters, "N": shards(grid, 3)},
        with_model=True,
    )


def shards(grid: Grid, stage: int) -> Array:
    """Ranks over which a state is divided, where the ZeRO stage is at least ``stage``."""
    return np.where(sharded_from(grid, stage), grid.ranks, 1)


def gradient_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Gradients by phase: one block's where the optimizer steps in backward, else all that have been reduced."""
    grid = census.grid
    if grid.fixed.optimizer_in_backward:
        yield _block_gradients(census)
        return
    here = 1 - offloaded_gradients(grid)
    gradients = g.gradient_bytes(gradient_elements(census), census.width("gradient"))
    reduced = gradients * (1 - accumulates_whole(census))
    for term in _reduced_gradients(census, reduced * here * _reduces_in_backward(census), here):
        yield from in_reduce_pool(term, census)
    if grid.habits.zero_optimizer is None:  # DeepSpeed's step reads a share of them (memcalc.terms.zero)
        yield from in_reduce_pool(_gradients(census, "gradients", gradients * here, ("step",)), census)
    remain = (grid.accumulation > 1) & (not grid.fixed.longest_first)
    remain = remain | grid.persistent_gradients | grid.habits.zeroes_gradients | in_one_buffer(grid)
    for term in _earlier_gradients(census, reduced * remain, here):
        yield from in_reduce_pool(term, census)
    if not grid.persistent_gradients:
        yield from _head_gradients(census, remain)


def _block_gradients(census: ModelOnGrid) -> Term:
    width = census.width("gradient")
    block = g.gradient_bytes(census.largest_block, width)
    inputs = {"w": width, "P_block": census.largest_block}
    during = ("backward-last", "backward-first")
    return Term("gradients", "gradients of one block", block, during, "w · P_block", census.grid.habits.source, inputs)


def _gradients(
    census: ModelOnGrid, name: str, size: Array, phases: tuple[str, ...], formula: str = "w · ⌈P / N⌉"
) -> Term:
    """Some or all of a rank's gradients, of ``size`` bytes."""
    inputs = {"w": census.width("gradient"), "P": census.parameters, "N": shards(census.grid, 2)}
    return Term("gradients", name, size, phases, formula, census.grid.habits.source, inputs)


def _reduced_gradients(census: ModelOnGrid, reduced: Array, here: Array) -> Iterator[Term]:
    """What backward has reduced when the first block's runs, and when it ends."""
    bytes_ = np.maximum(reduced - late_gradients(census) * here, 0)
    formula = "w · ⌈(P - P_late) / N⌉ in the first micro-batch, w · ⌈P / N⌉ after it"
    yield _gradients(census, "gradients at the first block's backward", bytes_, ("backward-first",), formula)
    done = np.maximum(reduced - last_gradients(census) * here, 0)
    yield _gradients(census, "gradients at the end of backward", done, ("backward-end",))


def _reduces_in_backward(census: ModelOnGrid) -> Array:
    """1 where gradients are reduced before the last micro-batch of a pipeline is done."""
    return np.asarray(1 - Units(census).pipelined if census.grid.habits.gather == "blocks" else 1)


def _earlier_gradients(census: ModelOnGrid, remaining: Array, here: Array) -> Iterator[Term]:
    """Gradients of earlier micro-batches, less what a stage has let go of once the first of them are made."""
    grid = census.grid
    earlier, alone = remaining * _reduces_in_backward(census), traded(census, in_one_buffer(grid))
    title = "gradients of earlier micro-batches"
    formula = "w · ⌈P / N⌉ where gradients accumulate or live in one buffer"
    if alone is None:
        yield _gradients(census, title, earlier * here, KEPT, formula)
        return
    yield _gradients(census, title, earlier * here * (1 - alone), KEPT, formula)
    rest = beyond_traded(census, earlier * alone)
    if np.any(rest):
        yield _gradients(census, title, rest * here, KEPT, formula)


def _head_gradients(census: ModelOnGrid, accumulates: Array) -> Iterator[Term]:
    head = head_gradient_term(census, accumulates)
    if head.phases[-1] == "backward-first":
        # Without sharding the head's gradient is one of those that the first block's backward finds
        yield replace(head, bytes=head.bytes * census.grid.zero_from(2), phases=("backward-first",))
        yield replace(head, phases=head.phases[:-1])
    else:
        yield from in_reduce_pool(head, census)


def last_gradients(census: ModelOnGrid) -> Array:
    """Bytes of the gradients of FSDP 2's last unit, which are not reduced yet when their flat copy is made."""
    grid = census.grid
    if grid.habits.gather != "blocks" or grid.habits.flat_units:
        return np.int64(0)
    outer = census.embedding if Units(census).split else census.root
    share = census.width("gradient") * census.sharded(outer, np.int64(0), where=True)
    return share * grid.zero_from(2) * (grid.accumulation == 1)


def in_one_buffer(grid: Grid) -> Array:
    """Where ZeRO-3 keeps the shares of all gradients in one buffer (``grad_partitions_flat_buffer``)."""
    zero = grid.habits.zero_optimizer
    return (grid.zero == 3) & (zero is not None and zero.flat_partitions)


def late_gradients(census: ModelOnGrid) -> Array:
    """Bytes of gradients that are not there yet when the first block's backward runs, in the first micro-batch.

    FSDP has not reduced the root's and two blocks' (FSDP 1: one's); without it the first block's and the embedding's
    are to come.
    """
    grid = census.grid
    if grid.persistent_gradients:
        return np.int64(0)
    first = ((grid.accumulation == 1) | grid.fixed.longest_first) & ~in_one_buffer(grid)
    first = first & (not grid.habits.zeroes_gradients)
    if grid.habits.gather == "blocks":
        outer = census.embedding if Units(census).split else census.root
        blocks = 1 if grid.habits.flat_units else 2
        late = census.sharded(outer + blocks * census.largest_block, np.int64(0), where=True)
        sharded = census.width("gradient") * late * grid.zero_from(2)
        return first * np.where(
            grid.zero_from(2), sharded, census.width("gradient") * (census.embedding + census.largest_block)
        )
    late = census.sharded(census.embedding + census.largest_block, np.int64(0), sharded_from(grid, 2))
    return first * census.width("gradient") * late


def head_gradient_term(census: ModelOnGrid, accumulates: Array) -> Term:
    """The head's gradient from the loss on: whole under FSDP where its unit is the root, which is reduced last."""
    grid = census.grid
    in_units = grid.habits.gather == "blocks" and not Units(census).split
    unsharded = grid.zero_from(2) & in_units
    elements = np.where(unsharded, census.head, census.sharded(census.head, np.int64(0), sharded_from(grid, 2)))
    width = np.where(unsharded, grid.width("compute"), census.width("gradient") * (1 - accumulates))
    phases = ("backward-last", "backward-first") if in_units else ("backward-last",)
    if grid.fixed.loss == "fused-linear" and not in_tiles(grid):  # it is made in the loss's forward
        phases = ("forward", "loss", *phases)
    here = 1 - offloaded_gradients(grid)
    inputs = {"w": width, "P_head": census.head}
    return Term(
        "gradients", "gradient of the head", width * elements * here, phases, "w · P_head", grid.habits.source, inputs
    )


def bucket_term(census: ModelOnGrid, copied: Array) -> Term:
    """DDP's all-reduce buckets, a second copy of all gradients where ``copied`` is 1."""
    width = census.width("gradient")
    copy = g.ddp_bucket_bytes(census.parameters, width) * copied
    inputs = {"w": width, "P": census.parameters}
    return Term("buffers", "all-reduce buckets", copy, ALWAYS, "w · P", census.grid.habits.source, inputs)


def offloaded_gradients(grid: Grid) -> Array:
    """1 where gradient shards live on the host."""
    follow = grid.offloaded("optimizer") * grid.zero_from(2) * grid.habits.gradients_follow_optimizer
    return np.maximum(follow, grid.offloaded("params") * grid.habits.full_shard)


def offloaded_states(grid: Grid) -> Array:
    """1 where optimizer states live on the host. FSDP's policy moves them with the parameters."""
    return np.maximum(grid.offloaded("optimizer"), grid.offloaded("params") * grid.habits.full_shard)


def main_width(census: ModelOnGrid) -> Array:
    """Bytes an element of what the optimizer updates beside the weights.

    DeepSpeed's ZeRO clones its shard even where the weights are as wide (stage_1_and_2.py,
    single_partition_of_fp32_groups). Stage 3 would share them, but ``tensor.device == self.device`` compares a device
    with its name and is never true (stage3.py, _create_fp32_partitions of 0.19.8).
    """
    width, engine = census.width("master"), census.grid.habits.zero_optimizer
    if engine is None:
        return width
    return np.where((width == 0) & (census.grid.zero >= 1), census.width("parameter"), width)


def optimizer_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Master weights and moments."""
    grid, kind = census.grid, kind_of(census.grid)
    here = 1 - offloaded_states(grid)
    formula = "n · w · ⌈P / N⌉, with the scales of 8-bit states"
    inputs = {"P": census.parameters, "N": shards(grid, 1)}
    aware = grid.fixed.precision_aware
    width = main_width(census)
    master = master_bytes(updated_elements(census), width)
    source = grid.habits.source
    title = "main weights" if aware else "fp32 master weights" if np.any(width > 2) else "master weights"
    # DeepSpeed's partition is made with its engine too (stage_1_and_2.py, single_partition_of_fp32_groups)
    early = grid.habits.zero_optimizer is not None or (grid.habits.persistent_gradients and not aware)
    with_width = {"w": width, **inputs}
    yield Term("optimizer", title, master * here, ALWAYS, "w · ⌈P / N⌉", source, with_width, with_model=early)
    if aware:
        yield narrow_moments_term(census)
        return
    yield Term(
        "optimizer",
        f"{kind.name} moments",
        optimizer_moments(census) * (0 if kind.paged else here),
        ("step",) if grid.fixed.longest_first else ALWAYS,
        formula if kind.states is None else "w · states of each tensor, by its shape",
        kind.source,
        {"n": kind.moments, "w": kind.width or census.width("moment"), **inputs},
        tensors=max(kind.moments, 1) if kind.states is None else 1,
    )


def step_terms(census: ModelOnGrid) -> Iterator[Term]:
    """What the optimizer step allocates and frees again: its temporaries, and DeepSpeed's fp32 gradient copy."""
    grid, kind = census.grid, kind_of(census.grid)
    local, here = updated_elements(census), 1 - offloaded_states(grid)
    inputs = {"P": census.parameters, "N": shards(grid, 1)}
    yield Term(
        "optimizer",
        "temporaries of the step",
        temporary_bytes(census) * here,
        ("step",),
        "w · (c_all · ⌈P / N⌉ + c_max · P_max); at ZeRO-3 of one sub-group"
        if kind.temporary is None
        else "w · the most that the step of one tensor takes, by its shape",
        kind.source,
        {"w": census.width("moment"), "P_max": largest_share(census), **inputs},
        in_turn=turns_of(census),
    )
    most, formula = np.minimum(local, 10**9), "4 · min(⌈P / N⌉, 10⁹)"
    source = "DeepSpeed v0.12.3 runtime/zero/stage3.py, _prepare_fp32_grad_for_sub_group"
    if grid.habits.narrow_gradients and grid.fixed.reduce_dtype == "bf16":  # all shards before any is updated
        most, formula = local, "4 · ⌈P / N⌉"
        source = "Megatron-LM d98e8a64 core/optimizer/distrib_optimizer.py, _copy_model_grads_to_main_grads"
    if grid.fixed.precision_aware:
        yield widened_term(census)
    copy = census.width("step_gradient") * most * here
    yield Term("optimizer", "fp32 copy of the gradients", copy, ("step",), formula, source, inputs)
