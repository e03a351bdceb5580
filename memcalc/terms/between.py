"""Terms of what passes between blocks: inputs that hooks hold, a narrower first input, returned keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.grid import column
from memcalc.ledger import KEPT, Term
from memcalc.terms.activations import groups_of
from memcalc.terms.flat import FLAT
from memcalc.terms.settings import is_reentrant

if TYPE_CHECKING:
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.census import Census

KBIT = (
    "TRL 0.13.0 trainer/sft_trainer.py and utils.py, peft_module_casting_to_bf16: norms in fp32, embeddings in 16 bits"
)
CACHE = "Transformers 4.48.1 models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeModel.forward: presents"


def between_terms(census: Census) -> Iterator[Term]:
    """All of them."""
    grid, groups = census.grid, groups_of(census)
    if grid.habits.flat_units and grid.fixed.lora is not None and is_reentrant(grid):
        yield from (replace(pinned_term(census, group), in_events=True) for group in groups)
    if any(setting.embedding != setting.residual for setting in groups[0].settings):
        yield first_input_term(census, groups[0])
    for group in groups:
        if group.group.block.attention.returns_cache:
            yield cache_term(group)


def pinned_term(census: Census, group: GroupActivations) -> Term:
    """The inputs of all blocks, and the gradients of these, where FSDP 1 has a frozen base under reentrant checkpoints.

    The hook that shards a frozen unit again (``_register_post_backward_reshard_only_hook``) holds the nodes of the
    block's detached input until backward ends. At the first block's largest moment its own input is counted with the
    block, its input's gradient is not there yet, and the second block's is the incoming one.
    """
    input_ = group.over("input_sum") * np.minimum(group.field("treated"), 1) * census.grid.zero_from(2)
    held = np.maximum(group.layers - 1, 0) + np.maximum(group.layers - 2, 0)
    title, formula = "inputs of blocks and their gradients, held by FSDP's hooks", "((L - 1) + (L - 2)) · w · h · T"
    inputs = {"L": group.layers, "T": group.tokens}
    return Term("activations", title, input_ * held, ("backward-first",), formula, FLAT, inputs)


def first_input_term(census: Census, group: GroupActivations) -> Term:
    """The first block's input is the embedding's 16-bit output, although the residual stream is fp32 from there on."""
    widths = [setting.embedding - setting.residual for setting in group.settings]
    kept = np.minimum(group.field("treated") + group.field("whole"), 1) * census.grid.is_first
    saved = column(widths, "precision") * group.tokens * group.group.block.hidden * kept
    inputs = {"w": column(widths, "precision"), "T": group.tokens, "h": group.group.block.hidden}
    return Term("activations", "first block's input, which is 16-bit", saved, KEPT, "w · h · T, w < 0", KBIT, inputs)


def cache_term(group: GroupActivations) -> Term:
    """Keys and values that checkpointed blocks return for a cache: as views, they hold the whole packed projection."""
    spec = group.group.block.attention
    elements = spec.q_dim * spec.packed_qkv + 2 * spec.kv_dim
    width = column([setting.compute for setting in group.settings], "precision")
    held = width * elements * group.tokens * group.field("treated")
    title, formula = "keys and values returned by checkpointed blocks", "w · (q + 2·k) · T · blocks"
    inputs = {"w": width, "q + 2·k": elements, "T": group.tokens, "blocks": group.field("treated")}
    return Term("activations", title, held, ("forward-last", "forward"), formula, CACHE, inputs)
