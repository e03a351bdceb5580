"""Terms of FSDP 2: units that are gathered for compute and gradients on their way to be reduced, in three pools.

A unit is gathered into a flat buffer of the copy-in stream and copied out into tensors of the compute stream;
gradients are copied into a flat buffer of the compute stream and reduced into one of the reduce-scatter stream. A freed
block of memory stays with its stream, so that the peaks of the three streams' pools add up in what is reserved.

Source: ``torch/distributed/fsdp/_fully_shard/`` of PyTorch 2.13: ``_fsdp_collectives.py`` (foreach_all_gather,
foreach_reduce) and ``_fsdp_param_group.py`` (wait_for_unshard, _backward_prefetch, post_backward).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.gradients import reduce_scatter_input_bytes
from memcalc.formulas.optimizer_states import shard
from memcalc.grid import column
from memcalc.ledger import COMPUTING, Term
from memcalc.terms.activations import groups_of, largest
from memcalc.terms.adapters import AdaptersOnGrid, Base, trained
from memcalc.terms.every_k_blocks import allocated_by_last, freed_before, kept_by_first
from memcalc.terms.gradients import pipelined_gradient_terms
from memcalc.terms.head import hands_over, holds_logits, loss_of, over_vocabularies
from memcalc.terms.pipeline import in_other_chunks, received, sent_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.terms.model_on_grid import ModelOnGrid


# Terms of a root that FSDP 2 shards again after its forward, when the loss is computed outside of the model.
#
# Its weights go where the model hands the logits over and are gathered anew where their gradient comes back.
#
# Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py of PyTorch 2.13 (``_lazy_init``: a root that is told to
# reshard does, since 2.8; ``_post_forward``, ``_pre_backward``) and torchtitan b5bcd76 distributed/fsdp.py (norm and
# head are resharded under ``always`` alone).


SOURCE = "torch/distributed/fsdp/_fully_shard/_fsdp_state.py, torch 2.13: _lazy_init, _post_forward, _pre_backward"


def reshards_root(census: ModelOnGrid) -> Array:
    """1 where the unit of the head is sharded while the loss runs.

    A pipeline keeps units whole, SimpleFSDP gathers each weight where it is used, and a loss may take the head's.
    """
    grid = census.grid
    wanted = grid.habits.reshards_root and grid.fixed.reshard == "always" and grid.fixed.fsdp_schedule == "default"
    if not wanted or grid.fixed.loss not in grid.habits.losses or loss_of(grid).held:
        return np.int64(0)
    return ((grid.degree("pp") == 1) & hands_over(census)).astype(np.int64)


def root_terms(census: ModelOnGrid, title: str, root: Array, before: Array, block: Array) -> Iterator[Term]:
    """The ``root`` and the flat buffers around it, as what the head's two working sets come to with them.

    ``before`` are the bytes of the unit gathered last in forward, and ``block`` those of a block.
    """
    inputs = {"P_root": census.root}
    formula, flat = "max(A_head + w · P, A_loss) - max(A_head, A_loss)", "flat buffer of the unit gathered last"
    for phase, sums in (("forward", forward_sums(census, root, before)), ("loss", backward_sums(census, root, block))):
        largest, with_root, with_buffers = sums
        yield Term("buffers", title, with_root - largest, (phase,), formula, SOURCE, inputs)
        bytes_ = with_buffers - with_root
        yield Term("buffers", flat, bytes_, (phase,), "w · P_unit", SOURCE, inputs, pool="all-gather")


def forward_sums(census: ModelOnGrid, root: Array, before: Array) -> tuple[Array, Array, Array]:
    """Forward of head and loss: the largest of both, the same with the root, and with the buffer that is left."""
    model, loss = (over_vocabularies(census, f"forward_peaks_in_{part}") for part in ("model", "loss"))
    return np.maximum(model, loss), *(np.maximum(model + more, loss) for more in (root, root + before))


def backward_sums(census: ModelOnGrid, root: Array, block: Array) -> tuple[Array, Array, Array]:
    """Backward of loss and head: the same; the root's own buffer is there while it is copied out, then a block's."""
    model, loss = (over_vocabularies(census, f"backward_peaks_in_{part}") for part in ("model", "loss"))
    crossing = over_vocabularies(census, "crossing_sum")
    with_root = np.maximum(np.maximum(model, crossing) + root, loss)
    with_buffers = np.maximum(np.maximum(model + block, crossing + root) + root, loss)
    return np.maximum(model, loss), with_root, with_buffers


FSDP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py, torch 2.13"
PIPELINE = "torch/distributed/pipelining/stage.py, torch 2.13"
OUTPUT = "torch/distributed/pipelining/stage.py, torch 2.13: backward_one_chunk, stage_output"
ROTATER = "torch/distributed/tensor/experimental/_context_parallel/_attention.py, torch 2.13: _AllGatherRotater"
UNTIL_LAST = ("forward-last", "forward", "loss", "backward-last")


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a rank, as bytes where they are gathered, over the grid."""

    census: ModelOnGrid

    @cached_property
    def sharded(self) -> Array:
        """1 where FSDP shards at all."""
        return self.census.grid.zero_from(2).astype(np.int64)

    @cached_property
    def resharded(self) -> Array:
        """1 where blocks are sharded again after their forward."""
        return (self.census.grid.zero == 3).astype(np.int64)

    @cached_property
    def split(self) -> bool:
        """Whether the embedding is a unit of its own; a tied one belongs to the head."""
        return self.census.grid.habits.split_root and not self.census.model.tied

    @cached_property
    def keeps_last(self) -> bool:
        """Whether the last block stays whole from forward to backward although others do not."""
        grid = self.census.grid
        return grid.habits.keeps_last_block and grid.fixed.reshard == "default"

    @cached_property
    def reshards_root(self) -> Array:
        """1 where the root's weights are gone while the loss runs."""
        return reshards_root(self.census)

    @cached_property
    def pool(self) -> str:
        """The pool of what is gathered; SimpleFSDP runs its copies in the compute stream (torchtitan d9bdfbb20)."""
        return "compute" if self.census.grid.fixed.fsdp_schedule == "simple" else "all-gather"

    @cached_property
    def width(self) -> Array:
        """Bytes of a gathered weight outside the blocks."""
        return self.census.grid.width("compute") * self.sharded

    @cached_property
    def block_width(self) -> Array:
        """Bytes of a gathered weight of a block: float8 where it is gathered so (torchao float8/fsdp_utils.py)."""
        grid = self.census.grid
        narrow = column([grid.fixed.float8_all_gather and p == "fp8-mixed" for p in grid.precisions], "precision")
        return np.where(narrow == 1, 1, grid.width("compute")) * self.sharded

    @cached_property
    def is_frozen(self) -> bool:
        """Whether these are the units of a frozen base, which may be quantised."""
        return self.census.grid.fixed.adapters is not None and not isinstance(self.census, AdaptersOnGrid)

    @cached_property
    def block(self) -> Array:
        """One gathered block."""
        if self.is_frozen:
            return Base(self.census).largest_block * self.sharded
        return self.block_width * self.census.largest_block

    @cached_property
    def blocks(self) -> Array:
        """All gathered blocks of a stage."""
        if self.is_frozen:
            return Base(self.census).all_blocks * self.sharded
        return self.block_width * (self.census.blocks + self.census.experts_or_none)

    @cached_property
    def embedding(self) -> Array:
        """The gathered embedding where it is a unit of its own."""
        return self.width * self.census.embedding * self.split

    @cached_property
    def root(self) -> Array:
        """The gathered unit of the head: with final norm and, unless it is apart, the embedding."""
        return self.width * self.census.root - self.embedding

    @cached_property
    def outer(self) -> Array:
        """The unit whose backward ends a step: the embedding's."""
        return self.embedding if self.split else self.root

    @cached_property
    def undivided(self) -> Array:
        """The embedding's gradient as DTensor makes it under tensor parallelism: that of all ranks' rows.

        Source: torch/distributed/tensor/_ops/_embedding_ops.py of PyTorch 2.13 (embedding_dense_backward_strategy): no
        strategy divides the rows of the result, which are cut from it after.
        """
        ranks = self.census.grid.degree("tp")
        return self.width * self.census.embedding * ranks * (ranks > 1)

    @cached_property
    def pipelined(self) -> Array:
        """1 where units stay whole, and their gradients too, from micro-batch to micro-batch of a pipeline."""
        grid = self.census.grid
        accumulates = grid.habits.pipeline_accumulates_whole & (grid.degree("pp") > 1) & (grid.accumulation > 1)
        return accumulates * self.sharded

    def scatter_input(self, gathered: Array, width: Array) -> Array:
        """The flat buffer of a unit's gradients before they are reduced."""
        grid = self.census.grid
        elements = gathered // np.maximum(width, 1)
        return reduce_scatter_input_bytes(elements, grid.reduce_width, grid.ranks) * self.sharded


