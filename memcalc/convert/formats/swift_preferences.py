"""What `swift rlhf` says of preferences, rewards and GRPO, beside the arguments of `swift sft`.

ms-swift 4.6.0.dev0 (3602360a): swift/arguments/rlhf_args.py, swift/rlhf_trainers/args_mixin.py and the trainers there.
"""

from __future__ import annotations

from dataclasses import replace

from memcalc.convert.config import ConfigReader
from memcalc.convert.formats.base import KeyTable
from memcalc.convert.formats.preferences import refuse_reference, set_algorithm
from memcalc.convert.objectives import method_called, refuse_method
from memcalc.errors import ObjectiveError

_ESTIMATORS = {"grpo": "grpo", "rloo": "rloo", "reinforce_plus_plus": "rloo"}
"""``advantage_estimator``: algorithms with the same roles."""
_PAIRED = ("dpo", "orpo", "simpo", "reward")
"""Algorithms that score pairs of answers."""


def method_of(reader: ConfigReader) -> tuple[str, str]:
    """What `rlhf_type` names, DPO where `swift rlhf` says nothing, and as it is stated."""
    stated = reader.text("rlhf_type", "dpo" if reader.text("command") == "rlhf" else "")
    return method_called(stated), stated


def refuse_preferences(reader: ConfigReader) -> None:
    """Refuse preferences and rewards where nothing counts them."""
    method, stated = method_of(reader)
    refuse_method(reader.document.path.name, method, f"rlhf_type {stated}")


def read_preferences(reader: ConfigReader, keys: KeyTable) -> str:
    """Set what is optimized, and the rest that belongs to it; empty for the next token."""
    method, stated = method_of(reader)
    algorithm = set_algorithm(reader, method, "rlhf_type", stated) if method else ""
    if not algorithm:
        return ""
    full = reader.text("tuner_type", reader.text("train_type", "lora")) == "full"
    refuse_reference(reader, reader.text("model"), ("ref_model",), adapters=not full)
    if reader.flag(key := "precompute_ref_log_probs"):
        reader.set("rl.reference", False, key)
    if reader.flag(key := "reference_free"):
        reader.set("rl.reference", False, key)
    if algorithm == "grpo":
        _rollout(reader)
    reader.harmless(*keys.lists["of_preferences"])
    reader.not_counted(keys.tables["of_preferences_memory"])
    return algorithm


def halve_packs(reader: ConfigReader, algorithm: str) -> None:
    """A pack holds both answers of a pair: their lengths are added up (dataset/packing.py, create_packed_idx)."""
    if algorithm not in _PAIRED or not reader.flag("packing"):
        return
    for at, setting in enumerate(reader.settings):
        if setting.name == "seq_len" and setting.value:
            reader.settings[at] = replace(setting, value=int(setting.value) // 2)
            message = f"packs of {setting.value} tokens hold both answers of a pair: each is counted with half"
            reader.note("note", "MC004", setting.field, message)


def _rollout(reader: ConfigReader) -> None:
    """Generation: its lengths and samples, a KL term of 0.04 by default, and vLLM, which is off unless asked for."""
    key = "advantage_estimator"
    reader.settings = [setting for setting in reader.settings if setting.name != "rl.algorithm"]
    reader.set("rl.algorithm", reader.one_of(key, _ESTIMATORS, "grpo"), key if reader.has(key) else "rlhf_type")
    response = reader.integer(key := "max_completion_length", low=1)
    key = key if response else "max_new_tokens"
    response = response or reader.integer("max_new_tokens", 512, low=1) or 512
    reader.set("rl.response", response, key)
    longest = reader.integer("vllm_max_model_len", low=1)
    if longest is not None and longest > response:
        reader.set("rl.prompt", longest - response, "vllm_max_model_len")
    elif reader.has("max_length"):
        reader.set_integer("rl.prompt", "max_length")
    reader.set_integer("rl.samples", "num_generations", 8)
    judges = reader.items("reward_model")
    if len(judges) > 1:
        raise ObjectiveError(f"{reader.document.path.name} has {len(judges)} reward models: memcalc rl counts one.")
    if judges:
        reader.set("rl.reward_model", str(judges[0]), "reward_model")
    reader.set_integer("rl.accumulation", "steps_per_generation")
    reader.set_integer("rl.generation_batch", "generation_batch_size")
    reader.set("rl.reference", bool(reader.number("beta", 0.04)), "beta")
    if reader.flag("use_liger_kernel"):
        reader.settings = [setting for setting in reader.settings if setting.name != "rl.logits"]
        reader.set("rl.logits", "fused", "use_liger_kernel")  # its GRPO loss (grpo_trainer.py, compute_liger_loss)
    parks = [
        part for part, key in (("optimizer", "offload_optimizer"), ("params", "offload_model")) if reader.flag(key)
    ]
    reader.set("rl.park", ",".join(parks) or "none", "offload_optimizer")
    if reader.flag("log_entropy") or (reader.number("top_entropy_quantile", 1.0) or 1.0) < 1:
        reader.set("rl.entropy", True, "log_entropy")
    reader.set("rl.vllm", reader.flag("use_vllm"), "use_vllm")
    if reader.one_of("vllm_mode", {"colocate": False, "server": True}, False):
        reader.set("rl.apart", True, "vllm_mode")
        return
    reader.set("rl.utilization", reader.number(key := "vllm_gpu_memory_utilization", 0.9), key)
    reader.set_integer("rl.engine_tp", "vllm_tensor_parallel_size", 1)
    reader.set_integer("rl.max_seqs", "vllm_max_num_seqs")
    level = reader.integer("sleep_level", 0) or 0
    reader.set("rl.sleep", str(min(level, 2)), "sleep_level")
