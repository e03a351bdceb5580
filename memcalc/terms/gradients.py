"""Gradients beside the sharded ones: those of a local DDP, of a tied weight, and those that FSDP leaves unsharded.

Gradients of the local DDP that Megatron-LM had in 2021, without contiguous buffers.

After its all-reduce each parameter refers to its gradient a second time (``param.main_grad = param.grad``), and
``zero_grad`` drops the first reference alone: the gradients of the step before live until the next all-reduce. The fp32
gradients of the optimizer's own parameters are replaced, never dropped.

Source: Megatron-LM b4bc51b ``megatron/model/distributed.py`` (``allreduce_gradients``) and
``megatron/optimizer/optimizer.py`` (``zero_grad``, ``_copy_model_grads_to_main_grads``).

Gradients of a weight that is both embedding and head, on ranks that keep it whole.

Autograd hands a weight's gradient on when all its uses have given theirs: the head's waits for the embedding's through
the whole of backward. The engine adds the two out of place, since the head's is a transposed view, unless a cast or a
loss that has the head in it has made the head's anew.

Source: PyTorch 2.13 ``torch/csrc/autograd/input_buffer.cpp`` (accumulate) and ``functions/accumulate_grad.h``.

Gradients that FSDP leaves whole on each rank: those not synchronised yet, and those of mixed flat parameters.

Source: torch/distributed/fsdp/_runtime_utils.py of PyTorch 2.1 to 2.13 (``_post_backward_hook`` returns before the
reduction under ``no_sync``) and _flat_param.py (with ``use_orig_params`` a flat parameter needs a gradient where one of
its parameters does, and the views' backward makes it whole).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.optimizer_states import shard
from memcalc.grid import AXES, column
from memcalc.ledger import ALWAYS, KEPT, Term
from memcalc.terms.activations import add_all, groups_of, largest
from memcalc.terms.adapters import trained
from memcalc.terms.parameters import model_count
from memcalc.terms.pipeline import boundary, in_flight
from memcalc.terms.settings import in_tiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.terms.model_on_grid import ModelOnGrid


BEST_FIT = "c10/cuda/CUDACachingAllocator.cpp, get_free_block"
"""The fp32 gradients, each too large for the place of its fp16 one, are cut from the flattened tensor's segment.

So the next step's finds no place as long as they live: two such segments take turns, beside those of both steps'
gradients, and none of them is live at the peak.
"""
BEFORE_REDUCTION = ("forward-last", "forward", "loss", "backward-last", "backward-first")


def traded(census: ModelOnGrid, in_one_buffer: Array | bool) -> Array | None:
    """1 where gradients are made by the first backward of a stage alone; None where they nowhere are.

    Where every micro-batch is in flight before that, none comes in for the one that has gone.
    """
    grid = census.grid
    made = ~np.asarray(in_one_buffer, dtype=bool) & (not grid.persistent_gradients)
    alone = made & (grid.degree("pp") > 1) & (grid.accumulation > 1) & (grid.accumulation == in_flight(grid))
    return alone.astype(np.int64) if np.any(alone) else None


def beyond_traded(census: ModelOnGrid, made: Array) -> Array:
    """Bytes of gradients that are ``made`` there beyond what the stage has let go of by then; 0 where none are."""
    others = tuple(axis for axis in range(len(AXES)) if axis != AXES.index("zero"))
    chosen = np.flatnonzero(np.any(made, axis=others))
    if not chosen.size:
        return np.int64(0)
    sent = boundary(census) * census.grid.habits.keeps_stage_outputs
    gone = add_all([group.kept for group in groups_of(census)]) + sent
    rest = np.maximum(np.take(made, chosen, axis=AXES.index("zero")) - gone, 0)
    if len(chosen) == made.shape[AXES.index("zero")]:
        return rest
    result = np.zeros((*rest.shape[:4], made.shape[AXES.index("zero")], *rest.shape[5:]), dtype=np.int64)
    result[:, :, :, :, chosen] = rest
    return result


def local_gradient_terms(census: ModelOnGrid) -> Iterator[Term]:
    """What the local DDP and its optimizer keep besides the gradients themselves."""
    habits, width, count = census.grid.habits, census.width("gradient"), census.parameters
    inputs = {"w": width, "P": count}
    if habits.main_gradients:
        title, bytes_ = "gradients of the optimizer's parameters", habits.main_gradients * count
        yield Term("gradients", title, bytes_, ALWAYS, "4 · P", habits.source, {"P": count})
    if habits.flattened_gradients:
        title = "gradients of the step before"
        yield Term("gradients", title, width * count, BEFORE_REDUCTION, "w · P", habits.source, inputs)
        title = "gradients, flattened for their all-reduce"
        yield Term("gradients", title, width * count, ("backward-end",), "w · P", habits.source, inputs)
        title, formula = "holes of two flattened tensors that take turns", "2 · w · P"
        yield Term("gradients", title, 2 * width * count, BEFORE_REDUCTION, formula, BEST_FIT, inputs, hole=True)


SOURCE = "torch/csrc/autograd/input_buffer.cpp (accumulate), torch 2.13"


def tied_terms(census: ModelOnGrid) -> Iterator[Term]:
    """What waits, and the sum beside its two parts where it is made; the first part is counted as the head's."""
    grid = census.grid
    elsewhere = grid.persistent_gradients or grid.habits.zero_optimizer is not None
    if not census.model.tied or elsewhere or grid.fixed.adapters is not None or grid.fixed.optimizer_in_backward:
        return
    matrix = tied_matrix(census)
    here = whole(grid) * matrix * census.width("gradient") * bool(census.model.head)
    earlier = accumulating(grid)
    # The term of the head has it in the first micro-batch's backward-last
    waiting = (("backward-last", earlier), ("backward-first", np.int64(1)))
    inputs = {"w": census.width("gradient"), "P_head": matrix}
    title, formula = "gradient of the head, which waits for the embedding's", "w · P_head"
    for phase, where in waiting:
        yield Term("gradients", title, here * where, (phase,), formula, SOURCE, inputs)
    title, formula = "gradients of embedding and head, and their sum", "w · P_head · (2, or 3 beside an earlier one)"
    parts = 2 + earlier - added_in_place(census)
    yield Term("gradients", title, here * parts, ("backward-end",), formula, SOURCE, inputs)


