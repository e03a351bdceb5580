"""Steps on an H100 (2026-11-27), of the probe's suite and of a Trainer: no formula or constant was fitted to them."""

from __future__ import annotations

import json
import lzma
import statistics
from pathlib import Path

import pytest

from memcalc import validation
from memcalc.allocator.caching import replay
from memcalc.runs import read_runs
from memcalc.specs.runs import Run

FOLDER = Path(__file__).parent / "measured"
EAGER = "llama-8b-blocks/bf16/full/eager/fused/1x2048"
"""4.8% above its prediction, and not explained yet."""


def row(run: Run) -> str:
    """Return its name in the suite."""
    return run.id.partition("/")[2]


@pytest.mark.parametrize(("name", "steps"), [("h100", 68), ("h100-expandable", 9)])
def test_what_a_gpu_allocated_is_what_was_predicted(name: str, steps: int) -> None:
    """Each peak of `max_memory_allocated` within 0.6%, but for one row; half of them within 0.1%."""
    runs = [run for run in read_runs([str(FOLDER / f"{name}.toml")]).run if run.outcome != "oom"]
    errors = {row(run): abs(validation.predict(run).peak.allocated / run.measured.allocated - 1) for run in runs}
    assert len(errors) == steps
    assert errors.pop(EAGER, 0) < 0.05
    assert max(errors.values()) < 0.006
    assert sorted(errors.values())[len(errors) // 2] < 0.001


def test_what_ran_out_of_memory_was_predicted_to() -> None:
    """Those that are meant to, and no other."""
    runs = read_runs([str(FOLDER / "h100.toml")]).run
    short = {row(run) for run in runs if run.outcome == "oom"}
    assert {name.rpartition("-to-")[2] for name in short} == {"115%", "120%"}
    assert short == {row(run) for run in runs if validation.predict(run).verdict == "does-not-fit"}


def test_reserved_memory_is_as_far_off_as_is_said() -> None:
    """docs/probe.md and README.md say it; a figure that gets better is said anew."""
    answer = validation.validate(read_runs([str(FOLDER / "h100.toml")]))
    reserved = [abs(score.error) for score in answer.runs if score.figure == "reserved"]
    assert statistics.median(reserved) < 0.0055
    assert sum(error > 0.09 for error in reserved) <= 10
    assert max(reserved) < 0.24
    inside = [score.within for score in answer.runs if score.figure != "allocated"]
    assert (sum(map(bool, inside)), len(inside)) == (118, 136)
    expandable = validation.validate(read_runs([str(FOLDER / "h100-expandable.toml")]))
    assert max(abs(score.error) for score in expandable.runs if score.figure == "reserved") < 0.038


def test_a_trainer_is_what_was_predicted() -> None:
    """Full fine-tuning with and without recomputation, and adapters: allocated within 0.01%, reserved within 0.8%."""
    runs = {run.id.partition("/")[2]: run for run in read_runs([str(FOLDER / "trainer.toml")]).run}
    assert len(runs) == 4
    for run in runs.values():
        predicted, measured = validation.predict(run).peak, run.measured
        assert predicted.allocated == pytest.approx(measured.allocated, rel=1.1e-4)
        assert predicted.reserved == pytest.approx(measured.reserved, rel=0.008)
    records = [json.loads(line) for line in (FOLDER / "guard.jsonl").read_text("utf-8").splitlines()]
    seen = {(record["cuda_memory_allocated_peak"], record["cuda_memory_reserved_peak"]) for record in records}
    watched = runs["checkpointed-4x2048x2"].measured
    assert seen == {(watched.allocated, watched.reserved)}


def test_requests_that_were_recorded_reserve_what_they_did() -> None:
    """Five rows whose reserved memory is off: their requests [number, bytes, place], frees [-number], [0] a flush.

    For two the replay of the requests themselves reserves what the driver gave, to the byte: the rule is right there,
    and the order of the estimated requests is not. For one the replay reserves 15% less, which is not explained.
    """
    traces = json.loads(lzma.decompress((FOLDER / "traces.json.xz").read_bytes()))
    errors = {}
    for name, trace in traces.items():
        events = [_event(*request) for request in trace["requests"]]
        errors[name] = replay(events).peak_reserved / trace["reserved"] - 1
    exact = {name for name, error in errors.items() if error == 0}
    assert exact == {"llama-130m/bf16-autocast/full/flash/loop/16x1024", "llama-1b/bf16/full/flash/fused/4x2048"}
    assert sorted(abs(error) for error in errors.values())[-2] < 0.008
    assert max(map(abs, errors.values())) < 0.16


def _event(number: int, size: int = 0, _place: int = 0) -> tuple[str, int, int, int, str]:
    kind = "alloc" if number > 0 else "free" if number < 0 else "empty"
    return kind, abs(number), size, 0, ""
