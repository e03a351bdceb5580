"""Decoders of Transformers with other mixers of tokens beside attention, in flat form.

Defaults of absent keys are those of the config class (Transformers 5.24, models/*/configuration_*.py); biases, norms
and projections are those of the model class (models/*/modeling_*.py).
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.huggingface_keys import Flat, Keys, Sizes, decoder
from memcalc.errors import InputError


def lfm2(c: Keys) -> Flat:
    """LFM2: gated short convolutions in most blocks, attention in the others."""
    for key in "block_dim block_mlp_init_scale block_out_init_scale block_use_xavier_init conv_dim conv_dim_out".split():
        c.get(key)
    c.get("conv_use_xavier_init")
    c.get("num_heads")
    c.get("use_pos_enc")
    c.only("block_use_swiglu", True)
    sizes: Sizes = (65536, 2560, 12288, 32, 32, 8, None, 128000)
    flat = decoder(c, sizes, tied=True, qk_norm="head")
    mixed = _mixed(c, flat["n_layers"], "conv")
    taps, bias = c.size("conv_L_cache", 3), c.flag("conv_bias")
    return {**flat, "ffn": _lfm2_ffn(c), **_mixing({"kind": "short convolution", "taps": taps, "bias": bias}, mixed)}


def _lfm2_ffn(c: Keys) -> int:
    """Return the MLP's width, which the class takes two thirds of, scales and rounds up where it is told to."""
    ffn, multiple = c.size("block_ff_dim intermediate_size", 12288), c.size("block_multiple_of", 256)
    unscaled = c.get("block_ffn_dim_multiplier", 1.0) is None
    times = c.number("block_ffn_dim_multiplier", 1.0)
    if not c.flag("block_auto_adjust_ff_dim", True):
        return ffn
    if unscaled:
        return int(2 * ffn / 3)
    return multiple * -(-int(times * int(2 * ffn / 3)) // multiple)


def _mixed(c: Keys, layers: int, kind: str) -> list[int]:
    """Return the blocks whose mixer is not attention, by ``layer_types``, or by ``full_attn_idxs`` where it is absent."""
    attending = c.get("full_attn_idxs")
    full = c.sizes("full_attn_idxs") if attending is not None else list(range(layers))
    kinds = c.words("layer_types") or ["full_attention" if index in full else kind for index in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {"full_attention", kind}:
        raise InputError("config key layer_types", kinds, f"must call each of the {layers} layers full_attention or {kind}")
    return [index for index, listed in enumerate(kinds) if listed == kind]


def _mixing(mixer: Flat, layers: list[int]) -> Flat:
    return {"mixer": mixer, "mixer_layers": layers} if layers else {}


HYBRIDS: dict[str, Callable[[Keys], Flat]] = {family.__name__: family for family in (lfm2,)}
