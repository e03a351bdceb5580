"""memcalc diff: sums that are exact, steps that are estimates, every kind of side, and sides that are none."""

from __future__ import annotations

import csv
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from command_lines import keywords
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

import memcalc
from memcalc.cli.app import app
from memcalc.errors import InputError, MissingError
from memcalc.report import render
from memcalc.report.charts.changes import diff_chart
from memcalc.report.diff import headline, report, signed
from memcalc.results.changes import Diff, DiffCost
from memcalc.results.estimates import Estimate
from memcalc.units import GIB

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
JOB: dict[str, Any] = {"model": "gpt2", "gpu": "a100-80g", "gpus": 4, "global_batch": 64}
WORDS = ("--model", "gpt2", "--gpu", "a100-80g", "--gpus", "4")
BYTES = ("allocated", "reserved", "device", "host_memory", "tier_memory")
DERIVED = {"dp", "accumulation_steps", "autocast", "strategy.reduce_dtype"}
"""What follows from other fields, and may change on the way and back."""
DS = '{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}'
LARGER = DS.replace('"train_micro_batch_size_per_gpu": 2', '"train_micro_batch_size_per_gpu": 4')
SCRIPT = """\
#!/bin/bash
#SBATCH --gres=gpu:a100-80g:4
#SBATCH --nodes=1
torchrun --nproc_per_node 4 train.py --model_name_or_path gpt2 --model_max_length 1024 --output_dir out \\
    --per_device_train_batch_size 2 --bf16 True --gradient_accumulation_steps 8 --deepspeed ds.json
"""
ALIKE = '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str, width: int = 100) -> Result:
    return CliRunner().invoke(app, ["diff", *words], env={"COLUMNS": str(width), "NO_COLOR": "1"})


def check_sums(found: Diff) -> None:
    """Everything that holds of any answer."""
    start, end = found.a.estimate, found.b.estimate
    for name in BYTES:
        assert sum(getattr(step.cost, name) for step in found.steps) == getattr(found.total, name)
    assert found.total.device == end.peak.device - start.peak.device
    assert found.total.host_memory == end.host_memory - start.host_memory
    for cost in (found.total, *(step.cost for step in found.steps)):
        assert sum(cost.components.model_dump().values()) == cost.device
    assert sum(step.cost.step for step in found.steps) == pytest.approx(found.total.step, abs=1e-9)
    changed = {one.field for one in found.fields}
    assert {one.field for step in found.steps for one in step.fields} - DERIVED <= changed
    by_phase = end.phases[end.peak.phase] - start.phases[start.peak.phase]
    assert sum(term.change for term in found.terms) == by_phase


def again(command: str) -> Estimate:
    """The answer to a line of the program."""
    return memcalc.estimate(**keywords(command))


def check_steps(found: Diff) -> None:
    """Each step, and each change alone, is what an estimate says of its words."""
    for step in found.steps:
        answer = again(step.command)
        asked = memcalc.estimate(**step.job.keywords())
        assert (answer.strategy, answer.peak) == (asked.strategy, asked.peak)
        assert (answer.peak.device, answer.verdict) == (step.after.device, step.after.verdict)
        assert answer.components.model_dump() == {
            name: size for name, size in step.after.components.model_dump().items() if name != "context"
        }


PAIRS = [
    ("recompute=none", "recompute=full,micro_batch=4"),
    ("framework=ddp", "framework=deepspeed,zero=3,offload=optimizer,params"),
    ("tp=1", "tp=2,gpus=8,framework=megatron,optimizer=sgd"),
    ("gpu=v100-16g", "gpu=h100,seq_len=512,loss=fused-linear"),
    ("lora=16,quantize=nf4,precision=bf16,adapter_dtype=bf16", "strategy.reduce_dtype=bf16"),
]


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=[b for _, b in PAIRS])
def test_steps_are_estimates_and_add_up(a: str, b: str) -> None:
    found = memcalc.diff(a, b, **JOB)
    check_sums(found)
    check_steps(found)
    assert found.steps[-1].after == found.b.figures
    first = found.steps[0]
    assert first.alone == first.cost, "the first change is applied to A, alone or not"


def test_a_change_alone_is_the_estimate_with_that_change() -> None:
    found = memcalc.diff("", "recompute=full,micro_batch=4", **JOB)
    alone = {step.name: step.alone for step in found.steps}
    larger = memcalc.estimate(**JOB, micro_batch=4)
    cost = alone["micro-batch 1 → 4"]
    assert cost is not None
    assert cost.device == larger.peak.device - found.a.estimate.peak.device


