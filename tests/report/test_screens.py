"""Answers as they are seen: rows that a shell and a reader can follow, columns that hold, figures that are told."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from report_records import make_estimate
from typer.testing import CliRunner

from memcalc import api
from memcalc.cli.app import app
from memcalc.preflight.fix import _changes
from memcalc.report import check
from memcalc.report.page.head import gpu_bar
from memcalc.report.palette import COMPONENTS, ROLES
from memcalc.report.stacked_bar import letters
from memcalc.report.tables import Column, Document, Line, Table
from memcalc.report.terminal import draw
from memcalc.report.terminal_rows import broken
from memcalc.results.check import CheckFinding, Severity
from memcalc.serving.stages import GRAPHS, NON_TORCH, WEIGHTS

pytestmark = pytest.mark.usefixtures("answers_once")
SERVED = "serve --model 70b --gpu h100 --gpus 4"
FULL = "plan --model 7b --gpu a100-40g --gpus 1 --offload none"
PPO = (
    "rl --algorithm ppo --framework verl --model qwen2.5-7b --gpu a100-40g --gpus 8 --prompt 1k --response 2k "
    "--micro-tokens 16k --reward-model qwen2.5-7b"
)


@cache
def answered(line: str, width: int = 80) -> tuple[int, str]:
    """The exit code of a command, and what it writes on a terminal."""
    done = CliRunner().invoke(app, line.split(), env={"COLUMNS": str(width)})
    return done.exit_code, done.stdout


def shown(line: str, width: int = 80) -> list[str]:
    """The rows of an answer on a terminal."""
    return answered(line, width)[1].rstrip("\n").splitlines()


@pytest.mark.parametrize("width", [40, 60, 90])
def test_a_broken_command_is_the_same_command(width: int) -> None:
    """A shell reads the rows as it reads the line; an option stays with its value, a quoted word whole."""
    line = "memcalc plan --model 'my models/config.json' --gpu h100 --global-batch '4M tokens' --recompute full"
    rows = broken(line, width)
    assert len(rows) > 1
    assert shlex.split("\n".join(rows).replace("\\\n", "")) == shlex.split(line)
    assert all(len(row) <= width for row in rows)
    assert all(row.lstrip().startswith("--") for row in rows[1:])


def test_a_command_that_fits_is_not_broken() -> None:
    """To the last column."""
    assert broken("memcalc plan --model 7b", 23) == ["memcalc plan --model 7b"]


def test_a_figure_stays_with_its_unit() -> None:
    """No row of a paragraph ends between a number and what it counts."""
    data = Table("", (), ())
    for mood, role in (("good", "verdict"), ("", "text"), ("", "warning")):
        for length in range(20, 60):
            text = f"fits · {'x' * length} and 43 GiB of memory for 8 × h100"
            for row in draw(Document((Line(text, role, mood),), data), 60, colour=False).splitlines():
                assert not re.search(r"\d$|×$", row.rstrip()) or row.endswith("h100")
                assert not row.startswith(("GiB", "×"))
            batch = Line(f"fits · {'x' * length} · micro-batch 2 × 16 · offload params", role, mood)
            assert not re.search(r"micro-batch$", draw(Document((batch,), data), 60, colour=False), re.MULTILINE)


@pytest.mark.parametrize(
    "line",
    [
        "max seq-len --model llama-3-8b --gpu h100 --gpus 8", "max micro-batch --model 7b --gpu a100-80g --gpus 8",
        "min gpus --model 70b --gpu h100 --offload none",
    ],
)  # fmt: skip
def test_the_next_command_of_a_limit_is_the_answer(line: str) -> None:
    """Although what an estimate assumes too is left out of it."""
    best = json.loads(CliRunner().invoke(app, [*line.split(), "--format", "json"]).stdout)["best"]
    rows = shown(line)
    at = next(index for index, row in enumerate(rows) if row.startswith("Next"))
    command = " ".join(row.strip(" \\") for row in rows[at + 1 :] if row.startswith("  "))
    assert len(command) < len(best["command"])
    answer = CliRunner().invoke(app, [*shlex.split(command)[1:], "--format", "json"]).stdout
    assert json.loads(answer)["peak"] == best["peak"]


def finding(code: str, line: int, field: str = "", severity: Severity = "warning") -> CheckFinding:
    return CheckFinding(severity=severity, code=code, field=field, line=line, message=f"{field} is odd", suggestion="")


def test_findings_of_one_rule_share_a_line() -> None:
    """From three on, with their count and where they are; an error has its own line, and so have two of a rule."""
    many = [finding("MC001", line, f"k{line}") for line in range(1, 8)]
    errors = [finding("MC003", line, "e", "error") for line in range(10, 14)]
    pair = [finding("MC002", line, "p") for line in (20, 21)]
    lines = [check.grouped(alike) for alike in check.by_rule((*errors, *many, *pair))]
    assert len(lines) == 4 + 1 + 2
    others = "k2 (line 2), k3 (line 3), k4 (line 4), k5 (line 5) and 2 more"
    assert lines[4] == f"  line 1: warning MC001: k1 is odd; 6 more MC001: {others}"


def test_an_edit_names_what_is_unset() -> None:
    """An option that an edit takes away is not followed by nothing."""
    before = make_estimate()
    strategy = before.strategy.model_copy(update={"reshard": "", "lora": None, "sp": True})
    texts = list(_changes(before.model_copy(update={"strategy": strategy.model_copy(update={"reshard": "always"})}),
                          before.model_copy(update={"strategy": strategy})))  # fmt: skip
    assert texts == ["reshard always → unset"]


def test_a_remedy_that_is_broken_is_set_in() -> None:
    """Its second row is not taken for another group."""
    rows = shown(f"{FULL} -v")
    at = next(index for index, row in enumerate(rows) if row.strip() == "paged-adamw-8bit")
    assert rows[at].startswith("    ")
    assert max(map(len, rows)) <= 80


def test_a_ladder_of_80_columns_hides_nothing() -> None:
    """Host memory and the verdict both have their columns; a stage that needs no host memory has no figure there."""
    rows = shown("ladder --model 7b --gpu a100-40g --gpus 8")
    head = next(row for row in rows if row.startswith("#  stage"))
    assert head.split()[-2:] == ["host", "verdict"]
    assert not any("Hidden" in row or " 0.0 " in row for row in rows)


def test_a_tight_post_training_says_its_figure_and_why() -> None:
    """The verdict has the phase and its size, the next lines what the margin makes of it."""
    first, *rows = shown(f"{PPO} --park params,optimizer")
    assert re.fullmatch(r"tight · update holds most, [\d.]+ of 39.4 GiB", first)
    assert any(re.fullmatch(r"Tight: update needs [\d.]+ of 39.4 GiB with the 95% margin\.", row) for row in rows)


def test_a_change_of_post_training_has_one_verdict() -> None:
    """It does not fit and is tight in the same sentence."""
    (change,) = [row for row in shown(PPO) if row.startswith("Change")]
    assert re.fullmatch(r"Change    --park params,optimizer: tight, [\d.]+ GiB", change)


def test_an_engine_without_a_cache_has_a_sum_that_is_read() -> None:
    """What is needed beside what there is, and a minus sign that is one."""
    rows = shown(SERVED)
    assert "weights and buffers need" in " ".join(rows[:2])
    (cache,) = [row for row in shown(f"{SERVED} -v") if row.startswith("KV cache")]
    assert re.fullmatch(r"KV cache +−[\d.]+ +yes", cache)
    needs = " ".join(rows[rows.index(next(row for row in rows if row.startswith("Per GPU"))) :])
    (weights, needed, budget) = (
        float(re.search(pattern, " ".join(rows))[1])  # type: ignore[index]
        for pattern in (r"weights ([\d.]+)", r"buffers need ([\d.]+)", r"of the ([\d.]+) GiB")
    )
    assert weights < needed
    assert f"over by {needed - budget:.2f} GiB" in needs
    assert re.search(r"outside the budget: context [\d.]+", needs)


def test_a_sweep_counts_in_words(tmp_path: Path) -> None:
    """`12 fit`, and names as options have them."""
    (tmp_path / "s.toml").write_text('[jobs]\nmodel = "gpt2"\ngpu = "a100-40g"\nseq_len = [256, 512]\ngpus = 1\n')
    rows = shown(f"sweep {tmp_path / 's.toml'} --jobs 1")
    assert rows[0] == "2 jobs (2 seq-len), plan of each"
    assert rows[1] == "2 fit"


def test_the_smallest_plan_is_not_larger_than_the_best() -> None:
    """Of two plans that replay alike, none is called the smallest where it takes more."""
    smallest = 0
    for words in (
        {"model": "70b", "gpu": "4090", "gpus": 2, "lora": "16", "quantize": "nf4"},
        {"model": "7b", "gpus": 8},
    ):
        plans = api.plan(**{"gpu": "a100-40g", **words}).plans
        for plan in plans:
            smallest += "smallest" in plan.special
            assert "smallest" not in plan.special or plan.peak.device <= plans[0].peak.device
    assert smallest


def test_a_file_that_lacks_one_option_asks_for_it(tmp_path: Path) -> None:
    """And names itself, which of two jobs is no question then."""
    (tmp_path / "a.yml").write_text("base_model: gpt2\nmicro_batch_size: 2\nsequence_len: 512\n")
    asked = CliRunner().invoke(app, ["check", str(tmp_path / "a.yml"), "--gpus", "1"])
    assert asked.stderr.strip().endswith("not in a.yml: --gpu. Pass it.")
    (tmp_path / "b.yml").write_text("base_model: gpt2\nmicro_batch_size: 4\nsequence_len: 512\n")
    sides = [str(tmp_path / name) for name in ("a.yml", "b.yml")]
    compared = CliRunner().invoke(app, ["diff", *sides, "--gpu", "h100"])
    assert compared.stderr.strip().endswith("not in a.yml: --gpus. Pass it.")


def test_what_is_over_has_no_colour_of_a_part() -> None:
    """The legend of a job that does not fit shows no swatch for what the bar does not show."""
    large = api.estimate(model="7b", gpu="a100-40g", gpus=1)
    drawn = str(gpu_bar(large))
    assert "over by" in drawn
    assert "swatch free" not in drawn


GRPO = "--algorithm grpo --framework trl@1.14 --model qwen2.5-7b --gpu h100 --gpus 8 --prompt 1k --response 1k"


@pytest.mark.parametrize("line", [f"ladder {GRPO}", f"diff micro_batch=8 logits=fused {GRPO}"])
def test_post_training_has_a_screen_too(line: str) -> None:
    """One row for each stage or step and what to mind; the commands and every role with `-v`."""
    brief, whole = shown(line), shown(f"{line} -v")
    assert len(brief) <= 30 < len(whole)
    assert max(map(len, brief)) <= 80
    assert not any(row.startswith("  memcalc") for row in brief)
    assert not any(row.startswith("All rows  rounds none") for row in brief)


def test_a_host_that_ran_out_is_no_gpu(tmp_path: Path) -> None:
    log = tmp_path / "slurm.log"
    log.write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some tasks have been OOM Killed.\n")
    rows = shown(f"triage {log} --model llama-3-8b --gpu h100 --gpus 8")
    assert "Host      phase unknown (slurm.log:1)" in rows
    assert not any("GPU unknown" in row or "No single change" in row or "make the job fit" in row for row in rows)


def test_a_job_that_cannot_be_the_one_that_failed_is_doubted_on_the_screen(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        'Traceback (most recent call last):\n  File "loss_utils.py", line 36, in ForCausalLMLoss\n'
        "    logits = logits.float()\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 "
        "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.10 GiB memory in use. Of the "
        "allocated memory 20.00 GiB is allocated by PyTorch, and 900.00 MiB is reserved by PyTorch but unallocated.\n"
    )
    job = "--model llama-3-8b --gpu h100 --gpus 8 --framework hf --seq-len 8192"
    assert any(row.startswith("Unknown: whether this is the job") for row in shown(f"triage {log} {job}"))
    assert not any(row.startswith("Unknown:") for row in shown(f"triage {log} {job} --zero 3 --recompute full"))


def test_the_next_triage_reads_the_same_file() -> None:
    """The line to paste has the path as it was given, not the file's name alone."""
    log = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train.log"
    rows = shown(f"triage {log}", 300)
    assert f"  memcalc triage {log} --model NAME --gpu NAME --gpus N" in rows


