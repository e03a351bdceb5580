"""Calibration: known figures are recovered from noisy rows, what is structural is told, and every command takes it."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from exported_files import write_exported
from typer.testing import CliRunner

import memcalc
from memcalc import calibrations, catalog, validation
from memcalc.cli.app import app
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.files import array_of_tables, pairs
from memcalc.journal import Progress
from memcalc.probe.calibrate import overheads, rows
from memcalc.probe.calibrate.fit import calibrated, calibration_text, check_fitted
from memcalc.probe.calibrate.times import timed_job
from memcalc.results.probe import Calibrated
from memcalc.runs import runs_text
from memcalc.specs.calibration import Calibration
from memcalc.specs.runs import Run, RunsFile
from memcalc.terms.model_on_grid import ModelOnGrid
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
    times = step_times(ModelOnGrid(timed.model, timed.grid), timed.gpu, timed.node, rates_for(timed.gpu, timed.grid))
    return found.peak.allocated, found.peak.reserved, float(times.step.max())


def measured(
    wrong: Callable[[Run], float] = lambda _: 0.0, *, noise: float = 1.0, outliers: float = 0.05, seed: int = 7
) -> RunsFile:
    """Rows of the made-up machine; `wrong` is what no noise adds to the bytes of a job."""
    dice = np.random.default_rng(seed)
    found = []
    for run in JOBS:
        allocated, reserved, seconds = figures(run.id)
        factor = (1 + wrong(run)) * (1 + noise * dice.normal(0, 0.003))
        far = dice.random() < outliers
        held = reserved * factor * (1 + SLACK) * (1 + noise * dice.normal(0, 0.01)) * (1.3 if far else 1)
        beside = CONTEXT + MORE + noise * dice.normal(0, 4 * MIB) + (3 * GIB if far else 0)
        sizes = {"allocated": allocated * factor, "reserved": held, "device": held + beside}
        found.append(run.model_copy(update={
            "measured": validation.Measured.model_validate({name: int(size) for name, size in sizes.items()}),
            "seconds": seconds * (1 + noise * dice.normal(0, 0.02)) * (3 if far else 1),
        }))  # fmt: skip
    return RunsFile.model_validate({"probe": [{**PROBE, "context": int(CONTEXT + MORE)}]}).model_copy(
        update={"run": tuple(found)}
    )


def value(found: Calibrated, name: str) -> float:
    return next(figure.fitted for figure in found.figures if figure.name == name)


def answered(*line: str, code: int = 0, env: dict[str, str] | None = None) -> str:
    done = CliRunner().invoke(app, list(line), env=env, prog_name="memcalc")
    assert done.exit_code == code, (line, done.stderr, done.exception)
    return done.stdout if code in {0, 1} else done.stderr


def as_json(*line: str, env: dict[str, str] | None = None) -> Any:
    return json.loads(answered(*line, "--format", "json", env=env))


@pytest.fixture(scope="module")
def found() -> Iterator[Calibrated]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "predict", PREDICT)
        yield calibrated(measured())


@pytest.fixture
def file(found: Calibrated, tmp_path: Path) -> str:
    path = tmp_path / "a100.toml"
    path.write_text(calibration_text(found.calibration))
    return str(path)


# ------------------------------------------------------------------------------------------------------------ the fit


@pytest.mark.slow
def test_known_figures_are_recovered_from_noisy_rows(found: Calibrated) -> None:
    """One row of twenty is grossly wrong; the noise is 4 MiB of the context, 1% of what is reserved, 2% of a step."""
    assert value(found, "context") == pytest.approx(CONTEXT + MORE, abs=4 * MIB)
    assert value(found, f"matmul ({GPU})") == pytest.approx(MATMUL, rel=0.05)
    assert value(found, "caching middle") == pytest.approx(SLACK, abs=0.01)
    kept = found.calibration
    assert {figure.part for figure in found.figures if figure.written} == {"context", "reserve", "step time"}
    (reserve,) = kept.reserve
    assert -0.06 < reserve.low < -0.01 < 0.01 < reserve.high < 0.06
    assert [one for one in kept.residual if one.kind != "step time"] == []
    assert any("outliers" in note for note in kept.note)


def test_held_back_rows_are_predicted_better(found: Calibrated) -> None:
    """None of them was fitted on, and no family of theirs."""
    gains = {gain.part: gain for gain in found.calibration.gain}
    assert gains["context"].median[0] == pytest.approx(MORE, rel=0.05)
    for gain in gains.values():
        assert gain.better
        assert gain.rows >= 3
        assert gain.median[1] < gain.median[0] / 3
    covered, width = gains["reserve"].covered, gains["reserve"].width
    assert covered is not None
    assert width is not None
    assert covered[1] >= covered[0] >= gains["reserve"].rows - 1
    assert width[1] < width[0] / 3
    fit, held = rows.split(list(rows.predicted(measured().run, validation.Presets())))
    assert {row.family for row in fit}.isdisjoint(row.family for row in held)
    assert 0.1 < len(held) / len(JOBS) <= 0.3


def test_the_same_rows_give_the_same_file_byte_for_byte(found: Calibrated) -> None:
    runs = measured()
    again = calibrated(runs.model_copy(update={"run": runs.run[::-1]}))
    assert calibration_text(again.calibration) == calibration_text(found.calibration)


def test_what_is_structural_is_told_and_not_absorbed(found: Calibrated) -> None:
    """All rows with eager attention hold 8% more than predicted: in no figure but the finding."""
    biased = calibrated(measured(lambda run: 0.08 * (run.strategy["attention"] == "eager")))
    (wrong,) = [one for one in biased.calibration.residual if one.kind == "allocated"]
    assert wrong.shared == {"attention": "eager"}
    assert set(wrong.rows) == {run.id for run in JOBS if run.strategy["attention"] == "eager"}
    assert wrong.error == pytest.approx(1 / 1.08 - 1, abs=0.01)
    assert value(biased, "context") == pytest.approx(value(found, "context"), abs=MIB)
    assert all(abs(one.middle - SLACK) < 0.01 and one.high < 0.06 for one in biased.calibration.reserve)
    eager, flash = (_said(biased.calibration, kernel) for kernel in ("eager", "flash"))
    assert any("with attention = eager allocated" in said and "more than predicted" in said for said in eager)
    assert not any("more than predicted" in said for said in flash)


def _said(found: Calibration, attention: str) -> tuple[str, ...]:
    chip = catalog.gpu(GPU).calibrated(found)
    return memcalc.estimate(model="llama-3.2-1b", gpu=chip, framework="hf", attention=attention).warnings


def test_an_error_that_grows_is_told() -> None:
    """Nothing is wrong for one token, 12% for the largest micro-batches."""
    most = max(run.strategy["micro_batch"] * run.workload["seq_len"] for run in JOBS)
    grown = measured(
        lambda run: -0.12 * run.strategy["micro_batch"] * run.workload["seq_len"] / most, noise=0.1, outliers=0
    )
    made = list(rows.predicted(grown.run, validation.Presets()))
    told = rows.correlations(rows.allocated_errors(made), validation.Presets())
    tokens = next(one for one in told if one.where == "tokens a micro-batch")
    assert tokens.error > 0.95


def test_noise_is_no_structure() -> None:
    errors = rows.allocated_errors(rows.predicted(measured().run, validation.Presets()))
    assert list(rows.structural(errors, "allocated")) == []
    assert list(rows.correlations(errors, validation.Presets())) == []


def test_a_phase_that_is_wrong_in_all_rows_is_told() -> None:
    made = []
    for row in rows.predicted(JOBS, validation.Presets()):
        step = int(row.estimate.phases["step"] * 1.2)
        phases = {"step": step, "forward": row.estimate.phases["forward-last"]}
        made.append(rows.Row(row.run.model_copy(update={"phases": phases}), row.estimate, row.family))
    found = rows.phase_errors(made)
    (wrong,) = rows.structural(found["step"], "phase", "phase step, ")
    assert wrong.error == pytest.approx(1 / 1.2 - 1, abs=1e-3)
    assert len(wrong.rows) == len(JOBS)
    assert list(rows.structural(found["forward"], "phase")) == []


# ------------------------------------------------------------------------------------------------ what is read directly


def test_communicators_are_read_from_tables_and_from_runs_on_several_gpus() -> None:
    """Context 600 MiB of one probe and of two runs; a world of 700 by tables; a group of 300 by what is left."""
    sizes = {"context": 600 * MIB, "world": 700 * MIB, "group": 300 * MIB}
    words = {"gpus": 8, "zero": 3, "precision": "bf16-mixed", "framework": "fsdp2"}
    estimates = {
        tp: memcalc.estimate(model="llama-3.2-1b", gpu=GPU, **words, **({"tp": 2} if tp else {}))
        for tp in (False, True)
    }
    made = []
    for place, (gpus, tp) in enumerate([(1, False)] * 2 + [(8, True)] * 3):
        beside = sizes["context"] + (gpus > 1) * sizes["world"] + tp * sizes["group"]
        run = Run.model_validate({
            "id": str(place), "source": "made up", "grade": "A", "model": "llama-3.2-1b", "gpu": GPU, "gpus": gpus,
            "measured": {"reserved": GIB, "device": GIB + beside},
        })  # fmt: skip
        estimate = memcalc.estimate(model="llama-3.2-1b", gpu=GPU) if gpus == 1 else estimates[tp]
        made.append(rows.Row(run, estimate, str(place)))
    tables = [
        {
            "probe": "p",
            "kind": "world",
            "ranks": 8,
            "gpus": 8,
            "collective": "all-reduce",
            "bytes": sizes["world"] + near,
        }
        for near in (-MIB, 0, MIB)
    ]
    probe = {**PROBE, "context": sizes["context"], "blas_workspace": 8320 * 1024}
    runs = RunsFile.model_validate({"probe": [probe], "communicator": tables})
    found = overheads.overheads_of(made, runs, catalog.gpu(GPU))
    assert {name: found.sizes[name].bytes for name in sizes} == sizes
    assert found.sizes["workspace"].bytes == 8320 * 1024
    assert (found.left, found.residuals) == ((), ())


def test_a_workspace_that_the_source_does_not_say_is_told() -> None:
    runs = RunsFile.model_validate({"probe": [{**PROBE, "blas_workspace": 4 * MIB}]})
    found = overheads.overheads_of([], runs, catalog.gpu(GPU))
    assert found.sizes["workspace"].bytes == 4 * MIB
    assert "8,519,680" in found.residuals[0].says


def test_timed_operations_give_the_constants_at_the_sizes_that_jobs_have() -> None:
    """Products at 0.7 of 312 TFLOP/s beside their operands' traffic; small ones, far slower, do not count."""
    chip, passes = catalog.gpu(GPU), catalog.step_time().value("operand_passes", "any")
    made = []
    for m, n, k in [(128, 128, 128), (512, 4096, 4096), *((t, 4096, 4096) for t in (2048, 4096, 8192))]:
        large = m >= 1024
        alone = 2 * m * n * k / (312e12 * (0.7 if large else 0.1))
        operands = 2 * (m * n + n * k + m * k)
        seconds = alone + passes * operands / chip.bandwidth_bytes_per_s
        shape = {"m": m, "n": n, "k": k}
        made.append({"kind": "matmul", "dtype": "bf16", "shape": shape, "work": 2.0 * m * n * k, "seconds": seconds})
    for seq in (256, 2048, 4096, 8192):
        for kind, work in (("attention", 2e12), ("attention-backward", 5e12)):
            share = 0.5 if kind == "attention" else 0.4
            made.append({
                "kind": kind, "dtype": "bf16", "shape": {"batch": 1, "heads": 16, "seq": seq, "head_dim": 128},
                "work": work, "seconds": work / (312e12 * (share if seq >= 2048 else 0.01)),
            })  # fmt: skip
    made += [{"kind": "memory", "work": 1e9, "seconds": 1e-3}]
    runs = RunsFile.model_validate({"probe": [PROBE], "rate": [{"probe": "p", **one} for one in made]})
    found = calibrated(runs)
    assert value(found, f"matmul ({GPU})") == pytest.approx(0.7, rel=1e-3)
    assert value(found, f"attention ({GPU})") == pytest.approx(7 / (2 / 0.5 + 5 / 0.4), rel=1e-3)
    assert {one.rows for one in found.calibration.constant} == {3}
    assert any("memory were read and not used" in note for note in found.calibration.note)
    assert any("rest on timed operations only" in note for note in found.calibration.note)


