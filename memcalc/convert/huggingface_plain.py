"""Decoders of Transformers with LayerNorm, most of them without a gate, in flat form.

Defaults of absent keys are those of the config class (Transformers 5.23, models/*/configuration_*.py); biases, norms
and packed projections are those of the model class (models/*/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.huggingface_common import (
    Flat,
    activation,
    attention_bias,
    biases,
    decoder,
    rotary_fraction,
    window,
)
from memcalc.convert.huggingface_keys import Keys


def gpt2(c: Keys) -> Flat:
    """GPT-2, and all that is shaped like it."""
    c.only("add_cross_attention", False)
    c.only("reorder_and_upcast_attn", False)
    return {**_gpt2_sizes(c), **biases(True, True, True), **activation(c, "gelu_new", "activation_function"),
            "upcast_softmax": False}  # fmt: skip


def gpt_bigcode(c: Keys) -> Flat:
    """StarCoder and SantaCoder: GPT-2 with multi-query attention."""
    c.only("add_cross_attention", False)
    flat = _gpt2_sizes(c)
    one = c.flag("multi_query", True)
    c.maybe("num_key_value_heads")
    act = activation(c, "gelu_pytorch_tanh", "activation_function")
    return {**flat, **biases(True, True, True), **act, "kv_heads": 1 if one else flat["heads"]}


def _gpt2_sizes(c: Keys) -> Flat:
    hidden = c.size("n_embd hidden_size", 768)
    return {
        "vocab": c.size("vocab_size", 50257),
        "hidden": hidden,
        "ffn": c.maybe("n_inner") or 4 * hidden,
        "n_layers": c.size("n_layer num_hidden_layers", 12),
        "heads": c.size("n_head num_attention_heads", 12),
        "max_positions": c.size("n_positions max_position_embeddings", 1024),
        "positions": "learned",
        "tied": c.flag("tie_word_embeddings", True),
        "gated": False,
        "norm": "layernorm",
        "packed_qkv": True,
        "dropout": {
            "attention": c.rate("attn_pdrop", 0.1),
            "block": c.rate("resid_pdrop", 0.1),
            "embedding": c.rate("embd_pdrop", 0.1),
        },
    }


def gptj(c: Keys) -> Flat:
    """GPT-J: parallel blocks, a bias on the head."""
    flat = _gpt2_sizes(c)
    dropout = {place: c.rate(f"{key}_pdrop") for place, key in _PDROP.items()}
    sizes = {
        "vocab": c.size("vocab_size", 50400),
        "hidden": c.size("n_embd hidden_size", 4096),
        "n_layers": c.size("n_layer num_hidden_layers", 28),
        "heads": c.size("n_head num_attention_heads", 16),
        "max_positions": c.size("n_positions max_position_embeddings", 2048),
    }
    head_dim = max(1, sizes["hidden"] // sizes["heads"])
    turned = c.maybe("rotary_dim", 64) or head_dim
    return {
        **flat,
        **sizes,
        **biases(mlp=True, lm_head=True),
        **activation(c, "gelu_new", "activation_function"),
        "ffn": c.maybe("n_inner") or 4 * sizes["hidden"],
        "tied": c.flag("tie_word_embeddings"),
        "positions": "rope",
        "rotary_fraction": min(1.0, turned / head_dim),
        "packed_qkv": False,
        "fused": False,
        "parallel": True,
        "norms": 1,
        "dropout": dropout,
    }


_PDROP = {"attention": "attn", "block": "resid", "embedding": "embd"}


def opt(c: Keys) -> Flat:
    """OPT; the 350m model has narrow embeddings and norms after the branches."""
    c.only("layer_norm_elementwise_affine", True)
    c.get("activation_dropout")  # the class has none
    hidden = c.size("hidden_size", 768)
    width, before = c.maybe("word_embed_proj_dim", 768) or hidden, c.flag("do_layer_norm_before", True)
    bias, rows = c.flag("enable_bias", True), c.size("max_position_embeddings", 2048)
    flat = {
        "vocab": c.size("vocab_size", 50272),
        "hidden": hidden,
        "ffn": c.size("ffn_dim", 3072),
        "n_layers": c.size("num_hidden_layers", 12),
        "heads": c.size("num_attention_heads", 12),
        "max_positions": rows,
        "position_rows": rows + 2,
        "positions": "learned",
        "position_index": "token",
        "tied": c.flag("tie_word_embeddings", True),
        "gated": False,
        "norm": "layernorm",
        "norm_place": "pre" if before else "post",
        "final_norm": before and not c.flag("_remove_final_layer_norm"),
        "dropout": {"attention": c.rate("attention_dropout"), "block": c.rate("dropout", 0.1)},
    }
    if width != hidden:
        flat["embedding_dim"] = width
        flat["outside"] = [
            {"name": "project_in", "parameters": width * hidden},
            {"name": "project_out", "parameters": width * hidden, "place": "last"},
        ]
    return {**flat, **biases(bias, bias, bias), **activation(c, "relu", "activation_function")}


def bloom(c: Keys) -> Flat:
    """BLOOM: ALiBi, and a norm after the embedding."""
    hidden = c.size("hidden_size n_embed", 64)
    return {
        "vocab": c.size("vocab_size", 250880),
        "hidden": hidden,
        "ffn": 4 * hidden,
        "n_layers": c.size("n_layer num_hidden_layers", 2),
        "heads": c.size("n_head num_attention_heads", 8),
        "max_positions": c.size("seq_length", 2048),
        "positions": "alibi",
        "tied": c.flag("tie_word_embeddings", True),
        "gated": False,
        "activation": "gelu_bloom",
        "norm": "layernorm",
        "packed_qkv": True,
        "scores_bias": "in-product",
        "fused": False,
        "outside": [{"name": "embedding_norm", "parameters": 2 * hidden}],
        "dropout": {"attention": c.rate("attention_dropout"), "block": c.rate("hidden_dropout")},
        **biases(True, True, True),
    }


def mpt(c: Keys) -> Flat:
    """MPT: ALiBi, no bias anywhere, not even in the norms."""
    c.only("no_bias", True)
    c.only("expansion_ratio", 4)
    attention = c.table("attn_config") or Keys({})
    attention.only("qk_ln", False)
    attention.only("alibi", True)
    hidden, dropout = c.size("d_model hidden_size", 2048), attention.rate("attn_pdrop")
    attention.refuse_rest()
    return {
        "vocab": c.size("vocab_size", 50368),
        "hidden": hidden,
        "ffn": 4 * hidden,
        "n_layers": c.size("n_layers num_hidden_layers", 24),
        "heads": c.size("n_heads num_attention_heads", 16),
        "max_positions": c.size("max_seq_len", 2048),
        "positions": "alibi",
        "tied": c.flag("tie_word_embeddings", True),
        "gated": False,
        "activation": "gelu",
        "norm": "layernorm",
        "norm_bias": False,
        "packed_qkv": True,
        "scores_bias": "added",
        "fused": False,
        "dropout": {"attention": dropout, "block": c.rate("resid_pdrop"), "embedding": c.rate("emb_pdrop")},
    }


def gpt_neox(c: Keys) -> Flat:
    """GPT-NeoX and Pythia: attention and MLP in parallel, each after a norm of its own."""
    attention = c.flag("attention_bias", True)
    flat = decoder(
        c, (50432, 6144, 24576, 44, 64, None, None, 2048), **activation(c, "gelu"), **_layernorm(packed=True)
    )
    return {
        **flat,
        **biases(attention, attention, True),
        "parallel": c.flag("use_parallel_residual", True),
        "rotary_fraction": rotary_fraction(c, 0.25),
        "dropout": {**flat["dropout"], "block": c.rate("hidden_dropout"), "embedding": c.rate("hidden_dropout")},
    }


def _layernorm(packed: bool = False) -> Flat:
    return {"norm": "layernorm", "gated": False, "packed_qkv": packed}


def falcon(c: Keys) -> Flat:
    """Falcon: the 7b model has one norm a block, the newer ones have two; dropout of scores is with ALiBi alone."""
    hidden, heads = c.size("hidden_size n_embed", 4544), c.size("num_attention_heads n_head", 71)
    new, parallel, one = (c.flag(*key) for key in _FALCON_FLAGS)
    bias, alibi, norms = c.flag("bias"), c.flag("alibi"), c.maybe("num_ln_in_parallel_attn")
    kv_heads, attention = c.maybe("num_kv_heads n_head_kv"), c.rate("attention_dropout")
    return {
        "vocab": c.size("vocab_size", 65024),
        "hidden": hidden,
        "ffn": c.maybe("ffn_hidden_size") or 4 * hidden,
        "n_layers": c.size("num_hidden_layers n_layer", 32),
        "heads": heads,
        "kv_heads": kv_heads if new else 1 if one else None,
        "max_positions": c.size("max_position_embeddings", 2048),
        "positions": "alibi" if alibi else "rope",
        "tied": c.flag("tie_word_embeddings", True),
        "parallel": parallel or new,
        "norms": (2 if norms is None else norms) if new else 1 if parallel else 2,
        "dropout": {"attention": attention if alibi else 0.0, "block": c.rate("hidden_dropout")},
        "summed_branches": parallel or new,
        "kv_form": "expanded" if new else "copied" if one else "views",
        "scores_bias": "added" if alibi else "none",
        "explicit_mask": True,
        "upcast_softmax": False,
        **_layernorm(packed=True),
        **biases(bias, bias, bias),
        **activation(c, "gelu", "activation"),
    }


_FALCON_FLAGS = (("new_decoder_architecture", False), ("parallel_attn", True), ("multi_query", True))


def phi(c: Keys) -> Flat:
    """Phi-1 to Phi-2: parallel blocks after one norm, a bias on everything."""
    flat = decoder(c, (51200, 2048, 8192, 24, 32, None, None, 2048), **activation(c, "gelu_new"), **_layernorm())
    return {
        **flat,
        **biases(True, True, True, True),
        "parallel": True,
        "norms": 1,
        "qk_norm": "head" if c.flag("qk_layernorm") else "none",
        "rotary_fraction": rotary_fraction(c, 0.5),
        "dropout": {**flat["dropout"], "block": c.rate("resid_pdrop"), "embedding": c.rate("embd_pdrop")},
    }


def starcoder2(c: Keys) -> Flat:
    """StarCoder 2."""
    c.only("mlp_type", "default")
    c.get("activation_function")  # the class reads hidden_act
    bias = c.flag("use_bias", True)
    flat = decoder(c, (49152, 3072, 12288, 30, 24, 2, None, 4096), tied=True, **activation(c, "gelu_pytorch_tanh"),
                   **_layernorm(), **biases(bias, bias, bias), **window(c, None))  # fmt: skip
    dropout = {"block": c.rate("residual_dropout"), "embedding": c.rate("embedding_dropout")}
    return {**flat, "dropout": {**flat["dropout"], **dropout}}


def nemotron(c: Keys) -> Flat:
    """Nemotron-4: LayerNorm with scale 1 + w, squared ReLU."""
    flat = decoder(c, (256000, 6144, 24576, 32, 48, None, None, 4096), **activation(c, "relu2"), **_layernorm())
    fraction = rotary_fraction(c, 0.5)
    return {**flat, **attention_bias(c, mlp=True), "rotary_joined": True, "rotary_fraction": fraction}


def stablelm(c: Keys) -> Flat:
    """StableLM."""
    c.only("qk_layernorm", False)
    flat = decoder(c, (50304, 2560, 6912, 32, 32, None, None, 4096), **activation(c), norm="layernorm")
    parallel = c.flag("use_parallel_residual")
    dropout = {**flat["dropout"], "block": c.rate("hidden_dropout")}
    norms = 1 if parallel else 2
    fraction = rotary_fraction(c, 0.25)
    return {**flat, **biases(c.flag("use_qkv_bias")), "parallel": parallel, "norms": norms, "dropout": dropout,
            "rotary_fraction": fraction}  # fmt: skip


PLAIN: dict[str, Callable[[Keys], Flat]] = {
    family.__name__: family
    for family in (gpt2, gpt_bigcode, gptj, opt, bloom, mpt, gpt_neox, falcon, phi, starcoder2, nemotron, stablelm)
}
