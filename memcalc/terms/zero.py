"""Terms of DeepSpeed's ZeRO: the buckets of its reductions, and the copies of the gradients that its step makes.

What ZeRO's stage 3 holds of the whole weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.gradients import reduce_bucket_bytes
from memcalc.frameworks.habits import Zero
from memcalc.ledger import ALWAYS, BACKWARD, COMPUTING, Term
from memcalc.terms.adapters import trained
from memcalc.terms.head import over_vocabularies
from memcalc.terms.parameters import model_count
from memcalc.terms.tensors import largest_group

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.terms.model_on_grid import ModelOnGrid


STAGES = "DeepSpeed v0.12.3 runtime/zero/stage_1_and_2.py"
STAGE1 = "DeepSpeed v0.3.16 runtime/zero/stage1.py"
STAGE3 = "DeepSpeed v0.12.3 runtime/zero/stage3.py"
COALESCED = "DeepSpeed v0.12.3 runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced"
STEPS = (
    "DeepSpeed v0.5.10 runtime/fp16/fused_optimizer.py; v0.12.3 runtime/zero/stage_1_and_2.py, step, and stage3.py, "
    "_prepare_fp32_grad_for_sub_group"
)
OFFLOADED = "DeepSpeed 0.15.4, 0.16.4 and 0.19.8, run on fake CUDA tensors: pool of the stream of the reductions"
FP32_GRADIENTS = "fp32 copy of the gradients"
BF16 = "DeepSpeed v0.12.3 runtime/bf16_optimizer.py"
FLAT_OUTPUT = "PyTorch 1.11 ProcessGroupNCCL.cpp, allgather into a list goes through one flat tensor"


def zero_terms(census: ModelOnGrid) -> Iterator[Term]:
    """All terms of ZeRO, whatever the stage."""
    trained_model = trained(census)
    yield from bucket_terms(trained_model)
    yield from gather_terms(census)  # a module lets go of its weights before the next one's gradients are reduced
    yield from reduction_terms(trained_model)
    yield from accumulation_terms(trained_model)
    yield from step_terms(trained_model)
    yield from segment_terms(trained_model, census)
    yield staging_term(trained_model)


def share(census: ModelOnGrid, stage: int) -> Array:
    """Elements of a state that is divided over the data-parallel ranks from a stage on."""
    where = census.grid.zero >= stage
    where = where | partitions_without_zero(census.grid) if stage == 1 else where
    return census.sharded(census.blocks + census.root, census.experts_or_none, where)


def partitions_without_zero(grid: Grid) -> Array:
    """Where DeepSpeed's ``BF16_Optimizer`` runs without ZeRO: it shares out masters and moments all the same.

    It runs every bf16 job until 0.17.5, and pipelines after it (engine.py, ``_do_optimizer_sanity_check``).
    """
    zero = era(grid)
    runs = zero.wide_without_zero | (grid.degree("pp") > 1)
    return zero.fp32_accumulation & (grid.zero == 0) & (grid.is_bf16_mixed == 1) & runs


def bucket_elements(grid: Grid) -> int:
    """Elements of a bucket of the reductions."""
    return grid.fixed.reduce_bucket_size or era(grid).bucket


def is_contiguous(grid: Grid) -> Array:
    """Where gradients are copied into a bucket that is allocated whole: always with an offloaded optimizer."""
    return ((grid.zero >= era(grid).contiguous_from) | (grid.offloaded("optimizer") == 1)) & grid.zero_from(1)


def num_buckets(grid: Grid) -> Array:
    """Two where one is reduced while the other is filled: in no pipeline, and not where stage 3 keeps one for life."""
    stated = grid.fixed.overlap_comm
    overlaps = (
        grid.zero >= era(grid).overlap_from if stated is None else np.full_like(grid.zero, stated, dtype=np.bool_)
    )
    return 1 + (overlaps & ((grid.zero < 3) | (not era(grid).flat_partitions)) & (grid.degree("pp") == 1))


def bucket_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Contiguous buckets: from the first backward on at stage 3, during backward below.

    Since 0.18.3 there from the hook of the first gradient on (``process_gradients``), when the head's backward has let
    the logits go; until then from before the loss's backward.
    """
    grid, width = census.grid, census.width("gradient")
    inputs = {"n": num_buckets(grid), "w": width, "E": bucket_elements(grid)}
    bucket = reduce_bucket_bytes(bucket_elements(grid), width, num_buckets(grid)) * is_contiguous(grid)
    title, formula = "contiguous gradient buckets", "n · w · E"
    lives = (grid.zero == 3) & era(grid).flat_partitions
    yield Term("buffers", title, bucket * lives, ALWAYS, formula, f"{STAGE3}: ipg_bucket_flat_buffer", inputs)
    first = () if era(grid).late_bucket else ("loss",)
    during, lower = (*first, *BACKWARD, "backward-end"), bucket * ~lives
    yield Term("buffers", f"{title} of one backward", lower, during, formula, f"{STAGES}: ipg_buffer", inputs)