def test_times_are_those_of_the_plan() -> None:
    """The search predicts the same step for the same strategy."""
    found = memcalc.diff("recompute=none,zero=3,micro_batch=1", "recompute=full,zero=3,micro_batch=2", **JOB)
    own = {"offload": "none", "tp": 1, "pp": 1, "cp": 1, "ep": 1, "precision": "bf16-mixed", **JOB}
    plans = memcalc.plan(recompute="full", zero=3, micro_batch=2, top=1, **own, advice=False).plans
    assert plans[0].time.step == pytest.approx(found.b.time.step, rel=1e-12)
    assert found.steps[-1].after.step == found.b.time.step


def test_the_other_way_round_is_the_negative() -> None:
    there, back = memcalc.diff(*PAIRS[1], **JOB), memcalc.diff(*reversed(PAIRS[1]), **JOB)
    for name in BYTES:
        assert getattr(there.total, name) == -getattr(back.total, name)
    assert {(one.field, one.before, one.after) for one in there.fields} == {
        (one.field, one.after, one.before) for one in back.fields
    }
    opposite = {"appears": "vanishes", "vanishes": "appears", "grows": "shrinks", "shrinks": "grows"}
    assert {(one.name, opposite[one.kind], -one.change) for one in there.terms} == {
        (one.name, one.kind, one.change) for one in back.terms
    }


def test_what_is_the_same_is_no_difference() -> None:
    """FSDP shards everything by itself, so that saying so changes nothing."""
    found = memcalc.diff("zero=3,precision=bf16-mixed", {"attention": "flash"}, **JOB)
    assert (found.fields, found.steps, found.terms) == ((), (), ())
    assert found.total.device == 0
    assert headline(found).startswith("No difference")
    result = run("", "", *WORDS)
    assert (result.exit_code, "No difference" in result.stdout) == (0, True)


def test_what_follows_is_told_with_what_it_follows_from() -> None:
    (step,) = memcalc.diff("", "framework=megatron", **JOB).steps
    assert step.name == "framework fsdp2 → megatron"
    assert {one.field for one in step.fields if one.follows} >= {"zero", "kernels"}


def test_changes_of_which_none_is_possible_alone_are_one_step() -> None:
    """DDP shards nothing, and FSDP without sharding has no mixed precision: both change at once."""
    (step,) = memcalc.diff("framework=ddp,precision=bf16-mixed", "framework=fsdp2,zero=3", **JOB).steps
    assert step.together
    assert [one.field for one in step.fields] == ["framework", "zero"]


def test_a_change_that_is_not_possible_yet_waits() -> None:
    found = memcalc.diff("framework=deepspeed,zero=1", "framework=deepspeed,zero=3,offload=params", **JOB)
    assert [step.fields[0].field for step in found.steps] == ["zero", "offload"]
    last = found.steps[-1]
    assert (last.alone, last.together) == (None, False)
    assert "--zero 3" in last.impossible


def test_parts_of_what_one_job_lacks_go_with_it() -> None:
    """There is no schedule without a pipeline, and no sequence parallelism without tensor parallelism."""
    found = memcalc.diff("pp=2,pp_schedule=gpipe,tp=2,sp=true", "pp=1", **JOB)
    assert [step.name for step in found.steps] == ["tp 2 → 1, sp true → false", "pp 2 → 1, pp-schedule gpipe → 1f1b"]


def test_both_figures_of_a_node_are_told() -> None:
    found = memcalc.diff("framework=deepspeed,zero=3", "framework=deepspeed,zero=3,offload=optimizer", **JOB)
    assert found.total.host_memory == found.b.estimate.host_memory > 0
    assert "Host memory per node" in render(report(found), "rich")
    assert any("not validated" in warning for warning in found.warnings)


# ------------------------------------------------------------------------------------------------------- kinds of sides


def test_files_are_read_as_check_reads_them(folder: Path) -> None:
    (folder / "a.json").write_text(DS, encoding="utf-8")
    (folder / "b.json").write_text(LARGER, encoding="utf-8")
    given = {"model": "gpt2", "gpu": "a100-80g", "gpus": 4, "seq_len": 1024}
    found = memcalc.diff("a.json", "b.json", **given)
    assert [step.name for step in found.steps] == ["micro-batch 2 → 4"]
    for side, name in ((found.a, "a.json"), (found.b, "b.json")):
        assert side.kind == "files"
        assert side.estimate.peak == memcalc.check([name], **given).estimate.peak
    check_sums(found)


