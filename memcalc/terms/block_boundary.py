"""Terms of what passes between blocks: inputs that hooks hold, a narrower first input, returned keys and values.

Terms of what stands before the blocks of a tower, and after them where another tower follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.grid import column
from memcalc.ledger import KEPT, Term
from memcalc.terms.activations import add_all, groups_of
from memcalc.terms.buffers import FLAT
from memcalc.terms.order import checkpoints_need_gradients, from_start
from memcalc.terms.settings import enters_units_again
from memcalc.trace.entry import MASK
from memcalc.trace.scores import kernel
from memcalc.trace.template import recorded, trace_entry, trace_exit
from memcalc.trace.working_sets import total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memcalc.formulas import Array
    from memcalc.formulas.recompute import Policy
    from memcalc.specs.block import Attention
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.trace.layers import BlockConfig
    from memcalc.trace.tape import Record
    from memcalc.trace.working_sets import Sum

    Sums = Callable[[GroupActivations, BlockConfig, Policy], Sum]


KBIT = (
    "TRL 0.13.0 trainer/sft_trainer.py and utils.py, peft_module_casting_to_bf16: norms in fp32, embeddings in 16 bits"
)
WEIGHTS = "Transformers 5.23 models/bloom/modeling_bloom.py and others: outputs = block(...)"
RESIDUAL = "Transformers 5.24 models/mamba/modeling_mamba.py, MambaBlock.forward: residual_in_fp32"
CACHE = "Transformers 4.48.1 models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.forward: presents"


def between_terms(census: ModelOnGrid) -> Iterator[Term]:
    """All of them."""
    grid, groups = census.grid, groups_of(census)
    if grid.habits.flat_units and grid.fixed.adapters is not None and enters_units_again(grid):
        yield from (replace(pinned_term(census, group), in_events=True) for group in groups)
    if any(setting.embedding != setting.residual for setting in groups[0].settings):
        yield first_input_term(census, groups[0])
    for group in groups:
        attention = group.group.block.attention
        if attention is not None and attention.returns_cache:
            yield cache_term(group, attention)
        if attention is not None and attention.returns_weights:
            yield weights_term(group)


def pinned_term(census: ModelOnGrid, group: GroupActivations) -> Term:
    """The inputs of all blocks, and the gradients of these, where FSDP 1 has a frozen base under reentrant checkpoints.

    The hook that shards a frozen unit again (``_register_post_backward_reshard_only_hook``) holds the nodes of the
    block's detached input until backward ends. At the first block's largest moment its own input is counted with the
    block, its input's gradient is not there yet, and the second block's is the incoming one.
    """
    input_ = group.over("input_sum") * np.minimum(group.field("treated"), 1) * census.grid.zero_from(2)
    live = 2 * group.layers - leading(group, 1) - leading(group, 2)
    title, formula = "inputs of blocks and their gradients, held by FSDP's hooks", "((L - 1) + (L - 2)) · w · h · T"
    inputs = {"L": group.layers, "T": group.tokens}
    return Term("activations", title, input_ * live, ("backward-first",), formula, FLAT, inputs)


def leading(group: GroupActivations, blocks: int) -> Array:
    """How many of the first few blocks of a stage's stack are of a group."""
    if group.stack is not None:
        return group.stack.number(group, from_start(0, blocks))
    return np.minimum(group.layers, blocks)


def first_input_term(census: ModelOnGrid, group: GroupActivations) -> Term:
    """The first block's input is the embedding's 16-bit output, although the residual stream is fp32 from there on.

    An fp32 norm keeps it even where the block is not computed again; one that takes a 16-bit copy does not.
    """
    widths = [(setting.embedding - setting.residual) * (not setting.casts_input) for setting in group.settings]
    untreated = 0 if group.group.block.wide_residual else group.field("whole")
    saved_input = np.minimum(group.field("treated") + untreated, 1) * census.grid.is_first
    source = RESIDUAL if group.group.block.wide_residual else KBIT
    saved = column(widths, "precision") * group.tokens * group.group.block.hidden * saved_input
    inputs = {"w": column(widths, "precision"), "T": group.tokens, "h": group.group.block.hidden}
    return Term("activations", "first block's input, which is 16-bit", saved, KEPT, "w · h · T, w < 0", source, inputs)


