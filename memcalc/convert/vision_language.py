"""Models that read images: a vision tower, a projector and a text model, each read from its own part of a config.json.

Defaults of absent keys are those of the config class (Transformers 5.23, models/*/configuration_*.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memcalc.convert.huggingface_decoders import PLAIN
from memcalc.convert.huggingface_gated import EXPERTS, GATED
from memcalc.convert.huggingface_hybrids import HYBRIDS
from memcalc.convert.huggingface_keys import Flat, Keys
from memcalc.convert.huggingface_table import TABLE
from memcalc.convert.vision_towers import LAYER_NORM, VISION, VisionTower
from memcalc.errors import InputError, UnknownNameError
from memcalc.specs.block import Norm
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Images, Model, Outside, Projector, patterns

DECODERS: dict[str, Callable[[Keys], Flat]] = {**PLAIN, **GATED, **EXPERTS, **HYBRIDS, **TABLE}
"""Text models by their `model_type`."""
_TOKENS = """
    boi_token_index eoi_token_index ignore_index image_token video_token pad_token_index image_seq_length
    video_seq_length vision_start_token_id vision_end_token_id vision_token_id use_image_newline_parameter
    hidden_size vocab_size is_composition sep_token bos_token use_cache _pad_token_id text_config_dict
    vision_config_dict image_grid_pinpoints vision_aspect_ratio spatial_pool_mode spatial_pool_stride
"""
"""Keys of the whole about its tokens, and sizes that its parts have too."""


class Between(NamedTuple):
    """What a projector joins."""

    tower: VisionTower
    vision: Keys
    """The vision tower's keys."""
    text: int
    """Width of the text model."""


@dataclass(frozen=True)
class Joined:
    """A family: its default parts, and what joins them."""

    text: str
    vision: str
    projector: Callable[[Keys, Between], tuple[Projector, bool]]
    """From its keys and what it joins to the projector, and whether its linear layers have biases."""
    tied: bool = False
    """The head is the embedding's transpose where the config does not say."""
    images: Mapping[str, Any] = field(default_factory=dict)
    """What its image processor does otherwise than the tower's usual one."""
    newline: bool = False
    """A learned vector ends each row of patches."""
    bidirectional: bool = False
    """The prompt is no causal sequence, which a mask says that all blocks are given."""
    text_fields: Mapping[str, Any] = field(default_factory=dict)
    """What its text model's blocks do otherwise where there are images."""


def qwen_merger(c: Keys, between: Between) -> tuple[Projector, bool]:
    """Two linear layers over squares of patches; those of DeepStack read the output of earlier blocks."""
    tower, vision, kind = between.tower, between.vision, c.text("model_type", "")
    out = vision.size("hidden_size" if kind == "qwen2_vl" else "out_hidden_size", 3584)
    deep = 0
    if kind.startswith("qwen3_vl"):
        deep = len(vision.sizes("deepstack_visual_indexes")) if "deepstack_visual_indexes" in vision else 3
    merge = tower.images.merge**2
    linears, norm = (merge * tower.hidden, out), tower.groups[0].block.norm
    return Projector(merge=merge, norm=norm, linears=linears, activation="gelu", deep=deep), True


def two_layers(c: Keys, between: Between) -> tuple[Projector, bool]:
    """LLaVA's: two linear layers on each row; the class token is left out where the config says so."""
    selection, layer = c.text("vision_feature_select_strategy", "default"), c.get("vision_feature_layer", -2)
    if type(layer) is not int:
        raise InputError("config key vision_feature_layer", layer, "only one layer is modelled")
    if selection not in {"default", "full"}:
        raise InputError("config key vision_feature_select_strategy", selection, "must be default or full")
    act = c.activation("projector_hidden_act", "gelu")
    drops = selection == "default" and between.tower.images.class_tokens > 0
    spec = Projector(linears=(between.text, between.text), activation=act, copied=drops, early=layer < -1)
    return spec, c.flag("multimodal_projector_bias", True)


def aligned(_: Keys, between: Between) -> tuple[Projector, bool]:
    """DeepSeek-VL's: two linear layers on each row."""
    return Projector(linears=(between.text, between.text), activation="gelu"), True


def shuffled(c: Keys, between: Between) -> tuple[Projector, bool]:
    """InternVL's: squares of patches are copied side by side, normed, and pass two linear layers."""
    if c.get("vision_feature_layer", -1) != -1:
        raise InputError("config key vision_feature_layer", c.get("vision_feature_layer"), "only -1 is modelled")
    c.only("vision_feature_select_strategy", "default")
    ratio = c.fraction("downsample_ratio", 0.5)
    merge = int(1 / ratio) ** 2
    act = c.activation("projector_hidden_act", "gelu")
    linears = (between.text, between.text)
    return Projector(merge=merge, copied=True, norm=LAYER_NORM, norm_merged=True, linears=linears, activation=act), True


def one_layer(c: Keys, between: Between) -> tuple[Projector, bool]:
    """Idefics 3's: squares of patches side by side pass one linear layer."""
    merge = c.size("scale_factor", 2) ** 2
    return Projector(merge=merge, copied=True, linears=(between.text,)), False


