"""Megatron-LM's precision-aware optimizer by hand: bytes of each state, copies of the step, traffic, what is refused.

By hand from NVIDIA/Megatron-LM d98e8a64 (core/optimizer/distrib_optimizer.py, optimizer_config.py) and
NVIDIA/TransformerEngine v2.13 and d0067d0d (pytorch/optimizers/fused_adam.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import memcalc
from memcalc import catalog
from memcalc.api import single
from memcalc.errors import CombinationError
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import overhead_of
from memcalc.timing.work import optimizer_traffic

PARAMETERS, EMBEDDING, RANKS = 8_030_261_248, 128_256 * 4096, 8
"""Of Llama 3 8B."""
VECTORS = (2 * 32 + 1) * 4096
"""Its norms, which have no weight decay and so are a group of their own."""
HEAD = 128_256 * 4096
AWARE = {"strategy.precision_aware": True}
BF16 = {"strategy.exp_avg_dtype": "bf16", "strategy.exp_avg_sq_dtype": "bf16"}
REDUCED = {"strategy.reduce_dtype": "bf16"}
COPIES, GRADIENTS = "fp32 copies of narrow states", "fp32 copy of the gradients"


def census_of(settings: dict[str, Any], **words: Any) -> tuple[Any, ModelOnGrid]:
    words: dict[str, Any] = {"model": "llama-3-8b", "gpus": RANKS, "seq_len": 4096, "gpu": "h100", **words}
    gpu = catalog.gpu(words.pop("gpu"))
    one = single(gpu=gpu, framework=words.pop("framework", "megatron"), settings=settings, **words)
    return one, ModelOnGrid(one.job.model, one.grid)


def terms(settings: dict[str, Any], **words: Any) -> dict[tuple[str, str], int]:
    """Bytes by phase and name, of parameters, gradients and optimizer."""
    one, census = census_of(settings, **words)
    ledger = build_ledger(census, overhead_of(one.job.gpu, one.grid, one.grid.layouts[0]).workspaces)
    return {
        (phase, term.name): int(term.bytes.max())
        for term in ledger.terms
        if term.component in {"parameters", "gradients", "optimizer"}
        for phase in term.phases
    }


def in_step(settings: dict[str, Any], *, passing: bool, **words: Any) -> int:
    """What there is in the step that stays, or that the step frees again."""
    found = terms(settings, **words).items()
    return sum(size for (phase, name), size in found if phase == "step" and (name in {COPIES, GRADIENTS}) == passing)


def wide(names: dict[str, Any]) -> float:
    """Bytes a parameter that stay, beside what the plain optimizer has: 2 + 4 + 12/d."""
    return (in_step(names, passing=False) - (6 + 12 / RANKS) * PARAMETERS) / PARAMETERS


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, 0),
    (AWARE, -2 / RANKS),  # the low 16 bits of the main weights
    ({**AWARE, "strategy.te": "2.0"}, 0),  # before store_param_remainders
    ({**AWARE, "strategy.main_params_dtype": "fp16"}, -2 / RANKS),
    ({**AWARE, **REDUCED}, -2 - 2 / RANKS),
    ({**AWARE, "strategy.exp_avg_dtype": "bf16"}, -4 / RANKS),
    ({**AWARE, "strategy.exp_avg_sq_dtype": "fp16"}, -4 / RANKS),
    ({**AWARE, "strategy.exp_avg_dtype": "fp8"}, -5 / RANKS),
    ({**AWARE, "strategy.exp_avg_dtype": "fp8", "strategy.exp_avg_sq_dtype": "fp8"}, -8 / RANKS),
    ({**AWARE, **BF16, **REDUCED}, -2 - 6 / RANKS),  # 2 P + 2 P + 6 P / d
])  # fmt: skip
def test_bytes_that_stay(settings: dict[str, Any], expected: float) -> None:
    assert wide(settings) == pytest.approx(expected, abs=1e-7)


def test_the_narrowest_states_in_every_phase() -> None:
    """2 P weights, 2 P gradients in one buffer, 6 P / d main weights and moments; last the embedding's gradient."""
    found = terms({**AWARE, **BF16, **REDUCED}, global_batch=8, micro_batch=1)
    for phase in ("forward", "loss", "backward-end", "step"):
        total = sum(size for (where, name), size in found.items() if where == phase)
        last = 2 * EMBEDDING * (phase == "backward-end")
        assert total == pytest.approx((4 + 6 / RANKS) * PARAMETERS + last, rel=1e-7)


MATRICES = PARAMETERS - VECTORS