def test_a_snapshot_shows_what_is_largest() -> None:
    """A screen names three categories and a call site, and counts the others; `-v` has the tables."""
    snapshot = Path(__file__).resolve().parents[2] / "docs" / "examples" / "triage" / "leak.pickle"
    brief, whole = shown(f"triage {snapshot}"), shown(f"triage {snapshot} -v")
    assert len(brief) <= 20
    assert sum(row.endswith(" more: -v") for row in brief) == 2
    assert "By call site" in whole
    assert len(brief) < len(whole)


def test_a_finding_begins_where_no_other_goes_on() -> None:
    """Its later rows are set in deeper than its first."""
    text = f"  line 3: note MC104: {'word ' * 30}"
    first, *others = draw(Document((Line(text),), Table("", (), ())), 60, colour=False).splitlines()
    assert first.startswith("  line 3")
    assert others
    assert all(row.startswith("    word") for row in others)


def test_a_table_of_two_precisions_breaks_no_word_at_80_columns() -> None:
    """The prefix that both have goes first."""
    rows = shown("plan --model mamba-2.8b --gpu a100-80g --gpus 8")
    words = " ".join(row for row in rows if re.match(r"\d ", row)).split()
    assert {"autocast", "mixed", "params+act"} <= set(words)


def test_a_letter_means_the_same_part_in_every_command() -> None:
    """Only the context of one process and those of all roles share a letter: both are what lies outside PyTorch."""
    names = [name for name in (*COMPONENTS, *ROLES, WEIGHTS, GRAPHS, NON_TORCH, "KV cache") if name != "contexts"]
    marks = letters(names)
    assert len(set(marks)) == len(names)
    for name, mark in zip(names, marks, strict=True):
        assert letters(["page cache", name])[1] == mark