def reduction_terms(census: ModelOnGrid) -> Iterator[Term]:
    """What a reduction allocates: a flat copy of its bucket, and room for this rank's share of the result."""
    grid, width = census.grid, census.width("gradient")
    bucket = width * np.minimum(census.parameters, bucket_elements(grid))
    inputs = {"w": width, "P": census.parameters, "E": bucket_elements(grid), "N": grid.ranks}
    flat, formula = bucket * ~is_contiguous(grid), "w · min(P, E)"
    yield Term("buffers", "flattened bucket", flat, ("backward-end",), formula, f"{STAGES}: allreduce_bucket", inputs)
    scattered, title = bucket * (grid.zero == 3), "reduce-scatter input of a bucket"
    yield Term("buffers", title, scattered, BACKWARD, formula, COALESCED, inputs, pool="reduce-scatter")
    yield fetched_norm_term(census)
    again = width * share(census, 2) * (grid.zero == 2) * (grid.accumulation > 1) * (1 - grid.offloaded("optimizer"))
    title, formula = "this micro-batch's share of the gradients", "w · ⌈P / N⌉"
    during = (*BACKWARD, "backward-end")
    yield Term("buffers", title, again, during, formula, f"{STAGES}: grads_in_partition", inputs)
    yield whole_share_term(census)
    if era(grid).flat_gradients:
        flat_copy = width * census.parameters * (grid.zero == 1)
        yield Term("buffers", "flat copy of all gradients", flat_copy, ("backward-end",), "w · P", STAGE1, inputs)


def fetched_norm_term(census: ModelOnGrid) -> Term:
    """A reduced share on its way to the host and its fp64 copy for the norm, on the stream of the reductions."""
    grid = census.grid
    both = grid.offloaded("params") * grid.offloaded("optimizer") * (grid.zero == 3)
    bytes_ = (census.width("gradient") + 8) * share_of_largest(census) * both
    title, formula = "share of a gradient on its way to the host", "(w + 8) · ⌈P_max / N⌉"
    inputs = {"w": census.width("gradient"), "P_max": census.largest_tensor, "N": grid.ranks}
    return Term("buffers", title, bytes_, BACKWARD, formula, OFFLOADED, inputs, pool="reduce-scatter")


