"""Models whose blocks are one branch each: Nemotron-H, Mamba, Falcon-Mamba, Mamba-2.

Nemotron-H's is a Mamba-2 mixer, attention, an MLP or experts; the others have a mixer alone.

Defaults of absent keys are those of the config class (Transformers 5.24, models/*/configuration_*.py), which also says
Nemotron-H's older names; norms, projections, the fp32 residual stream and the fp32 logits are those of the model class.
"""

from __future__ import annotations

from collections.abc import Callable

from memcalc.convert.counted import COUNTED
from memcalc.convert.huggingface_hybrids import OLD_KINDS, mamba_mixer
from memcalc.convert.huggingface_keys import Flat, Keys, architecture
from memcalc.errors import InputError
from memcalc.specs.block import Attention, Block, MixtureOfExperts, Mlp, Norm
from memcalc.specs.mixers import Mamba, Mamba2
from memcalc.specs.model import BlockGroup, Lookup, Model, Tail, TowerEnds, patterns

_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_UNREAD = """
    num_logits_to_keep attention_bias attention_dropout sliding_window use_mamba_kernels expand mamba_expand
    time_step_min time_step_max time_step_limit time_step_floor mamba_dt_min mamba_dt_max mamba_dt_limit
    mamba_dt_init_floor mamba_proj_bias mamba_ssm_cache_dtype n_shared_experts moe_shared_expert_overlap
    mtp_layers_block_type mtp_hybrid_override_pattern residual_in_fp32 hidden_dropout rescale_prenorm_residual
    routed_scaling_factor tie_word_embeddings
"""
"""Keys that its class does not read, or that move no size."""
_OF_ALL = """
    mamba_num_heads mamba_head_dim ssm_state_size n_groups mamba_n_groups conv_kernel mamba_d_conv chunk_size
    mamba_chunk_size use_conv_bias mamba_conv_bias use_bias num_attention_heads num_key_value_heads head_dim
    attention_head_dim mlp_hidden_act mlp_bias intermediate_size n_routed_experts num_local_experts num_experts_per_tok
    moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size norm_topk_prob n_group topk_group
"""
"""Keys of each kind of block, of which a model may have none."""


def nemotron_h(c: Keys, about: Flat) -> Model:
    """Return the model of a config."""
    kinds, hidden = _kinds(c), c.size("hidden_size", 4096)
    if "moe" in kinds and c.get("moe_latent_size") is not None:
        return COUNTED["nemotron_h"](c, about)
    architecture(about, "ForCausalLM")
    c.only("mamba_hidden_act", "silu")
    c.get(_UNREAD)
    known = {"linear_attention": _mixer, "full_attention": _attention, "mlp": _mlp, "moe": _experts}
    norm = Norm(scale="wide", written_out=True)
    blocks = {kind: Block(hidden=hidden, norm=norm, norms=1, **known[kind](c, hidden)) for kind in dict.fromkeys(kinds)}
    c.get(_OF_ALL)
    places = {kind: index for index, kind in enumerate(blocks)}
    vocab = c.size("vocab_size", 131072)
    sequence = [places[kind] for kind in kinds]
    return Model(
        **about,
        hidden=hidden,
        vocab=vocab,
        positions="none",
        max_positions=c.size("max_position_embeddings", 4096),
        final_norm=norm,
        groups=tuple(BlockGroup(count=kinds.count(kind), block=block) for kind, block in blocks.items()),
        order=() if sequence == sorted(sequence) else patterns(sequence),
        ends=(TowerEnds(lookups=(Lookup(name="token", parameters=vocab * hidden),)),),
    )


def _kinds(c: Keys) -> list[str]:
    pattern = c.text("hybrid_override_pattern", "")
    listed = c.words("layers_block_type layer_types")
    kinds = [OLD_KINDS.get(kind, kind) for kind in listed or ()] or [_LETTERS.get(letter, letter) for letter in pattern]
    kinds = kinds or ["linear_attention", "moe", "full_attention", "mlp"]
    layers = c.maybe("num_hidden_layers")
    wrong = next((kind for kind in kinds if kind not in _LETTERS.values()), None)
    if wrong is not None:
        raise InputError("config key layers_block_type", wrong, f"must be one of {', '.join(_LETTERS.values())}")
    if layers not in (None, len(kinds)):
        raise InputError("config key num_hidden_layers", layers, f"its pattern has {len(kinds)} blocks")
    return kinds


def _mixer(c: Keys, _: int) -> dict[str, object]:
    mixer = Mamba2(
        kind="Mamba-2 mixer",
        heads=c.size("mamba_num_heads", 128),
        head_dim=c.size("mamba_head_dim", 64),
        state=c.size("ssm_state_size", 128),
        groups=c.size("n_groups mamba_n_groups", 8),
        taps=c.size("conv_kernel mamba_d_conv", 4),
        chunk=c.size("chunk_size mamba_chunk_size", 128),
        conv_bias=c.flag("use_conv_bias mamba_conv_bias", True),
        bias=c.flag("use_bias"),
    )
    return {"mixer": mixer}


