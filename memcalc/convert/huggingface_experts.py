"""Mixtures of experts of Transformers, in flat form.

Defaults of absent keys are those of the config class (Transformers 5.23, models/*/configuration_*.py); biases, norms
and packed projections are those of the model class (models/*/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.huggingface_common import (
    Flat,
    Sizes,
    activation,
    attention_bias,
    biases,
    decoder,
    rotary_fraction,
    window,
)
from memcalc.convert.huggingface_keys import Keys


def mixtral(c: Keys) -> Flat:
    """Mixtral."""
    flat = decoder(c, (32000, 4096, 14336, 32, 32, 8, None, 131072), **activation(c), **window(c, None))
    moe = {"experts": c.size("num_local_experts num_experts", 8), "topk": _topk(c, 2), "normalised": True}
    return {**flat, "moe": moe}


def phimoe(c: Keys) -> Flat:
    """Phi-3.5 MoE: LayerNorm, and a bias on the head."""
    own, head = c.flag("attention_bias"), c.flag("lm_head_bias")
    flat = decoder(c, (32064, 4096, 6400, 32, 32, 8, None, 131072), **activation(c), **window(c, None))
    moe = {"experts": c.size("num_local_experts num_experts", 16), "topk": _topk(c, 2)}
    dropout = {**flat["dropout"], "block": c.rate("hidden_dropout")}
    return {**flat, **biases(qkv=own, o=own, lm_head=head), "norm": "layernorm", "moe": moe, "dropout": dropout}


def olmoe(c: Keys) -> Flat:
    """OLMoE: norms on the whole of q and k."""
    flat = decoder(c, (50304, 2048, 2048, 16, 16, None, None, 4096), **activation(c), **attention_bias(c))
    moe = {"experts": c.size("num_experts num_local_experts", 64), "topk": _topk(c, 8), **_narrow(c)}
    return {**flat, "qk_norm": "full", "moe": moe}


def qwen2_moe(c: Keys) -> Flat:
    """Qwen 1.5 and 2 with experts: a shared expert behind a gate."""
    flat = decoder(c, (151936, 2048, 5632, 24, 16, 16, None, 32768), **activation(c))
    shared = c.size("shared_expert_intermediate_size", 5632)
    moe = _qwen_experts(c, 60, 4, 1408)
    return {**flat, **biases(qkv=c.flag("qkv_bias", True)), "moe": {**moe, "shared_ffn": shared, "shared_gate": True}}


def qwen3_moe(c: Keys) -> Flat:
    """Qwen 3 with experts."""
    flat = decoder(c, (151936, 2048, 6144, 24, 32, 4, None, 32768), **activation(c), **attention_bias(c))
    return {**flat, "qk_norm": "head", "moe": _qwen_experts(c, 128, 8, 768)}


def _qwen_experts(c: Keys, experts: int, topk: int, ffn: int) -> Flat:
    c.only("use_sliding_window", False)
    c.only("decoder_sparse_step", 1)
    c.only("mlp_only_layers", [])
    c.get("sliding_window layer_types")
    return {
        "experts": c.size("num_experts num_local_experts", experts),
        "topk": _topk(c, topk),
        "ffn": c.size("moe_intermediate_size", ffn),
        **_narrow(c),
    }


def _narrow(c: Keys) -> Flat:
    """Return how the router's weights end: divided by their sum where the config says so, and cast to its logits."""
    return {"normalised": c.flag("norm_topk_prob"), "narrow_weights": True}


def gpt_oss(c: Keys) -> Flat:
    """gpt-oss: biases on the router and the experts, learned sinks, a window in every other block."""
    flat = decoder(c, (201088, 2880, 2880, 36, 64, 8, 64, 131072), **attention_bias(c, True))
    c.only("hidden_act", "silu")
    moe = {"experts": c.size("num_local_experts num_experts", 128), "topk": _topk(c, 4)}
    return {
        **flat,
        **window(c, 128, every=2, layers=flat["n_layers"]),
        "activation": "swiglu_clamped",
        "sinks": True,
        "moe": {**moe, "router_bias": True, "expert_bias": True},
    }


def glm4_moe(c: Keys) -> Flat:
    """GLM-4.5."""
    flat = decoder(c, (151552, 4096, 10944, 46, 96, 8, None, 131072), **activation(c))
    moe = {**_deepseek_experts(c, experts=128, topk=8, ffn=1408, shared=1, dense=1), **_sigmoid(c)}
    qk_norm = "head" if c.flag("use_qk_norm") else "none"
    bias, fraction = biases(qkv=c.flag("attention_bias")), rotary_fraction(c, 0.5)
    return {**flat, **bias, "qk_norm": qk_norm, "rotary_fraction": fraction, "moe": moe}


def deepseek_v2(c: Keys) -> Flat:
    """DeepSeek V2: latent attention."""
    flat = _deepseek(c, (102400, 4096, 11008, 32, 32, None, None, 2048), "complex")
    moe = _deepseek_experts(c, experts=64, topk=None, ffn=1407, shared=2, dense=0)
    return {**flat, "moe": {**moe, "group_limited": c.text("topk_method", "greedy") == "group_limited_greedy"}}


def deepseek_v3(c: Keys) -> Flat:
    """DeepSeek V3 and R1, Kimi K2; the layers that predict further tokens are not part of Transformers' class."""
    flat = _deepseek(c, (129280, 7168, 18432, 61, 128, 128, None, 4096), "pairs")
    return {**flat, "moe": {**_deepseek_experts(c, experts=256, topk=8, ffn=2048, shared=1, dense=3), **_sigmoid(c)}}


def _sigmoid(c: Keys) -> Flat:
    """Return how the router of DeepSeek V3 scores."""
    return {"scores": "sigmoid", "normalised": c.flag("norm_topk_prob", True)}


def _deepseek(c: Keys, sizes: Sizes, rotation: str) -> Flat:
    c.only("mlp_bias", False)
    flat = decoder(c, sizes, **activation(c))
    mla = {
        "q_lora_rank": c.maybe("q_lora_rank", 1536),
        "kv_lora_rank": c.size("kv_lora_rank", 512),
        "qk_nope_head_dim": c.size("qk_nope_head_dim", 128),
        "qk_rope_head_dim": c.size("qk_rope_head_dim", 64),
        "v_head_dim": c.size("v_head_dim", 128),
        "rotation": rotation,
    }
    return {**flat, **attention_bias(c), "kv_heads": None, "head_dim": None, "mla": mla}


def _deepseek_experts(c: Keys, *, experts: int, topk: int | None, ffn: int, shared: int, dense: int) -> Flat:
    c.only("moe_layer_freq", 1)
    return {
        "experts": c.size("n_routed_experts num_experts num_local_experts", experts),
        "topk": _topk(c, topk),
        "ffn": c.size("moe_intermediate_size", ffn),
        "shared": c.maybe("n_shared_experts", shared, low=0) or 0,
        "first_dense": c.size("first_k_dense_replace", dense, low=0),
        "fp32_router": True,
        "scaled": True,
    }


def _topk(c: Keys, default: int | None) -> int:
    return c.size("num_experts_per_tok", default)


EXPERTS: dict[str, Callable[[Keys], Flat]] = {
    "kimi_k2": deepseek_v3,
    **{
        family.__name__: family
        for family in (mixtral, phimoe, olmoe, qwen2_moe, qwen3_moe, gpt_oss, glm4_moe, deepseek_v2, deepseek_v3)
    },
}