OOM = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train.log"
COMMON = (
    "plan --model 7b --gpu a100-40g",
    "plan --model 7b --gpu a100-40g --gpus 8",
    "plan --model 7b --gpu a100-40g --gpus 1",
    "plan --model 7b --gpu a100-40g --gpus 4",
    "plan --model mixtral-8x7b --gpu h100-80g --gpus 16",
    FULL,
    "estimate --model 7b --gpu a100-40g --gpus 8 --zero 3 --recompute full",
    "estimate --model 70b --gpu a100-80g --gpus 16 --framework deepspeed --zero 3 --offload optimizer --recompute full",
    "explain --model 7b --gpu a100-40g --gpus 8 --zero 3 --recompute full",
    "max seq-len --model llama-3-8b --gpu h100 --gpus 8",
    "max seq-len --model 70b --gpu a100-40g --gpus 2 --offload none",
    "min gpus --model 70b --gpu a100-80g",
    "ladder --model 7b --gpu a100-80g --gpus 8",
    "diff recompute=none recompute=full,micro_batch=2 --model 7b --gpu a100-80g --gpus 8",
    "diff tp=1 tp=8,pp=2 --model 70b --gpu h100 --gpus 64 --framework megatron",
    "serve --model 70b --gpu h100",
    "serve --model deepseek-v3 --gpu h100 --gpus 8",
    "serve --model 8b --gpu a100-40g",
    f"triage {OOM} --model llama-3-8b --gpu h100 --gpus 8 --seq-len 8192 --micro-batch 2 --recompute selective-ops",
    "rl --algorithm grpo --framework verl --model 7b --gpu h100 --gpus 8 --prompt 1k --response 2k --micro-tokens 16k",
)


