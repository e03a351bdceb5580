"""Parameter formulas against published tables, and every preset against the class it is made for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from shallow import shallow

from memcalc import catalog
from memcalc.convert.formats.trainer_writer import sizes
from memcalc.formulas import parameters
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.terms.parameters import block_count, model_count

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NAMES = catalog.names("model")
MODELS = {name: catalog.model(name) for name in NAMES}
OF_TRANSFORMERS = [name for name in NAMES if (MODELS[name].hf_class or "timm:").partition(":")[0] != "timm"]
OF_TIMM = [name for name in NAMES if str(MODELS[name].hf_class).startswith("timm:")]

# Narayanan et al., arXiv:2104.04473, table 1: parameters [billions], heads, hidden size, layers; V = 51200, s = 2048.
NARAYANAN_TABLE_1 = [
    ("1.7", 24, 2304, 24),
    ("3.6", 32, 3072, 30),
    ("7.5", 32, 4096, 36),
    ("18.4", 48, 6144, 40),
    ("39.1", 64, 8192, 48),
    ("76.1", 80, 10240, 60),
    ("145.6", 96, 12288, 80),
    ("310.1", 128, 16384, 96),
    ("529.6", 128, 20480, 105),
    ("1008.0", 160, 25600, 128),
]


def real_config(model: Model) -> Any:
    """Return the config object of the class that `model` names; TOML has no null, "null" stands for it."""
    return getattr(transformers, str(model.hf_class)).config_class(**sizes(model))


def real_count(model: Model) -> int:
    """Return the unique parameters of the real class, which takes no memory on the meta device."""
    with torch.device("meta"):
        built = getattr(transformers, str(model.hf_class))(real_config(model))
    return sum(parameter.numel() for parameter in built.parameters())


def untied_head(model: Model) -> int:
    """Return the head of T5 1.1 and mT5, untied in their checkpoints: Transformers 5 ties them whatever configs say."""
    is_t5 = model.hf_class in {"T5ForConditionalGeneration", "MT5ForConditionalGeneration"}
    return model.vocab * model.hidden if is_t5 and not model.tied else 0


def apart(name: str) -> Any:
    """A preset, among the slow ones where nothing but its parameters is known."""
    return pytest.param(name, marks=pytest.mark.slow if MODELS[name].counted_parts else ())


BUILT_WHOLE = set({MODELS[name].hf_class: name for name in OF_TRANSFORMERS if not MODELS[name].counted_parts}.values())
"""A preset of each class, whose blocks are all built; others of it with blocks that are alike have a few built."""


@pytest.mark.parametrize("name", [apart(name) for name in OF_TRANSFORMERS])
def test_preset_has_the_parameters_of_the_real_class(name: str) -> None:
    model = MODELS[name]
    if name not in BUILT_WHOLE and not model.counted_parts and len(model.groups) == 1:
        assert real_config(model).num_hidden_layers == model.num_layers
        model = shallow(model)
    assert model_count(model).total == real_count(model) + untied_head(model)


@pytest.mark.parametrize("name", OF_TIMM)
def test_preset_has_the_parameters_of_the_published_vision_transformer(name: str) -> None:
    """Zhai et al., arXiv:2106.04560, table 2, with timm's class token, biases and classifier of 1000."""
    depth, width, mlp = {"vit-giant-14": (40, 1408, 6144), "vit-gigantic-14": (48, 1664, 8192)}[name]
    attention = width * 3 * width + 3 * width + width * width + width
    block = attention + (width * mlp + mlp) + (mlp * width + width) + 2 * (2 * width)
    patches = 14 * 14 * 3 * width + width
    tokens = (224 // 14) ** 2 + 1
    expected = depth * block + patches + width + tokens * width + 2 * width + width * 1000 + 1000
    assert model_count(MODELS[name]).total == expected


@pytest.mark.parametrize(("billions", "heads", "hidden", "layers"), NARAYANAN_TABLE_1)
def test_narayanan_formula_prints_table_1(billions: str, heads: int, hidden: int, layers: int) -> None:
    count = parameters.narayanan_parameters(layers, hidden, 51200, 2048)
    assert f"{count / 1e9:.1f}" == billions
    flat = {"n_layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": 51200, "gated": False}
    shape = {"norm": "layernorm", "tied": True, "positions": "learned", "max_positions": 2048}
    model = from_flat({**flat, **shape, "bias": {"qkv": True, "o": True, "mlp": True}})
    assert model_count(model).total == count + 2 * hidden  # the final norm, which the paper leaves out


def test_nf4_with_double_quantisation_takes_4_127_bits() -> None:
    """Dettmers et al., arXiv:2305.14314, section 3: 0.5 bits a parameter for the scales become 0.127."""
    assert parameters.quantized_bits(4, 64, 8, outer_block=256) == pytest.approx(4.127, abs=5e-4)
    assert parameters.quantized_bits(4, 64, 32) == 4.5


def test_lora_on_gpt3_takes_what_its_paper_prints() -> None:
    """Hu et al., arXiv:2106.09685, table 4: GPT-3 175B, 4.7M for r_v = 2, 37.7M for r_q = r_v = 8."""
    one = parameters.lora_parameters(1, 12288, 12288) * 96
    assert f"{2 * one / 1e6:.1f} {16 * one / 1e6:.1f}" == "4.7 37.7"


def test_formulas_broadcast_over_columns() -> None:
    hidden = np.array([768, 1024])
    expected = [parameters.attention_parameters(int(h), int(h), int(h)) for h in hidden]
    assert parameters.attention_parameters(hidden, hidden, hidden).tolist() == expected
    assert parameters.mlp_parameters(hidden[:, None], np.array([1, 2]), 0).shape == (2, 2)


def test_active_parameters_of_the_mixtures_of_experts() -> None:
    """Within rounding of what the authors print: Mixtral 12.9B, DeepSeek-V3 37B, Qwen3 235B 22B."""
    printed = {"mixtral-8x7b": "12.9", "deepseek-v3": "37.6", "qwen3-235b-a22b": "22.2", "kimi-k2": "32.9"}
    counted = {name: f"{model_count(MODELS[name]).active / 1e9:.1f}" for name in printed}
    assert counted == printed


@pytest.mark.parametrize("name", NAMES)
def test_parts_add_up(name: str) -> None:
    model, count = MODELS[name], model_count(MODELS[name])
    assert count.total == count.outside_blocks + count.blocks_total
    assert count.active <= count.total
    idle = any(group.block.counted is not None and group.block.counted.idle > 0 for group in model.groups)
    assert (count.active == count.total) != (model.is_moe or idle)
    assert 0 < count.largest_tensor <= count.total
    assert [pair[0] for pair in count.groups] == [group.count for group in model.groups]
    assert sum(pair[0] * pair[1].total for pair in count.groups) == sum(
        group.count * block_count(group.block).total for group in model.groups
    )
