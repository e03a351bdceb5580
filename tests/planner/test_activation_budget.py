"""The budget worked backwards, and recomputation that is not worth its time."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc

JOB: dict[str, Any] = {"model": "llama-2-7b", "gpu": "a100-40g", "gpus": 8, "zero": 3, "precision": "bf16-mixed"}


def test_the_states_are_the_textbooks_and_the_rest_is_room() -> None:
    """P = 6,738,415,616 in fp32 shards on 8 ranks: 4 P / 8 of weights and of gradients, 8 P / 8 of moments."""
    found = memcalc.estimate(**JOB, seq_len=4096, micro_batch=1)
    room, count = found.activation_budget, 6_738_415_616
    assert room is not None
    for size, shares in ((room.parameters, 4), (room.gradients, 4), (room.optimizer, 8)):
        assert size == pytest.approx(shares * count / 8, rel=1e-3)
    held = room.parameters + room.gradients + room.optimizer + room.buffers + room.cache
    assert room.available == found.budget.usable - held - room.margin
    assert 0 < room.activations <= room.available or found.verdict != "fits"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_micro_batch_that_fits_does_and_is_near_the_largest(recompute: str) -> None:
    """The closed form may be more careful than a replay, by less than a factor of two."""
    words = {**JOB, "seq_len": 2048, "recompute": recompute}
    room = memcalc.estimate(**words, micro_batch=1, global_batch=768).activation_budget
    assert room is not None
    assert memcalc.estimate(**words, micro_batch=room.micro_batch, global_batch=768).verdict == "fits"
    degrees = {"tp": 1, "pp": 1, "cp": 1, "offload": "none", "global_batch": 768}
    largest = memcalc.largest("micro-batch", **words, **degrees).answer
    assert room.micro_batch <= int(str(largest)) < 2 * room.micro_batch


def test_the_segments_that_would_do_do() -> None:
    words = {**JOB, "seq_len": 4096, "micro_batch": 4}
    tight = memcalc.estimate(**words)
    assert tight.verdict == "does-not-fit"
    assert tight.activation_budget is not None
    segments = tight.activation_budget.segments
    assert segments is not None
    assert 32 % segments == 0
    assert memcalc.estimate(**words, recompute=f"segments-{segments}").verdict == "fits"
    assert memcalc.estimate(**words, recompute=f"segments-{segments // 2}").verdict != "fits"


def test_what_fits_needs_no_segments_and_what_never_fits_has_none() -> None:
    small = memcalc.estimate(
        model="gpt2", gpu="a100-80g", gpus=1, framework="plain", precision="fp32"
    ).activation_budget
    assert small is not None
    assert small.segments == 1
    large = memcalc.estimate(model="llama-2-70b", gpu="v100-16g", gpus=1, precision="fp16-mixed").activation_budget
    assert large is not None
    assert (large.segments, large.micro_batch) == (None, 0)
    assert large.available < 0


def warned(seq_len: int, recompute: str) -> list[str]:
    """On one GPU: over several, gathers of weights take longer than so short a pass, and hide what runs again."""
    words = {"model": "llama-3.2-1b", "gpu": "a100-80g", "micro_batch": 1, "global_batch": 1}
    found = memcalc.estimate(**words, seq_len=seq_len, recompute=recompute)
    return [text for text in found.warnings if "seldom worth it" in text]


def test_recomputation_of_short_sequences_is_warned_of() -> None:
    """Practitioners' rule: below some 512 tokens activations are too small to be worth a forward pass more."""
    assert "the job fits without it" in warned(256, "full")[0]
    assert not warned(4096, "full")
    assert not warned(256, "none")


def test_recomputation_without_which_a_job_does_not_fit_is_not_warned_of() -> None:
    """117B over 32 GPUs: 66 GiB of weights, gradients and states, beside which little is left to save, and counts."""
    job: dict[str, Any] = {"model": "gpt-oss-120b", "gpu": "h100", "gpus": 32, "framework": "megatron", "zero": 1}
    job |= {"tp": 8, "sp": True, "pp": 4, "micro_batch": 2, "global_batch": 128}
    without, full = (memcalc.estimate(**job, recompute=name) for name in ("none", "full"))
    assert (without.verdict == "fits", full.verdict) == (False, "fits")
    assert not [text for text in full.warnings if "seldom worth it" in text]


def test_a_plan_with_recomputation_that_was_asked_for_is_warned_of_too() -> None:
    words: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "a100-80g", "framework": "hf", "offload": "none"}
    words |= {"seq_len": 256, "global_batch": 1, "micro_batch": 1, "top": 1}
    asked_for = memcalc.plan(**words, recompute="full").warnings
    assert any("seldom worth it" in text for text in asked_for)
    assert not any("seldom worth it" in text for text in memcalc.plan(**words).warnings)


def test_the_front_has_a_plan_of_each_batch_that_none_beats() -> None:
    words: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "a100-80g", "gpus": 8, "offload": "none", "tp": 1}
    words |= {"pp": 1, "cp": 1, "zero": "2/3", "precision": "bf16-mixed", "seq_len": 4096}
    found = memcalc.plan(**words, global_batch="32/64/128", critical_batch="2M", top=8, advice=False)
    assert {plan.global_batch for plan in found.plans} == {32, 64, 128}
    best = {batch: next(p for p in found.plans if p.global_batch == batch) for batch in (32, 64, 128)}
    speeds = [best[batch].time.tokens_per_second_per_gpu for batch in (32, 64, 128)]
    assert speeds == sorted(speeds)  # the optimizer's step is shared by more tokens
    assert best[32].statistical_efficiency > best[128].statistical_efficiency
    assert {best[batch].rank for batch in (32, 64, 128)} <= set(found.pareto)