def fsdp2_terms(census: ModelOnGrid) -> Iterator[Term]:
    """All terms of FSDP 2's buffers."""
    units = Units(census)
    updated = Units(trained(census))
    for term in (*gathered_terms(units), *gather_terms(units), *reduction_terms(updated)):
        yield replace(term, in_events=True)
    if census.grid.fixed.cp_kind == "allgather" and np.any(census.grid.degree("cp") > 1):
        yield context_term(census)
    if np.any(census.grid.degree("pp") > 1):
        yield from pipeline_terms(units)


def gathered_terms(units: Units) -> Iterator[Term]:
    """Weights that are whole, in the compute stream."""
    stays, pipelined = units.sharded - units.resharded, units.pipelined
    inputs = {"w": units.width, "P_block": units.census.largest_block, "P_root": units.census.root}
    title, formula = "gathered norm and head", "w · P_head"
    phases: tuple[str, ...] = ("forward", "loss")
    if not units.split:
        title, formula, phases = "gathered embedding, norm and head", "w · P_root", COMPUTING[:-1]
    gone = units.reshards_root
    if np.any(gone):
        phases = tuple(phase for phase in phases if phase not in ("forward", "loss"))
        before = units.root if units.split else units.block
        for term in root_terms(units.census, title, units.root, before, units.block):
            yield replace(term, bytes=term.bytes * gone)
        yield Term("buffers", title, units.root * (1 - gone), ("forward", "loss"), formula, FSDP, inputs)
    yield Term("buffers", title, units.root, phases, formula, FSDP, inputs)
    if units.split:
        gathered = units.root * pipelined
        yield Term(
            "buffers", title, gathered, ("backward-last", "backward-first", "backward-end"), formula, FSDP, inputs
        )
        gathered = units.embedding * stays
        yield Term("buffers", "gathered embedding", gathered, COMPUTING[:-1], "w · P_embedding", FSDP, inputs)
    yield Term("buffers", "gathered blocks", units.blocks * stays, UNTIL_LAST, "w · P_blocks", FSDP, inputs)
    # A block goes after its backward whether or not it stayed after its forward: the first two are left at the end
    first = np.where(pipelined == 1, units.blocks, 2 * units.block * stays)
    yield Term("buffers", "gathered first blocks", first, ("backward-first",), "2 · w · P_block", FSDP, inputs)
    yield Term("buffers", "gathered blocks", units.blocks * pipelined, ("backward-end",), "w · P_blocks", FSDP, inputs)
    alive = ("forward-last", "backward-last", *(("forward", "loss") if units.keeps_last else ()))
    running = units.block * units.resharded
    for phases, bytes_ in ((alive, running), (("backward-first",), running * (1 - pipelined))):
        yield Term("buffers", "gathered block", bytes_, phases, "w · P_block", FSDP, inputs)


