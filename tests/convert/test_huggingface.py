"""Reading a config.json: every family against its real class, every way in which a file can be wrong."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from memcalc import catalog
from memcalc.catalog import read_toml
from memcalc.convert.huggingface import MODEL_TYPES, from_huggingface, read_model
from memcalc.convert.vision_language import VISION_LANGUAGE
from memcalc.errors import FileError, InputError, MemcalcError, MissingError, UnknownNameError
from memcalc.specs.block import MixtureOfExperts
from memcalc.specs.model import Model
from memcalc.terms.parameters import model_count

SEVERAL = read_toml(files("memcalc.convert") / "counted_parts.toml")
NAMES = [name for name in catalog.names("model") if catalog.model(name).hf_config]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 100,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
SMALL_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
PARTS = {**SMALL, "num_key_value_heads": 2}
GEMMA4 = {**PARTS, "head_dim": 16, "hidden_size_per_layer_input": 0}
UNLIKE_THE_PRESETS = [
    ("LlamaForCausalLM", {**PARTS, "attention_bias": True, "mlp_bias": True}),
    ("Qwen3ForCausalLM", {**PARTS, "attention_bias": True, "head_dim": 32}),
    ("GemmaForCausalLM", {**PARTS, "attention_bias": True, "head_dim": 32}),
    ("Gemma2ForCausalLM", {**PARTS, "attention_bias": True, "head_dim": 32}),
    ("GPTNeoXForCausalLM", {**SMALL, "attention_bias": False, "use_parallel_residual": False}),
    ("PhiForCausalLM", {**PARTS, "qk_layernorm": True}),
    ("FalconForCausalLM", {**SMALL, "intermediate_size": None, "bias": True, "multi_query": False}),
    ("FalconForCausalLM", {**SMALL, "intermediate_size": None, "parallel_attn": False, "alibi": True}),
    ("OPTForCausalLM", {**SMALL, "intermediate_size": None, "enable_bias": False, "word_embed_proj_dim": 32}),
    ("OlmoForCausalLM", {**PARTS, "attention_bias": True}),
    ("Olmo2ForCausalLM", {**PARTS, "attention_bias": True}),
    ("Starcoder2ForCausalLM", {**PARTS, "use_bias": False}),
    ("NemotronForCausalLM", {**PARTS, "attention_bias": True, "mlp_bias": True}),
    ("StableLmForCausalLM", {**PARTS, "use_qkv_bias": True}),
    ("StableLmForCausalLM", {**PARTS, "use_parallel_residual": True}),
    ("GraniteForCausalLM", {**PARTS, "attention_bias": True, "mlp_bias": True}),
    ("CohereForCausalLM", {**PARTS, "use_qk_norm": True, "attention_bias": True}),
    ("Glm4ForCausalLM", {**PARTS, "attention_bias": False, "head_dim": 16, "pad_token_id": None}),
    ("SeedOssForCausalLM", {**PARTS, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("SmolLM3ForCausalLM", {**PARTS, "attention_bias": True, "mlp_bias": True, "pad_token_id": None}),
    ("PhimoeForCausalLM", {**PARTS, "num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}),
    ("OlmoeForCausalLM", {**PARTS, "num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    ("MixtralForCausalLM", {**PARTS, "num_local_experts": 4, "head_dim": 32}),
    ("Qwen2MoeForCausalLM", {**PARTS, "num_experts": 4, "qkv_bias": False}),
    ("Qwen3MoeForCausalLM", {**PARTS, "num_experts": 8, "attention_bias": True, "head_dim": 32}),
    ("GptOssForCausalLM", {**PARTS, "num_local_experts": 4, "attention_bias": False}),
    ("Glm4MoeForCausalLM", {**PARTS, "n_routed_experts": 8, "use_qk_norm": True, "n_shared_experts": 2}),
    ("DeepseekV3ForCausalLM", {**SMALL, "n_routed_experts": 8, "attention_bias": True, "q_lora_rank": 16}),
    ("DeepseekV2ForCausalLM", {**SMALL, "num_experts_per_tok": 2, "attention_bias": True, "q_lora_rank": None}),
    ("Gemma4ForCausalLM", {**GEMMA4, "tie_word_embeddings": False, "attention_bias": True}),
    ("Gemma4ForCausalLM", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("Gemma4ForCausalLM", {**GEMMA4, "global_head_dim": 32, "layer_types": ["full_attention"] * 4}),
    ("Gemma4ForCausalLM", {**GEMMA4, "per_layer_config": {3: {"head_dim": 24}}}),
    (
        "Gemma4ForCausalLM",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    ("GPT2LMHeadModel", {**SMALL_GPT, "n_inner": 100, "tie_word_embeddings": False}),
    ("GPTBigCodeForCausalLM", {**SMALL_GPT, "multi_query": False}),
    ("GPTJForCausalLM", {**SMALL_GPT, "n_inner": 100, "rotary_dim": 8}),
    ("BertForMaskedLM", SMALL),
    ("ViTForImageClassification", {**SMALL, "vocab_size": None, "qkv_bias": False, "num_labels": 7, "image_size": 32}),
    ("T5ForConditionalGeneration", {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3}),
    ("MT5ForConditionalGeneration", {"d_model": 32, "num_layers": 2, "num_decoder_layers": 3}),
    ("WhisperForConditionalGeneration", {"d_model": 48, "encoder_layers": 3, "num_mel_bins": 16}),
]


def real(name: str, keys: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the config.json that the real class would write, and its unique parameters."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    built_for = getattr(transformers, name)
    config = built_for.config_class(**keys)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in built_for(config).parameters())
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [name]}, count


def preset_config(model: Model) -> dict[str, Any]:
    """Return the keys of the preset's class."""
    return {key: nulls(value) for key, value in model.hf_config.items()}


