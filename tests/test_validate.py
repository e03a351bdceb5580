"""Measured runs beside predictions: what a runs file may say, how it is scored, and what is shipped."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc import api, catalog, validation
from memcalc.cli.app import app
from memcalc.errors import CombinationError, FileError, InputError, UnknownNameError
from memcalc.report import render
from memcalc.report.accuracy import validation_report
from memcalc.results.comparison import Validation
from memcalc.results.estimates import Estimate, StagePeak
from memcalc.runs import read_runs, shipped
from memcalc.specs.flat import from_flat
from memcalc.specs.runs import Run, RunsFile, Target

GIB = 2**30
RUN: dict[str, Any] = {
    "id": "lab-1", "source": "a log of 2026-01", "grade": "A", "model": "llama-2-7b", "gpu": "a100-80g", "gpus": 8,
    "workload": {"seq_len": 4096, "micro_batch": 1},
    "strategy": {"framework": "fsdp2", "precision": "bf16-mixed", "zero": 3, "recompute": "full"},
}  # fmt: skip
TEXT = """
[[run]]
id = "lab-1"
source = "a log"
grade = "A"
model = "llama-2-7b"
gpu = "a100-80g"
gpus = 8
workload = { seq_len = 4096, micro_batch = 1 }
strategy = { framework = "fsdp2", precision = "bf16-mixed", zero = 3, recompute = "full" }
measured = { allocated = "16 GiB", device = "20 GiB" }
group = "lab"
"""


def run_of(**changes: Any) -> Run:
    return Run.model_validate({**RUN, **changes})


def runs_of(*changes: dict[str, Any], **more: Any) -> RunsFile:
    """Return a file with a run for each of the changes, numbered."""
    return RunsFile(run=tuple(run_of(**{"id": f"r{place}", **change}) for place, change in enumerate(changes)), **more)


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["validate", *arguments], prog_name="memcalc")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make every estimate say given figures [bytes], verdict, interval or stages."""
    real = memcalc.estimate(model="llama-2-7b", gpu="a100-80g", gpus=8, zero=3)

    def say(verdict: str = "fits", low: int = 0, high: int = 10**12, pp: int = 1, **figures: int) -> None:
        peak = {"allocated": 100, "reserved": 120, "device": 150, **figures}
        stages = [
            {"stage": stage, "phase": "loss", "layers": 1, **{name: size - 10 * stage for name, size in peak.items()}}
            for stage in range(pp)
        ]
        changed: Estimate = real.model_copy(
            update={
                "peak": real.peak.model_copy(update=peak),
                "verdict": verdict,
                "interval": real.interval.model_copy(update={"low": low, "high": high}),
                "stages": tuple(StagePeak.model_validate(stage) for stage in stages),
                "strategy": real.strategy.model_copy(update={"pp": pp}),
            }
        )
        monkeypatch.setattr(validation, "predict", lambda *_: changed)

    return say


def compared(*changes: dict[str, Any], **more: Any) -> Validation:
    return validation.validate(runs_of(*changes, **more))


# ------------------------------------------------------------------------------------------------------------- scoring


def test_a_card_of_another_memory_has_its_own_rates() -> None:
    """The H100 of 96 GB that torchtitan's benchmarks use are slower than those of 80 (arXiv:2410.06511)."""
    usual, wide = (run_of(gpu="h100", gpu_memory=size) for size in (None, "95.04 GiB"))
    presets = validation.Presets()
    assert [validation.card_of(run, presets).name for run in (usual, wide)] == ["h100", "h100-96g"]
    slow, fast = (validation.predict(run, presets).time for run in (wide, usual))
    assert slow.tokens_per_second_per_gpu < fast.tokens_per_second_per_gpu
    assert validation.card_of(run_of(gpu="h100", gpu_memory="60 GiB"), presets).name == "h100", "no card has that"


def test_a_published_group_is_predicted_on_the_nodes_that_it_ran_on() -> None:
    """BLOOM's sixteen GPUs are two nodes of Jean Zay, whose Omni-Path carries 135 Gb/s; a stated network goes first."""
    presets, run = validation.Presets(), run_of(gpu="a100-80g", gpus=16)
    published, stated = run.model_copy(update={"group": "BLOOM"}), {"network": 1e9, "adapters": 2}
    nodes = [
        validation.on_network(api.single(model="llama-2-7b", gpu="a100-80g", gpus=16).job, each, presets).node
        for each in (run, published, published.model_copy(update=stated))
    ]
    assert [node.name for node in nodes] == ["dgx-a100-80g", "jean-zay-a100", "jean-zay-a100"]
    assert [node.internode_bytes_per_s_per_gpu for node in nodes] == [25e9, 2.5e9, 1e9]
    assert [node.adapters for node in nodes] == [None, 4, 2]
    assert validation.Presets().node("BLOOM", "Volta").name == "jean-zay-v100"


