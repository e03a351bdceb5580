"""The Trainer's arguments that run a job (Transformers 5.23)."""

from __future__ import annotations

import re
from typing import Any

from memcalc.convert.document import Document
from memcalc.convert.formats.optimizers import ANY_FORM, OPTIMIZERS
from memcalc.convert.job import Job
from memcalc.frameworks import habits_of

__all__ = ["spelling", "write"]

_WRITTEN = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd")
_NAMES = {(OPTIMIZERS[name].name, OPTIMIZERS[name].impl): name for name in _WRITTEN}
_EVERY = re.compile(r"every-(\d+)")


def write(job: Job) -> dict[str, Any]:
    """Return the arguments that run a job; model, adapters and lengths are the script's own to load."""
    plan = job.strategy
    allowed = "the Trainer runs hf (with FSDP 1 where --zero says so), fsdp2, ddp and deepspeed"
    job.must(job.framework in {"hf", "fsdp2", "ddp", "deepspeed"}, "framework", job.framework, allowed)
    alone = (job.gpus == 1) == (job.framework == "hf") or plan.zero > 0 or job.framework in {"fsdp2", "deepspeed"}
    job.must(alone, "framework", job.framework, "without sharding it is hf on one GPU, and ddp on several")
    job.must(plan.pp == plan.ep == 1, "pp", plan.pp, "the Trainer has no pipeline and no expert parallelism")
    job.must(plan.tp == plan.cp == 1, "tp", plan.tp, "its device mesh stands in Accelerate's YAML")
    dtype, _, kind = plan.precision.partition("-")
    job.must(dtype in {"fp32", "bf16", "fp16"}, "precision", plan.precision, "the Trainer has fp32, bf16 and fp16")
    mixed = bool(kind) or plan.autocast
    master = kind == "mixed" and plan.zero == 0 and job.framework != "deepspeed"
    job.must(not master, "precision", plan.precision, "without sharding the Trainer has autocast: bf16-autocast")
    fields: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "bf16": mixed and dtype == "bf16",
        "fp16": mixed and dtype == "fp16",
        **_optimizer(job),
        **_kernels(job),
        "torch_compile": plan.compile == "model",
    }
    job.must(plan.compile in {"none", "model"}, "compile", plan.compile, "the Trainer compiles the whole model")
    sharded = job.framework == "fsdp2" or (job.framework == "hf" and plan.zero > 0)
    return fields | (_fsdp(job) if sharded else _checkpoints(job))


def _optimizer(job: Job) -> dict[str, Any]:
    plan = job.strategy
    kind = "sgd" if plan.optimizer == "sgd-momentum" else plan.optimizer
    name = _NAMES.get((kind, plan.optimizer_impl)) or ANY_FORM.get(kind)
    allowed = f"the Trainer has {', '.join((*_WRITTEN, *ANY_FORM.values()))}"
    job.must(name is not None, "optimizer", f"{plan.optimizer} ({plan.optimizer_impl})", allowed)
    return {"optim": name, "optim_args": "momentum=0.9" if plan.optimizer == "sgd-momentum" else None}


def _kernels(job: Job) -> dict[str, Any]:
    plan = job.strategy
    fused = plan.kernels == "fused"
    job.must(plan.kernels in {"model", "fused"}, "kernels", plan.kernels, "the Trainer has Liger's, or the model's own")
    losses = {"fused-linear": {}, "fused-kernel": {"cross_entropy": True}, "standard": {"cross_entropy": False}}
    job.must(plan.loss in losses, "loss", plan.loss, "the Trainer has standard, fused-kernel and fused-linear")
    job.must(fused or plan.loss == "standard", "loss", plan.loss, "it comes with Liger's kernels: --kernels fused")
    fields: dict[str, Any] = {"use_liger_kernel": fused}
    if fused and plan.loss != "fused-linear":
        fields["liger_kernel_config.fused_linear_cross_entropy"] = False
        fields |= {f"liger_kernel_config.{name}": on for name, on in losses[plan.loss].items()}
    return fields


def _policy(job: Job) -> tuple[bool, int]:
    plan = job.strategy
    every = _EVERY.fullmatch(plan.recompute)
    fine = plan.recompute in {"none", "full"} or every is not None
    job.must(fine, "recompute", plan.recompute, "the Trainer has none, full and every-N")
    return plan.recompute != "none", int(every[1]) if every else 1


def _checkpoints(job: Job) -> dict[str, Any]:
    """Checkpoints of the Trainer's own; those of DeepSpeed's configs are not the Trainer's."""
    plan = job.strategy
    on, every = _policy(job)
    fields: dict[str, Any] = {"gradient_checkpointing": on}
    if on:
        habit = "reentrant" if habits_of(plan.framework).reentrant else "non-reentrant"
        fields["gradient_checkpointing_kwargs.use_reentrant"] = (plan.checkpoint or habit) == "reentrant"
        fields["gradient_checkpointing_kwargs.every_n_layers"] = every if every > 1 else None
    if job.framework != "deepspeed":
        job.must(not plan.offload, "offload", ",".join(plan.offload), "without sharding the Trainer offloads nothing")
    return fields


def _fsdp(job: Job) -> dict[str, Any]:
    """FSDP, with its own checkpointing: the Trainer's would gather each block once more."""
    plan = job.strategy
    on, every = _policy(job)
    job.must(every == 1, "recompute", plan.recompute, "FSDP's checkpointing takes none or full")
    version = 2 if job.framework == "fsdp2" else 1
    job.must(version == 2 or plan.zero == 3, "zero", plan.zero, "the Trainer's FSDP 1 shards all: --framework fsdp2")
    job.must("optimizer" not in plan.offload, "offload", "optimizer", "FSDP moves states with the parameters: params")
    fields: dict[str, Any] = {
        "fsdp": True if version == 2 else "full_shard",
        "fsdp_config.version": version,
        "fsdp_config.activation_checkpointing": on,
        "fsdp_config.cpu_offload": "params" in plan.offload,
    }
    if version == 2:
        fields["fsdp_config.reshard_after_forward"] = plan.zero == 3
    else:
        fields["fsdp_config.backward_prefetch"] = "backward_pre"
    if job.accumulation > 1 and not plan.whole_accumulation:
        fields["accelerator_config.gradient_accumulation_kwargs.sync_each_batch"] = True
    return fields


def spelling(document: Document, key: str) -> str:
    """Return a key as a file spells it: the older or the newer name of checkpointing, `fsdp_` before FSDP's options."""
    old, new = "gradient_checkpointing", "activation_checkpointing"
    if key.startswith(old) and new in document.data:
        return key.replace(old, new)
    table = document.data.get("fsdp_config")
    lead, _, name = key.partition(".")
    if lead == "fsdp_config" and isinstance(table, dict) and any(str(word).startswith("fsdp_") for word in table):
        return key if name in table else f"{lead}.fsdp_{name}"
    return key
