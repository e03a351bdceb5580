"""What axolotl's `rl:` and `reward_model:` say: TRL's trainers of preferences, rewards and GRPO.

axolotl 0.18.0 (067b021c8): core/builders/rl.py, core/trainers/{dpo,grpo}, utils/schemas/trl.py and vllm.py, train.py.
"""

from __future__ import annotations

from memcalc.convert.config import ConfigReader
from memcalc.convert.formats.base import KeyTable
from memcalc.convert.formats.preferences import refuse_reference, set_algorithm
from memcalc.convert.objectives import method_called


def read_preferences(reader: ConfigReader, keys: KeyTable, adapter: str) -> None:
    """What is optimized, and the reference: the policy without its adapters (train.py, setup_reference_model)."""
    algorithm = ""
    for key in ("rl", "reward_model", "process_reward_model"):
        value = reader.text(key).lower()
        algorithm = set_algorithm(reader, method_called(key if value == "true" else value), key, value) or algorithm
    if not algorithm:
        reader.harmless(*keys.names("of_preferences"), "trl.", "vllm.", "rl_beta")
        return
    refuse_reference(reader, "", ("rl_adapter_ref_model",), adapters=bool(adapter))
    if reader.flag(key := "precompute_ref_log_probs"):
        reader.set("rl.reference", False, key)
    if reader.flag(key := "dpo_use_liger_kernel") and algorithm == "dpo":
        reader.set("rl.logits", "fused", key)
    if reader.flag("dpo_padding_free"):
        says = "the answers of a batch are laid end to end; counted as padded"
        reader.not_counted({"dpo_padding_free": {"moves": "memory", "says": says}})
    if algorithm in ("grpo", "dapo"):
        _rollout(reader)
    reader.harmless(*keys.names("of_preferences", "of_rollout"), "vllm.", "rl_beta")
    reader.not_counted(keys.tables["of_trl"])


def _rollout(reader: ConfigReader) -> None:
    """TRL's arguments under `trl` (core/trainers/grpo, set_training_args_kwargs); the engine's under `vllm`."""
    reader.set_integer("rl.response", "trl.max_completion_length", 512)
    reader.set_integer("rl.samples", "trl.num_generations", 8)
    reader.set_integer("rl.generation_batch", "trl.generation_batch_size")
    reader.set("rl.beta", reader.number("trl.beta") or reader.number("rl_beta") or 0.0, "trl.beta")
    reader.set("rl.vllm", reader.flag("trl.use_vllm"), "trl.use_vllm")
    if reader.flag("trl.use_liger_loss"):
        reader.set("rl.logits", "fused", "trl.use_liger_loss")
    if reader.one_of("trl.vllm_mode", {"colocate": False, "server": True}, False):
        reader.set("rl.apart", True, "trl.vllm_mode")
    elif reader.has("trl.vllm_mode"):
        reader.set("rl.utilization", reader.number(key := "vllm.gpu_memory_utilization", 0.9), key)
        reader.set_integer("rl.engine_tp", "vllm.tensor_parallel_size", 1)
        reader.set("rl.sleep", "2" if reader.flag(key := "trl.vllm_enable_sleep_mode") else "0", key)