# --------------------------------------------------------------------------------------------------- what is refused


def made_up(**changes: Any) -> dict[str, Any]:
    base = {"id": "a", "source": "made up", "grade": "A", "model": "llama-3.2-1b", "gpu": GPU}
    return {**base, "measured": {"reserved": "10 GiB", "device": "11 GiB"}, **changes}


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ([made_up(measured={"reserved": "12 GiB", "device": "11 GiB"})], "reserved is 12.00 and device 11.00"),
        ([made_up(measured={"allocated": "12 GiB", "reserved": "11 GiB"})], "allocated is 12.00"),
        ([made_up(measured={"device": "81 GiB"})], "a100-80g has 80.00"),
        ([made_up(), made_up(id="b", measured={"reserved": "12 GiB", "device": "14 GiB"})], "same job as a"),
        ([made_up(seconds=1.0), made_up(id="b", seconds=2.0)], "time figures are 100% apart"),
        ([made_up(), made_up(id="b", gpu="h100")], "--gpu must say which: a100-80g (1), h100 (1)"),
    ],
)
def test_rows_that_contradict_each_other_are_check_fitted(tables: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(CombinationError) as refusal:
        calibrated(RunsFile.model_validate({"run": tables}))
    assert says in str(refusal.value)


def test_each_row_that_is_predicted_is_told() -> None:
    states: list[Progress] = []
    rows = [made_up(id=name, workload={"micro_batch": size}) for name, size in (("a", 1), ("b", 2))]
    calibrated(RunsFile.model_validate({"run": rows}), on_progress=states.append)
    assert [(state.done, state.jobs) for state in states] == [(1, 2), (2, 2)]


def test_too_few_rows_are_check_fitted_with_how_many_are_needed() -> None:
    with pytest.raises(
        MissingError, match=r"context: 2 readings .* 3 needed.* 20 of 2 needed.* 10 and 3 needed"
    ) as few:
        check_fitted(calibrated(RunsFile.model_validate({"run": [made_up(), made_up(id="b")]})))
    assert few.value.exit_code == 3
    with pytest.raises(MissingError, match="no \\[\\[run\\]\\]"):
        calibrated(RunsFile())
    with pytest.raises(InputError, match="the rows are of a100-80g"):
        calibrated(RunsFile.model_validate({"run": [made_up()]}), "h100")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": "memcalc.calibration/2"}, "schema"),
        ({"gpus": 8}, "gpus"),
        ({"constant": [constant("matmull", GPU, 0.5)]}, "matmul"),
        ({"constant": [constant("matmul", "any", 0.5)]}, f"must be of {GPU}"),
        ({"constant": [constant("launch", GPU, 1e-5)]}, "must be of any"),
        ({"constant": [constant("host_memory", "any", 1.0)]}, "host_memory"),
        ({"constant": [constant("matmul", GPU, 2.0)]}, "at most 1.5"),
        ({"context": {"bytes": 2**50, "low": 1, "high": 2**50, "rows": 1}}, "context"),
        ({"context": {"bytes": 1, "low": 2, "high": 3, "rows": 1}}, "low <= bytes <= high"),
    ],
)
def test_a_file_that_would_be_misread_is_check_fitted(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    base = {"schema": "memcalc.calibration/1", "gpu": GPU, "memcalc": "0.1.0", "rows": 9, "held_back": 3}
    path = tmp_path / "own.toml"
    tables = {name: change.pop(name) for name in ("constant",) if name in change}
    path.write_text(pairs({**base, **change}) + "".join(array_of_tables(name, t) for name, t in tables.items()))
    with pytest.raises(InputError) as refusal:
        calibrations.read(str(path))
    assert says in str(refusal.value)


# ----------------------------------------------------------------------------------------------- with every command

JOB = ("--model", "llama-3.2-1b", "--gpu", GPU, "--gpus", "8", "--seq-len", "2048")


def test_the_file_reads_back_as_the_same(found: Calibrated, file: str) -> None:
    assert calibrations.read(file) == found.calibration
    assert calibration_text(calibrations.read(file)) == Path(file).read_text()


def test_an_estimate_changes_by_what_was_measured_and_nothing_else(found: Calibrated, file: str) -> None:
    """Allocated stays; device moves by the context and by what the allocator was seen to take."""
    plain, own = as_json("estimate", *JOB), as_json("estimate", *JOB, "--calibration", file)
    kept = found.calibration
    assert kept.context is not None
    assert own["peak"]["allocated"] == plain["peak"]["allocated"]
    assert own["budget"]["context"] - plain["budget"]["context"] == kept.context.bytes - CONTEXT
    slack = int(plain["peak"]["reserved"] * kept.reserve[0].middle)
    assert own["peak"]["reserved"] - plain["peak"]["reserved"] == slack
    assert own["peak"]["device"] - plain["peak"]["device"] == slack + kept.context.bytes - CONTEXT
    assert own["assumptions"]["calibration"] == f"of {GPU} (2026-11-20, {kept.rows} rows of 1 probe)"
    assert as_json(*own["command"].split()[1:]) == own
    python = memcalc.estimate(model="llama-3.2-1b", gpu=GPU, gpus=8, seq_len=2048, calibration=file)
    assert python.model_dump(mode="json", by_alias=True) == own
    context_alone = kept.model_copy(update={"reserve": (), "constant": ()})
    Path(file).write_text(calibration_text(context_alone))
    moved = as_json("estimate", *JOB, "--calibration", file)["peak"]["device"]
    assert moved - plain["peak"]["device"] == kept.context.bytes - CONTEXT


def test_a_search_takes_it_and_a_saved_plan_keeps_it(file: str, tmp_path: Path) -> None:
    saved, flags = tmp_path / "plan.json", ("--framework", "deepspeed", "--zero", "3", "--tp", "1", "--pp", "1")
    job = (*JOB, *flags, "--cp", "1", "--offload", "none", "--top", "2")
    plain = as_json("plan", *job)
    own = as_json("plan", *job, "--calibration", file, "--save", str(saved))
    assert "calibration" not in plain["assumptions"]
    assert GPU in own["assumptions"]["calibration"]
    assert own["plans"][0]["time"]["step"] > 1.1 * plain["plans"][0]["time"]["step"]
    assert f"--calibration {file}" in own["plans"][0]["command"]
    again = as_json(*own["plans"][0]["command"].split()[1:])
    assert again["peak"]["device"] == own["plans"][0]["peak"]["device"]
    kept = json.loads(saved.read_text())
    assert kept["plan"]["job"]["options"]["calibration"] == file
    assert any("calibration is saved as a path" in note for note in kept["notes"])
    done = CliRunner().invoke(app, ["export", str(saved), "--to", "deepspeed"], prog_name="memcalc")
    assert f"--calibration {file}" in done.stderr.partition("Check:")[2]
    assert "GiB per GPU when saved" not in done.stderr
    done = CliRunner().invoke(app, ["export", str(saved), "--to", "deepspeed", "--calibration", "none"])
    assert "GiB per GPU when saved" in done.stderr
    write_exported(done.stdout, tmp_path)
    config = tmp_path / "training_args.json"
    words = (*JOB, "--micro-batch", "1", "--attention", "flash", "--calibration")
    checked = [as_json("check", str(config), *words, name)["estimate"] for name in (file, "none")]
    assert checked[0]["peak"]["allocated"] == checked[1]["peak"]["allocated"]
    assert checked[0]["budget"]["context"] > checked[1]["budget"]["context"]


def test_the_other_commands_take_it(file: str, tmp_path: Path) -> None:
    words = (
        "--micro-batch",
        "1",
        "--recompute",
        "none",
        "--offload",
        "none",
        "--zero",
        "3",
        "--precision",
        "bf16-mixed",
    )
    question = ("max", "seq-len", *JOB[:6], "--tp", "1", "--pp", "1", "--cp", "1", *words, "--step", "256", "--tight")
    plain, own = as_json(*question), as_json(*question, "--calibration", file)
    assert own["answer"] < plain["answer"]
    assert file in own["command"]
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(f'[sweep]\nmode = "estimate"\n[jobs]\nmodel = "llama-3.2-1b"\ngpu = "{GPU}"\ngpus = [1, 2]\n')
    tables = [as_json("sweep", str(sweep), "--jobs", "1", *given)["rows"] for given in ((), ("--calibration", file))]
    assert all(b["device_bytes"] > a["device_bytes"] for a, b in zip(*tables, strict=True))
    runs = tmp_path / "runs.toml"
    runs.write_text(runs_text(RunsFile(run=measured().run[:2])))
    scored = as_json("validate", str(runs), "--calibration", file)
    assert scored["calibrations"] == [f"of {GPU} (2026-11-20, 30 rows of 1 probe)"]
    errors = [{s["figure"]: s["error"] for s in one["runs"]} for one in (as_json("validate", str(runs)), scored)]
    assert abs(errors[1]["reserved"]) < abs(errors[0]["reserved"])
    assert "it was measured on a100-80g" in answered("validate", "--calibration", file, str(_of("h100", runs)), code=2)


def _of(gpu: str, runs: Path) -> Path:
    other = runs.with_name("other.toml")
    other.write_text(runs.read_text().replace(f'"{GPU}"', f'"{gpu}"'))
    return other


def test_it_is_found_for_its_gpu_and_for_no_other(file: str, tmp_path: Path) -> None:
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "APPDATA": str(tmp_path / "config")}
    plain = as_json("estimate", *JOB, env=env)
    home = tmp_path / "config" / "memcalc" / "calibrations" / f"{GPU}.toml"
    home.parent.mkdir(parents=True)
    home.write_text(Path(file).read_text())
    own = as_json("estimate", *JOB, env=env)
    assert own["peak"]["device"] > plain["peak"]["device"]
    assert f"--calibration {home}" in own["command"]
    off = as_json("estimate", *JOB, "--calibration", "none", env=env)
    assert off["peak"] == plain["peak"]
    assert off["command"].endswith("--calibration none")
    other = as_json("estimate", "--model", "llama-3.2-1b", "--gpu", "h100", env=env)
    assert "calibration" not in other["assumptions"]
    said = answered("estimate", "--model", "llama-3.2-1b", "--gpu", "h100", "--calibration", file, code=2)
    assert "it was measured on a100-80g, and the job's GPU is h100" in said


