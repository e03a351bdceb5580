"""The keys of torchtitan's TOML and the day until which it took them.

Read from every commit that changed ``config_manager.py`` or ``config/job_config.py``, from the first of February 2024
to 73a0e6979 of February 2026, which is 0.2.2, the last release that reads TOML: 9810191bb replaced it by functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memcalc.convert.document import Document

__all__ = ["KEYS", "LAST", "REMOVED", "SPELLED", "spelling", "until"]

LAST = "2026-02-23"
"""The day on which TOML went."""

_NEWEST = """
    activation_checkpoint.debug activation_checkpoint.determinism_check activation_checkpoint.early_stop
    activation_checkpoint.memory_budget activation_checkpoint.mode
    activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns activation_checkpoint.preserve_rng_state
    activation_checkpoint.selective_ac_option activation_checkpoint.visualize_memory_budget_pareto
    checkpoint.async_mode checkpoint.create_seed_checkpoint checkpoint.enable
    checkpoint.enable_first_step_checkpoint checkpoint.enable_ft_dataloader_checkpoints
    checkpoint.exclude_from_loading checkpoint.export_dtype checkpoint.folder checkpoint.initial_load_in_hf
    checkpoint.initial_load_in_hf_quantized checkpoint.initial_load_model_only checkpoint.initial_load_path
    checkpoint.interval checkpoint.keep_latest_k checkpoint.last_save_in_hf checkpoint.last_save_model_only
    checkpoint.load_only checkpoint.load_step comm.init_timeout_seconds comm.mode comm.save_traces_file_prefix
    comm.save_traces_folder comm.trace_buf_size comm.train_timeout_seconds compile.backend compile.components
    compile.enable debug.deterministic debug.deterministic_warn_only debug.moe_force_load_balance debug.seed
    experimental.custom_args_module experimental.custom_import fault_tolerance.enable fault_tolerance.group_size
    fault_tolerance.min_replica_size fault_tolerance.process_group fault_tolerance.process_group_timeout_ms
    fault_tolerance.replica_id fault_tolerance.semi_sync_method job.config_file job.custom_config_module
    job.description job.dump_folder job.print_config job.save_config_file lr_scheduler.decay_ratio
    lr_scheduler.decay_type lr_scheduler.min_lr_factor lr_scheduler.total_steps lr_scheduler.warmup_steps
    memory_estimation.disable_fake_mode memory_estimation.enable metrics.disable_color_printing
    metrics.enable_tensorboard metrics.enable_wandb metrics.log_freq metrics.save_for_all_ranks
    metrics.save_tb_folder model.converters model.flavor model.hf_assets_path model.name
    model.print_after_conversion model.tokenizer_path optimizer.beta1 optimizer.beta2
    optimizer.early_step_in_backward optimizer.eps optimizer.implementation optimizer.lr optimizer.name
    optimizer.weight_decay parallelism.context_parallel_degree parallelism.context_parallel_load_balancer
    parallelism.context_parallel_rotate_method parallelism.data_parallel_replicate_degree
    parallelism.data_parallel_shard_degree parallelism.disable_loss_parallel
    parallelism.enable_async_tensor_parallel parallelism.expert_parallel_comm_backend
    parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree
    parallelism.fsdp_reshard_after_forward parallelism.module_fqns_per_model_part
    parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_expert_parallel_overlap
    parallelism.pipeline_parallel_first_stage_less_layers parallelism.pipeline_parallel_last_stage_less_layers
    parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_microbatch_size
    parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_schedule_csv
    parallelism.tensor_parallel_degree profiling.enable_memory_snapshot profiling.enable_profiling
    profiling.profile_freq profiling.profiler_active profiling.profiler_warmup
    profiling.save_memory_snapshot_folder profiling.save_traces_folder quantize.grouped_mm.float8.fqns
    quantize.grouped_mm.mx.fqns quantize.grouped_mm.mx.recipe_name quantize.linear.float8.emulate
    quantize.linear.float8.enable_fsdp_float8_all_gather quantize.linear.float8.filter_fqns
    quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp quantize.linear.float8.recipe_name
    quantize.linear.mx.filter_fqns quantize.linear.mx.mxfp8_dim1_cast_kernel_choice
    quantize.linear.mx.recipe_name training.dataloader.num_workers training.dataloader.persistent_workers
    training.dataloader.pin_memory training.dataloader.prefetch_factor training.dataset training.dataset_path
    training.dtype training.enable_cpu_offload training.gc_debug training.gc_freq training.global_batch_size
    training.local_batch_size training.max_norm training.mixed_precision_param training.mixed_precision_reduce
    training.seq_len training.steps validation.dataloader.num_workers validation.dataloader.persistent_workers
    validation.dataloader.pin_memory validation.dataloader.prefetch_factor validation.dataset
    validation.dataset_path validation.enable validation.freq validation.local_batch_size validation.seq_len
    validation.steps