def test_words_change_the_other_side_where_that_is_a_file(folder: Path) -> None:
    (folder / "a.json").write_text(DS, encoding="utf-8")
    (folder / "b.json").write_text(LARGER, encoding="utf-8")
    given = {"model": "gpt2", "gpu": "a100-80g", "gpus": 4, "seq_len": 1024}
    files, words = memcalc.diff("a.json", "b.json", **given), memcalc.diff("a.json", "micro_batch=4", **given)
    assert files.total == words.total
    assert words.b.kind == "words"
    assert memcalc.diff("micro_batch=4", "a.json", **given).total.device == -files.total.device


def test_several_files_are_one_job(folder: Path) -> None:
    """The script says model, GPUs and batch, so that no option is needed."""
    (folder / "run.slurm").write_text(SCRIPT, encoding="utf-8")
    (folder / "ds.json").write_text(ALIKE, encoding="utf-8")
    (folder / "ds3.json").write_text(ALIKE.replace('"stage": 1', '"stage": 3'), encoding="utf-8")
    (folder / "run3.slurm").write_text(SCRIPT.replace("ds.json", "ds3.json"), encoding="utf-8")
    found = memcalc.diff("run.slurm,ds.json", "run3.slurm")
    assert [one.field for one in found.fields if not one.follows] == ["zero"]
    assert memcalc.diff("run.slurm,ds.json", "run.slurm").fields == ()


def test_one_model_at_two_places_is_no_difference() -> None:
    """Both axolotl examples name their own copy of a config.json; each evaluates with its own micro-batch.

    The adapters' has ``fp16``, which scales the loss; the other ``float16``, weights of 16 bits without copies. Its
    base of 8 bits is prepared, which holds embedding and head in fp32 for a while.
    """
    folder = EXAMPLES / "preflight"
    files = [str(folder / name) for name in ("axolotl-full-3b/config.yml", "axolotl-lora-3b/lora.yml")]
    found = memcalc.diff(*files, gpu="a100-80g", gpus=1, seq_len=128)
    fields = ["precision", "quantize", "lora", "autocast", "strategy.kbit_passing"]
    fields += ["workload.eval_micro_batch", "micro_batch"]
    assert [one.field for one in found.fields if not one.follows] == fields
    check_sums(found)


def test_what_was_saved_is_the_job_that_was_saved(folder: Path) -> None:
    """An answer in JSON, and the files that it came from, are no difference."""
    (folder / "ds.json").write_text(DS, encoding="utf-8")
    given = {"model": "gpt2", "gpu": "a100-80g", "gpus": 4, "seq_len": 1024}
    checked = memcalc.check(["ds.json"], **given)
    answers = {"check": checked, "estimate": checked.estimate}
    for name, answer in answers.items():
        (folder / f"{name}.json").write_text(json.dumps(answer.model_dump(mode="json", by_alias=True)))
        found = memcalc.diff("ds.json", f"{name}.json", **(given if name == "check" else {**given, "seq_len": "1024"}))
        assert (found.fields, found.b.kind) == ((), "estimate")
    assert memcalc.diff(checked.estimate, "estimate.json").fields == ()
    assert memcalc.diff("check.json", "zero=2").b.estimate.strategy.zero == 2


def test_plans_and_what_they_can_go_back_to(folder: Path) -> None:
    saved = EXAMPLES / "plan.json"
    found = memcalc.diff(str(saved), f"{saved}#1")
    plan = memcalc.load(str(saved))
    assert (found.a.kind, found.a.estimate.strategy) == ("saved plan", plan.plan.strategy)
    assert found.b.estimate.strategy == plan.fallback[0].strategy
    assert memcalc.diff(plan, plan.plan).fields == ()
    plans = memcalc.plan(**JOB, zero=3, recompute="none/full", micro_batch="1/2", tp=1, pp=1, cp=1, top=3)
    (folder / "plans.json").write_text(json.dumps(plans.model_dump(mode="json", by_alias=True)))
    both = memcalc.diff("plans.json", "plans.json#2")
    assert (both.a.estimate.peak.device, both.b.estimate.peak.device) == tuple(p.peak.device for p in plans.plans[:2])
    assert both.b.time.step == pytest.approx(plans.plans[1].time.step, rel=1e-12)


def test_options_count_for_both_sides(folder: Path) -> None:
    saved = str(EXAMPLES / "plan.json")
    found = memcalc.diff(saved, "recompute=full", seq_len=512)
    assert {side.estimate.workload.seq_len for side in (found.a, found.b)} == {512}
    assert [step.name for step in found.steps] == ["recompute none → full"]
    del folder


