"""Models that read images: their parameters against the real classes, their tokens against the image processors."""

from __future__ import annotations

from typing import Any

import pytest

from memcalc import estimate, largest
from memcalc.convert.huggingface import from_huggingface
from memcalc.convert.vision_language import VISION_LANGUAGE
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.planner.images import parse_size, seen_by
from memcalc.specs.model import Model
from memcalc.terms.parameters import model_count

SIZES = ("224x224", "512x512", "640x480", "1024x768", "1920x1080")
GEMMA3 = {"image_size": 896, "patch_size": 14, "model_type": "siglip_vision_model"}
CLIP = {"image_size": 336, "patch_size": 14}
SIGLIP_500M = {"patch_size": 16, "image_size": 512, "hidden_size": 768, "num_attention_heads": 12}
SIGLIP_2B = {"patch_size": 14, "image_size": 384, "num_attention_heads": 16}
PIXTRAL = {"model_type": "pixtral", "image_size": 1024, "patch_size": 16}
SCOUT = {"hidden_size": 1408, "image_size": 336, "vision_output_dim": 4096}
"""Llama 4 Scout's vision tower, where it is not the class's default."""
TOKENS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "qwen2_vl": ({"model_type": "qwen2_vl", "vision_config": {}}, (64, 324, 391, 999, 2691)),
    "qwen3_vl": ({"model_type": "qwen3_vl", "text_config": {}, "vision_config": {}}, (64, 256, 300, 768, 2040)),
    "gemma3": ({"model_type": "gemma3", "text_config": {}, "vision_config": GEMMA3}, (256, 256, 256, 256, 256)),
    "llava": ({"model_type": "llava", "text_config": {}, "vision_config": CLIP}, (576, 576, 576, 576, 576)),
    "internvl": ({"model_type": "internvl", "text_config": {}, "vision_config": {}}, (256, 256, 3328, 3328, 2304)),
    "pixtral": (
        {"model_type": "llava", "text_config": {}, "vision_config": PIXTRAL, "vision_feature_layer": -1,
         "vision_feature_select_strategy": "full"}, (196, 1024, 1200, 3072, 2304),
    ),
    "mistral3": ({"model_type": "mistral3", "text_config": {}, "vision_config": PIXTRAL | {"image_size": 1540,
                  "patch_size": 14}}, (64, 361, 414, 1036, 1705)),
    "llama4": ({"model_type": "llama4", "text_config": {}, "vision_config": SCOUT}, (144, 720, 720, 1872, 2304)),
    "smolvlm-500m": ({"model_type": "smolvlm", "scale_factor": 4, "text_config": {}, "vision_config": SIGLIP_500M},
                     (1088, 1088, 832, 832, 832)),
    "smolvlm-2b": ({"model_type": "smolvlm", "scale_factor": 3, "text_config": {}, "vision_config": SIGLIP_2B},
                   (1377, 1377, 1053, 1053, 1053)),
}  # fmt: skip
"""Tokens of an image of each of the sizes, as the processors of Transformers 5.23 made them (breaks between rows of
patches left out)."""


@pytest.mark.parametrize("name", TOKENS)
def test_an_image_is_as_many_tokens_as_its_processor_makes(name: str) -> None:
    config, tokens = TOKENS[name]
    model = from_huggingface(config)
    assert tuple(seen_by(model, *parse_size(size)).tokens for size in SIZES) == tokens


def test_a_limit_of_pixels_shrinks_an_image() -> None:
    model = from_huggingface({"model_type": "qwen2_vl", "vision_config": {}})
    # Transformers' own default limit, 1,003,520 px, of which 1920 x 1080 px are 1222 tokens
    assert seen_by(model, 1920, 1080, most_pixels=1_003_520).tokens == 1222


def counted(kind: str, config: Any = None) -> tuple[int, int]:
    """The parameters as they are read, and those of the real class on the meta device."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from autograd import images

    config = config if config is not None else images.class_of(kind).config_class()
    with torch.device("meta"):
        real = images.class_of(kind)(config)
    return model_count(from_huggingface(config.to_dict())).total, sum(p.numel() for p in real.parameters())


@pytest.mark.parametrize("kind", VISION_LANGUAGE)
def test_parameters_equal_those_of_the_default_class(kind: str) -> None:
    config = None
    if kind == "llama4":  # whose default parts do not fit together
        transformers = pytest.importorskip("transformers")
        config = transformers.Llama4Config(text_config={"num_hidden_layers": 4}, vision_config=SCOUT)
    ours, real = counted(kind, config)
    assert ours == real


@pytest.mark.parametrize(
    "kind",
    ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "llava", "deepseek_vl", "internvl", "idefics3",
     "llama4", "smolvlm", "paligemma", "mistral3", "lighton_ocr"],
)  # fmt: skip
def test_parameters_equal_those_of_a_small_one(kind: str) -> None:
    pytest.importorskip("transformers")
    from autograd import images

    ours, real = counted(kind, images.config_of(kind))
    assert ours == real


def test_llama_4s_tower_has_gelu_whatever_its_config_says() -> None:
    """``Llama4VisionMLP`` and ``Llama4VisionMLP2`` make ``nn.GELU()``, and do not read ``hidden_act``."""
    whole = {"model_type": "llama4", "text_config": {}}
    said = from_huggingface({**whole, "vision_config": {**SCOUT, "hidden_act": "relu"}})
    assert said == from_huggingface({**whole, "vision_config": SCOUT})
    assert said.groups[0].block.mlp.activation == "gelu"


SMALL = {
    "model_type": "llava",
    "text_config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "intermediate_size": 96, "vocab_size": 500},
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "patch_size": 14,
                      "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 56},
}  # fmt: skip
SMALL_QWEN = {
    "model_type": "qwen2_vl", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 500,
    "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 64},
}  # fmt: skip


def kept(model: Model, **options: Any) -> int:
    """Bytes that autograd keeps of a job's activations at the end of its forward."""
    answer = estimate(model=model, gpu="h100", framework="hf", precision="bf16", seq_len=256, **options)
    return answer.peak.allocated