BUFFERED = "Megatron-LM 23e00ed core/tensor_parallel/layers.py (VocabParallelEmbedding) and core/distributed"


def buffered_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Gradients that no product adds to Megatron-LM's buffer: each is a tensor until a hook has added it.

    The embedding's, and of a weight that is the head too its sum with the head's, which waits for it.
    """
    grid = census.grid
    if not grid.habits.persistent_gradients or grid.fixed.optimizer_in_backward:
        return
    width, lookup = grid.width("compute"), trained(census).embedding
    shared = tied_matrix(census) * whole(grid) * (lookup > 0) * bool(census.model.tied and census.model.head)
    inputs = {"w": width, "P_embedding": lookup, "P_shared": shared}
    title, formula = "gradient of the embedding, before it is added up", "w · (P_embedding + P_shared)"
    yield Term("gradients", title, width * (lookup + shared), ("backward-end",), formula, BUFFERED, inputs)
    if not grid.fixed.wgrad_fusion:
        title, phases = "gradient of the head, which waits for the embedding's", ("backward-first", "backward-end")
        yield Term("gradients", title, width * shared, phases, "w · P_shared", BUFFERED, inputs)


def tied_matrix(census: ModelOnGrid) -> Array:
    """Elements of the weight that is both embedding and head."""
    return shard(model_count(census.model).embedding + census.padding, census.grid.degree("tp"))


def added_in_place(census: ModelOnGrid) -> Array:
    """1 where the engine adds a tied weight's gradients into the head's: it is a tensor of its own, and no view.

    So it is where autocast's 16-bit copy of a wider weight casts it back, and where the loss has made it. DTensors,
    which FSDP 2's weights are under tensor parallelism, are added out of place.
    """
    grid = census.grid
    tensors = (grid.degree("tp") > 1) & (grid.habits.gather == "blocks") & (not grid.habits.flat_units)
    cast = column([setting.compute != setting.weight for setting in census.settings], "precision", bool)
    return np.asarray(~tensors & (cast | (grid.fixed.loss == "fused-linear"))).astype(np.int64)


def made_in_forward(census: ModelOnGrid) -> Array:
    """Elements of the head where the loss has the head in it, and makes the gradients of both in its forward.

    A loss in tiles makes them in its backward.
    """
    return learned_head(census) * (census.grid.fixed.loss == "fused-linear" and not in_tiles(census.grid))


def learned_head(census: ModelOnGrid) -> Array:
    """Elements of the head's matrix where it is trained."""
    fixed = census.grid.fixed
    learns = fixed.adapters is None or "head" in fixed.also_train
    return np.asarray((census.head - model_count(census.model).final_norm) * learns)


def whole(grid: Grid) -> Array:
    """1 where embedding and head are one weight of a rank, and not a part of one."""
    sharded = grid.zero_from(2) & (grid.habits.gather == "blocks")
    return np.asarray((~grid.ends_apart & ~sharded) * grid.is_first)


def accumulating(grid: Grid) -> Array:
    """1 where gradients of earlier micro-batches, or zeros, are there."""
    remain = ((grid.accumulation > 1) & (not grid.fixed.longest_first)) | grid.habits.zeroes_gradients
    return np.asarray(remain).astype(np.int64)