def _attention(c: Keys, hidden: int) -> dict[str, object]:
    heads = c.size("num_attention_heads", 32)
    kv_heads = c.maybe("num_key_value_heads", 8) or heads
    if heads % kv_heads:
        raise InputError("config key num_key_value_heads", kv_heads, f"must divide num_attention_heads {heads}")
    head_dim = c.maybe("head_dim attention_head_dim", 128) or hidden // heads
    return {"attention": Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, rotary=False)}


def _mlp(c: Keys, _: int) -> dict[str, object]:
    act, bias = c.activation("mlp_hidden_act", "relu2"), c.flag("mlp_bias")
    return {"mlp": Mlp(ffn=c.size("intermediate_size", 21504), gated=False, bias=bias, activation=act)}


def _experts(c: Keys, _: int) -> dict[str, object]:
    experts, topk = c.size("n_routed_experts num_local_experts", 8, low=2), c.size("num_experts_per_tok", 2)
    if topk > experts:
        raise InputError("config key num_experts_per_tok", topk, f"must be at most n_routed_experts {experts}")
    mlp = MixtureOfExperts(
        experts=experts,
        topk=topk,
        ffn=c.size("moe_intermediate_size", 7688),
        shared_ffn=c.size("moe_shared_expert_intermediate_size", 7688),
        gated=False,
        activation=c.activation("mlp_hidden_act", "relu2"),
        scores="sigmoid",
        fp32_router=True,
        normalised=c.flag("norm_topk_prob", True),
        scaled=True,
    )
    return {"mlp": mlp}


_UNREAD_OF_MAMBA = """
    intermediate_size time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor time_step_limit
    rescale_prenorm_residual use_mambapy use_falcon_mambapy use_associative_scan norm_before_gate
"""
"""Keys that the classes do not read, or that move no size."""
UNBOUNDED = 2**20
"""Tokens: a recurrence has no longest sequence."""


def mamba(c: Keys, about: Flat) -> Model:
    """Return the model of a config."""
    return _of_mixers(c, about, _mamba(c), layers=32, vocab=50280, tied=True)


def falcon_mamba(c: Keys, about: Flat) -> Model:
    """Return the model of a config: weightless norms inside of the kernel."""
    mixer = _mamba(c).model_copy(update={"norms": "weightless"})
    return _of_mixers(c, about, mixer, layers=32, vocab=50280, tied=True)


def _mamba(c: Keys) -> Mamba:
    hidden = c.size("hidden_size", 768)
    keys = mamba_mixer(c, hidden, _inner(c, hidden), "time_step_rank", "state_size", "conv_kernel", "use_conv_bias")
    return Mamba(**keys, bias=c.flag("use_bias"))


def mamba2(c: Keys, about: Flat) -> Model:
    """Return the model of a config."""
    c.only("rms_norm", True)
    c.get("time_step_rank")
    hidden = c.size("hidden_size", 4096)
    heads, head_dim = c.size("num_heads", 128), c.size("head_dim", 64)
    if heads * head_dim != _inner(c, hidden):
        allowed = f"times head_dim {head_dim} must be expand times hidden_size, {_inner(c, hidden)}"
        raise InputError("config key num_heads", heads, allowed)
    mixer = Mamba2(
        kind="Mamba-2 mixer",
        heads=heads,
        head_dim=head_dim,
        state=c.size("state_size", 128),
        groups=c.size("n_groups", 8),
        taps=c.size("conv_kernel", 4),
        chunk=c.size("chunk_size", 256),
        conv_bias=c.flag("use_conv_bias", True),
        bias=c.flag("use_bias"),
    )
    return _of_mixers(c, about, mixer, layers=64, vocab=32768, tied=False, hidden=4096)


def _inner(c: Keys, hidden: int) -> int:
    return int(c.number("expand", 2) * hidden)


def _of_mixers(
    c: Keys, about: Flat, mixer: Mamba | Mamba2, *, layers: int, vocab: int, tied: bool, hidden: int = 768
) -> Model:
    """Return a model of blocks that are a norm and a mixer each."""
    architecture(about, "ForCausalLM", "LMHeadModel")
    c.only("hidden_act", "silu")
    c.get(_UNREAD_OF_MAMBA)
    width = c.size("hidden_size", hidden)
    block = Block(hidden=width, mixer=mixer, norms=1, wide_residual=c.flag("residual_in_fp32", True))
    return Model(
        **about,
        hidden=width,
        vocab=c.size("vocab_size", vocab),
        tied=c.flag("tie_word_embeddings", tied),
        positions="none",
        max_positions=UNBOUNDED,
        groups=(BlockGroup(count=c.size("num_hidden_layers", layers), block=block),),
        tail=Tail(wide_logits=True),
    )


BRANCHES: dict[str, Callable[[Keys, Flat], Model]] = {
    family.__name__: family for family in (nemotron_h, mamba, falcon_mamba, mamba2)
}
"""Readers by `model_type`."""