def test_the_command_writes_shows_and_installs(tmp_path: Path) -> None:
    runs, out = tmp_path / "runs.toml", tmp_path / "own.toml"
    probes = [{**PROBE, "id": n, "context": "600 MiB", "torch": torch} for n, torch in zip("abc", "223", strict=True)]
    runs.write_text(runs_text(RunsFile.model_validate({"probe": probes})))
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "APPDATA": str(tmp_path / "config")}
    for form in ("rich", "markdown", "csv", "json", "latex", "html"):
        assert "600" in answered("calibrate", str(runs), "--format", form) or form == "json"
    shown = answered("calibrate", str(runs), "--output", str(out), "--install", env=env)
    assert "no held-back row shows the context" in " ".join(shown.split())
    assert "several versions of torch were taken together: 2, 3" in " ".join(shown.split())
    assert answered("calibrate", str(runs), "--format", "toml") == out.read_text()
    assert (tmp_path / "config" / "memcalc" / "calibrations" / f"{GPU}.toml").read_text() == out.read_text()
    assert "exists; use --force" in answered("calibrate", str(runs), "--output", str(out), code=2)
    with mock.patch("memcalc.calibrate", side_effect=AssertionError("a fit before the place is looked at")):
        said = answered("calibrate", str(runs), "--gpu", GPU, "--install", env=env, code=2)
    assert "exists; use --force" in said