def gather_terms(units: Units) -> Iterator[Term]:
    """The flat buffers of the all-gathers: alive until the next unit's copy is out, in backward one unit ahead."""
    block, pool = units.block, units.pool
    inputs = {"w": units.block_width, "P_block": units.census.largest_block, "P_root": units.census.root}
    title = "flat buffer of a gathered block"
    # While a block is copied out there are two, the one before it being a local of wait_for_unshard still
    two = np.maximum(block - largest([allocated_by_last(a) for a in groups_of(units.census)]), 0)
    ahead, loss = block * units.resharded, 1 - np.maximum(units.reshards_root, units.keeps_last)
    for phases, bytes_ in (
        (("forward-last",), block + two), (("backward-last", "backward-first"), ahead), (("loss",), ahead * loss)
    ):  # fmt: skip
        yield Term("buffers", title, bytes_, phases, "w · P_block", FSDP, inputs, pool=pool)
    last = np.where(units.census.grid.is_last == 1, units.root, 0) if units.split else block
    title = "flat buffer of the unit gathered last"
    last = last * (1 - units.reshards_root)
    yield Term("buffers", title, last, ("forward",), "w · P_unit", FSDP, inputs, pool=pool)
    if pool == "compute":
        return
    title, formula = "room of the two largest gathers in a row", "w · (P_unit + P_block) + w · P_unit / N"
    beyond = np.maximum(largest_gather(units) - block, 0)
    yield Term("buffers", title, beyond, ("forward-last",), formula, FSDP, inputs, pool=pool, hole=True)


