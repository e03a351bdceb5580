"""Families whose parameters alone are known: counted against the real classes, refused wherever bytes are asked for."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc.catalog import read_toml
from memcalc.cli.app import app
from memcalc.convert.counted import value_of
from memcalc.convert.huggingface import from_huggingface
from memcalc.errors import InputError
from memcalc.terms.parameters import model_count

ROWS = read_toml(files("memcalc.convert") / "counted.toml")
PARTS = read_toml(files("memcalc.convert") / "counted_parts.toml")
STACKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
          "num_decoder_layers", "num_layers_per_stack")  # fmt: skip
"""What families call the number of their blocks."""
OTHERWISE: dict[str, dict[str, Any]] = {
    "dory": {"num_hidden_layers": 12, "n_input_layers": 4, "n_recurrent_layers": 4, "n_output_layers": 4},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 3, "intermediate_size": [512] * 10,
                     "activation_sparsity_pattern": [0.0] * 10},
    "mllama_text_model": {"num_hidden_layers": 5, "cross_attention_layers": [3]},
    "nemotron_h": {"moe_latent_size": 64, "layers_block_type": ["mamba", "moe", "attention", "mlp"]},
    "switch_transformers": {"num_layers": 12, "num_decoder_layers": 12, "num_experts": 4},
    "nllb-moe": {"encoder_layers": 4, "decoder_layers": 5, "num_experts": 4},
    "zamba": {"num_hidden_layers": 76},
    "zamba2": {"num_hidden_layers": 54},
}  # fmt: skip
"""Small configs that are not made by lowering the number of blocks alone."""
CLASSES = {"mllama_text_model": "MllamaForCausalLM"}
"""Of text models that are listed with their tower alone."""
FLAGS: dict[str, dict[str, Any]] = {
    "nemotron_h": {"moe_latent_size": 48, "mlp_bias": True, "n_groups": 4},
    "deberta-v2": {"relative_attention": True, "share_att_key": True, "position_buckets": 256,
                   "norm_rel_ebd": "layer_norm", "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "tie_word_embeddings": False},
}  # fmt: skip
"""Keys that a config may set otherwise than its class does."""


def lowered(kind: str) -> dict[str, Any]:
    """A config of few blocks."""
    keys = {name for listed in (*ROWS[kind]["keys"], *ROWS[kind].get("absent", {})) for name in listed.split()}
    return OTHERWISE.get(kind, {name: 4 if "hidden" in name else 3 for name in STACKS if name in keys})


def compared(name: str, **keys: Any) -> tuple[int, int]:
    """The parameters as they are read, and those of the class on the meta device."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from families import counted

    config, real = counted(name, **keys)
    model = from_huggingface(config)
    assert model.counted_parts or not keys, "small configs are counted; some defaults are traced whole"
    return model_count(model).total, real


def class_of(kind: str) -> str:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from families import families

    return CLASSES.get(kind) or families().get(kind, "")


@pytest.mark.parametrize("kind", ROWS)
def test_parameters_equal_those_of_a_class_of_few_blocks(kind: str) -> None:
    name = class_of(kind)
    if not name:
        pytest.skip("a text model of a family with images, with which it is compared")
    ours, real = compared(name, **lowered(kind))
    assert ours == real


@pytest.mark.parametrize("kind", FLAGS)
def test_so_they_do_with_switches_thrown(kind: str) -> None:
    ours, real = compared(class_of(kind), **lowered(kind) | FLAGS[kind])
    assert ours == real


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*ROWS, *PARTS])
def test_parameters_equal_those_of_the_default_class(kind: str) -> None:
    name = class_of(kind)
    if name:
        ours, real = compared(name)
        assert ours == real


@pytest.mark.parametrize(
    ("name", "keys"),
    [("BartForConditionalGeneration", {"encoder_layers": 2, "decoder_layers": 3}),
     ("PegasusForConditionalGeneration", {"encoder_layers": 2, "decoder_layers": 3}),
     ("ElectraForMaskedLM", {"num_hidden_layers": 2, "embedding_size": 256}),
     ("MarianMTModel", {"encoder_layers": 2, "decoder_layers": 3}),
     ("RemBertForMaskedLM", {"num_hidden_layers": 2}),
     ("GlmMoeDsaForCausalLM", {"num_hidden_layers": 9, "index_topk_freq": 4, "index_skip_topk_offset": 3})],
)  # fmt: skip
def test_another_class_of_the_family_has_its_own_count(name: str, keys: dict[str, Any]) -> None:
    ours, real = compared(name, **keys)
    assert ours == real


RELEASED: list[tuple[int, dict[str, Any]]] = [
    (1_170_340_608, {  # LFM2-1.2B
        "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_use_swiglu": True, "conv_L_cache": 3,
        "conv_dim": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "num_attention_heads": 32,
        "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "vocab_size": 65536,
    }),
    (521_411_104, {  # Falcon-H1-0.5B
        "model_type": "falcon_h1", "head_dim": 64, "hidden_size": 1024, "intermediate_size": 2048, "mamba_d_head": 64,
        "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_n_heads": 24, "mamba_use_mlp": True,
        "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2, "vocab_size": 32784,
    }),
    (6_939_037_248, {  # Granite-4.0-H-Tiny
        "model_type": "granitemoehybrid", "hidden_size": 1536, "intermediate_size": 512, "mamba_d_state": 128,
        "layer_types": [*["mamba"] * 5, "attention", *[*["mamba"] * 9, "attention"] * 3, *["mamba"] * 4],
        "mamba_n_heads": 48, "normalization_function": "rmsnorm", "num_attention_heads": 12, "num_experts_per_tok": 6,
        "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 64, "shared_intermediate_size": 1024,
        "tie_word_embeddings": True, "vocab_size": 100352,
    }),
    (51_570_323_328, {"model_type": "jamba", "hidden_size": 4096, "mamba_dt_rank": 256}),  # Jamba v0.1
]  # fmt: skip
"""Parameters of checkpoints that were released, and their configs with the keys that their authors wrote."""


