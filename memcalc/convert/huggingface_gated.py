"""Decoders of Transformers with a gated MLP, dense or routed, in flat form.

Defaults of absent keys are those of the config class (Transformers 5.23, models/*/configuration_*.py); biases, norms
and packed projections are those of the model class (models/*/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.huggingface_keys import (
    Flat,
    Keys,
    Sizes,
    activation,
    attention_bias,
    biases,
    decoder,
    each_nth,
    expert_groups,
    rotary_fraction,
    window,
)


def llama(c: Keys) -> Flat:
    """Llama 1 to 3, Yi, DeepSeek LLM, SmolLM 2 and many more."""
    return decoder(c, (32000, 4096, 11008, 32, 32, None, None, 2048), **activation(c), **attention_bias(c, mlp=True))


def mistral(c: Keys) -> Flat:
    """Mistral."""
    return decoder(c, (32000, 4096, 14336, 32, 32, 8, None, 131072), **activation(c), **window(c, 4096))


def qwen2(c: Keys) -> Flat:
    """Qwen 1.5 to 2.5."""
    flat = decoder(c, (151936, 4096, 22016, 32, 32, 32, None, 32768), **activation(c), **biases(qkv=True))
    return {**flat, **_late_window(c, flat["n_layers"])}


def qwen2_vl_text(c: Keys) -> Flat:
    """The text model of Qwen2-VL."""
    flat = decoder(c, (152064, 8192, 29568, 80, 64, 8, None, 32768), **activation(c), **biases(qkv=True))
    return {**flat, **_late_window(c, flat["n_layers"])}


def qwen2_5_vl_text(c: Keys) -> Flat:
    """The text model of Qwen2.5-VL, which is Qwen2-VL's."""
    return qwen2_vl_text(c)


def qwen3_vl_text(c: Keys) -> Flat:
    """The text model of Qwen3-VL."""
    sizes: Sizes = (151936, 4096, 22016, 32, 32, 32, 128, 128000)
    return decoder(c, sizes, **activation(c), **attention_bias(c), qk_norm="head")


def qwen3_vl_moe_text(c: Keys) -> Flat:
    """The text model of Qwen3-VL with experts."""
    sizes: Sizes = (151936, 2048, 5632, 24, 16, 16, 128, 128000)
    flat = decoder(c, sizes, **activation(c), **attention_bias(c), qk_norm="head")
    c.get("sliding_window")
    return {**flat, "moe": {**_qwen_experts(c, 60, 4, 1408, flat["n_layers"]), "normalised": True}}


def qwen3(c: Keys) -> Flat:
    """Qwen 3."""
    flat = decoder(
        c, (151936, 4096, 22016, 32, 32, 32, 128, 32768), **activation(c), **attention_bias(c), qk_norm="head"
    )
    return {**flat, **_late_window(c, flat["n_layers"])}


def _late_window(c: Keys, layers: int) -> Flat:
    """Return the window, which Qwen uses only where told to, and only from block `max_window_layers` on."""
    first = c.maybe("max_window_layers", 28, low=0) or 0
    return _told_window(c, lambda index: index < first, layers)


def _told_window(c: Keys, full: Callable[[int], bool] | None, layers: int, default: int | None = 4096) -> Flat:
    """Return the window where the config says that it is used."""
    if c.flag("use_sliding_window"):
        return window(c, default, full, layers)
    c.get("sliding_window")
    c.words("layer_types")
    return {}


def gemma(c: Keys) -> Flat:
    """Gemma 1."""
    c.only("use_bidirectional_attention", False)
    c.get("hidden_activation")  # the class reads hidden_act
    sizes: Sizes = (256000, 3072, 24576, 28, 16, 16, 256, 8192)
    act = activation(c, "gelu_pytorch_tanh")
    return decoder(c, sizes, tied=True, **act, **attention_bias(c), norm_scale="plus-one", embedding_scaled=True)


def gemma2(c: Keys) -> Flat:
    """Gemma 2: norms on both sides, a window in every other block, soft caps."""
    flat = decoder(c, (256000, 2304, 9216, 26, 8, 4, 256, 8192), tied=True, **_gemma_block(c))
    return {
        **flat,
        **window(c, 4096, each_nth(2), flat["n_layers"]),
        "softcap": c.get("attn_logit_softcapping", 50.0) is not None,
        "sdpa": False,
        "head_softcap": c.get("final_logit_softcapping", 30.0) is not None,
    }


