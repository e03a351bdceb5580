"""Terms of a model's end: final norm, head and loss.

Blocks that predict further tokens (multi-token prediction), each with the head's loss of its own.

A model has them as its last group of blocks; they stand on the last stage, in its last chunk.

Source: Megatron-LM 23e00ed ``core/transformer/multi_token_prediction.py``, ``core/models/gpt/gpt_model.py``.

Terms of what stays alive after backward, because a training script still refers to the loss or to the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.activations import fused_linear_loss_bytes, tiled_cast_bytes, tiled_log_prob_bytes
from memcalc.grid import column
from memcalc.ledger import KEPT, Term
from memcalc.specs.model import BlockGroup, Pattern
from memcalc.terms.activations import add_all, full, groups_of, largest
from memcalc.terms.every_k_blocks import forward_of_last
from memcalc.terms.gradients import learned_head
from memcalc.terms.pipeline import adds_at_once, boundary
from memcalc.terms.settings import COMPILED_LOSS, in_tiles, one_length
from memcalc.trace.template import recorded, trace_head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.frameworks.losses import Linear, Loss
    from memcalc.grid import Grid
    from memcalc.specs.model import Model
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.trace.layers import BlockConfig
    from memcalc.trace.template import Template


BEST_FIT = "PyTorch c10/cuda/CUDACachingAllocator.cpp, get_free_block"


OBSERVED = "observed in all runs of presets/runs with this loss and room for it (fms, fmsliger); the cause is not known"


def head_templates(
    census: ModelOnGrid, rows: int | None = None, settings: tuple[BlockConfig, ...] | None = None, *,
    copies: bool = False,
) -> list[Template]:  # fmt: skip
    """The execution of final norm, head and loss, by precision; ``rows`` are the head's, by default the most.

    ``copies`` says whether autocast's 16-bit weight is among its tensors.
    """
    grid, model = census.grid, census.model
    divided = grid.habits.vocab_parallel or grid.fixed.loss == "parallel"
    rows = int(census.vocab.max()) if rows is None else rows
    vocab = rows if model.head and grid.fixed.loss != "fused-linear" else model.tail.classes
    again, compiled = not grid.fixed.longest_first, grid.fixed.compile in COMPILED_LOSS
    if model.recording is not None:
        return [
            census.traces.get(recorded, model.recording.head, setting) for setting in settings or head_settings(census)
        ]
    one_length(loss_of(grid), grid)
    return [
        census.traces.get(
            trace_head,
            model.hidden,
            model.final_norm,
            vocab,
            setting,
            loss_of(grid).of(grid.lengths[0], trainable=setting.trainable, compiled=compiled, again=again),
            "tp" if divided else "gathered",
            model.tail,
            softcap=model.head_softcap,
            scaled=model.head_scaled,
            **({"copies": True} if copies else {}),
        )
        for setting in settings or head_settings(census)
    ]


def head_settings(census: ModelOnGrid) -> tuple[BlockConfig, ...]:
    """How the head runs: frozen where the base is, also where blocks' frozen weights are given gradients."""
    trainable = census.grid.fixed.adapters is None
    return tuple(s._replace(trainable=trainable, weight=s.end_weight or s.weight) for s in census.settings)


def loss_of(grid: Grid) -> Loss:
    """How the framework computes the loss."""
    loss = grid.habits.losses.get(grid.fixed.loss, grid.habits.losses["standard"])
    return loss.uncast() if grid.fixed.uncast_loss else loss


def over_vocabularies(census: ModelOnGrid, sums: str) -> Array:
    """The largest of the templates' sums on the last stage [bytes]; layouts may differ in the head's padded rows."""
    total: Array = np.int64(0)
    gathers = census.gathering_settings
    for rows in sorted(set(census.vocab.flat)):
        bytes_ = of_templates(census, head_templates(census, int(rows)), sums)
        if gathers is not None:
            other = of_templates(census, head_templates(census, int(rows), gathers), sums)
            bytes_ = np.where(census.grid.sequence_shard > 1, other, bytes_)
        total = np.where(census.vocab == rows, bytes_, total)
    return total * census.grid.is_last


def of_templates(census: ModelOnGrid, templates: list[Template], name: str) -> Array:
    """A sum of each precision's template, or the largest of its sums [bytes]."""
    outer = groups_of(census)[-1]
    results = []
    for template, width in zip(templates, outer.gradient_width, strict=True):
        value = getattr(template, name)
        results.append(full(outer.evaluate(value, width) if isinstance(value, dict) else outer.largest(value, width)))
    return np.concatenate(np.broadcast_arrays(*results), axis=2)


