"""Every field of a record matters: something that computes reads it, and another value moves a byte or a second.

A field is cheap to add and to carry along; what shows that it is not idle is the ledger of a job in which it counts.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

import memcalc
from memcalc.api import single
from memcalc.convert.huggingface import from_huggingface
from memcalc.frameworks.habits import Bucket, Habits
from memcalc.grid import Grid
from memcalc.planner.budget import pools_of
from memcalc.planner.costs import limits
from memcalc.planner.occasions import occasions_of
from memcalc.specs.block import Attention, Block, LatentAttention, MixtureOfExperts, Mlp, Norm
from memcalc.specs.hardware import GPU, MemoryTier, Node
from memcalc.specs.mixers import DeltaAttention, GatedDeltaNet, Mamba, Mamba2, ShortConvolution
from memcalc.specs.model import BlockGroup, Model, Pattern, Projector, Tail, TowerEnds
from memcalc.specs.options import SharedSettings
from memcalc.specs.strategy import Strategy
from memcalc.terms import settings
from memcalc.terms.build import build_ledger
from memcalc.terms.host import off_gpu_terms
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import overhead_of
from memcalc.timing.rates import rates_for
from memcalc.timing.times import step_times
from memcalc.trace.layers import BlockConfig

RECORDS = (
    Model, BlockGroup, Pattern, Block, Attention, LatentAttention, ShortConvolution, GatedDeltaNet, Mamba2, Mamba,
    DeltaAttention, Mlp,
    MixtureOfExperts, Norm, TowerEnds, Tail, SharedSettings, Habits, BlockConfig, GPU, Node, MemoryTier,
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- readers

CARRIES = {"specs", "convert", "report", "results", "cli", "catalog.py"}
"""Parts of the package that declare, read, write and show what others compute with."""
INSIDE = {
    "Model.embedding_dropout": "Model.ends_of, from which every tower's ends come",
    "Pattern.count": "Model.sequence, from which every number of blocks comes",
    "Pattern.runs": "Model.sequence",
    "GPU.nvlink_bytes_per_s": "GPU.gpu_link_bytes_per_s",
    "GPU.pcie_bytes_per_s": "GPU.host_link_bytes_per_s",
    "GPU.c2c_bytes_per_s": "GPU.host_link_bytes_per_s",
}
"""Fields that a property of their own module computes with, and which one."""
IDENTITY = {
    "Model": {"aliases", "hf_config", "published_parameters", "source", "notes", "hf_class"},
    "Habits": {"source"},
    "GPU": {"aliases", "note", "source", "date"},
    "Node": {"aliases", "note", "source", "date", "default"},
    "MemoryTier": {"source"},
}
"""What a record is called, where it was found and what is said of it: for people, for look-ups and for tests."""


def names_of(record: type[Any]) -> list[str]:
    if issubclass(record, tuple):
        return list(record._fields)
    return [field.name for field in fields(record)] if is_dataclass(record) else list(record.model_fields)


@cache
def read() -> frozenset[str]:
    """Return the attributes that the computing parts of the package read, and the names that they ask for by text."""
    root, found = Path(memcalc.__file__).parent, set[str]()
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] not in CARRIES:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.add(node.attr)
                elif isinstance(node, ast.Call):
                    found |= {
                        arg.value for arg in node.args if isinstance(arg, ast.Constant) and type(arg.value) is str
                    }
    return frozenset(found)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_something_that_computes_reads_every_field(record: type[Any]) -> None:
    inside = {name.partition(".")[2] for name in INSIDE if name.startswith(f"{record.__name__}.")}
    unread = {name for name in names_of(record) if name not in read()}
    assert unread <= inside | IDENTITY.get(record.__name__, set())


# ------------------------------------------------------------------------------------------------------------ movement

WITH_IMAGES = from_huggingface({
    "model_type": "qwen2_vl", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 4000,
    "vision_config": {"depth": 4, "embed_dim": 256, "num_heads": 4, "hidden_size": 512},
})  # fmt: skip
SMALL = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 1024, "vocab_size": 4000,
}  # fmt: skip
WITH_EVERY_EXPERT = from_huggingface({"model_type": "llama4_text", "num_local_experts": 8, "head_dim": 64, **SMALL})
WITH_SHARED_KEYS = from_huggingface({
    "model_type": "gemma4_text", "head_dim": 64, "global_head_dim": 64, "hidden_size_per_layer_input": 0,
    "layer_types": ["full_attention"] * 4, **SMALL,
})  # fmt: skip
WITH_CONVOLUTIONS = from_huggingface({"model_type": "lfm2", "full_attn_idxs": [2], **SMALL})
WITH_DELTA_NETS = from_huggingface({"model_type": "qwen3_next", "num_experts": 8, "num_experts_per_tok": 2, **SMALL})
WITH_MAMBA2 = from_huggingface({"model_type": "bamba", "attn_layer_indices": [2], "mamba_n_heads": 16, **SMALL})
WITH_MAMBA = from_huggingface({"model_type": "mamba", "hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 4000})
WITH_JAMBA = from_huggingface({"model_type": "jamba", "num_experts": 4, **SMALL})
WITH_DELTA_ATTENTION = from_huggingface({
    "model_type": "kimi_linear", "hidden_size": 512, "num_hidden_layers": 4, "num_experts": 8, "vocab_size": 4000,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
})  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    "llama": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "framework": "fsdp2", "seq_len": 2048,
              "global_batch": 16},
    "hf": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "attention": "eager"},
    "bf16": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "attention": "eager",
             "precision": "bf16"},
    "gpt2": {"model": "gpt2", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "attention": "eager"},
    "gemma3": {"model": "gemma-3-1b", "gpu": "h100", "framework": "hf", "seq_len": 2048},
    "moe": {"model": "qwen1.5-moe-a2.7b", "gpu": "h100", "gpus": 8, "framework": "fsdp2", "seq_len": 2048},
    "titan-moe": {"model": "deepseek-v2-lite", "gpu": "h100", "gpus": 8, "framework": "torchtitan@2025-10", "ep": 8,
                  "seq_len": 2048, "recompute": "selective-ops"},
    "titan-parts": {"model": "deepseek-v2-lite", "gpu": "h100", "gpus": 8, "framework": "torchtitan@2025-12", "ep": 8,
                    "seq_len": 2048, "recompute": "selective-ops", "compile": "blocks"},
    "latent": {"model": "deepseek-v2-lite", "gpu": "h100", "gpus": 8, "framework": "fsdp2", "seq_len": 2048},
    "t5": {"model": "t5-base", "gpu": "a100-80g", "framework": "hf", "seq_len": 512, "attention": "eager"},
    "whisper": {"model": "whisper-small", "gpu": "a100-80g", "framework": "hf"},
    "vit": {"model": "vit-base-16", "gpu": "a100-80g", "framework": "hf"},
    "galore": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 512,
               "optimizer": "galore-adamw"},
    "falcon": {"model": "falcon-40b", "gpu": "a100-80g", "gpus": 8, "framework": "hf", "seq_len": 1024},
    "cache": {"model": "starcoder-15.5b", "gpu": "a100-80g", "framework": "hf@4.40", "seq_len": 1024,
              "recompute": "full"},
    "megatron": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 16, "framework": "megatron", "tp": 2, "pp": 2,
                 "seq_len": 2048, "global_batch": 32},
    "nodes": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 32, "framework": "megatron", "seq_len": 2048},
    "woven": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 32, "framework": "megatron", "seq_len": 2048, "pp": 4,
              "pp_schedule": "interleaved", "vpp": 2, "global_batch": 128, "micro_batch": 1},
    "whole": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 4, "framework": "megatron", "tp": 2, "sp": False,
              "seq_len": 2048, "global_batch": 32},
    "float8": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "framework": "megatron", "precision": "fp8-mixed",
               "seq_len": 1024, "settings": {"strategy.float8": "tensorwise", "strategy.reduce_dtype": "bf16"}},
    "narrow": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "framework": "megatron", "precision": "fp8-mixed",
               "seq_len": 1024, "settings": {
                   "strategy.float8": "tensorwise", "strategy.reduce_dtype": "bf16", "strategy.precision_aware": True,
                   "strategy.exp_avg_dtype": "bf16", "strategy.exp_avg_sq_dtype": "bf16"}},
    "frozen": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "framework": "megatron", "precision": "fp8-mixed",
               "seq_len": 1024, "lora": "16", "settings": {"strategy.float8_all_gather": True}},
    "megatron-old": {"model": "gpt3-1.3b", "gpu": "a100-80g", "gpus": 16, "framework": "megatron@2021-05", "tp": 2,
                     "pp": 4, "seq_len": 2048, "global_batch": 32},
    "ring": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 16, "framework": "megatron", "kernels": "te", "cp": 4,
             "seq_len": 8192},
    "experts": {"model": "deepseek-v2-lite", "gpu": "h100", "gpus": 16, "framework": "megatron", "ep": 16, "sp": False,
                "seq_len": 2048},
    "copies": {"model": "deepseek-v2-lite", "gpu": "h100", "gpus": 16, "framework": "megatron", "ep": 16, "sp": False,
               "seq_len": 2048, "moe_dispatcher": "deepep"},
    "muon": {"model": "mixtral-8x7b", "gpu": "h100", "gpus": 64, "framework": "megatron", "seq_len": 1024,
             "optimizer": "muon"},
    "soap": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "framework": "megatron", "seq_len": 1024,
             "optimizer": "soap"},
    "chunks": {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "framework": "torchtitan", "pp": 4,
               "pp_schedule": "interleaved", "vpp": 2, "seq_len": 2048, "global_batch": 10, "micro_batch": 1},
    "offload": {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 8, "framework": "deepspeed", "zero": 3,
                "seq_len": 2048, "offload": "optimizer,params"},
    "deepspeed": {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 8, "framework": "deepspeed", "zero": 2,
                  "seq_len": 2048, "global_batch": 64},
    "adapters": {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 8, "framework": "fsdp1", "seq_len": 2048,
                 "lora": "16", "recompute": "full", "global_batch": 64},
    "alone": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "deepspeed", "zero": 2, "seq_len": 2048,
              "offload": "optimizer"},
    "waits": {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 8, "framework": "fsdp2", "seq_len": 2048,
              "offload": "activations"},
    "streams": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "torchtune", "seq_len": 2048,
                "offload": "activations"},
    "leaf": {"model": "gemma-2b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "lora": "16",
             "recompute": "full", "settings": {"strategy.checkpoint": "reentrant"}},
    "ddp": {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 8, "framework": "ddp", "seq_len": 2048,
            "global_batch": 8, "micro_batch": 1},
    "replicas": {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 8, "framework": "hf", "zero": 0, "seq_len": 2048},
    "filled": {"model": "mixtral-8x7b", "gpu": "h100", "gpus": 16, "framework": "fsdp2", "zero": 3,
               "precision": "bf16-mixed"},
    "root": {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "framework": "fsdp2", "seq_len": 8192,
             "settings": {"strategy.reshard": "always"}},
    "nf4": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "lora": "16",
            "quantize": "nf4", "precision": "bf16"},
    "int8": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "lora": "16",
             "quantize": "int8", "precision": "bf16"},
    "gptq": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "lora": "16",
             "quantize": "gptq-int4", "precision": "bf16"},
    "stacks": {"model": "qwen1.5-moe-a2.7b", "gpu": "h100", "framework": "hf", "seq_len": 1024, "lora": "16:q,v",
               "quantize": "nf4", "precision": "bf16"},
    "sgd": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "optimizer": "sgd"},
    "8-bit": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024,
              "optimizer": "adamw-8bit"},
    "every": {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 2, "framework": "hf", "zero": 3, "seq_len": 1024,
              "recompute": "every-3"},
    "titan": {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "framework": "torchtitan", "seq_len": 4096,
              "recompute": "selective-ops", "compile": "blocks"},
    "titan-biased": {"model": "qwen2.5-7b", "gpu": "h100", "gpus": 8, "framework": "torchtitan@2026-07",
                     "seq_len": 2048, "recompute": "selective-ops"},
    "titan-router": {"model": "qwen3-30b-a3b", "gpu": "h100", "gpus": 8, "framework": "torchtitan@2025-10", "ep": 8,
                     "seq_len": 2048, "recompute": "selective-ops"},
    "titan-old": {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "framework": "torchtitan@2024-08",
                  "seq_len": 4096},
    "titan-tp": {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "framework": "torchtitan", "seq_len": 4096,
                 "tp": 4, "cp": 2, "recompute": "none", "loss": "standard"},
    "simple": {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "framework": "torchtitan", "seq_len": 4096,
               "recompute": "selective-ops", "settings": {"strategy.fsdp_schedule": "simple"}},
    "every token": {"model": WITH_EVERY_EXPERT, "gpu": "h100", "framework": "hf", "seq_len": 2048, "recompute": "full",
                    "precision": "bf16"},
    "shared keys": {"model": WITH_SHARED_KEYS, "gpu": "h100", "framework": "hf", "seq_len": 2048, "recompute": "full",
                    "precision": "bf16"},
    "convolutions": {"model": WITH_CONVOLUTIONS, "gpu": "h100", "framework": "hf", "seq_len": 2048},
    "delta": {"model": WITH_DELTA_NETS, "gpu": "h100", "framework": "hf", "seq_len": 2048},
    "mamba2": {"model": WITH_MAMBA2, "gpu": "h100", "framework": "hf", "seq_len": 2048},
    "again": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "attention": "eager",
              "recompute": "full"},
    "lora": {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "seq_len": 1024, "recompute": "full",
             "lora": "16:all-linear", "precision": "bf16", "settings": {"workload.lora_dropout": 0.05}},
    "mamba": {"model": WITH_MAMBA, "gpu": "h100", "framework": "hf", "seq_len": 2048, "precision": "bf16"},
    "channels": {"model": WITH_DELTA_ATTENTION, "gpu": "h100", "framework": "hf", "seq_len": 2048},
    "wide": {"model": WITH_MAMBA, "gpu": "h100", "gpus": 8, "framework": "fsdp2", "seq_len": 2048},
    "jamba": {"model": WITH_JAMBA, "gpu": "h100", "framework": "hf", "seq_len": 2048},
    "images": {"model": WITH_IMAGES, "gpu": "h100", "framework": "hf", "seq_len": 2048, "image_size": "448x448",
               "attention": "efficient", "images": 2},
}  # fmt: skip

OTHER_NORM = Norm(kind="layernorm", bias=True)
MOVES: dict[str, dict[str, tuple[Any, ...]]] = {
    "Model": {
        "hidden": ("llama", 4096), "vocab": ("llama", 64000), "embedding_dim": ("llama", 64),
        "tied": ("llama", False), "head": ("llama", False), "head_bias": ("llama", True),
        "head_scaled": ("llama", True), "head_softcap": ("llama", True), "final_norm": ("llama", OTHER_NORM),
        "embedding_dropout": ("hf", 0.1, {"ends": ()}), "outside": ("gpt2", ()), "ends": ("t5", ()),
        "tail": ("llama", Tail(dropout=0.1)), "fixed_tokens": ("whisper", {"encoder": 3000}),
        "views": ("images", 4), "image_tokens": ("images", 300),
    },
    "Block": {
        "hidden": ("llama", 4096), "norm": ("llama", OTHER_NORM), "norms": ("llama", 4),
        "norm_place": ("llama", "both"), "parallel": ("hf", True), "dropout": ("llama", 0.1),
        "summed_branches": ("falcon", False), "cross_attention": ("t5", None), "cross_hidden": ("t5", 64),
        "mlp": ("llama", Mlp(ffn=1024)), "attention": ("llama", Attention(heads=16, kv_heads=16, head_dim=64)),
        "layer_scale": ("llama", True), "scaled": ("lora", True), "weight_views": ("again", True),
        "wide_residual": ("mamba", False),
        "mixer": ("convolutions", ShortConvolution(kind="short convolution", taps=9)),
    },
    "ShortConvolution": {"taps": ("convolutions", 9), "bias": ("convolutions", True)},
    "GatedDeltaNet": {
        "key_heads": ("delta", 8), "value_heads": ("delta", 64), "key_dim": ("delta", 64), "value_dim": ("delta", 64),
        "taps": ("delta", 9), "packed": ("delta", False), "apart": ("delta", True), "doubled": ("delta", True),
    },
    "Mamba2": {
        "heads": ("mamba2", 8), "head_dim": ("mamba2", 32), "state": ("mamba2", 64), "groups": ("mamba2", 4),
        "taps": ("mamba2", 9), "chunk": ("mamba2", 64), "conv_bias": ("mamba2", False), "bias": ("mamba2", True),
        "normed": ("mamba2", False), "scaled": ("mamba2", True),
    },
    "DeltaAttention": {"heads": ("channels", 16), "head_dim": ("channels", 64), "taps": ("channels", 9)},
    "Mamba": {
        "inner": ("mamba", 512), "state": ("mamba", 64), "rank": ("mamba", 64), "taps": ("mamba", 9),
        "conv_bias": ("mamba", False), "bias": ("jamba", True), "norms": ("jamba", "none"),
    },
    "Attention": {
        "head_gate": ("llama", True),
        "heads": ("llama", 64), "kv_heads": ("llama", 16), "head_dim": ("llama", 128), "q_bias": ("llama", True),
        "k_bias": ("llama", True), "v_bias": ("llama", True), "o_bias": ("llama", True), "qk_norm": ("llama", "head"),
        "qk_norm_kind": ("gemma3", OTHER_NORM), "packed_qkv": ("llama", True), "kv_form": ("hf", "copied"),
        "returns_cache": ("cache", True), "sinks": ("hf", True), "causal": ("llama", False), "window": ("llama", 64),
        "softcap": ("hf", True), "rotary": ("llama", False), "rotary_fraction": ("llama", 0.5),
        "rotary_joined": ("llama", True), "rotary_tables": ("llama", 2), "half_rotary": ("llama", True),
        "wide_rotary": ("llama", True), "scores_bias": ("llama", "relative"), "contiguous_queries": ("llama", True),
        "fused": ("llama", False), "explicit_mask": ("gemma3", True), "upcast_softmax": ("bf16", False),
        "dropout": ("hf", 0.1), "wide_scores": ("bf16", True), "rotary_pairs": ("llama", 1),
        "joins_images": ("images", False), "joins_batch": ("images", True), "chunk": ("images", 16),
        "chunked": ("llama", True, {"window": 64}), "complex_rotary": ("hf", True), "scaled_queries": ("llama", True),
        "outlives_sum": ("every token", False), "wider_tables": ("llama", 256), "value_norm": ("shared keys", False),
        "values_of_keys": ("shared keys", True), "shares_keys": ("shared keys", False),
        "late_qk_norm": ("hf", True, {"qk_norm": "head"}), "output_gate": ("hf", True),
        "returns_weights": ("again", True), "rotary_by_token": ("hf", True, {"rotary_fraction": 0.5}),
        "latent": ("llama", LatentAttention(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64)),
    },
    "LatentAttention": {
        "q_lora_rank": ("latent", 64), "kv_lora_rank": ("latent", 256), "qk_nope_head_dim": ("latent", 64),
        "qk_rope_head_dim": ("latent", 32), "v_head_dim": ("latent", 64), "rotation": ("latent", "pairs"),
    },
    "Mlp": {
        "ffn": ("llama", 4096), "gated": ("llama", False), "bias": ("llama", True), "activation": ("llama", "relu"),
        "packed": ("llama", True), "dropout": ("llama", 0.1), "cast_before_down": ("hf", True),
    },
    "MixtureOfExperts": {
        "every_expert": ("moe", True), "own_norms": ("moe", True),
        "experts": ("moe", 30), "topk": ("moe", 8), "ffn": ("moe", 704), "gated": ("moe", False),
        "activation": ("moe", "relu"), "shared_ffn": ("moe", 1), "shared_gate": ("moe", False),
        "router_bias": ("moe", True), "expert_bias": ("moe", True), "scores": ("moe", "chosen"),
        "fp32_router": ("moe", True), "group_limited": ("moe", True), "normalised": ("moe", True),
        "narrow_weights": ("moe", False), "scaled": ("moe", True), "shared_packed": ("moe", True),
        "n_group": ("copies", 8), "topk_group": ("copies", 2, {"n_group": 8}),
    },
    "Norm": {
        "kind": ("llama", "layernorm"), "weight": ("llama", False), "bias": ("llama", True),
        "scale": ("llama", "wide"), "rescales_input": ("llama", True),
        "written_out": ("llama", True, {"kind": "layernorm"}), "powered": ("hf", True),
    },
    "TowerEnds": {
        "tower": ("t5", "vision"), "lookups": ("llama", ()), "embedding_dim": ("llama", 64), "pixels": ("llama", 1),
        "mel_bins": ("llama", 1), "scaled": ("leaf", True), "norm": ("llama", OTHER_NORM), "dropout": ("llama", 0.1),
        "end_norm": ("t5", OTHER_NORM), "end_dropout": ("whisper", 0.1), "position_taps": ("images", 4),
        "projector": ("images", Projector(linears=(512,))),
    },
    "Tail": {
        "dropout": ("llama", 0.1), "transform": ("llama", "gelu"), "pooled": ("llama", True), "classes": ("vit", 10),
        "wide_logits": ("mamba", False), "wide_loss": ("llama", False),
        "narrow_before_446": ("cache", False),
        "transform_norm": ("llama", Norm(), {"transform": "gelu"}),
    },
    "SharedSettings": {
        "optimizer": ("llama", "lion"), "optimizer_impl": ("llama", "fused"), "optimizer_in_backward": ("llama", True),
        "offload_to": ("offload", "nvme"), "attention": ("llama", "efficient"), "loss": ("llama", "chunked"),
        "kernels": ("llama", "fused"), "reduce_dtype": ("llama", "bf16"), "precision_aware": ("megatron", True),
        "main_params_dtype": ("narrow", "fp16"), "exp_avg_dtype": ("narrow", "fp8"),
        "exp_avg_sq_dtype": ("narrow", "fp32"), "te": ("narrow", "2.13"), "checkpoint": ("cache", "non-reentrant"),
        "compile": ("llama", "blocks"), "compress_activations": ("llama", "int8"),
        "cp_kind": ("ring", "a2a"), "etp": ("moe", 8), "mtp": ("llama", 1),
        "moe_dispatcher": ("experts", "deepep"), "expert_imbalance": ("experts", 2.0),
        "expert_overload": ("experts", 2.0), "experts_padded": ("experts", True), "ep_overlap": ("experts", True),
        "flash_version": ("llama", 1), "tp_comm_overlap": ("megatron", True), "cuda_graphs": ("experts", "full"),
        "zero_gather": ("deepspeed", "broadcast"),
        "microbatch_group": ("chunks", 1), "first_stage_layers": ("megatron", 1), "last_stage_layers": ("megatron", 1),
        "embedding_in_split": ("megatron", True, {"loss_in_split": True}), "loss_in_split": ("megatron", True),
        "wgrad_fusion": ("megatron", False), "float8_all_gather": ("llama", True), "fsdp_schedule": ("llama", "simple"),
        "reshard": ("titan-old", "never"), "expandable_segments": ("hf", None), "lora_dropout": ("adapters", 0.1),
        "adapter_dtype": ("adapters", "bf16"), "autocast": ("megatron", True), "also_train": ("adapters", ("head",)),
        "quantize": ("llama", "nf4"), "lora_kernels": ("adapters", "fused"), "gptq_group": ("gptq", 32),
        "quantize_experts": ("stacks", True), "frozen_fp32": ("adapters", True),
        "lora_classes": ("megatron", "swift", {"lora": "16:qkv,o"}),
        "prepare_kbit": ("nf4", True), "kbit_ends": ("nf4", True, {"prepare_kbit": True}), "bnb": ("nf4", "0.42"),
        "kbit_experts": ("stacks", True),
        "wide_embedding_moments": ("8-bit", True),
        "sgd_weight_decay": ("sgd", True), "tiled_loss": ("llama", True, {"loss": "fused-linear"}),
        "uncast_loss": ("llama", True),
        "galore_rank": ("galore", 64), "galore_targets": ("galore", ("q",)), "bucket_view": ("ddp", True),
        "whole_accumulation": ("llama", True), "partition_activations": ("cache", True),
        "grad_accum_dtype": ("offload", "fp32"), "reduce_bucket_size": ("offload", 64),
        "overlap_comm": ("deepspeed", True), "overlap_param_gather": ("nodes", False),
        "overlap_p2p": ("woven", False),
        "zero_prefetch_bucket": ("offload", 64),
        "persistence_threshold": ("offload", 64), "max_live_parameters": ("offload", 64),
        "sub_group_size": ("offload", 64), "seq_len": ("llama", 4096), "global_batch": ("llama", 32),
        "global_tokens": ("llama", 2**20, {"global_batch": 0}), "blas_workspace": ("llama", 64),
        "float8": ("float8", "delayed"), "float8_transposes": ("float8", False),
        "float8_attention": ("float8", True), "float8_activation": ("float8", True),
        "float8_transpose_cache": ("frozen", False),
        "attention_mask": ("llama", True), "longest_first": ("llama", True),
    },
    "Habits": {
        "full_shard": ("megatron", True), "gather": ("llama", "live"), "flat_units": ("llama", True),
        "split_root": ("moe", True), "casts_inputs": ("wide", False), "keeps_last_block": ("llama", True),
        "pipeline_accumulates_whole": ("chunks", False), "pipeline_keeps_outputs": ("chunks", True),
        "pipeline_engine": ("megatron", "1f1b"), "gradients_follow_optimizer": ("offload", False),
        "offload_streams": ("streams", None), "gradient_copy": ("llama", True), "persistent_gradients": ("llama", True),
        "communicators": ("megatron", ("tp",)),
        "narrow_gradients": ("float8", False), "own_main_weights": ("narrow", False),
        "adds_gradients": ("llama", True),
        "wraps_replicas": ("replicas", False), "reshards_root": ("root", False), "fills_experts": ("filled", False),
        "bucket": ("megatron", Bucket(elements=10**6)), "overlaps_reduction": ("falcon", False),
        "overlaps_gather": ("nodes", False), "overlaps_stages": ("woven", False),
        "overlaps_input_gradients": ("megatron", False), "reduces_each_input": ("whole", True),
        "reduces_whole": ("megatron", True), "reduction_width": ("megatron", 8),
        "flattened_gradients": ("llama", True), "main_gradients": ("llama", 1), "vocab_multiple": ("gpt2", 8),
        "schedule_variables": ("megatron", False), "makes_masks": ("llama", True),
        "keeps_stage_outputs": ("megatron", True), "handle_workspaces": ("llama", False), "engine": ("llama", True),
        "lazy_kernels": ("llama", False),
        "rotary": ("llama", "fused"), "repeats_keys": ("llama", True), "gathers_inputs": ("megatron", True),
        "saved_attention": ("titan", ()), "keeps_exchange": ("titan-moe", ()), "compiles_parts": ("titan-parts", False),
        "keeps_biased": ("titan-biased", False), "leaves_router": ("titan-router", False),
        "exchanges_rows": ("titan-moe", False),
        "graph_keeps_matmuls": ("simple", None), "packed_weights": ("muon", None),
        "layer_wise": ("soap", None), "vocab_parallel": ("titan-tp", True), "reentrant": ("cache", False),
        "stops_early": ("lora", False),
        "zeroes_gradients": ("ddp", None), "whole_accumulation": ("llama", True), "mixed_units": ("adapters", True),
        "quantised_head": ("int8", True), "quantises_half": ("nf4", True), "expert_loop": ("moe", True),
        "in_place_kernels": ("megatron", ("norms",)), "equal_rounds": ("chunks", None),
        "zero_optimizer": ("deepspeed", None), "tensor_parallel": ("megatron", False),
        "checkpoints_first": ("every", False), "losses": ("hf", {}), "widths": ("llama", {}),
    },
    "BlockConfig": {
        "gathers_logits": ("titan-tp", False),
        "weight": ("llama", 4), "residual": ("llama", 4), "autocast": ("hf", False), "kernels": ("llama", "fused"),
        "attention": ("hf", "flash"), "dropout": ("gpt2", False), "reentrant": ("cache", False),
        "partitioned": ("cache", True), "grouped_kernel": ("llama", False), "sdpa": ("gemma3", False),
        "rotary": ("llama", "fused"), "compiled": ("llama", True), "compressed": ("llama", 8),
        "keeps_attention": ("titan", False), "keeps_exchange": ("titan-moe", False),
        "compiled_parts": ("titan-parts", False),
        "keeps_biased": ("titan-biased", False), "operators": ("titan-router", ()),
        "exchanges_rows": ("titan-moe", False),
        "keeps_every_matmul": ("titan", True), "adds_gradients": ("llama", True), "trainable": ("llama", False),
        "checkpointed": ("llama", frozenset({"attention"})), "also_train": ("adapters", frozenset({"head"})),
        "quantize": ("llama", "nf4"), "quantised_head": ("int8", True), "quantised_input_kept": ("nf4", True),
        "quantised_copy_kept": ("int8", True), "quantised_experts": ("stacks", True),
        "quantised_from_half": ("nf4", True), "norm_weight": ("llama", 4), "end_weight": ("nf4", 4),
        "casts_input": ("wide", False),
        "embedding_leaf": ("cache", True), "expert_loop": ("moe", True), "in_place": ("megatron", ("norms",)),
        "cp_kind": ("ring", "a2a"), "lora": ("adapters", None), "narrow": ("float8", None),
        "float8_attention": ("float8", True), "float8_activation": ("float8", True),
        "transposes_weights": ("frozen", True), "stops_early": ("lora", False),
    },
    "GPU": {
        "arch": ("llama", "Ampere"), "compute_capability": ("llama", 8.0), "memory_bytes": ("llama", 2**36),
        "context_bytes": ("llama", 2**30), "eager_context_bytes": ("megatron-old", 2**30),
        "bandwidth_bytes_per_s": ("llama", 1e12), "peak_flops": ("llama", {"bf16": 1e14, "fp32": 1e13, "fp16": 1e14}),
        "pcie_bytes_per_s": ("offload", 1e9), "c2c_bytes_per_s": ("offload", 4e11),
    },
    "Node": {
        "gpus": ("llama", 4), "hosts": ("alone", 2), "tiers": ("waits", ()),
        "host_memory_bytes": ("offload", 2**36, {"tiers": ()}), "host_memory_bytes_per_s": ("offload", 1e12),
        "intra_link_bytes_per_s": ("llama", 1e10), "internode_bytes_per_s_per_gpu": ("megatron", 1e9),
        "adapters": ("nodes", 2),
    },
    "MemoryTier": {
        "name": ("waits", "cxl"), "capacity_bytes": ("offload", 2**36), "bandwidth_bytes_per_s": ("offload", 1e9),
    },
}  # fmt: skip
"""A job in which each field counts, and another value than the job's (for a flag without one, the other); with a third
entry, what else has to be different on both sides."""
BY_WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "framework": ("llama", {"framework": "fsdp1"}), "precision": ("llama", {"precision": "bf16"}),
    "zero": ("llama", {"zero": 2}), "dp": ("llama", {"gpus": 4}), "tp": ("llama", {"tp": 2}),
    "sp": ("megatron", {"sp": False}), "pp": ("llama", {"pp": 2}), "cp": ("llama", {"cp": 2}),
    "ep": ("moe", {"ep": 4}), "dp_replicate": ("llama", {"dp_replicate": 2}),
    "pp_schedule": ("megatron", {"pp_schedule": "interleaved"}),
    "vpp": ("chunks", {"vpp": 4}), "recompute": ("llama", {"recompute": "full"}),
    "offload": ("llama", {"offload": "optimizer,params"}), "micro_batch": ("llama", {"micro_batch": 2}),
    "lora": ("adapters", {"lora": "8"}), "images": ("images", {"images": 3}),
    "image_size": ("images", {"image_size": "224x224"}),
    "image_pixels": ("images", {"settings": {"workload.image_pixels": 100_000}}),
    "vision": ("images", {"vision": "frozen"}),
    "peft": ("bf16", {"lora": "16", "settings": {"strategy.peft": "0.11"}}),
}  # fmt: skip
"""Settings that are an axis of a grid, or a word that stands for several fields."""
BESIDE: dict[str, tuple[str, Any]] = {
    "eval_micro_batch": ("hf", 2), "eval_batches_kept": ("hf", 2), "eval_new_tokens": ("hf", 2),
    "state_dict": ("llama", "full-on-gpu"), "loading": ("llama", "rank-0"), "resumes": ("llama", True),
    "kbit_passing": ("nf4", True),
}  # fmt: skip
"""Shared settings that move what a job does beside its steps, and nothing of a step."""
CHOICES = {
    "Model": {"name", "family", "positions", "max_positions", "groups", "order", "recording", "images"},
    "BlockGroup": {"count", "tower", "block"},
    "Pattern": {"count", "runs"},
    "Block": {"recorded", "counted"},
    "Attention": {"sdpa"},
    "ShortConvolution": {"kind"},
    "GatedDeltaNet": {"kind"},
    "Mamba2": {"kind"},
    "Mamba": {"kind"},
    "DeltaAttention": {"kind"},
    "TowerEnds": {"patch"},
    "Habits": {
        "name", "zero", "lacks", "schedules", "fork_schedules", "fork", "even_chunks", "expandable_segments",
        "float8", "kernels", "autocasts_half",
        "optimizer_impl", "adapters_follow_base", "casts_adapters", "splits_packed", "expert_modules", "own_code",
        "allocator", "shares_optimizer",
        "capabilities", "loss", "tensor_loss", "recompute", "sharded_recompute", "shards_over_ranks", "cp_kind",
        "calls_sdpa",
        "attention_library", "evaluation_cache", "evaluation_logits", "reduces_as", "autocast_over_shards", "lora_rank",
        "ends_in_split", "pipeline_keeps_weights", "unsharded_alone", "broadcasts_ahead",
    },
    "BlockConfig": {"windowed", "gathered_input_saved"},
    "GPU": {"name", "vendor", "nvidia_smi_bytes", "nvlink_bytes_per_s", "gpus_per_node", "flash_attention"},
    "Node": {"name", "gpu", "runs"},
}  # fmt: skip
"""Fields that decide before a figure is computed, and so move none of a job whose defaults are resolved: which layouts,
kernels and settings exist, what is the default, what is refused (each has tests of its own); and those of a model's
order, of recorded modules, counted blocks and windows, whose effect :mod:`test_patterns` and the tests of modules
hold; and DDP's broadcast, of which the
allocator alone has something."""


def total(array: Any) -> float:
    return float(np.sum(np.asarray(array, dtype=float)))


def figures(model: Model, grid: Grid, gpu: GPU, node: Node) -> tuple[Any, ...]:
    """Return the bytes of each component by phase, the seconds of a step by part, and what there is room for."""
    census = ModelOnGrid(model, grid)
    overhead = overhead_of(gpu, grid, grid.layouts[0])
    held: dict[tuple[str, str, str], float] = {}
    ledger = build_ledger(census, overhead.workspaces)
    for term in (*ledger.terms, *ledger.holes, *off_gpu_terms(census)):
        for phase in term.phases:
            key = term.component, phase, term.pool
            held[key] = held.get(key, 0) + total(term.bytes)
    times = step_times(census, gpu, node, rates_for(gpu, grid))
    rooms = (*limits(grid, gpu), *(pool.most for pool in pools_of(census, node)))
    return sorted(held.items()), [total(part) for part in times.parts], [total(room) for room in rooms]


@cache
def job(name: str) -> tuple[Model, Grid, GPU, Node]:
    one = single(**JOBS[name])
    return one.job.model, one.grid, one.job.gpu, one.job.node


def changed(record: Any, kind: type[BaseModel], values: dict[str, Any]) -> Any:
    """Return a record in which every record of a kind has other values; a field that is absent stays so."""
    if isinstance(record, tuple):
        return tuple(changed(item, kind, values) for item in record)
    if not isinstance(record, BaseModel):
        return record
    update = {name: changed(getattr(record, name), kind, values) for name in type(record).model_fields}
    return record.model_copy(update=update | (values if isinstance(record, kind) else {}))


def with_value(record: str, name: str, values: dict[str, Any]) -> tuple[Any, ...]:
    """Return the figures of a job in which the fields of a record have some values."""
    model, grid, gpu, node = job(name)
    if record in {"GPU", "Node", "MemoryTier"}:
        kind = {"GPU": GPU, "Node": Node, "MemoryTier": MemoryTier}[record]
        return figures(model, grid, *(changed(part, kind, values) for part in (gpu, node)))
    if record == "SharedSettings":
        return figures(model, replace(grid, fixed=grid.fixed.model_copy(update=values)), gpu, node)
    if record == "Habits":
        other = replace(grid)
        vars(other)["habits"] = replace(grid.habits, **values)
        return figures(model, other, gpu, node)
    kind = next(kind for kind in RECORDS if kind.__name__ == record)
    return figures(changed(model, kind, values), grid, gpu, node)


def other_value(record: str, field: str, name: str, value: Any) -> Any:
    """Return the value of the table; of a flag the other one, of a framework's tables one in which an entry differs."""
    if (record, field) == ("SharedSettings", "expandable_segments"):
        return not job(name)[1].fixed.expandable_segments
    if record != "Habits" or value not in (None, {}):
        return value
    habits = job(name)[1].habits
    if field == "losses":
        losses = habits.losses
        return dict.fromkeys(losses, losses["chunked"])
    if field == "widths":
        return {precision: widths._replace(moment=2) for precision, widths in habits.widths.items()}
    return None if field == "zero_optimizer" else not getattr(habits, field)


