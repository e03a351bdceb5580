"""Pipeline schedules: what a stage holds of several micro-batches, and what the schedule's own variables keep alive.

Source: Megatron-LM 23e00ed ``core/pipeline_parallel/schedules.py`` (core 0.14; core 0.20 d98e8a64 is alike).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.pipeline import in_flight_1f1b, in_flight_gpipe, in_flight_interleaved
from memcalc.ledger import COMPUTING, Term

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.census import Census

SCHEDULES = "Megatron-LM 23e00ed core/pipeline_parallel/schedules.py"


def chunks_in_flight(grid: Grid) -> Array:
    """Model chunks whose activations a stage holds at once under the interleaved schedule."""
    group = grid.fixed.microbatch_group
    stages, m, chunks = grid.degree("pp"), grid.accumulation, grid.fixed.vpp
    return in_flight_interleaved(grid.stage, stages, m, chunks, group or stages)


def in_flight(grid: Grid) -> Array:
    """Micro-batches whose activations a stage holds at once, in units of the stage's own blocks."""
    stages, m = grid.degree("pp"), grid.accumulation
    if grid.fixed.pp_schedule == "gpipe":
        return np.where(stages > 1, in_flight_gpipe(m), 1)
    if grid.is_interleaved:
        return np.where(stages > 1, -(-chunks_in_flight(grid) // grid.fixed.vpp), 1)
    return in_flight_1f1b(grid.stage, stages, m)


def visits(grid: Grid) -> list[Array]:
    """Micro-batches in flight of each model chunk when the first backward begins: groups pass chunk by chunk."""
    group = grid.fixed.microbatch_group or grid.degree("pp")
    rounds, rest = np.divmod(chunks_in_flight(grid), group * grid.fixed.vpp)
    return [rounds * group + np.clip(rest - chunk * group, 0, group) for chunk in range(grid.fixed.vpp)]


def blocks_in_flight(activations: GroupActivations) -> Array:
    """Blocks of a group that keep their activations, each counted for every micro-batch in flight."""
    grid = activations.grid
    if not grid.is_interleaved:
        return in_flight(grid) * activations.layers
    census = activations.census
    place = next(i for i, group in enumerate(census.model.groups) if group is activations.group)
    parts = zip(visits(grid), census.chunks[place], strict=True)
    held = sum((count * blocks for count, blocks in parts), np.int64(0))
    return np.where(grid.degree("pp") > 1, held, activations.layers)


def boundary(census: Census) -> Array:
    """Bytes of the hidden states that one stage sends to the next."""
    grid = census.grid
    width = np.where(grid.width("compute") == 4, 4, 2)
    return width * grid.tokens * census.model.hidden // grid.sequence_shard


def schedule_terms(census: Census) -> Iterator[Term]:
    """Tensors of the stage's boundary that the schedule's variables keep alive."""
    grid, habits = census.grid, census.grid.habits
    if not habits.schedule_variables or not np.any(grid.degree("pp") > 1):
        return
    sent, many = boundary(census), grid.degree("pp") > 1
    inputs = {"T": grid.tokens, "h": census.model.hidden, "t": grid.sequence_shard}
    if grid.is_interleaved:
        title, formula = "received input and gradient of the next chunks", "2 · w · T · h / t"
        yield Term("buffers", title, 2 * sent * many, COMPUTING, formula, SCHEDULES, inputs)
        return
    before = sent * (many & (grid.stage > 0) & (grid.accumulation > 1))
    title, formula = "gradient sent back by the micro-batch before", "w · T · h / t"
    yield Term("buffers", title, before, COMPUTING, formula, SCHEDULES, inputs)
    waits = many & (grid.is_last == 0) & (grid.accumulation > in_flight(grid))
    title = "gradient received for the micro-batch before"
    yield Term("buffers", title, sent * waits, ("forward-last",), formula, SCHEDULES, inputs)
    if habits.keeps_stage_outputs:
        yield kept_outputs(census, sent * many)


def kept_outputs(census: Census, sent: Array) -> Term:
    """Outputs of a stage that wait for their backward, where they are not freed once they have been sent."""
    flight, source = in_flight(census.grid), "Megatron-LM b4bc51b megatron/schedules.py"
    phases = ("forward-last", "forward", "loss", "backward-last")
    return Term("activations", "outputs of the stage", sent * flight, phases, "w · T · h · n", source, {"n": flight})
