"""The torchtitan TOML that runs a job, in the keys of 0.2.2."""

from __future__ import annotations

from typing import Any

from memcalc.convert.formats.torchtitan_models import flavor_of
from memcalc.convert.job import Job

__all__ = ["write"]


def write(job: Job) -> dict[str, Any]:
    """Return the keys of 0.2.2 that run a job."""
    plan = job.strategy
    job.must(job.framework == "torchtitan", "framework", job.framework, "torchtitan TOML is for --framework torchtitan")
    named = flavor_of(job.model)
    job.must(named is not None, "model", job.model, "torchtitan 0.2.2 has no flavor of these sizes")
    name, flavor = named or ("", "")
    simple = plan.fsdp_schedule == "simple"
    fields: dict[str, Any] = {
        "model.name": f"simple_fsdp.{name}" if simple else name,
        "model.flavor": flavor,
        **_optimizer_fields(job),
        "training.seq_len": job.seq_len,
        **_precision_fields(job),
        "training.enable_cpu_offload": _offload_field(job),
        **_parallel_fields(job),
        **_recompute_fields(job),
        "compile.enable": plan.compile != "none",
        "compile.components": _components(job),
    }
    return fields


def _optimizer_fields(job: Job) -> dict[str, Any]:
    plan = job.strategy
    job.must(plan.optimizer == "adamw", "optimizer", plan.optimizer, "torchtitan 0.2.2 has AdamW")
    return {
        "optimizer.name": "AdamW",
        "optimizer.implementation": "for-loop" if plan.optimizer_impl == "loop" else plan.optimizer_impl,
        "optimizer.early_step_in_backward": plan.optimizer_in_backward or None,
    }


def _precision_fields(job: Job) -> dict[str, Any]:
    plan = job.strategy
    kinds = ("bf16-mixed", "fp32", "bf16", "fp8-mixed")
    job.must(plan.precision in kinds, "precision", plan.precision, f"torchtitan TOML says {', '.join(kinds)}")
    job.must(plan.reduce_dtype == "fp32", "strategy.reduce_dtype", plan.reduce_dtype, "torchtitan reduces in fp32")
    eight = plan.precision == "fp8-mixed"
    mx = plan.float8 == "mxfp8"
    recipe = plan.float8 if eight and not mx and plan.float8 not in ("", "tensorwise") else None
    gather = plan.float8_all_gather
    job.must(
        not (gather and recipe), "strategy.float8_all_gather", gather, "torchtitan has it under tensorwise scaling"
    )
    return {
        "model.converters": [f"quantize.linear.{'mx' if mx else 'float8'}"] if eight else None,
        "training.dtype": "bfloat16" if plan.precision == "bf16" else "float32",
        "training.mixed_precision_param": "float32" if plan.precision == "fp32" else "bfloat16",
        "quantize.linear.float8.recipe_name": recipe,
        "quantize.linear.float8.enable_fsdp_float8_all_gather": gather or None,
    }


def _offload_field(job: Job) -> bool | None:
    """FSDP's policy takes weights, gradients and optimizer states to the host together."""
    kept = set(job.strategy.offload)
    allowed = "torchtitan offloads optimizer,params together, to the CPU"
    job.must(kept in (set(), {"optimizer", "params"}), "offload", ",".join(job.strategy.offload), allowed)
    job.must(not kept or job.strategy.offload_to == "cpu", "offload-to", job.strategy.offload_to, allowed)
    return True if kept else None