ROWS = [
    (record, field, *row) for record, rows in MOVES.items() if record != "BlockConfig" for field, row in rows.items()
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}.{row[1]}")
def test_another_value_moves_a_byte_or_a_second(row: tuple[Any, ...]) -> None:
    record, field, name, value, *rest = row
    beside: dict[str, Any] = rest[0] if rest else {}
    assert with_value(record, name, {field: other_value(record, field, name, value), **beside}) != with_value(
        record, name, beside
    )


@pytest.mark.parametrize("field", MOVES["BlockConfig"])
def test_another_way_to_run_a_block_moves_a_byte_or_a_second(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, value = MOVES["BlockConfig"][field]
    model, grid, gpu, node = job(name)
    plain, own = figures(model, grid, gpu, node), settings._setting

    def setting(*args: Any) -> BlockConfig:
        return own(*args)._replace(**{field: value})

    monkeypatch.setattr(settings, "_setting", setting)
    clear: Callable[[], None] = getattr(settings.block_settings, "cache_clear", lambda: None)
    clear()
    try:
        assert figures(model, replace(grid), gpu, node) != plain
    finally:
        clear()


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [("elements", "deepspeed", 10**6), ("elements_per_rank", "megatron", 10**9), ("bytes", "ddp", 2**20)],
)
def test_another_size_of_buckets_moves_a_second(field: str, name: str, value: int) -> None:
    """DeepSpeed's and Megatron-LM's count elements, Megatron-LM's by rank too, DDP's bytes."""
    own = job(name)[1].habits.bucket
    assert getattr(own, field)
    assert with_value("Habits", name, {"bucket": own._replace(**{field: value})}) != with_value("Habits", name, {})


