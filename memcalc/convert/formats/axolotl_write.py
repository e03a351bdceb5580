"""A job as axolotl 0.18's YAML; what stands in DeepSpeed's JSON, the launcher or the environment is not in it."""

from __future__ import annotations

from typing import Any

from memcalc.convert.formats.base import ConfigJob, hub_name, key_table
from memcalc.convert.formats.fsdp_config import LOSS_INSIDE, PLACED
from memcalc.convert.formats.trainer_writer import accumulated, galore, layer_names, require_decoder
from memcalc.convert.formats.tuning import ANY_FORM, DECAY, FLASH
from memcalc.frameworks import habits_of
from memcalc.specs.adapters import lora_of

_OPTIMIZERS = {
    ("adamw", "fused"): "adamw_torch_fused", ("adamw", "foreach"): "adamw_torch", ("adamw", "loop"): "stable_adamw",
    ("adafactor", "loop"): "adafactor", ("sgd", "foreach"): "sgd", ("sgd-momentum", "foreach"): "rmsprop",
    ("muon", "loop"): "muon",
}  # fmt: skip
_ATTENTION = {"flash": "flash_attention_2", "eager": "eager", "efficient": "xformers", "sdpa": "sdpa"}


def write(job: ConfigJob) -> dict[str, Any]:
    """Return the config that runs a job. A DeepSpeed JSON is named, and is a file of its own.

    Data and learning rate, without which axolotl does not start, stand for those of the user.
    """
    plan = job.strategy
    job.require_one_of("framework", ("hf", "ddp", "fsdp2", "deepspeed"), "axolotl runs")
    require_decoder(job, "memcalc's YAML of axolotl")
    exchanged = plan.cp > 1 and plan.cp_kind == "a2a"
    job.require(not exchanged, "cp-kind", "axolotl's ranks pass keys and values round a ring")
    job.require(not plan.optimizer_in_backward, "optimizer-in-backward", "axolotl steps after backward")
    return {
        "base_model": hub_name(job),
        "sequence_len": job.seq_len,
        "sample_packing": True,
        "pad_to_sequence_len": True,
        "micro_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "val_set_size": 0.0,
        "datasets": [{"path": "DATASET", "type": "alpaca"}],
        "learning_rate": 1e-5,
        **_precision(job),
        **_adapter(job),
        **_engine(job),
        **_recomputation(job),
        **_kernels(job),
        **_optimizer(job),
        "tensor_parallel_size": plan.tp if plan.tp > 1 else None,
        "context_parallel_size": plan.cp if plan.cp > 1 else None,
        "dp_replicate_size": plan.dp_replicate if plan.dp_replicate > 1 else None,
        "dp_shard_size": plan.dp // plan.dp_replicate if plan.dp_replicate > 1 else None,
    }


def _sharded(job: ConfigJob) -> bool:
    return job.framework == "fsdp2" or (job.framework == "hf" and job.strategy.zero > 0)


def _precision(job: ConfigJob) -> dict[str, Any]:
    """Weights are loaded in the dtype of the arithmetic, where FSDP 1 alone casts them, and 16 bits are autocast."""
    plan = job.strategy
    kind = plan.precision
    if kind == "fp32":
        return {"bf16": False, "fp16": False}
    cast = _sharded(job) and job.framework != "fsdp2" and not plan.lora
    narrow, wide = kind == "bf16" and plan.autocast and not cast, job.framework == "deepspeed" or cast
    frozen = bool(plan.lora) and plan.autocast  # fp16 has no other name over what is not trained
    mixed, half = kind == "bf16-mixed" and wide, kind == "fp16-mixed" and (wide or frozen)
    allowed = "axolotl loads weights in the dtype that it computes in, under autocast"
    if job.framework == "fsdp2":
        allowed += ", and its FSDP 2 casts none: --precision bf16 --autocast"
    job.require(narrow or mixed or half, "precision", allowed)
    return {"bf16": not half, "fp16": half}


