"""The formulas of other calculators give what their own documents say."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from memcalc import catalog
from memcalc.specs.runs import Run

_spec = spec_from_file_location("peers", Path(__file__).with_name("peers.py"))
assert _spec is not None
assert _spec.loader is not None
peers: Any = sys.modules.setdefault("peers", module_from_spec(_spec))
_spec.loader.exec_module(peers)

GIB = 2**30
LLAMA_13B = {
    "layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "head_dim": 128, "ffn": 20480, "gated": False,
    "rms": True, "tied": True, "vocab": 32000, "seq_len": 2048,
}  # fmt: skip
NEOX_20B = {
    "layers": 44, "hidden": 6144, "heads": 64, "kv_heads": 64, "head_dim": 96, "ffn": 24576, "gated": False,
    "rms": False, "tied": False, "vocab": 51200, "seq_len": 2048,
}  # fmt: skip
GPT3_175B = {
    "layers": 96, "hidden": 12288, "heads": 96, "kv_heads": 96, "head_dim": 128, "ffn": 49152, "gated": False,
    "rms": False, "tied": True, "vocab": 51200, "seq_len": 2048, "framework": "megatron",
}  # fmt: skip


def job(sizes: dict[str, Any], **settings: Any) -> Any:
    return peers.Job(**{**sizes, **settings})


def test_eleuther_by_hand() -> None:
    """The README's 20B example, worked by hand: 1 GPU, ZeRO-1, all recomputed."""
    parameters = 629_145_600 + 12_582_912 + 2_162_688 + 12_288 + 6_643_777_536 + 13_287_555_072
    activations = 2048 * 1 * 6144 * 44 * 34
    assert peers.eleuther(job(NEOX_20B, zero=1, recompute="full")) == parameters * (2 + 4 + 12) + activations


def test_eleuther_divides_as_its_source_does() -> None:
    """Optimizer by all GPUs, weights by TP alone, gradients by nothing under ZeRO-1; one bucket of 5e8 parameters."""
    parameters = 20_575_236_096
    said = peers.eleuther(job(NEOX_20B, zero=1, recompute="full", gpus=8, tp=2))
    activations = 2048 * 6144 * 44 * 34
    assert said == parameters * (2 / 2 + 4 + 12 / 8) + 5e8 * 2 + activations


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (peers.zero2(2_851_000_000, 8), 15.93),
        (peers.zero2(2_851_000_000, 8, optimizer_on_cpu=True), 5.31),
        (peers.zero3(2_851_000_000, 32_000_000, 8), 6.09),
        (peers.zero3(2_851_000_000, 32_000_000, 8, optimizer_on_cpu=True), 0.78),
        (peers.zero3(2_851_000_000, 32_000_000, 8, optimizer_on_cpu=True, parameters_on_cpu=True), 0.12),
    ],
)
def test_deepspeed_as_documented(said: int, expected: float) -> None:
    """The tables for t5-3b on 8 GPUs in DeepSpeed's memory.rst @0cca539."""
    assert round(said / GIB, 2) == expected


def test_deepspeed_example_of_t5_large() -> None:
    """The three cases of the same page, in MB, on 4 GPUs."""
    sizes = (737_670_000, 32_900_000, 4)
    cases = [{}, {"optimizer_on_cpu": True, "parameters_on_cpu": True}, {"optimizer_on_cpu": True}]
    assert [peers.zero3(*sizes, **case) >> 20 for case in cases] == [3291, 125, 477]


def test_megatron_by_hand() -> None:
    """GPT-3 175B on TP 8, PP 8: 12 h² and 4 h a block (no biases), and the embedding."""
    block = 12 * 12288**2 + 4 * 12288
    shard = (96 * block / 8 + 2 * 12288 / 8 + 51200 * 12288) / 8
    assert peers.megatron_shard(job(GPT3_175B, gpus=64, tp=8, pp=8)) == pytest.approx(shard, rel=1e-12)


def test_megatron_activations_are_those_of_the_paper() -> None:
    """arXiv:2205.05198 Table 2: sbh 34/t a layer with tensor and sequence parallelism and selective recomputation."""
    settings = {"gpus": 64, "tp": 8, "pp": 8, "sp": True, "recompute": "selective-core-attn"}
    with_sp = job(GPT3_175B, **settings)
    states = peers.megatron_shard(with_sp) * 18
    embedding = 2048 * 8 * (8 + 12288) / 8
    assert peers.megatron(with_sp) == pytest.approx(states + 96 * 2048 * 12288 * 34 / 8 + embedding, rel=1e-12)
    without = job(GPT3_175B, **(settings | {"sp": False}))
    layers = 96 * 2048 * 12288 * (10 + 24 / 8)
    assert peers.megatron(without) == pytest.approx(states + 1.05 * (layers + 8 * embedding), rel=1e-12)


