"""Whole steps with adapters of PEFT on layers that are not a Llama's: the replayed peak against the real classes'."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from autograd import mixer_kernels, models
from covering import covering
from differential import Job, outcome

WITHIN = 0.003
LATENT = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 384, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 32,
    "vocab_size": 1088,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "small": {}, "wide": LATENT, "whole queries": LATENT | {"q_lora_rank": None},
}  # fmt: skip


def error(
    family: str, adapters: str, recompute: str, dropout: float, rank: int = 8, precision: str = "bf16", **sizes: Any
) -> float:
    """Return by what part of the real peak the replayed one is off."""
    kernel = "eager" if family == "gpt-oss" else "flash"
    common = 4, 2, 128, precision, recompute, "adamw", "fused", "standard", kernel, "hf"
    kernels: AbstractContextManager[Any] = mixer_kernels.installed(family) if family == KIMI else nullcontext()
    with kernels:
        return outcome(Job(family, sizes, *common, adapters=adapters, rank=rank, dropout=dropout)).error


KIMI = "kimi_linear"
LATENTS = ("deepseek-v2", "deepseek-v3", "glm4_moe_lite", "minicpm3", "youtu")


@pytest.mark.parametrize(("dropout", "recompute"), [(0.0, "none"), (0.05, "full")])
def test_adapters_on_the_low_ranks_of_latent_attention(recompute: str, dropout: float) -> None:
    assert abs(error("deepseek-v3", "latent", recompute, dropout)) < WITHIN


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_autocast_caches_no_copies_of_a_frozen_base(recompute: str) -> None:
    """Its cache is for leaves that need a gradient: with recomputation an fp32 base's copies go with each product."""
    assert abs(error("llama-3", "all", recompute, 0.0, precision="fp32+autocast")) < WITHIN


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_on_a_shared_expert_and_its_gate(recompute: str) -> None:
    """All that is linear in Qwen2-MoE's class: a shared expert's gate projection is not the gate of its output."""
    assert abs(error("qwen2_moe", "all, shared gate", recompute, 0.05)) < WITHIN


LARGE = {
    "hidden_size": 384, "vocab_size": 1088, "num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16,
    "moe_intermediate_size": 512, "intermediate_size": 512,
}  # fmt: skip
"""Sizes with which the experts' weights are most of a step."""
FOLDED = [
    ("mixtral", "PEFT's own"), ("deepseek-v3", "PEFT's own"), ("mixtral", "inner stack"), ("qwen2_moe", "stacked"),
    ("qwen3-moe", "stacked and attention"), ("gpt-oss", "stacked"),
]  # fmt: skip
FURTHER = [(family, "PEFT's own") for family in ("qwen3-moe", "deepseek-v2", "glm4_moe", "exaone_moe", "dots1")]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("family", "adapters"), FOLDED)
def test_adapters_that_are_folded_into_stacked_experts(family: str, adapters: str, recompute: str) -> None:
    assert abs(error(family, adapters, recompute, 0.0, rank=16, **LARGE)) < WITHIN


@pytest.mark.slow
@pytest.mark.parametrize(("case", "size", "recompute"), covering(2, FURTHER, ["small", "large"], ["none", "full"]))
def test_so_do_other_classes_with_stacked_experts(case: tuple[str, str], size: str, recompute: str) -> None:
    (family, adapters), sizes = case, LARGE if size == "large" else {}
    assert abs(error(family, adapters, recompute, 0.0, rank=16, **sizes)) < WITHIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "recompute", "dropout"), covering(3, [*LATENTS, KIMI], SIZES, ["none", "full"], [0.0, 0.05])
)
def test_so_do_other_classes_of_it(family: str, sizes: str, recompute: str, dropout: float) -> None:
    given = SIZES[sizes]
    whole = (models.FAMILIES[family].config | given)["q_lora_rank"] is None
    if family == KIMI and not whole:
        pytest.skip("its queries have no low rank")
    adapters = "latent, whole queries" if whole else "latent"
    assert abs(error(family, adapters, recompute, dropout, **given)) < WITHIN