def _adapter(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    lora = lora_of(plan.lora)
    if lora is None:
        return {}
    job.require_one_of("quantize", ("none", "nf4", "nf4-dq", "int8"), "axolotl has")
    job.require(not plan.prepare_kbit, "strategy.prepare_kbit", "axolotl casts norms back to 16 bits")
    four, fused = plan.quantize.startswith("nf4"), plan.lora_kernels == "fused"
    job.require(plan.lora_kernels != "dora", "strategy.lora_kernels", "axolotl's own kernels run DoRA")
    job.require(not (fused and _sharded(job)), "strategy.lora_kernels", "under FSDP they are not stated")
    return {
        "adapter": "qlora" if four else "lora",
        "lora_r": lora.rank,
        "lora_alpha": 2 * lora.rank,
        "lora_dropout": plan.lora_dropout,
        "lora_target_modules": layer_names(job, "lora", lora.targets),
        "lora_modules_to_save": layer_names(job, "also-train", plan.also_train) or None,
        "load_in_4bit": four,
        "load_in_8bit": plan.quantize == "int8",
        "quantize_moe_experts": True if plan.quantize_experts else None,
        "bnb_config_kwargs.bnb_4bit_use_double_quant": False if plan.quantize == "nf4" else None,
        "peft_autocast_adapter_dtype": None if plan.adapter_dtype == "fp32" else False,
        **dict.fromkeys(key_table("axolotl").lists["lora_kernels"], fused),
    }


def _engine(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    if job.framework == "deepspeed":
        return {"deepspeed": "ds_config.json"}
    if not _sharded(job):
        return {}
    job.require(plan.reshard != "always" or job.framework != "fsdp2", "strategy.reshard", LOSS_INSIDE)
    return {
        "fsdp_version": 2 if job.framework == "fsdp2" else 1,
        "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.reshard_after_forward": plan.zero == 3,
        "fsdp_config.offload_params": "params" in plan.offload,
        **accumulated(job),
    }


def _recomputation(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    job.require(plan.recompute in ("none", "full"), "recompute", "axolotl recomputes none or full")
    job.require(plan.checkpoint != "reentrant-inside", "strategy.checkpoint", PLACED)
    full = plan.recompute == "full"
    kind = plan.checkpoint or ("reentrant" if habits_of(plan.framework).reentrant else "")
    moved = "activations" in plan.offload and job.framework != "deepspeed"
    alone = full or not moved or bool(plan.lora)
    job.require(alone, "offload", "without adapters axolotl offloads them with recompute full", value="activations")
    if full and _sharded(job) and not (moved or kind == "reentrant" or job.editing):
        return {"fsdp_config.activation_checkpointing": True}  # before FSDP wraps the block, not inside (MC104)
    return {
        "gradient_checkpointing": full or moved,
        "gradient_checkpointing_kwargs.use_reentrant": kind == "reentrant" if full else None,
        "activation_offloading": ("hidden_states" if full else True) if moved else None,
    }


def _kernels(job: ConfigJob) -> dict[str, Any]:
    """Attention, and what plugins replace; a kernel of PyTorch's own choice is not said."""
    plan = job.strategy
    chosen = plan.attention == "math" and plan.precision == "fp32"  # PyTorch's own choice for grouped heads
    kernel = "sdpa" if chosen else plan.attention
    job.require(kernel in _ATTENTION, "attention", f"axolotl has {', '.join(_ATTENTION)}", plan.attention)
    job.require(plan.flash_version != 1, "strategy.flash_version", FLASH)
    job.require(plan.compile in ("none", "model"), "compile", "axolotl compiles none or model")
    job.require_one_of("loss", ("standard", "chunked", "fused-kernel", "fused-linear"), "axolotl has")
    job.require(not plan.tiled_loss, "strategy.tiled_loss", "axolotl has Liger's loss")
    job.require(plan.kernels in ("model", "fused"), "kernels", "axolotl has model and fused")
    fused = plan.kernels == "fused" or None
    liger = fused or plan.loss in ("fused-linear", "fused-kernel")
    return {
        "attn_implementation": "flash_attention_3" if plan.flash_version == 3 else _ATTENTION[kernel],
        "plugins": ["axolotl.integrations.liger.LigerPlugin"] if liger else None,
        "liger_rope": fused,
        "liger_rms_norm": fused,
        "liger_glu_activation": fused,
        "liger_fused_linear_cross_entropy": plan.loss == "fused-linear" or None,
        "liger_cross_entropy": plan.loss == "fused-kernel" or None,
        "chunked_cross_entropy": plan.loss == "chunked" or None,
        "torch_compile": plan.compile == "model" or None,
    }


def _optimizer(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    if plan.optimizer == "galore-adamw":
        return galore(job, "optimizer")
    names = {f"{kind} ({impl})": name for (kind, impl), name in _OPTIMIZERS.items()} | ANY_FORM
    value = plan.optimizer if plan.optimizer in ANY_FORM else f"{plan.optimizer} ({plan.optimizer_impl})"
    job.require(value in names, "optimizer", f"axolotl has {', '.join(names)}", value)
    return {"optimizer": names[value], "weight_decay": DECAY if plan.sgd_weight_decay else None}
