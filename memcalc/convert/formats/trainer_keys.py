"""Names of the Trainer's arguments: Transformers 5.23 (training_args.py, trainer_optimizer.py), TRL 1.16, PEFT 0.21."""

from __future__ import annotations

__all__ = ["HARMLESS", "MODULES", "NOT_MODELLED", "SCRIPT", "SIGNS", "TRL_SIGNS"]

HARMLESS = (
    "output_dir", "overwrite_output_dir", "do_train", "do_eval", "do_predict", "num_train_epochs", "max_steps",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs.", "lr_scheduler_kwargs", "warmup_steps",
    "warmup_ratio", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim_args",
    "optim_target_modules", "average_tokens_across_devices", "bf16_full_eval", "fp16_full_eval", "tf32", "use_cache",
    "torch_empty_cache_steps", "logging_strategy", "logging_steps", "logging_first_step", "logging_dir",
    "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "include_tokens_per_second",
    "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "eval_steps", "eval_delay", "eval_on_start",
    "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "batch_eval_metrics",
    "include_for_metrics", "prediction_loss_only", "save_only_model", "save_strategy", "save_steps",
    "save_on_each_node", "save_total_limit", "save_safetensors", "enable_jit_checkpoint", "push_to_hub", "hub_token",
    "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "ignore_data_skip", "restore_callback_states_from_checkpoint",
    "full_determinism", "seed", "data_seed", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order", "remove_unused_columns", "label_names",
    "length_column_name", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_backend",
    "ddp_timeout", "ddp_static_graph", "debug", "skip_memory_metrics", "resume_from_checkpoint", "local_rank",
    "use_cpu", "accelerator_config",
    "accelerator_config.split_batches", "accelerator_config.dispatch_batches", "accelerator_config.even_batches",
    "accelerator_config.use_seedable_sampler", "accelerator_config.non_blocking", "torch_compile_mode",
)  # fmt: skip
SCRIPT = (
    "config_name", "tokenizer_name", "tokenizer_name_or_path", "cache_dir", "use_fast_tokenizer", "model_revision",
    "token", "trust_remote_code", "low_cpu_mem_usage", "dataset_name", "dataset_config", "dataset_config_name",
    "dataset_train_split", "dataset_test_split", "dataset_streaming", "dataset_text_field", "dataset_num_proc",
    "dataset_kwargs.", "dataset_batch_size", "datasets.", "datasets", "streaming", "train_file", "validation_file",
    "test_file", "max_train_samples", "max_eval_samples", "validation_split_percentage", "preprocessing_num_workers",
    "overwrite_cache", "keep_linebreaks", "config_overrides", "model_type", "lora_alpha", "lora_task_type",
    "lora_bias", "use_rslora", "chat_template_path", "chat_template", "eos_token", "pad_token", "truncation_mode",
    "shuffle_dataset", "pad_to_multiple_of", "completion_only_loss", "assistant_only_loss", "eval_packing",
    "ignore_bias_buffers", "test_split_size", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "data_path",
    "ignore_mismatched_sizes", "packing_strategy", "padding_free", "loss_type", "learning_rate_scheduler",
)  # fmt: skip
"""Arguments of Transformers' and TRL's own scripts that change no byte of a training step."""
NOT_MODELLED = {
    "neftune_noise_alpha": "noise as large as the embedding's output stands in the forward",
    "label_smoothing_factor": "the logits go through a second log-softmax",
    "parallelism_config": "degrees of a device mesh",
    "router_aux_loss_coef": "the router's logits of all blocks are kept for their loss",
    "use_dora": "a magnitude for each output, and weights that are put together (DoRA)",
    "lora_target_parameters": "adapters on parameters that are no layers",
    "bnb_4bit_quant_storage": "how 4-bit weights are stored, and so sharded",
}
SIGNS = frozenset({
    "per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size", "num_train_epochs",
    "warmup_steps", "save_strategy", "eval_strategy", "logging_steps", "lr_scheduler_type", "output_dir", "optim",
    "bf16", "fp16", "gradient_checkpointing", "activation_checkpointing", "learning_rate", "deepspeed", "fsdp",
    "fsdp_config", "use_liger_kernel", "torch_compile", "do_train", "report_to", "model_name_or_path",
})  # fmt: skip
"""Two of them make a config the Trainer's."""
TRL_SIGNS = frozenset({
    "max_length", "packing", "packing_strategy", "padding_free", "dataset_text_field", "assistant_only_loss",
    "completion_only_loss", "use_peft", "lora_r", "lora_target_modules", "dataset_train_split", "eval_packing",
    "activation_offloading", "chat_template_path", "use_bnb_nested_quant",
})  # fmt: skip
MODULES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "out_proj": "o", "qkv_proj": "qkv",
    "query_key_value": "qkv", "c_attn": "qkv", "wqkv": "qkv", "gate_proj": "gate", "up_proj": "up",
    "down_proj": "down", "gate_up_proj": "gate_up", "fc1": "up", "fc2": "down", "dense_h_to_4h": "up",
    "dense_4h_to_h": "down", "q_a_proj": "q_a", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a", "kv_b_proj": "kv_b",
    "lm_head": "head", "embed_tokens": "embedding", "wte": "embedding", "all-linear": "all-linear",
}  # fmt: skip
"""Names of Transformers' layers, and memcalc's."""