def cache_term(group: GroupActivations, spec: Attention) -> Term:
    """Keys and values that checkpointed blocks return for a cache: as views, they hold the whole packed projection."""
    elements = spec.q_dim * spec.packed_qkv + 2 * spec.kv_dim
    width = column([setting.compute for setting in group.settings], "precision")
    live = width * elements * group.tokens * group.field("treated")
    title, formula = "keys and values returned by checkpointed blocks", "w · (q + 2·k) · T · blocks"
    inputs = {"w": width, "q + 2·k": elements, "T": group.tokens, "blocks": group.field("treated")}
    return Term("activations", title, live, ("forward-last", "forward"), formula, CACHE, inputs)


def weights_term(group: GroupActivations) -> Term:
    """The attention weights of the block before, while one that follows it runs; without a checkpoint they are kept."""
    behind = (group.field("whole") == 0) & (group.field("treated") > 1)
    live = over(group, returned_sum) * behind
    title, formula = "attention weights that the block before returned", "w · a · s · T"
    return Term("activations", title, live, ("forward-last",), formula, WEIGHTS, {"T": group.tokens, "s": group.keys})


def returned_sum(group: GroupActivations, setting: BlockConfig, policy: Policy) -> Sum:
    """What one block returns of its attention beside the hidden states, where it is computed again as a whole."""
    spec = group.group.block.own_attention
    if policy.treatment != "full" or setting.kernels != "model" or kernel(spec, setting) != "eager":
        return {}
    return {("pair", "tp", False): spec.heads * (setting.compute if spec.upcast_softmax else setting.residual)}


PHASES = (*KEPT, "backward-first")
SOURCE = "Transformers 5.23 models/*/modeling_*.py; PyTorch 2.13 tools/autograd/derivatives.yaml"


def entry_terms(census: ModelOnGrid, groups: list[GroupActivations], flight: Array) -> Iterator[Term]:
    """What embeddings keep until the first block's backward is over, and what a tower keeps at its end for its readers.

    On the first stage of a pipeline; ``flight`` micro-batches keep it.
    """
    towers = {activations.group.tower: activations for activations in reversed(groups)}
    for tower, activations in reversed(towers.items()):
        saved = over(activations, lambda a, s, p: entry_sum(census, a, s, p))
        masks = mask_readers(activations) if census.model.recording is None else []
        if masks:
            saved = saved + mask_bytes(census, masks[0])
        saved = saved * census.grid.is_first * flight
        title = "kept by the embedding" if len(towers) == 1 else f"kept by the {tower}'s embedding"
        yield Term("activations", title, saved, PHASES, "sum of the tensors that the embedding saves (traced)", SOURCE)
        for alike in masks[1:]:
            first = census.model.sequence.index(alike[0].index)
            live = mask_bytes(census, alike) * census.grid.is_first * flight
            title = f"attention mask of blocks like number {first + 1}"
            yield Term("activations", title, live, PHASES, "w · s · T", SOURCE, until=first)
    for tower in towers:
        if census.model.ends_of(tower).projector is not None:
            last = [a for a in groups if a.group.tower == tower][-1]
            saved = over(last, lambda a, s, p: projector_sum(census, a, s, p)) * census.grid.is_first * flight
            yield Term("activations", "kept by the projector", saved, PHASES, "sum of the exit's kept tensors", SOURCE)
    readers = [a for a in groups if a.group.block.cross_attention is not None]
    if readers:
        last = [a for a in groups if a.group.tower == "encoder"][-1]
        saved = over(last, lambda a, s, p: exit_sum(census, a, readers[0], s, p)) * census.grid.is_first * flight
        yield Term("activations", "kept at the encoder's end", saved, PHASES, "sum of the exit's kept tensors", SOURCE)


