"""FSDP's options, as Accelerate's YAML and the Trainer's `fsdp_config` spell them.

Accelerate 1.15: utils/dataclasses.py (FullyShardedDataParallelPlugin), utils/fsdp_utils.py, commands/launch.py;
Transformers 5.23: training_args.py (_process_fsdp_args).
"""

from __future__ import annotations

from memcalc.convert.config import Reading

__all__ = ["STRATEGIES", "read_options", "said_version"]

STRATEGIES = {
    "full_shard": "full", "1": "full", "shard_grad_op": "grads", "2": "grads", "no_shard": "none", "3": "none",
    "hybrid_shard": "hybrid", "4": "hybrid", "hybrid_shard_zero2": "hybrid-grads", "5": "hybrid-grads",
}  # fmt: skip
"""FSDP 1's sharding strategies, by name and by number."""
_HARMLESS = (
    "use_orig_params", "sync_module_states", "state_dict_type", "cpu_ram_efficient_loading", "min_num_params",
    "transformer_layer_cls_to_wrap", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt",
)  # fmt: skip
_NOT_MODELLED = {
    "ignored_modules": "modules that are left out stay whole on each rank",
    "xla_fsdp_settings": "XLA's own FSDP",
}
_WRAPS = "transformer_based_wrap"


def said_version(reading: Reading, table: str, default: int) -> int:
    """Return FSDP's version, which decides what the other options mean."""
    found: int = reading.one_of(_key(reading, table, "version"), {"1": 1, "2": 2}, default)
    return found


def read_options(reading: Reading, table: str, version: int, wraps: str, legacy: str = "") -> None:
    """Say what a table of options makes of a job.

    ``wraps`` is the wrapping policy where none is said; ``legacy`` the strategy that the Trainer's `fsdp` names.
    """
    reading.say("engine", f"fsdp{version}", _key(reading, table, "version"))
    _sharding(reading, table, version, legacy, own=wraps == _WRAPS)
    key = _key(reading, table, "offload_params")
    if reading.has(other := _key(reading, table, "cpu_offload")):
        key = other
    moved = _key(reading, table, "activation_checkpointing_offload")
    found = [part for part, name in (("params", key), ("activations", moved)) if reading.flag(name)]
    if found:
        reading.say("offload", tuple(found), key if reading.flag(key) else moved)
    _checkpoints(reading, table)
    _wrapping(reading, table, wraps)
    _prefetch(reading, table, version)
    reading.harmless(*(_key(reading, table, name) for name in _HARMLESS))
    reading.not_modelled({_key(reading, table, name): says for name, says in _NOT_MODELLED.items()})


def _key(reading: Reading, table: str, name: str) -> str:
    """Return an option's key: with `fsdp_` before it or without, as it stands in the file."""
    lead = f"{table}." if table else ""
    plain = f"{lead}{name}"
    return plain if reading.has(plain) else f"{lead}fsdp_{name}"


def _sharding(reading: Reading, table: str, version: int, legacy: str, *, own: bool) -> None:
    """FSDP 2 has a truth value; FSDP 1 a strategy, which Accelerate reads from `sharding_strategy` alone.

    The Trainer's table (``own``) passes no `sharding_strategy` on, so that its FSDP 1 shards all.
    """
    again, strategy = (_key(reading, table, name) for name in ("reshard_after_forward", "sharding_strategy"))
    if version == 2:
        default = legacy != "grads"
        reading.say("zero", 3 if reading.flag(again, default) else 2, again)
        reading.harmless(strategy)
        return
    kind = "full" if own else reading.one_of(strategy, STRATEGIES, "full")
    wanted = reading.one_of(again, {**STRATEGIES, "true": "full", "false": "grads"}, legacy or kind)
    if wanted != kind:
        stays = "FULL_SHARD" if kind == "full" else kind
        message = (
            f"FSDP 1 under Accelerate takes fsdp_sharding_strategy, which stays {stays}: "
            f"{'the strategy' if legacy else 'reshard_after_forward'} that is said here changes nothing"
        )
        reading.note("warning", "MC115", again, message, "fsdp_version 2 with reshard_after_forward: false")
    if kind == "none":
        reading.not_modelled({strategy: "nothing is sharded; here it counts as FULL_SHARD"}, unless=())
    if kind.startswith("hybrid"):
        reading.not_modelled({strategy: "shards are kept within a node; here they count as kept over all ranks"})
    reading.say("zero", 2 if kind.endswith("grads") else 3, strategy)


def _checkpoints(reading: Reading, table: str) -> None:
    key = _key(reading, table, "activation_checkpointing")
    if reading.flag(key):
        reading.say("recompute", "full", key)
        reading.say("strategy.checkpoint", "non-reentrant", key)


def _wrapping(reading: Reading, table: str, wraps: str) -> None:
    key = _key(reading, table, "auto_wrap_policy")
    policy = reading.text(key, wraps).lower()
    if policy != _WRAPS:
        says = "the whole model is one unit, gathered at once" if policy == "no_wrap" else "units are cut by their size"
        message = f"{key} {policy.upper()}: {says}; here each block is a unit of its own"
        reading.note("warning", "MC002", key, message, "TRANSFORMER_BASED_WRAP")


def _prefetch(reading: Reading, table: str, version: int) -> None:
    """BACKWARD_PRE is what is counted; the rest gathers a block less, or one more."""
    backward, forward, limit = (
        _key(reading, table, name) for name in ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
    )
    if version == 2:
        reading.harmless(backward, forward, limit)
        return
    reading.not_modelled(
        {backward: "a gathered block fewer than with BACKWARD_PRE, which is what is counted"},
        unless=("backward_pre", "1"),
    )
    reading.not_modelled({forward: "a gathered block more than is counted in forward"})
    if reading.flag(limit, True) is False:
        reading.not_modelled({limit: "gathers run ahead of compute without a bound"}, unless=())
