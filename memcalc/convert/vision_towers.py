"""Vision towers of models that read images: their blocks, and what stands before and after them.

Defaults of absent keys are those of the config class (Transformers 5.23, models/*/configuration_*.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memcalc.convert.huggingface_keys import Flat, Keys, activation, biases
from memcalc.errors import InputError
from memcalc.specs import flat as forms
from memcalc.specs.block import Norm
from memcalc.specs.model import BlockGroup, Images, Outside, TowerEnds

LAYER_NORM = Norm(kind="layernorm", bias=True)


class VisionTower(NamedTuple):
    """A tower without what joins it to a text model."""

    groups: tuple[BlockGroup, ...]
    order: tuple[int, ...]
    """The group of each block."""
    outside: tuple[Outside, ...]
    ends: TowerEnds
    images: Images
    hidden: int


def _vision(
    flat: Flat,
    tensors: dict[str, int],
    images: Images,
    *,
    patch_values: int,
    norm: Norm | None = None,
    end_norm: Norm | None = None,
) -> VisionTower:
    """Put a tower together; its positions, where they are learned, come from the flat form."""
    checked = forms.flat_of({"vocab": 0, "causal": False, "tower": "vision", "max_positions": 1, "outside": [], **flat})
    named = [Outside(name=name, parameters=size, tower="vision") for name, size in tensors.items() if size]
    groups = forms.groups_of(checked)
    ends = TowerEnds(tower="vision", patch=patch_values, norm=norm, end_norm=end_norm)
    order = tuple(index for index, group in enumerate(groups) for _ in range(group.count))
    return VisionTower(groups, order, (*named, *forms.outside_of(checked)), ends, images, checked.hidden)


def _sizes(c: Keys, hidden: int, ffn: int, layers: int, heads: int) -> Flat:
    return {
        "hidden": c.size("hidden_size", hidden),
        "ffn": c.size("intermediate_size", ffn),
        "n_layers": c.size("num_hidden_layers", layers),
        "heads": c.size("num_attention_heads", heads),
        "dropout": {"attention": c.rate("attention_dropout")},
    }


def _side(c: Keys, name: str, default: int) -> int:
    """Return the side of a square that may be written as its two sides."""
    value = c.get(name, default)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**20:
        raise InputError(
            f"config key vision_config.{name}", value, "must be a whole number above 0: the side of a square"
        )
    return value


def _square(c: Keys, image: int, patch: int, class_tokens: int = 0) -> tuple[Images, int, int]:
    """Return the images of a tower with learned positions, the values of a patch, and the rows of a view."""
    side, edge, channels = _side(c, "image_size", image), _side(c, "patch_size", patch), c.size("num_channels", 3)
    if edge > side:
        raise InputError("config key vision_config.patch_size", edge, f"must be at most image_size {side}")
    images = Images(rule="square", patch=edge, side=side, class_tokens=class_tokens)
    return images, edge**2 * channels, (side // edge) ** 2 + class_tokens


def siglip(c: Keys) -> VisionTower:
    """SigLIP: no class token, and a head that pools, which no model that reads its rows runs."""
    c.get("projection_dim vocab_size num_image_tokens projector_hidden_act")
    return _siglip(c, (768, 3072, 12, 12), 16, head=c.flag("vision_use_head", True))


def _siglip(c: Keys, sizes: tuple[int, int, int, int], patch: int, *, head: bool) -> VisionTower:
    flat, (images, values, rows) = _sizes(c, *sizes), _square(c, 224, patch)
    h, f = flat["hidden"], flat["ffn"]
    pooling = head * (h + 4 * h * h + 4 * h + 2 * h + 2 * h * f + f + h)
    flat |= {**biases(True, True, True), **activation(c, "gelu_pytorch_tanh"), "gated": False, "norm": "layernorm"}
    flat |= {"positions": "learned", "max_positions": rows, "position_index": "buffer"}
    tensors = {"patches": values * h + h, "post_norm": 2 * h, "pooling_head": pooling}
    return _vision(flat, tensors, images, patch_values=values, end_norm=LAYER_NORM)


def clip(c: Keys) -> VisionTower:
    """CLIP: a class token and a norm before the blocks; the norm after them is on the class token alone."""
    flat, (images, values, rows) = _sizes(c, 768, 3072, 12, 12), _square(c, 224, 32, 1)
    h = flat["hidden"]
    c.get("projection_dim vocab_size initializer_factor dropout")
    flat |= {**biases(True, True, True), **activation(c, "quick_gelu"), "gated": False, "norm": "layernorm"}
    flat |= {"positions": "learned", "max_positions": rows, "position_index": "buffer"}
    tensors = {"class_token": h, "patches": values * h, "pre_norm": 2 * h, "post_norm": 2 * h}
    return _vision(flat, tensors, images, patch_values=values, norm=LAYER_NORM)


def pixtral(c: Keys) -> VisionTower:
    """Pixtral: images of any size side by side in one sequence, which a mask keeps apart."""
    flat = _sizes(c, 1024, 4096, 24, 16)
    h, edge, longest = flat["hidden"], _side(c, "patch_size", 16), _side(c, "image_size", 1024)
    values = edge**2 * c.size("num_channels", 3)
    c.get("vocab_size")
    flat |= {**activation(c, "gelu"), "head_dim": c.maybe("head_dim"), "joins_batch": True}
    images = Images(rule="bounded", patch=edge, longest=longest)
    tensors = {"patches": values * h, "pre_norm": h}
    return _vision(flat, tensors, images, patch_values=values, norm=Norm())


def internvl(c: Keys) -> VisionTower:
    """InternVL: a learned vector on each branch, and tiles."""
    flat, (images, values, rows) = _sizes(c, 1024, 4096, 24, 16), _square(c, 448, 14, 1)
    h = flat["hidden"]
    c.get("layer_scale_init_value use_mean_pooling dropout")
    c.only("use_mask_token", False)
    c.only("use_absolute_position_embeddings", True)
    kind = c.text("norm_type", "layer_norm")
    if kind not in {"layer_norm", "rms_norm"}:
        raise InputError("config key vision_config.norm_type", kind, "must be layer_norm or rms_norm")
    dropout = {**flat["dropout"], "block": c.rate("projection_dropout"), "embedding": c.rate("hidden_dropout_prob")}
    flat |= {**biases(c.flag("attention_bias"), True, True), **activation(c, "gelu"), "gated": False}
    flat |= {"norm": kind.replace("_", ""), "dropout": dropout}
    flat |= {"qk_norm": "full" if c.flag("use_qk_norm") else "none"}
    flat |= {"positions": "learned", "max_positions": rows, "position_index": "buffer"}
    tensors = {"class_token": h, "patches": values * h + h}
    tower = _vision(flat, tensors, images, patch_values=values)
    images = images.model_copy(update={"rule": "tiled", "most_tiles": 12})
    return tower._replace(groups=_updated(tower.groups, layer_scale=True), images=images)


def _updated(groups: tuple[BlockGroup, ...], **update: object) -> tuple[BlockGroup, ...]:
    return tuple(g.model_copy(update={"block": g.block.model_copy(update=update)}) for g in groups)


def _qwen(c: Keys, flat: Flat, *, limits: tuple[int, int], patch: int) -> VisionTower:
    """What the towers of Qwen2-VL and its successors share: two frames a patch, packed projections, images joined."""
    edge, frames = _side(c, "patch_size", patch), c.size("temporal_patch_size", 2)
    values = c.size("in_channels in_chans", 3) * frames * edge**2
    c.get("spatial_patch_size tokens_per_second")
    least, most = limits
    images = Images(
        rule="scaled", patch=edge, merge=c.size("spatial_merge_size", 2), least_pixels=least, most_pixels=most
    )
    flat |= {"packed_qkv": True, "wide_rotary": True, "joins_images": True, "dropout": {}}
    return _vision(flat, {}, images, patch_values=values)


def qwen2_vl(c: Keys) -> VisionTower:
    """Qwen2-VL: LayerNorm, and an MLP without a gate."""
    h, ratio = c.size("embed_dim", 1280), c.size("mlp_ratio", 4)
    flat: Flat = {"hidden": h, "ffn": h * ratio, "n_layers": c.size("depth", 32), "heads": c.size("num_heads", 16)}
    flat |= {**biases(True, True, True), **activation(c, "quick_gelu"), "gated": False, "norm": "layernorm"}
    tower = _qwen(c, flat, limits=(3136, 12845056), patch=14)
    return _with_patches(tower, bias=False)


def qwen2_5_vl(c: Keys) -> VisionTower:
    """Qwen2.5-VL: RMSNorm, a gate, and blocks that see squares of the image alone."""
    flat: Flat = {"hidden": c.size("hidden_size", 3584), "ffn": c.size("intermediate_size", 3420)}
    flat |= {"n_layers": c.size("depth", 32), "heads": c.size("num_heads", 16)}
    flat |= {**biases(True, True, True), **activation(c, "silu")}
    window, full = c.size("window_size", 112), c.sizes("fullatt_block_indexes") or [7, 15, 23, 31]
    tower = _with_patches(_qwen(c, flat, limits=(3136, 12845056), patch=14), bias=False)
    unwindowed = tower.groups[0]
    chunk = (window // tower.images.patch) ** 2
    attention = unwindowed.block.own_attention.model_copy(update={"chunk": chunk})
    squares = unwindowed.model_copy(update={"block": unwindowed.block.model_copy(update={"attention": attention})})
    order = tuple(int(index in set(full)) for index in range(unwindowed.count))
    counts = [order.count(0), order.count(1)]
    groups = [g.model_copy(update={"count": n}) for g, n in zip((squares, unwindowed), counts, strict=True) if n]
    return tower._replace(groups=tuple(groups), order=order if all(counts) else tuple(0 for _ in order))


def qwen3_vl(c: Keys) -> VisionTower:
    """Qwen3-VL: LayerNorm, no gate, and learned positions beside the rotary ones."""
    flat: Flat = {"hidden": c.size("hidden_size", 1152), "ffn": c.size("intermediate_size", 4304)}
    flat |= {"n_layers": c.size("depth", 27), "heads": c.size("num_heads", 16)}
    flat |= {**biases(True, True, True), **activation(c, "gelu_pytorch_tanh"), "gated": False, "norm": "layernorm"}
    rows = c.size("num_position_embeddings", 2304)
    tower = _with_patches(_qwen(c, flat, limits=(65536, 16777216), patch=16), bias=True)
    positions = Outside(name="positions of images", parameters=rows * tower.hidden, tower="vision")
    ends = tower.ends.model_copy(update={"position_taps": 4})
    return tower._replace(outside=(*tower.outside, positions), ends=ends)


def _with_patches(tower: VisionTower, *, bias: bool) -> VisionTower:
    size = tower.ends.patch * tower.hidden + bias * tower.hidden
    return tower._replace(outside=(Outside(name="patches", parameters=size, tower="vision"), *tower.outside))


def idefics3(c: Keys) -> VisionTower:
    """The tower of Idefics 3 and SmolVLM: SigLIP without its head, and tiles."""
    c.get("use_base_siglip max_num_images")
    tower = _siglip(c, (1152, 3072, 12, 16), 32, head=False)
    ends = tower.ends.model_copy(update={"position_taps": 1})
    return tower._replace(images=tower.images.model_copy(update={"rule": "split"}), ends=ends)


def llama4(c: Keys) -> VisionTower:
    """Llama 4: patches by one matrix, a class token after them, and positions learned as well as turned."""
    flat, (images, values, rows) = _sizes(c, 768, 5632, 34, 16), _square(c, 448, 14, 1)
    h = flat["hidden"]
    c.get("norm_eps vision_feature_select_strategy multi_modal_projector_bias rope_parameters rope_theta")
    c.get("vision_output_dim projector_input_dim projector_output_dim projector_dropout pixel_shuffle_ratio")
    c.get("hidden_act")  # the class has GELU whatever it says
    flat |= {**biases(True, True, True), "activation": "gelu", "gated": False, "norm": "layernorm"}
    flat |= {"complex_rotary": True, "rotary_tables": 0, "upcast_softmax": False}
    tensors = {"class_token": h, "patches": values * h, "positions": rows * h, "pre_norm": 2 * h, "post_norm": 2 * h}
    tower = _vision(flat, tensors, images, patch_values=values, norm=LAYER_NORM, end_norm=LAYER_NORM)
    return tower._replace(images=images.model_copy(update={"rule": "canvas", "most_tiles": 16}))


VISION: dict[str, Callable[[Keys], VisionTower]] = {
    "siglip_vision_model": siglip,
    "clip_vision_model": clip,
    "pixtral": pixtral,
    "internvl_vision": internvl,
    "qwen2_vl_vision": qwen2_vl,
    "qwen2_5_vl_vision": qwen2_5_vl,
    "qwen3_vl_vision": qwen3_vl,
    "qwen3_vl_moe_vision": qwen3_vl,
    "qwen3_5_vision": qwen3_vl,
    "qwen3_5_moe_vision": qwen3_vl,
    "llama4_vision_model": llama4,
    "smolvlm_vision": idefics3,
    "idefics3_vision": idefics3,
}
"""Towers by the `model_type` of their config."""
