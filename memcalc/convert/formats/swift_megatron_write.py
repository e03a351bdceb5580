"""A job as arguments of ms-swift's `megatron sft`: version 4.6.0.dev0 (3602360a), which reads them from a YAML file."""

from __future__ import annotations

from typing import Any

from memcalc.convert.formats.megatron_run import run_flags
from memcalc.convert.formats.transformers_model import hub_name
from memcalc.convert.job import ConfigJob
from memcalc.specs.adapters import lora_of

LAYERS = {
    "linear_qkv": "qkv", "linear_proj": "o", "linear_fc1": "gate_up", "linear_fc2": "down", "linear_q_proj": "q",
    "linear_q_down_proj": "q_a", "linear_q_up_proj": "q_b", "linear_kv_down_proj": "kv_a",
    "linear_kv_up_proj": "kv_b",
}  # fmt: skip
"""Megatron-LM's layers (core/models/gpt/gpt_layer_specs.py) and memcalc's words for them."""
RENAMED = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
}
"""Flags of Megatron-LM, and ms-swift's arguments of another name."""
_DTYPES = {"bf16-mixed": "bfloat16", "fp8-mixed": "bfloat16", "fp16-mixed": "float16", "fp32": "float32"}
_ABSENT = (
    "bf16", "fp16", "no_create_attention_mask_in_dataloader", "no_gradient_accumulation_fusion",
    "moe_flex_dispatcher_backend",
)  # fmt: skip
"""Flags that ms-swift has not, or that stand under another argument here."""


def write(job: ConfigJob) -> dict[str, Any]:
    """Return the arguments that run a job; the data, without which ms-swift does not start, stands for the user's."""
    plan = job.strategy
    job.require(job.framework == "megatron", "framework", "ms-swift's Megatron is for --framework megatron")
    _require_said(job)
    flags = {RENAMED.get(name, name): value for name, value in run_flags(job).items() if name not in _ABSENT}
    return {
        "model": hub_name(job),
        "dataset": ["DATASET"],
        "torch_dtype": _DTYPES[plan.precision],
        "max_length": job.seq_len,
        "packing": True,
        **_adapters(job),
        **flags,
        # what ms-swift has on by itself, and Megatron-LM's flags leave out where it is off
        "use_distributed_optimizer": plan.zero == 1,
        "cross_entropy_loss_fusion": plan.loss in ("fused-kernel", "triton"),
        "gradient_accumulation_fusion": plan.wgrad_fusion,
        "recompute_granularity": flags.get("recompute_granularity") or "none",
        "moe_enable_deepep": True if plan.moe_dispatcher == "deepep" else None,
        "expert_tensor_parallel_size": (plan.etp or plan.tp) if job.spec is not None and job.spec.is_moe else None,
    }


def _require_said(job: ConfigJob) -> None:
    plan = job.strategy
    job.require(plan.dp_replicate == 1, "dp-replicate", "ms-swift's Megatron has one instance of the optimizer")
    job.require(plan.cuda_graphs == "none", "cuda-graphs", "ms-swift's Megatron has none")
    job.require(not plan.ep_overlap, "ep-overlap", "ms-swift's Megatron does not overlap the exchange of tokens")
    narrow = plan.reduce_dtype == "fp32" or plan.precision_aware
    job.require(narrow, "strategy.reduce_dtype", "ms-swift has 16-bit gradients beside strategy.precision_aware alone")
    job.require(plan.optimizer in ("adamw", "sgd-momentum", "muon"), "optimizer", "ms-swift has adamw, sgd, muon")


def _adapters(job: ConfigJob) -> dict[str, Any]:
    plan = job.strategy
    lora = lora_of(plan.lora)
    if lora is None:
        return {"tuner_type": "full"}
    allowed = "ms-swift has adapters of its own: --set strategy.lora_classes=swift"
    job.require(plan.lora_classes == "swift", "strategy.lora_classes", allowed)
    names = {word: name for name, word in LAYERS.items()} | {"up": "linear_fc1"}
    return {
        "tuner_type": "lora",
        "lora_rank": lora.rank,
        "lora_alpha": 4 * lora.rank,
        "lora_dropout": plan.lora_dropout,
        "target_modules": [names[target] for target in lora.targets],
    }
