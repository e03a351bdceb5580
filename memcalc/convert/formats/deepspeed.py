"""DeepSpeed's JSON, as DeepSpeed 0.19 reads it (runtime/config.py, runtime/constants.py, runtime/zero/config.py)."""

from __future__ import annotations

from typing import Any

from memcalc.convert.config import Config, Reading
from memcalc.convert.document import Document
from memcalc.convert.formats.base import Format
from memcalc.convert.job import Job

_OPTIMIZERS = {
    "adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd", "muon": "muon", "lamb": "adamw",
    "onebitadam": "adamw", "zerooneadam": "adamw", "onebitlamb": "adamw", "muadam": "adamw", "muadamw": "adamw",
    "musgd": "sgd", "adagrad": "sgd-momentum",
}  # fmt: skip
"""By the number of states each keeps (runtime/engine.py, _configure_basic_optimizer)."""
_EXTRA_STATE = {"onebitadam", "zerooneadam", "onebitlamb", "lamb"}
"""Those that keep error feedback or norms besides the two moments."""
_TITLES = {"adamw": "AdamW", "lion": "Lion", "sgd": "SGD", "sgd-momentum": "SGD", "muon": "Muon"}
_DTYPES = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16",
    "float16": "fp16", "half": "fp16", "torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16",
}  # fmt: skip
_DEVICES = {"none": "", "cpu": "cpu", "nvme": "nvme"}
_SIGNS = frozenset(
    ["zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer"]
)
_SIZES = {
    "reduce_bucket_size": "strategy.reduce_bucket_size",
    "stage3_prefetch_bucket_size": "strategy.zero_prefetch_bucket",
    "stage3_param_persistence_threshold": "strategy.persistence_threshold",
    "stage3_max_live_parameters": "strategy.max_live_parameters",
    "sub_group_size": "strategy.sub_group_size",
}
"""Of `zero_optimization`: counts of elements, and the field of memcalc that has them."""
_HARMLESS = (
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "gradient_clipping", "scheduler.",
    "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "checkpoint.", "aio.", "flops_profiler.", "comms_logger.",
    "tensorboard.", "wandb.", "csv_monitor.", "comet.", "autotuning.", "log_level", "timers.",
    "data_types.param_dtype", "communication_data_type", "seq_parallel_communication_data_type", "disable_allgather",
    "use_data_before_expert_parallelism", "vocabulary_size", "managed_gradient_accumulation", "use_node_local_storage",
    "zero_optimization.reduce_scatter", "zero_optimization.round_robin_gradients",
    "zero_optimization.allgather_partitions", "zero_optimization.ignore_unused_parameters",
    "zero_optimization.load_from_fp32_weights", "zero_optimization.elastic_checkpoint",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save", "zero_optimization.log_trace_cache_warnings",
    "zero_optimization.stage3_max_reuse_distance", "zero_optimization.model_persistence_threshold",
    "zero_optimization.memory_efficient_linear", "zero_optimization.override_module_apply",
    "zero_optimization.pipeline_loading_checkpoint", "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization.contiguous_gradients", "zero_optimization.allgather_bucket_size",
    "zero_optimization.use_all_reduce_for_fetch_params", "fp16.loss_scale", "fp16.auto_cast", "fp16.hysteresis",
    "fp16.loss_scale_window",
    "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads",
    "fp16.min_loss_scale", "fp16.initial_scale_power", "fp16.consecutive_hysteresis",
    "bf16.check_overflow", "bf16.check_grad_overflow", "bf16.immediate_grad_update", "disable_python_gc",
    "checkpoint", "datastates_ckpt.", "zero_optimization.compute_grad_norm", "zero_optimization.legacy_stage1",
    "zero_optimization.enable_sanity_checks", "zero_optimization.leaf_module.",
    "zero_optimization.stage3_model_persistence_threshold", "zero_optimization.parameter_alignment",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params",
    "zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.param_persistence_threshold",
    "data_types.buffer_dtype", "data_types.keep_in_fp32_modules", "optimizer.params.", "optimizer.legacy_fusion",
    "torch_autocast.lower_precision_safe_modules", "activation_checkpointing.number_checkpoints",
    "activation_checkpointing.contiguous_memory_optimization", "activation_checkpointing.profile",
    "activation_checkpointing.synchronize_checkpoint_boundary",
)  # fmt: skip
_REMOVED = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "sparse_attention", "eigenvalue",
    "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop",
    "zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.zeropp_loco_param",
)  # fmt: skip
"""What 0.19 refuses at its start (runtime/config.py, _reject_removed_config_keys)."""
_NOT_MODELLED = {
    "zero_optimization.save_muon_momentum_buffer_in_memory": "Muon's momentum stays on the GPU",
    "zero_optimization.zero_hpz_partition_size": "a second copy of the shards within each group (ZeRO++ hpZ)",
    "zero_optimization.zero_quantized_weights": "gathers in int8 need buffers of their own (ZeRO++)",
    "zero_optimization.zero_quantized_nontrainable_weights": "frozen weights are stored in int8 (ZeRO++)",
    "zero_optimization.zero_quantized_gradients": "reductions in int8 need buffers of their own (ZeRO++)",
    "zero_optimization.zenflow": "a part of the gradients is updated on the GPU (ZenFlow)",
    "zero_optimization.stage3_module_granularity_threshold": "small modules are gathered together",
    "zero_optimization.stage3_allgather_sequential": "parameters are gathered one by one, without a bucket",
    "data_efficiency": "sequence lengths or layers vary while training runs",
    "hybrid_engine": "inference needs memory of its own",
    "weight_quantization": "weights are stored in fewer bits",
    "compile": "DeepCompile schedules gathers itself",
    "expert_parallel": "experts are shared out over ranks",
    "pipeline": "the pipeline's own options",
    "sequence_parallel_size": "attention is shared out over ranks (Ulysses)",
}


