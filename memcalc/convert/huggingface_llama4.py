"""Llama 4's text model: chunked attention with complex rotary embeddings, and experts that each run over every token.

Defaults of absent keys are those of the config class (Transformers 5.24 models/llama4/configuration_llama4.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.huggingface_keys import Flat, Keys, activation, attention_bias, decoder
from memcalc.errors import InputError


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
        **_experts(c, layers, expert),
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


def _experts(c: Keys, layers: int, ffn: int) -> Flat:
    """Return the routed part of the blocks that have one."""
    step = c.size("interleave_moe_layer_step", 1)
    listed, stated = c.sizes("moe_layers"), c.get("moe_layers") is not None
    experts, topk = c.size("num_local_experts num_experts", 16), c.size("num_experts_per_tok", 1)
    dense = [index for index in range(layers) if (index not in listed if stated else (index + 1) % step)]
    if len(dense) == layers:
        return {}
    moe = {"experts": experts, "topk": topk, "ffn": ffn, "shared": 1, "every_expert": True}
    return {"moe": {**moe, **({"dense_layers": dense} if dense else {})}}


LLAMA4: dict[str, Callable[[Keys], Flat]] = {"llama4_text": llama4_text}