"""
KEYS = frozenset(_NEWEST.split())
"""What 0.2.2 takes."""

_REMOVED = {
    "2024-02-28": """
        training.warmup_pct
    """,
    "2024-03-14": """
        training.enable_selective_ac
    """,
    "2024-03-15": """
        comm.timeout_seconds
    """,
    "2024-03-25": """
        training.sequence_parallel_degree
    """,
    "2024-04-04": """
        training.checkpoint_folder training.checkpoint_interval training.checkpoint_interval_type
    """,
    "2024-04-15": """
        profiling.profile_every_x_iter profiling.run_profiler
    """,
    "2024-05-21": """
        training.pipeline_parallel_degree
    """,
    "2024-07-01": """
        estimate.memory estimate.mode
    """,
    "2024-07-16": """
        training.fp8_linear
    """,
    "2024-07-17": """
        training.enable_fp8_linear training.enable_fsdp_fp8_all_gather
    """,
    "2024-07-30": """
        training.enable_float8_linear training.enable_fsdp_float8_all_gather
        training.float8_scaling_type_grad_output training.float8_scaling_type_input
        training.float8_scaling_type_weight training.precompute_float8_dynamic_scale_for_fsdp
    """,
    "2024-08-22": """
        experimental.pipeline_parallel_split_mode
    """,
    "2024-09-07": """
        experimental.torch_spmd
    """,
    "2024-09-10": """
        training.data_parallel_degree training.data_parallel_type
    """,
    "2024-12-20": """
        metrics.enable_color_printing training.enable_loss_parallel
    """,
    "2025-01-31": """
        float8.scaling_type_grad_output float8.scaling_type_input float8.scaling_type_weight
    """,
    "2025-02-15": """
        float8.enable_float8_linear
    """,
    "2025-02-24": """
        optimizer.fused
    """,
    "2025-02-27": """
        checkpoint.interval_type
    """,
    "2025-03-10": """
        metrics.disable_logging_from_checkpoint
    """,
    "2025-03-11": """
        training.warmup_steps
    """,
    "2025-03-18": """
        experimental.context_parallel_degree experimental.context_parallel_rotate_method
        experimental.enable_async_tensor_parallel experimental.enable_compiled_autograd
        experimental.pipeline_parallel_degree experimental.pipeline_parallel_microbatches
        experimental.pipeline_parallel_schedule experimental.pipeline_parallel_schedule_csv
        experimental.pipeline_parallel_split_points training.data_parallel_replicate_degree
        training.data_parallel_shard_degree training.disable_loss_parallel training.fsdp_reshard_after_forward
        training.tensor_parallel_degree
    """,
    "2025-03-19": """
        experimental.custom_model_path metrics.rank_0_only
    """,
    "2025-04-07": """
        parallelism.pipeline_parallel_microbatches
    """,
    "2025-04-17": """
        model.attn_mask_type model.use_flex_attn
    """,
    "2025-04-23": """
        model.norm_type
    """,
    "2025-06-05": """
        training.batch_size
    """,
    "2025-06-13": """
        checkpoint.model_weights_only
    """,
    "2025-07-20": """
        checkpoint.initial_load_model_weights_only checkpoint.last_save_in_safetensors_format
        checkpoint.last_save_model_weights_only
    """,
    "2025-07-24": """
        mx.use_fp8_dim1_cast_triton_kernel
    """,
    "2025-07-28": """
        float8.force_recompute_fp8_weight_in_bwd
    """,
    "2025-07-31": """
        lr_scheduler.lr_min
    """,
    "2025-08-05": """
        fault_tolerance.fragment_sync_delay fault_tolerance.fragment_update_alpha
        fault_tolerance.module_fqns_per_model_fragment fault_tolerance.num_fragments
        fault_tolerance.should_quantize fault_tolerance.sync_steps
    """,
    "2025-08-20": """
        memory_estimation.enabled training.compile
    """,
    "2025-08-22": """
        checkpoint.enable_checkpoint validation.enabled
    """,
    "2025-08-30": """
        job.use_for_integration_test
    """,
    "2025-09-26": """
        float8.emulate float8.enable_fsdp_float8_all_gather float8.filter_fqns float8.moe_fqns_prototype
        float8.precompute_float8_dynamic_scale_for_fsdp float8.recipe_name mx.filter_fqns mx.moe_fqns_prototype
        mx.mxfp8_dim1_cast_kernel_choice mx.recipe_name
    """,
    "2025-09-30": """
        quantize.dense.float8.emulate quantize.dense.float8.enable_fsdp_float8_all_gather
        quantize.dense.float8.filter_fqns quantize.dense.float8.precompute_float8_dynamic_scale_for_fsdp
        quantize.dense.float8.recipe_name quantize.dense.mx.filter_fqns
        quantize.dense.mx.mxfp8_dim1_cast_kernel_choice quantize.dense.mx.recipe_name quantize.moe.float8.fqns
        quantize.moe.mx.fqns
    """,
    "2025-10-13": """
        parallelism.pipeline_parallel_split_points
    """,
    "2025-10-14": """
        job.print_args
    """,
    "2025-10-21": """
        job.save_config_folder
    """,
    "2025-10-28": """
        parallelism.enable_compiled_autograd
    """,
    "2025-10-29": """
        training.debug_moe_force_load_balance training.deterministic training.seed
    """,
}
"""By the day on which a commit removed or renamed them."""
REMOVED = {key: day for day, keys in _REMOVED.items() for key in keys.split()}

SPELLED: dict[str, tuple[tuple[str, str], ...]] = {
    "training.local_batch_size": (("2025-06-05", "training.local_batch_size"), ("2024-02-23", "training.batch_size")),
    "parallelism.data_parallel_shard_degree": (
        ("2025-03-18", "parallelism.data_parallel_shard_degree"),
        ("2024-09-10", "training.data_parallel_shard_degree"),
        ("2024-02-23", "training.data_parallel_degree"),
    ),
    "parallelism.data_parallel_replicate_degree": (
        ("2025-03-18", "parallelism.data_parallel_replicate_degree"),
        ("2024-09-10", "training.data_parallel_replicate_degree"),
    ),
    "parallelism.fsdp_reshard_after_forward": (
        ("2025-03-18", "parallelism.fsdp_reshard_after_forward"),
        ("2025-02-06", "training.fsdp_reshard_after_forward"),
    ),
    "parallelism.tensor_parallel_degree": (
        ("2025-03-18", "parallelism.tensor_parallel_degree"),
        ("2024-03-25", "training.tensor_parallel_degree"),
        ("2024-02-23", "training.sequence_parallel_degree"),
    ),
    "parallelism.disable_loss_parallel": (
        ("2025-03-18", "parallelism.disable_loss_parallel"),
        ("2024-12-20", "training.disable_loss_parallel"),
    ),
    **{
        f"parallelism.{key}": (("2025-03-18", f"parallelism.{key}"), (day, f"experimental.{key}"))
        for key, day in (
            ("pipeline_parallel_degree", "2024-05-21"),
            ("pipeline_parallel_schedule", "2024-05-21"),
            ("pipeline_parallel_schedule_csv", "2024-11-19"),
            ("pipeline_parallel_split_points", "2024-05-21"),
            ("pipeline_parallel_microbatches", "2024-05-21"),
            ("context_parallel_degree", "2024-10-22"),
            ("context_parallel_rotate_method", "2024-12-11"),
            ("enable_async_tensor_parallel", "2024-06-26"),
            ("enable_compiled_autograd", "2024-07-18"),
        )
    },
    "compile.enable": (("2025-08-20", "compile.enable"), ("2024-02-23", "training.compile")),
    "training.global_batch_size": (("2025-06-05", "training.global_batch_size"),),
    "training.enable_cpu_offload": (("2024-10-28", "training.enable_cpu_offload"),),
    **{
        f"quantize.linear.float8.{key}": (
            ("2025-09-30", f"quantize.linear.float8.{key}"),
            ("2025-09-26", f"quantize.dense.float8.{key}"),
            (day, f"float8.{key}"),
        )
        for key, day in (
            ("recipe_name", "2025-02-27"),
            ("enable_fsdp_float8_all_gather", "2024-07-30"),
            ("emulate", "2025-05-28"),
        )
    },
}
"""By the name of 0.2.2: the days since which a setting has had its names, the newest first."""


def until(document: Document) -> tuple[str, str]:
    """The day until which torchtitan took all keys of a document, and the key that decides; unknown ones aside."""
    removed = [(day, key) for key, day in REMOVED.items() if _has(document.data, key)]
    return min(removed, default=(LAST, ""))


def _has(data: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(data, dict) or part not in data:
            return False
        data = data[part]
    return True


def spelling(document: Document, key: str) -> str:
    """How a document's torchtitan calls a setting; empty where it does not have it."""
    day, _ = until(document)
    return next((name for since, name in SPELLED.get(key, (("", key),)) if since < day), "")
