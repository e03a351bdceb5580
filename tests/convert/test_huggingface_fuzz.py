"""Whatever a config.json holds: a model, or one of our errors in one sentence; nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from drawing import drawn
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from memcalc.convert.huggingface import MODEL_TYPES, from_huggingface, read_model
from memcalc.errors import MemcalcError
from memcalc.terms.parameters import model_count

NUMBERS = st.one_of(st.integers(), st.integers(-2, 300), st.sampled_from([2**31, 10**400, -(10**4000)]), st.floats())
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    [
        "vocab_size", "hidden_size", "n_embd", "d_model", "num_hidden_layers", "n_layer", "n_layers", "num_layers",
        "num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "head_dim", "intermediate_size", "ffn_dim",
        "max_position_embeddings", "tie_word_embeddings", "hidden_act", "attention_bias", "sliding_window",
        "layer_types", "rope_parameters", "partial_rotary_factor", "attention_dropout", "num_experts",
        "num_experts_per_tok", "n_routed_experts", "first_k_dense_replace", "n_shared_experts", "q_lora_rank",
        "kv_lora_rank", "text_config", "vision_config", "quantization_config", "architectures", "attn_config",
        "id2label", "patch_size", "image_size", "feed_forward_proj", "_name_or_path", "model_type",
        "use_sliding_window", "max_window_layers", "sliding_window_pattern", "word_embed_proj_dim",
        "rotary_dim", "num_kv_heads",
        "projection_dim", "max_source_positions", "encoder_layers", "decoder_attention_heads",
    ]
)  # fmt: skip
QUICK = drawn(300, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def suppress_ours() -> Iterator[None]:
    """Let pass only errors of ours that say one printable sentence."""
    said = "ok"
    try:
        yield
    except MemcalcError as error:
        said = str(error)
    assert said.isprintable(), said
    assert said


def read(config: Any) -> None:
    """Read a config to a model that can be counted, or be told in one sentence why not."""
    with suppress_ours():
        assert model_count(from_huggingface(config)).total > 0


@QUICK
@given(kind=st.sampled_from(MODEL_TYPES), changes=st.dictionaries(KEYS, JSON, max_size=4))
def test_changed_config(kind: str, changes: dict[str, Any]) -> None:
    read({"model_type": kind, "num_experts_per_tok": 2, **changes})


@QUICK
@given(
    kind=st.sampled_from(MODEL_TYPES),
    changes=st.dictionaries(KEYS, st.integers(1, 300) | st.booleans() | st.none(), max_size=5),
)
def test_changed_sizes(kind: str, changes: dict[str, Any]) -> None:
    read({"model_type": kind, "num_experts_per_tok": 2, **changes})


@QUICK
@given(JSON)
def test_any_json(config: Any) -> None:
    read(config)


@QUICK
@given(kind=st.sampled_from(MODEL_TYPES), key=st.text(min_size=1), value=JSON)
def test_any_further_key(kind: str, key: str, value: Any) -> None:
    read({"model_type": kind, "num_experts_per_tok": 2, key: value})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a file that the examples overwrite in turn."""
    return tmp_path_factory.mktemp("fuzz") / "config.json"


@QUICK
@given(content=st.binary(max_size=200), at=st.integers(0, 120))
def test_damaged_file(file: Path, content: bytes, at: int) -> None:
    whole = json.dumps({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "architectures": None}).encode()
    file.write_bytes(whole[:at] + content + whole[at + len(content) :])
    with suppress_ours():
        assert model_count(read_model(file)).total > 0
