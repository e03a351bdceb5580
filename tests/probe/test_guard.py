"""The guard: real steps of small models on the CPU, under pressure that a meter of the test's own makes."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import urllib.request
from collections import UserDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from command_lines import keywords
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import memcalc
from memcalc.errors import CombinationError, InputError, MemcalcError, RestartNeeded, UnknownNameError
from memcalc.handoff.saved import saved_alone, saved_plan
from memcalc.probe.guard import Reading
from memcalc.probe.guard.ladder import ladder_of, restarts_of
from memcalc.probe.guard.options import Options, PressureRule
from memcalc.probe.guard.reporter import GAUGES, Gauges, Window
from memcalc.probe.guard.watch import Watch
from memcalc.probe.live import guard_torch
from memcalc.probe.live.guard_torch import CudaMeter, RecomputeTimer, Switch
from memcalc.results.plans import Plan, SavedPlan
from memcalc.specs.strategy import Strategy

GIB = 2**30
JOB: dict[str, Any] = {
    "model": "gpt2",
    "gpu": "a100-40g",
    "gpus": 1,
    "global_batch": 8,
    "framework": "hf",
    "precision": "bf16-autocast",
    "offload": "none",
    "top": 1,
}
OPEN = {"micro_batch": "1/2/4", "recompute": "none/every-2/full"}


@pytest.fixture(scope="module")
def saved() -> SavedPlan:
    """Return a plan of micro-batch 4, with accumulation 2, without recomputation."""
    found = saved_plan(memcalc.plan(**JOB, **OPEN))
    assert (found.plan.strategy.micro_batch, found.plan.accumulation_steps) == (4, 2)
    assert found.plan.strategy.recompute == "none"
    return found


class Meter:
    """Readings that the test says, one a window; the last goes on."""

    def __init__(self, *reserved: float, retries: tuple[int, ...] = ()) -> None:
        self.reserved, self.retries = reserved, retries
        self.window = -1  # the first reset begins the first window
        self.released = 0

    def read(self) -> Reading:
        """Return the window's."""
        place = max(self.window, 0)
        reserved = int(self.reserved[min(place, len(self.reserved) - 1)] * GIB)
        retries = self.retries[min(place, len(self.retries) - 1)] if self.retries else 0
        return Reading(reserved // 2, reserved // 2, reserved, reserved, retries)

    def reset_peaks(self) -> None:
        """Go to the next window."""
        self.window += 1

    def release(self) -> None:
        """Count."""
        self.released += 1


def blocks(count: int = 4, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    one = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(width)) for _ in range(count)
    ]
    return nn.Sequential(nn.Linear(width, width), nn.Sequential(*one), nn.Linear(width, 1))


def tiny(seed: int = 0) -> Any:
    """Return a Transformers model of four blocks, with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False))


def train(watch: Watch, model: nn.Module, steps: int, *, seed: int = 1, rows: int = 8) -> list[float]:
    """Train as the guard says, and return the losses."""
    torch.manual_seed(seed)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        batch, total = torch.randn(rows, 8), 0.0
        for part in watch.split(batch):
            loss = model(part).square().mean() / watch.accumulation_steps
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        watch.step_done()
    return losses


# ------------------------------------------------------------------------------------------------------------ reports


def test_every_few_steps_a_record_is_told(saved: SavedPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "guard.jsonl"
    with (
        caplog.at_level(logging.INFO, "memcalc.guard"),
        memcalc.guard(saved, every=3, jsonl=str(path), meter=Meter(6.0, 7.5), name="a run") as watch,
    ):
        train(watch, blocks(), 7)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    peak = saved.plan.peak
    assert [row["step"] for row in rows] == [3, 6]
    assert [row["cuda_memory_reserved_peak"] for row in rows] == [6 * GIB, 7.5 * GIB]
    assert [row["reserved_difference"] for row in rows] == [6 * GIB - peak.reserved, 7.5 * GIB - peak.reserved]
    assert {row["schema"] for row in rows} == {"memcalc.guard/1"}
    assert rows[0]["allocated_difference"] == 3 * GIB - peak.allocated
    assert {key: rows[0][key] for key in ("predicted_device_peak", "accumulation_steps", "micro_batch", "plan")} == {
        "predicted_device_peak": peak.device,
        "accumulation_steps": 2,
        "micro_batch": 4,
        "plan": "a run",
    }
    lines = [one.message for one in caplog.records]
    assert len(lines) == 2
    words = dict(part.split("=", 1) for part in shlex.split(lines[1]))
    assert words.keys() == rows[1].keys() - {"schema"}
    assert (words["step"], words["plan"], words["accumulation_steps"]) == ("6", "a run", "2")


def test_without_a_device_nothing_is_made_up(saved: SavedPlan, tmp_path: Path) -> None:
    path = tmp_path / "guard.jsonl"
    with memcalc.guard(saved, every=1, jsonl=str(path), threshold=1) as watch:
        train(watch, blocks(), 1)
    row = json.loads(path.read_text(encoding="utf-8"))
    if not torch.cuda.is_available():
        assert row["cuda_memory_reserved_peak"] is None
        assert (row["reserved_difference"], row["pressure"]) == (None, 0)


def test_cuda_is_read_where_torch_says_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys and the functions are those that torch documents, nested as torch nests them."""
    said = " ".join((torch.cuda.memory_stats.__doc__ or "").split())
    for key in ("allocated_bytes.{all,large_pool,small_pool}.{current,peak", "reserved_bytes.{all", "num_ooms"):
        assert key in said
    assert '"num_alloc_retries"' in said
    stats = {
        "allocated_bytes": {"all": {"current": 1, "peak": 2}},
        "reserved_bytes": {"all": {"current": 3, "peak": 4}},
        "num_alloc_retries": 5,
        "num_ooms": 6,
    }
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", dict)
    assert CudaMeter().read() is None
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: stats)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    assert CudaMeter().read() == Reading(1, 2, 3, 4, 5, 6)
    CudaMeter(resets=False).reset_peaks()
    assert not calls
    CudaMeter().reset_peaks()
    assert calls == ["reset"]