@pytest.mark.parametrize("field", BY_WORDS)
def test_another_word_moves_a_byte_or_a_second(field: str) -> None:
    name, words = BY_WORDS[field]
    one = single(**{**JOBS[name], **words})
    assert figures(one.job.model, one.grid, one.job.gpu, one.job.node) != figures(*job(name))


@pytest.mark.parametrize("field", BESIDE)
def test_another_value_moves_what_is_beside_the_steps_alone(field: str) -> None:
    name, value = BESIDE[field]
    model, grid, gpu, node = job(name)
    other = replace(grid, fixed=grid.fixed.model_copy(update={field: value}))
    overhead = overhead_of(gpu, grid, grid.layouts[0])
    before, after = (occasions_of(ModelOnGrid(model, each), overhead, node) for each in (grid, other))
    assert before != after
    assert figures(model, grid, gpu, node) == figures(model, other, gpu, node)


def tables() -> Iterator[tuple[str, set[str]]]:
    for record in RECORDS:
        name = record.__name__
        words = {*BY_WORDS, *BESIDE} if record is SharedSettings else set()
        yield name, {*MOVES.get(name, {}), *words, *CHOICES.get(name, ()), *IDENTITY.get(name, ())}


def test_the_tables_name_every_field_once() -> None:
    for (name, listed), record in zip(tables(), RECORDS, strict=True):
        assert sorted(listed) == sorted(names_of(record)), name
    assert set(Strategy.model_fields) <= set(SharedSettings.model_fields)
