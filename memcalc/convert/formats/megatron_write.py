"""Flags of Megatron-LM that run a job."""

from __future__ import annotations

from typing import Any

from memcalc.convert.job import Job
from memcalc.specs.model import BlockGroup, MixtureOfExperts, Model

__all__ = ["model_flags", "write"]

_OPTIMIZERS = {"adamw": "adam", "sgd-momentum": "sgd", "lion": "lion", "muon": "muon"}
_ATTENTION = {"flash": "flash", "cudnn": "fused", "eager": "unfused"}
_RING = {"ring": "p2p", "a2a": "a2a", "allgather": "allgather"}
_MULTIPLE = 128


def write(job: Job) -> dict[str, Any]:
    """Return the flags, with underscores as their documents have them."""
    plan = job.strategy
    job.must(
        job.framework == "megatron", "framework", job.framework, "Megatron-LM's flags are for --framework megatron"
    )
    plain = not (plan.lora or plan.quantize != "none" or plan.optimizer_in_backward)
    job.must(plain, "lora", plan.lora or plan.quantize, "Megatron-LM's flags train all weights")
    return {
        **_sizes(job),
        "seq_length": job.seq_len,
        "micro_batch_size": plan.micro_batch,
        "global_batch_size": job.global_batch,
        **_precision(job),
        **_parallelism(job),
        **_pipeline(job),
        **_recompute(job),
        **_kernels(job),
    }


def _sizes(job: Job) -> dict[str, Any]:
    """The model's own flags; those of a model that came from flags stay as they are."""
    from memcalc import api
    from memcalc.errors import MemcalcError

    if " " in job.model:
        return {}
    try:
        model = api.load_model(job.model)
    except MemcalcError:
        job.must(False, "model", job.model, "its sizes are not known here: give a preset or a config.json")
        raise
    return model_flags(job, model)


def model_flags(job: Job, model: Model) -> dict[str, Any]:
    """Return the flags that describe a decoder of equal blocks, after a few dense ones where the rest is routed."""
    group = model.groups[-1]
    block, attention = group.block, group.block.attention
    fine = (
        len(model.groups) <= 2
        and all(one.tower == "decoder" for one in model.groups)
        and block.norms == 2
        and block.norm_place == "pre"
        and not block.parallel
        and model.positions in ("rope", "learned", "none")
        and attention.qk_norm in ("none", "head")
    )
    job.must(fine, "model", model.name, "Megatron-LM's flags describe decoders with a norm before attention and MLP")
    dense = next((one.block.mlp for one in model.groups if not isinstance(one.block.mlp, MixtureOfExperts)), None)
    mlp = block.mlp
    biased = attention.o_bias
    positions = {"rope": "rope", "learned": "learned_absolute", "none": "none"}[model.positions]
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "num_attention_heads": attention.heads,
        "ffn_hidden_size": dense.ffn if dense is not None else mlp.ffn,
        "kv_channels": None if attention.latent else attention.head_dim,
        "group_query_attention": attention.kv_heads != attention.heads or None,
        "num_query_groups": attention.kv_heads if attention.kv_heads != attention.heads else None,
        "max_position_embeddings": max(model.max_positions, job.seq_len),
        "swiglu": mlp.gated or None,
        "squared_relu": mlp.activation == "relu2" or None,
        "normalization": "RMSNorm" if block.norm.kind == "rmsnorm" else "LayerNorm",
        "position_embedding_type": positions,
        "untie_embeddings_and_output_weights": not model.tied or None,
        "disable_bias_linear": not biased or None,
        "add_qkv_bias": True if attention.q_bias and not biased else None,
        "qk_layernorm": attention.qk_norm == "head" or None,
        "attention_dropout": attention.dropout,
        "hidden_dropout": block.dropout,
        "vocab_size": model.vocab,
        "make_vocab_size_divisible_by": _MULTIPLE,
        **_expert_flags(model.groups, mlp),
        **_latent_flags(group),
    }


def _expert_flags(groups: tuple[BlockGroup, ...], mlp: Any) -> dict[str, Any]:
    if not isinstance(mlp, MixtureOfExperts):
        return {}
    dense = groups[0].count if len(groups) == 2 else 0
    return {
        "num_experts": mlp.experts,
        "moe_router_topk": mlp.topk,
        "moe_ffn_hidden_size": mlp.ffn,
        "moe_shared_expert_intermediate_size": mlp.shared_ffn or None,
        "moe_shared_expert_gate": mlp.shared_gate or None,
        "moe_router_score_function": mlp.scores,
        "moe_layer_freq": f"([0]*{dense}+[1]*{groups[-1].count})" if dense else None,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }


