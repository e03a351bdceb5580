"""Parameters of the decoders that mix tokens by more than attention, against the real classes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import counted

from memcalc.convert.huggingface import from_huggingface
from memcalc.terms.parameters import model_count

LAYERS = {"num_hidden_layers": 6}
STATE_SPACE: dict[str, Any] = {"use_bias": True, "use_conv_bias": False, "expand": 3, "tie_word_embeddings": False}
JAMBA = LAYERS | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
MLPS = ["dense", "sparse"] * 3
DELTA = {
    "head_dim": 64,
    "num_heads": 16,
    "short_conv_kernel_size": 3,
    "full_attn_layers": [3, 6],
    "kda_layers": [1, 2, 4, 5],
}
SIZES: list[tuple[str, dict[str, Any]]] = [
    ("MambaForCausalLM", LAYERS),
    ("MambaForCausalLM", LAYERS | STATE_SPACE | {"state_size": 24, "conv_kernel": 3, "time_step_rank": 40}),
    ("FalconMambaForCausalLM", LAYERS),
    ("FalconMambaForCausalLM", LAYERS | STATE_SPACE | {"hidden_size": 1000}),
    ("Mamba2ForCausalLM", LAYERS),
    ("Mamba2ForCausalLM", LAYERS | {"n_groups": 4, "use_bias": True, "tie_word_embeddings": True, "expand": 1,
                                    "head_dim": 32, "use_conv_bias": False}),
    ("KimiLinearForCausalLM", LAYERS | {"num_local_experts": 8}),
    ("KimiLinearForCausalLM", LAYERS | {"num_local_experts": 8, "n_shared_experts": 2, "q_lora_rank": 96,
                                        "linear_num_heads": 12, "attention_bias": True, "linear_head_dim": 96,
                                        "mlp_layer_types": MLPS}),
    ("KimiLinearForCausalLM", LAYERS | {"num_local_experts": 8, "linear_attn_config": DELTA,
                                        "first_k_dense_replace": 2}),
    ("Lfm3ForCausalLM", LAYERS),
    ("Lfm3ForCausalLM", LAYERS | {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True}),
    ("Lfm3ForCausalLM", LAYERS | {"attention_bias": True, "conv_L_cache": 4, "sliding_window": None,
                                  "layer_types": ["conv", "full_attention"] * 3, "tie_word_embeddings": False}),
    ("OlmoHybridForCausalLM", LAYERS),
    ("OlmoHybridForCausalLM", {"num_hidden_layers": 3, "attention_bias": True, "num_key_value_heads": 10}),
    ("OlmoHybridForCausalLM", LAYERS | {"linear_num_key_heads": 10, "linear_key_head_dim": 64,
                                        "linear_conv_kernel_dim": 2,
                                        "linear_value_head_dim": 128, "tie_word_embeddings": True}),
    ("JambaForCausalLM", JAMBA),
    ("JambaForCausalLM", JAMBA | {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_expand": 3}),
    ("JambaForCausalLM", JAMBA | {"mamba_dt_rank": 60, "mamba_d_state": 32, "mamba_d_conv": 3, "num_experts": 1}),
    ("JambaForCausalLM", JAMBA | {"expert_layer_period": 3, "expert_layer_offset": 0, "num_key_value_heads": 4}),
]  # fmt: skip
"""Classes with the keys that are set otherwise than in their config."""


@pytest.mark.parametrize(("name", "keys"), SIZES)
def test_parameters_equal_those_of_the_class_with_switches_thrown(name: str, keys: dict[str, Any]) -> None:
    config, real = counted(name, **keys)
    model = from_huggingface(config)
    assert not model.counted_parts
    assert model_count(model).total == real
