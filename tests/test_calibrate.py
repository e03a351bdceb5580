"""Calibration: known figures are recovered from noisy rows, what is structural is told, and every command takes it."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc import calibrations, catalog, validation
from memcalc.cli.app import app
from memcalc.convert.runs import read_runs
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.probe.calibrate import overheads, rows, structure
from memcalc.probe.calibrate.fit import calibrated, refused
from memcalc.probe.calibrate.jobs import timed_job
from memcalc.probe.calibrate.written import text
from memcalc.results import Calibrated
from memcalc.specs.calibration import Calibration
from memcalc.specs.runs import Run, RunsFile
from memcalc.terms import Census
from memcalc.timing import rates_for, step_times
from memcalc.units import GIB, MIB

GPU = "a100-80g"
CONTEXT = catalog.gpu(GPU).context_bytes or 0
MORE = 200 * MIB
"""What the context of the made-up machine has beyond the shipped one."""
MATMUL, SLACK = 0.6, 0.03
PROBE = {"id": "p", "gpu": GPU, "name": "A100", "date": "2026-11-20", "torch": "2.9.0", "memcalc": "0.1.0"}


def constant(name: str, of: str, value: float) -> dict[str, Any]:
    spread = {"low": value * 0.9, "high": value * 1.1}
    return {"name": name, "of": of, "value": value, "unit": "-", "source": "made up", "rows": 50, **spread}


TRUTH = Calibration.model_validate({
    "schema": "memcalc.calibration/1", "gpu": GPU, "memcalc": "0.1.0", "rows": 1, "held_back": 0,
    "constant": [constant("matmul", GPU, MATMUL)],
})  # fmt: skip


@pytest.fixture(autouse=True)
def each_prediction_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "predict", PREDICT)


class _Predict:
    """Predictions do not depend on what was measured, so that made-up figures of the same jobs share them."""

    def __init__(self) -> None:
        self.true, self.known = validation.predict, {}

    def __call__(self, run: Run, presets: Any = None) -> Any:
        given = presets and presets.given and presets.given.model_dump_json()
        key = json.dumps([run.model, run.gpus, run.workload, run.strategy]), given
        if key not in self.known:
            self.known[key] = self.true(run, presets)
        return self.known[key]


PREDICT = _Predict()


@cache
def job(model: str, attention: str, recompute: str, micro_batch: int, seq_len: int) -> Run:
    """A job without figures."""
    name = f"{model}-{attention}-{recompute}-{micro_batch}-{seq_len}"
    strategy = {"framework": "hf", "precision": "bf16", "optimizer_impl": "fused"}
    return Run.model_validate({
        "id": name, "source": "made up", "grade": "A", "model": model, "gpu": GPU, "probe": "p",
        "workload": {"seq_len": seq_len, "global_batch": micro_batch},
        "strategy": {**strategy, "attention": attention, "recompute": recompute, "micro_batch": micro_batch},
    })  # fmt: skip


JOBS = [
    job(*words)
    for words in itertools.product(
        ("llama-3.2-1b",), ("flash", "eager"), ("none", "full", "every-2"), (1, 2, 4), (1024, 1536)
    )
]


@cache
def figures(run_id: str) -> tuple[int, int, float]:
    """Allocated and reserved bytes as shipped, and the step time of the made-up machine."""
    run = next(one for one in JOBS if one.id == run_id)
    found = PREDICT(run)
    timed = timed_job(run, catalog.gpu(GPU).calibrated(TRUTH), validation.Presets())
    times = step_times(Census(timed.model, timed.grid), timed.gpu, timed.node, rates_for(timed.gpu, timed.grid))
    return found.peak.allocated, found.peak.reserved, float(times.step.max())


def measured(
    wrong: Callable[[Run], float] = lambda _: 0.0, *, noise: float = 1.0, outliers: float = 0.05, seed: int = 7
) -> RunsFile:
    """Rows of the made-up machine; `wrong` is what no noise adds to the bytes of a job."""
    dice = random.Random(seed)
    found = []
    for run in JOBS:
        allocated, reserved, seconds = figures(run.id)
        factor = (1 + wrong(run)) * (1 + noise * dice.gauss(0, 0.003))
        far = dice.random() < outliers
        held = reserved * factor * (1 + SLACK) * (1 + noise * dice.gauss(0, 0.01)) * (1.3 if far else 1)
        beside = CONTEXT + MORE + noise * dice.gauss(0, 4 * MIB) + (3 * GIB if far else 0)
        sizes = {"allocated": allocated * factor, "reserved": held, "device": held + beside}
        found.append(run.model_copy(update={
            "measured": validation.Measured.model_validate({name: int(size) for name, size in sizes.items()}),
            "seconds": seconds * (1 + noise * dice.gauss(0, 0.02)) * (3 if far else 1),
        }))  # fmt: skip
    return RunsFile.model_validate({"probe": [{**PROBE, "context": int(CONTEXT + MORE)}]}).model_copy(
        update={"run": tuple(found)}
    )


def value(found: Calibrated, name: str) -> float:
    return next(figure.fitted for figure in found.figures if figure.name == name)
