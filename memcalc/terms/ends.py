"""Terms of what stands before the blocks of a tower, and after them where another tower follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.ledger import KEPT, Term
from memcalc.trace.template import recorded, trace_entry, trace_exit

if TYPE_CHECKING:
    from memcalc.formulas.recompute import Policy
    from memcalc.formulas.types import Array
    from memcalc.terms.activations import GroupActivations
    from memcalc.terms.census import Census
    from memcalc.trace.layers import Setting
    from memcalc.trace.template import Sum

    Sums = Callable[[GroupActivations, Setting, Policy], Sum]

PHASES = (*KEPT, "backward-first")
SOURCE = "Transformers 5.23 models/*/modeling_*.py; PyTorch 2.13 tools/autograd/derivatives.yaml"


def entry_terms(census: Census, groups: list[GroupActivations], flight: Array) -> Iterator[Term]:
    """What embeddings keep until the first block's backward is over, and what a tower keeps at its end for its readers.

    On the first stage of a pipeline; ``flight`` micro-batches keep it.
    """
    towers = {activations.group.tower: activations for activations in reversed(groups)}
    for tower, activations in reversed(towers.items()):
        kept = over(activations, lambda a, s, p: entry_sum(census, a, s, p)) * census.grid.is_first * flight
        title = "kept by the embedding" if len(towers) == 1 else f"kept by the {tower}'s embedding"
        yield Term("activations", title, kept, PHASES, "sum of the entry's kept tensors", SOURCE)
    readers = [a for a in groups if a.group.block.cross_attention is not None]
    if readers:
        last = [a for a in groups if a.group.tower == "encoder"][-1]
        kept = over(last, lambda a, s, p: exit_sum(census, a, readers[0], s, p)) * census.grid.is_first * flight
        yield Term("activations", "kept at the encoder's end", kept, PHASES, "sum of the exit's kept tensors", SOURCE)


def over(activations: GroupActivations, sums: Sums) -> Array:
    """A sum over the grid's precisions and policies [bytes]."""
    policies, rows = activations.grid.policies, []
    alike = {(policy.treatment, policy.parts): policy for policy in policies}
    for setting in activations.settings:
        found = {
            treatment: activations.evaluate(sums(activations, setting, policy), np.int64(0))
            for treatment, policy in alike.items()
        }
        rows.append([found[policy.treatment, policy.parts] for policy in policies])
    return activations.stacked(rows)


def entry_sum(census: Census, activations: GroupActivations, setting: Setting, policy: Policy) -> Sum:
    """What a tower's entry keeps."""
    if census.model.recording is not None:
        return recorded(census.model.recording.entry, setting, policy.treatment).kept_sum
    ends = census.model.ends_of(activations.group.tower)
    return trace_entry(ends, activations.group.block, setting, policy.treatment).kept_sum


def exit_sum(
    census: Census, activations: GroupActivations, reader: GroupActivations, setting: Setting, policy: Policy
) -> Sum:
    """What the encoder's end keeps, with its output where a block that reads it keeps it."""
    ends, read = census.model.ends_of(activations.group.tower), reader.template(policy, setting)
    return trace_exit(ends, activations.group.block.hidden, setting, read=read.keeps_context).kept_sum
