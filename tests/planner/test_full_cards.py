"""A card that is full: nothing above what it has, how often the cache is given back, what expandable segments do."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

import memcalc
from memcalc.frameworks import grows_segments
from memcalc.planner.stage_peaks import flushes_of
from memcalc.report import render
from memcalc.report.estimate import report
from memcalc.results.estimates import Estimate
from memcalc.runs import read_runs
from memcalc.units import GIB
from memcalc.validation import Presets, predict

FULL = ("fms-007", "fms-011", "fmsliger-015", "fmsliger-016", "fmsliger-019")
"""Runs of fms-acceleration that filled their A100: what nvidia-smi shows is less than the step asked for."""
FREED = "frees its cache"


@cache
def run(name: str) -> Any:
    return next(run for run in read_runs().run if run.id == name)


@cache
def predicted(name: str) -> Estimate:
    return predict(run(name), Presets())


@pytest.mark.parametrize("name", FULL)
def test_a_run_on_a_full_card_is_tight_and_not_above_it(name: str) -> None:
    """Its figure lies between what is live and the whole card (c10/cuda/CUDACachingAllocator.cpp, `malloc`)."""
    found, measured = predicted(name), run(name).measured.figures["device"]
    assert found.verdict == "tight"
    assert (found.flushes > 0) is (name != "fmsliger-019")  # whose cache is given back in the first step alone
    assert all(stage.device <= found.budget.capacity for stage in found.stages)
    assert found.interval.high == found.budget.capacity
    # nvidia-smi shows up to 0.2% more than what the driver calls the card's memory
    assert found.interval.low <= measured <= 1.002 * found.interval.high


def test_the_same_run_on_a_larger_card_gives_nothing_back() -> None:
    job = run("fms-007")
    larger = predict(job.model_copy(update={"gpu_memory": 2 * predicted("fms-007").budget.capacity}), Presets())
    assert (larger.verdict, larger.flushes) == ("fits", 0)
    assert larger.peak.reserved > predicted("fms-007").peak.reserved
    assert not any(FREED in warning for warning in larger.warnings)


def test_the_answer_says_how_often_the_cache_goes() -> None:
    found = predicted("fms-007")
    text = render(report(found), "plain")
    assert f"{FREED} once per step" in text.splitlines()[0]
    assert f"{FREED} 4 times per step" in render(report(found.model_copy(update={"flushes": 4})), "plain")


@pytest.mark.parametrize("name", ["B13-017", "BLM-028"])
def test_what_is_live_decides_where_nothing_is_replayed(name: str) -> None:
    """Two runs of BigScience that ran: their tensors fit, and the cache beside them can be given back."""
    found = predicted(name)
    assert found.peak.allocated + found.budget.context + found.budget.libraries <= found.budget.capacity
    assert (found.verdict, found.flushes) == ("tight", 1)
    assert found.peak.device == found.budget.capacity
    lesser = found.peak.allocated + found.budget.context
    assert predict(run(name).model_copy(update={"gpu_memory": lesser}), Presets()).verdict == "does-not-fit"


def test_flushes_are_those_of_a_step_after_the_first() -> None:
    """Two steps of a pipeline with two micro-batches in flight: F F B F B B, and one retry at each of some marks."""
    step = ["forward-last", "forward-last", "loss", "forward-last", "loss", "loss", "step"]
    marks = ["start", *step, *step]
    retries = dict.fromkeys(range(len(marks)), 0) | {7: 5, 9: 1, 11: 2, 13: 1}

    def replay() -> Any:
        seen, at = 0, []
        for index, name in enumerate(marks):
            at.append((name, seen))
            seen += retries[index]
        return SimpleNamespace(retries=seen, retries_at=tuple(at))

    # retries at mark 7 are the first step's update; of the second step's micro-batches each further one is F, B: 2
    assert flushes_of(replay(), 3) == 1 + 2 + 1
    assert flushes_of(replay(), 10) == 1 + 2 + 1 + 7 * 2


def test_expandable_segments_are_named_where_they_make_a_job_fit() -> None:
    job = {
        "model": "llama-2-7b", "gpu": "rtx-4090", "gpus": 8, "framework": "fsdp2", "zero": 3, "seq_len": 12288,
        "micro_batch": 2, "recompute": "full", "lora": True, "precision": "bf16",
    }  # fmt: skip
    found = memcalc.estimate(**job)
    growing = memcalc.estimate(**job, settings={"strategy.expandable_segments": True})
    assert (found.verdict, found.expandable_verdict, growing.verdict) == ("tight", "fits", "fits")
    assert found.expandable_device == growing.peak.device
    text = " ".join(render(report(found), "plain").split())
    variable, less = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", f"{growing.peak.device / GIB:.1f} GiB"
    assert f"with {variable} the total is {less}, which fits" in text


HOLED = {
    "model": "llama-3.2-1b", "gpu": "a100-40g", "gpus": 1, "framework": "hf", "seq_len": 3000, "micro_batch": 4,
    "global_batch": 4, "recompute": "full",
}  # fmt: skip
"""What is live at once fits in its card, and a request of logits fails for the holes between it."""


def test_expandable_segments_are_named_where_holes_alone_stop_a_job() -> None:
    """A segment that grows has no holes of the sizes that an earlier step asked for, so that the request is met."""
    found = memcalc.estimate(**HOLED)
    growing = memcalc.estimate(**HOLED, settings={"strategy.expandable_segments": True})
    assert found.budget.usable > found.peak.allocated, "nothing but holes stops it"
    assert (found.verdict, growing.verdict) == ("does-not-fit", "tight")
    assert (found.expandable_verdict, found.expandable_device) == (growing.verdict, growing.peak.device)
    text = " ".join(render(report(found), "plain").split())
    assert f"expandable_segments:True the total is {growing.peak.device / GIB:.1f} GiB, which is tight" in text


def test_no_segments_cure_what_a_job_is_told_to_do_beside_its_steps() -> None:
    """Evaluation of 64 sequences needs more than the card has, whatever its segments are."""
    beside = {"workload.eval_micro_batch": 64}
    found = memcalc.estimate(**HOLED, settings=beside)
    growing = memcalc.estimate(**HOLED, settings={**beside, "strategy.expandable_segments": True})
    assert growing.verdict == found.verdict == "does-not-fit"
    assert found.expandable_verdict in (None, "does-not-fit")
    assert "which is tight" not in render(report(found), "plain")


def test_expandable_segments_are_not_named_before_pytorch_has_them() -> None:
    """They came with PyTorch 2.1, of October 2023."""
    assert [grows_segments(f"litgpt@{month}") for month in ("2023-09", "2023-10")] == [False, True]
    assert [grows_segments(f"fsdp1@{version}") for version in ("2.0", "2.1")] == [False, True]
    assert not grows_segments("deepspeed@0.10")
    assert grows_segments("megatron@core-0.5")
    assert predicted("B13-015").expandable_verdict is None


def test_a_plan_says_that_the_cache_goes_and_what_keeps_it() -> None:
    """The run fms-007, left to the search."""
    found = memcalc.plan(
        model="mistral-7b-v0.1", gpu="a100-80g", gpus=1, framework="hf@4.48", seq_len=4096, micro_batch=8,
        global_batch=8, precision="bf16", zero=0, recompute="full", attention="flash", loss="standard", kernels="model",
        offload="none", settings={"strategy.checkpoint": "reentrant", "strategy.autocast": False},
    )  # fmt: skip
    (plan,) = found.plans
    assert (plan.verdict, plan.flushes) == ("tight", 1)
    assert plan.why.endswith("Tight: cached memory fills the rest of the GPU, and PyTorch frees it once per step.")
    assert "--set strategy.expandable_segments=true" in {remedy.change for remedy in found.nearest}
