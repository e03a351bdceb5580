"""Which of Megatron-LM's modules are computed again: what a model has, and what 8-bit products allow."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.api import load_model
from memcalc.errors import CombinationError, InputError
from memcalc.formulas.recompute import parse_policy
from memcalc.planner.direct import policies

MEGATRON: dict[str, Any] = {"gpu": "h100", "gpus": 64, "framework": "megatron", "seq_len": 4096}


@pytest.mark.parametrize(
    ("model", "listed"),
    [
        ("deepseek-v3", ["modules:layernorm,mla_up_proj", "modules:layernorm,mla_up_proj,moe_act"]),
        ("mixtral-8x7b", []),
        ("llama-2-7b", []),
    ],
)
def test_what_costs_next_to_nothing_is_tried_where_attention_is_latent(model: str, listed: list[str]) -> None:
    assert [name for name in policies(load_model(model)) if name.startswith("modules:")] == listed


@pytest.mark.parametrize(
    ("model", "modules", "match"),
    [
        ("llama-2-7b", "moe_act", "no routed experts"),
        ("llama-2-7b", "moe", "no routed experts"),
        ("mixtral-8x7b", "layernorm,mla_up_proj", "no latent attention"),
    ],
)
def test_modules_that_a_model_has_not_are_refused(model: str, modules: str, match: str) -> None:
    with pytest.raises(CombinationError, match=match):
        memcalc.estimate(model=model, **MEGATRON, recompute=f"modules:{modules}")


@pytest.mark.parametrize("modules", ["layernorm", "moe_act", "layernorm,moe_act"])
def test_delayed_scaling_computes_no_outputs_again(modules: str) -> None:
    """Megatron-LM d98e8a64 core/transformer/transformer_config.py raises a ValueError there."""
    job = {**MEGATRON, "model": "mixtral-8x7b", "ep": 8, "precision": "fp8-mixed"}
    with pytest.raises(CombinationError, match="delayed scaling"):
        memcalc.estimate(**job, recompute=f"modules:{modules}", settings={"strategy.float8": "delayed"})
    memcalc.estimate(**job, recompute=f"modules:{modules}", settings={"strategy.float8": "tensorwise"})
    memcalc.estimate(**job, recompute="modules:core_attn", settings={"strategy.float8": "delayed"})


@pytest.mark.slow
def test_a_search_under_delayed_scaling_leaves_them_out() -> None:
    job = {**MEGATRON, "gpu": "h200", "model": "deepseek-v2-lite", "precision": "fp8-mixed", "top": 50}
    tried = [
        {
            plan.strategy.recompute
            for plan in memcalc.plan(**job, settings={"strategy.float8": recipe}, rank_all=True, advice=False).plans
        }
        for recipe in ("delayed", "tensorwise")
    ]
    assert [any("layernorm" in name for name in names) for names in tried] == [False, True]


def test_the_word_that_a_screen_has_for_listed_modules_asks_for_them() -> None:
    with pytest.raises(InputError, match="as in modules:core_attn,mlp"):
        parse_policy("modules")
