"""The parameters of a model, walked block by block and sorted by what divides them.

What stands in attention's place, as sizes: its linear layers, its filter, its parameters and its states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.errors import UnmodelledError
from memcalc.formulas import mixers as formulas
from memcalc.formulas import parameters as p
from memcalc.specs.block import Attention, Block, LatentAttention, MixtureOfExperts, Mlp
from memcalc.specs.mixers import DeltaAttention, GatedDeltaNet, Mamba, Mamba2, Mixer, ShortConvolution

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.specs.model import Model

LEARNED_SCALARS = {"xielu": 2}
"""Parameters of an activation itself, by its name."""


class BlockCount(NamedTuple):
    """Parameters of one block by the parallelism that divides them [elements]."""

    attention: int
    """Matrices and biases that tensor parallelism shards by heads."""
    mlp: int
    """A dense MLP or the shared experts, sharded by tensor parallelism."""
    experts: int
    """Routed experts, divided by expert and tensor parallelism."""
    replicated: int
    """Norms, biases added after a row-parallel matrix, routers, gates, sinks, latent down-projections."""
    active_experts: int
    """The part of `experts` that one token passes."""

    @property
    def total(self) -> int:
        """All parameters of the block [elements]."""
        return self.attention + self.mlp + self.experts + self.replicated

    @property
    def active(self) -> int:
        """Parameters that one token passes [elements]."""
        return self.total - self.experts + self.active_experts


class ParameterCount(NamedTuple):
    """Parameters of a model by place [elements]; `head` holds what the head has of its own (0 where tied)."""

    embedding: int
    head: int
    outside_first: int
    outside_last: int
    final_norm: int
    groups: tuple[tuple[int, BlockCount], ...]
    largest_tensor: int
    """Elements of the largest single matrix, each expert's matrices apart; blocks that are only counted have none."""

    @property
    def blocks_total(self) -> int:
        """All parameters inside blocks [elements]."""
        return sum(count * block.total for count, block in self.groups)

    @property
    def outside_blocks(self) -> int:
        """All parameters outside blocks [elements]."""
        return self.embedding + self.head + self.outside_first + self.outside_last + self.final_norm

    @property
    def total(self) -> int:
        """Unique parameters of the model [elements]."""
        return self.outside_blocks + self.blocks_total

    @property
    def active(self) -> int:
        """Parameters that one token passes, embedding and head included [elements]."""
        return self.outside_blocks + sum(count * block.active for count, block in self.groups)


def block_count(block: Block) -> BlockCount:
    """Return the parameters of one block [elements]."""
    if block.recorded is not None:
        return BlockCount(0, 0, 0, block.recorded.parameters, 0)
    if block.counted is not None:
        return BlockCount(0, 0, block.counted.idle, block.counted.parameters - block.counted.idle, 0)
    sharded, replicated = _mixing(block)
    if block.cross_attention is not None:
        cross = _attention(block.cross_attention, block.hidden, block.cross_hidden or block.hidden)
        sharded, replicated = sharded + cross[0], replicated + cross[1]
    replicated += block.norms * p.norm_parameters(block.hidden, block.norm.vectors)
    replicated += block.layer_scale * 2 * block.hidden
    mlp, experts, active, beside = _mlp(block.mlp, block.hidden) if block.mlp else (0, 0, 0, 0)
    return BlockCount(sharded, mlp, experts, replicated + beside, active)


def model_count(model: Model) -> ParameterCount:
    """Return the parameters of `model` by place [elements]."""
    width = model.embedding_dim or model.hidden
    embedding: int = p.embedding_parameters(model.vocab, width)
    own_head = 0 if model.tied or not model.head else embedding
    outside = {
        position: sum(o.parameters for o in model.outside if o.place == position) for position in ("first", "last")
    }
    return ParameterCount(
        embedding=embedding,
        head=own_head + (model.vocab if model.head and model.head_bias else 0),
        outside_first=outside["first"],
        outside_last=outside["last"],
        final_norm=p.norm_parameters(model.hidden, model.final_norm.vectors) if model.final_norm else 0,
        groups=tuple((group.count, block_count(group.block)) for group in model.groups),
        largest_tensor=_largest(model, embedding),
    )


def refuse_counted(model: Model, instead: str = "") -> None:
    """Refuse a model with blocks whose parameters alone are known; ``instead`` is what can be done all the same."""
    if not model.counted_parts:
        return
    parts = " and ".join(model.counted_parts)
    allowed = f"nothing models its {parts}: its {model_count(model).total:,} parameters are all that is known"
    raise UnmodelledError("model", model.name, f"{allowed}; {instead}" if instead else allowed)


