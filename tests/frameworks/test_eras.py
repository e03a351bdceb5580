"""Which habits an era has: a version, or a month of the releases; a time that nobody read has none."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.errors import CombinationError, InputError
from memcalc.frameworks import fsdp, habits_of, megatron


@pytest.mark.parametrize(
    ("era", "habits"),
    [
        ("2021-05", megatron.LOCAL), ("2022-05", megatron.CONTIGUOUS), ("2024-03", megatron.CORE_05),
        ("2024-12", megatron.CORE_05), ("2025-01", megatron.CORE_10), ("2025-05", megatron.CORE_11),
        ("2025-09", megatron.CORE), ("core-0.12", megatron.CORE_11), ("core-0.20", megatron.CORE),
    ],
)  # fmt: skip
def test_a_month_has_the_habits_of_the_core_of_that_time(era: str, habits: object) -> None:
    """Megatron-LM's core/package_info.py: 0.5 until 2024-03-21, 0.10 until 2025-01-20, 0.11 until 2025-02-13."""
    assert habits_of(f"megatron@{era}") is habits


def test_a_month_of_ddp_is_that_of_pytorchs_release() -> None:
    """PyTorch 2.7 came in April 2025 and 2.8 on 6 August 2025; each month was the newest release's."""
    assert habits_of("ddp@2024-11") is habits_of("ddp@2025-07") is habits_of("ddp@2.7") is fsdp.DDP_24
    assert habits_of("ddp@2025-08") is habits_of("ddp") is fsdp.DDP


@pytest.mark.parametrize("era", ["2022-06", "2023-06", "2024-02", "core-0.3"])
def test_a_time_that_nobody_read_is_refused(era: str) -> None:
    with pytest.raises(InputError, match="from 2022-06 until 2024-03: the nearest are megatron@2022-01 and"):
        habits_of(f"megatron@{era}")


@pytest.mark.parametrize("era", ["0.8.0", "v0.8.0", "3.0"])
def test_a_version_that_is_not_the_cores_leads_to_one_that_is(era: str) -> None:
    with pytest.raises(InputError, match=f"megatron@core-{era.removeprefix('v')}"):
        habits_of(f"megatron@{era}")


@pytest.mark.parametrize(
    ("framework", "attention"),
    [
        ("hf@4.35", "eager"), ("hf@2023-11", "eager"), ("hf@4.36", "flash"), ("deepspeed@0.10", "eager"),
        ("deepspeed@2024-01", "flash"),
    ],
)  # fmt: skip
def test_classes_call_pytorchs_attention_since_transformers_4_36(framework: str, attention: str) -> None:
    """Transformers' issue 28005: "In Transformers 4.36, we started adding native support of" it, by default."""
    job: dict[str, Any] = {"model": "llama-2-7b", "gpu": "h200", "gpus": 1, "seq_len": 512, "framework": framework}
    assert memcalc.estimate(**job, lora="8:q,v").strategy.attention == attention
    assert memcalc.estimate(**job, lora="8:q,v", attention="flash").strategy.attention == "flash"


def test_a_report_of_2023_agrees_with_the_attention_of_its_time() -> None:
    """PEFT's issue 675 (2023-07-09), RoBERTa-large, 64 times 96 tokens: "around 17 GB"; BERT-large has its shape."""
    found = memcalc.estimate(
        model="bert-large", gpu="a100-80g", gpus=1, framework="hf@4.30", precision="fp32", micro_batch=64,
        global_batch=64, seq_len=96, recompute="none",
    )  # fmt: skip
    assert found.peak.device == pytest.approx(17e9, rel=0.05)


ALONE = [("2024-11", "fp32", 0), ("2026-02", "bf16-autocast", 0), ("2026-05", "bf16-mixed", 3)]
"""torchtitan of the month, what it computes in on a single GPU, and its stage there."""


@pytest.mark.parametrize(("era", "precision", "stage"), ALONE)
def test_torchtitan_mixes_precision_on_one_data_parallel_rank_as_of_its_time(
    era: str, precision: str, stage: int
) -> None:
    """parallelize_llama.py and maybe_enable_amp of 2024-11, 0.2.2 and main (00b7f5693 of April 2026, #2900)."""
    job: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "h200", "framework": f"torchtitan@{era}", "seq_len": 2048}
    single = memcalc.estimate(**job, gpus=1).strategy
    split = memcalc.estimate(**job, gpus=4, tp=4).strategy
    whole = stage == 3
    assert (single.precision, single.zero) == (precision, stage)
    assert (split.precision, split.zero) == ("bf16-mixed" if whole else "fp32", stage)
    assert memcalc.estimate(**job, gpus=4, tp=2).strategy.precision == "bf16-mixed"
    if not whole:
        for words in ({"precision": "bf16-mixed"}, {"zero": 3}, {"offload": "params"}):
            with pytest.raises(CombinationError, match="FSDP"):
                memcalc.estimate(**job, gpus=4, tp=4, **words)
        found = memcalc.plan(**job, gpus=4, top=20, advice=False)
        assert all(plan.strategy.dp * plan.strategy.cp > 1 for plan in found.plans)
        assert memcalc.plan(**job, gpus=1, advice=False).plans[0].strategy.precision == precision
