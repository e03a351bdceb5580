"""Models that are no stack of whole decoder blocks: one branch a block (Mamba, Nemotron-H), encoders, vision towers.

Nemotron-H's branch is a Mamba-2 mixer, attention, an MLP or experts; the others of that kind have a mixer alone.
Blocks of encoder-decoders and towers are built in flat form, and put together here.

Defaults of absent keys are those of the config class (Transformers 5.23 and 5.24, models/*/configuration_*.py), with
Nemotron-H's older names; norms, projections, the fp32 residual stream and fp32 logits are those of the model class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc.convert.counted import COUNTED
from memcalc.convert.huggingface_hybrids import OLD_KINDS, mamba_mixer
from memcalc.convert.huggingface_keys import Flat, Keys, activation, architecture, biases, family
from memcalc.errors import InputError
from memcalc.specs import flat
from memcalc.specs import flat as forms
from memcalc.specs.block import Attention, Block, MixtureOfExperts, Mlp, Norm
from memcalc.specs.mixers import Mamba, Mamba2
from memcalc.specs.model import BlockGroup, Lookup, Model, Outside, Tail, TowerEnds, patterns

_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_UNREAD = """
    num_logits_to_keep attention_bias attention_dropout sliding_window use_mamba_kernels expand mamba_expand
    time_step_min time_step_max time_step_limit time_step_floor time_step_rank mamba_dt_min mamba_dt_max mamba_dt_limit
    mamba_dt_init_floor mamba_proj_bias mamba_ssm_cache_dtype n_shared_experts moe_shared_expert_overlap
    mtp_layers_block_type residual_in_fp32 hidden_dropout rescale_prenorm_residual
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


def vit(c: Keys, about: Flat) -> Model:
    """Return a vision transformer with its classifier."""
    flat, labels = family(c, "vit"), _labels(c)
    hidden = flat["hidden"]
    patch, pixels, rows = _patches(c, 224, 16)
    architecture(about, "ForImageClassification")
    c.get("pooler_output_size pooler_act tie_word_embeddings")
    outside = [
        {"name": "class_token", "parameters": hidden},
        {"name": "patches", "parameters": patch * hidden + hidden},
        {"name": "classifier", "parameters": labels * hidden + labels, "place": "last"},
    ]
    flat |= {
        **biases(c.flag("qkv_bias", True), True, True),
        **activation(c, "gelu"),
        "max_positions": rows,
        "fixed_tokens": {"vision": rows},
        "outside": outside,
        "image_values": pixels,
        "patch_values": patch,
        "tail": {"pooled": True, "classes": labels, "wide_loss": False},
    }
    return forms.from_flat({**flat, **about})


def _labels(c: Keys) -> int:
    """Return the classes: Transformers writes them as a table of names, two where there is none."""
    names = c.get("id2label")
    return c.size("num_labels", len(names) if isinstance(names, dict) and names else 2)


