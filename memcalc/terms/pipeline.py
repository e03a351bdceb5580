"""Pipeline schedules: what a stage holds of several micro-batches, and what the schedule's own variables keep alive.

Source: Megatron-LM 23e00ed ``core/pipeline_parallel/schedules.py`` (core 0.14; core 0.20 d98e8a64 is alike).

What DeepSpeed's pipeline engine holds beside the blocks: inputs and outputs of stages, and old logits.

Source: DeepSpeed v0.5.10 (the same at v0.12.3 and edaa722) ``runtime/pipe/engine.py``.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.bubbles import TURNED
from memcalc.formulas.pipeline import (
    in_flight_1f1b,
    in_flight_gpipe,
    in_flight_interleaved,
    in_flight_zb_2p,
    in_flight_zb_h1,
    in_flight_zb_h2,
    in_flight_zb_v_first,
    in_flight_zb_v_second,
)
from memcalc.ledger import ALWAYS, BACKWARD, COMPUTING, Term

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.terms.model_on_grid import ModelOnGrid


ZERO_BUBBLE = "torch 2.13 distributed/pipelining/_backward.py, stage_backward_input: param_group['grads']"
SCHEDULES = "Megatron-LM 23e00ed core/pipeline_parallel/schedules.py"


VIRTUAL = ("interleaved", "interleaved-zb", *TURNED)
"""Schedules whose stages hold several model chunks."""
SPLIT = ("interleaved-zb", "zb-h1", "zb-h2", "zb-1p", "zb-2p", *TURNED)
"""Schedules that compute the gradients of weights in a pass of their own."""


def group_of(grid: Grid) -> Array:
    """Micro-batches that pass one model chunk before the next chunk's turn.

    As told, else as many as stages; PyTorch shares all micro-batches out over equal rounds of at least as many.
    """
    stages, m = grid.degree("pp"), grid.accumulation
    if grid.fixed.microbatch_group:
        return np.full_like(stages, grid.fixed.microbatch_group)
    return m // np.maximum(m // stages, 1) if grid.habits.equal_rounds else stages


def chunks_in_flight(grid: Grid) -> Array:
    """Model chunks whose activations a stage holds at once under a schedule with virtual stages."""
    stages, m, chunks, group = grid.degree("pp"), grid.accumulation, grid.degree("vpp"), group_of(grid)
    live = in_flight_interleaved(grid.stage, stages, m, chunks, group)
    live = np.where(grid.runs("interleaved-zb"), in_flight_zb_h1(stages, m, chunks, group), live)
    if not np.any(grid.runs(*TURNED)):
        return live
    after_first, after_second = (first + second for first, second in _turned(grid))
    return np.where(grid.runs(*TURNED), np.maximum(after_first, after_second), live)


def _turned(grid: Grid) -> list[tuple[Array, Array]]:
    """Micro-batches of both chunks under ZB-V: after the first chunk's forward, and after the second's.

    DualPipeV runs the first chunk's before a backward of the second frees what that one's forward has kept.
    """
    stage, stages, m, both = grid.stage, grid.degree("pp"), grid.accumulation, grid.runs("dualpipe-v")
    return [
        (in_flight_zb_v_first(stage, stages, m, second * ~both), in_flight_zb_v_second(stage, m, second | both))
        for second in (0, 1)
    ]


def in_flight(grid: Grid) -> Array:
    """Micro-batches whose activations a stage holds at once, in units of the stage's own blocks."""
    stages, m = grid.degree("pp"), grid.accumulation
    live = in_flight_1f1b(grid.stage, stages, m)
    others = {
        ("gpipe",): in_flight_gpipe(m),
        ("zb-h1", "zb-1p"): in_flight_zb_h1(stages, m),
        ("zb-h2",): in_flight_zb_h2(stages, m),
        ("zb-2p",): in_flight_zb_2p(stages, m),
    }
    for names, value in others.items():
        if np.any(grid.runs(*names)):
            live = np.where(grid.runs(*names), value, live)
    if not np.any(grid.runs(*VIRTUAL)):
        return live
    return np.where(grid.runs(*VIRTUAL), -(-chunks_in_flight(grid) // grid.degree("vpp")), live)


def adds_at_once(grid: Grid) -> Array:
    """Where autograd adds each weight's gradient to that of an earlier micro-batch, and frees it, as it is made.

    With more micro-batches than are in flight the largest moment has all earlier gradients. Shards of them are made of
    a unit's whole ones (FSDP), and a buffer's are added by hooks. torch/csrc/autograd/functions/accumulate_grad.h.
    """
    fixed, habits = grid.fixed, grid.habits
    if grid.persistent_gradients or fixed.optimizer_in_backward or fixed.longest_first or habits.flattened_gradients:
        return np.zeros(1, dtype=bool)
    return np.asarray(~grid.zero_from(2).astype(bool) & (grid.accumulation > in_flight(grid)))


def visits(grid: Grid) -> list[list[Array]]:
    """Micro-batches in flight of each model chunk when a stage holds most of them; under ZB-V that is at two moments.

    Elsewhere it is when the first backward begins, or the first pass over weights: groups pass chunk by chunk.
    """
    group, count = group_of(grid), int(np.max(grid.degree("vpp")))
    rounds, rest = np.divmod(chunks_in_flight(grid), group * grid.degree("vpp"))
    turn = [rounds * group + np.clip(rest - chunk * group, 0, group) for chunk in range(count)]
    if not np.any(grid.runs(*TURNED)):
        return [turn]
    pairs = [(*pair, *turn[2:]) for pair in _turned(grid)]
    return [
        [np.where(grid.runs(*TURNED), first, other) for first, other in zip(pair, turn, strict=True)] for pair in pairs
    ]


def blocks_in_flight(census: ModelOnGrid, index: int) -> Array:
    """Blocks of a group that keep their activations, each counted for every micro-batch in flight."""
    grid = census.grid
    total = in_flight(grid) * census.layers[index]
    if not np.any(grid.runs(*VIRTUAL)):
        return total
    moments = [
        sum((count * blocks for count, blocks in zip(moment, census.chunks[index], strict=True)), np.int64(0))
        for moment in visits(grid)
    ]
    return np.where(grid.runs(*VIRTUAL), np.maximum.reduce(np.broadcast_arrays(*moments)), total)


def in_other_chunks(census: ModelOnGrid, each: Callable[[Array], Array]) -> Array:
    """What model chunks of a stage have beside the one that has most; ``each`` tells it of a number of blocks."""
    blocks = (sum(parts, np.int64(0)) for parts in zip(*census.chunks, strict=True))
    values = [np.asarray(each(number)) for number in blocks]
    return np.asarray(sum(values) - reduce(np.maximum, values))


def blocks_before_backward(census: ModelOnGrid) -> Array:
    """Blocks of the last micro-batch in flight that run before the backward of the first; 0 where all of them do.

    Interleaved stages hold a number of model chunks, which need not be whole micro-batches. Of Megatron-LM alone, whose
    weights are all there at any time.
    """
    grid = census.grid
    if not grid.habits.persistent_gradients or not np.any(grid.runs("interleaved")):
        return np.zeros((1,) * 7, dtype=np.int64)
    flight, chunks = in_flight(grid), grid.degree("vpp")
    left = chunks_in_flight(grid) - (flight - 1) * chunks
    each = (count * (left > chunk) for group in census.chunks for chunk, count in enumerate(group))
    return np.where(grid.runs("interleaved") & (flight > 1) & (left < chunks), sum(each, np.int64(0)), 0)


def waiting(grid: Grid) -> Array:
    """Micro-batches whose input gradients a stage has made, and whose weight gradients it has not, of one part.

    ZB-H1 puts the pass over weights off by i micro-batches on stage i, ZB-H2 by 2 i; of ZB-V's order only the end has
    passes that wait, when no other micro-batch comes in.
    """
    late = grid.stage * (grid.runs("zb-h1", "zb-1p", "interleaved-zb") + 2 * grid.runs("zb-h2", "zb-2p"))
    return np.minimum(late, grid.accumulation)


def received(grid: Grid) -> Array:
    """1 where a stage takes hidden states from another; stages of several chunks are counted once, as all others.

    Under ZB-V the first stage takes those of its second chunk.
    """
    return 1 - grid.is_first * ~grid.runs(*TURNED)


def sent_on(grid: Grid) -> Array:
    """1 where a stage passes hidden states on; under ZB-V the first stage does, from its first chunk."""
    return 1 - grid.is_last * ~grid.runs(*TURNED)


def waiting_logits(census: ModelOnGrid) -> Iterator[Term]:
    """Gradients of logits, which the head's weight gradient reads when its turn comes."""
    grid = census.grid
    late = waiting(grid) * grid.is_last
    if not np.any(late) or not census.model.head or grid.fixed.loss == "fused-linear":
        return
    divided = grid.degree("tp") if grid.habits.vocab_parallel or grid.fixed.loss == "parallel" else np.int64(1)
    bytes_ = late * (grid.width("compute") * grid.tokens * census.vocab // divided)
    inputs = {"n": late, "T": grid.tokens, "V": census.vocab, "t": divided}
    title = "gradients of logits that wait for the head's weight gradient"
    yield Term("activations", title, bytes_, COMPUTING, "n · w · T · V / t", ZERO_BUBBLE, inputs)


def boundary(census: ModelOnGrid) -> Array:
    """Bytes of the hidden states that one stage sends to the next."""
    grid = census.grid
    width = np.where(grid.width("compute") == 4, 4, 2)
    return width * grid.tokens * census.model.hidden // grid.sequence_shard


def schedule_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Tensors of the stage's boundary that the schedule's variables keep alive."""
    grid, habits = census.grid, census.grid.habits
    if not habits.schedule_variables or not np.any(grid.degree("pp") > 1):
        return
    sent, many, virtual = boundary(census), grid.degree("pp") > 1, grid.runs(*VIRTUAL)
    inputs = {"T": grid.tokens, "h": census.model.hidden, "t": grid.sequence_shard}
    title, formula = "received input and gradient of the next chunks", "2 · w · T · h / t"
    yield Term("buffers", title, 2 * sent * (many & virtual), COMPUTING, formula, SCHEDULES, inputs)
    many = many & ~virtual
    before = sent * (many & (grid.stage > 0) & (grid.accumulation > 1))
    title, formula = "gradient sent back by the micro-batch before", "w · T · h / t"
    yield Term("buffers", title, before, COMPUTING, formula, SCHEDULES, inputs)
    waits = many & (grid.is_last == 0) & (grid.accumulation > in_flight(grid))
    title = "gradient received for the micro-batch before"
    yield Term("buffers", title, sent * waits, ("forward-last",), formula, SCHEDULES, inputs)
    if habits.keeps_stage_outputs:
        yield kept_outputs(census, sent * many)


def kept_outputs(census: ModelOnGrid, sent: Array) -> Term:
    """Outputs of a stage that wait for their backward, where they are not freed once they have been sent."""
    flight, source = in_flight(census.grid), "Megatron-LM b4bc51b megatron/schedules.py"
    phases = ("forward-last", "forward", "loss", "backward-last")
    return Term("activations", "outputs of the stage", sent * flight, phases, "w · T · h · n", source, {"n": flight})


ENGINE = "DeepSpeed v0.5.10 runtime/pipe/engine.py"
SLOTS = 2
"""Pipeline buffers of the last stage: ``TrainSchedule.num_pipe_buffers``."""


def engine_terms(census: ModelOnGrid) -> Iterator[Term]:
    """All terms of the engine."""
    yield from boundary_terms(census)
    yield from logits_terms(census)


def runs(grid: Grid) -> Array:
    """1 where the engine runs the model: its stages of ZeRO are 0 and 1."""
    piped = grid.degree("pp") > 1 if grid.habits.pipeline_engine == "pipelines" else grid.degree("pp") > 0
    return piped * (grid.zero <= 1)


def hidden_states(census: ModelOnGrid) -> Array:
    """Bytes of the hidden states of one micro-batch."""
    return census.grid.width("compute") * census.grid.tokens * census.model.hidden


def boundary_terms(census: ModelOnGrid) -> Iterator[Term]:
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


def logits_terms(census: ModelOnGrid) -> Iterator[Term]:
    """fp32 logits of earlier micro-batches: the last stage's buffers keep them until they are written again."""
    grid = census.grid
    divided = grid.degree("tp") if grid.habits.vocab_parallel or grid.fixed.loss == "parallel" else np.int64(1)
    logits = 4 * grid.tokens * census.vocab // divided * grid.is_last * runs(grid) * census.model.head
    earlier = grid.accumulation - 1
    inputs = {"T": grid.tokens, "V": census.vocab, "t": divided, "m": grid.accumulation}
    formula, source = "4 · T · V / t · slots", f"{ENGINE}: pipe_buffers['outputs']"
    title, before = "logits of earlier micro-batches", ("forward-last", "forward")
    yield Term("buffers", title, logits * np.minimum(earlier, SLOTS), before, formula, source, inputs)
    title = "logits of the micro-batch before"
    yield Term("buffers", title, logits * np.minimum(earlier, SLOTS - 1), ("loss",), formula, source, inputs)
    title, after = "logits of this micro-batch and of earlier ones", (*BACKWARD, "backward-end", "step")
    yield Term("buffers", title, logits * np.minimum(earlier + 1, SLOTS), after, formula, source, inputs)