def gemma3_text(c: Keys) -> Flat:
    """Gemma 3's text decoder: a window in five blocks of six, norms on q and k."""
    flat = decoder(c, (262208, 2304, 9216, 26, 8, 4, 256, 131072), tied=True, **_gemma_block(c))
    step = c.size("sliding_window_pattern _sliding_window_pattern", 6, low=2)
    return {
        **flat,
        **window(c, 4096, each_nth(step), flat["n_layers"]),
        "qk_norm": "head",
        "rotary_tables": 2,
        "softcap": c.get("attn_logit_softcapping") is not None,
        "head_softcap": c.get("final_logit_softcapping") is not None,
    }


def _gemma_block(c: Keys) -> Flat:
    c.only("use_bidirectional_attention", False)
    act = activation(c, "gelu_pytorch_tanh", "hidden_activation hidden_act")
    return {**act, **attention_bias(c), "norms": 4, "norm_place": "both", "norm_scale": "plus-one"}


def phi3(c: Keys) -> Flat:
    """Phi-3 and Phi-4: q, k and v in one projection, gate and up in another."""
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        c.only(key, False)
    flat = decoder(c, (32064, 3072, 8192, 32, 32, None, None, 4096), **activation(c), **window(c, None))
    dropout = {**flat["dropout"], "block": c.rate("resid_pdrop"), "embedding": c.rate("embd_pdrop")}
    return {**flat, "packed_qkv": True, "packed_mlp": True, "rotary_joined": True, "dropout": dropout}


def olmo(c: Keys) -> Flat:
    """OLMo 1: norms without learned vectors."""
    flat = decoder(c, (50304, 4096, 11008, 32, 32, None, None, 2048), **activation(c), **attention_bias(c))
    return {**flat, "norm": "layernorm", "norm_weight": False, "norm_bias": False, "norm_scale": "wide"}


def olmo2(c: Keys) -> Flat:
    """OLMo 2: norms after the branches, and on the whole of q and k."""
    flat = decoder(c, (50304, 4096, 11008, 32, 32, None, None, 2048), **activation(c), **attention_bias(c))
    return {**flat, "norm_place": "branch", "norm_scale": "wide", "qk_norm": "full", "wide_rotary": True}


def smollm3(c: Keys) -> Flat:
    """SmolLM 3: every fourth block has no rotary embedding, which changes no size; those alone may have a window."""
    sizes: Sizes = (128256, 2048, 11008, 36, 16, 4, None, 32768)
    flat = decoder(c, sizes, tied=True, **activation(c), **attention_bias(c, mlp=True))
    turned, step = c.get("no_rope_layers"), c.size("no_rope_layer_interval", 4)
    listed = turned if isinstance(turned, list) and len(turned) == flat["n_layers"] else None
    windowed = _told_window(c, lambda i: bool(listed[i] if listed else (i + 1) % step), flat["n_layers"], None)
    return {**flat, **windowed}


def granite(c: Keys) -> Flat:
    """Granite: Llama with multipliers."""
    return {**llama(c), "embedding_scaled": True, "head_scaled": True}


def seed_oss(c: Keys) -> Flat:
    """Seed-OSS: a switch of its own for the bias of o, and a dropout on both branches."""
    flat = decoder(c, (155136, 4096, 27648, 64, 80, 8, 128, 524288), **activation(c))
    biased = biases(qkv=c.flag("attention_bias", True), o=c.flag("attention_out_bias"), mlp=c.flag("mlp_bias"))
    dropout = {"attention": c.rate("attention_dropout", 0.1), "block": c.rate("residual_dropout", 0.1)}
    return {**flat, **biased, "dropout": dropout}


def glm(c: Keys) -> Flat:
    """GLM-4 (2024): a bias on q, k and v, gate and up in one projection."""
    flat = decoder(c, (151552, 4096, 13696, 40, 32, 2, 128, 131072), **activation(c))
    bias, fraction = biases(qkv=c.flag("attention_bias", True)), rotary_fraction(c, 0.5)
    return {**flat, **bias, "packed_mlp": True, "rotary_joined": True, "rotary_fraction": fraction,
            "rotary_pairs": 1}  # fmt: skip


def glm4(c: Keys) -> Flat:
    """GLM-4 (2025): norms on both sides."""
    return {**glm(c), "norms": 4, "norm_place": "both"}