def _patches(c: Keys, image: int, patch: int) -> tuple[int, int, int]:
    """Return the values of a patch and of an image, and the tokens of an image with its class token."""
    size, side, channels = c.size("image_size", image), c.size("patch_size", patch), c.size("num_channels", 3)
    if side > size:
        raise InputError("config key patch_size", side, f"must be at most image_size {size}")
    return side * side * channels, size * size * channels, (size // side) ** 2 + 1


def t5(c: Keys, about: Flat) -> Model:
    """Return T5: a relative position bias in the first block of each stack."""
    return _t5(c, about, "t5", "relu")


def mt5(c: Keys, about: Flat) -> Model:
    """Return mT5: T5 with sizes of its own, and a gate."""
    return _t5(c, about, "mt5", "gated-gelu")


def _t5(c: Keys, about: Flat, kind: str, usual_form: str) -> Model:
    architecture(about, "ForConditionalGeneration", "WithLMHeadModel")
    c.get("is_encoder_decoder use_cache")
    form, buckets = c.text("feed_forward_proj", usual_form), c.size("relative_attention_num_buckets", 32)
    gate, _, name = form.rpartition("-")
    if gate not in {"", "gated"}:
        raise InputError("config key feed_forward_proj", form, "must be an activation, or gated- and an activation")
    stack = family(c, kind)
    hidden, rate = stack["hidden"], stack["dropout"]["block"]
    written_out = form == "gated-gelu"
    activated = (
        "gelu_python" if written_out else Keys({"feed_forward_proj": name}).activation("feed_forward_proj", name)
    )
    stack |= {"gated": bool(gate), "activation": activated}
    bias = buckets * stack["heads"]
    outside = (
        Outside(name="encoder_relative_bias", parameters=bias, tower="encoder"),
        Outside(name="encoder_final_norm", parameters=hidden, tower="encoder", place="last"),
        Outside(name="decoder_relative_bias", parameters=bias),
    )
    layers, tied = c.maybe("num_decoder_layers") or stack["n_layers"], c.flag("tie_word_embeddings", True)
    decoder = {**stack, "n_layers": layers, "tied": tied, **about, "tail": {"dropout": rate, "wide_loss": False}}
    ends = {"end_norm": Norm(rescales_input=True), "end_dropout": rate}
    return _two_stacks(stack, decoder, outside, ends)


def whisper(c: Keys, about: Flat) -> Model:
    """Return Whisper: two convolutions, 1500 frames an encoder sees whatever the text, keys without a bias."""
    architecture(about, "ForConditionalGeneration")
    stack, frames = family(c, "whisper"), c.size("max_source_positions", 1500)
    hidden = stack["hidden"]
    c.get("num_hidden_layers")  # the encoder's, once more
    stack |= activation(c, "gelu", "activation_function")
    encoder, decoder = ({**stack, **_whisper_stack(c, tower)} for tower in ("encoder", "decoder"))
    mels = c.size("num_mel_bins", 80)
    convolutions = 3 * hidden * (mels + hidden) + 2 * hidden
    outside = (
        Outside(name="convolutions", parameters=convolutions, tower="encoder"),
        Outside(name="encoder_positions", parameters=frames * hidden, tower="encoder"),
        Outside(name="encoder_final_norm", parameters=2 * hidden, tower="encoder", place="last"),
    )
    settings = {
        "positions": "learned",
        "position_index": "token",
        "tied": c.flag("tie_word_embeddings", True),
        "fixed_tokens": {"encoder": frames},
        "tail": {"wide_loss": False},
    }
    front = {"mel_bins": mels, "lookups": (), "end_norm": Norm(kind="layernorm", bias=True)}
    return _two_stacks({**encoder, "positions": "none"}, {**decoder, **settings, **about}, outside, front)


def _whisper_stack(c: Keys, tower: str) -> Flat:
    return {
        "n_layers": c.size(f"{tower}_layers", 4),
        "heads": c.size(f"{tower}_attention_heads", 6),
        "ffn": c.size(f"{tower}_ffn_dim", 1536),
    }


def _two_stacks(encoder: Flat, decoder: Flat, outside: tuple[Outside, ...], ends: dict[str, Any]) -> Model:
    """Return an encoder-decoder: the decoder's blocks get a third norm, and attention to the encoder's output.

    `ends` is what the encoder begins and ends with beside what its flat form says.
    """
    first = forms.from_flat({**encoder, "tower": "encoder", "causal": False})
    model = forms.from_flat({**decoder, "norms": 3})
    bias = "zeros" if decoder.get("scores_bias") == "relative" else "none"
    reader = {"causal": False, "window": None, "scores_bias": bias}
    last = []
    for group in model.groups:
        cross = {"cross_attention": group.block.own_attention.model_copy(update=reader)}
        last.append(group.model_copy(update={"block": group.block.model_copy(update=cross)}))
    towers = (first.ends[0].model_copy(update=ends), *model.ends)
    update = {"groups": (*first.groups, *last), "outside": (*outside, *model.outside), "ends": towers}
    return model.model_copy(update=update)


def clip(c: Keys, about: Flat) -> Model:
    """Return CLIP: a vision tower and a text tower, each projected to the common width."""
    architecture(about, "Model")
    vision, text = c.table("vision_config") or Keys({}), c.table("text_config") or Keys({})
    width = c.size("projection_dim", 512)
    c.get("tie_word_embeddings text_config_dict vision_config_dict")
    image_groups, image_outside, image, tokens = _clip_vision(vision, width)
    embedding, text_group, text_outside = _clip_text(text, width)
    for tower in (vision, text):
        tower.get("projection_dim tie_word_embeddings")
        tower.only("add_cross_attention", False)
        tower.refuse_rest()
    scale = Outside(name="logit_scale", parameters=1, tower="text", place="last")
    return Model(
        **{key: value for key, value in about.items() if key != "architecture"},
        hidden=image_groups.block.hidden,
        vocab=embedding.vocab,
        embedding_dim=embedding.hidden,
        head=False,
        positions="learned",
        max_positions=embedding.max_positions,
        final_norm=image_groups.block.norm,
        groups=(image_groups, text_group),
        outside=(*image_outside, *text_outside, scale),
        ends=(image, forms.ends_of(embedding)),
        fixed_tokens={"vision": tokens},
    )


def _clip_tower(c: Keys, name: str, **sizes: Any) -> flat.Flat:
    return forms.flat_of({**family(c, name), **biases(True, True, True), **activation(c, "quick_gelu"), **sizes})


def _clip_vision(c: Keys, width: int) -> tuple[BlockGroup, tuple[Outside, ...], TowerEnds, int]:
    patch, pixels, rows = _patches(c, 224, 32)
    flat = _clip_tower(c, "clip_vision", max_positions=rows, outside=[])
    h = flat.hidden
    named = (
        ("class_token", h, "first"),
        ("patches", patch * h, "first"),
        ("pre_norm", 2 * h, "first"),
        ("visual_projection", width * h, "last"),
    )
    tensors = tuple(Outside(name=name, parameters=n, tower="vision", place=position) for name, n, position in named)
    ends = TowerEnds(tower="vision", pixels=pixels, patch=patch, norm=forms.norm_of(flat))
    return forms.groups_of(flat)[0], (*tensors, *forms.outside_of(flat)), ends, rows


def _clip_text(c: Keys, width: int) -> tuple[flat.Flat, BlockGroup, tuple[Outside, ...]]:
    flat = _clip_tower(c, "clip_text")
    norm = Outside(name="text_final_norm", parameters=2 * flat.hidden, tower="text", place="last")
    projection = Outside(name="text_projection", parameters=width * flat.hidden, tower="text", place="last")
    return flat, forms.groups_of(flat)[0], (*forms.outside_of(flat), norm, projection)


TOWERS: dict[str, Callable[[Keys, Flat], Model]] = {reader.__name__: reader for reader in (vit, t5, mt5, whisper, clip)}