def _latent_flags(group: BlockGroup) -> dict[str, Any]:
    latent = group.block.attention.latent
    if latent is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
    }


def _precision(job: Job) -> dict[str, Any]:
    plan = job.strategy
    kinds = ("bf16-mixed", "fp16-mixed", "fp32")
    job.must(plan.precision in kinds, "precision", plan.precision, f"Megatron-LM's flags say {', '.join(kinds)}")
    known = ", ".join(_OPTIMIZERS)
    job.must(plan.optimizer in _OPTIMIZERS, "optimizer", plan.optimizer, f"Megatron-LM's are {known}")
    kept = set(plan.offload)
    job.must(kept <= {"optimizer"}, "offload", ",".join(plan.offload), "Megatron-LM's flags say none or optimizer")
    job.must(not kept or plan.offload_to == "cpu", "offload-to", plan.offload_to, "Megatron-LM offloads to the CPU")
    return {
        "bf16": plan.precision == "bf16-mixed" or None,
        "fp16": plan.precision == "fp16-mixed" or None,
        "no_gradient_accumulation_fusion": not plan.wgrad_fusion or None,
        "optimizer": _OPTIMIZERS[plan.optimizer],
        "use_distributed_optimizer": plan.zero == 1 or None,
        "optimizer_cpu_offload": True if kept else None,
    }


def _parallelism(job: Job) -> dict[str, Any]:
    plan = job.strategy
    return {
        "tensor_model_parallel_size": plan.tp,
        "sequence_parallel": plan.sp or None,
        "context_parallel_size": plan.cp,
        "cp_comm_type": _RING[plan.cp_kind] if plan.cp > 1 else None,
        "expert_model_parallel_size": plan.ep,
        "expert_tensor_parallel_size": plan.etp or None,
        "mtp_num_layers": plan.mtp or None,
    }


def _pipeline(job: Job) -> dict[str, Any]:
    plan = job.strategy
    known = ("1f1b", "interleaved")
    job.must(plan.pp_schedule in known, "pp-schedule", plan.pp_schedule, f"Megatron-LM runs {', '.join(known)}")
    return {
        "pipeline_model_parallel_size": plan.pp,
        "num_virtual_stages_per_pipeline_rank": plan.vpp if plan.vpp > 1 else None,
        "microbatch_group_size_per_virtual_pipeline_stage": plan.microbatch_group or None,
        "decoder_first_pipeline_num_layers": plan.first_stage_layers or None,
        "decoder_last_pipeline_num_layers": plan.last_stage_layers or None,
        "account_for_embedding_in_pipeline_split": plan.embedding_in_split or None,
        "account_for_loss_in_pipeline_split": plan.loss_in_split or None,
    }


def _recompute(job: Job) -> dict[str, Any]:
    policy = job.strategy.recompute
    if policy == "none":
        return {}
    method, _, count = (
        "full-uniform-1".partition("-")[2].rpartition("-") if policy == "full" else policy.rpartition("-")
    )
    if method in ("uniform", "block"):
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": int(count)}
    modules = "core_attn" if policy == "selective-core-attn" else policy.removeprefix("modules:")
    known = policy == "selective-core-attn" or policy.startswith("modules:")
    job.must(
        known, "recompute", policy, "Megatron-LM has none, full, uniform-N, block-N, selective-core-attn, modules:…"
    )
    return {"recompute_granularity": "selective", "recompute_modules": modules.split(",")}


def _kernels(job: Job) -> dict[str, Any]:
    plan = job.strategy
    losses = ("standard", "parallel", "fused-kernel", "triton")
    job.must(plan.loss in losses, "loss", plan.loss, f"Megatron-LM's flags say {', '.join(losses)}")
    known = ", ".join(_ATTENTION)
    job.must(plan.attention in _ATTENTION, "attention", plan.attention, f"Megatron-LM's flags say {known}")
    fused = plan.loss in ("fused-kernel", "triton")
    return {
        "attention_backend": _ATTENTION[plan.attention],
        "cross_entropy_loss_fusion": fused or None,
        "cross_entropy_fusion_impl": ("te" if plan.loss == "triton" else "native") if fused else None,
        "no_create_attention_mask_in_dataloader": True,
    }