def test_megatron_distributed_optimizer_and_schedule() -> None:
    """6 + 12/d bytes; an interleaved first stage holds 1 + (p - 1)/(p v) of all layers."""
    plain = job(GPT3_175B, gpus=256, tp=8, pp=8, sp=True, recompute="selective-core-attn")
    sharded = job(GPT3_175B, gpus=256, tp=8, pp=8, sp=True, recompute="selective-core-attn", zero=1)
    shard = peers.megatron_shard(plain)
    assert peers.megatron(plain) - peers.megatron(sharded) == pytest.approx(shard * (18 - 9), rel=1e-12)
    chunks = job(GPT3_175B, gpus=256, tp=8, pp=8, sp=True, recompute="selective-core-attn", vpp=3)
    activations = peers.megatron(plain) - shard * 18
    assert peers.megatron(chunks) - shard * 18 == pytest.approx(activations * (1 + 7 / 24), rel=1e-12)


def test_llm_analysis_as_published() -> None:
    """examples/llama/outputs_train of cli99/llm-analysis, LLaMA-13B on TP 8, PP 8 with selective recomputation.

    The published weights leave the norms out: 2 bytes of 2 h for each of 5 layers, and of h / 8.
    """
    settings = {"gpus": 2048, "tp": 8, "pp": 8, "sp": True, "recompute": "selective-core-attn"}
    llama = job(LLAMA_13B, **settings)
    assert 40 * peers.llm_analysis_block(llama) == 1_939_865_600
    weights = peers.llm_analysis_states(llama)[0]
    assert weights - 2 * (5 * 2 * 5120 + 5120 / 8) == 434_176_000


def test_llm_analysis_states_follow_zero() -> None:
    """2 bytes of weights by stage 3, 12 of optimizer by stage 1, 4 of gradients by stage 2, over 4 ranks."""
    held = [peers.llm_analysis_states(job(LLAMA_13B, gpus=4, zero=stage)) for stage in range(4)]
    whole = held[0]
    cut = [(1, 1, 1), (1, 4, 1), (1, 4, 4), (4, 4, 4)]
    assert held == [tuple(part / ranks for part, ranks in zip(whole, by, strict=True)) for by in cut]


# -------------------------------------------------------------------------------------------------- which runs they see


def run(**changes: Any) -> Run:
    table = {
        "id": "a", "source": "a log", "grade": "A", "model": "llama-2-7b", "gpu": "a100-80g", "gpus": 8,
        "workload": {"seq_len": 4096, "micro_batch": 2, "global_batch": 64},
        "strategy": {"framework": "deepspeed@0.14", "precision": "bf16-mixed", "zero": 3, "optimizer": "adamw"},
    }  # fmt: skip
    return Run.model_validate({**table, **changes})


def test_a_run_as_the_calculators_see_it() -> None:
    seen = peers.job_for(run(), catalog.model("llama-2-7b"))
    assert (seen.layers, seen.ffn, seen.gated, seen.vocab) == (32, 11008, True, 32000)
    assert (seen.dp, seen.micro_batches, seen.framework, seen.tokens) == (8, 4, "deepspeed", 8192)
    assert peers.parameters_of(seen) == 6_738_415_616 - (2 * 32 + 1) * 4096
    assert peers.deepspeed(seen) == pytest.approx(4 * 32000 * 4096 + 18 * peers.parameters_of(seen) / 8, abs=1)
    assert peers.megatron(seen) is None


@pytest.mark.parametrize(
    "strategy", [{"lora": "8"}, {"quantize": "nf4"}, {"optimizer": "sgd"}, {"precision": "bf16"}, {"cp": 2}]
)
def test_what_they_are_not_made_for_is_left_out(strategy: dict[str, Any]) -> None:
    assert peers.job_for(run(strategy=strategy), catalog.model("llama-2-7b")) is None


def test_a_mixture_of_experts() -> None:
    seen = peers.job_for(run(model="deepseek-v2-lite"), catalog.model("deepseek-v2-lite"))
    assert (seen.experts, seen.topk, seen.first_dense, seen.expert_ffn) == (64, 6, 1, 1408)
    assert [peers.eleuther(seen), peers.llm_analysis(seen)] == [None, None]
