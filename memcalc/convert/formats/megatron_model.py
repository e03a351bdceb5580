"""The model that Megatron-LM's flags describe, as a flat table (megatron/training/arguments.py, validate_args)."""

from __future__ import annotations

import re
from typing import Any

from memcalc.convert.formats.megatron_keys import Flags

__all__ = ["flat_model", "say_model"]

_POSITIONS = {
    "learned_absolute": "learned", "rope": "rope", "yarn": "rope", "mrope": "rope", "none": "none",
    "relative": "relative",
}  # fmt: skip
_LEARNED_MULTIPLE = 128
"""What memcalc pads Megatron-LM's vocabulary to, times TP: its default."""
_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "num_query_groups", "kv_channels")
_PATTERN = re.compile(r"\(?\[0\](?:\*(\d+))?\+\[1\]\*(\d+)\)?")


def say_model(flags: Flags) -> None:
    """State the model; without sizes the config is not one of a whole job, and it is asked for."""
    flat = flat_model(flags)
    unknown = [name for name in _SIZES if (flags.key(name),) in flags.reading.document.unknown]
    if flat is not None or unknown:
        flags.say("model", flat, unknown[0] if unknown else "num_layers")


def flat_model(flags: Flags) -> dict[str, Any] | None:
    """Return the sizes as a flat table, or None where number of blocks, width or heads are not stated.

    The vocabulary is left out where a tokenizer has it.
    """
    layers = flags.whole("num_layers", flags.whole("encoder_num_layers"), low=1)
    hidden, heads = flags.whole("hidden_size", low=1), flags.whole("num_attention_heads", low=1)
    gated = _gated(flags)
    if layers is None or hidden is None or heads is None:
        return None
    rounded = int((4 * hidden * 2 / 3) / 64) * 64
    ffn = flags.whole("ffn_hidden_size", rounded if flags.on("swiglu") or gated == "silu" else 4 * hidden, low=1)
    flat: dict[str, Any] = {
        "name": f"GPT of {layers} x {hidden}",
        "family": "megatron",
        "n_layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _groups(flags, heads),
        "head_dim": flags.whole("kv_channels", hidden // heads, low=1),
        "ffn": ffn,
        "gated": bool(gated),
        "norm": flags.one_of("normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}, "layernorm"),
        "tied": not flags.on("untie_embeddings_and_output_weights"),
        "max_positions": flags.count("max_position_embeddings", 1),
        "source": "flags of Megatron-LM",
        **_activation(flags, gated),
        **_biases(flags),
        **_positions(flags),
        **_dropout(flags),
        **_vocabulary(flags),
        **_experts(flags, layers, ffn or 1),
        **_latent(flags),
    }
    if flags.on("qk_layernorm") and "mla" not in flat:
        flat["qk_norm"] = "head"
    return flat


def _gated(flags: Flags) -> str:
    """The activation of a gated MLP; empty where it is not gated."""
    func = flags.one_of("activation_func", {"swiglu": "silu", "gelu": "", "squaredrelu": ""}, "")
    if flags.on("swiglu") or func:
        return "silu"
    return "gelu_tanh" if flags.on("quick_geglu") else ""


def _activation(flags: Flags, gated: str) -> dict[str, Any]:
    squared = flags.on("squared_relu") or flags.text("activation_func") == "squaredrelu"
    flags.on("openai_gelu")
    if gated:
        return {"activation": gated}
    return {"activation": "relu2" if squared else "gelu"}


def _groups(flags: Flags, heads: int) -> int:
    """Key-value heads: those of --num-query-groups count with --group-query-attention alone."""
    groups = flags.count("num_query_groups")
    yaml = flags.reading.document.kind == "yaml"
    return groups if flags.on("group_query_attention") or (yaml and flags.has("num_query_groups")) else heads


def _biases(flags: Flags) -> dict[str, Any]:
    linear = not flags.on("disable_bias_linear")
    return {"bias": {"qkv": linear or flags.on("add_qkv_bias"), "o": linear, "mlp": linear}}


def _positions(flags: Flags) -> dict[str, Any]:
    kind = flags.one_of("position_embedding_type", _POSITIONS, "learned")
    if flags.on("use_rotary_position_embeddings"):
        kind = "rope"
    flags.on("no_position_embedding")
    fraction = flags.number("rotary_percent", 1.0)
    return {"positions": kind, **({"rotary_fraction": fraction} if kind == "rope" and 0 < fraction < 1 else {})}


def _dropout(flags: Flags) -> dict[str, Any]:
    block, attention = flags.number("hidden_dropout", 0.1), flags.number("attention_dropout", 0.1)
    return {"dropout": {"attention": attention, "block": block, "embedding": block}}


def _vocabulary(flags: Flags) -> dict[str, Any]:
    """Padded to a multiple of --make-vocab-size-divisible-by times TP (core/tokenizers/utils/build_tokenizer.py)."""
    padded, size = flags.whole("padded_vocab_size", low=1), flags.whole("vocab_size", low=1)
    multiple = flags.count("make_vocab_size_divisible_by", _LEARNED_MULTIPLE)
    tensor = flags.count("tensor_model_parallel_size")
    if padded is None and size is None:
        return {}
    rows = padded or -(-(size or 1) // (multiple * tensor)) * multiple * tensor
    if multiple == _LEARNED_MULTIPLE and padded is None:
        return {"vocab": size}
    if rows % (_LEARNED_MULTIPLE * tensor):
        whole = -(-rows // (_LEARNED_MULTIPLE * tensor)) * _LEARNED_MULTIPLE * tensor
        flags.warn("padded_vocab_size" if padded else "make_vocab_size_divisible_by", f"counted as {whole} rows")
    return {"vocab": rows}


def _experts(flags: Flags, layers: int, ffn: int) -> dict[str, Any]:
    experts = flags.whole("num_experts", 0)
    found: dict[str, Any] = {
        "experts": experts,
        "topk": flags.count("moe_router_topk", 2),
        "ffn": flags.whole("moe_ffn_hidden_size", ffn, low=1),
        "first_dense": _first_dense(flags, layers),
    }
    shared = flags.whole("moe_shared_expert_intermediate_size", 0)
    if shared:
        found |= {"shared": 1, "shared_ffn": shared}
    if flags.on("moe_shared_expert_gate"):
        found["shared_gate"] = True
    if flags.one_of("moe_router_score_function", {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax") == "sigmoid":
        found["scores"] = "sigmoid"
    return {"moe": found} if experts and experts > 1 else {}


def _first_dense(flags: Flags, layers: int) -> int:
    """Leading dense blocks, from such as ``([0]*3+[1]*58)``; every block is routed where the frequency is 1."""
    text = flags.text("moe_layer_freq").replace(" ", "").strip("'\"")
    if text in ("", "1"):
        return 0
    match = _PATTERN.fullmatch(text)
    if match and int(match[1] or 1) + int(match[2]) == layers:
        return int(match[1] or 1)
    flags.warn("moe_layer_freq", "dense and routed blocks alternate; counted as all routed")
    return 0


def _latent(flags: Flags) -> dict[str, Any]:
    names = {
        "q_lora_rank": flags.whole("q_lora_rank", low=1),
        "kv_lora_rank": flags.whole("kv_lora_rank", 32, low=1),
        "qk_nope_head_dim": flags.whole("qk_head_dim", 128, low=1),
        "qk_rope_head_dim": flags.whole("qk_pos_emb_head_dim", 64, low=1),
        "v_head_dim": flags.whole("v_head_dim", 128, low=1),
    }
    if not flags.on("multi_latent_attention"):
        return {}
    return {"mla": {name: size for name, size in names.items() if size is not None}}
