"""Terms of the buffers: what is gathered for compute, what waits to be reduced, autocast's copies, workspaces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.grid import column
from memcalc.ledger import Term
from memcalc.terms.activations import add_all, groups_of
from memcalc.terms.adapters import trained
from memcalc.terms.every_k_blocks import block_copies, copies_in_part
from memcalc.terms.fsdp1 import flat_unit_terms
from memcalc.terms.fsdp2 import fsdp2_terms
from memcalc.terms.pipeline import engine_terms, schedule_terms
from memcalc.terms.replicas import replica_terms
from memcalc.terms.workspaces import workspace_terms
from memcalc.terms.zero import zero_terms

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Workspaces


def buffer_terms(census: ModelOnGrid, workspaces: Workspaces) -> Iterator[Term]:
    """All terms of the buffers."""
    gather = census.grid.habits.gather
    if gather == "blocks":
        if census.grid.habits.flat_units:
            yield from flat_unit_terms(census)
        else:
            yield from (*fsdp2_terms(census), *replica_terms(census))
    if census.grid.habits.zero_optimizer is not None:
        yield from zero_terms(census)
    if census.grid.habits.pipeline_engine != "none":
        yield from engine_terms(census)
    if census.grid.width("cached").any():
        yield from autocast_terms(census)
    if census.grid.fixed.adapters is not None:
        yield from adapter_copies_terms(census)
    yield from workspace_terms(census, workspaces)
    yield from schedule_terms(census)


def adapter_copies_terms(census: ModelOnGrid) -> Iterator[Term]:
    """16-bit copies of fp32 adapters: kept while autocast is on, until the loss; backward needs some for longer.

    FSDP's views are no leaves, and only leaves are kept (``cached_cast``); fused functions drop copies of their own.
    """
    grid, trained_model, groups = census.grid, trained(census), groups_of(census)
    on = column([grid.fixed.autocast or name.endswith("-autocast") for name in grid.precisions], "precision")
    made = on * (trained_model.width("parameter") == 4) * (grid.fixed.lora_kernels != "fused")
    leaves = 1 - (grid.zero_from(2) & grid.habits.full_shard)
    source, phases = "PyTorch aten/src/ATen/autocast_mode.cpp, cached_cast", ("forward-last", "forward")
    title, inputs = "autocast's copies of the adapters", {"P_trained": trained_model.parameters}
    yield Term("buffers", title, 2 * trained_model.parameters * made * leaves, phases, "2 · P_trained", source, inputs)
    per_block = [d + e for d, e in zip(trained_model.block_dense, trained_model.block_experts, strict=True)]
    saved = add_all([a.field("whole") * size for a, size in zip(groups, per_block, strict=True)])
    title, formula = ("autocast's copies of the adapters, for backward", "2 · P_trained of blocks without a checkpoint")
    inputs = {"P_trained": saved}
    yield Term("buffers", title, 2 * saved * made, ("loss", "backward-last"), formula, source, inputs)


def autocast_terms(census: ModelOnGrid) -> Iterator[Term]:
    """16-bit copies of fp32 matrices: those that backward needs, and in forward, until autocast ends, the cache of all.

    A checkpointed block's graph keeps none. FSDP's views are no leaves, and only copies of leaves are cached; FSDP 2's
    are where tensor parallelism has made them DTensors. Rows of an embedding are looked up, not multiplied, and grouped
    products of experts are on no list of autocast's.
    """
    grid, groups, source = census.grid, groups_of(census), "PyTorch aten/src/ATen/autocast_mode.cpp, cached_cast"
    copies = [block_copies(activations) for activations in groups]
    saved = add_all(
        [
            a.field("whole") * size + a.field("treated") * copies_in_part(a)
            for a, size in zip(groups, copies, strict=True)
        ]
    )
    cached = add_all([a.layers * size for a, size in zip(groups, copies, strict=True)])
    divided = (grid.degree("tp") > 1) & (grid.habits.gather == "blocks") & (not grid.habits.flat_units)
    leaves = 1 - (grid.zero_from(2) & grid.habits.full_shard & ~divided)
    in_events, phases = copies_in_events(census), ("forward-last", "forward")
    cache: Array = (cached - saved) * leaves
    title, formula = "autocast's cache of 16-bit weight copies", "2 · P_cast of checkpointed blocks"
    yield Term("buffers", title, cache, phases, formula, source, {"P_cast": cache // 2})
    title, formula = "autocast's 16-bit weight copies", "2 · P_cast of blocks that are not checkpointed"
    inputs, longer = {"P_cast": saved // 2}, (*phases, "loss", "backward-last")
    yield Term("buffers", title, saved, longer, formula, source, inputs, in_events=in_events)
    head, width = census.head * (grid.width("cached") > 0), grid.width("cached")
    title, phases, inputs = "autocast's 16-bit copy of the head", ("forward", "loss"), {"P_head": census.head}
    yield Term("buffers", title, width * head, phases, "2 · P_head", source, inputs, in_events=in_events)


def copies_in_events(census: ModelOnGrid) -> bool:
    """Whether executions of blocks and head have autocast's copies among their tensors: recorded, compiled ones not."""
    recorded = census.model.recording is not None or any(g.block.recorded is not None for g in census.model.groups)
    return not recorded and all(setting.autocast and not setting.compiled for setting in census.settings)