# ---------------------------------------------------------------------------------------------------------- recompute


class Slow(nn.Module):
    """A block whose forward takes 5 ms of a clock that nothing else moves."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take the time."""
        Slow.now += 0.005
        return self.inner(x).tanh()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_recomputation_takes_what_its_blocks_take(
    reentrant: bool, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three blocks are checkpointed; what is computed once is not counted, nor what an outer one counts."""
    monkeypatch.setattr(guard_torch.time, "perf_counter", lambda: Slow.now)
    model, timer = nn.ModuleList([Slow(), Slow(), Slow()]), RecomputeTimer()

    def pair(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model[1], model[0](x), use_reentrant=reentrant)

    def step(*, again: bool) -> None:
        x = torch.ones(2, 4, requires_grad=True)
        if again and nested:
            x = checkpoint(pair, x, use_reentrant=reentrant)
        else:
            for block in model[:2]:
                x = checkpoint(block, x, use_reentrant=reentrant) if again else block(x)
        model[2](x).sum().backward()

    before = (guard_torch.checkpoints._CheckpointFrame, guard_torch.checkpoints.CheckpointFunction.backward)
    timer.install()
    try:
        assert timer.collect() is None
        timer.arm()
        step(again=False)
        assert timer.collect() == 0
        timer.arm()
        began = Slow.now
        step(again=True)
        took = 1e3 * (Slow.now - began)
        timer.disarm()
        step(again=True)
        told = timer.collect()
    finally:
        timer.remove()
    forward = 15  # ms of the three blocks; all beyond it was computed again
    assert told == pytest.approx(took - forward)
    assert told >= 10 - 1e-6
    after = (guard_torch.checkpoints._CheckpointFrame, guard_torch.checkpoints.CheckpointFunction.backward)
    assert after == before


def test_events_are_read_once_they_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA nothing waits: a sample that the device has not finished is told with a later window."""
    done: list[bool] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return bool(done)

        def elapsed_time(self, other: Event) -> float:
            del other
            return 2.5

        def synchronize(self) -> None:
            raise AssertionError

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = RecomputeTimer()
    timer.arm()
    run = timer.timed(lambda: None)
    run()
    run()
    timer.disarm()
    assert timer.collect() is None
    done.append(True)
    assert timer.collect() == 5.0
    assert timer.collect() is None


def test_one_step_of_a_window_is_timed(saved: SavedPlan, tmp_path: Path) -> None:
    """With every=4 that is the third; its record follows in the fourth."""
    path, model = tmp_path / "guard.jsonl", blocks()
    seen: list[tuple[int, bool]] = []
    with memcalc.guard(saved, every=4, jsonl=str(path), meter=Meter(1)) as watch:
        for block in model[1]:
            block.forward = lambda x, run=block.forward: checkpoint(run, x, use_reentrant=False)
        model.register_forward_hook(lambda *_: seen.append((watch.step, watch._timer.armed)))
        train(watch, model, 8)
    assert {step for step, armed in seen if armed} == {2, 6}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(row["checkpoint_recompute_time_ms"] > 0 for row in rows)


# ----------------------------------------------------------------------------------------------------------- pressure


def test_what_is_short() -> None:
    judge = PressureRule(10)
    assert not judge.level(Reading(1, 1, 10, 10, 3)).short
    assert "above" in judge.level(Reading(1, 1, 9, 11, 3)).short
    assert "1 times" in judge.level(Reading(1, 1, 9, 9, 4)).short
    assert "failed 1" in judge.level(Reading(1, 1, 9, 9, 4, 1)).short
    assert not judge.level(Reading(1, 1, 9, 9, 4, 1)).short
    assert not PressureRule(10, peaks=False).level(Reading(1, 1, 9, 11)).short


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ({"every": 0}, InputError, "every"),
        ({"on_pressure": "steps"}, UnknownNameError, "did you mean 'step'"),
        ({"threshold": 1.5}, InputError, "a share above 0"),
        ({"threshold": "much"}, InputError, "threshold"),
        ({"relax": True}, CombinationError, "on_pressure='step'"),
        ({"tresholds": 1}, UnknownNameError, "did you mean 'threshold'"),
        ({"plan": 3}, InputError, "must be a saved plan"),
        ({"plan": "no.json"}, MemcalcError, "no.json"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(
    words: dict[str, Any], kind: type[Exception], said: str, saved: SavedPlan
) -> None:
    with pytest.raises(kind, match=said) as told:
        memcalc.guard(**{"plan": saved, **words})
    assert "\n" not in str(told.value)


def test_a_plan_for_other_ranks_is_refused(saved: SavedPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CombinationError, match="the plan is for 1"), memcalc.guard(saved):
        pass
    two = saved.model_copy(update={"plan": saved.plan.model_copy(update={"gpus": 2})})
    watch = Watch(saved, Options())
    watch.plan = two.plan
    with pytest.raises(CombinationError, match="must be initialised"), watch:
        pass


def test_only_a_report_changes_nothing(saved: SavedPlan, caplog: pytest.LogCaptureFixture) -> None:
    """It says once what would be next, and how."""
    model = blocks()
    with memcalc.guard(saved, every=1, threshold="9 GiB", meter=Meter(10), model=model) as watch:
        train(watch, model, 3)
        assert (watch.micro_batch, watch.accumulation_steps) == (4, 2)
    (warning,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert "reserved 10.00 GiB, above 9.00 GiB" in warning
    assert "micro-batch 4 → 2" in warning
    assert "memcalc export plan.json --to trainer --fallback 1" in warning


def test_steps_are_taken_live_and_training_goes_on_as_before(saved: SavedPlan) -> None:
    """Smaller micro-batches where the loop reads them, and recomputation; the parameters end where they did without."""
    model, meter = blocks(width=8).double().eval(), Meter(10, 10, 10, 10, 1)
    other = copy.deepcopy(model)
    torch.set_default_dtype(torch.float64)
    try:
        seen = []
        with memcalc.guard(
            saved, every=1, threshold="9 GiB", on_pressure="step", meter=meter, model=model, blocks=model[1]
        ) as watch:
            for _ in range(6):
                seen.append((watch.plan.strategy.micro_batch, watch.plan.strategy.recompute))
                train(watch, model, 1, seed=len(seen))
        with memcalc.guard(saved, meter=Meter(1)) as quiet:
            for seed in range(1, 7):
                train(quiet, other, 1, seed=seed)
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen[0] == (4, "none")
    assert seen[-1] == seen[-2]
    sizes = [micro for micro, _ in seen]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert seen[-1][1] != "none"
    assert meter.released == len(set(seen)) - 1
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_loop_that_does_not_read_its_micro_batch_keeps_it(saved: SavedPlan) -> None:
    model = blocks()
    with memcalc.guard(saved, every=1, threshold="9 GiB", on_pressure="step", meter=Meter(10), model=model) as watch:
        for _ in range(6):
            model(torch.randn(8, 8)).mean().backward()
            watch.step_done()
        assert (watch.plan.strategy.micro_batch, watch.plan.strategy.recompute) == (4, "full")
        assert [vars(block).keys() >= {"forward"} for block in model[1]] == [True] * 4


def test_room_takes_a_step_back_once(saved: SavedPlan) -> None:
    model = blocks()
    with memcalc.guard(
        *(saved,),
        every=1,
        threshold="9 GiB",
        on_pressure="step",
        relax=True,
        meter=Meter(10, *[2] * 5, 10, 2),
        model=model,
    ) as watch:
        seen = []
        for _ in range(14):
            model(torch.randn(8, 8)).mean().backward()
            watch.step_done()
            seen.append(watch.plan.strategy.recompute)
    assert seen == ["every-2"] * 3 + ["none"] * 3 + ["every-2"] * 8


@pytest.fixture(scope="module")
def ready(saved: SavedPlan) -> Watch:
    """Return a watch that knows its steps."""
    return Watch(saved, Options(on_pressure="step", threshold="9 GiB"))


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(short=st.lists(st.booleans(), max_size=8), reads=st.booleans(), relax=st.booleans())
def test_whatever_happens_the_global_batch_is_kept(short: list[bool], reads: bool, relax: bool, ready: Watch) -> None:
    meter, watch = Meter(*(10.0 if one else 1.0 for one in short), 1.0), copy.copy(ready)
    watch.options = Options(on_pressure="step", every=1, model=blocks(), meter=meter, relax=relax)
    watch._before, watch._not_again = [], []
    with watch:
        for _ in range(len(short) + 4):
            if reads:
                assert [len(part) for part in watch.split(range(8))] == [watch.micro_batch] * watch.accumulation_steps
            watch.step_done()
            assert watch.plan.strategy.micro_batch * watch.accumulation_steps * watch.plan.data_parallel == 8


@pytest.mark.slow
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.sampled_from([4, 6, 12, 24, 60]),
    gpus=st.sampled_from([1, 2, 4]),
    framework=st.sampled_from(["hf", "fsdp2", "ddp", "deepspeed"]),
    model=st.sampled_from(["gpt2", "llama-3.2-1b"]),
)
def test_every_rung_of_every_plan_keeps_the_global_batch(batch: int, gpus: int, framework: str, model: str) -> None:
    found = memcalc.plan(model=model, gpu="h100", gpus=gpus, global_batch=batch * gpus, framework=framework, top=1)
    if found.plans:
        ladder = ladder_of(found)
        assert ladder.steps or ladder.saved.plan.strategy.micro_batch == 1
        for one in (*ladder.saved.fallback, *ladder.steps):
            assert one.strategy.micro_batch * one.accumulation_steps * one.strategy.dp == batch * gpus
            assert (one.gpus, one.strategy.dp) == (gpus, ladder.saved.plan.strategy.dp)


def test_a_plan_whose_batches_do_not_agree_is_refused(saved: SavedPlan) -> None:
    wrong = saved.model_copy(update={"fallback": (saved.fallback[0].model_copy(update={"accumulation_steps": 2}),)})
    with pytest.raises(CombinationError, match=r"global_batch of fallback 1 8: .*4 sequences"):
        memcalc.guard(wrong)
    with memcalc.guard(saved) as watch, pytest.raises(InputError, match="fed 8 sequences"):
        next(iter(watch.split({"x": torch.zeros(6, 2)})))


class Pair(NamedTuple):
    """Two tensors by name."""

    x: torch.Tensor
    y: torch.Tensor


def test_batches_are_split_as_they_come(saved: SavedPlan) -> None:
    with memcalc.guard(saved) as watch:
        x, y = torch.arange(8), torch.arange(8) * 2
        parts = list(watch.split({"x": x, "rest": (y, [x])}))
    assert torch.equal(torch.cat([part["x"] for part in parts]), x)
    assert torch.equal(torch.cat([part["rest"][0] for part in parts]), y)
    assert [len(part["rest"][1][0]) for part in parts] == [4, 4]
    assert parts[0]["x"].data_ptr() == x.data_ptr()
    with memcalc.guard(saved) as watch:
        (first, _) = watch.split(UserDict(one=Pair(x, y)))
    assert torch.equal(first["one"].y, y[:4])


@pytest.mark.slow
def test_plans_of_every_kind_are_taken(saved: SavedPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    found = memcalc.plan(**JOB, **OPEN)
    memcalc.save(found, str(path))
    for given_plan in (saved, path, str(path), found):
        assert Watch(given_plan, Options()).plan == saved.plan
    alone = saved_alone(found.plans[0])
    assert (alone.plan, alone.plan.job) == (saved.plan, saved.plan.job)
    assert alone.fallback
    assert isinstance(found.plans[0], Plan)
    assert alone.job.options == {"gpus": 1, "seq_len": 1024, "global_batch": 8}


# ------------------------------------------------------------------------------------------------------------- switch


def strategy(recompute: str = "none", **words: Any) -> Strategy:
    return Strategy(recompute=recompute, **words)


def test_a_switch_is_reversible_and_leaves_no_trace() -> None:
    model = blocks()
    keys, runs = list(model.state_dict()), []
    for place, block in enumerate(model[1]):
        block[0].register_forward_hook(lambda *_, place=place: runs.append(place))
    switch = Switch(model, None, strategy())
    for policy, again in (("every-2", [1, 3]), ("full", [0, 1, 2, 3]), ("none", [])):
        switch.apply(policy)
        runs.clear()
        model(torch.randn(2, 8)).mean().backward()
        assert sorted(runs) == sorted([0, 1, 2, 3, *again])
        assert list(model.state_dict()) == keys
    assert not any("forward" in vars(block) for block in model[1])
    switch.apply("full")
    runs.clear()
    model.eval()
    model(torch.randn(2, 8)).mean().backward()
    assert runs == [0, 1, 2, 3]


def test_what_is_not_switched_says_why() -> None:
    model = blocks()
    compiled = blocks()
    compiled[1][0].compile()
    static = blocks()
    static.static_graph = True
    for told, given_model, plan in (
        ("model=", None, strategy()),
        ("own", model, strategy(framework="megatron")),
        ("engine", model, strategy(framework="deepspeed@0.15")),
        ("compiled", compiled, strategy()),
        ("static", static, strategy()),
        ("no list of blocks", nn.Linear(2, 2), strategy()),
        ("not made of whole blocks", model, strategy("mlp")),
        ("its own code", model, strategy("full")),
    ):
        switch = Switch(given_model, None, plan)
        assert told in switch.refusal
        assert not switch.can("full")
    assert not Switch(model, None, strategy()).can("mlp")


def test_a_model_that_checkpoints_otherwise_than_planned_is_refused() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, layers = blocks(), tiny()
    for some in (model[1], layers.transformer.h):
        for place in (1, 3):
            some[place] = checkpoint_wrapper(some[place])
    for one in (model, layers):
        assert Switch(one, None, strategy("every-2")).can("full")
        with pytest.raises(CombinationError, match="2 of its 4 blocks, the plan 0"):
            Switch(one, None, strategy())
    with pytest.raises(CombinationError, match="0 of its 4 blocks, the plan 4"):
        Switch(tiny(), None, strategy("full"))


# ------------------------------------------------------------------------------------------------------------ restart


def reads_back(folder: Path) -> Any:
    """Read the restart's config as its own line says."""
    marker = json.loads((folder / "restart.json").read_text(encoding="utf-8"))
    return memcalc.check(**keywords(marker["check"])).estimate


def test_a_restart_is_written_and_can_be_checked(saved: SavedPlan, tmp_path: Path) -> None:
    """Its config reads back as the fallback; its saved plan has what is left."""
    options = {"every": 2, "threshold": "9 GiB", "on_pressure": "restart", "restart_dir": str(tmp_path / "next")}
    with (
        pytest.raises(RestartNeeded, match=r"Restart with: cd .* && torchrun") as asked,
        memcalc.guard(saved, meter=Meter(10), **options) as watch,
    ):
        train(watch, blocks(), 5)
    assert watch.step == 2
    folder, first = tmp_path / "next", saved.fallback[0]
    found = reads_back(folder)
    assert found.workload.global_batch == 8
    assert (found.strategy.micro_batch, found.workload.accumulation_steps) == (2, 4)
    assert found.peak.device == first.peak.device
    assert asked.value.command == json.loads((folder / "restart.json").read_text(encoding="utf-8"))["launch"]
    left = memcalc.load(str(folder / "plan.json"))
    assert (left.plan, left.fallback[0].strategy) == (first, saved.fallback[1].strategy)
    assert [one.rank for one in left.fallback] == list(range(1, len(saved.fallback)))
    for step in saved.fallback[1:]:
        with memcalc.guard(left, meter=Meter(10), **{**options, "stop": "flag"}) as again:
            train(again, blocks(), 3)
            assert again.restart is not None
        assert reads_back(folder).peak.device == step.peak.device
        left = memcalc.load(str(folder / "plan.json"))
    with pytest.raises(InputError, match="the last of the plans"):
        memcalc.guard(memcalc.load(str(folder / "plan.json")), **options)


def test_at_micro_batch_one_and_full_recomputation_nothing_is_doubled(caplog: pytest.LogCaptureFixture) -> None:
    """Twice the accumulation would be twice the batch; a restart is offered where one helps, else the reason."""
    kept = saved_plan(memcalc.plan(**{**JOB, "micro_batch": 1, "recompute": "full"}))
    model = blocks()
    with memcalc.guard(kept, every=1, threshold=1, on_pressure="step", meter=Meter(10), model=model) as watch:
        train(watch, model, 3)
        assert (watch.micro_batch, watch.accumulation_steps) == (1, 8)
    (said,) = [one.message for one in caplog.records if "no smaller plan" in one.message]
    assert "your options leave no plan" in said
    with pytest.raises(InputError, match="your options leave no plan"):
        memcalc.guard(kept, on_pressure="restart")


@pytest.mark.slow
def test_at_micro_batch_one_a_restart_shards_or_offloads(tmp_path: Path) -> None:
    wide = {"model": "llama-3.2-1b", "gpus": 2, "framework": "fsdp2", "tp": 1, "cp": 1, "pp": 1, "top": 1}
    found = memcalc.plan(gpu="a100-40g", global_batch=8, micro_batch=1, recompute="full", offload="none/params", **wide)
    ladder = ladder_of(found)
    assert not ladder.steps
    ways = restarts_of(ladder, str(tmp_path), None).options
    assert ways
    for way in ways:
        assert (way.plan.strategy.micro_batch, way.plan.accumulation_steps) == (1, 4)
        assert way.plan.strategy.zero == 3 or way.plan.strategy.offload == ("params",)


@pytest.mark.slow
def test_a_format_that_cannot_say_a_fallback_is_no_way(saved: SavedPlan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="written for --framework fsdp2"):
        memcalc.guard(saved, on_pressure="restart", restart_dir=str(tmp_path), to="fsdp2")
    other = saved_plan(memcalc.plan(**{**JOB, **OPEN, "framework": "litgpt"}))
    with pytest.raises(InputError, match="must name the format"):
        memcalc.guard(other, restart_dir=str(tmp_path))


def test_a_full_disk_neither_ends_a_run_nor_hides_its_end(
    saved: SavedPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    watch = memcalc.guard(saved, every=1, jsonl=str(folder / "a.jsonl"), restart_dir=str(folder), meter=Meter(39))
    with pytest.raises(torch.cuda.OutOfMemoryError), watch:
        [folder.rmdir(), watch.step_done(), throw()]
    assert "the report was not written" in caplog.text
    assert "the restart was not written" in caplog.text
    assert watch.restart is not None


def throw(said: str = "CUDA out of memory.") -> None:
    raise torch.cuda.OutOfMemoryError(said)


def test_out_of_memory_is_reported_and_raised_again(
    saved: SavedPlan, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "guard.jsonl"
    watch = memcalc.guard(saved, restart_dir=str(tmp_path), meter=Meter(39), jsonl=str(path), every=5)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried"), watch:
        [watch.step_done(), throw("CUDA out of memory. Tried to allocate 2.00 GiB.")]
    (row,) = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert (row["cuda_memory_reserved_peak"], row["pressure"], row["step"]) == (39 * GIB, 1, 1)
    assert watch.restart is not None
    assert "out of memory in step 2. Restart with: cd " in caplog.text
    assert "&& torchrun" in caplog.text
    assert reads_back(tmp_path).strategy.micro_batch == 2
    with pytest.raises(KeyError), memcalc.guard(saved, restart_dir=str(tmp_path / "other"), meter=Meter(39)):
        raise KeyError
    assert not list((tmp_path / "other").iterdir())


# --------------------------------------------------------------------------------------------------------- prometheus


def values(rank: int, reserved: int | None) -> dict[str, Any]:
    return {"plan": "gpt2", "rank": rank, **dict.fromkeys(GAUGES, 1), "cuda_memory_reserved_peak": reserved}


def samples(text: str) -> dict[tuple[str, str], float]:
    from prometheus_client.parser import text_string_to_metric_families

    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge"
        for one in family.samples:
            assert one.labels.keys() == {"plan", "rank"}
            found[one.name, one.labels["rank"]] = one.value
    return found


def free_ports() -> int:
    """Return the first of two free ports."""
    while True:
        with socket.socket() as first, contextlib.suppress(OSError, OverflowError), socket.socket() as second:
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            second.bind(("", port + 1))
            return port


def test_two_ranks_are_exposed_on_ports_of_their_own() -> None:
    from prometheus_client import CollectorRegistry

    port, found = free_ports(), {}
    gauges = [Gauges(Options(port=port, registry=CollectorRegistry()), rank) for rank in (0, 1)]
    try:
        for rank, one in enumerate(gauges):
            one.show(values(rank, 100 + rank))
            one.show(values(rank, None))
        for rank in (0, 1):
            with urllib.request.urlopen(f"http://localhost:{port + rank}/metrics") as answer:
                found |= samples(answer.read().decode())
        assert {one._server.server_address[0] for one in gauges} == {"127.0.0.1"}
        with pytest.raises(InputError, match="must be free"):
            Gauges(Options(port=port, registry=CollectorRegistry()), 0)
    finally:
        for one in gauges:
            one.close()
    assert found["cuda_memory_reserved_peak", "0"] == 100
    assert found["cuda_memory_reserved_peak", "1"] == 101
    names = {lead + key for key, (lead, _) in GAUGES.items()}
    assert set(found) == {(name, rank) for name in names for rank in ("0", "1")}


def test_a_second_guard_of_a_process_uses_the_same_gauges(saved: SavedPlan, tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, GCCollector, generate_latest

    registry, path = CollectorRegistry(), tmp_path / "memcalc.prom"
    for reserved in (3, 4):
        with memcalc.guard(
            saved, every=1, registry=registry, textfile=str(path), meter=Meter(reserved), name=f"run {reserved}"
        ) as watch:
            train(watch, blocks(), 1)
    GCCollector(registry)
    text = generate_latest(registry).decode()
    with memcalc.guard(saved, every=1, registry=registry, textfile=str(path), meter=Meter(5)) as watch:
        watch.step_done()
    written = path.read_text(encoding="utf-8")
    assert "python_gc" not in written
    assert 'cuda_memory_reserved_peak{plan="run 3",rank="0"} 3.221225472e+09' in written
    assert 'cuda_memory_reserved_peak{plan="gpt2",rank="0"} 5.36870912e+09' in written
    assert 'cuda_memory_reserved_peak{plan="run 3",rank="0"} 3.221225472e+09' in text
    assert 'accumulation_steps{plan="run 4",rank="0"} 2.0' in text


# ----------------------------------------------------------------------------------------------------- several ranks


@pytest.mark.slow
def test_two_ranks_take_the_same_step(tmp_path: Path) -> None:
    """Memory is short on the second rank alone; both step at once, and their weights stay those of a quiet run."""
    worker, metrics = Path(__file__).parents[1] / "guard_worker.py", tmp_path / "metrics"
    metrics.mkdir()
    found = memcalc.plan(
        **{**JOB, **OPEN, "gpus": 2, "global_batch": 16, "framework": "ddp", "precision": "bf16-autocast"}
    )
    memcalc.save(found, str(tmp_path / "plan.json"))
    env = {**os.environ, "WORLD_SIZE": "2", "PROMETHEUS_MULTIPROC_DIR": str(metrics), "OMP_NUM_THREADS": "1"}
    env["FOLDER"] = str(tmp_path)
    command = [sys.executable, str(worker)]
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in (0, 1)]
    try:
        assert [one.wait(120) for one in ranks] == [0, 0]
    finally:
        for one in ranks:
            one.kill()
    told = [json.loads((tmp_path / f"told{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]
    assert told[0] == told[1]
    plans = told[0]["plans"]
    assert plans[:3] == [["none", 4], ["none", 4], ["none", 2]]
    assert plans[-1][1] == 1
    assert plans[-1][0] != "none"
    assert told[0]["alike"]
    assert told[0]["as_quiet"]
    assert told[0]["sharded_as_quiet"]
    lines = [
        [json.loads(line) for line in (tmp_path / f"guard.rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()]
        for rank in (0, 1)
    ]
    assert [{row["pressure"] for row in rows} for rows in lines] == [{0}, {1}]
    assert [row["step"] for row in lines[0]] == list(range(2, 2 * len(lines[1]) + 1, 2))
    shown = samples((tmp_path / "metrics.txt").read_text(encoding="utf-8"))
    assert [shown["cuda_memory_reserved_peak", rank] for rank in ("0", "1")] == [1 * GIB, 10 * GIB]
    assert [shown["accumulation_steps", rank] for rank in ("0", "1")] == [8, 8]


# ----------------------------------------------------------------------------------------------- Trainer and Lightning


@pytest.fixture
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate imports DeepSpeed where it is installed, which needs more than the tests of its config do."""
    monkeypatch.setattr("accelerate.utils.other.is_deepspeed_available", lambda: False)


def trained(folder: Path, callbacks: list[Any], steps: int = 6, **words: Any) -> Any:
    """Train with the Trainer, and return it."""
    from transformers import Trainer, TrainingArguments

    rows = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(3))
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=steps,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **words,
    )
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=tiny(), args=args, train_dataset=data, callbacks=callbacks)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_recomputes_once_memory_is_short(saved: SavedPlan, tmp_path: Path) -> None:
    """Checkpoints are switched on in the running job: every second block, then all; nothing else changes."""
    path = tmp_path / "guard.jsonl"
    callback = memcalc.trainer_callback(
        saved, every=1, threshold="9 GiB", on_pressure="step", jsonl=str(path), meter=Meter(1, 10, 1, 10, 1)
    )
    guarded = trained(tmp_path / "a", [callback]).model
    plain = trained(tmp_path / "b", []).model
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["recompute"] for row in rows] == ["none"] * 2 + ["every-2"] * 2 + ["full"] * 2
    assert {(row["micro_batch"], row["accumulation_steps"]) for row in rows} == {(4, 2)}
    times = [row["checkpoint_recompute_time_ms"] for row in rows]
    assert times[:2] == [0, 0]
    assert min(times[2:]) > 0
    assert guarded.is_gradient_checkpointing
    for ours, theirs in zip(guarded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.usefixtures("without_deepspeed")
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_stops_for_a_restart(saved: SavedPlan, tmp_path: Path) -> None:
    """It saves, stops, and the restart's config is the smaller plan; other arguments than the plan's are refused."""
    words = {"every": 2, "threshold": "9 GiB", "on_pressure": "restart", "restart_dir": str(tmp_path / "next")}
    callback = memcalc.trainer_callback(saved, meter=Meter(1, 10), **words)
    trainer = trained(tmp_path / "run", [callback])
    assert trainer.state.global_step == 4
    assert (tmp_path / "run" / "checkpoint-4" / "model.safetensors").exists()
    assert callback.watch.restart is not None
    assert reads_back(tmp_path / "next").strategy.micro_batch == 2
    with pytest.raises(CombinationError, match=r"train_batch_size 4: .*the plan has 2"):
        trained(tmp_path, [memcalc.trainer_callback(memcalc.load(str(tmp_path / "next" / "plan.json")))])
    with pytest.raises(CombinationError, match="4 of its 4 blocks, the plan 0"):
        trained(tmp_path, [memcalc.trainer_callback(saved, on_pressure="step")], gradient_checkpointing=True)
    with pytest.raises(CombinationError, match="auto_find_batch_size"):
        trained(tmp_path, [memcalc.trainer_callback(saved)], auto_find_batch_size=True)
    again = memcalc.trainer_callback(saved, meter=Meter(39), restart_dir=str(tmp_path / "oom"))
    again.on_step_begin = lambda *_, **__: throw()
    with pytest.raises(torch.cuda.OutOfMemoryError), again:
        trained(tmp_path, [again])
    assert json.loads((tmp_path / "oom" / "restart.json").read_text(encoding="utf-8"))["then"]["pressure"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_is_guarded(saved: SavedPlan, tmp_path: Path) -> None:
    """Recomputation is switched in the running job, steps are those of the optimizer, and a restart is asked for."""
    from lightning.pytorch import LightningModule, Trainer, seed_everything

    class Module(LightningModule):
        """Four blocks with dropout."""

        def __init__(self) -> None:
            super().__init__()
            self.net = blocks()

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            """Return the loss."""
            del index
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            """Return the optimizer."""
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fitted(callbacks: list[Any], size: int = 4) -> tuple[Any, Any]:
        seed_everything(1)
        loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=size)
        show = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = Trainer(
            accelerator="cpu",
            max_steps=6,
            accumulate_grad_batches=2,
            callbacks=callbacks,
            default_root_dir=tmp_path,
            **show,
        )
        module = Module()
        torch.manual_seed(2)
        trainer.fit(module, loader)
        return module, trainer

    path = tmp_path / "guard.jsonl"
    words: dict[str, Any] = {"every": 1, "threshold": "9 GiB", "on_pressure": "step", "jsonl": str(path)}
    guarded, _ = fitted([memcalc.lightning_callback(saved, meter=Meter(1, 10, 1, 10, 1), **words)])
    plain, _ = fitted([])
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["recompute"] for row in rows] == ["none"] * 2 + ["every-2"] * 2 + ["full"] * 2
    for ours, theirs in zip(guarded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    folder = tmp_path / "next"
    callback = memcalc.lightning_callback(
        saved, meter=Meter(1, 10), restart_dir=str(folder), **{**words, "on_pressure": "restart"}
    )
    _, trainer = fitted([callback])
    assert trainer.global_step == 2
    assert (folder / "restart.ckpt").exists()
    assert reads_back(folder).strategy.micro_batch == 2
    with pytest.raises(CombinationError, match=r"batch_size 2: .*the plan has 4"):
        fitted([memcalc.lightning_callback(saved)], 2)
    failing = memcalc.lightning_callback(saved, meter=Meter(39), restart_dir=str(tmp_path / "oom"))
    failing.on_before_backward = lambda *_, **__: throw()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        fitted([failing])
    assert (tmp_path / "oom" / "restart.json").exists()


# ----------------------------------------------------------------------------------------------------------- documents

DOCS = Path(memcalc.__file__).parents[1] / "docs"


def test_the_example_says_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The page has the output of the script, apart from times."""
    log = logging.getLogger("memcalc.guard")
    before, threads = (log.level, list(log.handlers)), torch.get_num_threads()
    torch.set_num_threads(1)  # of small tensors a second thread makes nothing faster
    try:
        runpy.run_path(str(DOCS / "examples" / "guard" / "train.py"))
    finally:
        log.setLevel(before[0])
        log.handlers[:] = before[1]
        torch.set_num_threads(threads)
    page = (DOCS / "guard.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- output: examples/guard/train.py -->\n```text\n(.*?)```", page, re.DOTALL)
    times = re.compile(r"(?<=checkpoint_recompute_time_ms=)(?!0\.0 )[\d.]+")
    assert times.sub("TIME", capsys.readouterr().out) == times.sub("TIME", shown)
    assert len(times.findall(shown)) == 1


def test_the_page_names_every_field_and_metric(saved: SavedPlan) -> None:
    page = (DOCS / "guard.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| `")]
    fields = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    window = Window("a", 1, 0, saved.plan, 0, None, 0, None, pressure=False)
    assert fields == set(window.values())
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row[2])} == {n + k for k, (n, _) in GAUGES.items()}
    (queries,) = re.findall(r"```promql\n(.*?)```", page, re.DOTALL)
    assert set(re.findall(r"\((\w+)\)(?= [/>])", queries)) <= {n + k for k, (n, _) in GAUGES.items()}


if __name__ == "__main__":  # writes the page's output anew
    page_path = DOCS / "guard.md"
    told = subprocess.run(
        [sys.executable, str(DOCS / "examples" / "guard" / "train.py")], check=True, capture_output=True, text=True
    ).stdout
    block = re.compile(r"(<!-- output: examples/guard/train.py -->\n```text\n).*?(```)", re.DOTALL)
    text = block.sub(lambda match: match[1] + told + match[2], page_path.read_text(encoding="utf-8"))
    page_path.write_text(text, encoding="utf-8")
