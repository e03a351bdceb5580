"""Names of torchtune 0.7.0 (bd2a0fc7c): builders of models, layers, optimizers, and keys by what they do to memory."""

from __future__ import annotations

from memcalc.convert.formats.optimizers import Optimizer

MODELS = {
    "llama2_7b": "llama-2-7b", "llama2_13b": "llama-2-13b", "llama2_70b": "llama-2-70b", "llama3_8b": "llama-3-8b",
    "llama3_70b": "llama-3-70b", "llama3_1_8b": "llama-3.1-8b", "llama3_1_70b": "llama-3.1-70b",
    "llama3_1_405b": "llama-3.1-405b", "llama3_3_70b": "llama-3.1-70b", "llama3_2_1b": "llama-3.2-1b",
    "llama3_2_3b": "llama-3.2-3b", "mistral_7b": "mistral-7b-v0.1", "gemma_2b": "gemma-2b", "gemma_7b": "gemma-7b",
    "gemma2_2b": "gemma-2-2b", "gemma2_9b": "gemma-2-9b", "gemma2_27b": "gemma-2-27b",
    "phi3_mini": "phi-3-mini-3.8b", "phi4_14b": "phi-4-14b", "qwen2_0_5b": "qwen2-0.5b", "qwen2_1_5b": "qwen2-1.5b",
    "qwen2_7b": "qwen2-7b", "qwen2_5_0_5b": "qwen2.5-0.5b", "qwen2_5_1_5b": "qwen2.5-1.5b",
    "qwen2_5_3b": "qwen2.5-3b", "qwen2_5_7b": "qwen2.5-7b", "qwen2_5_14b": "qwen2.5-14b",
    "qwen2_5_32b": "qwen2.5-32b", "qwen2_5_72b": "qwen2.5-72b", "qwen3_0_6b": "qwen3-0.6b",
    "qwen3_1_7b": "qwen3-1.7b", "qwen3_4b": "qwen3-4b", "qwen3_8b": "qwen3-8b", "qwen3_14b": "qwen3-14b",
    "qwen3_32b": "qwen3-32b", "smollm2_135m": "smollm2-135m", "smollm2_360m": "smollm2-360m",
    "smollm2_1_7b": "smollm2-1.7b",
}  # fmt: skip
"""By builder (models/*/_model_builders.py), without what says adapters or the kind of its training."""
LAYERS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "output_proj": "o"}
"""``lora_attn_modules``."""

_FOUR = "moments take 4 bits (torchao); counted with 8"
_AO = "torchao.optim", "torchao.prototype.low_bit_optim"
OPTIMIZERS = {
    "torch.optim.AdamW": Optimizer("adamw", "foreach"),
    "torch.optim.Adam": Optimizer("adamw", "foreach"),
    "torch.optim.SGD": Optimizer("sgd", "foreach"),
    "torch.optim.Adafactor": Optimizer("adafactor", "foreach"),
    "bitsandbytes.optim.AdamW": Optimizer("adamw", "loop"),
    "bitsandbytes.optim.AdamW8bit": Optimizer("adamw-8bit", "loop"),
    "bitsandbytes.optim.PagedAdamW": Optimizer("paged-adamw", "loop"),
    "bitsandbytes.optim.PagedAdamW32bit": Optimizer("paged-adamw", "loop"),
    "bitsandbytes.optim.PagedAdamW8bit": Optimizer("paged-adamw-8bit", "loop"),
    "bitsandbytes.optim.Lion": Optimizer("lion", "loop"),
    "bitsandbytes.optim.Lion8bit": Optimizer("lion-8bit", "loop"),
    **{f"{place}.AdamW8bit": Optimizer("adamw-8bit", "loop") for place in _AO},
    **{f"{place}.AdamW4bit": Optimizer("adamw-8bit", "loop", _FOUR) for place in _AO},
    **{f"{place}.AdamWFp8": Optimizer("adamw-8bit", "loop") for place in _AO},
    **{f"{place}._AdamW": Optimizer("adamw", "loop") for place in _AO},
    **{
        f"{place}.CPUOffloadOptimizer": Optimizer("adamw", "loop", "moments stay on the CPU; counted on the GPU")
        for place in _AO
    },
}
"""By component."""

NOT_MODELLED = {
    "enable_fp8_training": "matmuls in float8 keep other tensors (torchao)",
    "custom_sharded_layers": "embedding and head are gathered apart from the rest",
    "memory_efficient_fsdp_wrap": "embedding and head are gathered apart from the rest",
    "data_parallel_replicate_dim": "states are shared out over a part of the ranks (hybrid sharding)",
    "data_parallel_shard_dim": "states are shared out over a part of the ranks (hybrid sharding)",
    "quantizer": "weights are rounded in forward, with copies of their own (QAT)",
    "teacher_model": "a second model is held (knowledge distillation)",
    "ref_checkpointer": "a frozen reference model is held (DPO)",
    "ref_policy_checkpointer": "a frozen reference model is held (PPO)",
    "value_checkpointer": "a model of values is held (PPO)",
    "reward_checkpointer": "a model of rewards is held (PPO)",
    "grpo_samples": "samples are generated and compared (GRPO)",
    "resize_token_embeddings": "the embedding may grow",
}
HARMLESS = (
    "recipe", "output_dir", "checkpointer.", "device", "seed", "shuffle", "log_level", "resume_from_checkpoint",
    "metric_logger.", "log_every_n_steps", "log_peak_memory_stats", "epochs", "max_steps_per_epoch", "profiler.",
    "clip_grad_norm", "lr_scheduler.", "save_adapter_weights_only", "low_cpu_ram", "collate_fn",
    "cudnn_deterministic_mode", "enable_async_checkpointing", "profile_memory", "save_every_n_steps",
    "save_every_n_epochs", "activation_offloading_use_streams", "tensor_parallel_plan.", "tensor_parallel_plan",
    "context_parallel_rotate_method", "fp8_recipe_name", "fake_quant_after_n_steps", "quantizer.",
    "teacher_checkpointer.", "teacher_model.", "kd_loss.", "kd_ratio", "ref_checkpointer.", "ref_policy_checkpointer.",
    "value_checkpointer.", "reward_checkpointer.", "name", "data_parallel_shard_dim", "dist_backend",
    "use_distributed_state_dict", "debug_logging_enabled", "debug_num_samples_per_step", "dataloader.",
)  # fmt: skip
KNOWN = (
    *HARMLESS, *NOT_MODELLED, "tokenizer.max_seq_len", "batch_size", "batch_size_val", "gradient_accumulation_steps",
    "dtype", "compile", "enable_activation_checkpointing", "enable_activation_offloading", "optimizer_in_bwd",
    "fsdp_cpu_offload", "fsdp_reshard_after_forward", "tensor_parallel_dim", "context_parallel_dim", "ac_mode",
    "ac_option", "run_val_every_n_steps",
)  # fmt: skip