# ------------------------------------------------------------------------------------------------------ what is no side


@pytest.fixture(scope="module")
def junk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that are no side."""
    folder = tmp_path_factory.mktemp("junk")
    answer = memcalc.estimate(**JOB).model_dump(mode="json", by_alias=True)
    older = {name: value for name, value in answer.items() if name != "job"}
    job = answer["job"]
    contents = {
        "there": DS,
        "deep": "[" * 100_000,
        "list": "[1]",
        "large": " " * (2 << 20),
        "sweep": '{"schema": "memcalc.sweep/1"}',
        "half": '{"schema": "memcalc.estimate/1"}',
        "older": json.dumps(older),
        "unnamed": json.dumps({**answer, "job": {**job, "model": None}}),
        "module": json.dumps({**answer, "job": {**job, "model": None, "module": {"module": "a:b"}}}),
        "stale": json.dumps({**answer, "job": {**job, "options": {**job["options"], "zero": 2}}}),
        "answer": json.dumps(answer),
        "saved": (EXAMPLES / "plan.json").read_text(encoding="utf-8"),
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(content, encoding="utf-8")
    (folder / "binary.json").write_bytes(b"\xff\xfe{}")
    os.mkfifo(folder / "pipe.json")
    return folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zro=3", "did you mean 'zero'"),
        ("zero=9", "must be 0, 1, 2 or 3"),
        ("zero=1,zero=2", "is given twice"),
        ("zero=2/3", "takes one value"),
        ("tp=3", "memcalc: A: tp 3"),
        ("absent.json", "is neither a file nor settings"),
        ("there.json,absent.toml", "absent.toml"),
        ("zero", "is neither a file nor settings"),
        ("sp=maybe", "must be true or false"),
        (".", "is a folder; give the file that starts its job: there.json"),
        ("pipe.json", "regular file"),
        ("binary.json", "UTF-8"),
        ("deep.json", "must be JSON with"),
        ("large.json", "at most 1 MiB"),
        ("list.json", "must be a table"),
        ("sweep.json", "memcalc.saved-plan/2"),
        ("half.json", "is missing"),
        ("older.json", "an older memcalc wrote none"),
        ("unnamed.json", "must name its model"),
        ("module.json", "recorded model"),
        ("stale.json", "create it again"),
        ("saved.json#9", "must be from 1 to"),
        ("saved.json#x", "whole number"),
        ("answer.json#2", "one job only"),
    ],
)
def test_what_is_no_side_is_one_sentence(junk: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    monkeypatch.chdir(junk)
    result = run(text, "recompute=full", *WORDS)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())
    assert result.stderr.startswith("memcalc: ")
    assert result.stdout == ""


def test_what_only_the_user_knows_is_asked_for(folder: Path) -> None:
    with pytest.raises(MissingError, match="Pass --model and --gpu"):
        memcalc.diff("zero=2", "zero=3")
    with pytest.raises(MissingError, match="Pass --gpu"):
        memcalc.diff("model=gpt2", "zero=3", model="gpt2")
    (folder / "ds.json").write_text(DS, encoding="utf-8")
    result = run("ds.json", "zero=3")
    assert (result.exit_code, "--model" in result.stderr) == (3, True)
    assert run("", "", *WORDS, "--terms", "few").exit_code == 2


# ------------------------------------------------------------------------------------------------------ how it is shown


@pytest.fixture(scope="module")
def shown() -> Diff:
    """A difference of several steps, one of which needs another one."""
    return memcalc.diff("framework=ddp", "framework=megatron,tp=2,sp=false,recompute=full,micro_batch=8,zero=1", **JOB)


def test_it_ends_with_0_whichever_fits() -> None:
    result = run("model=gpt2", "model=llama-2-70b,seq_len=4096", *WORDS[2:])
    assert result.exit_code == 0
    assert "does not fit" in result.stdout


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_holds_every_figure(shown: Diff, width: int) -> None:
    """No row is cut: what does not fit is a column that is left out."""
    text = render(report(shown), "rich", width=width)
    lines = [line for line in text.splitlines() if not line.startswith("  memcalc ")]
    assert max(map(len, lines)) <= width
    for step in shown.steps:
        assert signed(step.cost.device / GIB) in text
    assert "\x1b" not in text


def test_every_format_has_the_same_figures(shown: Diff) -> None:
    whole = report(shown)
    rows = list(csv.DictReader(io.StringIO(render(whole, "csv"))))
    steps, last = rows[:-1], rows[-1]
    assert [int(row["device_bytes"]) for row in steps] == [step.cost.device for step in shown.steps]
    assert sum(int(row["device_bytes"]) for row in steps) == int(last["device_bytes"]) == shown.total.device
    assert Diff.model_validate_json(render(whole, "json")) == shown
    for form in ("markdown", "html", "rich"):
        text = render(whole, form)
        assert all(signed(step.cost.device / GIB) in text for step in shown.steps)
    latex = render(whole, "latex")
    assert "−" not in latex
    assert "→" not in latex
    assert all(term.name in render(report(shown, None), "markdown") for term in shown.terms)


def test_the_line_that_reproduces_it_does(shown: Diff) -> None:
    line = shown.command.split()
    assert line[:2] == ["memcalc", "diff"]
    again_ = CliRunner().invoke(app, [*line[1:], "--format", "json"])
    assert Diff.model_validate_json(again_.stdout).total == shown.total
    assert memcalc.diff(shown.a.estimate, "").command == "", "an answer that is in no file cannot be typed"


def test_the_chart_draws_what_the_steps_say(shown: Diff) -> None:
    figure = Figure(figsize=(9, 5))
    diff_chart(shown).draw(figure)
    (axes,) = figure.axes
    assert axes.get_xlim()[0] == 0
    assert "[GiB]" in axes.get_xlabel()
    patches = {patch.get_gid(): patch for patch in axes.patches if patch.get_gid()}
    reached = shown.a.figures.device
    for place, step in enumerate(shown.steps, 1):
        bar = patches[f"step-{place}"]
        ends = sorted((reached / GIB, step.after.device / GIB))
        assert [bar.get_x(), bar.get_x() + bar.get_width()] == pytest.approx(ends)
        reached = step.after.device
    for place, figures in (("a", shown.a.figures), ("b", shown.b.figures)):
        widths = [patch.get_width() for name, patch in patches.items() if name.startswith(f"{place}-")]
        assert sum(widths) == pytest.approx(figures.device / GIB)


def test_a_chart_is_written_beside_the_answer(folder: Path) -> None:
    result = run("", "recompute=full", *WORDS, "--chart", "diff.svg")
    assert result.exit_code == 0
    text = (folder / "diff.svg").read_text(encoding="utf-8")
    assert 'id="diff-step-1"' in text
    assert "recompute none → full" in text
    assert run("", "recompute=full", *WORDS, "--chart", "diff.txt").exit_code == 2


# --------------------------------------------------------------------------------------------------------- random pairs

CHOICES: dict[str, list[str]] = {
    "framework": ["fsdp2", "ddp", "deepspeed", "megatron", "hf"],
    "zero": ["0", "1", "2", "3"],
    "recompute": ["none", "full", "every-2", "selective-ops"],
    "micro_batch": ["1", "2", "4"],
    "optimizer": ["adamw", "sgd", "lion"],
    "tp": ["1", "2"],
    "precision": ["bf16-mixed", "fp32", "bf16"],
    "loss": ["standard", "fused-linear"],
    "gpus": ["2", "4", "8"],
    "seq_len": ["512", "1024"],
}


def _random_words(rng: random.Random) -> str:
    """Words that are possible together."""
    while True:
        chosen = rng.sample(sorted(CHOICES), rng.randint(1, 5))
        words = {name: rng.choice(CHOICES[name]) for name in chosen}
        try:
            memcalc.estimate(**{**JOB, **words})
        except InputError:
            continue
        return ",".join(f"{name}={value}" for name, value in words.items())


def check_pair(seed: int) -> None:
    rng = random.Random(seed)  # noqa: S311 (the same pairs each time)
    a, b = _random_words(rng), _random_words(rng)
    there, back = memcalc.diff(a, b, **JOB), memcalc.diff(b, a, **JOB)
    for found in (there, back):
        check_sums(found)
    check_steps(there)
    assert isinstance(there.total, DiffCost)
    assert all(getattr(there.total, name) == -getattr(back.total, name) for name in BYTES)
    assert bool(there.fields) == bool(there.steps)


@pytest.mark.parametrize("seed", range(2))
def test_any_two_jobs_add_up(seed: int) -> None:
    check_pair(seed)


@pytest.mark.slow
def test_many_more_pairs_add_up() -> None:
    for seed in range(100, 120):
        check_pair(seed)
