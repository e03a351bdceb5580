"""Whole steps of families with operators and masks of their own: the replayed peak against the real classes'."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from differential import Job, outcome

WITHIN = 0.001
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "apertus": (4, {}), "llama4_text": (6, {}), "cwm": (6, {"sliding_window": 16}), "mistral-window": (4, {}),
}  # fmt: skip
"""By how many blocks, and with which changes to the small config."""
ODD: dict[str, dict[str, Any]] = {
    "no chunks": {"attention_chunk_size": 4096},
    "few positions": {"no_rope_layers": [1, *[0] * 5], "attn_temperature_tuning": False},
    "no norms": {"use_qk_norm": False},
    "no experts": {"moe_layers": []},
    "all experts": {"interleave_moe_layer_step": 1, "num_experts_per_tok": 1},
}
"""Llama 4 as its switches make it."""


def error(family: str, precision: str, recompute: str, attention: str, **sizes: object) -> float:
    """Return by what part of the real peak the replayed one is off."""
    layers, changes = FAMILIES[family]
    common = 2, 256, precision, recompute, "adamw", "foreach", "standard", attention, "plain", 1
    return outcome(Job(family, changes | sizes, layers, *common)).error


@pytest.mark.parametrize("family", ["apertus", "llama4_text"])
def test_a_checkpointed_step_takes_what_the_class_takes(family: str) -> None:
    assert abs(error(family, "bf16", "full", "flash")) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["flash", "eager"])
@pytest.mark.parametrize("recompute", ["none", "full", "every-2"])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp32+autocast"])
@pytest.mark.parametrize("family", FAMILIES)
def test_so_does_a_step_however_it_is_trained(family: str, precision: str, recompute: str, attention: str) -> None:
    assert abs(error(family, precision, recompute, attention)) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("switch", ODD)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_so_does_llama_4_with_its_switches_thrown(switch: str, recompute: str) -> None:
    assert abs(error("llama4_text", "bf16", recompute, "flash", **ODD[switch])) <= WITHIN