def pooled(c: Keys, between: Between) -> tuple[Projector, bool]:
    """Gemma 3's: means over squares of patches, a norm, and one matrix."""
    tokens = c.size("mm_tokens_per_image", 256)
    images = between.tower.images
    side = images.side // images.patch
    along = side // int(tokens**0.5) if tokens <= side**2 else 1
    norm = Norm(scale="plus-one")
    return Projector(pool=along**2, norm=norm, linears=(between.text,)), False


def linear(c: Keys, between: Between) -> tuple[Projector, bool]:
    """PaliGemma's: one linear layer on each row."""
    width = between.vision.size("projection_dim", c.size("projection_dim", 2048))
    return Projector(linears=(width,)), True


def merged(c: Keys, between: Between) -> tuple[Projector, bool]:
    """Mistral 3's: a norm, squares of patches joined by a linear layer, and two more."""
    layer = c.get("vision_feature_layer", -1)
    if layer != -1:
        raise InputError("config key vision_feature_layer", layer, "only -1 is modelled")
    merge, act = c.size("spatial_merge_size", 2) ** 2, c.activation("projector_hidden_act", "gelu")
    norm, linears = Norm(), (between.tower.hidden, between.text, between.text)
    biased = c.flag("multimodal_projector_bias")
    if biased:
        raise InputError("config key multimodal_projector_bias", biased, "only false is modelled")
    return Projector(merge=merge, copied=True, norm=norm, linears=linears, activation=act), False


def adapted(_: Keys, between: Between) -> tuple[Projector, bool]:
    """Llama 4's: squares of patches are copied side by side and pass two layers of the tower's and one of the whole."""
    vision, where = between.vision, "config key vision_config"
    merge = int(1 / vision.fraction("pixel_shuffle_ratio", 0.5)) ** 2
    inner = vision.size("projector_input_dim", 4096)
    # One key after the other is the width that the next layer reads, or the class cannot run
    for key, default, width in (
        ("intermediate_size", 5632, merge * between.tower.hidden),
        ("projector_output_dim", 4096, inner),
        ("vision_output_dim", 7680, inner),
    ):
        if (value := vision.size(key, default)) != width:
            raise InputError(f"{where}.{key}", value, f"must be {width}, the width of what is joined to it")
    if dropout := vision.rate("projector_dropout"):
        raise InputError(f"{where}.projector_dropout", dropout, "only 0 is modelled")
    linears = (inner, inner, between.text)
    return Projector(merge=merge, copied=True, linears=linears, activation="gelu", activated=True), False


VISION_LANGUAGE: dict[str, Joined] = {
    "qwen2_vl": Joined("qwen2_vl_text", "qwen2_vl_vision", qwen_merger),
    "qwen2_5_vl": Joined("qwen2_5_vl_text", "qwen2_5_vl_vision", qwen_merger),
    "qwen3_vl": Joined("qwen3_vl_text", "qwen3_vl_vision", qwen_merger),
    "qwen3_vl_moe": Joined("qwen3_vl_moe_text", "qwen3_vl_moe_vision", qwen_merger),
    "qwen3_5": Joined("qwen3_5_text", "qwen3_5_vision", qwen_merger),
    "qwen3_5_moe": Joined("qwen3_5_moe_text", "qwen3_5_moe_vision", qwen_merger),
    "llama4": Joined("llama4_text", "llama4_vision_model", adapted),
    "gemma3": Joined("gemma3_text", "siglip_vision_model", pooled, tied=True, text_fields={"explicit_mask": True}),
    "llava": Joined("llama", "clip_vision_model", two_layers),
    "llava_next": Joined("llama", "clip_vision_model", two_layers, newline=True, images={"rule": "unknown"}),
    "llava_next_video": Joined("llama", "clip_vision_model", two_layers, newline=True, images={"rule": "unknown"}),
    "deepseek_vl": Joined("llama", "siglip_vision_model", aligned, tied=True),
    "llava_onevision": Joined("qwen2", "siglip_vision_model", two_layers, newline=True, images={"rule": "unknown"}),
    "internvl": Joined("qwen2", "internvl_vision", shuffled, tied=True),
    "idefics3": Joined("llama", "idefics3_vision", one_layer, images={"longest": 4}),
    "smolvlm": Joined("llama", "smolvlm_vision", one_layer, images={"longest": 4}),
    "paligemma": Joined(
        "gemma", "siglip_vision_model", linear, tied=True, bidirectional=True, text_fields={"explicit_mask": True}
    ),
    "mistral3": Joined("mistral", "pixtral", merged, tied=True),
    "lighton_ocr": Joined("qwen3", "pixtral", merged, tied=True),
}
"""Families by the `model_type` of the whole config."""
_PARTS = ("text_config", "vision_config")
_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Families whose first files have the text model's keys beside the vision tower's."""


def read(keys: Keys, mapping: Mapping[str, Any], kind: str, about: Flat) -> Model:
    """Return the model of a config of several parts."""
    family = VISION_LANGUAGE[kind]
    text_kind, text = _text(mapping, kind, family)
    flat = DECODERS[text_kind](text)
    tower = _tower(keys, family)
    keys.get(_TOKENS)
    vision = keys.table("vision_config") or Keys({})
    projector, biased = family.projector(keys, Between(tower, vision, flat["hidden"]))
    flat |= {"tied": keys.flag("tie_word_embeddings", family.tied), **family.text_fields}
    text.get("tie_word_embeddings is_composition num_image_tokens")
    if nested(mapping):
        text.refuse_rest()
        keys.get(" ".join(_PARTS))
        keys.refuse_rest()
    else:
        known = {*_PARTS, *text.taken, *keys.taken}
        Keys({key: value for key, value in mapping.items() if key not in known}).refuse_rest()
    return joined(tower, projector, from_flat({**flat, **about}), biased=biased, family=family)


def nested(mapping: Mapping[str, Any]) -> bool:
    """Whether the text model's keys stand in a table of their own; Qwen2-VL's files have them beside the vision's."""
    return isinstance(mapping.get("text_config"), Mapping)


