"""A job as axolotl 0.18's YAML; what stands in DeepSpeed's JSON, the launcher or the environment is not in it."""

from __future__ import annotations

from typing import Any

from memcalc.convert.formats.axolotl_keys import LORA_KERNELS
from memcalc.convert.job import Job

__all__ = ["write"]

_OPTIMIZERS = {
    ("adamw", "fused"): "adamw_torch_fused", ("adamw", "foreach"): "adamw_torch", ("adamw", "loop"): "stable_adamw",
    ("adafactor", "loop"): "adafactor", ("adamw-8bit", "loop"): "adamw_bnb_8bit",
    ("paged-adamw", "loop"): "paged_adamw_32bit", ("paged-adamw-8bit", "loop"): "paged_adamw_8bit",
    ("lion", "loop"): "lion_32bit", ("lion-8bit", "loop"): "lion_8bit", ("sgd", "foreach"): "sgd",
    ("sgd-momentum", "foreach"): "rmsprop", ("muon", "loop"): "muon",
}  # fmt: skip
_ATTENTION = {"flash": "flash_attention_2", "eager": "eager", "efficient": "xformers"}
_LAYERS = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj",
    "down": "down_proj", "embedding": "embed_tokens", "head": "lm_head",
}  # fmt: skip
"""As the architectures that keep each projection apart call their layers; packed ones differ from model to model."""
_PLUGIN = "axolotl.integrations.liger.LigerPlugin"
_FRAMEWORKS = ("hf", "ddp", "fsdp2", "deepspeed")


def write(job: Job) -> dict[str, Any]:
    """Return the config that runs a job. A DeepSpeed JSON is named, and is a file of its own.

    Data and learning rate, without which axolotl does not start, stand for those of the user.
    """
    plan = job.strategy
    job.must(job.framework in _FRAMEWORKS, "framework", job.framework, f"axolotl runs {', '.join(_FRAMEWORKS)}")
    for word in ("pp", "ep"):
        job.must(getattr(plan, word) == 1, word, getattr(plan, word), "axolotl YAML is written without it")
    job.must(not plan.optimizer_in_backward, "optimizer-in-backward", True, "axolotl steps after backward")
    return {
        "base_model": job.model,
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
        "optimizer": _optimizer(job),
        "tensor_parallel_size": plan.tp if plan.tp > 1 else None,
        "context_parallel_size": plan.cp if plan.cp > 1 else None,
    }


def _sharded(job: Job) -> bool:
    return job.framework == "fsdp2" or (job.framework == "hf" and job.strategy.zero > 0)


def _precision(job: Job) -> dict[str, Any]:
    """Weights are loaded in the dtype of the arithmetic, and 16-bit arithmetic is autocast."""
    plan = job.strategy
    kind = plan.precision
    if kind == "fp32":
        return {"bf16": False, "fp16": False}
    narrow = kind == "bf16" and plan.autocast and (bool(plan.lora) or not _sharded(job))
    wide = job.framework == "deepspeed" or (_sharded(job) and not plan.lora)
    mixed, half = kind == "bf16-mixed" and wide, kind == "fp16-mixed" and wide
    allowed = "axolotl loads weights in the dtype that it computes in, under autocast"
    job.must(narrow or mixed or half, "precision", kind, allowed)
    return {"bf16": not half, "fp16": half}