def test_estimates_do_not_load_scipy(file: str) -> None:
    line = f"import sys, memcalc; memcalc.estimate(model='gpt2', gpu={GPU!r}, calibration={file!r})"
    code = f"{line}; assert 'scipy' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PAGE = Path(__file__).resolve().parents[2] / "docs" / "calibration.md"
PUBLISHED = ("a100-80g", "h100", "v100-32g")


def published(gpu: str) -> str:
    """What the command says of the shipped runs of a GPU."""
    env = {"COLUMNS": "100", "NO_COLOR": "1"}
    done = CliRunner().invoke(app, ["calibrate", "--gpu", gpu], env=env, prog_name="memcalc")
    return "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines()) + "\n"


def block(gpu: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=\$ memcalc calibrate --gpu {gpu}\n).*?(?=```)", re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", PUBLISHED)
def test_the_page_shows_what_published_runs_give(gpu: str) -> None:
    """Line by line; `PYTHONPATH=tests python tests/probe/test_calibrate.py` writes it anew."""
    assert block(gpu).findall(PAGE.read_text()) == [published(gpu)]


if __name__ == "__main__":
    for gpu_name in PUBLISHED:
        output = published(gpu_name).replace("\\", "\\\\")
        PAGE.write_text(block(gpu_name).sub(output, PAGE.read_text()))