def head_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The final norm, the logits and the generations of them that the loss holds."""
    grid = census.grid
    source = f"{grid.habits.name}'s {grid.fixed.loss} loss: {loss_source(grid)}"
    inputs = {"T": groups_of(census)[-1].tokens, "V": census.vocab, "h": census.model.hidden}
    for phase, name in (("forward", "forward_peaks"), ("loss", "backward_peaks")):
        bytes_ = over_vocabularies(census, name)
        adds = phase == "loss" and not census.model.tied and adds_at_once(grid)
        bytes_ = np.where(adds, over_vocabularies(census, "added_peaks"), bytes_) if np.any(adds) else bytes_
        title = "final norm, logits and loss" if phase == "forward" else "logits and their gradients"
        yield Term(
            "activations", title, bytes_, (phase,), "largest sum alive in the head", source, inputs, in_events=True
        )
    title, formula = "dead logits too small for what comes after them", "end of the tensors - largest sum alive"
    dead = over_vocabularies(census, "hole_sum")
    yield Term("activations", title, dead, ("forward", "loss"), formula, BEST_FIT, inputs, hole=True)
    title, formula, seen = "one more generation of logits", "4 · T · V", over_vocabularies(census, "observed_sum")
    yield Term("activations", title, seen, ("forward", "loss"), formula, OBSERVED, inputs, hole=True)
    if census.model.head and not grid.fixed.expandable_segments:
        # Segments do not merge: those of a block's tensors stay, and none has room for logits
        title = "dead tensors of the last block's forward"
        formula = "peak of the block's forward - its saved activations (traced)"
        left = largest([forward_of_last(a) for a in groups_of(census)]) * grid.is_last
        yield Term("activations", title, left, ("forward", "loss"), formula, BEST_FIT, inputs, hole=True)
    if grid.fixed.loss == "fused-linear" and census.model.vocab:
        yield from tiled_terms(census) if in_tiles(grid) else chunked_terms(census)


def chunked_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Liger's loss: a chunk of logits, beside the gradient of its input, which stays as that of the norm's output."""
    grid, model, linear = census.grid, census.model, linear_of(census.grid)
    settings, ends = census.settings, head_settings(census)
    width, residual = (column([getattr(s, name) for s in settings], "precision") for name in ("compute", "residual"))
    logit = column([linear.logit_bytes(setting.compute) for setting in settings], "precision")
    apart = (width + 4) * linear.sums_apart * (learned_head(census) > 0)
    cast = width * (column([end.weight for end in ends], "precision") > width)
    each = logit, np.maximum(apart, cast)
    chunk = fused_linear_loss_bytes(grid.tokens, model.vocab, model.hidden, residual, *each) * grid.is_last
    inputs = {"T": grid.tokens, "V": model.vocab, "h": model.hidden, "q": logit, "u": each[1], "w": residual}
    title, formula = "loss in chunks of rows", "V · (q · c + u · h) + w · T · h"
    yield Term("activations", title, chunk, ("forward",), formula, linear.source, inputs, in_events=True)


def linear_of(grid: Grid) -> Linear:
    """What Liger of the framework's time does."""
    return grid.habits.losses["standard"].linear


TILED = "TRL 1.16 kernels/chunked_logprob.py (ChunkedLogProbFunction), trainer/utils.py (add_fused_lm_head)"


def tiled_terms(census: ModelOnGrid) -> Iterator[Term]:
    """TRL's loss: a tile of logits in each pass, in backward beside fp32 gradients of head and hidden states.

    Backward of the final norm comes after it, when the tile is gone: of both the larger one counts.
    """
    grid, vocab, last = census.grid, census.model.vocab, census.grid.is_last
    width = column([setting.compute for setting in census.settings], "precision")
    hidden = census.model.embedding_dim or census.model.hidden
    weight = column([setting.weight for setting in head_settings(census)], "precision")
    copies = tiled_cast_bytes(grid.tokens, vocab, hidden, width) * (weight > width)
    inputs = {"n": grid.tokens, "V": vocab, "h": hidden, "w": width}
    tile = (tiled_log_prob_bytes(grid.tokens, vocab, 0, width, 0) + copies) * last
    title, formula = "loss in tiles", "32768 · w · min(n, 4096) + casts"
    yield Term("activations", title, tile, ("forward",), formula, TILED, inputs, in_events=True)
    trained = grid.fixed.adapters is None
    gradient = np.where(weight == 2, 6, 4) * trained
    height = (tiled_log_prob_bytes(grid.tokens, vocab, hidden, width, gradient) + copies) * last + head_kept(census)
    later = over_vocabularies(census, "backward_peaks")
    bytes_ = np.maximum(height - later, weight * vocab * hidden * trained * last)
    formula = "tile + h · (V · g + 8 · n) + kept by the final norm - its backward"
    yield Term("activations", title, bytes_, ("loss",), formula, TILED, inputs, in_events=True)


