"""Decoders of Transformers with LayerNorm, most of them without a gate, in flat form.

Defaults of absent keys are those of the config class (Transformers 5.23, models/*/configuration_*.py); biases, norms
and packed projections are those of the model class (models/*/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.huggingface_keys import (
    Flat,
    Keys,
    activation,
    attention_bias,
    biases,
    decoder,
    family,
    rotary_fraction,
    window,
)


def gpt2(c: Keys) -> Flat:
    """GPT-2, and all that is shaped like it."""
    c.only("add_cross_attention", False)
    c.only("reorder_and_upcast_attn", False)
    return {**_gpt2(c), **biases(True, True, True), **activation(c, "gelu_new", "activation_function"),
            "upcast_softmax": False}  # fmt: skip


def gpt_bigcode(c: Keys) -> Flat:
    """StarCoder and SantaCoder: GPT-2 with multi-query attention."""
    c.only("add_cross_attention", False)
    flat = _gpt2(c)
    multi_query = c.flag("multi_query", True)
    c.maybe("num_key_value_heads")
    act = activation(c, "gelu_pytorch_tanh", "activation_function")
    return {**flat, **biases(True, True, True), **act, "kv_heads": 1 if multi_query else flat["heads"]}


def _gpt2(c: Keys, name: str = "gpt2") -> Flat:
    flat = family(c, name)
    return {**flat, "ffn": c.maybe("n_inner") or 4 * flat["hidden"]}


def gptj(c: Keys) -> Flat:
    """GPT-J: parallel blocks, a bias on the head."""
    flat = _gpt2(c, "gptj")
    head_dim = max(1, flat["hidden"] // flat["heads"])
    fraction = min(1.0, (c.maybe("rotary_dim", 64) or head_dim) / head_dim)
    act = activation(c, "gelu_new", "activation_function")
    return {**flat, **biases(mlp=True, lm_head=True), **act, "rotary_fraction": fraction}


def opt(c: Keys) -> Flat:
    """OPT; the 350m model has narrow embeddings and norms after the branches."""
    c.only("layer_norm_elementwise_affine", True)
    c.get("activation_dropout")  # the class has none
    flat = family(c, "opt")
    hidden, bias = flat["hidden"], c.flag("enable_bias", True)
    width, before = c.maybe("word_embed_proj_dim", 768) or hidden, c.flag("do_layer_norm_before", True)
    if width != hidden:
        flat["embedding_dim"] = width
        flat["outside"] = [
            {"name": "project_in", "parameters": width * hidden},
            {"name": "project_out", "parameters": width * hidden, "place": "last"},
        ]
    return {
        **flat,
        **biases(bias, bias, bias),
        **activation(c, "relu", "activation_function"),
        "position_rows": flat["max_positions"] + 2,
        "norm_place": "pre" if before else "post",
        "final_norm": before and not c.flag("_remove_final_layer_norm"),
    }


def bloom(c: Keys) -> Flat:
    """BLOOM: ALiBi, and a norm after the embedding."""
    flat = family(c, "bloom")
    hidden = flat["hidden"]
    outside = [{"name": "embedding_norm", "parameters": 2 * hidden}]
    return {**flat, **biases(True, True, True), "ffn": 4 * hidden, "outside": outside}


def mpt(c: Keys) -> Flat:
    """MPT: ALiBi, no bias anywhere, not even in the norms."""
    c.only("no_bias", True)
    c.only("expansion_ratio", 4)
    attention = c.table("attn_config") or Keys({})
    attention.only("qk_ln", False)
    attention.only("alibi", True)
    flat, dropout = family(c, "mpt"), attention.rate("attn_pdrop")
    attention.refuse_rest()
    return {**flat, "ffn": 4 * flat["hidden"], "dropout": {**flat["dropout"], "attention": dropout}}


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
    flat = family(c, "falcon")
    new, parallel = c.flag("new_decoder_architecture"), c.flag("parallel_attn", True)
    multi_query, bias, alibi = c.flag("multi_query", True), c.flag("bias"), c.flag("alibi")
    norms, kv_heads = c.maybe("num_ln_in_parallel_attn"), c.maybe("num_kv_heads n_head_kv")
    if not alibi:
        flat["dropout"]["attention"] = 0.0
    return {
        **flat,
        **biases(bias, bias, bias),
        **activation(c, "gelu", "activation"),
        "ffn": c.maybe("ffn_hidden_size") or 4 * flat["hidden"],
        "kv_heads": kv_heads if new else 1 if multi_query else None,
        "kv_form": "expanded" if new else "copied" if multi_query else "views",
        "positions": "alibi" if alibi else "rope",
        "scores_bias": "added" if alibi else "none",
        "parallel": parallel or new,
        "summed_branches": parallel or new,
        "norms": (2 if norms is None else norms) if new else 1 if parallel else 2,
    }


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
    return {**flat, **attention_bias(c, mlp=True), "rotary_joined": True, "rotary_fraction": fraction,
            "norm_scale": "plus-one"}  # fmt: skip


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
    reader.__name__: reader
    for reader in (gpt2, gpt_bigcode, gptj, opt, bloom, mpt, gpt_neox, falcon, phi, starcoder2, nemotron, stablelm)
}
