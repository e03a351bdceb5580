"""Jobs with adapters as people type them: what the words leave open is what PEFT, TRL and the recipes take."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import CombinationError
from memcalc.frameworks import habits_of
from memcalc.planner.defaults import is_frozen, precisions_for
from memcalc.planner.request import check_words
from memcalc.report import of_plans, render

LLAMA: dict[str, Any] = {"model": "llama-3-8b", "gpu": "a100-80g", "gpus": 1, "seq_len": 1024}
FP32_ADAPTERS = 32 * 16 * ((4096 + 4096) + (4096 + 1024)) * 4
"""Bytes of rank 16 on q and v of Llama 3 8B in fp32: 32 blocks, q is 4096 x 4096 and v 4096 x 1024."""


def bytes_of(result: Any, name: str) -> int:
    """Return the bytes of one term."""
    return sum(term.bytes for term in result.terms if term.name == name)


def test_a_frozen_base_is_16_bit_beside_fp32_adapters() -> None:
    """8,030,261,248 parameters of two bytes; PEFT casts adapters to fp32 (``autocast_adapter_dtype``)."""
    result = memcalc.estimate(**LLAMA, lora="16")
    assert result.strategy.precision == "bf16"
    assert bytes_of(result, "frozen weights") == 2 * 8_030_261_248
    assert bytes_of(result, "adapters") == FP32_ADAPTERS
    assert bytes_of(result, "adamw moments") == 2 * FP32_ADAPTERS == 54_525_952
    assert result.assumptions["lora"] == "16:q,v"


@pytest.mark.parametrize(
    ("framework", "rank"),
    [
        ("hf", 16),  # TRL, ModelConfig.lora_r
        ("litgpt", 8),  # finetune/lora.py, lora_r
        ("torchtune", 8),  # recipes/configs/llama3/8B_lora.yaml, lora_rank
    ],
)
def test_the_word_alone_takes_the_rank_of_the_framework(framework: str, rank: int) -> None:
    for word in (True, "usual"):
        result = memcalc.estimate(**LLAMA, lora=word, framework=framework)
        assert result.strategy.lora.startswith(f"{rank}:")
        assert result.assumptions["lora"] == result.strategy.lora


def test_adapters_without_a_framework_are_trained_where_peft_stands() -> None:
    assert memcalc.estimate(**LLAMA, lora=True).strategy.framework == "hf"
    assert memcalc.estimate(**LLAMA, lora=True, framework="fsdp2").strategy.framework == "fsdp2"
    assert memcalc.estimate(**LLAMA).strategy.framework == "fsdp2"


def test_v100_has_fp16_for_a_frozen_base() -> None:
    """Volta has no bf16; a frozen fp16 base needs no shards, and so no sharding stage."""
    result = memcalc.estimate(**{**LLAMA, "gpu": "v100-32g"}, lora=True)
    assert (result.strategy.precision, result.strategy.zero) == ("fp16-mixed", 0)
    assert bytes_of(result, "frozen weights") == 2 * 8_030_261_248
    with pytest.raises(CombinationError, match="--zero 2 or 3 only"):
        memcalc.estimate(**{**LLAMA, "gpu": "v100-32g"}, framework="hf", zero=0, precision="fp16-mixed")


@pytest.mark.parametrize("framework", ["hf", "fsdp2", "ddp", "deepspeed", "plain", "torchtune", "litgpt"])
def test_a_quantised_base_needs_no_precision(framework: str) -> None:
    result = memcalc.estimate(**LLAMA, lora=True, quantize="nf4", framework=framework)
    assert result.strategy.precision == ("bf16-mixed" if framework == "deepspeed" else "bf16")


def test_deepspeed_casts_adapters_with_the_model() -> None:
    """DeepSpeed 0.19 runtime/engine.py: ``module.bfloat16()``; ZeRO keeps an fp32 master of what is trained."""
    result = memcalc.estimate(**LLAMA, lora="16", framework="deepspeed", zero=0)
    assert (result.strategy.precision, result.strategy.adapter_dtype) == ("bf16-mixed", "bf16")
    assert bytes_of(result, "adapters") == FP32_ADAPTERS // 2
    with pytest.raises(CombinationError, match="deepspeed casts the whole model to bf16"):
        memcalc.estimate(**LLAMA, lora="16", framework="deepspeed", adapter_dtype="fp32")
    wide = memcalc.estimate(**LLAMA, lora="16", framework="deepspeed", zero=0, precision="fp32")
    assert wide.strategy.adapter_dtype == "fp32"


def test_a_search_over_a_quantised_base_has_its_precision_alone() -> None:
    result = memcalc.plan(**LLAMA, lora="16", quantize="nf4", top=2, advice=False)
    assert {plan.strategy.precision for plan in result.plans} == {"bf16"}
    assert result.assumptions["precision"] == "bf16"


@pytest.mark.parametrize("what", ["seq-len", "micro-batch"])
def test_limits_take_the_same_precision(what: str) -> None:
    job = {key: value for key, value in LLAMA.items() if key != "seq_len" or what == "micro-batch"}
    result = memcalc.largest(
        what, **job, lora="16", quantize="nf4", recompute="full", offload="none", step=1024 if what == "seq-len" else 1
    )
    assert result.best is not None
    assert result.best.strategy.precision == "bf16"


def test_what_is_given_stays() -> None:
    assert memcalc.estimate(**LLAMA, lora="8", precision="fp32").strategy.precision == "fp32"
    with pytest.raises(CombinationError, match="quantized base"):
        memcalc.estimate(**LLAMA, lora="8", quantize="nf4", precision="fp32")


def test_full_training_keeps_its_precisions() -> None:
    from memcalc import catalog

    request = check_words({"gpus": 1}, {})
    assert not is_frozen(request)
    assert precisions_for(catalog.gpu("a100-80g"), habits_of("fsdp2"))[0] == "bf16-mixed"


def test_the_headline_names_each_fewer_count_that_is_tight() -> None:
    """Not the next fewer alone; each as a search of that count says."""
    job: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "3090", "lora": 16}
    found = memcalc.plan(**job, advice=False)
    alone = {gpus: memcalc.plan(**job, gpus=gpus, offload="none", advice=False).plans[0] for gpus in (1, 2, 4)}
    assert {gpus: plan.verdict for gpus, plan in alone.items()} == {1: "tight", 2: "tight", 4: "fits"}
    assert (found.without_offload, found.tight_without_offload) == (4, (1, 2))


def test_a_quantised_base_alone_has_adapters_of_the_usual_rank() -> None:
    """As ``--lora`` alone, and said under what is assumed; the question stays as it was typed."""
    small = {"model": "llama-3.2-1b", "gpu": "a100-40g", "quantize": "nf4"}
    alone, both = memcalc.estimate(**small), memcalc.estimate(**small, lora="usual")
    assert (alone.strategy, alone.peak, alone.assumptions["lora"]) == (both.strategy, both.peak, "16:q,v")
    assert alone.command.endswith("--quantize nf4")
    assert memcalc.estimate(**alone.job.keywords()) == alone
    assert memcalc.plan(**small, gpus=1, top=1, advice=False).plans[0].strategy.lora == "16:q,v"
    assert memcalc.estimate(model="llama-3.2-1b", gpu="a100-40g", quantize="none").strategy.lora == ""


def test_the_headline_says_what_makes_one_gpu_safe() -> None:
    """The next figures of the answer are of four GPUs, although a loss without logits fits on one."""
    result = memcalc.plan(model="llama-3.1-8b", gpu="rtx-4090", lora=True)
    first = render(of_plans(result), "plain", width=100).splitlines()[0]
    assert "1 fits with --loss fused-linear" in first
    fits = memcalc.plan(model="llama-3.1-8b", gpu="rtx-4090", lora=True, gpus=1, loss="fused-linear", advice=False)
    assert fits.plans[0].verdict == "fits"


def test_the_same_words_are_the_same_job_in_estimate_and_in_plan() -> None:
    """TRL sets ``bf16``, which is autocast, where nothing is said (1.10 trainer/base_config.py)."""
    words = {**LLAMA, "lora": "16", "recompute": "none", "micro_batch": 1, "offload": "none"}
    told = memcalc.estimate(**words)
    assert (told.strategy.autocast, told.assumptions["autocast"]) == (True, "on")
    first = memcalc.plan(**words, advice=False).plans[0]
    assert (first.strategy, first.peak.device) == (told.strategy, told.peak.device)
    assert not memcalc.estimate(**words, autocast=False).strategy.autocast


@pytest.mark.parametrize(
    ("model", "named", "layers"),
    [
        ("t5-small", "q,v,wo", "q,v,down"),  # T5LayerFF.DenseReluDense.wo; attention's output is o
        ("mt5-small", "wo", "down"),
        ("internlm2-1.8b", "wo", "o"),  # InternLM2Attention.wo
        ("pythia-14m", "dense", "o"),  # GPTNeoXAttention.dense
        ("bert-base", "q,dense", "q,o,up,down"),  # attention.output, intermediate and output of BertLayer
    ],
)
def test_a_name_that_classes_share_is_the_layer_of_the_models_own(model: str, named: str, layers: str) -> None:
    told = memcalc.estimate(model=model, gpu="a100-40g", lora=f"8:{named}", seq_len=128, global_batch=8)
    assert told.strategy.lora == f"8:{layers}"