@pytest.mark.parametrize(("parameters", "config"), RELEASED)
def test_a_released_hybrid_has_the_parameters_of_its_checkpoint(parameters: int, config: dict[str, Any]) -> None:
    assert model_count(from_huggingface(config)).total == parameters


@pytest.mark.parametrize(
    ("config", "keys"),
    [({"model_type": "minimax_m2", "num_hidden_layers": 2},
      {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1}),
     ({"model_type": "qwen3_moe", "num_hidden_layers": 2},
      {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0, "add_cross_attention": False}),
     ({"model_type": "deepseek_v32", "num_hidden_layers": 4}, {"moe_layer_freq": 1}),
     ({"model_type": "glm_moe_dsa", "num_hidden_layers": 4}, {"moe_layer_freq": 1, "indexer_rope_interleave": True}),
     ({"model_type": "nemotron_h", "num_hidden_layers": 2, "hybrid_override_pattern": "M-"}, {"time_step_rank": 512}),
     ({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 4},
       "vision_config": {"hidden_size": 48, "num_hidden_layers": 2}},
      {"vision_config": {"vt_hidden_size": 48, "vt_num_hidden_layers": 2, "init_pos_emb_time": 4}})],
)  # fmt: skip
def test_what_a_released_config_says_beside_moves_no_size(config: dict[str, Any], keys: dict[str, Any]) -> None:
    """Authors write what their own code reads: further heads that Transformers does not build, other names of sizes."""
    assert model_count(from_huggingface({**config, **keys})) == model_count(from_huggingface(config))


def test_a_pattern_of_letters_tells_the_layers_of_nemotron_h() -> None:
    """Nemotron-H-8B: 24 mixers, 24 MLPs and 4 attentions in 52 blocks."""
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": pattern, "num_hidden_layers": 52}
    assert sorted(group.count for group in from_huggingface(config).groups) == [4, 24, 24]
    with pytest.raises(InputError, match="num_hidden_layers"):
        from_huggingface({**config, "num_hidden_layers": 50})


# ---------------------------------------------------------------------------------------------- what is said of them

RWKV = {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 100}


def test_published_sizes_of_state_space_models() -> None:
    """mamba-130m and Mamba-Codestral-7B as their authors count them (129,135,360 and 7,285,403,648 parameters)."""
    small = {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280, "state_size": 16,
             "time_step_rank": 48, "expand": 2, "conv_kernel": 4, "tie_word_embeddings": True}  # fmt: skip
    assert model_count(from_huggingface(small)).total == 129_135_360
    assert model_count(from_huggingface({"model_type": "mamba2"})).total == 7_285_403_648


def test_a_hybrid_repeats_its_blocks_by_pattern() -> None:
    model = from_huggingface({"model_type": "jamba"})
    # in 8 blocks, attention stands at 4 and experts at every odd one
    assert [group.count for group in model.groups] == [12, 16, 4]
    assert model.order[0].count == 4


def test_a_token_passes_the_chosen_experts_alone() -> None:
    """Qwen3-Next 80B-A3B: 512 experts of which 10, and a shared one, serve a token."""
    count = model_count(from_huggingface({"model_type": "qwen3_next"}))
    assert count.total - count.active == 48 * (512 - 10) * 3 * 2048 * 512


@pytest.mark.parametrize("ask", [memcalc.estimate, memcalc.plan, memcalc.serve])
def test_bytes_are_refused_by_the_part_that_is_not_modelled(ask: Any) -> None:
    model = from_huggingface(RWKV)
    with pytest.raises(InputError, match="nothing models its time mixing"):
        ask(model=model, gpu="h100")


def test_the_refusal_has_a_way_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RWKV))
    result = CliRunner().invoke(app, ["estimate", "--model", str(tmp_path / "config.json"), "--gpu", "h100"])
    assert result.exit_code == 2
    assert f"{model_count(from_huggingface(RWKV)).total:,} parameters" in result.stderr
    assert "--module" in result.stderr


# ---------------------------------------------------------------------------------------------- what a row cannot tell


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"model_type": "mamba", "expand": float("nan")}, "expand"),
        ({"model_type": "mamba", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "rwkv", "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"model_type": "rwkv", "unheard_of": 3}, "unheard_of"),
        ({"model_type": "mamba2", "head_dim": 48}, "num_heads"),
        ({"model_type": "mamba", "hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": "jamba", "attn_layer_offset": 9}, "attn_layer_offset"),
        ({"model_type": "mamba", "unheard_of": 3}, "unheard_of"),
        ({"model_type": "mamba", "architectures": ["MambaForSequenceClassification"]}, "architectures"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba"]}, "each of the 32 layers"),
        ({"model_type": "doge", "is_moe": True}, "is_moe"),
        ({"model_type": "idefics2", "text_config": {"model_type": "zebra"}}, "text_config.model_type"),
        ({"model_type": "idefics2"}, "text_config"),
        ({"model_type": "aria", "text_config": {}, "vision_config": {"depth_of_thought": 3}}, "vision_config.depth"),
    ],
)
def test_it_is_refused_by_its_key(config: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        from_huggingface(config)


def test_arithmetic_of_a_row_calls_nothing_else() -> None:
    with pytest.raises((KeyError, TypeError)):
        value_of("open('x')", {})
    with pytest.raises(TypeError):
        value_of("[n for n in (1, 2)]", {})
