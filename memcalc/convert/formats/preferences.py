"""What trainers of preferences, rewards and GRPO are told: TRL's, and axolotl's, LLaMA-Factory's, ms-swift's upon it.

TRL 1.10 (f2cd5771): trainer/grpo_config.py, rloo_config.py, dpo_config.py, kto_config.py, reward_config.py,
experimental/orpo; generation/vllm_generation.py. Which of them trains may be said by a script's name alone, so that all
are read of any config, and what follows from the algorithm is the merged job's (:mod:`memcalc.preflight.roles`).

axolotl 0.18.0 (067b021c8): core/builders/rl.py, core/trainers/{dpo,grpo}, utils/schemas/trl.py and vllm.py, train.py.
ms-swift 4.6.0.dev0 (3602360a): swift/arguments/rlhf_args.py, swift/rlhf_trainers/args_mixin.py and the trainers there.
The classes of trainers upon TRL's hold whole logits, as TRL's own did until 1.14.
"""

from __future__ import annotations

import re
from dataclasses import replace

from memcalc.convert.config import ConfigReader
from memcalc.convert.document import Document
from memcalc.convert.formats.base import KeyTable
from memcalc.convert.launchers import names_other_work
from memcalc.convert.objectives import (
    ALGORITHMS,
    method_called,
    method_of_keys,
    method_of_script,
    refuse_idle,
    refuse_method,
)
from memcalc.errors import ObjectiveError, cut


def set_algorithm(reader: ConfigReader, method: str, key: str, stated: str, framework: str = "trl") -> str:
    """Set what a method optimizes, by roles that are counted, or refuse it; empty for the next token."""
    if method not in ALGORITHMS:
        refuse_method(reader.document.path.name, method, f"{key}: {stated}")
        return ""
    reader.set("rl.algorithm", ALGORITHMS[method], key)
    reader.set("rl.framework", framework, key)
    reader.set("rl.logits", "plain", key)  # kernels of blocks alone do not fuse this loss
    return ALGORITHMS[method]


_SHARED = frozenset({"beta", "max_prompt_length", "precompute_ref_log_probs"})
"""Keys of several trainers of preferences: DPO's, KTO's, ORPO's and CPO's (TRL 0.9 to 1.16, trainer/*_config.py)."""
_OF_STEPS = (
    "do_train", "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "optim",
    "gradient_accumulation_steps", "train_batch_size",
)  # fmt: skip
"""Keys of which each config of a training has one."""


def method_of_config(document: Document) -> tuple[str, str]:
    """The method that a config's keys tell, and those; of keys that several have, the name of its file tells which."""
    method, evidence = method_of_keys(document.data)
    stem = document.path.stem
    if evidence and _SHARED.issuperset(evidence.split(", ")) and "sft" not in stem.lower():
        method = method_of_script(stem) or method
    return method, evidence


def refuse_other_work(reader: ConfigReader) -> None:
    """Refuse arguments that train nothing: as they say, or as their file is called, with nothing of a step in it."""
    path = reader.document.path
    if reader.flag("do_train", None) is False and any(map(reader.flag, ("do_eval", "do_predict"))):
        refuse_idle(path.name, ("do_train false",))
    steps = any(reader.has(key) for key in _OF_STEPS)
    if reader.document.kind != "flags" and not steps and names_other_work(f"{path.stem}.py"):
        refuse_idle(path.name, (path.stem, "nothing of a step"))


_ANYBODYS = frozenset({"max_length", "packing", "use_peft"})
"""Keys of TRL that scripts without it have too."""


def is_trl(reader: ConfigReader, signs: frozenset[str]) -> bool:
    """Whether TRL's own defaults hold: ``signs`` of its newest release, no key that it has no more or never had.

    Of flags a few are also those of others' scripts, whose name tells then; TRL's own commands need none.
    """
    foreign = any(reader.has(key) for key in ("max_seq_length", "max_seq_len", "block_size"))
    present, script = signs & set(reader.document.data), reader.text("training_script").lower()
    named = not script or bool(re.search(r"(^|[^a-z])(trl|sft)([^a-z]|$)", script) or method_of_script(script))
    return (script == "trl" or bool(present if named else present - _ANYBODYS)) and not foreign