def largest_gather(units: Units) -> Array:
    """Bytes of the copy-in streams' pools: a unit, the one before it, and the 16-bit copy of its shard.

    Each model chunk of a stage is a root with a stream of its own.
    """
    grid, block = units.census.grid, units.block
    outer = np.maximum(units.embedding, units.root)
    narrowed = grid.width("parameter") != grid.width("compute")
    first, other = outer // grid.ranks * narrowed, block // grid.ranks * narrowed
    beside = in_other_chunks(units.census, lambda n: np.minimum(n, 2) * block + other * (n > 0))
    return np.maximum(outer + block + np.maximum(first, other), 2 * block + other) + beside


def reduction_terms(units: Units) -> Iterator[Term]:
    """Flat copies of gradients, alive from their unit's backward to the next unit's."""
    census, grid = units.census, units.census.grid
    width = grid.width("compute")
    block = units.scatter_input(units.block, units.block_width)
    inputs = {"w_reduce": grid.reduce_width, "P_block": census.largest_block, "P_root": census.root}
    title, formula = "reduce-scatter input of a block", "w_reduce · P_block"
    yield Term("buffers", title, block * (1 - units.pipelined), ("backward-first",), formula, FSDP, inputs)
    yield from second_backward_terms(units, block)
    outer = units.outer
    # A tied weight has a gradient from each of its uses, and their sum
    grads = outer * np.where(census.model.tied & ~grid.ends_apart, 3, 1) + units.undivided
    scattered = units.scatter_input(outer, width)
    end = np.maximum(outer + np.maximum(grads + block, scattered), scattered + held_until_reduced(units))
    # A pipeline shards weights of a unit, then reduces its gradients, once all is done
    late = np.maximum(block - units.block, units.scatter_input(units.root, width) - units.root)
    end = np.where(units.pipelined == 1, np.maximum(outer + grads, late), end)
    title = "end of the last unit's backward"
    formula = "max(w · P + max(G + w_reduce · P_block, w_reduce · P), w_reduce · P + w · P_head + shares)"
    yield Term("buffers", title, end, ("backward-end",), formula, FSDP, inputs)
    first = largest([kept_by_first(a) for a in groups_of(census)]) * units.sharded
    title = "kept by the first block, while the second one's backward runs"
    yield Term("activations", title, first, ("backward-first",), "A", FSDP)


def held_until_reduced(units: Units) -> Array:
    """The gradient of the head beside the shares of its unit, where embedding and head are weights of one unit.

    A name of ``foreach_reduce`` refers to the last weight's gradient until it returns.
    """
    census, grid = units.census, units.census.grid
    if units.split or census.model.tied:
        return np.int64(0)
    cast = np.where(grid.reduce_width != census.width("gradient"), census.width("gradient"), 0)
    shares = (grid.reduce_width + cast) * shard(census.root, grid.ranks)
    return np.asarray((units.width * census.head + shares) * units.sharded)