def read(document: Document) -> Config:
    """Return what a DeepSpeed JSON says of a job."""
    reading = Reading(document, "deepspeed", "DeepSpeed 0.19")
    reading.say("engine", "deepspeed", "zero_optimization")
    _batch(reading)
    _precision(reading)
    _zero(reading)
    _rest(reading)
    reading.harmless(*_HARMLESS)
    reading.not_modelled(_NOT_MODELLED, unless=(False, None, 0, 1, -1, "", "none"))
    for key in _REMOVED:
        if reading.has(key):
            message = f"{key} is refused by DeepSpeed 0.19; what an older release does with it is not counted"
            reading.note("warning", "MC002", key, message)
    return reading.finish()


def _batch(reading: Reading) -> None:
    for key, word in (
        ("train_micro_batch_size_per_gpu", "micro_batch"),
        ("gradient_accumulation_steps", "accumulation"),
        ("train_batch_size", "train_batch"),
    ):
        value = reading.whole(key, low=1)
        if value is not None:
            reading.say(word, value, key)
        elif word == "accumulation" and _alone(reading) and not reading.has(key):
            reading.say(word, 1, key)  # config.py, _set_batch_related_parameters


def _alone(reading: Reading) -> bool:
    """Whether the micro-batch is said, and not the whole."""
    return reading.has("train_micro_batch_size_per_gpu") and not reading.has("train_batch_size")