def _mixing(block: Block) -> tuple[int, int]:
    """Return what tensor parallelism would shard of what mixes tokens, and what it replicates."""
    sharded = replicated = 0
    if block.attention is not None:
        sharded, replicated = _attention(block.attention, block.hidden, block.hidden)
    if block.mixer is not None:
        replicated += parameters_of(block.mixer, block.hidden)
    return sharded, replicated


def _attention(attention: Attention, hidden: int, kv_hidden: int) -> tuple[int, int]:
    """Return what tensor parallelism shards and what it replicates."""
    if attention.latent is not None:
        return _latent(attention, attention.latent, hidden)
    sharded = p.attention_parameters(hidden, attention.q_dim, attention.kv_dim, kv_hidden)
    sharded -= attention.values_of_keys * p.linear_parameters(kv_hidden, attention.kv_dim, attention.v_bias)
    sharded += attention.output_gate * p.linear_parameters(hidden, attention.q_dim, attention.q_bias)
    sharded += attention.head_gate * p.linear_parameters(hidden, attention.heads)
    sharded += p.qkv_bias_parameters(
        attention.q_dim, attention.kv_dim, attention.q_bias, attention.k_bias, attention.v_bias
    )
    return sharded, attention.o_bias * hidden + attention.sinks * attention.heads + _qk_norm(attention)


def _qk_norm(attention: Attention) -> int:
    widths = {"none": 0, "head": 2 * attention.head_dim, "full": attention.q_dim + attention.kv_dim}
    norm: int = p.norm_parameters(widths[attention.qk_norm], attention.qk_norm_kind.vectors)
    return norm


def _latent(attention: Attention, latent: LatentAttention, hidden: int) -> tuple[int, int]:
    """Return the counts of latent attention: what all heads share is computed, and kept, on every rank."""
    rank = latent.q_lora_rank or 0
    up = p.latent_up_parameters(
        attention.heads,
        query_rank=rank or hidden,
        kv_rank=latent.kv_lora_rank,
        nope_dim=latent.qk_nope_head_dim,
        rope_dim=latent.qk_rope_head_dim,
        value_dim=latent.v_head_dim,
    )
    out = p.linear_parameters(attention.heads * latent.v_head_dim, hidden)
    down = p.latent_down_parameters(hidden, rank, latent.kv_lora_rank, latent.qk_rope_head_dim)
    biases = attention.q_bias * rank + attention.k_bias * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    return up + out, down + biases + attention.o_bias * hidden


def _mlp(mlp: Mlp | MixtureOfExperts, hidden: int) -> tuple[int, int, int, int]:
    """Return dense or shared, routed, routed and active, and replicated parameters."""
    if isinstance(mlp, Mlp):
        inner = mlp.bias * p.mlp_bias_parameters(mlp.ffn, mlp.gated)
        return (
            p.mlp_parameters(hidden, mlp.ffn, mlp.gated) + inner,
            0,
            0,
            mlp.bias * hidden + LEARNED_SCALARS.get(mlp.activation, 0),
        )
    routed, active = (
        p.experts_parameters(experts, hidden, mlp.ffn, mlp.gated, mlp.expert_bias)
        for experts in (mlp.experts, mlp.topk)
    )
    router = p.linear_parameters(hidden, mlp.experts, mlp.router_bias)
    router += mlp.shared_gate * hidden + mlp.own_norms * (hidden + mlp.experts)
    return p.mlp_parameters(hidden, mlp.shared_ffn, mlp.gated), routed, active, router


def _largest(model: Model, embedding: int) -> int:
    blocks = (_largest_in_block(group.block) for group in model.groups)
    return max(embedding, *blocks, *(outside.parameters for outside in model.outside))


def _largest_in_block(block: Block) -> int:
    if block.recorded is not None:
        return max(block.recorded.tensors, default=0)
    if block.counted is not None:
        return 0
    widest = max(getattr(block.mlp, "ffn", 0), getattr(block.mlp, "shared_ffn", 0))
    return max(_largest_mixing(block), widest * block.hidden)


def _largest_mixing(block: Block) -> int:
    attention = block.attention
    shapes = shapes_of(block.mixer, block.hidden) if block.mixer else ()
    mixed = max((shape.inputs * shape.outputs for shape in shapes), default=0)
    if attention is None:
        return mixed
    out = attention.heads * (attention.latent.v_head_dim if attention.latent else attention.head_dim)
    q_in = block.hidden if attention.latent is None else attention.latent.q_lora_rank or block.hidden
    q = q_in * (attention.q_dim * (1 + attention.output_gate) + (2 * attention.kv_dim if attention.packed_qkv else 0))
    return max(mixed, q, out * block.hidden)


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