def second_backward_terms(units: Units, block: Array) -> Iterator[Term]:
    """The flat copy that is alive in the last block's backward (the head's), or in the backward before that if larger.

    There the last block's activations are gone, and its weights if they had stayed; its gradients are reduced.
    ``block`` is a block's flat copy.
    """
    census, grid = units.census, units.census.grid
    head = units.scatter_input(units.root, grid.width("compute")) * units.split
    reduced = block // grid.ranks * (grid.accumulation == 1)
    gone = largest([freed_before(a) for a in groups_of(census)])
    gone = gone + units.block * (units.sharded - units.resharded) * (1 - units.pipelined)
    later = block + reduced - gone > head
    flat, inputs = np.where(later, np.maximum(block - gone, 0), head), {"w_reduce": grid.reduce_width}
    title, formula = "reduce-scatter input of the unit before", "max(w_reduce · P_head, w_reduce · P_block - A)"
    flat = flat * (1 - units.pipelined)
    yield Term("buffers", title, flat, ("backward-last",), formula, FSDP, inputs)
    last = Term("gradients", "gradients of the last block", reduced * later, ("backward-last",), formula, FSDP, inputs)
    yield from in_reduce_pool(last, census)


def context_term(census: ModelOnGrid) -> Term:
    """Keys and values of all context-parallel ranks while one block's attention runs."""
    grid, attentions = census.grid, census.model.attentions
    elements = 2 * max((a.q_dim if grid.habits.repeats_keys else a.kv_dim for a in attentions), default=0)
    ranks = grid.degree("cp")
    bytes_ = grid.width("compute") * grid.tokens * elements // grid.degree("tp") * ranks * (ranks > 1)
    inputs = {"c": ranks, "T": grid.tokens, "k": elements // 2}
    phases, title = ("forward-last", "backward-last", "backward-first"), "keys and values of all context-parallel ranks"
    return Term("buffers", title, bytes_, phases, "c · w · T · 2 · k / t", ROTATER, inputs)


def pipeline_terms(units: Units) -> Iterator[Term]:
    """Under a pipeline: gradients that are added up whole, and the tensors that pass between stages."""
    census, grid = units.census, units.census.grid
    yield from pipelined_gradient_terms(census, units.pipelined)
    outer, many = groups_of(census)[-1], grid.accumulation * (grid.degree("pp") > 1)
    passed = grid.width("compute") * outer.tokens * census.model.hidden // grid.sequence_shard
    inputs = {"m": grid.accumulation, "T": outer.tokens, "h": census.model.hidden}
    keeps = int(grid.habits.pipeline_keeps_outputs)
    ends = received(grid) + (1 + keeps) * sent_on(grid)
    title, formula = "hidden states that all micro-batches receive and send", "m · w · T · h · (1, 2 or 3)"
    yield Term("buffers", title, many * passed * ends, COMPUTING, formula, PIPELINE, inputs)
    divided = grid.degree("tp") if grid.fixed.loss == "parallel" else np.int64(1)
    logits = grid.width("compute") * outer.tokens * census.model.vocab // divided * grid.is_last
    inputs = {"m": grid.accumulation, "T": outer.tokens, "V": census.model.vocab}
    earlier = np.maximum(many - 1, 0) * logits * keeps
    title = "logits of earlier micro-batches"
    yield Term("activations", title, earlier, COMPUTING, "(m - 1) · w · T · V", PIPELINE, inputs)
    title, phases = "logits of the micro-batch, a local of its stage's backward", COMPUTING[COMPUTING.index("loss") :]
    running = logits * holds_logits(census)
    yield Term("activations", title, running, phases, "w · T · V", OUTPUT, inputs, in_events=True)


def in_reduce_pool(term: Term, census: ModelOnGrid) -> Iterator[Term]:
    """Sharded gradients: they are the reduce-scatters' outputs, in that stream's pool wherever FSDP shards."""
    grid = census.grid
    if grid.habits.gather != "blocks" or grid.fixed.fsdp_schedule == "simple":
        yield term
        return
    if min(grid.zeros) >= 2:
        yield replace(term, pool="reduce-scatter")
        return
    sharded = grid.zero_from(2).astype(np.int64)
    yield replace(term, bytes=term.bytes * sharded, pool="reduce-scatter")
    yield replace(term, bytes=term.bytes * (1 - sharded))