def _precision(reading: Reading) -> None:
    """`bf16` and `fp16` give 16-bit weights with an fp32 master; `torch_autocast` leaves the weights as loaded."""
    narrow = [name for name in ("bf16", "bfloat16", "fp16") if _enabled(reading, name)]
    if len(narrow) > 1:
        raise reading.wrong(f"{narrow[-1]}.enabled", True, f"{narrow[0]}.enabled is true too, and DeepSpeed takes one")
    cast = _enabled(reading, "torch_autocast")
    if cast:
        dtype = reading.one_of("torch_autocast.dtype", _DTYPES, "bf16")
        reading.say("precision", f"{dtype}-autocast", "torch_autocast.enabled")
    elif not narrow:
        # what is auto or absent the Trainer and Accelerate fill in (set_mixed_precision of Accelerate's plugin)
        if reading.raw("bf16.enabled") != "auto" and reading.raw("fp16.enabled") != "auto":
            reading.say("mixed", "no", "bf16.enabled")
    else:
        name = "bf16" if narrow[0] == "bfloat16" else narrow[0]
        states = reading.flag(f"{narrow[0]}.bf16_optimizer_states")
        whole = reading.flag(f"{narrow[0]}.{name}_master_weights_and_grads")
        if states and whole:
            reading.say("precision", name, f"{narrow[0]}.enabled")
        else:
            reading.say("mixed", name, f"{narrow[0]}.enabled")
            keys = [
                key for key, on in (("bf16_optimizer_states", states), ("bf16_master_weights_and_grads", whole)) if on
            ]
            says = "only a part of the optimizer's states is 16-bit"
            reading.not_modelled({f"{narrow[0]}.{key}": says for key in keys})
    width = reading.one_of("data_types.grad_accum_dtype", _DTYPES)
    if width is not None:
        reading.say("strategy.grad_accum_dtype", width, "data_types.grad_accum_dtype")


def _enabled(reading: Reading, name: str) -> bool:
    return reading.raw(f"{name}.enabled") != "auto" and bool(reading.flag(f"{name}.enabled"))


def _zero(reading: Reading) -> None:
    stage = reading.whole("zero_optimization.stage", 0)
    if stage not in {0, 1, 2, 3}:
        raise reading.wrong("zero_optimization.stage", stage, "must be 0, 1, 2 or 3")
    reading.say("zero", stage, "zero_optimization.stage")
    auto = tuple(word for key, word in _SIZES.items() if reading.raw(f"zero_optimization.{key}") == "auto")
    if auto:
        reading.say("filled_in", auto, "zero_optimization")
    for key, word in _SIZES.items():
        value = reading.whole(f"zero_optimization.{key}")
        if value is not None:
            reading.say(word, value, f"zero_optimization.{key}")
    if reading.has("zero_optimization.overlap_comm"):
        overlap = reading.flag("zero_optimization.overlap_comm")
        reading.say("strategy.overlap_comm", overlap, "zero_optimization.overlap_comm")
    _offload(reading)


def _offload(reading: Reading) -> None:
    """Deprecated truth values of before 0.5 stand for the CPU."""
    zero = "zero_optimization"
    parts = (("optimizer", "offload_optimizer", "cpu_offload"), ("params", "offload_param", "cpu_offload_param"))
    found = {
        part: (f"{zero}.{table}.device", _device(reading, f"{zero}.{table}", f"{zero}.{old}"))
        for part, table, old in parts
    }
    checkpoints = "activation_checkpointing.cpu_checkpointing"
    found["activations"] = (checkpoints, "cpu" if reading.flag(checkpoints) else "")
    found = {part: (key, device) for part, (key, device) in found.items() if device}
    if found:
        key = next(iter(found.values()))[0]
        tiers = {device for _, device in found.values()}
        reading.say("offload", tuple(found), key)
        reading.say("offload_to", "nvme" if "nvme" in tiers else "cpu", key)
        if len(tiers) > 1:
            says = "what goes to the CPU and what goes to NVMe is counted as one tier; the GPU's share is the same"
            reading.note("warning", "MC002", key, says)


def _device(reading: Reading, key: str, old: str) -> str:
    device: str = reading.one_of(f"{key}.device", _DEVICES, "") or ("cpu" if reading.flag(old) else "")
    ratio = reading.number(f"{key}.ratio", 1.0)
    if device and ratio is not None and ratio < 1.0:
        reading.not_modelled({f"{key}.ratio": "only a part of the states leaves the GPU; here all of them do"})
    reading.not_modelled({f"{key}.super_offload": "a part of the update runs on the GPU (SuperOffload)"})
    reading.harmless(f"{key}.")
    return device


