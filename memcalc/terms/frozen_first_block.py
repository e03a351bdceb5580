"""The first block of a frozen model: no gradient flows to its input, so that it keeps less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace.template import trace

if TYPE_CHECKING:
    from memcalc.formulas.recompute import Policy
    from memcalc.grid import Grid
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.trace.layers import BlockConfig
    from memcalc.trace.tape import Record


def checkpoints_need_gradients(grid: Grid, treatment: str) -> bool:
    """Whether checkpoints make the input of a frozen tower need a gradient: then its blocks keep inputs and run again.

    The Trainer's do: ``enable_input_require_grads`` walks all sub-models and their patches (Transformers 5.23
    modeling_utils.py).
    """
    return grid.fixed.framework.partition("@")[0] == "hf" and treatment == "full"


def unread(census: ModelOnGrid, index: int, policy: Policy) -> bool:
    """Whether no gradient flows to the input of a group's first block: nothing before it is trained or checkpointed.

    PEFT and Transformers call ``enable_input_require_grads`` where checkpoints are on, and only there; so does
    Megatron-Bridge (067f987d peft/recompute.py), while ms-swift does so in any case (mcore-bridge f020e479
    model/gpt_model.py, ``decoder_input.requires_grad_``).
    """
    fixed = census.grid.fixed
    if fixed.lora_classes == "swift" or policy.kind != "none" or fixed.adapters is None or index != census.sequence[0]:
        return False
    if "embedding" in (*fixed.also_train, *fixed.adapters.targets):
        return False
    # A vision tower that is not trained keeps nothing at all
    return fixed.vision == "trained" or census.model.groups[index].tower != "vision"


def spared_records(census: ModelOnGrid, index: int, setting: BlockConfig, policy: Policy) -> tuple[Record, ...]:
    """What the first block of a group does not keep: what it would keep only if a gradient flowed to its input."""
    if not unread(census, index, policy):
        return ()
    block = census.model.groups[index].block
    names = {record.name for record in census.traces.get(trace, block, setting, wanted=False).kept_records}
    return tuple(record for record in census.traces.get(trace, block, setting).kept_records if record.name not in names)