def set_by_name(reader: ConfigReader) -> None:
    """Set what a config is called after, or its folder, where no key tells what it optimizes: the defaults do not."""
    path = reader.document.path
    method = method_of_script(path.stem) or method_called(path.parent.name)
    if reader.document.kind == "flags" or "sft" in path.stem.lower() or method not in ALGORITHMS:
        return
    called = path.name if method_of_script(path.stem) else f"{path.parent.name}/{path.name}"
    message = (
        f"{called} is called after {method.upper()}, and no key says what it optimizes: counted as that; for "
        "fine-tuning give --set rl.algorithm=sft"
    )
    key = next((key for key in ("output_dir", "model_name_or_path") if reader.has(key)), "output_dir")
    reader.note("warning", "MC004", key, message)
    reader.set("rl.algorithm", ALGORITHMS[method], key, default=True)


def refuse_reference(reader: ConfigReader, model: str, keys: tuple[str, ...], *, adapters: bool) -> None:
    """Refuse a reference that is another model than the policy, or that stands beside adapters: neither is counted."""
    for key in keys:
        stated = reader.text(key)
        if stated.lower() not in ("", "false") and (adapters or stated not in (model, "true")):
            raise ObjectiveError(
                f"{reader.document.path.name} has a reference model of its own ({key} {cut(stated)}): memcalc rl "
                f"counts the policy's {'weights with its adapters off' if adapters else 'first weights'} alone."
            )


_HARMLESS = (
    "num_generations_eval", "ds3_gather_for_generation", "temperature", "top_p", "top_k", "min_p",
    "generation_kwargs", "generation_kwargs.", "chat_template_kwargs", "chat_template_kwargs.", "repetition_penalty",
    "cache_implementation", "vllm_structured_outputs_regex", "vllm_guided_decoding_regex", "vllm_server_base_url",
    "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "num_iterations", "epsilon",
    "epsilon_high", "delta", "importance_sampling_level", "reward_weights", "reward_funcs", "scale_rewards",
    "mask_truncated_completions", "log_completions", "num_completions_to_print", "log_unique_prompts",
    "dataset_mixture", "dataset_mixture.",
    "label_smoothing", "loss_weights", "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau", "ld_alpha",
    "desirable_weight", "undesirable_weight", "rpo_alpha", "center_rewards_coefficient", "simpo_gamma", "cpo_alpha",
    "normalize_advantages", "reward_clip_range", "dataset_num_proc", "generate_during_eval", "loss_type",
    "max_prompt_length", "max_completion_length", "precompute_ref_batch_size", "multi_objective_aggregation",
    "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "entropy_coef", "use_adaptive_entropy",
    "num_ppo_epochs", "force_use_ref_model", "ref_adapter_name", "model_adapter_name", "vllm_model_impl",
    "orpo_alpha", "reference_free", "disable_dropout", "stop_token", "sapo_temperature_neg", "sapo_temperature_pos",
)  # fmt: skip
_NOT_MODELLED = {
    "sync_ref_model": "the reference is a copy of its own that is averaged with the policy",
    "top_entropy_quantile": "the entropy of each token is kept for a mask",
    "use_weighting": "log-probabilities of the whole vocabulary are kept beside the loss",
    "cast_lm_head_to_fp32": "the head has a copy in fp32",
}