def test_a_long_screen_counts_what_it_leaves_out() -> None:
    """Assumptions first, then the last warnings; nothing of a screen that is short enough, and none without a count."""
    assumed = Line("", label="Assumed", items=tuple(f"setting {count}" for count in range(12)))
    warnings = tuple(Line(f"Warning: remark {count}", "warning") for count in range(15))
    table = Table("", (Column("a"),), (("1",),) * 6, titled=False)
    short, long = (
        draw(Document((), table, (Line("fits"), table, *warnings[:count], assumed)), 60, colour=False).splitlines()
        for count in (2, 15)
    )
    assert sum("setting" in row for row in short) == 3
    assert len(short) < len(long) <= 20
    seen = [row for row in long if "remark" in row]
    (left,) = (row for row in long if re.fullmatch(r"Warning +\d+ more: -v", row))
    assert len(seen) + int(left.split()[1]) == 15
    (row,) = (row for row in long if row.startswith("Assumed"))
    assert row.count("setting") + int(row.split()[-3]) == 12


@pytest.mark.parametrize("line", COMMON, ids=lambda line: " ".join(line.split()[:2]))
def test_a_screen_is_twenty_lines_and_no_row_is_broken(line: str) -> None:
    """At 80 columns, with all that belongs to acting on it; `-v` has the rest."""
    rows = shown(line)
    assert 5 <= len(rows) <= 20
    assert max(map(len, rows)) <= 80
    assert "" not in {rows[0], rows[-1]}
    assert len(shown(f"{line} -v")) > len(rows)