def _text(mapping: Mapping[str, Any], kind: str, family: Joined) -> tuple[str, Keys]:
    if not nested(mapping) and kind not in _FLAT:
        raise InputError("config key text_config", mapping.get("text_config"), "must be given: the text model's sizes")
    table = mapping["text_config"] if nested(mapping) else mapping
    text_kind = table.get("model_type", family.text) if nested(mapping) else family.text
    if not isinstance(text_kind, str) or text_kind not in DECODERS:
        allowed = f"the text model of this {kind} is not understood: it must be one of {', '.join(sorted(DECODERS))}"
        raise UnknownNameError("config key text_config.model_type", text_kind, allowed, tuple(DECODERS))
    if family.bidirectional:
        table = {key: value for key, value in table.items() if key != "use_bidirectional_attention"}
    return text_kind, Keys(table, "text_config." if nested(mapping) else "")


def _tower(keys: Keys, family: Joined) -> VisionTower:
    table = keys.table("vision_config")
    if table is None:
        raise InputError("config key vision_config", None, "must be given: the sizes of the vision tower")
    kind = table.text("model_type", family.vision)
    if kind in {"siglip", "clip"}:
        kind = f"{kind}_vision_model"
    if kind not in VISION and kind == keys.text("model_type", ""):  # as Qwen2.5-VL's files of the first weeks say it
        kind = family.vision
    if kind not in VISION:
        allowed = f"this vision tower is not understood: it must be one of {', '.join(VISION)}"
        raise UnknownNameError("config key vision_config.model_type", kind, allowed, tuple(VISION))
    table.get("tie_word_embeddings out_hidden_size deepstack_visual_indexes projection_dim hidden_size")
    tower = VISION[kind](table)
    table.refuse_rest()
    return tower


def joined(tower: VisionTower, projector: Projector, text: Model, *, biased: bool, family: Joined) -> Model:
    """Put the parts together, the tower first."""
    tensors = projector_tensors(projector, tower.hidden, biased=biased)
    if family.newline:
        tensors["newline"] = text.hidden
    outside = tuple(Outside(name=name, parameters=size, tower="vision") for name, size in tensors.items())
    ends = tower.ends.model_copy(update={"projector": projector})
    sequence = (*tower.order, *(len(tower.groups) + index for index in text.sequence))
    return text.model_copy(
        update={
            "groups": (*tower.groups, *text.groups),
            "order": () if list(sequence) == sorted(sequence) else patterns(sequence),
            "outside": (*tower.outside, *outside, *text.outside),
            "ends": (ends, *text.ends),
            "images": images_of(tower.images, projector, family),
        }
    )


def images_of(images: Images, projector: Projector, family: Joined) -> Images:
    """The rule of the whole: as many patches become a token as the projector merges."""
    along = int((projector.merge * projector.pool) ** 0.5)
    update: dict[str, Any] = {"merge": along, **family.images}
    if images.rule == "split":
        update["longest"] = images.side * family.images.get("longest", 4)
    if images.rule == "unknown" or update.get("rule") == "unknown":
        update["rule"] = "unknown"
    return images.model_copy(update=update)


def projector_tensors(projector: Projector, hidden: int, *, biased: bool) -> dict[str, int]:
    """The parameters of a projector by tensor, those of DeepStack together [elements]."""
    width, tensors = projector.merge * hidden, dict[str, int]()
    if projector.norm is not None:
        tensors["projector norm"] = projector.norm.vectors * (width if projector.norm_merged else hidden)
    inputs, deep = width, projector.norm.vectors * width if projector.norm else 0
    for number, outputs in enumerate(projector.linears, 1):
        tensors[f"projector linear {number}"] = size = inputs * outputs + biased * outputs
        inputs, deep = outputs, deep + size
    if projector.deep:
        tensors["further projectors"] = projector.deep * deep
    return tensors