def _rest(reading: Reading) -> None:
    if reading.flag("activation_checkpointing.partition_activations"):
        reading.say("strategy.partition_activations", True, "activation_checkpointing.partition_activations")
    tensor = reading.whole("tensor_parallel.autotp_size", 0)
    if tensor:
        reading.say("tp", tensor, "tensor_parallel.autotp_size")
    reading.harmless("tensor_parallel.")
    name = reading.text("optimizer.type").lower()
    if not name:
        return
    if name not in _OPTIMIZERS:
        says = "an optimizer from outside DeepSpeed; its states are counted as AdamW's"
        reading.note("warning", "MC002", "optimizer.type", f"optimizer.type {name!r}: {says}")
    momentum = name in {"sgd", "musgd"} and bool(reading.number("optimizer.params.momentum", 0.0))
    reading.say("optimizer", "sgd-momentum" if momentum else _OPTIMIZERS.get(name, "adamw"), "optimizer.type")
    if name in _EXTRA_STATE:
        reading.not_modelled({"optimizer.type": "it keeps buffers besides the two moments"})
    key = "optimizer.params.torch_adam"
    own = name in {"adam", "adamw", "lion", "lamb", "muon"}  # get_optimizer_configuration: FusedAdam, else torch.optim
    reading.say("optimizer_impl", "foreach" if reading.flag(key) or not own else "fused", "optimizer.type")


def write(job: Job) -> dict[str, Any]:
    """Return the config that runs a job. What a DeepSpeed JSON cannot say stands in the code that it belongs to."""
    plan = job.strategy
    job.must(
        job.framework == "deepspeed", "framework", job.framework, "DeepSpeed JSON is written for --framework deepspeed"
    )
    fields: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        **_precision_fields(job),
        "zero_optimization.stage": plan.zero,
        **{f"zero_optimization.{key}": getattr(plan, word.split(".")[1]) for key, word in _SIZES.items()},
        "zero_optimization.overlap_comm": plan.overlap_comm,
    }
    for part, key in (("optimizer", "offload_optimizer"), ("params", "offload_param")):
        if part in plan.offload:
            job.must(plan.offload_to in _DEVICES, "offload-to", plan.offload_to, "DeepSpeed offloads to cpu or nvme")
            fields[f"zero_optimization.{key}.device"] = plan.offload_to
            fields[f"zero_optimization.{key}.pin_memory"] = True
    if "activations" in plan.offload:
        fields["activation_checkpointing.cpu_checkpointing"] = True
    if plan.partition_activations:
        fields["activation_checkpointing.partition_activations"] = True
    fields["optimizer.type"] = _TITLES.get(plan.optimizer)
    job.must(plan.optimizer in _TITLES, "optimizer", plan.optimizer, f"DeepSpeed's own are {', '.join(_TITLES)}")
    if plan.optimizer == "sgd-momentum":
        fields["optimizer.params.momentum"] = 0.9
    if plan.optimizer_impl == "foreach":
        fields["optimizer.params.torch_adam"] = True
    fields["data_types.grad_accum_dtype"] = plan.grad_accum_dtype or None
    fields["tensor_parallel.autotp_size"] = plan.tp if plan.tp > 1 else None
    return fields


def _precision_fields(job: Job) -> dict[str, Any]:
    dtype, _, kind = job.strategy.precision.partition("-")
    if job.strategy.precision == "fp32":
        return {"bf16.enabled": False}
    if kind == "autocast":
        return {"torch_autocast.enabled": True, "torch_autocast.dtype": {"bf16": "bfloat16", "fp16": "float16"}[dtype]}
    if kind == "mixed":
        return {f"{dtype}.enabled": True}
    return {"bf16.enabled": True, "bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}


FORMAT = Format(
    name="deepspeed",
    title="DeepSpeed JSON",
    software="DeepSpeed 0.19",
    recognise=lambda document: document.kind == "json" and bool(_SIGNS & set(document.data)),
    read=read,
    write=write,
    kind="json",
    filename="ds_config.json",
    choices={
        "micro_batch": (),
        "zero": (0, 1, 2, 3),
        "offload": ("none", "optimizer", "optimizer,params"),
        "optimizer": tuple(_TITLES),
    },
)
"""DeepSpeed's own file, alone or beside a Trainer that fills in what is `auto`."""
