"""A strategy as Megatron-LM's flags of d98e8a64, without the model: what other launchers pass on by the same names."""

from __future__ import annotations

from typing import Any

from memcalc.convert.formats.megatron_float8 import float8_flags
from memcalc.convert.formats.megatron_states import state_flags
from memcalc.convert.formats.megatron_time import time_flags
from memcalc.convert.job import ConfigJob

_OPTIMIZER_NAMES = {"adamw": "adam", "sgd-momentum": "sgd", "lion": "lion", "muon": "muon", "soap": "soap"}
_ATTENTION_NAMES = {"flash": "flash", "cudnn": "fused", "eager": "unfused"}
_RING_NAMES = {"ring": "p2p", "a2a": "a2a", "allgather": "allgather"}


def run_flags(job: ConfigJob) -> dict[str, Any]:
    """Return the flags of a batch and a strategy, None where one is left at its default."""
    return {
        "micro_batch_size": job.strategy.micro_batch,
        "global_batch_size": job.global_batch,
        **_precision_flags(job),
        **_parallel_flags(job),
        **_pipeline_flags(job),
        **_recompute_flags(job),
        **_kernel_flags(job),
        **time_flags(job),
    }


def _precision_flags(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    return {
        "bf16": plan.precision in ("bf16-mixed", "fp8-mixed") or None,
        "fp16": plan.precision == "fp16-mixed" or None,
        **float8_flags(plan),
        "no_gradient_accumulation_fusion": not plan.wgrad_fusion or None,
        "optimizer": _OPTIMIZER_NAMES[plan.optimizer],
        "use_distributed_optimizer": plan.zero == 1 or None,
        "optimizer_cpu_offload": True if plan.offload else None,
        **state_flags(plan),
    }


def _parallel_flags(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    return {
        "tensor_model_parallel_size": plan.tp,
        "sequence_parallel": plan.sp or None,
        "context_parallel_size": plan.cp,
        "cp_comm_type": _RING_NAMES[plan.cp_kind] if plan.cp > 1 else None,
        "num_distributed_optimizer_instances": plan.dp_replicate if plan.dp_replicate > 1 else None,
        "expert_model_parallel_size": plan.ep,
        "expert_tensor_parallel_size": plan.etp or None,
        "mtp_num_layers": plan.mtp or None,
    }


def _pipeline_flags(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    return {
        "pipeline_model_parallel_size": plan.pp,
        "num_virtual_stages_per_pipeline_rank": plan.vpp if plan.vpp > 1 else None,
        "microbatch_group_size_per_virtual_pipeline_stage": plan.microbatch_group or None,
        "decoder_first_pipeline_num_layers": plan.first_stage_layers or None,
        "decoder_last_pipeline_num_layers": plan.last_stage_layers or None,
        "account_for_embedding_in_pipeline_split": plan.embedding_in_split or None,
        "account_for_loss_in_pipeline_split": plan.loss_in_split or None,
    }


def _recompute_flags(job: ConfigJob) -> dict[str, Any]:
    policy = job.strategy.recompute
    if policy == "none":
        return {}
    method, _, count = ("uniform-1" if policy == "full" else policy).rpartition("-")
    if method in ("uniform", "block"):
        chunks = job.strategy.vpp if method == "block" else 1
        says = f"Megatron-LM counts the blocks of each model chunk, of which a stage has {chunks}"
        job.require(int(count) % chunks == 0, "recompute", says)
        layers = -(-int(count) // chunks)
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    modules = "core_attn" if policy == "selective-core-attn" else policy.removeprefix("modules:")
    return {"recompute_granularity": "selective", "recompute_modules": modules.split(",")}


def _kernel_flags(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    job.require_one_of("attention", _ATTENTION_NAMES, "Megatron-LM's flags say")
    fused = plan.loss in ("fused-kernel", "triton")
    return {
        "attention_backend": _ATTENTION_NAMES[plan.attention],
        "cross_entropy_loss_fusion": fused or None,
        "cross_entropy_fusion_impl": ("te" if plan.loss == "triton" else "native") if fused else None,
        "no_create_attention_mask_in_dataloader": True,
    }
