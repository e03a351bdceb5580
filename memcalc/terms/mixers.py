"""What stands in attention's place, as sizes: its linear layers, its filter, its parameters and its states."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memcalc.formulas import mixers as formulas
from memcalc.formulas.types import Array
from memcalc.specs.mixers import DeltaAttention, GatedDeltaNet, Mamba, Mamba2, Mixer, ShortConvolution


class Shape(NamedTuple):
    """One linear layer of a mixer."""

    target: str
    inputs: int
    outputs: int


def shapes_of(mixer: Mixer, hidden: int) -> tuple[Shape, ...]:
    """The linear layers of a mixer, in the order in which they run."""
    if isinstance(mixer, Mamba):
        selecting = Shape("mixer_in", mixer.inner, mixer.selected), Shape("mixer_in", mixer.rank, mixer.inner)
        into, out = Shape("mixer_in", hidden, 2 * mixer.inner), Shape("mixer_out", mixer.inner, hidden)
        return into, *selecting, out
    if isinstance(mixer, GatedDeltaNet) and mixer.apart:
        parts = {"q": mixer.keys, "k": mixer.keys, "v": mixer.values}
        others = [Shape("mixer_in", hidden, width) for width in (mixer.value_heads, mixer.value_heads, mixer.values)]
        return *(Shape(name, hidden, width) for name, width in parts.items()), *others, Shape("o", mixer.values, hidden)
    if isinstance(mixer, DeltaAttention):
        inner, low = mixer.inner, mixer.head_dim
        projected = [(hidden, low), (low, inner), (hidden, mixer.heads), (hidden, low), (low, inner)]
        return (
            *(Shape(name, hidden, inner) for name in "qkv"),
            *(Shape("mixer_in", *sizes) for sizes in projected),
            Shape("o", inner, hidden),
        )
    widths, inner = _widths(mixer, hidden)
    return (*(Shape("mixer_in", hidden, outputs) for outputs in widths), Shape("mixer_out", inner, hidden))


def _widths(mixer: ShortConvolution | GatedDeltaNet | Mamba2, hidden: int) -> tuple[tuple[int, ...], int]:
    """Outputs of the projections of a mixer's input, and inputs of that of its output."""
    if isinstance(mixer, ShortConvolution):
        return (3 * hidden,), hidden
    if isinstance(mixer, Mamba2):
        return (mixer.projected,), mixer.inner
    keys, values, heads = mixer.keys, mixer.values, mixer.value_heads
    if mixer.packed:
        return (2 * keys + 2 * values, 2 * heads), values
    return (2 * keys + values, values, heads, heads), values


def channels_of(mixer: Mixer, hidden: int) -> int:
    """Channels of its convolution."""
    if isinstance(mixer, Mamba | DeltaAttention):
        return mixer.inner * (1 if isinstance(mixer, Mamba) else 3)
    return hidden if isinstance(mixer, ShortConvolution) else mixer.channels


def parameters_of(mixer: Mixer, hidden: int) -> int:
    """All its parameters."""
    if isinstance(mixer, ShortConvolution):
        return int(formulas.short_convolution_parameters(hidden, mixer.taps, mixer.bias))
    if isinstance(mixer, GatedDeltaNet):
        sizes = {"keys": mixer.keys, "values": mixer.values, "heads": mixer.value_heads, "value_dim": mixer.value_dim}
        return int(formulas.gated_delta_net_parameters(hidden, **sizes, taps=mixer.taps))
    if isinstance(mixer, DeltaAttention):
        return int(formulas.delta_attention_parameters(hidden, mixer.heads, mixer.head_dim, mixer.taps))
    if isinstance(mixer, Mamba):
        sizes = {"inner": mixer.inner, "state": mixer.state, "rank": mixer.rank, "taps": mixer.taps}
        flags = {"conv_bias": mixer.conv_bias, "bias": mixer.bias, "normed": mixer.norms == "learned"}
        return int(formulas.mamba_parameters(hidden, **sizes, **flags))
    sizes = {"inner": mixer.inner, "channels": mixer.channels, "heads": mixer.heads, "taps": mixer.taps}
    flags = {"conv_bias": mixer.conv_bias, "bias": mixer.bias, "normed": mixer.normed}
    return int(formulas.mamba2_parameters(hidden, **sizes, **flags))


def is_biased(mixer: Mixer) -> bool:
    """Whether its projections have biases."""
    return not isinstance(mixer, GatedDeltaNet | DeltaAttention) and mixer.bias


def state_elements(mixer: Mixer, hidden: int) -> int:
    """What it hands from one token to the next: the last inputs of its convolution, and the states of its heads."""
    states = 0
    if isinstance(mixer, GatedDeltaNet):
        states = mixer.value_heads * mixer.key_dim * mixer.value_dim
    elif isinstance(mixer, DeltaAttention):
        states = mixer.inner * mixer.head_dim
    elif isinstance(mixer, Mamba2 | Mamba):
        states = mixer.inner * mixer.state
    return mixer.taps * channels_of(mixer, hidden) + states


def mixing_flops(mixer: Mixer, tokens: Array) -> Array:
    """Operations of what stands between its projections, forward [FLOP]; a convolution has next to none."""
    if isinstance(mixer, GatedDeltaNet):
        flops = formulas.delta_rule_flops(tokens, mixer.value_heads, mixer.key_dim, mixer.value_dim)
    elif isinstance(mixer, DeltaAttention):
        flops = formulas.delta_rule_flops(tokens, mixer.heads, mixer.head_dim, mixer.head_dim)
    elif isinstance(mixer, Mamba2):
        sizes = mixer.heads, mixer.head_dim, mixer.state, mixer.groups, mixer.chunk
        flops = formulas.state_space_flops(tokens, *sizes)
    elif isinstance(mixer, Mamba):
        flops = formulas.selective_scan_flops(tokens, mixer.inner, mixer.state)
    else:
        flops = 0 * tokens
    return np.asarray(flops)
