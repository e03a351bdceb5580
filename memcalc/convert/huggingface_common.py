"""What the families of Transformers have in common: names of sizes, windows, rotary embeddings, biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memcalc.convert.huggingface_keys import Keys
from memcalc.errors import InputError

Flat = dict[str, Any]

Sizes = tuple[int, int, int, int, int, int | None, int | None, int]
"""Defaults of vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
head_dim, max_position_embeddings; None for what follows from the others."""


def decoder(c: Keys, defaults: Sizes, *, tied: bool = False, **fixed: Any) -> Flat:
    """Return the sizes under the names that most families share, and what is `fixed` for the family."""
    vocab, hidden, ffn, layers, heads, kv_heads, head_dim, positions = defaults
    flat = {
        "vocab": c.size("vocab_size", vocab),
        "hidden": c.size("hidden_size", hidden),
        "ffn": c.size("intermediate_size", ffn),
        "n_layers": c.size("num_hidden_layers", layers),
        "heads": c.size("num_attention_heads", heads),
        "kv_heads": c.maybe("num_key_value_heads", kv_heads),
        "head_dim": c.maybe("head_dim", head_dim),
        "max_positions": c.size("max_position_embeddings", positions),
        "tied": c.flag("tie_word_embeddings", tied),
        "rotary_fraction": rotary_fraction(c),
    }
    dropout = {"attention": c.rate("attention_dropout attn_pdrop")}
    return {**flat, "activation": "silu", "dropout": dropout, **fixed}


def rotary_fraction(c: Keys, default: float = 1.0) -> float:
    """Return the part of a head that is turned; the key has moved between versions."""
    rope = c.table("rope_parameters")
    if rope is not None and "partial_rotary_factor" in rope:
        return rope.fraction("partial_rotary_factor", default)
    return c.fraction("partial_rotary_factor rotary_pct", default)


def window(c: Keys, default: int | None, every: int | None = None, layers: int | None = None) -> Flat:
    """Return the sliding window and how often a block does without, from the list of layer types if there is one."""
    width, types = c.maybe("sliding_window", default), c.words("layer_types")
    if width is None:
        return {}
    if types is None:
        return {"window": width, "full_every": every}
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    if len(full) == len(types):
        return {}
    if (layers is not None and len(types) != layers) or set(types) - {"full_attention", "sliding_attention"}:
        raise _irregular(types)
    step = full[0] + 1 if full else None
    if step is not None and (step == 1 or full != list(range(step - 1, len(types), step))):
        raise _irregular(types)
    return {"window": width, "full_every": step}


def _irregular(types: Sequence[str]) -> InputError:
    allowed = "must be 'sliding_attention' in every layer but each n-th, which is 'full_attention'"
    return InputError("config key layer_types", list(types), allowed)


def activation(c: Keys, default: str = "silu", names: str = "hidden_act") -> Flat:
    """Return the activation under its key in this family."""
    return {"activation": c.activation(names, default)}


def biases(qkv: bool = False, o: bool = False, mlp: bool = False, lm_head: bool = False) -> Flat:
    """Return which linear layers of the family have a bias."""
    return {"bias": {"qkv": qkv, "o": o, "mlp": mlp, "lm_head": lm_head}}


def attention_bias(c: Keys, default: bool = False, mlp: bool = False) -> Flat:
    """Return the biases of a family whose `attention_bias` holds for all four projections."""
    own = c.flag("attention_bias", default)
    return biases(qkv=own, o=own, mlp=c.flag("mlp_bias") if mlp else False)