def test_more_images_need_more_memory() -> None:
    model = from_huggingface(SMALL)
    assert kept(model, images=2) > kept(model) == kept(model, images=1)


def test_a_larger_image_needs_more_memory() -> None:
    model = from_huggingface(SMALL_QWEN)
    assert kept(model, image_size="224x224") > kept(model, image_size="112x112")


def test_the_size_is_asked_for_where_tokens_depend_on_it() -> None:
    with pytest.raises(MissingError, match="--image-size"):
        kept(from_huggingface(SMALL_QWEN))


@pytest.mark.parametrize("size", ["large", "12", "0x5", "5x", "1x1x1", "100000x3", "-5x9"])
def test_a_size_that_is_none_is_refused(size: str) -> None:
    with pytest.raises(InputError, match="image-size"):
        kept(from_huggingface(SMALL_QWEN), image_size=size)


def test_images_that_do_not_fit_into_the_sequence_are_refused() -> None:
    with pytest.raises(CombinationError, match="seq-len"):
        kept(from_huggingface(SMALL), images=20)


def test_images_of_a_text_model_are_refused() -> None:
    with pytest.raises(CombinationError, match="has no vision tower"):
        estimate(model="llama-3-8b", gpu="h100", images=1)


@pytest.mark.parametrize(("name", "value"), [("tp", 2), ("pp", 2), ("cp", 2), ("compile", "blocks")])
def test_what_is_not_modelled_beside_a_tower_is_refused(name: str, value: Any) -> None:
    with pytest.raises(CombinationError, match=name):
        kept(from_huggingface(SMALL), gpus=2, **{name: value})


def test_a_framework_with_models_of_its_own_is_refused() -> None:
    with pytest.raises(CombinationError, match="framework"):
        estimate(model=from_huggingface(SMALL), gpu="h100", framework="megatron")


def test_a_processor_that_is_not_modelled_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="image processor"):
        estimate(model=from_huggingface({**SMALL, "model_type": "llava_next"}), gpu="h100")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vision_config": {"model_type": "sam_vision_model"}}, "vision tower is not understood"),
        ({"text_config": {"model_type": "mamba"}}, "text model of this llava is not understood"),
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        ({"vision_config": {"model_type": "clip_vision_model", "strange": 3}}, "vision_config.strange"),
        ({"text_config": {"model_type": "llama", "strange": 3}}, "text_config.strange"),
        ({"strange": 3}, "strange"),
        ({"vision_config": None}, "vision_config"),
        ({"text_config": None}, "text_config"),
    ],
)
def test_a_part_that_is_not_understood_is_refused_by_its_name(change: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        from_huggingface({**SMALL, **change})


def states(model: Model, **options: Any) -> dict[str, int]:
    """Bytes of weights and optimizer states of a job in 16 bits on one GPU."""
    answer = estimate(
        model=model, gpu="h100", framework="hf", precision="bf16", seq_len=256, optimizer_impl="loop", **options
    )
    return {
        part: sum(term.bytes for term in answer.terms if term.component == part and "step" in term.phases)
        for part in ("parameters", "optimizer")
    }


@pytest.mark.parametrize("vision", ["projector", "frozen"])
def test_what_is_frozen_has_neither_gradients_nor_states(vision: str) -> None:
    model = from_huggingface(SMALL)
    tower = 588 * 32 + 32 + 17 * 32 + 2 * 64 + 2 * (4 * 32 * 33 + 32 * 64 + 64 + 64 * 32 + 32 + 2 * 64)
    projector = 32 * 64 + 64 + 64 * 64 + 64
    frozen = tower + (projector if vision == "frozen" else 0)
    before, after = (states(model, **options) for options in ({}, {"vision": vision}))
    assert after["parameters"] == before["parameters"]
    assert before["optimizer"] - after["optimizer"] == 4 * frozen


def test_a_frozen_tower_keeps_nothing() -> None:
    model = from_huggingface(SMALL)
    activations = [
        {
            term.name: term.bytes
            for term in estimate(
                model=model, gpu="h100", framework="hf", precision="bf16", seq_len=256, vision=vision
            ).terms
        }
        for vision in ("trained", "frozen")
    ]
    assert any(name.startswith("vision ") and size for name, size in activations[0].items())
    assert not any(name.startswith("vision ") and size for name, size in activations[1].items())


def test_adapters_leave_a_frozen_tower_alone() -> None:
    model = from_huggingface(SMALL)
    with_tower, without = (states(model, lora="8:q,v", vision=vision) for vision in ("trained", "frozen"))
    # Two blocks of q and v, each of rank 8 between 32 and 32 elements; two fp32 moments
    assert with_tower["optimizer"] - without["optimizer"] == 2 * 4 * 2 * 2 * 8 * (32 + 32)


def test_the_longest_sequence_holds_the_images() -> None:
    model = from_huggingface(SMALL_QWEN)
    options = {"gpu": "h100", "gpus": 1, "framework": "hf", "precision": "bf16", "image_size": "1344x1344"}
    answer = largest("seq-len", model=model, step=64, **options)
    assert isinstance(answer.answer, int)
    assert answer.answer >= seen_by(model, 1344, 1344).tokens == 2304