def over(activations: GroupActivations, sums: Sums) -> Array:
    """A sum over the grid's precisions and policies [bytes]."""
    policies, rows = activations.grid.policies, []
    alike = {(policy.treatment, policy.parts): policy for policy in policies}
    for setting in activations.settings:
        results = {
            treatment: activations.evaluate(sums(activations, setting, policy), np.int64(0))
            for treatment, policy in alike.items()
        }
        rows.append([results[policy.treatment, policy.parts] for policy in policies])
    return activations.stacked(rows)


def entry_sum(census: ModelOnGrid, activations: GroupActivations, setting: BlockConfig, policy: Policy) -> Sum:
    """What a tower's entry keeps, with what its blocks share, of which a mixer reads nothing."""
    if census.model.recording is not None:
        return census.traces.get(recorded, census.model.recording.entry, setting, policy.treatment).kept_sum
    groups = (activations, *(activations.stack.groups if activations.stack else ()))
    reader = next((group for group in groups if group.group.block.attention is not None), activations)
    attention = reader.group.block.attention
    always = attention is not None and attention.joins_batch
    return total(r for r in entry_records(census, reader, setting, policy) if always or r.name != MASK)


def mask_readers(activations: GroupActivations) -> list[list[GroupActivations]]:
    """The groups of a tower by the mask that they share: blocks with another window have one of their own."""
    groups: dict[int | None, list[GroupActivations]] = {}
    for group in activations.stack.groups if activations.stack else (activations,):
        attention = group.group.block.attention
        if attention is not None and not attention.joins_batch:
            groups.setdefault(attention.window, []).append(group)
    return list(groups.values())


def mask_bytes(census: ModelOnGrid, alike: list[GroupActivations]) -> Array:
    """The mask that attention is given, where a checkpointed block of some groups has one among its inputs.

    Once the first of them has run backward, nothing refers to it.
    """
    treated = np.minimum(add_all([group.field("treated") for group in alike]), 1)
    return over(alike[0], lambda a, s, p: mask_sum(census, a, s, p)) * treated


def mask_sum(census: ModelOnGrid, group: GroupActivations, setting: BlockConfig, policy: Policy) -> Sum:
    """The mask of one group's blocks."""
    return total(record for record in entry_records(census, group, setting, policy) if record.name == MASK)


def entry_records(
    census: ModelOnGrid, group: GroupActivations, setting: BlockConfig, policy: Policy
) -> tuple[Record, ...]:
    """What a tower's entry keeps if its blocks are those of a group."""
    ends = census.model.ends_of(group.group.tower)
    return census.traces.get(trace_entry, ends, group.group.block, setting, policy.treatment).kept_records


def projector_sum(census: ModelOnGrid, activations: GroupActivations, setting: BlockConfig, policy: Policy) -> Sum:
    """What a vision tower's end and its projector keep; what a block keeps as its input is counted there."""
    ends, hidden = census.model.ends_of(activations.group.tower), activations.group.block.hidden
    alone = census.grid.fixed.vision == "projector" and census.grid.fixed.adapters is None
    setting = setting._replace(trainable=setting.trainable or alone)
    wanted = not activations.is_frozen or checkpoints_need_gradients(census.grid, policy.treatment)
    template = census.traces.get(trace_exit, ends, hidden, setting, read=False, wanted=wanted)
    early = ends.projector is not None and ends.projector.early
    return total(record for record in template.kept_records if not (early and record.kind == "external"))


def exit_sum(
    census: ModelOnGrid, activations: GroupActivations, reader: GroupActivations, setting: BlockConfig, policy: Policy
) -> Sum:
    """What the encoder's end keeps, with its output where a block that reads it keeps it."""
    ends, read = census.model.ends_of(activations.group.tower), reader.template(policy, setting)
    hidden = activations.group.block.hidden
    return census.traces.get(trace_exit, ends, hidden, setting, read=read.keeps_context).kept_sum
