"""Terms of the blocks: what they keep for backward, the working sets of the largest moments, the batch's mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.grid import column
from memcalc.ledger import KEPT, Term
from memcalc.terms.activations import GroupActivations, add_all, groups_of, largest
from memcalc.terms.block_boundary import entry_terms
from memcalc.terms.pipeline import SPLIT, in_flight, waiting_logits
from memcalc.terms.recorded import widest
from memcalc.terms.saved_tensors import INVENTORY, kept_terms

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.model_on_grid import ModelOnGrid


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
        transit = 2 * largest([np.where(a.field("whole") > 0, a.whole_block, a.treated_block) for a in groups])
        moving = transit * grid.offloaded("activations")
        title = "blocks on their way to and from the host"
        yield Term("activations", title, moving, KEPT, "2 · kept of one block", INVENTORY, in_events=True)
    yield from entry_terms(census, groups, flight)
    yield from working_sets(groups)
    split = grid.runs(*SPLIT)
    if np.any((flight > 1) | split):
        # Where weights have a pass of their own, the micro-batch whose backward ends keeps what that pass reads
        done = np.where(split, 0, 1)
        others = add_all([a.kept_in_flight - done * (a.kept // grid.degree("vpp")) for a in groups]) * here
        pipeline = "arXiv:2104.04473 section 2.2"
        title = "other micro-batches in flight"
        yield Term(
            "activations", title, others, ("backward-first", "backward-end"), "kept · (n - 1)", pipeline, in_events=True
        )
    yield from waiting_logits(census)
    yield from mask_terms(census, flight)


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


def working_sets(groups: list[GroupActivations]) -> Iterator[Term]:
    """The largest moment inside one block's forward and backward, beyond what is counted as kept."""
    if groups[0].census.model.recording is not None:
        forward, last, first = widest(groups)
    else:
        forward, last, first = (largest(of) for of in zip(*(a.in_order for a in groups), strict=True))
    title, formula = "working set of the last block's forward", "largest sum alive in forward - A_kept"
    yield Term("activations", title, forward, ("forward-last",), formula, INVENTORY, in_events=True)
    title, formula = "working set of the last block's backward", "largest sum alive in backward - A_kept"
    yield Term("activations", title, last, ("backward-last",), formula, INVENTORY, in_events=True)
    title, formula = "first block and the working set of its backward", "largest sum alive in backward"
    yield Term("activations", title, first, ("backward-first",), formula, INVENTORY, in_events=True)
