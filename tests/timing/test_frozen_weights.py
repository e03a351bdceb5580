"""Times of jobs with adapters: what a frozen weight needs, and what dequantising it costs, counted by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from covering import covering

import memcalc
from memcalc import api, catalog
from memcalc.formulas import quantization as quant
from memcalc.specs.options import SharedSettings
from memcalc.terms.tensors import block_matrices
from memcalc.timing.blocks import FORWARD, STEP, dequantised_bytes
from memcalc.timing.forecast import model_flops_per_token
from memcalc.timing.work import work_of
from memcalc.trace.layers import BlockConfig

LLAMA = api.load_model("llama-3-8b")
LINEAR = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
"""Weights of the linear layers in the 32 blocks of Llama 3 8B."""
ATTENTION = 12 * 32 * 4096 * 4096
"""Operations of attention a token at 4096 tokens, forward and backward, as PaLM counts them."""


def settings(**changes: Any) -> SharedSettings:
    return SharedSettings(seq_len=4096, global_batch=1, **changes)


def test_a_frozen_weight_needs_two_products_and_an_adapter_three() -> None:
    """4 operations a frozen weight and 6 a trained one: 2 forward, 2 for the input's gradient, 2 for its own."""
    adapters = 32 * 16 * ((4096 + 4096) + (4096 + 1024))
    frozen = 8_030_261_248
    assert model_flops_per_token(LLAMA, settings()) == 6 * frozen + ATTENTION
    assert model_flops_per_token(LLAMA, settings(lora="16:q,v")) == 4 * frozen + 6 * adapters + ATTENTION


def test_a_trained_copy_of_the_head_counts_in_full() -> None:
    head = 128_256 * 4096
    alone = model_flops_per_token(LLAMA, settings(lora="16:q,v"))
    assert model_flops_per_token(LLAMA, settings(lora="16:q,v", also_train=("head",))) == alone + 2 * head


def test_an_adapter_of_an_expert_counts_for_the_tokens_that_pass_it() -> None:
    """Mixtral 8x7B: two of eight experts; an adapter of rank 8 on the down projection is 8 x (14336 + 4096)."""
    mixtral = api.load_model("mixtral-8x7b")
    jobs = settings(lora="8:q"), settings(lora="8:q,down")
    bare, adapted = (model_flops_per_token(mixtral, job, stacked=False) for job in jobs)
    assert adapted - bare == 6 * 32 * 2 * 8 * (14336 + 4096)
    bare, adapted = (model_flops_per_token(mixtral, job, stacked=True) for job in jobs)
    assert adapted == bare


def test_stacked_experts_are_not_dequantised() -> None:
    """Of Mixtral's blocks bitsandbytes then turns attention alone into 16 bits: a small part of its weights."""
    job: dict[str, Any] = {"model": "mixtral-8x7b", "gpu": "h200", "gpus": 2, "lora": "8:q,v", "recompute": "full"}
    stacked, wide = (memcalc.estimate(**job, quantize=kind).time.step for kind in ("nf4", "none"))
    layered = memcalc.estimate(**job, quantize="nf4", framework="hf@4.49").time.step
    assert abs(stacked - wide) < 0.05 * wide
    assert layered > 1.1 * wide


def test_a_window_limits_what_a_token_attends_to() -> None:
    """Mistral 7B v0.1: 4096 of 32768 tokens."""
    mistral = api.load_model("mistral-7b-v0.1")
    far = mistral.main.block.attention.window
    long = model_flops_per_token(mistral, SharedSettings(seq_len=32768, global_batch=1))
    assert far == 4096
    assert long == model_flops_per_token(mistral, settings())


ADAPTED = ["rtx-3090", "a100-80g", "h100", "l40s", "v100-32g"], ["none", "nf4", "nf4-dq", "int8"], [512, 4096]
PAIRS = covering(2, *ADAPTED)


@pytest.mark.parametrize(
    ("gpu", "quantize", "seq_len"),
    [pytest.param(*job, marks=() if job in PAIRS else pytest.mark.slow) for job in product(*ADAPTED)],
)
def test_no_job_with_adapters_uses_more_than_the_card_has(gpu: str, quantize: str, seq_len: int) -> None:
    """Nor more than the share of the peak that products reach on it."""
    job = {"model": "llama-3-8b", "gpu": gpu, "gpus": 1, "seq_len": seq_len, "framework": "hf"}
    answer = memcalc.plan(**job, lora="16", quantize=quantize, top=3, advice=False)
    share = catalog.step_time().value("matmul", gpu, catalog.gpu(gpu).arch.split()[0], "any")
    assert all(plan.time.mfu < share for plan in answer.plans)


# ------------------------------------------------------------------------------------------------------ dequantisation


