"""Decoders of Transformers that have a function each: those with LayerNorm, Llama 4, Gemma 4, in flat form.

Defaults of absent keys are those of the config class (Transformers 5.23, models/*/configuration_*.py); biases, norms
and packed projections are those of the model class (models/*/modeling_*.py).

Llama 4 and Gemma 4 are those of Transformers 5.24. Llama 4: chunked attention with complex rotary embeddings, and
experts that each run over every token. Gemma 4: heads of two widths, norms of values too, values that are keys on
blocks that see all tokens.
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
from memcalc.errors import InputError


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


def llama4_text(c: Keys) -> Flat:
    """Llama 4: every fourth block sees all tokens and has no positions, every so many have experts."""
    flat = decoder(c, (202048, 5120, 8192, 48, 40, 8, 128, 131072), **activation(c), **attention_bias(c))
    layers, expert = flat["n_layers"], flat["ffn"]
    flat["head_dim"] = flat["head_dim"] or max(1, flat["hidden"] // flat["heads"])  # floored, as the class does
    turned = _turned(c, layers)
    scaled = bool(c.get("attn_temperature_tuning", True))  # the first files have a number
    c.get("floor_scale attn_scale for_llm_compressor")
    unturned = [index for index, rotary in enumerate(turned) if not rotary]
    norms = {"qk_norm": "head", "late_qk_norm": True, "qk_norm_weight": False} if c.flag("use_qk_norm", True) else {}
    return {
        **flat,
        **norms,
        **_chunks(c, turned),
        **({"unturned_layers": unturned, "scaled_queries": scaled} if unturned else {}),
        **_llama4_experts(c, layers, expert),
        "ffn": c.size("intermediate_size_mlp", 16384),
        "complex_rotary": True,
        "outlives_sum": True,
        "upcast_softmax": False,
    }


def _turned(c: Keys, layers: int) -> list[bool]:
    """Return of each block whether it has a rotary embedding."""
    step, listed = c.size("no_rope_layer_interval", 4), c.sizes("no_rope_layers")
    if listed and len(listed) < layers:
        raise InputError("config key no_rope_layers", listed, f"must have a number for each of the {layers} layers")
    return [bool(flag) for flag in listed[:layers]] or [(index + 1) % step != 0 for index in range(layers)]


def _chunks(c: Keys, turned: list[bool]) -> Flat:
    """Return the length of the parts in which attention stays, and the blocks that see all tokens."""
    width, kinds = c.maybe("attention_chunk_size", 8192), c.words("layer_types")
    if kinds is None:
        kinds = ["chunked_attention" if rotary and width else "full_attention" for rotary in turned]
    if len(kinds) < len(turned) or not {*kinds} <= {"chunked_attention", "full_attention"}:
        allowed = f"must call each of the {len(turned)} layers chunked_attention or full_attention"
        raise InputError("config key layer_types", kinds, allowed)
    full = [index for index, _ in enumerate(turned) if kinds[index] == "full_attention"]
    if len(full) == len(turned):
        return {}
    if width is None:
        raise InputError("config key attention_chunk_size", width, "must be given where layers have chunked attention")
    return {"window": width, "chunked": True, **({"full_layers": full} if full else {})}


def _llama4_experts(c: Keys, layers: int, ffn: int) -> Flat:
    """Return the routed part of the blocks that have one."""
    step = c.size("interleave_moe_layer_step", 1)
    listed, stated = c.sizes("moe_layers"), c.get("moe_layers") is not None
    experts, topk = c.size("num_local_experts num_experts", 16), c.size("num_experts_per_tok", 1)
    dense = [index for index in range(layers) if (index not in listed if stated else (index + 1) % step)]
    if len(dense) == layers:
        return {}
    moe = {"experts": experts, "topk": topk, "ffn": ffn, "shared": 1, "every_expert": True}
    return {"moe": {**moe, **({"dense_layers": dense} if dense else {})}}


KINDS = ("sliding_attention", "full_attention")


def gemma4_text(c: Keys) -> Flat:
    """Gemma 4 without embeddings of each layer."""
    return _gemma4(c, 131072, 512, 256)


def gemma4_unified_text(c: Keys) -> Flat:
    """The text model of Gemma 4 without a vision tower, whose blocks are the same."""
    return _gemma4(c, 262144, 1024, 0)


def _gemma4(c: Keys, positions: int, window: int, embeddings: int) -> Flat:
    for key, usual, part in (
        ("hidden_size_per_layer_input", embeddings, "embeddings of each layer are"),
        ("num_kv_shared_layers", 0, "layers that read the keys of another one are"),
    ):
        count = c.maybe(key, usual, low=0)
        if count:
            raise InputError(f"config key {key}", count, f"only 0 is modelled: {part} not")
    c.only("use_bidirectional_attention", "vision")  # images alone are seen both ways
    c.get("vocab_size_per_layer_input use_double_wide_mlp")
    flat = decoder(c, (262144, 2304, 9216, 30, 8, 4, 256, positions), tied=True, **attention_bias(c))
    kinds = _kinds(c, flat["n_layers"])
    return {
        **flat,
        **activation(c, "gelu_pytorch_tanh", "hidden_activation hidden_act"),
        **_attention(c, kinds, window, flat),
        "embedding_scaled": True,
        "head_softcap": c.get("final_logit_softcapping") is not None,
        **_gemma4_experts(c, flat["ffn"]),
        "norm_place": "both",
        "norm_scale": "wide",
        "norm_written_out": True,
        "norm_powered": True,
        "scaled_blocks": True,
        "qk_norm": "head",
        "value_norm": True,
        "shares_keys": True,
    }


def _kinds(c: Keys, layers: int) -> list[str]:
    """Return what each block sees; the class has the last one see all tokens whatever its config says."""
    kinds = c.words("layer_types") or [KINDS[(index + 1) % 6 == 0] for index in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {*KINDS}:
        allowed = f"must call each of the {layers} layers {' or '.join(KINDS)}"
        raise InputError("config key layer_types", kinds, allowed)
    return [*kinds[:-1], KINDS[1]]


def _attention(c: Keys, kinds: list[str], usual: int, near: Flat) -> Flat:
    """Return the window of the blocks that have one, and the sizes of those that have none."""
    full = [index for index, kind in enumerate(kinds) if kind == KINDS[1]]
    keyed = c.flag("attention_k_eq_v")
    width, kv_heads = c.size("global_head_dim", 512), c.maybe("num_global_key_value_heads")
    kv_heads = (kv_heads if keyed else None) or near["kv_heads"]
    if c.get("per_layer_config") is not None:
        width, kv_heads = _listed(c.get("per_layer_config"), full, near)
    far = {"head_dim": width, "kv_heads": kv_heads, "values_of_keys": keyed}
    windowed = len(full) < len(kinds)
    bounded = {"window": c.size("sliding_window", usual), "full_layers": full, "wider_tables": width}
    return {"far": far, **(bounded if windowed else {})}


def _gemma4_experts(c: Keys, dense: int) -> Flat:
    """Return the norms of a block, and the experts beside its MLP."""
    if not c.flag("enable_moe_block"):
        c.get("num_experts top_k_experts moe_intermediate_size")
        return {"norms": 4}
    moe = {"experts": c.size("num_experts"), "topk": c.size("top_k_experts"), "ffn": c.size("moe_intermediate_size")}
    return {"norms": 7, "moe": {**moe, "shared_ffn": dense, "own_norms": True}}


def _listed(listed: object, full: list[int], near: Flat) -> tuple[int, int]:
    """Return the same sizes where the config lists what layers have of their own, as the class writes it."""
    if not isinstance(listed, dict) or not all(isinstance(table, dict) for table in listed.values()):
        raise InputError("config key per_layer_config", listed, "must be a table of each layer's own keys")
    if {str(key).lstrip("0") or "0" for key in listed} != {str(index) for index in full}:
        allowed = "must list the layers that see all tokens, and no others"
        raise InputError("config key per_layer_config", sorted(map(str, listed)), allowed)
    tables = [Keys(table, f"per_layer_config.{key}.") for key, table in listed.items()]
    usual = near["head_dim"], near["kv_heads"]
    sizes = [(t.size("head_dim", usual[0]), t.size("num_key_value_heads", usual[1])) for t in tables]
    for table in tables:
        table.refuse_rest()
    if len({*sizes}) > 1:
        raise InputError("config key per_layer_config", sorted(map(str, listed)), "must be the same for each of them")
    return sizes[0]


def _with_narrow_loss(reader: Callable[[Keys], Flat]) -> Callable[[Keys], Flat]:
    """A reader of a class whose loss took 16-bit logits as they are (4.45 models/*/modeling_*.py: no float())."""

    def read(c: Keys) -> Flat:
        return {**reader(c), "tail": {"narrow_before_446": True}}

    return read


PLAIN: dict[str, Callable[[Keys], Flat]] = {
    reader.__name__: reader
    for reader in (gptj, phi, starcoder2, nemotron, llama4_text, gemma4_text, gemma4_unified_text)
} | {
    reader.__name__: _with_narrow_loss(reader)
    for reader in (gpt2, gpt_bigcode, opt, bloom, mpt, gpt_neox, falcon, stablelm)
}
"""Readers by `model_type`."""