def test_errors_by_hand(said: Callable[..., None]) -> None:
    """110/100, 120/150 and 150/142.857: the median is 0.1, the 90th percentile lies 0.8 of the way to the worst."""
    said(allocated=110)
    found = compared(
        {"measured": {"allocated": 100}, "group": "a"},
        {"measured": {"reserved": 150}, "group": "b"},
        {"measured": {"device": 10**9}, "group": "b"},
    )
    assert [score.error for score in found.runs] == pytest.approx([0.1, -0.2, 150 / 10**9 - 1])
    said(allocated=110, device=1050)
    found = compared(
        {"measured": {"allocated": 100}, "group": "a"},
        {"measured": {"reserved": 150}, "group": "b"},
        {"measured": {"device": 1000}, "group": "b"},
    )
    total = found.summary
    assert total.count == 3
    assert [total.median_abs_error, total.p90_abs_error, total.worst] == pytest.approx([0.1, 0.18, 0.2])
    assert total.worst_id == "r1"
    groups = {(g.by, g.name, g.figure): g.worst for g in found.groups}
    assert groups["group", "a", "allocated"] == pytest.approx(0.1)
    assert groups["group", "b", "device"] == pytest.approx(0.05)
    assert groups["framework", "fsdp2", "reserved"] == pytest.approx(0.2)
    assert groups["gpu", "a100-80g", "reserved"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("outcome", "verdict", "fits", "rejects"),
    [
        ("oom", "fits", 1, 0),
        ("oom", "tight", 0, 0),
        ("oom", "does-not-fit", 0, 0),
        ("fits", "fits", 0, 0),
        ("fits", "tight", 0, 0),
        ("fits", "does-not-fit", 0, 1),
    ],
)
def test_verdicts(said: Callable[..., None], outcome: str, verdict: str, fits: int, rejects: int) -> None:
    """Tight is never wrong: it says that the job may run out."""
    said(verdict)
    total = compared({"outcome": outcome}).summary
    assert (total.false_fits, total.false_rejects) == (fits, rejects)
    assert (total.ran_out, total.ran) == ((1, 0) if outcome == "oom" else (0, 1))
    assert (total.count, total.median_abs_error, total.worst_id) == (0, None, None)


def test_what_ran_out_of_memory_is_a_bound(said: Callable[..., None]) -> None:
    said()
    assert compared({"outcome": "oom", "measured": {"allocated": 90}}).runs == ()


def test_a_figure_of_unknown_kind_is_listed_and_not_scored(said: Callable[..., None]) -> None:
    said()
    found = compared({"measured": {"unknown": 130, "reserved": 100}})
    assert [(score.figure, score.measured) for score in found.runs] == [("reserved", 100)]
    (listed,) = found.unknown
    assert (listed.measured, listed.allocated, listed.reserved, listed.device) == (130, 100, 120, 150)


@pytest.mark.parametrize(
    ("rank", "predicted"),
    [("max", 100), ("first stage", 100), ("last", 70), ("stage 2 of 4", 90), (0, 100), ("3", 90), (7, 70)],
)
def test_the_rank_that_was_read(said: Callable[..., None], rank: str | int, predicted: int) -> None:
    """Four stages on 8 GPUs, each 10 bytes below the one before; ranks 2 and 3 are the second stage."""
    said(pp=4)
    assert compared({"rank": rank, "measured": {"allocated": 100}}).runs[0].predicted == predicted


@pytest.mark.parametrize(("rank", "says"), [("stage 2 of 8", "4 pipeline stages"), (8, "0 to 7")])
def test_a_rank_that_is_not_there(said: Callable[..., None], rank: str | int, says: str) -> None:
    said(pp=4)
    found = compared({"rank": rank, "measured": {"allocated": 100}})
    assert found.runs == ()
    assert says in found.not_modelled[0].reason


