"""8-bit and 4-bit products of Megatron-LM by hand: weights, kept activations, passing copies, and what is refused.

By hand from TransformerEngine d0067d0d (pytorch/module/linear.py, layernorm_linear.py, base.py, csrc/quantizer.cpp) and
Megatron-LM d98e8a64 (core/transformer/attention.py, core/distributed/param_and_grad_buffer.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import memcalc
from memcalc import catalog
from memcalc.api import single
from memcalc.errors import CombinationError
from memcalc.frameworks.float8 import RECIPES
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import overhead_of
from memcalc.timing.rates import peak_flops
from memcalc.trace.template import trace

HIDDEN, FFN, KEYS, LAYERS, RANKS = 4096, 14336, 1024, 32, 8
LINEAR = LAYERS * (HIDDEN * (HIDDEN + 2 * KEYS) + HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
"""Weights of Llama 3 8B in the linear layers of its blocks."""


def job(gpu: str = "h100", recipe: str = "", **words: Any) -> Any:
    settings = {**({"strategy.float8": recipe} if recipe else {}), **words.pop("settings", {})}
    words = {"model": "llama-3-8b", "gpus": RANKS, "framework": "megatron", "precision": "fp8-mixed", "seq_len": 4096,
             **words}  # fmt: skip
    return single(gpu=catalog.gpu(gpu), settings=settings, **words)


def ledger_of(one: Any) -> Any:
    census = ModelOnGrid(one.job.model, one.grid)
    return build_ledger(census, overhead_of(one.job.gpu, one.grid, one.grid.layouts[0]).workspaces)


PASSING = ("temporaries of the step", "fp32 copy of the gradients")


@cache
def states(gpu: str, recipe: str = "", **words: Any) -> int:
    """What parameters, gradients and optimizer take in the step, without what it frees again."""
    settings = {name: value for name, value in words.items() if name.startswith("strategy.")}
    words = {name: value for name, value in words.items() if name not in settings}
    ledger = ledger_of(job(gpu, recipe, settings=settings, **words))
    components, freed = {"parameters", "gradients", "optimizer"}, PASSING
    stay = [t for t in ledger.terms if t.component in components and "step" in t.phases and t.name not in freed]
    return sum(int(t.bytes.max()) for t in stay)


GATHERED = {"strategy.float8_all_gather": True}


@pytest.mark.parametrize(("gpu", "recipe", "cache_bytes"), [
    ("h100", "delayed", 2), ("h100", "tensorwise", 2), ("h100", "blockwise", 2 * (1 + 4 / 128**2)),
    ("b200", "delayed", 1), ("b200", "tensorwise", 1), ("b200", "mxfp8", 2 * (1 + 1 / 32)),
    ("b200", "nvfp4", 2 * (1 / 2 + 1 / 16)), ("rtx-5090", "tensorwise", 2),
])  # fmt: skip
def test_every_linear_layer_keeps_a_quantised_weight(gpu: str, recipe: str, cache_bytes: float) -> None:
    """Beside 6 + 12/d bytes in bf16: both directions, one copy of which is enough where any layout is multiplied."""
    plain = states(gpu, precision="bf16-mixed")
    assert states(gpu, recipe) - plain == pytest.approx(cache_bytes * LINEAR, abs=1)
    # the weight itself is quantised: its 2 bytes go
    assert states(gpu, recipe, **GATHERED) - plain == pytest.approx((cache_bytes - 2) * LINEAR, abs=1)


def test_resident_bytes_of_a_linear_weight() -> None:
    """Delayed scaling on Hopper: 8 + 12/d a linear weight, 6 + 12/d elsewhere."""
    count = 8_030_261_248
    assert states("h100", "delayed") == pytest.approx((6 + 12 / RANKS) * count + 2 * LINEAR, rel=1e-6)


def test_experts_are_quantised_and_routers_are_not() -> None:
    words = {"model": "mixtral-8x7b", "ep": 8, "zero": 1}
    more = states("h100", "delayed", **words) - states("h100", precision="bf16-mixed", **words)
    attention = HIDDEN * (HIDDEN + 2 * KEYS) + HIDDEN * HIDDEN
    assert more == 2 * LAYERS * (attention + 3 * HIDDEN * FFN)  # one of the eight experts


BF16_KEPT = 139_264


@pytest.mark.parametrize(("gpu", "precision", "recipe", "kept"), [
    ("h100", "bf16-mixed", "", BF16_KEPT),
    ("h100", "fp8-mixed", "delayed", 120_832),
    # the attention projection keeps what attention does, and no copy in 8 bits
    ("h100", "fp8-mixed", "tensorwise", 120_832 - HIDDEN),
    ("b200", "fp8-mixed", "tensorwise", 120_832 - HIDDEN),
    ("b200", "fp8-mixed", "mxfp8", BF16_KEPT - (2 - 33 / 32) * (2 * HIDDEN + FFN)),
    ("b200", "fp8-mixed", "nvfp4", BF16_KEPT - (2 - 9 / 16) * (2 * HIDDEN + FFN)),
])  # fmt: skip
def test_bytes_that_a_block_keeps_for_a_token(gpu: str, precision: str, recipe: str, kept: float) -> None:
    """Llama 3 8B: each linear layer's input in e bytes; norm inputs, q, k, v, and fc1's output stay in 16 bits."""
    one = job(gpu, recipe, precision=precision)
    setting = ModelOnGrid(one.job.model, one.grid).settings[0]
    records = trace(one.job.model.groups[0].block, setting).kept_records
    counted = [r.size.bytes for r in records if "statistics" not in r.name and "logsumexp" not in r.name]
    assert sum(counted) == kept


def transients(gpu: str, recipe: str) -> dict[str, int]:
    one = job(gpu, recipe)
    setting = ModelOnGrid(one.job.model, one.grid).settings[0]
    template = trace(one.job.model.groups[0].block, setting)
    made = [template.records[index] for index in template.backward if index >= 0]
    return {record.name: record.size.bytes for record in made}


def test_gradients_are_quantised_both_ways_in_backward() -> None:
    """2 bytes an element where the second way is a transposed copy, 1 where any layout is multiplied."""
    name = "gradient of MLP up projection output, quantised"
    assert transients("h100", "delayed")[name] == 2 * 2 * FFN
    assert transients("b200", "delayed")[name] == 2 * FFN
    # what was kept in 16 bits is quantised again for the gradient of the weight
    again = "attention projection input, quantised again"
    assert transients("h100", "tensorwise")[again] == 2 * HIDDEN
    assert again not in transients("h100", "delayed")


@pytest.mark.parametrize(("gpu", "recipe", "says"), [
    ("h100", "mxfp8", "the nearest is blockwise"), ("h100", "nvfp4", "the nearest is blockwise"),
    ("b200", "blockwise", "the nearest is mxfp8"), ("l40s", "blockwise", "the nearest is tensorwise"),
    ("rtx-5090", "mxfp8", "the nearest is tensorwise"), ("mi300x", "", "use bf16-mixed"),
    ("a100-80g", "", "no fp8 arithmetic"), ("h100", "rowwise", "megatron has delayed, tensorwise"),
])  # fmt: skip
def test_what_a_gpu_lacks_is_refused_with_the_nearest(gpu: str, recipe: str, says: str) -> None:
    for command in (job, lambda **words: memcalc.plan(**{"model": "llama-3-8b", "gpus": 8, "framework": "megatron",
                                                         "precision": "fp8-mixed", **words})):  # fmt: skip
        settings = {"strategy.float8": recipe} if recipe else {}
        with pytest.raises(CombinationError, match=says):
            command(gpu=gpu, settings=settings)


def test_weights_in_8_bits_need_the_distributed_optimizer() -> None:
    with pytest.raises(CombinationError, match="zero 1"):
        job(zero=0, settings=GATHERED)
    plans = memcalc.plan(model="llama-3.2-1b", gpu="h100", gpus=2, framework="megatron", precision="fp8-mixed",
                         seq_len=2048, settings=GATHERED, advice=False)  # fmt: skip
    assert plans.plans
    assert {plan.strategy.zero for plan in plans.plans} == {1}


def test_a_search_tries_8_bits_only_where_it_is_told() -> None:
    words = {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 2, "framework": "megatron", "seq_len": 2048}
    assert {plan.strategy.precision for plan in memcalc.plan(**words, advice=False).plans} == {"bf16-mixed"}
    told = memcalc.plan(**words, precision="fp8-mixed", advice=False).plans
    assert {plan.strategy.precision for plan in told} == {"fp8-mixed"}


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp8-mixed"])
def test_gradients_in_16_bits(precision: str) -> None:
    """``--grad-reduce-in-bf16``: the buffer halves, and the step makes an fp32 copy of the rank's share."""
    count, reduced = 8_030_261_248, {"strategy.reduce_dtype": "bf16"}
    assert states("h100", precision=precision) - states("h100", precision=precision, **reduced) == 2 * count
    terms = {term.name: term for term in ledger_of(job(precision=precision, settings=reduced)).terms}
    copy = terms["fp32 copy of the gradients"]
    assert copy.phases == ("step",)
    assert int(copy.bytes.max()) == pytest.approx(4 * count / RANKS, abs=8)


def test_four_bits_count_with_their_own_peak_where_it_is_known() -> None:
    gpu = catalog.gpu("b200")
    known = gpu.model_copy(update={"peak_flops": {**gpu.peak_flops, "fp4": 9e15}})
    assert peak_flops(known, "fp8-mixed", RECIPES["nvfp4"]) == 9e15
    assert peak_flops(known, "fp8-mixed", RECIPES["mxfp8"]) == gpu.peak_flops["fp8"]
    unknown = gpu.model_copy(update={"peak_flops": {k: v for k, v in gpu.peak_flops.items() if k != "fp4"}})
    assert peak_flops(unknown, "fp8-mixed", RECIPES["nvfp4"]) == gpu.peak_flops["fp8"]