@pytest.mark.parametrize(("settings", "copies"), [
    ({}, 0),
    (BF16, 0),
    ({**BF16, "strategy.te": "2.13"}, 8 * MATRICES + 2 * HEAD),
    ({"strategy.exp_avg_dtype": "bf16"}, 4 * MATRICES + 2 * HEAD),
    ({"strategy.exp_avg_sq_dtype": "bf16", "strategy.te": "2.2"}, 4 * MATRICES + 2 * HEAD),
    ({"strategy.exp_avg_dtype": "fp16", "strategy.exp_avg_sq_dtype": "fp16"}, 8 * MATRICES),
    ({"strategy.exp_avg_dtype": "fp8", "strategy.exp_avg_sq_dtype": "bf16"}, 8 * MATRICES + 2 * HEAD),
    ({"strategy.main_params_dtype": "fp16"}, 4 * MATRICES),
    ({**BF16, "strategy.main_params_dtype": "fp16"}, 4 * MATRICES),
    ({**BF16, "strategy.main_params_dtype": "fp16", "strategy.te": "2.13"}, 12 * MATRICES + 2 * HEAD),
])  # fmt: skip
def test_copies_of_the_step(settings: dict[str, Any], copies: int) -> None:
    assert in_step({**AWARE, **settings}, passing=True) == pytest.approx(copies / RANKS, abs=64)


def test_dense_weights_and_experts_step_one_after_another() -> None:
    """The copies of the larger group, not of both: of Mixtral on 16 ranks with EP 8 that of the experts."""
    experts = 32 * 3 * 4096 * 14336  # one of the eight
    words: dict[str, Any] = {"model": "mixtral-8x7b", "gpus": 16, "zero": 1}
    fields = {**AWARE, "strategy.exp_avg_dtype": "fp8"}
    assert in_step(fields, passing=True, ep=8, **words) == pytest.approx(4 * experts / 2, abs=64)
    # with all experts on each rank both are divided by the same 16, and the experts are eight times as many
    assert in_step(fields, passing=True, **words) == pytest.approx(4 * 8 * experts / 16, abs=64)


@pytest.mark.parametrize(("recipe", "gpu", "held"), [
    ("delayed", "h100", True), ("nvfp4", "b200", True), ("tensorwise", "h100", False), ("blockwise", "h100", False),
    ("mxfp8", "b200", False),
])  # fmt: skip
def test_recipes_under_which_megatron_keeps_the_main_weights(recipe: str, gpu: str, held: bool) -> None:
    """Then they are whole, and 16-bit gradients are copied: 4 P / d each."""
    words = {"precision": "fp8-mixed", "gpu": gpu}
    found = terms({**AWARE, **REDUCED, "strategy.float8": recipe}, **words)
    assert found["step", "main weights"] == pytest.approx((2 if held else 4) * PARAMETERS / RANKS, abs=8)
    assert found.get(("step", GRADIENTS), 0) == pytest.approx(0 if held else 4 * PARAMETERS / RANKS, abs=8)
    half = terms({**AWARE, **REDUCED, "strategy.float8": recipe, "strategy.main_params_dtype": "fp16"}, **words)
    assert half["step", "main weights"] == pytest.approx(2 * PARAMETERS / RANKS, abs=8)
    assert half.get(("step", GRADIENTS), 0) == 0


def test_a_recipe_that_no_product_runs_by_takes_the_main_weights_too() -> None:
    """Megatron-Bridge says tensorwise in bf16 as well: 2 P + 2 P + (4 + 2 + 2) P / d, and 4 P / d to step."""
    told = {**AWARE, **BF16, **REDUCED, "strategy.float8": "tensorwise"}
    assert wide(told) == pytest.approx(-2 - 4 / RANKS, abs=1e-7)
    assert in_step(told, passing=True) == pytest.approx(4 * PARAMETERS / RANKS, abs=64)
    delayed = {**told, "strategy.float8": "delayed"}
    assert wide(delayed) == pytest.approx(-2 - 6 / RANKS, abs=1e-7)
    assert in_step(delayed, passing=True) == 0
    for refused in ({**told, "strategy.float8": "rowwise"}, {**told, "strategy.precision_aware": False}):
        with pytest.raises(CombinationError, match="needs precision fp8-mixed"):
            census_of(refused)


def test_before_core_013_every_recipe_leaves_the_main_weights_to_it() -> None:
    fields = {**AWARE, "strategy.float8": "tensorwise"}
    found = terms(fields, precision="fp8-mixed", framework="megatron@core-0.11")
    assert found["step", "main weights"] == pytest.approx(2 * PARAMETERS / RANKS, abs=8)


def test_fp16_weights_have_no_remainders_and_no_copy_of_their_gradients() -> None:
    found, plain = (terms(fields, precision="fp16-mixed") for fields in (AWARE, {}))
    assert found["step", "main weights"] == plain["step", "fp32 master weights"]
    assert found.get(("step", GRADIENTS), 0) == 0 < plain["step", GRADIENTS]


