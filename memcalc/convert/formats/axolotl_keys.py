"""Keys of axolotl 0.18.0 (067b021c8), with those that 0.19.0 added, by what they do to memory.

Sources: utils/schemas/*.py and integrations/*/args.py.
"""

from __future__ import annotations

from memcalc.convert.formats.optimizers import Optimizer

SIGNS = frozenset(
    ("datasets", "pretraining_dataset", "micro_batch_size", "sequence_len", "adapter", "rl", "dataset_prepared_path")
)
"""One of these beside ``base_model`` makes a config axolotl's; merge recipes have that key too."""

LIGER = ("rope", "rms_norm", "cross_entropy", "fused_linear_cross_entropy")
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
DEGREES = {
    "expert_parallel_size": "experts are shared out over ranks",
}

_FLASH = "weights are kept with a correction of their own (FlashOptim)"
OPTIMIZERS = {
    "optimi_adamw": Optimizer("adamw", "loop", "16-bit weights may have a compensation buffer (Kahan)"),
    "ao_adamw_4bit": Optimizer("adamw-8bit", "loop", "moments take 4 bits (torchao); counted with 8"),
    "ao_adamw_8bit": Optimizer("adamw-8bit", "loop"),
    "ao_adamw_fp8": Optimizer("adamw-8bit", "loop"),
    "adopt_adamw": Optimizer("adamw", "foreach"),
    "came_pytorch": Optimizer("adafactor", "loop", "a moment and a second factored one are kept (CAME)"),
    "muon": Optimizer("muon", "loop"),
    "dion": Optimizer("muon", "loop", "a low-rank factor is kept beside the momentum (Dion)"),
    "sinkgd": Optimizer("sgd", "loop", "gradients are normalised by rows and columns (SinkGD)"),
    "flash_adamw": Optimizer("adamw-8bit", "loop", _FLASH),
    "flash_adam": Optimizer("adamw-8bit", "loop", _FLASH),
    "flash_sgd": Optimizer("sgd-momentum", "loop", _FLASH),
    "flash_sgdw": Optimizer("sgd-momentum", "loop", _FLASH),
    "flash_lion": Optimizer("lion-8bit", "loop", _FLASH),
    "q_galore_adamw8bit": Optimizer("adamw-8bit", "loop", "gradients are projected to a low rank (Q-GaLore)"),
}
"""axolotl's own names (enums.py, CustomSupportedOptimizers; core/builders/base.py)."""

