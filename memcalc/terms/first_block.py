"""The first block of a frozen model: no gradient flows to its input, so that it keeps less."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from memcalc.trace.template import total, trace

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.specs.model import Block
    from memcalc.terms.activations import GroupActivations
    from memcalc.trace.layers import Setting
    from memcalc.trace.tape import Record


def unread(group: GroupActivations) -> bool:
    """Whether no gradient flows to the first block's input: nothing is trained before it, and no checkpoint needs one.

    PEFT and Transformers call ``enable_input_require_grads`` where checkpoints are on, and only there.
    """
    fixed, first = group.grid.fixed, group.group is group.census.model.groups[0]
    if fixed.lora is None or not first or "embedding" in (*fixed.also_train, *fixed.lora.targets):
        return False
    return all(policy.kind == "none" for policy in group.grid.policies)


@lru_cache(maxsize=64)
def spared_records(block: Block, setting: Setting) -> tuple[Record, ...]:
    """What a block keeps where a gradient flows to its input, and does not where none flows."""
    names = {record.name for record in trace(block, setting, wanted=False).kept_records}
    return tuple(record for record in trace(block, setting).kept_records if record.name not in names)


def spared_names(group: GroupActivations, setting: Setting) -> set[str]:
    """The names of what the first block does not keep."""
    return {record.name for record in spared_records(group.group.block, setting)} if unread(group) else set()


def spared(group: GroupActivations) -> Array:
    """Bytes that the stage's first block does not keep, by precision."""
    if not unread(group):
        return np.int64(0)
    sums = [total(spared_records(group.group.block, setting)) for setting in group.settings]
    bytes_ = [np.asarray(group.evaluate(each, np.int64(0))) for each in sums]
    return (
        np.concatenate(np.broadcast_arrays(*(b.reshape(b.shape or (1,) * 7) for b in bytes_)), axis=2)
        * group.grid.is_first
    )