def _parallel_fields(job: Job) -> dict[str, Any]:
    plan = job.strategy
    job.must(plan.sp == (plan.tp > 1), "sp", plan.sp, "torchtitan has sequence parallelism wherever it has TP")
    job.must(plan.loss in ("standard", "parallel"), "loss", plan.loss, "torchtitan TOML says standard or parallel")
    job.must(plan.loss != "parallel" or plan.tp > 1, "loss", plan.loss, "needs tp above 1")
    job.must(plan.cp == 1 or plan.cp_kind != "a2a", "cp-kind", plan.cp_kind, "torchtitan has ring and allgather")
    policy = plan.reshard if plan.reshard != "default" else "default" if plan.zero == 3 or plan.pp > 1 else "never"
    job.must(plan.zero == 3 or policy != "always", "zero", plan.zero, "always resharding is --zero 3")
    policy = "always" if plan.zero == 3 and plan.pp > 1 and policy == "default" else policy
    prefix = "parallelism"
    fields = {
        f"{prefix}.data_parallel_shard_degree": plan.dp,
        f"{prefix}.fsdp_reshard_after_forward": policy,
        f"{prefix}.tensor_parallel_degree": plan.tp,
        f"{prefix}.pipeline_parallel_degree": plan.pp,
        f"{prefix}.context_parallel_degree": plan.cp,
        f"{prefix}.disable_loss_parallel": True if plan.tp > 1 and plan.loss == "standard" else None,
        f"{prefix}.enable_async_tensor_parallel": plan.async_tp or None,
        f"{prefix}.context_parallel_rotate_method": _rotation(job),
        f"{prefix}.expert_parallel_degree": plan.ep,
        f"{prefix}.expert_tensor_parallel_degree": (plan.etp or plan.tp) if plan.ep > 1 else None,
    }
    return {**fields, **_batch_fields(job)}


def _rotation(job: Job) -> str | None:
    return None if job.strategy.cp == 1 else "alltoall" if job.strategy.cp_kind == "ring" else "allgather"


def _batch_fields(job: Job) -> dict[str, Any]:
    plan = job.strategy
    if plan.pp == 1:  # the global batch is that of one micro-batch on each rank where it is not stated
        whole = job.global_batch if job.accumulation > 1 else None
        return {"training.local_batch_size": plan.micro_batch, "training.global_batch_size": whole}
    names = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B",
             "interleaved-zb": "InterleavedZeroBubble", "zb-v": "ZBVZeroBubble"}  # fmt: skip
    job.must(plan.pp_schedule in names, "pp-schedule", plan.pp_schedule, f"torchtitan runs {', '.join(names)}")
    ends = plan.first_stage_layers or plan.last_stage_layers
    job.must(not ends, "strategy.first_stage_layers", ends, "written for stages that torchtitan shares out itself")
    prefix = "parallelism.pipeline_parallel"
    fields = {
        "training.local_batch_size": plan.micro_batch * job.accumulation,
        f"{prefix}_schedule": names[plan.pp_schedule],
        f"{prefix}_microbatch_size": plan.micro_batch,
        f"{prefix}_first_stage_less_layers": int(plan.embedding_in_split),
        f"{prefix}_last_stage_less_layers": int(plan.loss_in_split),
    }
    if plan.vpp > 2:
        from memcalc import catalog

        blocks = catalog.model(job.model).num_layers + plan.embedding_in_split + plan.loss_in_split
        each = -(-blocks // (plan.pp * plan.vpp))
        job.must(
            -(-blocks // each) == plan.pp * plan.vpp, "vpp", plan.vpp, "no whole number of blocks a stage gives it"
        )
        fields[f"{prefix}_layers_per_stage"] = each
    return fields


def _recompute_fields(job: Job) -> dict[str, Any]:
    policy = job.strategy.recompute
    known = policy in ("none", "full", "selective-ops") or policy.startswith("every-")
    job.must(known, "recompute", policy, "torchtitan has none, full, selective-ops and every-K")
    if policy in ("none", "full"):
        return {"activation_checkpoint.mode": policy}
    option = "op" if policy == "selective-ops" else policy.removeprefix("every-")
    return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": option}


def _components(job: Job) -> list[str] | None:
    plan = job.strategy
    simple = plan.fsdp_schedule == "simple"
    job.must(plan.compile != "model" or simple, "compile", plan.compile, "torchtitan compiles block by block")
    job.must(not simple or plan.compile in ("model", "none"), "compile", plan.compile, "simple_fsdp compiles the model")
    named = {"blocks": ["model"], "loss": ["loss"], "blocks+loss": ["model", "loss"], "model": ["model"]}
    return named.get(plan.compile)