NOT_MODELLED = {
    "fp8": "matmuls in float8 keep other tensors (Accelerate, torchao)",
    "fp8_enable_fsdp_float8_all_gather": "FSDP gathers in float8",
    "fp8_config": "float8 as told in detail (0.19)",
    "ple_cpu_offload": "embeddings of each block wait in host memory (0.19)",
    "reward_model": "a head with one output, and pairs of samples",
    "process_reward_model": "a head with two outputs a token",
    "qat": "weights are rounded in forward, with copies of their own (QAT)",
    "model_quantization_config": "weights are stored in MXFP4 or FP8",
    "quantize_moe_experts": "experts are stored in fewer bits",
    "unfrozen_parameters": "parameters that match nothing are frozen; all are counted as trained",
    "relora": "adapters are merged and begun again",
    "lisa_n_layers": "blocks are frozen in turns; all are counted as trained",
    "peft_use_dora": "DoRA keeps the norms of the merged weights",
    "peft_layers_to_transform": "only some blocks have adapters; all are counted",
    "peft_trainable_token_indices": "single rows of the embedding are trained",
    "peft.loftq_config.loftq_bits": "LoftQ's weights are prepared by themselves",
    "lora_target_parameters": "adapters on parameters that belong to no linear layer",
    "lora_rank_pattern": "adapters have several ranks; counted with lora_r",
    "selective_checkpointing": "outputs of attention are kept by recomputation; counted as computed again",
    "layer_offloading": "frozen blocks wait in host memory",
    "tiled_mlp": "the MLP runs in parts of the sequence",
    "fp32_norms": "norms stay in fp32",
    "overrides_of_model_config": "the model is not the preset",
    "model_config": "the model may not be the preset",
    "resize_token_embeddings_to_32x": "the embedding may grow by up to 31 rows",
    "use_pose": "positions are skipped",
    "max_memory": "a model that exceeds it is spread out or offloaded",
    "gpu_memory_limit": "a model that exceeds it is spread out or offloaded",
    "flash_attn_cross_entropy": "the loss is flash-attention's kernel",
    "flash_optimum": "modules are replaced by BetterTransformer's",
    "trainer_cls": "a Trainer of its own",
    "use_eaft": "the loss keeps the largest logits besides",
    "experts_implementation": "experts run by other kernels",
    "use_kernels": "modules are replaced by the Hub's kernels",
    "use_onebitllms": "linear layers hold one-bit weights",
    "deepcompile": "DeepSpeed's DeepCompile schedules gathers itself",
    "neftune_noise_alpha": "noise as large as the embedding's output",
    "auto_find_batch_size": "a micro-batch that does not fit is halved and tried again",
    "kd_trainer": "the teacher's probabilities come with the data",
    "optim_target_modules": "only these layers are projected or trained by the optimizer",
    "generate_samples": "generation while training runs needs a cache",
    "gemma4_hybrid_attn_impl": "attention differs between blocks",
}
HARMLESS = (
    "strict", "resume_from_checkpoint", "auto_resume_from_checkpoints", "mean_resizing_embeddings",
    "shrink_embeddings", "reinit_weights", "center_rewards_coefficient", "num_labels", "dpo_use_weighting",
    "dpo_label_smoothing", "precompute_ref_log_probs", "dpo_use_liger_kernel", "dpo_padding_free", "dpo_loss_type",
    "dpo_loss_weights", "datasets", "test_datasets", "shuffle_merged_datasets", "shuffle_before_merging_datasets",
    "dataset_prepared_path", "dataset_shard_num", "dataset_shard_idx", "skip_prepare_dataset",
    "num_dataset_shards_to_save", "pretraining_dataset", "pretraining_dataset.", "dataset_processes",
    "dataset_num_proc", "dataset_exact_deduplication", "dataset_keep_in_memory", "dataloader_pin_memory",
    "dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_drop_last", "accelerator_config.",
    "remove_unused_columns", "push_dataset_to_hub", "hf_use_auth_token", "device", "device_map", "world_size",
    "local_rank", "ddp", "seed", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "do_causal_lm_eval",
    "eval_causal_lm_metrics", "do_bench_eval", "bench_dataset", "bench_split", "metric_for_best_model",
    "greater_is_better", "loss_watchdog_threshold", "loss_watchdog_patience", "gc_steps", "torch_empty_cache_steps",
    "gc_collect_steps", "freeze_mm_modules", "excess_length_strategy", "eval_sequence_len", "min_sample_len",
    "max_prompt_len", "sample_packing_group_size", "sample_packing_bin_size", "sample_packing_sequentially",
    "sample_packing_mp_start_method", "eval_sample_packing", "pad_to_multiple_of", "curriculum_sampling",
    "multipack_real_batches", "batch_flattening", "pose_split_on_token_ids", "pose_max_context_len",
    "pose_num_chunks", "pretrain_multipack_buffer_size", "pretrain_multipack_attn", "pretraining_sample_concatenation",
    "streaming", "streaming_multipack_buffer_size", "flex_attn_compile_kwargs.", "large_head_attention",
    "flash_attn_d512", "sdpa_varlen", "fused_attn_kernel", "flash_attn_fuse_mlp", "scaling_softmax",
    "scaling_softmax_factor", "scaling_softmax_bias", "chunked_cross_entropy_num_chunks", "eaft_alpha", "eaft_k",
    "tiled_mlp_num_shards", "tiled_mlp_use_original_mlp", "llama4_linearized_experts", "fp32_norm_classes",
    "fsdp_final_state_dict_type", "heads_k_stride", "ring_attn_func", "special_tokens.", "special_tokens", "tokens",
    "added_tokens_overrides.", "torch_compile_backend", "torch_compile_mode", "torch_compile_options.", "max_steps",
    "warmup_steps", "warmup_ratio", "eval_steps", "evals_per_epoch", "eval_strategy", "save_steps", "saves_per_epoch",
    "save_strategy", "save_total_limit", "save_first_step", "logging_steps", "early_stopping_patience",
    "load_best_model_at_end", "save_only_model", "use_tensorboard", "profiler_steps", "profiler_steps_start",
    "include_tokens_per_second", "include_tkps", "orpo_alpha", "simpo_gamma", "cpo_alpha", "kto_desirable_weight",
    "kto_undesirable_weight", "low_cpu_mem_usage", "chat_template", "chat_template_jinja",
    "chat_template_kwargs.", "eot_tokens", "default_system_message", "fix_untrained_tokens", "is_preprocess",
    "preprocess_iterable", "total_num_tokens", "total_supervised_tokens", "sample_packing_eff_est",
    "axolotl_config_path", "is_falcon_derived_model", "is_llama_derived_model", "is_mistral_derived_model",
    "is_qwen_derived_model", "num_generation_samples", "generation_max_new_tokens", "generation_temperature",
    "generation_top_p", "generation_top_k", "generation_prompt_ratio", "generation_do_sample", "base_model_config",
    "cls_model_config", "tokenizer_config", "tokenizer_use_fast", "tokenizer_legacy", "tokenizer_use_mistral_common",
    "tokenizer_type", "processor_type", "processor_kwargs.", "tokenizer_save_jinja_files", "trust_remote_code",
    "experimental_skip_move_to_device", "model_quantization_config_kwargs.", "output_dir", "hub_model_id",
    "hub_strategy", "hub_revision", "save_safetensors", "model_type", "revision_of_model", "model_revision",
    "lora_model_dir", "lora_alpha", "lora_fan_in_fan_out", "lora_alpha_pattern.", "peft_layers_pattern",
    "peft_use_rslora", "peft_init_lora_weights", "peft_ensure_weight_tying", "peft_layer_replication",
    "qlora_sharded_model_loading", "loraplus_lr_ratio", "loraplus_lr_embedding", "merge_lora", "merge_method",
    "relora_prune_ratio", "relora_prune_method", "relora_cpu_offload", "jagged_restart_steps",
    "jagged_restart_warmup_steps", "jagged_restart_anneal_steps", "train_on_inputs", "group_by_length",
    "learning_rate", "embedding_lr", "embedding_lr_scale", "weight_decay", "optim_args", "optim_args.",
    "lr_scheduler", "lr_scheduler_kwargs.", "lr_quadratic_warmup", "cosine_min_lr_ratio", "cosine_constant_lr_ratio",
    "lr_div_factor", "lr_groups", "adam_epsilon", "adam_epsilon2", "adam_beta1", "adam_beta2", "adam_beta3",
    "dion_lr", "dion_momentum", "dion_rank_fraction", "dion_rank_multiple_of", "qgalore_rank",
    "qgalore_update_proj_gap", "qgalore_scale", "qgalore_proj_type", "qgalore_proj_quant", "qgalore_proj_bits",
    "qgalore_proj_group_size", "qgalore_cos_threshold", "qgalore_gamma_proj", "qgalore_queue_size", "max_grad_norm",
    "num_epochs", "lisa_step_interval", "lisa_layers_attribute", "use_mlflow", "mlflow_tracking_uri",
    "mlflow_experiment_name", "mlflow_run_name", "hf_mlflow_log_artifacts", "use_wandb", "wandb_name", "wandb_run_id",
    "wandb_mode", "wandb_project", "wandb_entity", "wandb_watch", "wandb_log_model", "use_comet", "comet_api_key",
    "comet_workspace", "comet_project_name", "comet_experiment_key", "comet_mode", "comet_online",
    "comet_experiment_config.", "gradio_title", "gradio_share", "gradio_server_name", "gradio_server_port",
    "gradio_max_new_tokens", "gradio_temperature", "use_ray", "ray_run_name", "ray_num_workers",
    "resources_per_worker.", "use_otel_metrics", "otel_metrics_host", "otel_metrics_port", "use_trackio",
    "trackio_project_name", "trackio_run_name", "trackio_space_id", "image_size", "image_resize_algorithm",
    "role_boundaries", "rope_scaling.", "noisy_embedding_alpha", "dpo_beta", "evaluation_strategy",
    "eval_table_size", "eval_max_new_tokens", "dpo_use_logits_to_keep", "dpo_generate_during_eval", "dpo_norm_loss",
    "rpo_alpha", "liger_rms_norm_gated", "liger_layer_norm", "liger_swiglu", "liger_glu_activation",
    "liger_use_token_scaling", "spectrum_top_fraction", "spectrum_model_name", "dynamic_checkpoint.", "quantization.",
    "gptq_disable_exllama", "plugins", "use_swanlab", "swanlab_project", "swanlab_experiment_name",
    "swanlab_description", "swanlab_mode", "swanlab_workspace", "lm_eval_tasks", "lm_eval_batch_size",
    "lm_eval_post_train", "lm_eval_model", "torchdistx_path", "ddp_find_unused_parameters", "lora_on_cpu",
    "embeddings_skip_upcast",
    "kd_ce_alpha", "kd_alpha", "kd_temperature", "kd_beta", "peft.", "qat.", "model_kwargs.",
)  # fmt: skip
"""Data, schedules, names, logs, checkpoints: nothing that changes a byte on a GPU while training runs."""
WITHOUT_ADAPTER = (
    "lora_r", "lora_dropout", "lora_target_linear", "lora_target_modules", "lora_modules_to_save",
    "peft_autocast_adapter_dtype", "bnb_config_kwargs.", *LORA_KERNELS,
)  # fmt: skip
"""Without an adapter these do nothing."""
KNOWN = (*HARMLESS, *NOT_MODELLED, *DEGREES, *LORA_KERNELS, *(f"liger_{name}" for name in LIGER))
