"""Megatron-LM's flags of checkpoints (d98e8a64 megatron/training/checkpointing.py, config/training_config.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memcalc.convert.formats.megatron_flags import Flags

_RESHARDABLE = "dist_ckpt_optim_fully_reshardable"
_BUCKETS = (
    "with --overlap-grad-reduce each bucket of the states is gathered on the GPU, at most max(40 million, a million a "
    "rank) elements and one weight, and each rank's host holds the states of all"
)
_LOADED = "what reading a checkpoint holds besides the states is not counted"


def set_saving(flags: Flags) -> None:
    """Set what is written of the distributed optimizer's states, and say what of it is not counted.

    Without one, or in shards (the format torch_dist), nothing is gathered; the format `torch` gathers on the host.
    """
    if flags.has("save") and flags.on("use_distributed_optimizer"):
        _set_form(flags)
    if flags.on("async_save"):
        flags.reader.note("note", "MC004", flags.key("async_save"), "copies on the host, while they are written, are "
                          "not counted")  # fmt: skip
    if flags.has("load") and not (flags.on("finetune") or flags.on("no_load_optim")):
        flags.reader.note("note", "MC004", flags.key("load"), _LOADED)


def _set_form(flags: Flags) -> None:
    form = flags.text("ckpt_format") or "torch_dist"
    if form == "torch":
        flags.set("strategy.state_dict", "full", "ckpt_format")
    elif form != "torch_dist":
        flags.warn("ckpt_format", "what lies on the GPU while it is written is not known")
    elif not flags.on(_RESHARDABLE):
        flags.set("strategy.state_dict", "sharded", "save")
    elif flags.on("distrib_optim_fully_reshardable_mem_efficient"):
        flags.set("strategy.state_dict", "full", _RESHARDABLE)
    elif flags.on("overlap_grad_reduce"):
        flags.warn(_RESHARDABLE, _BUCKETS)
    else:
        flags.set("strategy.state_dict", "full-on-gpu", _RESHARDABLE)