@pytest.mark.parametrize("line", [*COMMON, f"diff micro_batch=8 logits=fused {GRPO}", f"ladder {GRPO}"])
def test_a_difference_has_a_minus_sign_and_no_hyphen(line: str) -> None:
    """On a screen and on a page; what is typed keeps its hyphens."""
    for text in (answered(f"{line} -v")[1], answered(f"{line} -v --format markdown")[1]):
        assert not re.search(r"(?<![\w.\-–·=])(?<!\w )-\d+(\.\d+)?( |%|$)(?!\w*=)", text, re.MULTILINE)


def test_a_plan_that_is_saved_is_not_asked_to_be(tmp_path: Path) -> None:
    """One plan to go back to is told, with `-v` each; both parts together are a screen."""
    path = str(tmp_path / "plan.json")
    words = ["plan", "--model", "7b", "--gpu", "a100-40g", "--gpus", "8"]
    assert any("--save plan.json" in row for row in shown(" ".join(words)))
    said = CliRunner().invoke(app, [*words, "--save", path], env={"COLUMNS": "80"})
    assert "--save" not in said.stdout
    told = said.stderr.splitlines()
    assert told[:2] == [f"Saved plan #1 to {path}.", f"Its config: memcalc export {path}"]
    assert [row.partition(":")[0] for row in told[2:]] == ["Fallback 1"]
    assert told[2].endswith(" more: -v")
    assert len(said.stdout.splitlines()) + len(told) <= 20
    every = CliRunner().invoke(app, [*words, "--save", path, "--force", "-v"]).stderr
    more = int(told[2].split()[-3])
    assert len(re.findall(r"(?m)^Fallback \d", every)) == 1 + more
    assert more >= 1


def test_a_screen_lists_the_plans_that_stand_for_something() -> None:
    """Those that fill the list, which they end, are seen where so many are asked for, and with `-v`."""
    line = "plan --model mixtral-8x7b --gpu h100-80g --gpus 16"
    listed, filled, whole = ([row.split()[:2] for row in shown(text) if re.match(r"\d +\S", row)]
                             for text in (line, f"{line} --top 4", f"{line} -v"))  # fmt: skip
    ranks = [rank for rank, role in filled if role != "-"]
    assert len(ranks) < len(filled)
    assert [rank for rank, _ in listed if rank.isdigit()] == ranks == [str(place) for place in range(1, len(ranks) + 1)]
    assert [row[0] for row in whole][: len(filled)] == [row[0] for row in filled]


def test_beside_plans_one_change_of_a_group_is_shown_and_the_others_counted() -> None:
    """What fits goes before what is tight; the heading says how many are left for `-v`."""
    line = "plan --model 70b --gpu a100-80g --gpus 16"
    answer = json.loads(CliRunner().invoke(app, [*line.split(), "--format", "json"]).stdout)
    rows = shown(line)
    at = next(index for index, row in enumerate(rows) if row.startswith("alternatives to offload on 16 GPUs"))
    changes = rows[at + 1 : at + 4]
    assert not re.search(" (fits|tight|over) ", rows[at + 4])
    assert all(" fits " in row for row in changes)
    left = re.search(r"\((\d+) more: -v\)", rows[at])
    assert left is not None
    assert int(left[1]) == len(answer["nearest"]) - 3


@pytest.mark.parametrize(
    ("line", "leads"),
    [
        ("plan --model deepseek-v3 --gpu a100-40g --gpus 1", "memcalc min gpus --model deepseek-v3 --gpu a100-40g"),
        (FULL, "memcalc plan --model 7b --gpu a100-40g --gpus 1 --offload params"),
        ("max seq-len --model 70b --gpu a100-40g --gpus 2 --offload none",
         "memcalc min gpus --model 70b --gpu a100-40g --offload none"),
        ("min gpus --model deepseek-v3 --gpu a100-40g",
         "memcalc min gpus --model deepseek-v3 --gpu a100-40g --up-to 512"),
        ("serve --model deepseek-v3 --gpu h100 --gpus 8",
         "memcalc serve --model deepseek-v3 --gpu h100 --gpus 16 --tp 16 --quantization fp8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_leads_on(line: str, leads: str) -> None:
    """Exit code 1, and a line to paste below a row that begins with Next, which the program takes."""
    code, text = answered(line)
    assert code == 1
    rows = text.splitlines()
    at = next(index for index, row in enumerate(rows) if row.startswith("Next"))
    command = " ".join(row.strip(" \\") for row in rows[at + 1 :] if row.startswith("  "))
    assert command.startswith(leads)
    assert CliRunner().invoke(app, shlex.split(leads)[1:]).exit_code in {0, 1}
