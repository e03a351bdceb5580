"""The ledger of a grid."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from memcalc.grid import AXES, column
from memcalc.ledger import ALWAYS, KEPT, Ledger, Term
from memcalc.terms.activations import GroupActivations, add_all, full, groups_of, largest
from memcalc.terms.block_boundary import between_terms, entry_terms
from memcalc.terms.buffers import buffer_terms
from memcalc.terms.every_k_blocks import INVENTORY, every_terms, kept_terms
from memcalc.terms.gradients import (
    block_gradient_terms,
    buffered_terms,
    local_gradient_terms,
    tied_terms,
    whole_gradient_terms,
)
from memcalc.terms.head import head_terms, held_terms, prediction_terms, shared_terms
from memcalc.terms.order import from_end
from memcalc.terms.pipeline import SPLIT, in_flight, waiting_logits
from memcalc.terms.states import state_terms
from memcalc.trace.template import recorded
from memcalc.trace.working_sets import peaks, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memcalc.formulas import Array
    from memcalc.formulas.recompute import Policy
    from memcalc.specs.recorded import Segment
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.trace.layers import BlockConfig
    from memcalc.trace.template import TraceCache
    from memcalc.trace.working_sets import Sum

    Sums = Callable[[TraceCache, BlockConfig, Policy], tuple[Sum, ...]]
    from memcalc.terms.overhead import Workspaces


# Terms of a recorded model: what its parts show beyond those of equal blocks between an embedding and a head.


RUN = "a run of the module on fake tensors"


def recorded_terms(census: ModelOnGrid) -> Iterator[Term]:
    """Buffers; what local variables hold through forward; the backward of the layers before the blocks."""
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
    title, formula = "backward of the layers before the blocks", "largest sum alive, weight gradients apart"
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


# Terms of the blocks: what they keep for backward, the working sets of the largest moments, the batch's mask.


def activation_terms(census: ModelOnGrid, *, detail: bool) -> Iterator[Term]:
    """All terms of the activations; without ``detail`` the saved tensors of a group of blocks are one term."""
    groups, grid = groups_of(census), census.grid
    flight, here = in_flight(grid), 1 - grid.offloaded("activations")
    for activations in groups:
        if detail:
            yield from kept_terms(activations, here)
        else:
            yield Term(
                "activations",
                "kept by blocks",
                activations.kept_in_flight * here,
                KEPT,
                "sum",
                INVENTORY,
                in_events=True,
            )
    if np.any(here == 0):
        moving = largest([on_their_way(a) for a in groups]) * grid.offloaded("activations")
        title = "blocks on their way to and from the host"
        yield Term("activations", title, moving, KEPT, "2 · kept of one block", INVENTORY, in_events=True)
    yield from entry_terms(census, groups, flight)
    yield from working_sets(groups, here)
    split = grid.runs(*SPLIT)
    several = (flight > 1) | split
    if np.any(several):
        # Where weights have a pass of their own, the micro-batch whose backward ends keeps what that pass reads
        done = np.where(split, 0, 1)
        others = add_all([a.kept_in_flight - done * (a.kept // grid.degree("vpp")) for a in groups]) * here * several
        pipeline = "arXiv:2104.04473 section 2.2"
        title = "other micro-batches in flight"
        yield Term(
            "activations", title, others, ("backward-first", "backward-end"), "kept · (n - 1)", pipeline, in_events=True
        )
    yield from waiting_logits(census)
    yield from mask_terms(census, flight)


def on_their_way(activations: GroupActivations) -> Array:
    """What two neighbours keep: the one that runs at the end, which a policy may treat, and the one before it."""
    if activations.stack is not None:
        return activations.stack.kept(from_end(1)) + activations.stack.kept(from_end(2))
    before = np.where(activations.field("whole") > 0, activations.whole_block, activations.treated_block)
    return before + np.where(activations.is_treated == 1, activations.treated_block, before)


def mask_terms(census: ModelOnGrid, flight: Array) -> Iterator[Term]:
    """The mask that comes with a batch: a local of the forward step, unless a checkpoint has it among its inputs."""
    grid = census.grid
    if not (grid.fixed.attention_mask or grid.habits.makes_masks):
        return
    size, formula = grid.micro_batch * groups_of(census)[-1].units["square"], "b · s · ⌈s / cp⌉"
    checkpoints = column([policy.treatment == "full" for policy in grid.policies], "recompute")
    batch = "Megatron-LM d98e8a64 pretrain_gpt.py, get_batch"
    yield Term("activations", "attention mask", size * (1 - checkpoints), ("forward-last", "forward"), formula, batch)
    saved = "Megatron-LM b4bc51b megatron/mpu/random.py, CheckpointFunction: save_for_backward(*args)"
    yield Term("activations", "attention masks kept", size * flight * checkpoints, KEPT, f"{formula} · n", saved)


def working_sets(groups: list[GroupActivations], here: Array) -> Iterator[Term]:
    """The largest moment inside one block's forward and backward, beyond what is estimated as kept and is ``here``."""
    if groups[0].census.model.recording is not None:
        forward, last, first = widest(groups)
    else:
        forward, last, first = (largest(of) for of in zip(*(a.in_order(here) for a in groups), strict=True))
    title, formula = (
        "working set of the last block's forward",
        "peak of the block's forward - its saved activations (traced)",
    )
    yield Term("activations", title, forward, ("forward-last",), formula, INVENTORY, in_events=True)
    title, formula = (
        "working set of the last block's backward",
        "peak of the block's backward - its saved activations (traced)",
    )
    yield Term("activations", title, last, ("backward-last",), formula, INVENTORY, in_events=True)
    title, formula = "first block and the working set of its backward", "peak of the block's backward (traced)"
    yield Term("activations", title, first, ("backward-first",), formula, INVENTORY, in_events=True)


def build_ledger(census: ModelOnGrid, workspaces: Workspaces, *, detail: bool = True) -> Ledger:
    """Every term of every strategy of a grid, on a rank of each pipeline stage.

    Without ``detail`` the tensors that blocks keep are one term: the same sum, for a search.
    """
    return Ledger([*activation_terms(census, detail=detail), *other_terms(census, workspaces)])


def other_terms(census: ModelOnGrid, workspaces: Workspaces) -> list[Term]:
    """The terms that do not depend on whether activations are offloaded."""
    return [
        *state_terms(census),
        *tied_terms(census),
        *buffered_terms(census),
        *local_gradient_terms(census),
        *every_terms(census),
        *between_terms(census),
        *recorded_terms(census),
        *head_terms(census),
        *prediction_terms(census),
        *held_terms(census),
        *shared_terms(census),
        *whole_gradient_terms(census),
        *block_gradient_terms(census),
        *buffer_terms(census, workspaces),
    ]


def chosen_offloads(terms: list[Term], chosen: slice) -> list[Term]:
    """Terms of some of the offload axis alone."""
    axis = AXES.index("offload")

    def of(array: Array) -> Array:
        return array[(slice(None),) * axis + (chosen,)]

    several = (np.ndim(term.bytes) > 0 and term.bytes.shape[axis] > 1 for term in terms)
    return [replace(term, bytes=of(term.bytes)) if many else term for term, many in zip(terms, several, strict=True)]
