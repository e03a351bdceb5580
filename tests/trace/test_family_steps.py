"""Whole steps of families with operators and masks of their own: the replayed peak against the real classes'."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from autograd import measure, timeline
from covering import covering
from differential import Job, model_of, outcome, words_of

from memcalc import api
from memcalc.allocator import replay
from memcalc.events import step_events
from memcalc.probe.live.cuda_like import cuda_like
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces

WITHIN = 0.001
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "apertus": (4, {}), "llama4_text": (6, {}), "cwm": (6, {"sliding_window": 16}), "mistral-window": (4, {}),
    "gemma4_text": (9, {}), "gemma4-experts": (9, {}), "gemma4_unified_text": (9, {"vocab_size": 4096}),
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


GEMMA4: dict[str, dict[str, Any]] = {
    "values of their own": {"attention_k_eq_v": False},
    "no window": {"layer_types": ["full_attention"] * 9},
    "a wide window": {"sliding_window": 4096},
    "a head of its own": {"tie_word_embeddings": False, "final_logit_softcapping": None},
    "biases": {"attention_bias": True},
}
"""Gemma 4 as its switches make it."""


def error(family: str, precision: str, recompute: str, attention: str, **sizes: object) -> float:
    """Return by what part of the real peak the replayed one is off."""
    layers, changes = FAMILIES[family]
    common = 2, 256, precision, recompute, "adamw", "foreach", "standard", attention, "plain", 1
    return outcome(Job(family, changes | sizes, layers, *common)).error


def test_a_checkpointed_step_takes_what_the_class_takes() -> None:
    assert abs(error("llama4_text", "bf16", "full", "flash")) <= WITHIN


@pytest.mark.parametrize("family", ["llama-3", pytest.param("mixtral", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("precision", "framework"),
    [("bf16", "fsdp2"), *(pytest.param(name, "plain", marks=pytest.mark.slow) for name in ("bf16", "fp32+autocast"))],
)
def test_so_does_one_whose_modules_are_checkpointed_apart(family: str, precision: str, framework: str) -> None:
    """Accelerate 1.8 to 1.14 wraps the children of a block under FSDP 2 (utils/fsdp_utils.py, fsdp2_apply_ac)."""
    ranks = 2 if framework == "fsdp2" else 1
    common = precision, "submodules", "adamw", "foreach", "standard", "flash", framework, ranks
    assert abs(outcome(Job(family, {}, 4, 2, 256, *common)).error) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "recompute", "attention"),
    covering(2, FAMILIES, ["bf16", "fp32", "fp32+autocast"], ["none", "full", "every-2"], ["flash", "eager"]),
)
def test_so_does_a_step_however_it_is_trained(family: str, precision: str, recompute: str, attention: str) -> None:
    assert abs(error(family, precision, recompute, attention)) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("switch", ODD)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_so_does_llama_4_with_its_switches_thrown(switch: str, recompute: str) -> None:
    assert abs(error("llama4_text", "bf16", recompute, "flash", **ODD[switch])) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("switch", GEMMA4)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_so_does_gemma_4_with_its_switches_thrown(switch: str, recompute: str) -> None:
    assert abs(error("gemma4_text", "bf16", recompute, "flash", **GEMMA4[switch])) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recompute", "framework"),
    covering(2, ["gemma4_text", "gemma4-experts"], ["none", "full"], ["fsdp2", "ddp"]),
)
def test_so_does_gemma_4_on_several_ranks(family: str, recompute: str, framework: str) -> None:
    precision = "fp32" if framework == "ddp" else "bf16"
    job = Job(family, {}, 9, 2, 256, precision, recompute, "adamw", "foreach", "standard", "flash", framework, 2)
    assert abs(outcome(job).error) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "recompute", "precision"),
    covering(2, ["gemma4_text", "gemma4-experts"], ["none", "full", "every-2"], ["bf16", "fp32+autocast"]),
)
def test_so_does_gemma_4_over_micro_batches(family: str, recompute: str, precision: str) -> None:
    job = Job(family, {}, 9, 2, 256, precision, recompute, "adamw", "foreach", "standard", "flash", "plain", 1, 3)
    assert abs(outcome(job).error) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapters", "recompute"),
    [("gemma4_text", "attention", "none"), ("gemma4_text", "all", "full"), ("gemma4-experts", "attention", "full")],
)
def test_so_does_gemma_4_with_adapters(family: str, adapters: str, recompute: str) -> None:
    job = Job(family, {}, 9, 2, 256, "bf16", recompute, "adamw", "foreach", "standard", "flash", "plain", 1)
    assert abs(outcome(replace(job, adapters=adapters)).error) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "gemma4-experts"])
def test_reentrant_checkpoints_keep_the_end_of_the_graph_that_gemma_4s_table_refers_to(family: str) -> None:
    job = Job(family, {}, 9, 2, 256, "bf16", "full", "adamw", "foreach", "standard", "flash", "plain", 1)
    with cuda_like("auto"):
        model, run, _ = measure.build(
            family, precision="bf16", attention="flash", dropout=None, recompute="none", batch=2, seq=256, layers=9
        )
        model.gradient_checkpointing_enable({"use_reentrant": True})
        steps = timeline.train(model, run, timeline.adamw(model, "foreach"), 1)
    words = words_of(job) | {"settings": {"strategy.checkpoint": "reentrant"}}
    single = api.single(model=model_of(job), gpu="h100", **words)
    census = ModelOnGrid(single.job.model, single.grid)
    events = step_events(census, build_ledger(census, Workspaces(0, 0)), 0, observed=False)
    real = steps.peak(max(event.step for event in steps.events)).live
    assert replay(events).peak_requested == pytest.approx(real, rel=WITHIN)