def cohere(c: Keys) -> Flat:
    """Command R: parallel blocks after one LayerNorm without bias."""
    flat = decoder(c, (256000, 8192, 22528, 40, 64, None, None, 8192), tied=True, **activation(c), **attention_bias(c))
    qk_norm = "full" if c.flag("use_qk_norm") else "none"
    return {**flat, "norm": "layernorm", "norm_bias": False, "norms": 1, "parallel": True, "qk_norm": qk_norm,
            "norm_written_out": True, "wide_rotary": True}  # fmt: skip


def internlm2(c: Keys) -> Flat:
    """InternLM 2, whose class comes with its checkpoint: Llama with q, k and v in one projection."""
    biased = c.flag("bias", True)
    flat = decoder(c, (103168, 4096, 11008, 32, 32, None, None, 2048), **activation(c), **biases(qkv=biased, o=biased))
    return {**flat, "packed_qkv": True}


def baichuan(c: Keys) -> Flat:
    """Baichuan 1 and 2, whose class comes with its checkpoint; the 13B models have ALiBi and no position key."""
    rope = "max_position_embeddings" in c
    length = c.size("max_position_embeddings model_max_length", 4096)
    c.get("model_max_length")
    flat = decoder(c, (64000, 4096, 11008, 32, 32, None, None, 4096), **activation(c))
    return {**flat, "packed_qkv": True, "max_positions": length, "positions": "rope" if rope else "alibi"}


GATED: dict[str, Callable[[Keys], Flat]] = {
    family.__name__: family
    for family in (
        llama, mistral, qwen2, qwen2_vl_text, qwen2_5_vl_text, qwen3, qwen3_vl_text, gemma, gemma2, gemma3_text, phi3,
        olmo, olmo2, smollm3, granite, glm, glm4,
        seed_oss, cohere, internlm2, baichuan,
    )
}  # fmt: skip


def _experts(c: Keys, experts: int, topk: int | None, names: str = "num_local_experts num_experts") -> Flat:
    """Return the experts, and those of each token."""
    return {"experts": c.size(names, experts), "topk": c.size("num_experts_per_tok", topk)}


def mixtral(c: Keys) -> Flat:
    """Mixtral."""
    flat = decoder(c, (32000, 4096, 14336, 32, 32, 8, None, 131072), **activation(c), **window(c, None))
    return {**flat, "moe": {**_experts(c, 8, 2), "normalised": True}}


def phimoe(c: Keys) -> Flat:
    """Phi-3.5 MoE: LayerNorm, and a bias on the head."""
    biased, head = c.flag("attention_bias"), c.flag("lm_head_bias")
    flat = decoder(c, (32064, 4096, 6400, 32, 32, 8, None, 131072), **activation(c), **window(c, None))
    moe, dropout = _experts(c, 16, 2), {**flat["dropout"], "block": c.rate("hidden_dropout")}
    return {**flat, **biases(qkv=biased, o=biased, lm_head=head), "norm": "layernorm", "moe": moe, "dropout": dropout}


def olmoe(c: Keys) -> Flat:
    """OLMoE: norms on the whole of q and k."""
    flat = decoder(c, (50304, 2048, 2048, 16, 16, None, None, 4096), **activation(c), **attention_bias(c))
    moe = {**_experts(c, 64, 8, "num_experts num_local_experts"), **_narrow(c)}
    return {**flat, "qk_norm": "full", "moe": moe}


def qwen2_moe(c: Keys) -> Flat:
    """Qwen 1.5 and 2 with experts: a shared expert behind a gate; told to, a window in every other early block."""
    flat = decoder(c, (151936, 2048, 5632, 24, 16, 16, None, 32768), **activation(c))
    shared, layers = c.size("shared_expert_intermediate_size", 5632), flat["n_layers"]
    first = c.maybe("max_window_layers", 28, low=0) or 0
    moe = {**_qwen_experts(c, 60, 4, 1408, layers), "shared_ffn": shared, "shared_gate": True}
    seen = _told_window(c, lambda index: index % 2 == 1 or index >= first, layers)
    return {**flat, **seen, **biases(qkv=c.flag("qkv_bias", True)), "moe": moe}


def qwen3_moe(c: Keys) -> Flat:
    """Qwen 3 with experts; told to, a window in all blocks."""
    for key, value in (("qkv_bias", False), ("use_qk_norm", True), ("shared_expert_intermediate_size", 0)):
        c.only(key, value)  # of Qwen3-Coder's config; no class reads them
    flat = decoder(c, (151936, 2048, 6144, 24, 32, 4, None, 32768), **activation(c), **attention_bias(c))
    moe = _qwen_experts(c, 128, 8, 768, flat["n_layers"])
    return {**flat, **_told_window(c, None, flat["n_layers"]), "qk_norm": "head", "moe": moe}


