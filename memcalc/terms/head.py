"""Terms of a model's end: final norm, head and loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.activations import fused_linear_loss_bytes
from memcalc.grid import column
from memcalc.ledger import Term
from memcalc.terms.activations import full, groups_of, largest
from memcalc.terms.lengths import one_length
from memcalc.terms.settings import COMPILED_LOSS, block_settings, gathering
from memcalc.trace.template import recorded, trace_head

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.frameworks.losses import Loss
    from memcalc.grid import Grid
    from memcalc.terms.census import Census
    from memcalc.trace.layers import Setting
    from memcalc.trace.template import Template


BEST_FIT = "PyTorch c10/cuda/CUDACachingAllocator.cpp, get_free_block"


OBSERVED = "observed in all runs of presets/runs with this loss and room for it (fms, fmsliger); the cause is not known"


def head_templates(
    census: Census, rows: int | None = None, settings: tuple[Setting, ...] | None = None
) -> list[Template]:
    """The execution of final norm, head and loss, by precision; ``rows`` are the head's, by default the most."""
    grid, model = census.grid, census.model
    divided = grid.habits.vocab_parallel or grid.fixed.loss == "parallel"
    rows = int(census.vocab.max()) if rows is None else rows
    vocab = rows if model.head and grid.fixed.loss != "fused-linear" else model.tail.classes
    again, compiled = not grid.fixed.longest_first, grid.fixed.compile in COMPILED_LOSS
    if model.recording is not None:
        return [recorded(model.recording.head, setting) for setting in settings or head_settings(grid)]
    one_length(loss_of(grid), grid)
    return [
        trace_head(
            model.hidden,
            model.final_norm,
            vocab,
            setting,
            loss_of(grid).of(grid.lengths[0], trainable=setting.trainable, compiled=compiled, again=again),
            "tp" if divided else "none",
            model.tail,
            softcap=model.head_softcap,
            scaled=model.head_scaled,
        )
        for setting in settings or head_settings(grid)
    ]


def head_settings(grid: Grid) -> tuple[Setting, ...]:
    """How the head runs: frozen where the base is, also where blocks' frozen weights are given gradients."""
    return tuple(replace(s, trainable=grid.fixed.lora is None) for s in block_settings(grid))


def loss_of(grid: Grid) -> Loss:
    """How the framework computes the loss."""
    return grid.habits.losses.get(grid.fixed.loss, grid.habits.losses["standard"])


def over_vocabularies(census: Census, sums: str) -> Array:
    """The largest of the templates' sums on the last stage [bytes]; layouts may differ in the head's padded rows."""
    total: Array = np.int64(0)
    gathers = gathering(census.grid)
    for rows in sorted(set(census.vocab.flat)):
        bytes_ = of_templates(census, head_templates(census, int(rows)), sums)
        if gathers is not None:
            other = of_templates(census, head_templates(census, int(rows), gathers), sums)
            bytes_ = np.where(census.grid.sequence_shard > 1, other, bytes_)
        total = np.where(census.vocab == rows, bytes_, total)
    return total * census.grid.is_last


def of_templates(census: Census, templates: list[Template], name: str) -> Array:
    """A sum of each precision's template, or the largest of its sums [bytes]."""
    outer = groups_of(census)[-1]
    found = []
    for template, width in zip(templates, outer.gradient_width, strict=True):
        value = getattr(template, name)
        found.append(full(outer.evaluate(value, width) if isinstance(value, dict) else outer.largest(value, width)))
    return np.concatenate(np.broadcast_arrays(*found), axis=2)


def head_terms(census: Census) -> Iterator[Term]:
    """The final norm, the logits and the generations of them that the loss holds."""
    grid = census.grid
    source = f"{grid.habits.name}'s {grid.fixed.loss} loss: {loss_source(grid)}"
    inputs = {"T": groups_of(census)[-1].tokens, "V": census.vocab, "h": census.model.hidden}
    for phase, name in (("forward", "forward_peaks"), ("loss", "backward_peaks")):
        bytes_ = over_vocabularies(census, name)
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
        title, formula = "dead tensors of the last block's forward", "largest sum alive in forward - A_kept"
        left = largest([a.forward for a in groups_of(census)]) * grid.is_last
        yield Term("activations", title, left, ("forward", "loss"), formula, BEST_FIT, inputs, hole=True)
    if grid.fixed.loss == "fused-linear" and census.model.vocab:
        width = column([setting.compute for setting in block_settings(grid)], "precision")
        chunk = fused_linear_loss_bytes(grid.tokens, census.model.vocab, census.model.hidden, width) * grid.is_last
        liger = "Liger-Kernel ops/fused_linear_cross_entropy.py v0.5.0"
        formula = "(w + 4) · V · c + w · T · h"
        yield Term("activations", "loss in chunks of rows", chunk, ("forward", "loss"), formula, liger, inputs)


def loss_source(grid: Grid) -> str:
    """Where the loss was read."""
    return grid.habits.losses[grid.fixed.loss].source if grid.fixed.loss in grid.habits.losses else "Liger-Kernel"


def head_kept(census: Census) -> Array:
    """Bytes that final norm, head and loss keep for backward, over the grid."""
    return over_vocabularies(census, "kept_sum")
