"""Decoders of Transformers with a gated MLP, in flat form.

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
from memcalc.errors import InputError


def llama(c: Keys) -> Flat:
    """Llama 1 to 3, Yi, DeepSeek LLM, SmolLM 2 and many more."""
    return decoder(c, (32000, 4096, 11008, 32, 32, None, None, 2048), **activation(c), **attention_bias(c, mlp=True))


def mistral(c: Keys) -> Flat:
    """Mistral."""
    return decoder(c, (32000, 4096, 14336, 32, 32, 8, None, 131072), **activation(c), **window(c, 4096))


def qwen2(c: Keys) -> Flat:
    """Qwen 1.5 to 2.5."""
    flat = decoder(c, (151936, 4096, 22016, 32, 32, 32, None, 32768), **activation(c), **biases(qkv=True))
    return {**flat, **_qwen_window(c, flat["n_layers"])}


def qwen3(c: Keys) -> Flat:
    """Qwen 3."""
    flat = decoder(
        c, (151936, 4096, 22016, 32, 32, 32, 128, 32768), **activation(c), **attention_bias(c), qk_norm="head"
    )
    return {**flat, **_qwen_window(c, flat["n_layers"])}


def _qwen_window(c: Keys, layers: int) -> Flat:
    """Return the window, which Qwen uses only where told to, and only from block `max_window_layers` on."""
    used, first = c.flag("use_sliding_window"), c.maybe("max_window_layers", 28, low=0)
    flat = window(c, 4096, layers=layers) if used else {}
    if flat and first and c.words("layer_types") is None and first < layers:
        raise InputError("config key max_window_layers", first, f"only 0, or at least the {layers} layers, is modelled")
    c.get("sliding_window layer_types")
    return {} if first and c.words("layer_types") is None else flat


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
        **window(c, 4096, every=2, layers=flat["n_layers"]),
        "softcap": c.get("attn_logit_softcapping", 50.0) is not None,
        "fused": False,
        "head_softcap": c.get("final_logit_softcapping", 30.0) is not None,
    }


def gemma3_text(c: Keys) -> Flat:
    """Gemma 3's text decoder: a window in five blocks of six, norms on q and k."""
    flat = decoder(c, (262208, 2304, 9216, 26, 8, 4, 256, 131072), tied=True, **_gemma_block(c))
    every = c.size("sliding_window_pattern _sliding_window_pattern", 6, low=2)
    return {
        **flat,
        **window(c, 4096, every=every, layers=flat["n_layers"]),
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
    return {**flat, "norm": "layernorm", "norm_weight": False, "norm_bias": False}


def olmo2(c: Keys) -> Flat:
    """OLMo 2: norms after the branches, and on the whole of q and k."""
    flat = decoder(c, (50304, 4096, 11008, 32, 32, None, None, 2048), **activation(c), **attention_bias(c))
    return {**flat, "norm_place": "branch", "norm_scale": "wide", "qk_norm": "full", "wide_rotary": True}


def smollm3(c: Keys) -> Flat:
    """SmolLM 3; every fourth block has no rotary embedding, which changes no size."""
    c.only("use_sliding_window", False)
    c.get("sliding_window layer_types")
    sizes: Sizes = (128256, 2048, 11008, 36, 16, 4, None, 32768)
    return decoder(c, sizes, tied=True, **activation(c), **attention_bias(c, mlp=True))


def granite(c: Keys) -> Flat:
    """Granite: Llama with multipliers."""
    return {**llama(c), "embedding_scaled": True, "head_scaled": True}


def glm(c: Keys) -> Flat:
    """GLM-4 (2024): a bias on q, k and v, gate and up in one projection."""
    flat = decoder(c, (151552, 4096, 13696, 40, 32, 2, 128, 131072), **activation(c))
    return {
        **flat,
        **biases(qkv=c.flag("attention_bias", True)),
        "packed_mlp": True,
        "rotary_joined": True,
        "rotary_fraction": rotary_fraction(c, 0.5),
    }


def glm4(c: Keys) -> Flat:
    """GLM-4 (2025): norms on both sides."""
    return {**glm(c), "norms": 4, "norm_place": "both"}


def cohere(c: Keys) -> Flat:
    """Command R: parallel blocks after one LayerNorm without bias."""
    flat = decoder(c, (256000, 8192, 22528, 40, 64, None, None, 8192), tied=True, **activation(c), **attention_bias(c))
    qk_norm = "full" if c.flag("use_qk_norm") else "none"
    return {**flat, "norm": "layernorm", "norm_bias": False, "norms": 1, "parallel": True, "qk_norm": qk_norm}


def internlm2(c: Keys) -> Flat:
    """InternLM 2, whose class comes with its checkpoint: Llama with q, k and v in one projection."""
    own = c.flag("bias", True)
    flat = decoder(c, (103168, 4096, 11008, 32, 32, None, None, 2048), **activation(c), **biases(qkv=own, o=own))
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
        llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, phi3, olmo, olmo2, smollm3, granite, glm, glm4,
        cohere, internlm2, baichuan,
    )
}  # fmt: skip