def _qwen_experts(c: Keys, experts: int, topk: int, ffn: int, layers: int) -> Flat:
    """Return the experts, and the blocks without them: those listed, and all but each n-th."""
    step, listed = c.size("decoder_sparse_step", 1), c.sizes("mlp_only_layers")
    dense = [index for index in range(layers) if index in listed or (index + 1) % step]
    return {
        **_experts(c, experts, topk, "num_experts num_local_experts"),
        "ffn": c.size("moe_intermediate_size", ffn),
        **({"dense_layers": dense} if dense else {}),
        **_narrow(c),
    }


def _narrow(c: Keys) -> Flat:
    """Return how the router's weights end: divided by their sum where the config says so, and cast to its logits."""
    return {"normalised": c.flag("norm_topk_prob"), "narrow_weights": True}


def gpt_oss(c: Keys) -> Flat:
    """gpt-oss: biases on the router and the experts, learned sinks, a window in every other block."""
    flat = decoder(c, (201088, 2880, 2880, 36, 64, 8, 64, 131072), **attention_bias(c, True))
    c.only("hidden_act", "silu")
    moe = {**_experts(c, 128, 4), "scores": "chosen"}
    return {
        **flat,
        **window(c, 128, each_nth(2), flat["n_layers"]),
        "activation": "swiglu_clamped",
        "norm_scale": "wide",
        "half_rotary": True,
        "sinks": True,
        "sdpa": False,
        "moe": {**moe, "router_bias": True, "expert_bias": True},
    }


def glm4_moe(c: Keys) -> Flat:
    """GLM-4.5."""
    flat = decoder(c, (151552, 4096, 10944, 46, 96, 8, None, 131072), **activation(c))
    flat["head_dim"] = flat["head_dim"] or max(1, flat["hidden"] // flat["heads"])  # floored, as the class does
    moe = {**_deepseek_experts(c, experts=128, topk=8, ffn=1408, shared=1, dense=1), **_sigmoid(c)}
    qk_norm = "head" if c.flag("use_qk_norm") else "none"
    bias, fraction = biases(qkv=c.flag("attention_bias")), rotary_fraction(c, 0.5)
    return {**flat, **bias, "qk_norm": qk_norm, "rotary_fraction": fraction, "moe": moe}


def deepseek_v2(c: Keys) -> Flat:
    """DeepSeek V2: latent attention."""
    flat = _deepseek(c, (102400, 4096, 11008, 32, 32, None, None, 2048), "complex")
    moe = _deepseek_experts(c, experts=64, topk=None, ffn=1407, shared=2, dense=0)
    limited = c.text("topk_method", "greedy") == "group_limited_greedy"
    groups = expert_groups(c, 1, 1) if limited else {}
    return {**flat, "moe": {**moe, **groups, "group_limited": limited}}


def deepseek_v3(c: Keys) -> Flat:
    """DeepSeek V3 and R1, Kimi K2; the layers that predict further tokens are not part of Transformers' class."""
    flat = _deepseek(c, (129280, 7168, 18432, 61, 128, 128, None, 4096), "pairs")
    moe = _deepseek_experts(c, experts=256, topk=8, ffn=2048, shared=1, dense=3)
    return {**flat, "moe": {**moe, **_sigmoid(c, 8, 4)}}


def _sigmoid(c: Keys, groups: int = 1, chosen: int = 1) -> Flat:
    """Return how the router of DeepSeek V3 scores and limits."""
    return {"scores": "sigmoid", "normalised": c.flag("norm_topk_prob", True), **expert_groups(c, groups, chosen)}


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
        **_experts(c, experts, topk, "n_routed_experts num_experts num_local_experts"),
        "ffn": c.size("moe_intermediate_size", ffn),
        "shared": c.maybe("n_shared_experts", shared, low=0) or 0,
        "first_dense": c.size("first_k_dense_replace", dense, low=0),
        "fp32_router": True,
        "scaled": True,
    }


EXPERTS: dict[str, Callable[[Keys], Flat]] = {
    "kimi_k2": deepseek_v3,
    **{
        family.__name__: family
        for family in (
            mixtral,
            phimoe,
            olmoe,
            qwen2_moe,
            qwen3_moe,
            qwen3_vl_moe_text,
            gpt_oss,
            glm4_moe,
            deepseek_v2,
            deepseek_v3,
        )
    },
}
