"""Every model preset, found by glob: it loads, says where it comes from, and is what its own config would give."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from memcalc import catalog
from memcalc.convert.formats.trainer_writer import sizes
from memcalc.convert.huggingface import from_huggingface
from memcalc.errors import InputError, MemcalcError, UnknownNameError
from memcalc.specs.block import Block, MixtureOfExperts
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.terms.parameters import model_count

PRESETS = Path(__file__).resolve().parents[1] / "presets" / "models"
FILES = sorted(path for path in PRESETS.glob("*.toml") if path.stem != "aliases")
ALIASES = tomllib.loads((PRESETS / "aliases.toml").read_text(encoding="utf-8"))
FLAT = {"n_layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 1000, "max_positions": 128}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_preset_loads_and_has_its_published_parameters(path: Path) -> None:
    model = catalog.model(path.stem)
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    assert model.name == path.stem
    assert model.source == data["source"]
    assert model_count(model).total == model.published_parameters == data["published_parameters"]


def test_there_are_presets_of_every_family() -> None:
    assert len(FILES) >= 186
    assert len({catalog.model(path.stem).family for path in FILES}) >= 40


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_alias_leads_to_a_preset(alias: str, name: str) -> None:
    assert not (PRESETS / f"{alias}.toml").exists()
    assert catalog.model(alias) == catalog.model(name)


@pytest.mark.parametrize(
    ("typed", "name"),
    [("7b", "llama-2-7b"), ("meta-llama/Llama-2-7b-hf", "llama-2-7b"), ("Llama2_7B", "llama-2-7b"),
     ("8B", "llama-3.1-8b"), ("175b", "gpt3-175b"), ("671b", "deepseek-v3"), ("bert", "bert-base"),
     ("gpt2-124m", "gpt2"), ("phi-1_5", "phi-1.5")],
)  # fmt: skip
def test_what_people_type(typed: str, name: str) -> None:
    assert catalog.model(typed).name == name


def test_a_near_miss_is_told() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'llama-2-7b'"):
        catalog.model("lama-2-7b")


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("gpt2", {"packed_qkv": True, "dropout": 0.1, "rotary": False, "causal": True}),
        ("gpt-neox-20b", {"packed_qkv": True, "rotary_fraction": 0.25}),
        ("bert-base", {"causal": False, "packed_qkv": False, "dropout": 0.1}),
        ("gemma-2-9b", {"window": 4096, "softcap": True}),
        ("gemma-3-1b", {"window": 512, "qk_norm": "head", "softcap": False}),
        ("gpt-oss-20b", {"window": 128, "sinks": True}),
        ("mistral-7b-v0.1", {"window": 4096}),
        ("mistral-7b-v0.3", {"window": None}),
        ("olmo-2-7b", {"qk_norm": "full"}),
        ("phi-3-mini-3.8b", {"packed_qkv": True, "kv_heads": 32}),
    ],
)
def test_attention_is_as_the_class_writes_it(name: str, facts: dict[str, Any]) -> None:
    attention = catalog.model(name).main.block.attention
    assert {key: getattr(attention, key) for key in facts} == facts


@pytest.mark.parametrize(
    ("name", "activation"),
    [("gpt2", "gelu_python"), ("bert-base", "gelu"), ("starcoder2-7b", "gelu_tanh"), ("opt-1.3b", "relu"),
     ("phi-2", "gelu_python"), ("nemotron-4-340b", "relu2"), ("flan-t5-xl", "gelu_python"), ("gemma-7b", "gelu_tanh"),
     ("clip-vit-l-14", "quick_gelu"), ("llama-2-7b", "silu")],
)  # fmt: skip
def test_activation_is_as_the_class_writes_it(name: str, activation: str) -> None:
    assert catalog.model(name).main.block.mlp.activation == activation


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_preset_agrees_with_the_reader_of_its_config(path: Path) -> None:
    model = catalog.model(path.stem)
    if not model.hf_config:
        pytest.skip("no class of Transformers")
    kind = model_type(model)
    config = {**sizes(model), "model_type": kind, "tie_word_embeddings": model.tied}
    if model.counted_parts and not is_counted(config):
        pytest.skip("counted on its class alone")
    read = from_huggingface(config)
    assert [(group.count, group.tower) for group in read.groups] == [
        (group.count, group.tower) for group in model.groups
    ]
    assert model_count(read) == model_count(model)
    assert [window_of(group.block) for group in read.groups] == [window_of(group.block) for group in model.groups]
    if not model.counted_parts and path.stem not in OWN_CODE:
        assert [group.block for group in read.groups] == [group.block for group in model.groups]


OWN_CODE = {
    "baichuan-7b", "baichuan-13b", "baichuan2-7b", "baichuan2-13b", "chatglm3-6b", "internlm2-1.8b", "internlm2-7b",
    "internlm2-20b", "qwen-7b",
}  # fmt: skip
"""Published with code of their own, by which their blocks count; a class of Transformers has the same weights."""


def window_of(block: Block) -> int | None:
    """Tokens that attention looks back on; None for all, and where there is no attention."""
    return block.attention.window if block.attention is not None else None


def is_counted(config: dict[str, Any]) -> bool:
    """Whether a config.json is read with parts that are counted and not modelled."""
    try:
        return bool(from_huggingface(config).counted_parts)
    except InputError:
        return False


def model_type(model: Model) -> str:
    """Return the model_type that the config.json of this class has."""
    transformers = pytest.importorskip("transformers")
    return str(getattr(transformers, str(model.hf_class)).config_class.model_type)


def test_flat_form_has_the_keys_of_an_inline_model() -> None:
    model = from_flat(
        {**FLAT, "kv_heads": 2, "head_dim": 32, "gated": True, "norm": "rmsnorm", "tied": False, "positions": "rope",
         "bias": {"qkv": True, "o": False, "mlp": False, "lm_head": False}, "family": "mine",
         "moe": {"experts": 8, "topk": 2, "shared": 1, "ffn": 96, "first_dense": 1},
         "mla": {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4,
                 "v_head_dim": 12}}
    )  # fmt: skip
    dense, routed = model.groups
    assert (dense.count, dense.block.is_moe, routed.count) == (1, False, 1)
    assert isinstance(routed.block.mlp, MixtureOfExperts)
    assert routed.block.mlp.shared_ffn == 96


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hiden": 64}, "unknown .*'hiden': .*did you mean 'hidden'"),
        ({"moe": {"experts": 8, "topk": 2, "frst_dense": 1}}, "did you mean 'first_dense'"),
        ({"heads": True}, "heads True:"),
        ({"heads": "4"}, "heads '4':"),
        ({"heads": 3}, "heads 3: must divide hidden 64"),
        ({"kv_heads": 3}, "kv_heads 3: must divide heads 4"),
        ({"moe": {"experts": 8, "topk": 9}}, "topk 9: must be at most"),
        ({"moe": {"experts": 8, "topk": 2, "first_dense": 2}}, "must be below n_layers 2"),
        ({"n_layers": 0}, "n_layers 0"),
        ({"n_layers": 10**400}, "n_layers 1000"),
        ({"norm": "layer"}, "norm 'layer'"),
        ({"ffn": None}, "ffn is missing"),
    ],
)
def test_wrong_flat_form_is_one_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        from_flat({**FLAT, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", FLAT)
def test_missing_size_is_told(key: str) -> None:
    with pytest.raises(MemcalcError, match=key):
        from_flat({name: value for name, value in FLAT.items() if name != key})


def test_own_file_in_flat_form(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(f"{key} = {value}" for key, value in FLAT.items()), encoding="utf-8")
    model = catalog.model(str(path))
    assert (model.name, model.num_layers) == ("mine", 2)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),  # whose vocabulary is larger than v0.1's
        ("mistralai/Mistral-7B-Instruct-v0.2", "mistral-7b-v0.2"),  # which has no window
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("llama-3-405b", "llama-3.1-405b"),
    ],
)
def test_a_tuned_model_has_the_sizes_of_its_base(typed: str, name: str) -> None:
    assert catalog.model(typed).name == name
