"""A plan is one only if it can do what the job is told to do beside its steps."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.planner import limit_grid
from memcalc.planner.stage_peaks import Peaks, peaks_of
from memcalc.results.plans import Plans

JOB = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "seq_len": 4096, "framework": "hf", "global_batch": 64}
LARGE = {"workload.eval_micro_batch": 32}
SAVES = {"model": "llama-2-13b", "gpu": "a100-40g", "gpus": 64, "framework": "fsdp2", "seq_len": 1024, "zero": 3}


def planned(settings: dict[str, Any], **words: Any) -> Plans:
    """The plans of a job with some fields."""
    return memcalc.plan(**{**JOB, **words}, settings=settings)


def test_an_evaluation_that_fits_leaves_the_plans_as_they_are() -> None:
    plain, evaluating = planned({}), planned({"workload.eval_micro_batch": 1})
    assert plain.plans
    assert [plan.strategy for plan in plain.plans] == [plan.strategy for plan in evaluating.plans]
    assert not evaluating.too_large


@pytest.mark.slow
def test_no_plan_is_one_whose_evaluation_does_not_fit() -> None:
    """32 sequences a rank have 32 x 4096 rows of 128256 logits, of which bf16 alone are 31 GiB and fp32 63."""
    refused = planned(LARGE)
    assert not refused.plans
    assert "between steps" in refused.too_large
    assert "evaluation of 32 sequences" in refused.too_large


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full-on-gpu", "sharded"])
def test_each_plan_gets_the_verdict_of_its_estimate(form: str) -> None:
    told = {"strategy.state_dict": form}
    plans = memcalc.plan(**SAVES, global_batch=64, settings=told, advice=False).plans
    assert bool(plans) is (form == "sharded")  # 13 billion weights of 4 bytes are more than 40 GB
    for plan in plans[:2]:
        fields = {name: getattr(plan.strategy, name) for name in ("recompute", "micro_batch", "offload", "tp", "cp")}
        estimate = memcalc.estimate(**SAVES, global_batch=64, **fields, settings=told)
        assert estimate.verdict == plan.verdict


def test_a_limit_ends_where_the_save_does_not_fit() -> None:
    words = {key: value for key, value in SAVES.items() if key != "seq_len"}
    told = {"strategy.state_dict": "full-on-gpu"}
    answers = [memcalc.largest("micro-batch", **words, seq_len=1024, settings=form).answer for form in ({}, told)]
    assert answers[0] is not None
    assert answers[1] is None


def test_what_fits_on_no_number_of_gpus_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that no sharding makes fit decides on each strategy; the one that is shown has its figures."""
    shown: list[bool] = []

    def counted(*args: Any, only_safe: bool) -> Peaks:
        shown.append(not only_safe)
        return peaks_of(*args, only_safe=only_safe)

    monkeypatch.setattr(limit_grid, "peaks_of", counted)
    words = {"model": "llama-3.2-1b", "gpu": "a100-40g", "framework": "fsdp2", "zero": 3, "offload": "none"}
    fewest = memcalc.smallest("gpus", **words, up_to=4, settings={"workload.eval_micro_batch": 64})
    assert (fewest.answer, shown) == (None, [True])


def test_what_is_asked_for_and_not_modelled_is_said() -> None:
    words = {"framework": "megatron", "precision": "bf16-mixed"}
    warnings = planned({"workload.resumes": True}, **words).warnings
    assert sum(warning.startswith("resuming is not counted: workload.resumes") for warning in warnings) == 1
