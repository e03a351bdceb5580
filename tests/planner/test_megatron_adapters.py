"""Adapters beside Megatron-LM's layers: which layers, which layouts, what is refused, and what a rank holds of them.

Sources: NVIDIA-NeMo/Megatron-Bridge 067f987d ``peft/lora.py``, ``peft/utils.py`` and ``perf_recipes/llama/h100``;
modelscope/mcore-bridge f020e479 ``tuners/lora.py``.
"""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import CombinationError, UncountedError
from memcalc.handoff import plan_to
from memcalc.results.estimates import Estimate

MEGATRON = {"framework": "megatron", "gpu": "h100", "seq_len": 4096}
SWIFT = {"strategy.lora_classes": "swift"}


def estimate(model: str = "llama-3-8b", **words: Any) -> Estimate:
    """Return the estimate of a job under Megatron-LM."""
    return memcalc.estimate(model=model, **{**MEGATRON, "gpus": words.get("tp", 1) * words.get("pp", 1), **words})


def term(found: Estimate, name: str) -> int:
    """Return the bytes of a term."""
    return next(one.bytes for one in found.terms if one.name == name)


@pytest.mark.parametrize(
    ("model", "lora", "settings", "resolved"),
    [
        ("llama-3-8b", "usual", {}, "32:qkv,o,gate_up,down"),
        ("llama-3-8b", "8", SWIFT, "8:qkv,o,gate_up,down"),
        ("gpt2", "8:gate_up", {}, "8:up"),
        # linear_qkv does not exist beside a latent space; all-linear of ms-swift finds the down projections too
        ("deepseek-v2-lite", "8", {}, "8:o,gate_up,down"),
        ("deepseek-v2-lite", "8:all-linear", SWIFT, "8:q,kv_a,kv_b,o,gate_up,down"),
    ],
)
def test_layers_by_default_are_those_that_the_classes_list(
    model: str, lora: str, settings: dict[str, Any], resolved: str
) -> None:
    assert estimate(model, lora=lora, settings=settings, seq_len=1024).strategy.lora == resolved


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ({"lora": "16:q,v"}, CombinationError, r"qkv, o, gate_up, down, as in 16:qkv"),
        ({"lora": "12", "tp": 8}, CombinationError, "splits its rank over 8 tensor-parallel ranks"),
        ({"lora": "16:all"}, UncountedError, "all-linear"),
        ({"lora": "16", "quantize": "nf4"}, UncountedError, "--framework fsdp2, hf, ddp or deepspeed, or --to trainer"),
        ({"lora": "16", "optimizer": "muon"}, UncountedError, "adamw"),
        ({"lora": "16", "settings": {"strategy.mtp": 1}}, UncountedError, "not modelled"),
        ({"lora": "16", "model": "gemma-2-9b"}, UncountedError, "--framework hf"),
        ({"lora": "16", "framework": "megatron@2021-08"}, CombinationError, "core 0.5"),
        (
            {"model": "qwen3-30b-a3b", "lora": "16", "tp": 2, "sp": True, "ep": 2, "gpus": 4, "settings": SWIFT},
            CombinationError, r"strategy\.etp=1",
        ),
    ],
)  # fmt: skip
def test_what_is_not_possible_or_not_modelled_is_refused(
    words: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        estimate(**words)


QUANTISED: dict[str, Any] = {
    "model": "llama-3.2-1b", "gpu": "h100", "gpus": 2, "lora": "16", "quantize": "nf4", "top": 1,
}  # fmt: skip


@pytest.mark.parametrize("framework", ["fsdp2", "hf", "ddp", "deepspeed"])
def test_frameworks_to_which_a_refused_quantised_base_is_sent_have_one(framework: str) -> None:
    assert memcalc.plan(framework=framework, **QUANTISED, advice=False).plans


@pytest.mark.parametrize("form", ["trainer", "accelerate", "axolotl", "deepspeed"])
def test_formats_to_which_a_refused_quantised_base_is_sent_write_one(form: str) -> None:
    assert plan_to(form, **QUANTISED, advice=False).plans


def test_the_frozen_base_has_16_bits_and_no_states() -> None:
    """Of Llama 3 8B on two ranks: its 8,030,261,248 parameters, of which norms are on both.

    Adapters of rank 16 have 2 bytes, a gradient of 4, and 12 bytes of states over two data-parallel ranks.
    """
    found = estimate(lora="16", tp=2, gpus=4)
    norms, pairs = (2 * 32 + 1) * 4096, 32 * 16 * (4096 + 6144 + 4096 + 4096 + 4096 + 28672 + 14336 + 4096) // 2
    assert term(found, "frozen weights") == 2 * ((8_030_261_248 - norms) // 2 + norms)
    assert term(found, "adapters") == 2 * pairs
    assert found.components.gradients == 4 * pairs
    assert found.components.optimizer == 12 * pairs // 2


MLPERF: dict[str, Any] = {
    "model": "llama-2-70b", "framework": "megatron", "lora": "16:qkv,o", "precision": "fp8-mixed", "seq_len": 8192,
    "micro_batch": 1, "zero": 1, "attention": "cudnn", "recompute": "none",
}  # fmt: skip
EIGHT_BITS = {
    "workload.lora_dropout": 0.1, "strategy.cp_kind": "a2a", "strategy.float8": "delayed",
    "strategy.float8_all_gather": True, "strategy.float8_attention": True, "strategy.reduce_dtype": "bf16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "gpus", "cp", "activation", "measured"),
    [
        ("gb200", 72, 8, False, 82.323),
        ("gb200", 512, 8, False, 82.321),
        ("gb200", 36, 4, False, 99.573),
        ("gb200", 32, 4, False, 99.574),
        ("gb200", 16, 2, False, 134.083),
        ("gb200", 4, 2, False, 134.243),
        ("b200", 8, 1, True, 168.827),
        ("gb200", 8, 1, True, 168.83),
    ],
)
def test_the_peak_over_an_eight_bit_base_is_what_nemo_read(
    gpu: str, gpus: int, cp: int, activation: bool, measured: float
) -> None:
    """``max_memory_usage`` [GiB], which is ``max_memory_allocated``, in the logs of MLPerf Training v5.0.

    mlcommons/training_results_v5.0@0fdc28f0 NVIDIA, Dell and Oracle, llama2_70b_lora: adapters of rank 16 on linear_qkv
    and linear_proj, ``fp8_model_init``, FP8_DPA=1, FP8_ACT=1 where ``activation``.
    """
    settings = EIGHT_BITS | {"strategy.float8_activation": activation}
    batch = 8 if gpus == 4 else gpus // cp
    found = estimate(**MLPERF, gpu=gpu, gpus=gpus, cp=cp, global_batch=batch, settings=settings)
    assert found.peak.allocated / 2**30 == pytest.approx(measured, rel=0.002)
    assert found.verdict in ("fits", "tight")


def test_an_eight_bit_base_has_no_copy_in_16_bits_but_of_its_ends() -> None:
    """80 blocks of 8192 x 10240 + 8192 x 8192 + 3 x 8192 x 28672 weights; the ends and 161 norms have 2 bytes."""
    found = estimate(**MLPERF, gpu="gb200", gpus=72, cp=8, global_batch=9, settings=EIGHT_BITS)
    linear = 80 * (8192 * 10240 + 8192 * 8192 + 3 * 8192 * 28672)
    assert term(found, "quantised weights") == linear
    assert term(found, "frozen weights") == 2 * (2 * 32000 * 8192 + 161 * 8192)
    beside = estimate(
        **MLPERF, gpu="gb200", gpus=72, cp=8, global_batch=9,
        settings=EIGHT_BITS | {"strategy.float8_all_gather": False},
    )  # fmt: skip
    assert term(beside, "frozen weights") == term(found, "frozen weights") + 2 * linear


def test_operators_that_transformer_engine_fuses_keep_less_of_adapters() -> None:
    """Of 8,192 tokens of 80 blocks: no 8-bit norm's output but the first's, and a bit of each mask where a byte was."""
    words = {**MLPERF, "gpu": "gb200", "gpus": 8, "global_batch": 8}
    plain, fused = (
        estimate(**words, settings=EIGHT_BITS | {"strategy.lora_kernels": kernels}).peak.allocated
        for kernels in ("model", "fused")
    )
    token = 8192 * 8192
    assert plain - fused == pytest.approx(80 * token + 2 * 80 * token * 7 / 8, rel=0.02)
    with pytest.raises(CombinationError, match="give --tp 1"):
        estimate(lora="16:qkv,o", tp=2, settings={"strategy.lora_kernels": "fused"})


def test_a_frozen_base_is_not_gathered_after_a_step() -> None:
    """The distributed optimizer has adapters alone: 89 MB of them go round, where 138 GB of weights would take 1 s."""
    found = estimate(
        **MLPERF, gpu="b200", gpus=8, global_batch=8, settings=EIGHT_BITS | {"strategy.float8_activation": True}
    )
    assert found.time.messages.data < 0.01


def test_the_vendor_s_recipe_fits_with_its_recomputation_alone() -> None:
    """Llama 3 70B on 8 H100: linear_qkv alone, four stages of 20 chunks, each of one block that is computed again."""
    words = {"lora": "16:qkv", "pp": 4, "vpp": 20, "gpus": 8, "global_batch": 32, "pp_schedule": "interleaved"}
    settings = {"strategy.expandable_segments": True, "strategy.reduce_dtype": "bf16"}
    verdicts = [
        estimate("llama-3-70b", **words, settings=settings, recompute=policy).verdict for policy in ("full", "none")
    ]
    assert verdicts == ["fits", "does-not-fit"]


def test_a_search_takes_the_layouts_that_divide_the_rank() -> None:
    plans = memcalc.plan(model="llama-3-70b", **{**MEGATRON, "gpus": 8}, lora="4", advice=False).plans
    assert {plan.strategy.tp for plan in plans} <= {1, 2, 4}
    assert any(plan.strategy.tp > 1 for plan in plans)
    assert {plan.strategy.lora for plan in plans} == {"4:qkv,o,gate_up,down"}


def test_a_search_of_ranks_that_nothing_divides_says_so() -> None:
    with pytest.raises(CombinationError, match="splits its rank over 4"):
        memcalc.plan(model="llama-3-8b", **{**MEGATRON, "gpus": 8}, lora="2", tp=4)


def test_frozen_layers_make_no_gradient_of_their_weight() -> None:
    """Two products of each matrix, not three, less what adapters add: full training takes 1.4 times as long or more."""
    full = estimate(tp=2, gpus=8, global_batch=64).time
    frozen = estimate(tp=2, gpus=8, global_batch=64, lora="16:qkv", settings=SWIFT).time
    assert full is not None
    assert frozen is not None
    assert 1.2 < full.compute / frozen.compute < 1.5