def test_the_interval_is_moved_to_the_figure(said: Callable[..., None]) -> None:
    """It spans 140 to 155 around 150 on the device, so 110 to 125 around 120 reserved."""
    said(low=140, high=155)
    sizes = [{"reserved": size} for size in (109, 110, 125, 126)] + [{"device": 140}, {"device": 156}]
    found = compared(*({"measured": size} for size in sizes))
    assert [score.within for score in found.runs] == [False, True, True, False, True, False]
    assert (found.summary.covered, found.summary.covered_of) == (3, 6)


def test_aims(said: Callable[..., None]) -> None:
    said(allocated=110)
    aims = (
        {"name": "one GPU", "only": {"gpus": [1]}, "median": 0.2},
        {"name": "several", "never": {"gpus": [1]}, "median": 0.2},
        {"name": "nf4", "only": {"strategy.quantize": ["nf4"]}, "median": 0.01},
        {"name": "grade B", "only": {"grade": ["B"]}, "median": 0.01},
    )
    found = compared(
        {"gpus": 1, "measured": {"allocated": 100}},
        {"gpus": 8, "measured": {"allocated": 50}},
        {"gpus": 8, "strategy": {"quantize": "nf4"}, "measured": {"allocated": 100}},
        target=tuple(Target.model_validate({**aim, "figure": "allocated", "p90": 0.3}) for aim in aims),
    )
    assert [(t.name, t.count, t.met) for t in found.targets] == [
        ("one GPU", 1, True), ("several", 2, False), ("nf4", 1, False), ("grade B", 0, None)
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- throughput


def spoken(monkeypatch: pytest.MonkeyPatch, speeds: dict[str, float]) -> None:
    """Make the estimate of each run say a throughput, in a range from a fifth less to a quarter more."""
    real = memcalc.estimate(model="llama-2-7b", gpu="a100-80g", gpus=8, zero=3)
    assert real.time is not None

    def predict(run: Run, *_: Any) -> Estimate:
        time = real.time.model_copy(  # type: ignore[union-attr]
            update={"tokens_per_second_per_gpu": speeds[run.id], "step": 1.0, "low": 0.8, "high": 1.25}
        )
        return real.model_copy(update={"time": time})

    monkeypatch.setattr(validation, "predict", predict)


def test_throughput_is_scored_with_or_without_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000, 900 and 2000 said of 1000, 1000 and 1000: 0, -10% and +100%, the last beyond its range of 1600 to 2500."""
    spoken(monkeypatch, {"r0": 1000, "r1": 900, "r2": 2000, "r3": 1})
    speed = {"tokens_per_second_per_gpu": 1000.0}
    found = compared(
        {**speed, "group": "a", "measured": {"allocated": 10**10}}, {**speed, "group": "a"}, {**speed, "group": "b"},
        {"group": "b", "outcome": "oom"},
    )  # fmt: skip
    assert [(row.id, row.group, row.measured, row.predicted) for row in found.throughput] == [
        ("r0", "a", 1000, 1000), ("r1", "a", 1000, 900), ("r2", "b", 1000, 2000)
    ]  # fmt: skip
    assert [row.error for row in found.throughput] == pytest.approx([0, -0.1, 1])
    assert [(row.low, row.high) for row in found.throughput] == [(800, 1250), (720, 1125), (1600, 2500)]
    assert [row.within for row in found.throughput] == [True, True, False]
    assert [row.claim for row in found.ranges] == [row.coverage for row in catalog.step_time().span]
    assert all(row.crossed is not None and row.crossed >= row.claim for row in found.ranges if row.claim)
    groups = {part.name: part for part in found.throughput_groups}
    assert list(groups) == ["a", "b", "all"]
    assert [groups[name].median_abs_error for name in groups] == pytest.approx([0.05, 1, 0.1])
    assert [groups[name].covered for name in groups] == [2, 0, 2]
    assert len(found.runs) == 1
    assert [verdict.outcome for verdict in found.verdicts] == ["fits", "fits", "fits", "oom"]


def test_a_group_of_the_fit_has_its_errors_with_the_source_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    spoken(monkeypatch, {"r0": 1000, "r1": 1000})
    speed = {"tokens_per_second_per_gpu": 1000.0}
    of_fit = next(row for row in catalog.step_time().error if row.name == "InternEvo")
    own, other, every = compared({**speed, "group": "InternEvo"}, {**speed, "group": "mine"}).throughput_groups
    assert (own.left_out_median, own.left_out_p90) == (of_fit.crossed_median, of_fit.crossed_p90)
    assert (other.left_out_median, every.left_out_median) == (None, None)


def test_layouts_of_a_sweep_are_put_in_order_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured 100, 98, 60, 40 and said 90, 95, 20, 50: of six pairs five are apart, of which four are in order."""
    spoken(monkeypatch, {"r0": 90, "r1": 95, "r2": 20, "r3": 50, "r4": 7})
    measured = (100.0, 98.0, 60.0, 40.0)
    runs = [{"sweep": "s", "group": "g", "tokens_per_second_per_gpu": each} for each in measured]
    found = compared(*runs, {"sweep": "alone", "group": "g", "tokens_per_second_per_gpu": 5.0})
    (order,) = found.orders
    assert (order.group, order.sweep, order.layouts, order.pairs, order.right) == ("g", "s", 4, 5, 4)
    assert (order.regret, order.rank) == (pytest.approx(0.02), 2)


def test_screen_and_page_tell_of_throughput(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    rows = [TEXT.replace("lab-1", f"lab-{n}").replace('group = "lab"', f'group = "lab"\nsweep = "s"\n'
            f"tokens_per_second_per_gpu = {speed}") for n, speed in enumerate((1000.0, 2000.0, 3000.0))]  # fmt: skip
    path.write_text("".join(rows), encoding="utf-8")
    assert "Throughput of 3 runs: |error| median" in command(str(path)).stdout
    page = command(str(path), "--format", "markdown").stdout
    assert "## Throughput of these runs\n" in page
    assert "Layouts of a sweep in order" in page


# --------------------------------------------------------------------------------------------------------- predictions


def test_a_run_is_predicted_as_the_command_would() -> None:
    own = memcalc.estimate(
        model="llama-2-7b", gpu="a100-80g", gpus=8, seq_len=4096, micro_batch=1, framework="fsdp2",
        precision="bf16-mixed", zero=3, recompute="full",
    )  # fmt: skip
    assert validation.predict(run_of()).peak == own.peak


def test_capacity_and_context_of_the_run_replace_the_presets() -> None:
    budget = validation.predict(run_of(gpu_memory="40 GiB", context="1.5 GiB")).budget
    assert (budget.capacity, budget.context) == (40 * GIB, 3 * GIB // 2)
    assert validation.predict(run_of()).budget.capacity == catalog.gpu("a100-80g").memory_bytes


def test_an_inline_model() -> None:
    flat = {"n_layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 1000, "max_positions": 4096}
    model = validation.predict(run_of(model=flat, gpus=1, strategy={"framework": "plain", "precision": "bf16"})).model
    # two untied embeddings, two blocks of 4 h² and 3 h ffn and two norms, one norm after them
    assert model.parameters == 2 * 1000 * 64 + 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 64


def test_words_and_other_fields() -> None:
    words, settings = validation.job_of(
        run_of(workload={"seq_len": 8, "lora_dropout": 0.1}, strategy={"tp": 2, "reduce_dtype": "bf16", "own": 1})
    )
    assert words == {"gpus": 8, "seq_len": 8, "tp": 2}
    assert settings == {"workload.lora_dropout": 0.1, "strategy.reduce_dtype": "bf16", "strategy.own": 1}


def test_what_is_not_modelled_is_listed_with_its_sentence() -> None:
    found = compared(
        {"strategy": {"no_such_field": 1}, "measured": {"allocated": 10**10}},
        {"strategy": {"precision": "bf17"}},
        {"gpu": "no-such-gpu"},
        {"measured": {"allocated": 10**10}},
    )
    reasons = {entry.id: entry.reason for entry in found.not_modelled}
    assert list(reasons) == ["r0", "r1", "r2"]
    assert "no_such_field" in reasons["r0"]
    assert "bf17" in reasons["r1"]
    assert [score.id for score in found.runs] == ["r3"]


# ---------------------------------------------------------------------------------------------------------- which runs


def test_some_of_the_runs() -> None:
    runs = runs_of(
        {"grade": "A", "group": "x", "assumed": ["workload.seq_len"]},
        {"grade": "A-", "group": "y", "measured": {"allocated": 1, "device": 2}},
        {"grade": "B", "group": "x"},
    )

    def kept(**wanted: Any) -> list[str]:
        return [run.id for run in validation.chosen(runs, **wanted).run]

    assert kept() == ["r0", "r1", "r2"]
    assert kept(strict=True) == ["r1", "r2"]
    assert kept(group="x") == ["r0", "r2"]
    assert kept(grade="A") == ["r0", "r1"]
    assert kept(grade="A-") == ["r1"]
    assert kept(figure="device") == ["r1"]
    assert validation.chosen(runs, figure="device").run[0].measured.figures == {"device": 2}
    with pytest.raises(UnknownNameError, match="must be one of x, y"):
        kept(group="z")
    with pytest.raises(UnknownNameError, match="must be one of A, A-, B"):
        kept(grade="C")


# ---------------------------------------------------------------------------------------------------------------- files


def test_sizes_and_ranks_are_read() -> None:
    run = run_of(gpu_memory="79.15 GiB", measured={"allocated": "15.33 GiB", "device": 12345}, rank=3)
    assert run.gpu_memory == 84986665370
    assert run.measured.figures == {"allocated": 16460462162, "device": 12345}
    assert run.rank == "3"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('group = "lab"', 'grup = "lab"'), ("run lab-1", "'grup'", "did you mean 'group'?")),
        (("allocated =", "alocated ="), ("'alocated'", "did you mean 'allocated'?")),
        (('"16 GiB"', '"16 GX"'), ("allocated '16 GX'", "79.15 GiB")),
        (('"16 GiB"', "0"), ("allocated 0", "above 0")),
        (('"16 GiB"', "true"), ("allocated True",)),
        (('grade = "A"', 'grade = "D"'), ("grade 'D'", "'A'")),
        (('grade = "A"', ""), ("key 'grade'", "is missing")),
        (("gpus = 8", 'gpus = "8"'), ("gpus '8'", "integer")),
        (('group = "lab"', 'rank = "second"'), ("rank 'second'", "first stage")),
        (('group = "lab"', 'rank = "stage 5 of 4"'), ("rank 'stage 5 of 4'",)),
        (('group = "lab"', 'outcome = "fit"'), ("outcome 'fit'", "'oom'")),
        (("[[run]]", "[[runs]]"), ("table 'runs'", "did you mean 'run'?")),
        (("[[run]]", "[run]"), ("[[run]] tables",)),
        (
            (
                'model = "llama-2-7b"',
                "model = { n_layers = 2, hidden = 64, heads = 4, vocab = 9, max_positions = 9, hiden = 4 }",
            ),
            ("model key 'hiden'", "did you mean 'hidden'?"),
        ),
    ],
)
def test_a_wrong_file_gets_one_sentence(tmp_path: Path, change: tuple[str, str], says: tuple[str, ...]) -> None:
    path = tmp_path / "mine.toml"
    text = TEXT.replace(*change)
    path.write_text(text, encoding="utf-8")
    result = command(str(path))
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert all(part in result.stderr for part in says), result.stderr


def test_an_unknown_field_of_an_aim() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'strategy'"):
        Target.model_validate({"name": "a", "figure": "device", "median": 1.0, "p90": 1.0, "only": {"strategi.x": [1]}})


def test_an_explanation_names_a_run(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[[explained]]\nreason = "why"\n', encoding="utf-8")
    with pytest.raises(InputError, match="id or ids must be given"):
        read_runs([str(tmp_path)])


def test_a_folder_is_read_whole_and_each_id_stands_once(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TEXT, encoding="utf-8")
    (tmp_path / "b.toml").write_text(
        TEXT.replace("lab-1", "lab-2")
        + '[[left_out]]\nid = "x"\nreason = "no sequence length"\n'
        + '[[explained]]\nids = ["lab-2"]\nreason = "read coarsely"\n',
        encoding="utf-8",
    )
    (tmp_path / "notes.md").write_text("no runs", encoding="utf-8")
    runs = read_runs([str(tmp_path)])
    assert [run.id for run in runs.run] == ["lab-1", "lab-2"]
    assert runs.left_out[0].reason == "no sequence length"
    assert runs.explained[0].every_id == ("lab-2",)
    with pytest.raises(CombinationError, match="lab-1"):
        read_runs([str(tmp_path), str(tmp_path / "a.toml")])


def test_an_empty_folder_and_an_absent_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(FileError, match=r"^(file|runs) .*: "):
            read_runs([str(path)])


# -------------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    more = TEXT.replace("lab-1", "lab-2").replace("zero = 3", "zero = 3, unheard_of = 1")
    path.write_text(f'{TEXT}{more}[[left_out]]\nid = "x"\nreason = "no batch"\n', encoding="utf-8")
    return str(path)


def test_json_has_the_published_fields(file: str) -> None:
    result = command(file, "--format", "json")
    said = json.loads(result.stdout)
    assert result.exit_code == 0
    assert said["schema"] == "memcalc.validate/1"
    assert {"id", "figure", "measured", "predicted", "error"} <= set(said["runs"][0])
    wanted = {"count", "median_abs_error", "p90_abs_error", "worst", "false_fits", "false_rejects"}
    assert wanted <= set(said["summary"])
    assert [(row["id"], row["figure"], row["measured"]) for row in said["runs"]] == [
        ("lab-1", "allocated", 16 * GIB), ("lab-1", "device", 20 * GIB)
    ]  # fmt: skip
    for row in said["runs"]:
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


def test_terminal_csv_and_page(file: str) -> None:
    shown = command(file, "--worst", "1").stdout
    assert "2 figures of 1 run" in shown
    assert [row.split()[:2] for row in shown.splitlines() if row.startswith("lab-")] == [["lab-1", "total"]]
    assert "1 not modelled: " in shown
    assert "unheard_of" in shown
    whole = command(file, "--worst", "1", "-v").stdout
    assert "Worst 1" in whole
    assert "By group" in whole
    rows = list(csv.DictReader(io.StringIO(command(file, "--format", "csv").stdout)))
    assert [(row["run"], row["measured [GiB]"]) for row in rows] == [("lab-1", "16.000"), ("lab-1", "20.000")]
    page = command(file, "--format", "markdown").stdout
    for heading in ("What is compared", "By group", "By framework and era", "By GPU", "Does it fit?", "Left out"):
        assert f"## {heading}\n" in page
    assert "no batch" in page


def test_a_figure_is_called_as_on_other_screens_and_a_file_keeps_its_word(file: str) -> None:
    """What nvidia-smi reads is the total; CSV and JSON have the key of a runs file, and a sign that programs read."""
    for form in ("rich", "markdown", "html", "plain"):
        text = command(file, "--format", form).stdout
        assert "total" in text
        assert not re.search(r"\bdevice\b", text)
        assert not re.search(r"(?<![\w.-])-\d", text)
    rows = list(csv.DictReader(io.StringIO(command(file, "--format", "csv").stdout)))
    assert {row["figure"] for row in rows} == {"allocated", "device"}
    assert all(re.fullmatch(r"[+-]\d+\.\d\d", row["error [%]"]) for row in rows)


def test_a_screen_of_many_groups_is_short_and_v_has_each(said: Callable[..., None]) -> None:
    """Twenty lines, whatever the number of groups; the largest error is on it, its sign no hyphen."""
    said(allocated=100, reserved=120, device=150)
    sizes = [{"allocated": 90 + n, "reserved": 130, "device": 151 + n} for n in range(12)]
    found = compared(*({"measured": size, "group": f"group {n}"} for n, size in enumerate(sizes)))
    brief, whole = (render(validation_report(found), "rich", width=80, details=details) for details in (False, True))
    assert len(brief.splitlines()) <= 20
    assert "group 3" not in brief
    assert all(f"group {n}" in whole for n in range(12))
    furthest, *_ = [row for row in brief.splitlines() if row.startswith("r0 ")]
    assert furthest.split() == ["r0", "allocated", "0.000", "0.000", "+11.11", "fsdp2"]
    assert "−7.69" in whole
    assert "Predicted not to fit, ran: 0 of 12" in brief


def test_options_of_the_command(file: str) -> None:
    for name in ("device", "total"):
        assert len(json.loads(command(file, "--figure", name, "--format", "json").stdout)["runs"]) == 1
    assert "did you mean 'reserved'?" in command(file, "--figure", "reservd").stderr
    assert "no run is left" in command(file, "--grade", "B").stderr


# ------------------------------------------------------------------------------------------------------ what is shipped


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.name)
def test_a_shipped_file(path: Path) -> None:
    """Its models and GPUs are known, and whatever it measured or left out has a source or a reason."""
    runs = read_runs([str(path)])
    assert [run.id for run in runs.run if run.outcome == "oom" and run.measured.figures] == []
    for run in runs.run:
        catalog.gpu(run.gpu)
        if isinstance(run.model, dict):
            from_flat({"name": run.id, **run.model})
        else:
            api.load_model(run.model)


def test_the_shipped_files_together() -> None:
    runs = read_runs()
    known, left_out = {run.id for run in runs.run}, [entry.id for entry in runs.left_out]
    assert len(runs.run) > 100
    assert len(left_out) == len(set(left_out))
    assert not known & set(left_out)
    assert {name for entry in runs.explained for name in entry.every_id} <= known