def nulls(value: Any) -> Any:
    """TOML has no null: a preset writes the word."""
    if isinstance(value, dict):
        return {key: nulls(item) for key, item in value.items()}
    return None if value == "null" else value


@pytest.mark.parametrize("name", NAMES)
def test_whole_config_of_the_real_class_gives_the_count_of_the_preset(name: str) -> None:
    model, transformers = catalog.model(name), pytest.importorskip("transformers")
    config = getattr(transformers, str(model.hf_class)).config_class(**preset_config(model))
    whole = json.loads(config.to_json_string(use_diff=False))
    try:
        read = from_huggingface({**whole, "architectures": [model.hf_class], "tie_word_embeddings": model.tied})
    except InputError:
        if not model.counted_parts:
            raise
        pytest.skip("counted on its class alone")
    assert model_count(read) == model_count(model)


@pytest.mark.parametrize(("name", "keys"), UNLIKE_THE_PRESETS)
def test_switches_that_no_preset_throws(name: str, keys: dict[str, Any]) -> None:
    keys = {key: value for key, value in keys.items() if value is not None or key in {"pad_token_id", "q_lora_rank"}}
    config, count = real(name, keys)
    assert model_count(from_huggingface(config)).total == count


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_model_type_has_defaults(kind: str) -> None:
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2}
    without_default: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 2}, "dots1": experts}
    without_default["gemma4_text"] = {"hidden_size_per_layer_input": 0}
    without_default["llama4"] = {"vision_config": {"hidden_size": 1408, "vision_output_dim": 4096}}
    kinds = dict.fromkeys(("dory", "kimi_linear", "lara_mini", "minimax", "olmo_hybrid"), "layer_types")
    for each, key in {**kinds, "zamba": "layers_block_type", "zamba2": "layers_block_type"}.items():
        without_default[each] = {"num_hidden_layers": 1, key: ["linear_attention"]}
    nested = kind in VISION_LANGUAGE or kind in SEVERAL
    tables = [part["table"] for part in SEVERAL[kind]["parts"].values()] if kind in SEVERAL else ["vision_config"]
    parts: dict[str, Any] = {key: {} for key in ("text_config", *tables)} if nested else {}
    assert model_count(from_huggingface({"model_type": kind, **parts, **without_default.get(kind, {})})).total > 0


GROUPED = {
    "deepseek_v3": "DeepseekV3", "glm4_moe": "Glm4Moe", "glm4_moe_lite": "Glm4MoeLite", "dots1": "Dots1",
    "exaone_moe": "ExaoneMoe", "solar_open": "SolarOpen",
}  # fmt: skip


def limits(config: dict[str, Any]) -> tuple[int, int]:
    """Return the groups that experts form, and those that one token's are of."""
    mlp = from_huggingface(config).groups[-1].block.mlp
    assert isinstance(mlp, MixtureOfExperts)
    return mlp.n_group, mlp.topk_group


@pytest.mark.parametrize("kind", GROUPED)
def test_groups_of_experts_are_those_of_the_class(kind: str) -> None:
    made = getattr(pytest.importorskip("transformers"), f"{GROUPED[kind]}Config")()
    sizes = {"model_type": kind, "n_routed_experts": 16, "num_experts": 16, "num_experts_per_tok": 4}
    if kind == "exaone_moe":
        del sizes["n_routed_experts"]
    else:
        del sizes["num_experts"]
    assert limits(sizes) == (made.n_group, made.topk_group)
    assert limits({**sizes, "n_group": 4, "topk_group": 2}) == (4, 2)
    assert limits({**sizes, "n_group": None, "topk_group": None}) == (1, 1)
    with pytest.raises(InputError, match=r"moe\.n_group 3: must divide moe\.experts 16"):
        limits({**sizes, "n_group": 3, "topk_group": 1})
    with pytest.raises(InputError, match=r"moe\.n_group 4: .* be at least moe\.topk_group 5"):
        limits({**sizes, "n_group": 4, "topk_group": 5})


