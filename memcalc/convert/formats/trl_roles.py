"""Arguments of TRL's trainers of preferences and rewards, beside those of the Trainer: roles, rollout, lengths.

TRL 1.10 (f2cd5771): trainer/grpo_config.py, rloo_config.py, dpo_config.py, kto_config.py, reward_config.py,
experimental/orpo; generation/vllm_generation.py. Which of them trains may be said by a script's name alone, so that all
are read of any config, and what follows from the algorithm is the merged job's (:mod:`memcalc.preflight.roles`).
"""

from __future__ import annotations

from memcalc.convert.config import ConfigReader

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
