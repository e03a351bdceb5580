"""The guard's limits of recomputation and accumulation, runs without a plan, and steps that can be exported."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memcalc
from memcalc.errors import CombinationError, InputError
from memcalc.handoff.saved import saved_plan
from memcalc.probe.guard import Reading
from memcalc.probe.guard.ladder import AllowedActions, Ladder, ladder_of
from memcalc.probe.guard.options import Options, settings_for
from memcalc.probe.guard.watch import Watch
from memcalc.probe.live import guard_torch
from memcalc.results.plans import SavedPlan
from memcalc.specs.strategy import Strategy

GIB = 2**30
JOB: dict[str, Any] = {
    "model": "gpt2", "gpu": "a100-40g", "gpus": 1, "global_batch": 8, "framework": "hf", "precision": "bf16-autocast",
    "offload": "none", "top": 1, "micro_batch": "1/2/4", "recompute": "none/every-2/full",
}  # fmt: skip


@pytest.fixture(scope="module")
def saved() -> SavedPlan:
    """Return a plan of micro-batch 4, with accumulation 2, without recomputation."""
    return saved_plan(memcalc.plan(**JOB))


class Steady:
    """A meter that always reads the same."""

    def __init__(self, reserved: float, allocated: float = 0.0) -> None:
        size, used = int(reserved * GIB), int((allocated or reserved) * GIB)
        self.reading = Reading(used, used, size, size)

    def read(self) -> Reading:
        """Return it."""
        return self.reading

    def reset_peaks(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


def watched(plan: Any, steps: int = 1, **options: Any) -> Watch:
    """Return a watch that has seen so many steps, with a report after each."""
    watch = Watch(plan, Options(every=1, **options))
    with watch:
        for _ in range(steps):
            _ = watch.micro_batch
            watch.step_done()
    return watch


def test_no_step_has_more_accumulation_than_its_limit(saved: SavedPlan, caplog: pytest.LogCaptureFixture) -> None:
    free = watched(saved, 3, on_pressure="step", meter=Steady(39))
    assert free.plan is not None
    assert free.plan.accumulation_steps == 8
    limited = watched(saved, 3, on_pressure="step", accumulation_limit=4, meter=Steady(39))
    assert limited.plan is not None
    assert limited.plan.accumulation_steps == 4
    said = caplog.messages[-1]  # of the fallbacks that are left, the first with at most four micro-batches
    assert "next: micro-batch 4 → 2, recompute none → every-2" in said


def test_a_step_above_the_limit_of_accumulation_is_said(saved: SavedPlan, caplog: pytest.LogCaptureFixture) -> None:
    watched(saved, 3, accumulation_limit=1, meter=Steady(1))
    said = [record.getMessage() for record in caplog.records if "accumulation takes" in record.getMessage()]
    assert said == ["step 1: accumulation takes 2 micro-batches, above 1."]


@pytest.mark.parametrize(("limit", "over"), [(1e9, 0), (1e-9, 1)])
def test_recomputation_has_a_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: float, over: int) -> None:
    lines, layer = tmp_path / "guard.jsonl", nn.Linear(8, 8)
    watch = Watch(None, Options(every=1, recompute_limit=limit, jsonl=str(lines)))
    with watch:
        for _ in range(2):
            checkpoint(layer, torch.randn(4, 8), use_reentrant=False).sum().backward()
            watch.step_done()
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["recompute_over"] for record in records] == [over, over]
    assert ("recompute takes" in caplog.text) == bool(over)


def test_what_recomputes_too_long_recomputes_no_more(saved: SavedPlan) -> None:
    """Under pressure the next plan is then one with a smaller micro-batch and the same recomputation."""
    watch = Watch(saved, Options(on_pressure="step", meter=Steady(39)))
    with watch:
        assert not watch._allowed_actions(micro_batch=True, recompute=False).recompute("full")
    ladder = ladder_of(saved)
    plan = ladder.live(saved.plan, AllowedActions(micro_batch=True, recompute=lambda _: False))
    assert plan is not None
    assert (plan.strategy.recompute, plan.strategy.micro_batch < 4) == ("none", True)


def test_a_run_without_a_plan_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = tmp_path / "guard.jsonl"
    monkeypatch.setattr(guard_torch, "device_bytes", lambda: 40 * GIB)
    options = {"micro_batch": 2, "accumulation_steps": 4, "name": "mine", "jsonl": str(lines)}
    watch = watched(None, 2, meter=Steady(39), **options)
    assert watch.limit == int(0.95 * 40 * GIB)
    record = json.loads(lines.read_text().splitlines()[0])
    assert (record["plan"], record["micro_batch"], record["accumulation_steps"]) == ("mine", 2, 4)
    assert (record["pressure"], record["cuda_memory_reserved_peak"]) == (1, 39 * GIB)
    assert record["predicted_reserved_peak"] is record["reserved_difference"] is record["recompute"] is None
    assert "there is no plan to go over to" in caplog.text
    assert [len(part) for part in watch.split(torch.zeros(8, 1))] == [2, 2, 2, 2]
    assert watched(None, 1, threshold="30 GiB", meter=Steady(39), **options).limit == 30 * GIB


def test_a_gpu_of_unknown_size_has_no_limit_of_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    if torch.cuda.is_available():
        pytest.skip("this machine's GPU has a size")
    watch = watched(None, 1, meter=Steady(1000), micro_batch=1)
    assert watch.limit is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        (False, {"on_pressure": "step"}, "there is no plan to go over to"),
        (False, {"restart_dir": "next"}, "there is no plan to go over to"),
        (True, {"micro_batch": 2}, "the plan says it"),
    ],
)
def test_what_needs_a_plan_or_none_is_refused(saved: SavedPlan, plan: bool, options: dict[str, Any], said: str) -> None:
    with pytest.raises(CombinationError, match=said):
        Watch(saved if plan else None, Options(**options))


@pytest.mark.parametrize("options", [{"accumulation_limit": 0}, {"recompute_limit": 0.0}, {"micro_batch": -1}])
def test_a_limit_is_a_positive_number(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        Options(**options)
    with Watch(None, Options()) as watch, pytest.raises(InputError, match="must be given where there is no plan"):
        _ = watch.micro_batch


def test_every_step_can_be_exported(saved: SavedPlan) -> None:
    watch = Watch(saved, Options(every=1, on_pressure="step", meter=Steady(39)))
    sizes = []
    with watch:
        for _ in range(2):
            _ = watch.micro_batch
            watch.step_done()
            assert watch.saved is not None
            text = memcalc.export(watch.saved, to="trainer")["training_args.json"]
            sizes.append(json.loads(text)["per_device_train_batch_size"])
    assert sizes == [2, 1]


def test_a_step_that_no_format_can_say_is_left_out(saved: SavedPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = AllowedActions(micro_batch=True, recompute=lambda _: True)
    first = ladder_of(saved).live(saved.plan, allowed)
    assert first is not None
    monkeypatch.setattr(Ladder, "can_export", lambda _, plan: plan.strategy != first.strategy)
    other = ladder_of(saved).live(saved.plan, allowed)
    assert other is not None
    assert other.strategy != first.strategy


def test_settings_are_named_where_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.13 MixedPrecision of FSDP 1 has buffer_dtype, MixedPrecisionPolicy of FSDP 2 has not."""
    from dataclasses import fields

    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    assert "buffer_dtype" in {field.name for field in fields(MixedPrecision)}
    assert "buffer_dtype" not in {field.name for field in fields(MixedPrecisionPolicy)}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    pieces, full = Steady(10, 5).read(), Steady(10, 9.5).read()
    one, two = Strategy(framework="fsdp1", zero=3), Strategy(framework="fsdp2", zero=3)
    (said,) = settings_for(pieces, two, GIB)
    assert "5.00 GiB" in said
    assert "max_split_size_mb" in said
    assert ["buffer_dtype" in text for text in settings_for(full, one, GIB)] == [True]
    assert list(settings_for(full, two, GIB)) == list(settings_for(full, one, 0)) == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert not list(settings_for(pieces, two))


def test_a_trainer_without_a_plan_says_its_sizes() -> None:
    watch = Watch(None, Options())
    watch.check_sizes(micro_batch=("batch_size", 3), accumulation_steps=("accumulate_grad_batches", 5))
    assert (watch.micro_batch, watch.accumulation_steps) == (3, 5)
