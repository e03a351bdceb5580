"""Terms of a recorded model: what its parts show beyond those of equal blocks between an embedding and a head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import ALWAYS, Term
from memcalc.terms.activations import add_all, full, groups_of, largest
from memcalc.trace.template import recorded
from memcalc.trace.working_sets import peaks, total

if TYPE_CHECKING:
    from memcalc.formulas.recompute import Policy
    from memcalc.formulas.types import Array
    from memcalc.specs.recorded import Segment
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.trace.layers import BlockConfig
    from memcalc.trace.template import TraceCache
    from memcalc.trace.working_sets import Sum

    Sums = Callable[[TraceCache, BlockConfig, Policy], tuple[Sum, ...]]

RUN = "a run of the module on fake tensors"


def recorded_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Buffers; what local variables hold through forward; the backward of what stands before the blocks."""
    recording = census.model.recording
    if recording is None:
        return
    title, formula = "buffers and frozen weights of the module", "bytes in the run"
    yield Term("parameters", title, full(np.int64(recording.buffers)), ALWAYS, formula, RUN)
    groups = groups_of(census)
    parts = [(groups[0], recording.entry, np.int64(1))]
    parts += [(a, a.group.block.recorded, a.layers) for a in groups if a.group.block.recorded is not None]
    live = add_all([count * over(a, partial(passing, part)) for a, part, count in parts])
    title, formula = "tensors that local variables hold through forward", "alive until forward ends, not kept"
    yield Term("activations", title, live, ("forward-last",), formula, RUN)
    entry = over(groups[0], partial(ending, recording.entry))
    title, formula = "backward of what stands before the blocks", "largest sum alive, weight gradients apart"
    yield Term("activations", title, entry, ("backward-end",), formula, RUN)


def over(activations: GroupActivations, sums: Sums) -> Array:
    """The largest of some sums over the grid's precisions and policies [bytes]."""
    rows = [
        [
            activations.largest(sums(activations.census.traces, setting, policy), np.int64(0))
            for policy in activations.grid.policies
        ]
        for setting in activations.settings
    ]
    return activations.stacked(rows)


def passing(segment: Segment, traces: TraceCache, setting: BlockConfig, policy: Policy) -> tuple[Sum, ...]:
    """What local variables hold of a part while later ones run."""
    template = traces.get(recorded, segment, setting, policy.treatment)
    return (total(template.records[index] for index in template.passing),)


def ending(segment: Segment, traces: TraceCache, setting: BlockConfig, policy: Policy) -> tuple[Sum, ...]:
    """Working sets of a part's backward without the gradients of its weights, which are terms of their own."""
    template = traces.get(recorded, segment, setting, policy.treatment)
    plain = {i for i, record in enumerate(template.records) if record.kind != "gradient"}
    events = tuple(event for event in template.backward if (event if event >= 0 else ~event) in plain)
    return peaks(template.records, events, template.kept | {template.incoming})


def after(groups: Sequence[GroupActivations]) -> list[Array]:
    """What the blocks after each group keep, less the gradients that these have left when its backward begins."""
    census = groups[0].census
    grid = census.grid
    sharded = grid.zero_from(2) & (grid.habits.full_shard or not grid.persistent_gradients)
    once = (grid.accumulation == 1) & (not grid.persistent_gradients)
    results: list[Array] = []
    later: Array = np.int64(0)
    for index in reversed(range(len(groups))):
        results.append(later)
        local = census.sharded(census.block_dense[index], census.block_experts[index], sharded)
        later = later + groups[index].kept - census.width("gradient") * local * once * groups[index].layers
    return results[::-1]


def widest(groups: Sequence[GroupActivations]) -> tuple[Array, Array, Array]:
    """Largest moments of forward and backward beyond what all blocks keep, and the first block's backward.

    Blocks that are not alike peak at different moments: while an early one runs, later ones keep nothing.
    """
    later = [add_all([a.kept for a in groups[index + 1 :]]) for index in range(len(groups))]
    forward = largest([a.forward - gone for a, gone in zip(groups, later, strict=True)])
    last = largest([a.last - gone for a, gone in zip(groups, after(groups), strict=True)])
    return forward, last, groups[0].first