def _adapter(job: Job) -> dict[str, Any]:
    plan = job.strategy
    if not plan.lora:
        return {}
    rank, _, listed = plan.lora.partition(":")
    targets = [target for target in listed.split(",") if target]
    for target in targets:
        job.must(target in _LAYERS, "lora", plan.lora, f"axolotl YAML is written for {', '.join(_LAYERS)}")
    stored = ("none", "nf4", "nf4-dq", "int8")
    job.must(plan.quantize in stored, "quantize", plan.quantize, f"axolotl has {', '.join(stored)}")
    job.must(not plan.prepare_kbit, "strategy.prepare_kbit", True, "axolotl casts norms back to 16 bits")
    four = plan.quantize.startswith("nf4")
    fused = plan.lora_kernels == "fused"
    job.must(not (fused and _sharded(job)), "strategy.lora_kernels", plan.lora_kernels, "under FSDP they are not said")
    return {
        "adapter": "qlora" if four else "lora",
        "lora_r": int(rank),
        "lora_alpha": 2 * int(rank),
        "lora_dropout": plan.lora_dropout,
        "lora_target_modules": [_LAYERS[target] for target in targets],
        "lora_modules_to_save": [_LAYERS[target] for target in plan.also_train] or None,
        "load_in_4bit": four,
        "load_in_8bit": plan.quantize == "int8",
        "bnb_config_kwargs.bnb_4bit_use_double_quant": False if plan.quantize == "nf4" else None,
        "peft_autocast_adapter_dtype": None if plan.adapter_dtype == "fp32" else False,
        **dict.fromkeys(LORA_KERNELS, fused),
    }


def _engine(job: Job) -> dict[str, Any]:
    plan = job.strategy
    if job.framework == "deepspeed":
        return {"deepspeed": "ds_config.json"}
    held = {"optimizer", "params"} & set(plan.offload)
    if not _sharded(job):
        job.must(not held, "offload", ",".join(plan.offload), "without FSDP or DeepSpeed axolotl offloads activations")
        return {}
    moved = "params" in held
    job.must(moved or not held, "offload", ",".join(plan.offload), "FSDP moves states with the parameters: params")
    return {
        "fsdp_version": 2 if job.framework == "fsdp2" else 1,
        "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_config.reshard_after_forward": plan.zero == 3,
        "fsdp_config.offload_params": moved,
    }


def _recomputation(job: Job) -> dict[str, Any]:
    plan = job.strategy
    job.must(plan.recompute in ("none", "full"), "recompute", plan.recompute, "axolotl recomputes none or full")
    full = plan.recompute == "full"
    moved = "activations" in plan.offload and job.framework != "deepspeed"
    alone = full or not moved or bool(plan.lora)
    job.must(alone, "offload", "activations", "without adapters axolotl offloads them beside recompute full")
    return {
        "gradient_checkpointing": full or moved,
        "gradient_checkpointing_kwargs.use_reentrant": plan.checkpoint == "reentrant" if full else None,
        "activation_offloading": ("hidden_states" if full else True) if moved else None,
    }


def _kernels(job: Job) -> dict[str, Any]:
    """Attention, and what plugins replace; a kernel of PyTorch's own choice is not said."""
    plan = job.strategy
    job.must(plan.attention in _ATTENTION, "attention", plan.attention, f"axolotl has {', '.join(_ATTENTION)}")
    job.must(plan.compile in ("none", "model"), "compile", plan.compile, "axolotl compiles none or model")
    losses = ("standard", "chunked", "fused-kernel", "fused-linear")
    job.must(plan.loss in losses, "loss", plan.loss, f"axolotl has {', '.join(losses)}")
    job.must(plan.kernels in ("model", "fused"), "kernels", plan.kernels, "axolotl has model and fused")
    fused = plan.kernels == "fused" or None
    liger = fused or plan.loss in ("fused-linear", "fused-kernel")
    return {
        "attn_implementation": _ATTENTION[plan.attention],
        "plugins": [_PLUGIN] if liger else None,
        "liger_rope": fused,
        "liger_rms_norm": fused,
        "liger_glu_activation": fused,
        "liger_fused_linear_cross_entropy": plan.loss == "fused-linear" or None,
        "liger_cross_entropy": plan.loss == "fused-kernel" or None,
        "chunked_cross_entropy": plan.loss == "chunked" or None,
        "torch_compile": plan.compile == "model" or None,
    }


def _optimizer(job: Job) -> str:
    plan = job.strategy
    key = plan.optimizer, plan.optimizer_impl
    allowed = ", ".join(f"{name} ({impl})" for name, impl in _OPTIMIZERS)
    job.must(key in _OPTIMIZERS, "optimizer", f"{plan.optimizer} ({plan.optimizer_impl})", f"axolotl has {allowed}")
    return _OPTIMIZERS[key]
