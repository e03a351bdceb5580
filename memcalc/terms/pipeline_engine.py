"""What DeepSpeed's pipeline engine holds beside the blocks: inputs and outputs of stages, and old logits.

Source: DeepSpeed v0.5.10 (the same at v0.12.3 and edaa722) ``runtime/pipe/engine.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import ALWAYS, BACKWARD, COMPUTING, Term
from memcalc.terms.pipeline import in_flight

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.terms.census import Census

ENGINE = "DeepSpeed v0.5.10 runtime/pipe/engine.py"
SLOTS = 2
"""Pipeline buffers of the last stage: ``TrainSchedule.num_pipe_buffers``."""


def engine_terms(census: Census) -> Iterator[Term]:
    """All terms of the engine."""
    yield from boundary_terms(census)
    yield from logits_terms(census)


def runs(grid: Grid) -> Array:
    """1 where the engine runs the model: its stages of ZeRO are 0 and 1."""
    piped = grid.degree("pp") > 1 if grid.habits.pipeline_engine == "pipelines" else grid.degree("pp") > 0
    return piped * (grid.zero <= 1)


def hidden_states(census: Census) -> Array:
    """Bytes of the hidden states of one micro-batch."""
    return census.grid.width("compute") * census.grid.tokens * census.model.hidden


def boundary_terms(census: Census) -> Iterator[Term]:
    """What arrives and what leaves: without TP both stay beside the blocks' tensors; with it the output in a part."""
    grid, u = census.grid, hidden_states(census) * runs(census.grid)
    tp, flight = grid.degree("tp"), in_flight(grid)
    inner, outer = 1 - grid.is_first, 1 - grid.is_last
    inputs = {"u": u, "n": flight, "t": tp}
    title, source = "received inputs, of which the blocks keep a copy", f"{ENGINE}: _exec_forward_pass"
    yield Term("buffers", title, u * flight * inner * (tp == 1), COMPUTING, "n · u", source, inputs)
    title, formula = "outputs of the stage", "n · u / t"
    yield Term("buffers", title, u * flight * outer // tp, COMPUTING, formula, source, inputs)
    title, source = "buffers to receive into", f"{ENGINE}: pipe_recv_buf, grad_layer"
    yield Term("buffers", title, u * (inner + outer) // tp, ALWAYS, "u / t each", source, inputs)
    restored, title = u * outer * (tp > 1), "output, gathered again"
    source = f"{ENGINE}: _exec_backward_pass"
    yield Term("buffers", title, restored, BACKWARD, "u", source, inputs)


def logits_terms(census: Census) -> Iterator[Term]:
    """fp32 logits of earlier micro-batches: the last stage's buffers keep them until they are written again."""
    grid = census.grid
    divided = grid.degree("tp") if grid.habits.vocab_parallel or grid.fixed.loss == "parallel" else np.int64(1)
    one = 4 * grid.tokens * census.vocab // divided * grid.is_last * runs(grid) * census.model.head
    earlier = grid.accumulation - 1
    inputs = {"T": grid.tokens, "V": census.vocab, "t": divided, "m": grid.accumulation}
    formula, source = "4 · T · V / t · slots", f"{ENGINE}: pipe_buffers['outputs']"
    title, before = "logits of earlier micro-batches", ("forward-last", "forward")
    yield Term("buffers", title, one * np.minimum(earlier, SLOTS), before, formula, source, inputs)
    title = "logits of the micro-batch before"
    yield Term("buffers", title, one * np.minimum(earlier, SLOTS - 1), ("loss",), formula, source, inputs)
    title, after = "logits of this micro-batch and of earlier ones", (*BACKWARD, "backward-end", "step")
    yield Term("buffers", title, one * np.minimum(earlier + 1, SLOTS), after, formula, source, inputs)
