"""Encoder-decoders and vision towers of Transformers: blocks built in flat form, put together here.

Defaults of absent keys are those of the config class (Transformers 5.23, models/*/configuration_*.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc.convert.huggingface_keys import Flat, Keys, activation, architecture, biases, family
from memcalc.errors import InputError
from memcalc.specs import flat
from memcalc.specs import flat as forms
from memcalc.specs.block import Norm
from memcalc.specs.model import BlockGroup, Model, Outside, TowerEnds


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
