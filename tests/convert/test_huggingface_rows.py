"""Families that a row of data describes: parameters against the real class, by default and with switches thrown."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from autograd.row_families import ROWS

from memcalc.convert.huggingface import from_huggingface
from memcalc.convert.huggingface_table import ENCODERS, TABLE
from memcalc.errors import InputError
from memcalc.terms.parameters import model_count

NEEDED: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
}
"""What a class cannot be built without."""
BIASED = {"attention_bias": True, "mlp_bias": True}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99}
SWITCHED: dict[str, dict[str, Any]] = {
    **{key: {**BIASED, "tie_word_embeddings": True} for key in ("arcee", "iquestcoder", "jais2", "internlm3")},
    **{key: {"attention_bias": True} for key in ("olmo3", "cohere2", "flex_olmo", "mellum", "solar_open")},
    "hyperclovax": {"use_post_norm": False, **BIASED},
    "persimmon": {"qk_layernorm": False},
    "ernie4_5": {"use_bias": True, "tie_word_embeddings": False},
    "ernie4_5_moe": {"moe_layer_start_index": 2, "moe_num_shared_experts": 1},
    "granitemoeshared": {"shared_intermediate_size": 80, "attention_bias": True},
    "hy_v3": {"mlp_layer_types": ["dense", "sparse", "dense"], "num_shared_experts": 2},
    "glm4_moe_lite": {"q_lora_rank": None, "n_shared_experts": 2},
    "jais2": {"attention_bias": False, "mlp_bias": False},
}
"""Keys that a config may set otherwise than its class does."""


def counted(kind: str, keys: dict[str, Any], ending: str = "") -> tuple[int, int]:
    """Return the parameters by the reader, and those of the real class, for the config that the class writes."""
    config = transformers.AutoConfig.for_model(kind, **keys)
    auto = transformers.AutoModelForMaskedLM if ending == "ForMaskedLM" else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        built = auto.from_config(config)
    written = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [type(built).__name__]}
    # A module keeps its own parameter of a tied pair until it is told to tie on the meta device
    built.tie_weights()
    return model_count(from_huggingface(written)).total, sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", TABLE)
def test_a_decoder_by_default(kind: str) -> None:
    ours, real = counted(kind, NEEDED.get(kind, {}))
    assert ours == real


@pytest.mark.parametrize("kind", ROWS)
def test_a_small_decoder_with_its_switches_thrown(kind: str) -> None:
    ours, real = counted(kind, ROWS[kind] | SWITCHED.get(kind, {}))
    assert ours == real


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_every_row_has_a_small_config(kind: str) -> None:
    assert kind in ROWS


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize(
    "keys", [{}, {"vocab_size": 501, "max_position_embeddings": 130}, {"tie_word_embeddings": False}]
)
def test_an_encoder(kind: str, keys: dict[str, Any]) -> None:
    ours, real = counted(kind, keys, "ForMaskedLM")
    assert ours == real


def test_positions_of_roberta_begin_behind_the_row_of_its_padding() -> None:
    """Its class takes as many tokens as it has rows, less two (create_position_ids_from_input_ids)."""
    config = {"model_type": "roberta", **SMALL, "max_position_embeddings": 18}
    longest = from_huggingface(config).max_positions
    real = transformers.AutoModel.from_config(transformers.RobertaConfig(**SMALL, max_position_embeddings=18))
    assert real(torch.full((1, longest), 5)).last_hidden_state.shape[1] == longest == 16
    with pytest.raises(RuntimeError, match="index 18 is out of bounds"):
        real(torch.full((1, longest + 1), 5))


@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if kind != "distilbert"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_encoder_with_the_head_of_a_causal_model(kind: str, tied: bool) -> None:
    ours, real = counted(kind, {**SMALL, "tie_word_embeddings": tied})
    assert ours == real


@pytest.mark.parametrize(
    ("kind", "keys", "match"),
    [
        ("hy_v3", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("gpt_neo", {"attention_layers": ["global", "sideways"]}, "attention_layers"),
        ("ernie", {"use_task_id": True}, "use_task_id"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("openai-gpt", {"afn": "silu"}, "afn"),
    ],
)
def test_what_no_row_tells_is_refused_by_its_key(kind: str, keys: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        from_huggingface({"model_type": kind, **keys})


@pytest.mark.parametrize(
    ("kind", "tower"), [("granite_speech", "encoder_config"), ("vibevoice_asr", "acoustic_tokenizer_encoder_config")]
)
def test_a_model_of_several_parts_is_not_taken_for_its_text_model(kind: str, tower: str) -> None:
    config = {"model_type": kind, "text_config": {"model_type": "llama"}, tower: {"hidden_size": 8}}
    with pytest.raises(InputError, match="only its text model"):
        from_huggingface(config)