def loss_source(grid: Grid) -> str:
    """Where the loss was read."""
    return loss_of(grid).source if grid.fixed.loss in grid.habits.losses else "Liger-Kernel"


def head_kept(census: ModelOnGrid) -> Array:
    """Bytes that final norm, head and loss keep for backward, over the grid."""
    return over_vocabularies(census, "kept_sum")


def holds_logits(census: ModelOnGrid) -> Array:
    """1 where a stage of a pipeline of PyTorch refers to its micro-batch's logits until their backward is done."""
    grid = census.grid
    sharded = (grid.habits.gather == "blocks") & (not grid.habits.flat_units) & hands_over(census)
    return np.asarray((grid.degree("pp") > 1) & sharded).astype(np.int64)


def hands_over(census: ModelOnGrid) -> bool:
    """Whether the model gives logits to a loss outside of it."""
    known = census.grid.fixed.loss in census.grid.habits.losses
    return known and len(head_templates(census)[0].crossings) == len(("handed over", "came back"))


SOURCE = "Megatron-LM 23e00ed core/transformer/multi_token_prediction.py"


def with_predictors(model: Model, count: int) -> Model:
    """The model with ``count`` more blocks, equal to its last one."""
    if not count:
        return model
    last = model.groups[model.sequence[-1]]
    extra = BlockGroup(count=count, tower=last.tower, block=last.block)
    order = (*model.order, Pattern(runs=((len(model.groups), count),))) if model.order else ()
    return model.model_copy(update={"groups": (*model.groups, extra), "order": order})


def prediction_terms(census: ModelOnGrid) -> Iterator[Term]:
    """What the prediction of further tokens keeps beside its blocks: their two inputs, joined, and a loss each."""
    count = census.grid.fixed.mtp
    if not count:
        return
    joined = 4 * count * boundary(census) * census.grid.is_last
    title = "hidden states and embeddings, joined for prediction"
    yield Term("activations", title, joined, KEPT, "4 · w · T · h / t", SOURCE, {"n": count})
    losses = np.asarray(count * head_kept(census))
    title = "losses of the predicted tokens"
    yield Term("activations", title, losses, ("forward", "loss"), "n · kept by the head", SOURCE, {"n": count})


AFTER = ("backward-last", "backward-first", "backward-end", "step")
GRAPH = "bitsandbytes 0.42 autograd/_functions.py (MatMul4Bit: ctx.tensors); torch/csrc/autograd/python_function.cpp"


def held_terms(census: ModelOnGrid) -> Iterator[Term]:
    """The logits until they are bound anew, and what nodes of the graph hold as attributes until the loss is."""
    loss = loss_of(census.grid)
    if loss.held:
        logits = over_vocabularies(census, "held_sum")
        source = loss_source(census.grid)
        yield Term("activations", "logits that the script holds", logits, AFTER, "4 · V · T", source)
        before = logits * (not census.grid.fixed.longest_first)
        title = "logits of the micro-batch before"
        yield Term("activations", title, before, ("forward-last",), "4 · V · T", source)
    blocks = graph_bytes(census)
    if not np.any(blocks):
        return
    title, formula = "inputs of quantised products, held by the graph", "attributes of its nodes"
    yield Term("activations", title, blocks, ("backward-first", "backward-end", "step"), formula, GRAPH)
    if loss.held and not census.grid.fixed.longest_first:
        title = "inputs of quantised products, of the micro-batch before"
        yield Term("activations", title, blocks, ("forward-last", "forward"), formula, GRAPH)


TABLE = "Transformers 5.24 models/gemma4/modeling_gemma4.py (shared_kv_states); torch/utils/checkpoint.py of 2.13"


def shared_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Keys and values of the blocks that put them into a table of the model, from their backward until the loss goes.

    Where backward of the last block is at its largest they are not there yet; once it is done with those blocks, what
    these kept is gone.
    """
    sharing = [group for group in groups_of(census) if group.group.block.shares_keys]
    if not sharing:
        return
    stays = add_all([group.field("treated") * group.over("shared_sum") for group in sharing])
    gone = add_all([group.field("treated") * group.over("kept_sum") for group in sharing])
    title, formula = "keys and values in the model's table, and what their graph saved", "sum of the traced tensors"
    yield Term("activations", title, np.maximum(stays - gone, 0), ("backward-last",), formula, TABLE, in_events=True)
    stays = stays + add_all([group.field("whole") * group.over("shared_sum", untreated=True) for group in sharing])
    yield Term("activations", title, stays, AFTER[1:], formula, TABLE, in_events=True)


def graph_bytes(census: ModelOnGrid) -> Array:
    """Bytes of the blocks that the graph holds beyond backward."""
    return add_all([group.field("whole") * group.over("held_sum", untreated=True) for group in groups_of(census)])
