"""Fields that have no option of their own: ``--set strategy.reduce_dtype=bf16``, one line each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from memcalc.errors import InputError
from memcalc.units import parse_bytes, parse_count


@dataclass(frozen=True)
class Field:
    """A field's kind, what a name may be, and what it says."""

    kind: Literal["name", "flag", "count", "bytes", "fraction", "version"]
    says: str
    names: tuple[str, ...] = ()


FIELDS: dict[str, Field] = {
    "strategy.reduce_dtype": Field("name", "width in which FSDP reduces gradients", ("fp32", "bf16")),
    "strategy.checkpoint": Field("name", "how checkpoints run", ("reentrant", "non-reentrant")),
    "strategy.float8": Field(
        "name", "how float8 matmuls scale", ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")
    ),
    "strategy.float8_all_gather": Field("flag", "FSDP gathers blocks in float8"),
    "strategy.async_tp": Field("flag", "tensor-parallel communication in parts, in memory of its own"),
    "strategy.fsdp_schedule": Field("name", "who schedules FSDP's gathers", ("default", "simple")),
    "strategy.reshard": Field("name", "which blocks FSDP shards again after forward", ("default", "always", "never")),
    "workload.lora_dropout": Field("fraction", "probability of the dropout before an adapter"),
    "strategy.lora_kernels": Field("name", "adapters op by op, or one fused function each", ("model", "fused")),
    "strategy.gptq_group": Field("count", "inputs that share a scale under GPTQ; 0 for all"),
    "strategy.prepare_kbit": Field("flag", "norms are cast to fp32 over a quantised base (PEFT, TRL)"),
    "strategy.bnb": Field("version", "version of bitsandbytes"),
    "strategy.peft": Field("version", "version of PEFT"),
    "strategy.etp": Field("count", "tensor-parallel ranks of an expert"),
    "strategy.mtp": Field("count", "blocks that predict further tokens"),
    "strategy.microbatch_group": Field("count", "micro-batches that pass one model chunk before the next"),
    "strategy.first_stage_layers": Field("count", "blocks of the first pipeline stage"),
    "strategy.last_stage_layers": Field("count", "blocks of the last pipeline stage"),
    "strategy.embedding_in_split": Field("flag", "the embedding counts as a block in the split over stages"),
    "strategy.loss_in_split": Field("flag", "the loss counts as a block in the split over stages"),
    "strategy.wgrad_fusion": Field("flag", "weight gradients are added to the buffer by the matmul itself"),
    "strategy.blas_workspace": Field("bytes", "workspace of one cuBLAS handle"),
    "workload.longest_first": Field("flag", "the longest sequences come once, in the first micro-batch"),
    "workload.attention_mask": Field("flag", "the data loader makes an attention mask"),
    "strategy.expandable_segments": Field("flag", "the caching allocator grows its segments"),
    "strategy.wide_embedding_moments": Field(
        "flag", "embeddings keep 32-bit moments under an 8-bit optimizer (Transformers' Trainer)"
    ),
    "strategy.bucket_view": Field("flag", "DDP's gradients are views of its buckets (gradient_as_bucket_view)"),
    "strategy.whole_accumulation": Field(
        "flag", "FSDP adds gradients of all micro-batches but the last up unsharded (no_sync)"
    ),
    "strategy.partition_activations": Field("flag", "DeepSpeed keeps checkpoints in parts over the TP ranks"),
    "strategy.grad_accum_dtype": Field("name", "width in which DeepSpeed adds gradients up", ("fp32", "bf16", "fp16")),
    "strategy.reduce_bucket_size": Field("count", "elements of a bucket of ZeRO's reductions"),
    "strategy.overlap_comm": Field("flag", "ZeRO reduces one bucket while the next one is filled"),
    "strategy.zero_prefetch_bucket": Field("count", "elements that ZeRO-3 gathers ahead"),
    "strategy.persistence_threshold": Field("count", "elements below which ZeRO-3 keeps a parameter whole"),
    "strategy.max_live_parameters": Field("count", "elements beyond which ZeRO-3 gathers nothing ahead"),
    "strategy.sub_group_size": Field("count", "elements of its shard that ZeRO-3 updates at a time"),
}
"""Each is a field of :class:`memcalc.grid.Fixed` under the name after the dot; where absent its default there holds."""


def check_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the extra fields that were set, by the name after the dot."""
    return {key.split(".", 1)[1]: _value(key, value) for key, value in settings.items() if key in FIELDS}


def _value(key: str, value: Any) -> Any:
    field = FIELDS[key]
    if field.kind == "flag":
        return _flag(key, value)
    if field.kind == "name":
        return _name(key, str(value), field.names)
    if field.kind == "fraction":
        return _fraction(key, value)
    if field.kind == "version":
        return _version(key, str(value))
    return parse_count(value, key) if field.kind == "count" else parse_bytes(value, key)


def _flag(key: str, value: Any) -> bool:
    if str(value).lower() not in {"true", "false"}:
        raise InputError(key, value, "must be true or false")
    return str(value).lower() == "true"


def _name(key: str, value: str, names: tuple[str, ...]) -> str:
    if names and value not in names:
        raise InputError(key, value, f"must be one of {', '.join(names)}", names)
    return value


def _version(key: str, value: str) -> str:
    if not re.fullmatch(r"\d+(\.\d+)*", value):
        raise InputError(key, value, "must be a version, such as 0.43")
    return value


def _fraction(key: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0.0 <= number < 1.0:
        raise InputError(key, value, "must be a number from 0 to below 1")
    return number