UNSHARDED = "torch/distributed/fsdp/_runtime_utils.py, _post_backward_hook; _flat_param.py, use_orig_params"


def accumulates_whole(census: ModelOnGrid) -> Array:
    """1 where gradients of earlier micro-batches are whole."""
    grid = census.grid
    stated = grid.fixed.whole_accumulation
    unsharded = grid.habits.whole_accumulation if stated is None else stated
    return np.asarray((grid.accumulation > 1) & grid.zero_from(2) & grid.habits.full_shard & unsharded).astype(np.int64)


def whole_gradient_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Unsharded gradients, beside which sharded ones do not exist yet."""
    grid, where = census.grid, accumulates_whole(census)
    if not np.any(where):
        return
    # FSDP 2 casts what it adds up to the dtype of the reduction (_fsdp_param.py, to_accumulated_grad_if_needed)
    width = grid.width("compute") if grid.habits.flat_units else grid.reduce_width
    blocks, root = flat_blocks(census), flat_root(census)
    inputs = {"w": width, "P_blocks": blocks, "P_root": root}
    bytes_ = width * (blocks + root) * where
    title, formula = "unsharded gradients of earlier micro-batches", "w · P of flat parameters that are trained"
    if not grid.fixed.longest_first:
        phases = (*KEPT, "backward-first", "backward-end")
        yield Term("gradients", title, bytes_, phases, formula, UNSHARDED, inputs, apart=True)
        return
    first = width * (blocks - census.largest_block) * where
    title = "unsharded gradients of the first micro-batch"
    formula = f"{formula} - w · P_block"
    yield Term("gradients", title, first, ("backward-first",), formula, UNSHARDED, inputs, apart=True)
    # A later micro-batch has hardly any activations, but all of these: two gathered blocks, and one's gradient twice
    later = bytes_ + 4 * width * census.largest_block * where
    title, formula = "whole gradients and the running block in a later, short micro-batch", "w · (P + 4 · P_block)"
    yield Term("gradients", title, later, ("backward-end",), formula, UNSHARDED, inputs, apart=True)


PIPELINE = "torch/distributed/pipelining/stage.py, torch 2.13: backward_maybe_with_nosync"


def pipelined_gradient_terms(census: ModelOnGrid, pipelined: Array) -> Iterator[Term]:
    """Gradients that FSDP 2 adds up whole where it is ``pipelined``, less what the first backward has let go of."""
    width, alone = census.grid.reduce_width, traded(census, in_one_buffer=False)
    gradients, inputs = width * census.parameters * pipelined, {"w_reduce": width, "P": census.parameters}
    early = gradients
    if alone is not None:
        early = gradients * (1 - alone) + beyond_traded(census, gradients * alone)
    title = "unsharded gradients of earlier micro-batches"
    for phases, bytes_ in ((KEPT, early), (("backward-first", "backward-end"), gradients)):
        yield Term("gradients", title, bytes_, phases, "w_reduce · P", PIPELINE, inputs)


def flat_blocks(census: ModelOnGrid) -> Array:
    """Parameters of the blocks' units whose gradients are whole [elements].

    Frozen ones stand beside adapters where a flat parameter has both; PEFT's wrapping policy keeps them apart.
    """
    updated = trained(census)
    inside = census.blocks + census.experts_or_none
    if not census.grid.habits.mixed_units:
        return updated.blocks + updated.experts_or_none
    return inside if updated is census else (inside + updated.blocks) * (updated.blocks > 0)


def flat_root(census: ModelOnGrid) -> Array:
    """Parameters of the root's flat parameter, where one of them is trained [elements]."""
    updated = trained(census)
    if not census.grid.habits.mixed_units:
        return updated.root
    return census.root if updated is census else (census.root + updated.root) * (updated.root > 0)


def block_gradient_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The gradients of a block's weights, the frozen ones among them, and the flat tensor that is made of all.

    They stand together when the block's backward is over, so that only what is more than its working set counts.
    """
    grid, updated = census.grid, trained(census)
    if updated is census or not grid.habits.mixed_units:
        return
    flat = 2 * grid.width("compute") * census.largest_block * grid.zero_from(2)
    groups = groups_of(census)
    inputs = {"w": grid.width("compute"), "P_block": census.largest_block}
    title, formula = (
        "gradient of a block's flat parameter and its parts",
        "2 · w · P_block - working set of its backward",
    )
    for phase, working in (("backward-last", [g.last for g in groups]), ("backward-first", [g.first for g in groups])):
        bytes_ = np.maximum(flat - largest(working), 0)
        yield Term("buffers", title, bytes_, (phase,), formula, UNSHARDED, inputs)
