"""What the fine-tuning frameworks have in common: layers by name, checkpoints by name, FSDP.

Names: transformers 5.23 ``models/*/modeling_*.py``; PEFT 0.19 ``tuners/tuners_utils.py``: a listed name is the last
part of a layer's path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from memcalc.convert.config import Reading

__all__ = ["fsdp_keys", "say_fsdp", "say_lora", "say_stored", "say_trained_besides", "targets_of"]

LAYERS: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "o_proj": ("o",), "out_proj": ("o",), "wo": ("o",),
    "query_key_value": ("qkv",), "qkv_proj": ("qkv",), "W_pack": ("qkv",), "c_attn": ("qkv",), "wqkv": ("qkv",),
    "Wqkv": ("qkv",), "dense": ("o",), "c_proj": ("o", "down"),
    "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",), "gate_up_proj": ("gate_up",),
    "fc1": ("up",), "fc2": ("down",), "c_fc": ("up",), "dense_h_to_4h": ("up",), "dense_4h_to_h": ("down",),
    "w1": ("gate",), "w2": ("down",), "w3": ("up",), "q_a_proj": ("q_a",), "q_b_proj": ("q_b",),
    "kv_a_proj_with_mqa": ("kv_a",), "kv_b_proj": ("kv_b",), "lm_head": ("head",), "embed_out": ("head",),
    "embed_tokens": ("embedding",), "wte": ("embedding",), "word_embeddings": ("embedding",),
}  # fmt: skip
"""By the name of a layer: which of memcalc's targets it is. GPT-2's ``c_proj`` is in attention and in the MLP."""
_ALL = ("all", "all-linear")


def targets_of(names: Iterable[object]) -> tuple[str, ...] | None:
    """The targets of some layer names; None where one is unknown, or a pattern.

    >>> targets_of(["q_proj", "v_proj"])
    ('q', 'v')
    """
    found: dict[str, None] = {}
    for name in names:
        if str(name) not in LAYERS:
            return None
        found |= dict.fromkeys(LAYERS[str(name)])
    return tuple(found)


def say_lora(reading: Reading, rank: int, key: str, every: bool = False) -> None:
    """Say the adapters whose layers a key lists; `every` where all linear layers have one, the head apart."""
    names = reading.items(key)
    if every or [str(name) for name in names] in ([one] for one in _ALL):
        reading.say("lora", f"{rank}:all-linear", key)
        return
    targets = targets_of(names)
    if targets:
        reading.say("lora", f"{rank}:{','.join(targets)}", key)
    else:
        reading.ask("lora", key, ",".join(map(str, names))[:60] or "no layer at all")


def say_trained_besides(reading: Reading, key: str) -> None:
    """Say which layers are trained whole beside the adapters."""
    names = reading.items(key)
    known = [LAYERS.get(str(name), ("",))[0] for name in names]
    found = tuple(target for target in ("embedding", "head") if target in known)
    if found:
        reading.say("also_train", found, key)
    if len(known) > len(found):
        reading.not_modelled({key: "of layers trained whole beside adapters, embedding and head are modelled"})


_STORED = {
    r"gptq.*int4": "gptq-int4", r"gptq.*int8": "gptq-int8", r"(bnb|unsloth)-4bit": "nf4-dq", r"gptq|awq|aqlm|mxfp4": "",
}  # fmt: skip
"""How a checkpoint's own name says that it is quantised; empty where it does not say in how many bits."""


def say_stored(reading: Reading, key: str) -> bool:
    """Say how a model is stored that was quantised before; return whether it was."""
    name = reading.text(key).lower()
    for pattern, stored in _STORED.items():
        if re.search(pattern, name):
            if stored:
                reading.say("quantize", stored, key)
            else:
                reading.ask("quantize", key, name.rpartition("/")[2])
            return True
    return False


STRATEGIES = {"full_shard": 3, "shard_grad_op": 2, "no_shard": 0, "hybrid_shard": 3, "hybrid_shard_zero2": 2}
"""Items of ``fsdp`` before Transformers 5.0 (5.23 training_args.py, _apply_legacy_fsdp_to_config)."""
_FSDP_HARMLESS = (
    "sync_module_states", "cpu_ram_efficient_loading", "cpu_offload_pin_memory", "use_orig_params", "state_dict_type",
    "final_state_dict_type", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "limit_all_gathers",
    "backward_prefetch", "forward_prefetch",
)  # fmt: skip
_FSDP = (
    "version", "activation_checkpointing", "offload_params", "cpu_offload", "reshard_after_forward",
    "sharding_strategy", "mixed_precision_policy", *_FSDP_HARMLESS,
)  # fmt: skip


def fsdp_keys(reading: Reading) -> dict[str, str]:
    """The keys of ``fsdp_config`` as they stand in the file: each may begin with ``fsdp_``."""
    own = {name.removeprefix("fsdp_"): f"fsdp_config.{name}" for name in reading.table("fsdp_config")}
    return {name: own.get(name, f"fsdp_config.{name}") for name in _FSDP}


def say_fsdp(
    reading: Reading, version_key: str, default: int, listed: list[str], where: Mapping[str, str], offload: str
) -> None:
    """Say how FSDP keeps the states, from ``fsdp_config`` and from the items of ``fsdp``; ``offload`` is its key."""
    version = reading.whole(version_key, default)
    if version not in (1, 2):
        raise reading.wrong(version_key, version, "must be 1 or 2")
    reading.say("engine", f"fsdp{version}", version_key)
    strategy = next((item for item in listed if item in STRATEGIES), "")
    resharded = where["reshard_after_forward"]
    whole = reading.text(resharded).lower()
    if whole:
        stages = {**STRATEGIES, "true": 3, "false": 2}
        reading.say("zero", reading.one_of(resharded, stages), resharded)
    else:
        reading.say("zero", STRATEGIES.get(strategy, 3), "fsdp" if strategy else resharded)
    if reading.flag(where[offload]) or "offload" in listed:
        reading.say("offload", ("params",), where[offload])
    if reading.flag(where["activation_checkpointing"]):
        reading.say("recompute", "full", where["activation_checkpointing"])
        reading.say("strategy.checkpoint", "non-reentrant", where["activation_checkpointing"])
    if "hybrid" in f"{strategy} {whole}":
        reading.not_modelled({"fsdp": "each group of ranks keeps all states (hybrid sharding)"})
    reading.harmless(*(where[name] for name in _FSDP_HARMLESS))