def test_deepseek_v2_is_limited_by_its_method_alone() -> None:
    """Its class looks at groups under `group_limited_greedy` (DeepseekV2TopkRouter)."""
    sizes = {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}
    assert limits(sizes) == (1, 1)
    assert limits({**sizes, "topk_method": "group_limited_greedy"}) == (8, 3)


def test_text_model_within_a_config() -> None:
    nested = from_huggingface({"model_type": "some_wrapper", "text_config": LLAMA})
    assert model_count(nested) == model_count(from_huggingface(LLAMA))
    config = {"model_type": "aya_vision", "text_config": LLAMA, "vision_config": {}}
    with pytest.raises(InputError, match="only its text model is understood, not its vision_config"):
        from_huggingface(config)
    with pytest.raises(InputError, match="neither its vision_config nor its text model 'blt' is understood"):
        from_huggingface({**config, "text_config": {"model_type": "blt"}})


def test_class_without_head() -> None:
    bare = model_count(from_huggingface({**LLAMA, "architectures": ["LlamaModel"]}))
    assert model_count(from_huggingface(LLAMA)).total - bare.total == 6400


def test_fp8_checkpoints_are_read_and_others_refused() -> None:
    assert from_huggingface({**LLAMA, "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(InputError, match="--quantize"):
        from_huggingface({**LLAMA, "quantization_config": {"quant_method": "gptq"}})


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"model_type": "lama"}, UnknownNameError, "did you mean 'llama'"),
        ({"model_type": "qwen4"}, UnknownNameError, r"^.{1,200}; did you mean 'qwen3'\?$"),
        ({"model_type": ["llama"]}, UnknownNameError, "model_type"),
        ({"model_type": None}, MissingError, "no model_type"),
        ({"hidden_sise": 64}, UnknownNameError, "unknown .*'hidden_sise': .*did you mean 'hidden_size'"),
        ({"hidden_size": -64}, InputError, "hidden_size -64"),
        ({"hidden_size": 0}, InputError, "hidden_size 0"),
        ({"hidden_size": True}, InputError, "hidden_size True"),
        ({"hidden_size": "64"}, InputError, "hidden_size '64'"),
        ({"hidden_size": 64.0}, InputError, "hidden_size 64.0"),
        ({"hidden_size": None}, InputError, "hidden_size is missing"),
        ({"hidden_size": 10**5000}, InputError, "hidden_size <int>"),
        ({"num_attention_heads": 5}, InputError, "heads 5.*must divide hidden 64"),
        ({"num_key_value_heads": 3}, InputError, "kv_heads 3.*must divide heads 4"),
        ({"attention_dropout": float("nan")}, InputError, "attention_dropout nan"),
        ({"attention_bias": "yes"}, InputError, "attention_bias 'yes'"),
        ({"hidden_act": "gelo"}, UnknownNameError, "did you mean 'gelu'"),
        ({"rope_parameters": 3}, InputError, "rope_parameters 3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, InputError, "architectures"),
        ({"architectures": "LlamaForCausalLM"}, InputError, "must be a list"),
        ({"model_type": "qwen2", "layer_types": [3]}, InputError, "layer_types"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, InputError, "decoder_sparse_step 0"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1.5]}, InputError, "mlp_only_layers"),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention", "linear_attention"]},
            InputError,
            "linear_attention",
        ),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 2}, InputError, "layer_types"),
    ],
)
def test_wrong_key_is_one_sentence(change: dict[str, Any], error: type[MemcalcError], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        from_huggingface({**LLAMA, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mapping", [None, [], "llama", {1: 2}])
def test_only_a_table_is_read(mapping: Any) -> None:
    with pytest.raises(InputError):
        from_huggingface(mapping)


def test_file_and_directory(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    assert read_model(file) == read_model(folder)
    assert read_model(folder).name == "tiny-llama"
    assert "config.json" in read_model(folder).source


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x80\x02}q\x00", "UTF-8"),
        (json.dumps(LLAMA).encode()[:-5], "must be JSON"),
        (b"", "must be JSON"),
        (b"[1, 2]", "must hold a JSON object, not list"),
        (b'{"a":' * 100_000, "nested"),
        (b'{"hidden_size": NaN}', "NaN is not a number"),
        (b'{"hidden_size": -Infinity}', "-Infinity is not a number"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "usual size"),
        (b" " * (5 * 1024 * 1024 + 1), "at most 5 MiB"),
        (b"\xef\xbb\xbf{}", "must be JSON"),
    ],
)
def test_wrong_file_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=said) as caught:
        read_model(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    for path in (tmp_path, tmp_path / "absent.json", tmp_path / "fifo.json", Path("/dev/zero"), "a\0b"):
        with pytest.raises(FileError):
            read_model(path)