@cache
def traffic(**fields: Any) -> float:
    """Bytes of an element that the update reads and writes."""
    _, census = census_of({f"strategy.{name}": value for name, value in fields.items()})
    return float(optimizer_traffic(census).max()) / PARAMETERS * RANKS


def test_what_the_update_reads_and_writes() -> None:
    """The plain update: gradient 4, main weight 8, moments 16, 16-bit weight 2."""
    assert traffic() == pytest.approx(30, rel=1e-6)
    # gradient 4, weight 2 + 2, its low 16 bits 2 + 2, moments 16
    assert traffic(precision_aware=True) == pytest.approx(28, rel=1e-6)
    fields = {"precision_aware": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    assert traffic(**fields, reduce_dtype="bf16") == pytest.approx(2 + 8 + 4 + 4, rel=1e-6)
    # a moment that is copied: read 2, written 4; updated 4 + 4; read 4, 16-bit copy 2 + 2, written 2
    assert traffic(**fields, te="2.13") == pytest.approx(4 + 8 + 2 * 24, rel=1e-6)
    # fp16: read 2, written 4, scaled 8, updated 8, searched 4, scaled 8, read 4, written 2
    assert traffic(precision_aware=True, main_params_dtype="fp16") == pytest.approx(4 + 16 + 40 + 2, rel=1e-6)


def test_a_shorter_update_is_a_shorter_step() -> None:
    words: dict[str, Any] = {
        "model": "llama-3-8b",
        "gpu": "h100",
        "gpus": RANKS,
        "framework": "megatron",
        "seq_len": 4096,
    }
    plain, narrow = (memcalc.estimate(**words, settings=s) for s in ({}, {**AWARE, **BF16, **REDUCED}))
    assert narrow.time.optimizer < plain.time.optimizer
    assert narrow.peak.device < plain.peak.device


@pytest.mark.parametrize(("words", "settings", "says"), [
    ({"zero": 0}, AWARE, "zero 1"),
    ({"optimizer": "lion"}, AWARE, "is Adam"),
    ({"optimizer": "sgd"}, AWARE, "is Adam"),
    ({"precision": "fp32"}, AWARE, "over 16-bit weights"),
    ({"offload": "optimizer"}, AWARE, "on the host keeps fp32 states"),
    ({}, BF16, "precision_aware=true"),
    ({}, {"strategy.main_params_dtype": "fp16"}, "precision_aware=true"),
    ({"framework": "fsdp2"}, AWARE, "fsdp2 cannot be told to"),
    ({"framework": "deepspeed"}, {"strategy.exp_avg_dtype": "bf16"}, "deepspeed has fp32"),
    ({"framework": "megatron@core-0.10"}, AWARE, "cannot be told to"),
    ({"framework": "megatron@core-0.12"}, {**AWARE, "strategy.exp_avg_dtype": "bf16"}, "has fp32, fp16, fp8"),
    ({"precision": "fp8-mixed"}, {**AWARE, "strategy.float8_all_gather": True}, "main_params_dtype fp32"),
])  # fmt: skip
def test_what_does_not_exist_is_refused(words: dict[str, Any], settings: dict[str, Any], says: str) -> None:
    job: dict[str, Any] = {"model": "llama-3-8b", "gpu": "h100", "gpus": RANKS, "framework": "megatron", **words}
    with pytest.raises(CombinationError, match=says):
        memcalc.estimate(**job, settings=settings)


def test_eight_bit_weights_beside_the_frameworks_own_main_weights() -> None:
    fields = {**AWARE, "strategy.float8_all_gather": True, "strategy.float8": "tensorwise", **BF16}
    found = terms(fields, precision="fp8-mixed")
    assert found["step", "adamw moments"] == pytest.approx(4 * PARAMETERS / RANKS, abs=8)
    assert found["step", "main weights"] == pytest.approx(4 * PARAMETERS / RANKS, abs=8)


def test_a_search_with_narrow_states_takes_the_distributed_optimizer() -> None:
    words: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "gpu": "h100",
        "gpus": 2,
        "framework": "megatron",
        "seq_len": 2048,
    }
    plans = memcalc.plan(**words, settings={**AWARE, **BF16, **REDUCED}, advice=False).plans
    assert plans
    assert {(plan.strategy.zero, plan.strategy.offload, plan.strategy.exp_avg_dtype) for plan in plans} == {
        (1, (), "bf16")
    }
    with pytest.raises(CombinationError, match="fsdp2 cannot be told to"):
        memcalc.plan(**{**words, "framework": "fsdp2"}, settings=AWARE)