def share_of_largest(census: ModelOnGrid) -> Array:
    """Elements of the largest tensor that fall to one rank."""
    return -(-census.largest_tensor // census.grid.ranks)


def whole_share_term(census: ModelOnGrid) -> Term:
    """The rank's share of the gradients is allocated whole with the first of them, in the first micro-batch."""
    grid, width = census.grid, census.width("gradient")
    apart = grid.zero_from(2) & is_contiguous(grid) & ~((grid.zero == 3) & era(grid).flat_partitions)
    head = census.sharded(census.head, np.int64(0), grid.zero_from(2))
    rest = width * np.maximum(share(census, 2) - head, 0) * apart * (1 - grid.offloaded("optimizer"))
    title, formula = "share of the gradients, still empty", "w · ⌈(P - P_head) / N⌉"
    inputs = {"w": width, "P": census.parameters, "P_head": census.head, "N": grid.ranks}
    source = f"{STAGES}: grads_in_partition"
    return Term("gradients", title, rest * (grid.accumulation == 1), ("backward-last",), formula, source, inputs)


def adds_in_fp32(grid: Grid) -> Array:
    """1 by precision where 16-bit gradients are added up in fp32."""
    requested = grid.fixed.grad_accum_dtype == "fp32" and era(grid).fp32_accumulation
    if requested or not era(grid).wide_without_zero:
        return grid.is_mixed * requested
    return partitions_without_zero(grid).astype(np.int64)


def accumulation_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Gradients added up in fp32: at stage 1 whole, by an optimizer of its own, else in the share of the rank.

    Without ZeRO that optimizer has them whole too, in 16 bits where it runs pipelines since 0.17.6.
    """
    grid, wide = census.grid, adds_in_fp32(census.grid)
    inputs = {"P": census.parameters, "N": grid.ranks}
    gradients, title = 4 * census.parameters * (grid.zero <= 1) * wide, "gradients in fp32"
    yield Term("gradients", title, gradients, ALWAYS, "4 · P", f"{BF16}: fp32_groups_gradients_flat", inputs)
    flat = 2 * census.parameters * partitions_without_zero(grid) * (1 - wide)
    yield Term("gradients", "flat gradients", flat, ALWAYS, "2 · P", f"{BF16}: grad_acc_dtype", inputs)
    more = 2 * share(census, 2) * grid.zero_from(2) * wide * (1 - grid.offloaded("optimizer"))
    title = "shares of the gradients in fp32, beyond 16 bits"
    yield Term("gradients", title, more, ALWAYS, "2 · ⌈P / N⌉", f"{STAGE3}: grad_partitions_flat_buffer", inputs)


def step_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The gradients that the step reads, and its flat and its fp32 copy of them.

    Stage 3 makes the copies for one part of its shard (``sub_group_size``) after another; stage 0 makes an fp32 copy of
    each gradient, and for FusedAdam then flattens them (24 bytes a parameter, else 20); the optimizer that adds up in
    fp32 needs neither.
    """
    grid, width, here = census.grid, census.width("gradient"), 1 - census.grid.offloaded("optimizer")
    wide = adds_in_fp32(grid)
    inputs = {"w": width, "P": census.parameters, "N": grid.ranks, "G": sub_group(grid)}
    unshared = (wide == 1) | partitions_without_zero(grid)
    read = width * np.where(unshared, share(census, 2), share(census, 1)) * here
    title, source = "gradients that the step reads", f"{STAGES}: averaged_gradients"
    yield Term("gradients", title, read, ("step",), "w · ⌈P / N⌉", source, inputs)
    part = copied_elements(census) * here
    joined = is_fused_adam(grid) & ~partitions_without_zero(grid)
    flat = np.where(grid.zero == 0, 4 * joined, np.where(wide == 1, 4, width)) * part
    flat = flat * (grid.is_mixed | (grid.zero > 0))
    formula = "w · min(⌈P / N⌉, G)"
    yield Term("buffers", "flattened gradients", flat, ("step",), formula, STEPS, inputs)
    copy = 4 * part * grid.is_mixed * (1 - wide)
    formula = "4 · min(⌈P / N⌉, G)"
    yield Term("buffers", FP32_GRADIENTS, copy, ("step",), formula, STEPS, inputs)
    yield norm_term(census, flat + copy)
    yield overflow_term(census, flat + copy)


def is_fused_adam(grid: Grid) -> bool:
    """Whether DeepSpeed wraps its optimizer in ``FP16_Optimizer``; any other is in ``FP16_UnfusedOptimizer``."""
    return grid.fixed.optimizer == "adamw" and grid.fixed.optimizer_impl == "fused"


def is_flat(grid: Grid) -> Array:
    """Where a state is one tensor for each group of parameters, at stage 3 for each sub-group, not one a weight.

    Source: 0.19.8 stage_1_and_2.py, ``single_partition_of_fp32_groups``; stage3.py, ``fp32_partitioned_groups_flat``;
    fused_optimizer.py and bf16_optimizer.py, ``fp32_groups_flat``. Stage 1 of 0.3 has parts that its messages divide.
    """
    without = partitions_without_zero(grid) | ((grid.is_mixed == 1) & is_fused_adam(grid))
    return np.where(grid.zero == 0, without, ~((grid.zero == 1) & era(grid).flat_gradients))


def steps_at_start(grid: Grid) -> Array:
    """Where the engine makes the moments as it starts, in a step with gradients of zeros.

    Source: ``initialize_optimizer_states`` of each optimizer; 18179807 (0.13.2) took the step out of those of ZeRO and
    of ``BF16_Optimizer``, and left it in the wrappers of fp16.
    """
    wrapped = (grid.is_mixed == 1) & ~partitions_without_zero(grid)
    late = era(grid).late_moments
    return np.where(grid.zero == 0, (grid.is_mixed == 1) & (wrapped | (not late)), not late)


def sub_group(grid: Grid) -> int:
    """Elements of its shard that stage 3 updates at a time."""
    stated = grid.fixed.sub_group_size
    return era(grid).sub_group if stated is None else stated


def largest_part(census: ModelOnGrid, local: Array) -> Array:
    """Elements of a rank's ``local`` ones that stage 3 updates at a time: its largest sub-group."""
    limit = sub_group(census.grid)
    divided = (census.grid.zero == 3) & (local > limit)
    if not np.any(divided):
        return local
    return np.where(divided, np.clip(largest_group(census, limit), limit, local), local)


def copied_elements(census: ModelOnGrid) -> Array:
    """Gradients of which the step makes copies at one time."""
    grid, local = census.grid, share(census, 1)
    part = largest_part(census, local)
    return np.where((adds_in_fp32(grid) == 1) & (grid.zero <= 1), 0, part)


def norm_term(census: ModelOnGrid, copies: Array) -> Term:
    """The gradients' norm, which reads one after another in fp64 before the copies are made."""
    grid, local = census.grid, share(census, 1)
    there = grid.zero_from(1) * (1 - grid.offloaded("optimizer"))
    beyond = np.maximum(8 * np.minimum(census.largest_tensor, local) * there - copies, 0)
    inputs = {"P_max": census.largest_tensor, "P": census.parameters, "N": grid.ranks}
    formula, source = "8 · min(P_max, ⌈P / N⌉) - copies", f"{STAGES}: get_grad_norm_direct"
    return Term("buffers", "fp64 copy for the norm, beyond the copies", beyond, ("step",), formula, source, inputs)


def overflow_term(census: ModelOnGrid, copies: Array) -> Term:
    """The search for an overflow in fp16: absolute values and a truth value of each gradient, before the copies."""
    grid, local = census.grid, share(census, 3)
    searched = era(grid).overflow_at_once * grid.is_fp16_mixed * (grid.zero == 3) * (1 - grid.offloaded("optimizer"))
    norm = np.maximum(8 * np.minimum(census.largest_tensor, local), copies)
    width = np.where(adds_in_fp32(grid) == 1, 4, census.width("gradient"))
    beyond = np.maximum((width + 1) * local - norm, 0) * searched
    inputs = {"w": width, "P": census.parameters, "N": grid.ranks}
    formula, source = (
        "(w + 1) · ⌈P / N⌉ - copies",
        f"{STAGE3}: has_overflow, torch.isinf of grad_partitions_flat_buffer",
    )
    title = "search for an overflow in the gradients, beyond the copies"
    return Term("buffers", title, beyond, ("step",), formula, source, inputs)


def staging_term(census: ModelOnGrid) -> Term:
    """Room for one gradient on its way to the host, below stage 3."""
    grid = census.grid
    away = grid.offloaded("optimizer") * ((grid.zero == 1) | (grid.zero == 2))
    bytes_ = census.width("gradient") * census.largest_tensor * away
    inputs, source = {"P_max": census.largest_tensor}, f"{STAGES}: temp_grad_buffer_for_gpu_offload"
    return Term("buffers", "gradient on its way to the host", bytes_, ALWAYS, "w · P_max", source, inputs)


def segment_terms(census: ModelOnGrid, with_head: ModelOnGrid) -> Iterator[Term]:
    """Contiguous buffers of the reduction and the step, too large for what blocks and gradients leave free.

    Each stands in a segment of its own, which stays reserved: the bucket or the flat copy of the shard's gradients, and
    their fp32 copy or the flat output of the weights' all-gather. They are free while logits are there, which are large
    enough to lie in them: only what logits leave is beyond them.
    """
    grid, width = census.grid, census.grid.width("compute")
    part = share(census, 1)
    bucket = width * np.minimum(census.parameters, bucket_elements(grid))
    parts = np.maximum(census.parameters // era(grid).gather_bucket, 1)
    gathered = width * -(-census.parameters // parts)
    first = np.maximum(bucket, width * part)
    second = np.maximum(4 * part, gathered)
    below = ((grid.zero == 1) | (grid.zero == 2)) * (1 - grid.offloaded("optimizer"))
    inputs = {"w": width, "P": census.parameters, "N": grid.ranks, "E": bucket_elements(grid), "n": parts}
    formula = "max(w · min(P, E), w · ⌈P / N⌉) + max(4 · ⌈P / N⌉, w · P / n)"
    bytes_, title = (first + second) * below, "segments of the step's contiguous buffers"
    apart = tuple(phase for phase in COMPUTING if phase not in AROUND)
    yield Term("buffers", title, bytes_, apart, formula, FLAT_OUTPUT, inputs, hole=True)
    for phase, sums in (("forward", "forward_peaks"), ("loss", "backward_peaks")):
        beyond = np.maximum(bytes_ - over_vocabularies(with_head, sums), 0)
        title = f"segments of the step's contiguous buffers beside the logits of {phase}"
        yield Term("buffers", title, beyond, (phase,), f"{formula} - logits", FLAT_OUTPUT, inputs, hole=True)


COORDINATOR = "DeepSpeed v0.12.3 runtime/zero/partitioned_param_coordinator.py"
AROUND = ("forward", "loss")


def era(grid: Grid) -> Zero:
    """The habits of the framework's ZeRO."""
    return grid.habits.zero_optimizer or Zero()


def gather_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Whole weights: those used again soon, the module at work and the prefetch, and the small ones all the time."""
    grid, width = census.grid, census.grid.width("compute")
    # one rank has all of it: a gather is then a view (NoGatherHandle), unless weights come from the host
    copied = (grid.ranks > 1) | (grid.offloaded("params") == 1)
    on = width * ((grid.zero == 3) & copied)
    small = persistent(census)
    ahead = np.where(grid.offloaded("params") == 1, 0, prefetched(grid))
    beyond = ahead * (1 - fills_up(grid))  # else the window is what was prefetched
    inputs = {"w": width, "P_small": small, "P": census.parameters, "P_head": census.head}
    inputs |= {"P_block": census.largest_block, "W": window(census), "A": beyond}
    title, source = "parameters that stay whole", f"{COORDINATOR}: ds_persist"
    yield Term("buffers", title, on * small, ALWAYS, "w · P_small", source, inputs)
    most = np.maximum(census.parameters - small, 0)
    around = np.minimum(census.head + window(census) + beyond, most)
    title, formula = "gathered head and the blocks used again soon", "w · min(P - P_small, P_head + W + A)"
    yield Term("buffers", title, on * around, AROUND, formula, f"{COORDINATOR}: __params_to_release", inputs)
    block = np.minimum(census.largest_block + ahead, most)
    title, formula = "gathered block and the prefetch", "w · min(P - P_small, P_block + A)"
    phases = ("forward-last", "backward-first")
    yield Term("buffers", title, on * block, phases, formula, COORDINATOR, {**inputs, "A": ahead})
    last = np.minimum(np.maximum(window(census), census.largest_block) + beyond, most)
    title, formula = "gathered last blocks and the prefetch", "w · min(P - P_small, max(W, P_block) + A)"
    yield Term("buffers", title, on * last, BACKWARD[:1], formula, COORDINATOR, inputs)


def prefetched(grid: Grid) -> int:
    """Elements gathered ahead: a bucket, where so many may be live."""
    zero = era(grid)
    bucket = zero.prefetch_bucket if grid.fixed.zero_prefetch_bucket is None else grid.fixed.zero_prefetch_bucket
    return min(bucket, live_parameters(grid))


def live_parameters(grid: Grid) -> int:
    """Elements that may be gathered before the prefetch stops."""
    stated = grid.fixed.max_live_parameters
    return era(grid).max_live if stated is None else stated


def window(census: ModelOnGrid) -> Array:
    """Elements of the last blocks that are gathered between forward and backward.

    A block is kept where what is used between its forward and its backward, head and later blocks each twice, is less
    than ``stage3_max_reuse_distance``. From 0.6 on the prefetch asks for one bucket more at each module, faster than
    modules let go, until ``stage3_max_live_parameters`` are there, the head among them: the blocks that backward begins
    with, which are not released (``__params_to_release``) whatever the distance. With weights off the GPU the engine
    was seen to have so many beside the head. A shard that is swapped out stops it (``_is_currently_on_nvme``), as does
    a bucket of 0.
    """
    grid = census.grid
    reused = np.maximum(era(grid).max_reuse // 2 - census.head, 0)
    filled = np.maximum(live_parameters(grid) - census.head * (1 - grid.offloaded("params")), 0)
    return np.minimum(np.maximum(filled * fills_up(grid), reused), census.blocks + census.experts_or_none)


def fills_up(grid: Grid) -> Array:
    """Where the prefetch gathers up to the live parameters."""
    swapped = grid.offloaded("params") * (grid.fixed.offload_to == "nvme")
    return (1 - swapped) * (era(grid).flat_partitions and prefetched(grid) > 0)


def persistent(census: ModelOnGrid) -> Array:
    """Elements of norms and biases, which are below ``stage3_param_persistence_threshold`` where the hidden size is.

    Of a recorded model those of all tensors of the blocks that are.
    """
    grid, model = census.grid, census.model
    zero = era(grid)
    stated = grid.fixed.persistence_threshold
    least = zero.persistence if stated is None else stated
    if model.recording is not None:
        small = [sum(n for n in block.tensors if n < least) for block in model.recorded_blocks]
        return sum((n * size for n, size in zip(census.layers, small, strict=True)), np.int64(0))
    if model.hidden >= least:
        return np.int64(0)
    counts = [n * c.replicated for n, (_, c) in zip(census.layers, model_count(model).groups, strict=True)]
    return sum(counts, np.int64(0))