def test_a_profile_of_dequantisation_is_met() -> None:
    """QLoRA of Llama 3.1 8B on an L40S, full recomputation: 2,872 ms of ``kDequantizeBlockwise`` in 48 micro-batches.

    864 GB/s by the data sheet; 2,870 ms under nsys. Source: sairameshpv/lightserve@ca88463, training/qlora_financial,
    the report of its profiles. The kernel reads half a byte and a 64th of an fp32 scale a weight, and writes two
    bytes; each weight is dequantised three times: in forward, for the forward that backward repeats, and for the
    input's gradient.
    """
    measured = 2.872 / 48
    by_hand = 3 * LINEAR * (0.5 + 4 / 64 + 2)
    setting = BlockConfig(quantize="nf4")
    matrices = block_matrices(LLAMA.main.block)
    assert (
        32 * (dequantised_bytes(matrices, setting, 0, STEP) + dequantised_bytes(matrices, setting, 0, FORWARD))
        == by_hand
    )
    assert by_hand / catalog.gpu("l40s").bandwidth_bytes_per_s == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "step", "forward"),
    [
        ("nf4", 2 * (0.5 + 4 / 64 + 2), 0.5 + 4 / 64 + 2),
        # a byte a scale and four for 256 of them are read; fp32 scales are written, read and written, and read
        ("nf4-dq", 2 * (0.5 + 1 / 64 + 4 / 16384 + 16 / 64 + 2), 0.5 + 1 / 64 + 4 / 16384 + 16 / 64 + 2),
        # forward multiplies integers; backward reads one byte, writes two, reads and writes two for the scales
        ("int8", 7 + 4 / 4096, 0),
    ],
)
def test_bytes_a_weight(kind: str, step: float, forward: float) -> None:
    matrix = next(m for m in block_matrices(LLAMA.main.block) if m.target == "q")
    setting, elements = BlockConfig(quantize=kind), 4096 * 4096
    assert dequantised_bytes([matrix], setting, 0, STEP) == step * elements
    assert dequantised_bytes([matrix], setting, 0, FORWARD) == forward * elements
    assert dequantised_bytes([matrix], BlockConfig(), 0, STEP) == 0


def test_a_quantised_base_is_slower_than_a_16_bit_one() -> None:
    """The difference is that traffic, whatever the micro-batch, so that larger ones share it."""
    job = {"model": "llama-3-8b", "gpu": "a100-80g", "gpus": 1, "framework": "hf", "lora": "16", "recompute": "full"}
    lost = []
    for micro_batch in (1, 8):
        steps = {}
        for quantize in ("none", "nf4"):
            one = api.single(**job, quantize=quantize, micro_batch=micro_batch, global_batch=micro_batch, seq_len=1024)
            steps[quantize] = one.time().step
        lost.append(steps["nf4"] - steps["none"])
        assert lost[-1] > 0
    assert lost[1] < 2 * lost[0], "not with the tokens"


def test_dequantisation_is_not_counted_among_what_kernels_write() -> None:
    job = api.single(
        model="llama-3-8b", gpu="a100-80g", gpus=1, framework="hf", lora="16", quantize="nf4", seq_len=1024
    )
    work = work_of(job.census, job.job.node)
    copies = 2 * 2 * LINEAR
    assert float(work.once.dequantised.sum()) == 2 * LINEAR * (0.5 + 4 / 64 + 2)
    bare = api.single(model="llama-3-8b", gpu="a100-80g", gpus=1, framework="hf", lora="16", seq_len=1024)
    more = float(work.once.written.sum() - work_of(bare.census, bare.job.node).once.written.sum())
    assert more < copies / 4, "what PEFT clones and casts, without the 16-bit weights"


# ---------------------------------------------------------------------------------------------------- what is validated


@pytest.mark.parametrize(
    ("gpu", "quantize", "doubt"),
    [
        ("a100-80g", "none", ""),
        ("a100-80g", "nf4-dq", "nf4 adapters on Ampere"),
        ("a100-80g", "int8", "int8 adapters on Ampere"),
        ("h100", "none", "16-bit adapters on Hopper"),
        ("rtx-3090", "nf4", "too few runs on rtx-3090"),
    ],
)
def test_times_of_adapters_are_validated_where_runs_had_them(gpu: str, quantize: str, doubt: str) -> None:
    job = api.single(
        model="llama-3-8b", gpu=gpu, gpus=1, framework="hf", lora="16", quantize=quantize, recompute="full"
    )
    time = job.time()
    assert time.validated == (not doubt)
    assert doubt in time.basis
    bare = api.single(model="llama-3-8b", gpu=gpu, gpus=1, framework="hf", recompute="full").time()
    assert (time.high - time.low) / time.step >= (bare.high - bare.low) / bare.step * (1 - 1e-9)


def test_formula_of_dequantisation_adds_up() -> None:
    elements = 4096 * 14336
    stored = quant.four_bit_bytes(elements) + quant.nf4_state_bytes(elements, 1)
    extra = quant.dequantisation_bytes(stored, elements, 1) - quant.dequantisation_bytes(stored, elements)
    assert extra == 16 * elements // 64
    assert (
        quant.dequantisation_bytes(stored, elements, casts=1) - quant.dequantisation_bytes(stored, elements)
        == 4 * elements
    )