def read_roles(reader: ConfigReader) -> None:
    """Set what the config says of roles, the rollout and its lengths; nothing where it has none of these keys."""
    for name, key in (("rl.prompt", "max_prompt_length"), ("rl.response", "max_completion_length")):
        reader.set_integer(name, key)
    if reader.has(old := "max_prompt_length"):  # it went with 0.28: losses came in tiles with 1.15
        reader.note("note", "MC004", old, f"{old} is of TRL before 0.28: its logits are whole")
        reader.set("rl.framework", "trl@1.14", old)
    _set_prompt(reader)
    reader.set_integer("rl.samples", "num_generations")
    reader.set_integer("rl.accumulation", "steps_per_generation")
    reader.set_integer("rl.generation_batch", "generation_batch_size")
    if reader.has("use_vllm"):
        reader.set("rl.vllm", reader.flag("use_vllm"), "use_vllm")
    _set_place(reader)
    if reader.has("vllm_gpu_memory_utilization"):
        key = "vllm_gpu_memory_utilization"
        reader.set("rl.utilization", reader.number(key), key)
    reader.set_integer("rl.engine_tp", "vllm_tensor_parallel_size")
    if reader.has("vllm_enable_sleep_mode"):
        on = reader.flag("vllm_enable_sleep_mode")
        reader.set("rl.sleep", "2" if on else "0", "vllm_enable_sleep_mode")
    if reader.has("beta"):
        reader.set("rl.beta", reader.number("beta"), "beta")
    for key in ("precompute_ref_log_probs", "reference_free"):
        if reader.flag(key):
            reader.set("rl.reference", False, key)
    if reader.flag("use_liger_loss"):
        reader.set("rl.logits", "fused", "use_liger_loss")
    reader.harmless(*_HARMLESS)
    reader.not_modelled(_NOT_MODELLED, unless=(False, None, 0, 1.0, ""))


def _set_place(reader: ConfigReader) -> None:
    """Whether the engine has GPUs of its own, which from 1.0 on only ``vllm_mode: server`` says.

    From 0.16 to 0.29 a server is the default; 0.14 and 0.15 put the engine on ``vllm_device``, by default the GPU after
    the trainer's. ``max_prompt_length`` went with 0.28, ``vllm_max_model_len`` with 0.18 (trainer/grpo_config.py).
    """
    mode = reader.one_of("vllm_mode", {"colocate": False, "server": True})
    device = reader.text("vllm_device")
    old = next((key for key in ("max_prompt_length", "vllm_max_model_len") if reader.has(key)), "")
    if mode:
        reader.set("rl.apart", True, "vllm_mode")
    elif device and device != "cuda:0":
        reader.set("rl.apart", True, "vllm_device")
        reader.set("rl.engine_gpus", 1, "vllm_device")
    elif mode is None and not device and old and reader.flag("use_vllm"):
        message = f"{old} is of TRL before 0.28, where an engine has GPUs of its own unless vllm_mode is colocate"
        reader.note("note", "MC004", old, message, "vllm_mode: colocate")
        reader.set("rl.apart", True, old)


def _set_prompt(reader: ConfigReader) -> None:
    """The longest prompt, where the engine's longest sequence leaves no room for a longer one."""
    longest = reader.integer("vllm_max_model_length", low=1)
    response = reader.integer("max_completion_length", 512, low=1) or 512
    if longest is not None and not reader.has("max_prompt_length"):
        if longest <= response:
            raise reader.error("vllm_max_model_length", longest, "must be above max_completion_length")
        reader.set("rl.prompt", longest - response, "vllm_max_model_length")


def read_axolotl(reader: ConfigReader, keys: KeyTable, adapter: str) -> None:
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
        _axolotl_rollout(reader)
    reader.harmless(*keys.names("of_preferences", "of_rollout"), "vllm.", "rl_beta")
    reader.not_counted(keys.tables["of_trl"])


def _axolotl_rollout(reader: ConfigReader) -> None:
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


def read_swift(reader: ConfigReader, keys: KeyTable) -> str:
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
        _swift_rollout(reader)
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


def _swift_rollout(reader: ConfigReader) -> None:
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
