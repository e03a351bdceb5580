"""What a reader needs on the screen itself: whole facts, symbols that are explained, nothing hidden that decides."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from types import SimpleNamespace as Some

import pytest
from typer.testing import CliRunner

from memcalc.cli.app import app
from memcalc.cli.registry import EXAMPLES, MAIN, SECOND_EXAMPLES
from memcalc.report.explain import _symbols
from memcalc.report.inverse import margin
from memcalc.report.tables import Column, Document, Line, Table
from memcalc.report.terminal import draw, fitted
from memcalc.report.terminal_rows import folds
from memcalc.units import GIB

pytestmark = pytest.mark.usefixtures("answers_once")


@cache
def shown(line: str, width: int = 80) -> list[str]:
    done = CliRunner().invoke(app, line.split(), env={"COLUMNS": str(width)})
    return [*done.stdout.rstrip("\n").splitlines(), *done.stderr.splitlines()]


@pytest.mark.parametrize("mood", ["good", ""])
def test_a_headline_ends_its_rows_between_facts(mood: str) -> None:
    """No fact is in two rows, unless it is longer than one; with colour its letters are the same."""
    facts = [
        "fits: FSDP on 8 × h100",
        "recompute none",
        "micro-batch 1 × 16",
        "no offload",
        "7432 (5500–9170) tok/s/GPU",
    ]
    data = Table("", (), ())
    for width in range(40, 110):
        rows = draw(Document((Line(" · ".join(facts), "verdict", mood),), data), width, colour=False).splitlines()
        assert [fact for row in rows for fact in row.strip(" ·").split(" · ")] == facts
    long = "does not fit · " + "word " * 30
    assert max(map(len, draw(Document((Line(long, "verdict", "bad"),), data), 60, colour=False).splitlines())) <= 60


def test_words_are_short_only_where_there_is_no_room_for_them() -> None:
    """A column that goes makes room: what was shortened for it is whole again, as far as it fits."""
    columns = (
        Column("layout", short=(("no-reshard", "no-resh"),)),
        Column("offload", short=(("activations", "act"),)),
        Column("plan", priority=1),
    )
    table = Table("", columns, (("FSDP no-reshard", "activations", "x" * 30), ("FSDP", "-", "y" * 30)))
    whole, none = fitted(table, 70)
    assert [whole, len(none.columns)] == [table, 0]
    narrow, left = fitted(table, 30)
    assert [cell for row in narrow.rows for cell in row] == ["FSDP no-reshard", "activations", "FSDP", "-"]
    assert left.rows[0] == ("x" * 30,)
    tight, _ = fitted(table, 20)
    assert tight.rows[0] == ("FSDP no-resh", "act")
    assert fitted(table, 24)[0].rows[0] == ("FSDP no-reshard", "act")


def test_warnings_without_room_are_counted_as_such() -> None:
    blocks = (Line("fits", "verdict", "good"), *(Line(f"Warning: {word}", "warning") for word in ("one", "two")))
    *_, last = folds(blocks, 60)
    assert [block.text for block in last if isinstance(block, Line)][1:] == ["Warning: 2 warnings: -v"]


def test_a_sweep_never_hides_what_is_offloaded() -> None:
    """A job that fits only with its states on the host says so at any width; where none does, no column is spent."""
    from memcalc.report.rows import _SHOWN, _rows

    row = dict.fromkeys((name for _, name in _SHOWN), 1) | {
        "model": "llama-2-7b", "gpu": "a100-40g", "status": "fits", "precision": "bf16-mixed", "recompute": "full",
        "tokens_per_second_per_gpu": 2989.0, "mfu": 0.4,
    }  # fmt: skip
    rows = [{**row, "offload": "params"}, {**row, "job": 2, "offload": "none"}]
    for width in (60, 80, 120, 160):
        text = draw(Document((_rows(Some(rows=rows), 9),), Table("", (), ())), width, colour=False)  # type: ignore[arg-type]
        assert "offload" in text
        assert "params" in text
    text = draw(Document((_rows(Some(rows=rows[1:]), 9),), Table("", (), ())), 160, colour=False)  # type: ignore[arg-type]
    assert "offload" not in text


def test_the_symbols_of_formulas_are_explained_once() -> None:
    """Those that stand in them, and no word that happens to hold a letter."""
    (line,) = _symbols(["n · w · ⌈P / N⌉", "w · P_head", "(2·f) · T · w · blocks · n / t", "sum over tensors"])
    assert line.items == (
        "P parameters (P_head the head's)", "N GPUs sharing", "n how many", "w bytes each", "T tokens per micro-batch",
        "f MLP width", "t tensor-parallel ranks",
    )  # fmt: skip
    (states,) = _symbols(["4 · k · P_g + 2 · P_max"])
    assert states.items == ("P parameters (P_max the largest tensor's)",), "k is no width here"
    (buckets,) = _symbols(["n · w · E"])
    assert "experts" not in buckets.text
    assert not list(_symbols(["largest sum alive in the head", "R - A: reserved less allocated", "not sharded"]))


@pytest.mark.parametrize(
    "line",
    [
        "explain --model 7b --gpu a100-40g --gpus 8 --zero 3 --recompute full",
        "explain --model llama-3-70b --gpu h100 --gpus 64 --tp 8 --pp 4 --framework megatron",
        "explain --model 8b --gpu rtx-4090 --lora 16 --quantize nf4 --recompute full",
        "explain --model 13b --gpu a100-40g --gpus 8 --framework deepspeed --zero 3 --offload optimizer,params",
        "explain --model 8b --gpu h100 --gpus 8 --zero 2",
    ],
)
def test_an_explanation_uses_no_symbol_that_it_does_not_explain(line: str) -> None:
    rows = shown(line)
    assert len(rows) <= 20
    at = next(index for index, row in enumerate(rows) if row.startswith("Symbols"))
    legend = " ".join(rows[at:])
    formulas = [
        row[row.index(match[0]) + len(match[0]) :] for row in rows[:at] if (match := re.search(r" \d+\.\d\d  ", row))
    ]
    used = {name for text in formulas if "·" in text for name in re.findall(r"(?<!\w)[A-Za-z](?:_\w+)?(?!\w)", text)}
    assert {"w", "n"} <= used
    assert all(re.search("[(·]", row) is None or len(row) <= 80 for row in rows[at:])
    assert all(re.search(rf"(?<!\w){name} \w", legend) for name in used - {"A", "W", "w_reduce"})


def test_what_is_tight_says_what_it_lacks() -> None:
    """The margin, or the cache that is freed: a smaller figure than what fits is no riddle then."""
    assert margin(70 * GIB, "tight", 79 * GIB, GIB) == "tight: inside the 95% margin"
    assert "cache" in margin(60 * GIB, "tight", 79 * GIB, 0)
    assert "margin" not in margin(60 * GIB, "tight", 79 * GIB, 0)
    assert margin(60 * GIB, "does-not-fit", 79 * GIB, GIB) == "out of memory: a request lacks 1.0 GiB"
    assert margin(60 * GIB, "does-not-fit", 79 * GIB, 0) == "out of memory: what the job does beside its steps"


def test_one_gpu_is_said_once() -> None:
    rows = shown("plan --model gpt2 --gpu rtx-3090")
    assert rows[1].startswith("1 GPU: recompute ")


@pytest.mark.parametrize("command", ["estimate", "explain"])
def test_a_saved_plan_is_estimated_as_it_was_found(command: str, tmp_path: Path) -> None:
    """The figures of the search again; options of a job beside the file are refused, not ignored."""
    path = tmp_path / "plan.json"
    CliRunner().invoke(app, ["plan", "--model", "gpt2", "--gpu", "rtx-3090", "--gpus", "1", "--save", str(path)])
    plan = json.loads(path.read_text())["plan"]
    answer = CliRunner().invoke(app, [command, str(path), "--format", "json"])
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["peak"]["device"] == plan["peak"]["device"]
    refused = CliRunner().invoke(app, [command, str(path), "--zero", "2"])
    assert refused.exit_code == 2
    assert "--zero" in refused.stderr
    assert CliRunner().invoke(app, [command, "--model", "gpt2"]).exit_code == 2


@pytest.mark.parametrize("name", sorted(MAIN))
def test_help_breaks_no_option_from_its_value(name: str) -> None:
    """A continued example goes on with an option, so that each row can be read by itself."""
    rows = shown(f"{name} --help")
    for at, row in enumerate(rows):
        if row.endswith("\\"):
            assert rows[at + 1].lstrip().startswith("--")
    joined = " ".join(" ".join(rows).replace("\\", " ").split())
    assert all(" ".join(example.split()) in joined for example in (EXAMPLES[name], SECOND_EXAMPLES[name]))


@pytest.mark.parametrize("form", ["markdown", "html", "latex"])
def test_a_command_of_a_document_has_rows_that_a_shell_reads(form: str) -> None:
    """None is wider than a page, none breaks an option, and together they are the command."""
    line = "plan --model 7b --gpu a100-40g --gpus 8"
    done = CliRunner().invoke(app, [*line.split(), "--format", form])
    command = json.loads(CliRunner().invoke(app, [*line.split(), "--format", "json"]).stdout)["plans"][0]["command"]
    rows = [row for row in done.stdout.splitlines() if row.startswith(("memcalc ", "  --", "<pre><code>memcalc "))]
    rows = [re.sub(r"</?(pre|code)>", "", row) for row in rows]
    assert max(map(len, rows)) <= (64 if form == "latex" else 80)
    assert shlex.split(command) == shlex.split("\n".join(rows[1:]).replace("\\\n", ""))


def test_a_range_that_ends_above_the_gpu_is_no_contradiction_of_a_fit() -> None:
    """The verdict's margin has one side, 19 runs of 20, and the range that is shown has two."""
    line = "estimate --model llama-2-7b --gpu a100-40g --gpus 8 --zero 3 --seq-len 4480 --recompute"
    for policy in ("mlp", "full"):
        answer = json.loads(CliRunner().invoke(app, [*line.split(), policy, "--format", "json"]).stdout)
        above = answer["interval"]["high"] > answer["budget"]["capacity"]
        assert answer["verdict"] == "fits"
        assert above is (policy == "mlp")
        assert ("19 of 20 runs fit" in shown(f"{line} {policy}")[0]) is above


def test_a_preset_is_read_by_people_and_its_csv_by_programs() -> None:
    """No byte counts and no Python on a screen; the data stay as they were."""
    text = " ".join(shown("nodes dgx-h100"))
    assert not re.search(r"capacity_bytes|bandwidth_bytes|\b(True|False)\b|\d{9}", text)
    assert "host memory bandwidth 614.4 GB/s" in re.sub(" +", " ", text)
    assert "parameters 8,030,261,248 (8.03B)" in re.sub(" +", " ", " ".join(shown("models llama-3-8b")))
    rows = CliRunner().invoke(app, ["models", "llama-3-8b", "--format", "csv"]).stdout.splitlines()
    assert {"parameters,8030261248", "tied,False"} <= set(rows)


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("plan --model gpt2 --gpu rtx-3090 --gpus 1", True),
        ("plan --model distilbert-base --gpu rtx-3090 --gpus 1", False),
        ("plan --model llama-3.2-1b --gpu a100-80g --gpus 1 --framework litgpt", False),
    ],
)
def test_the_next_step_of_a_plan_is_one_that_works(line: str, starts: bool, tmp_path: Path) -> None:
    """The screen leads to what starts the plan where that can be written, and to what is kept of it where not."""
    (row,) = (row for row in shown(line) if row.startswith("Next"))
    assert ("--write out/" in row) is starts
    assert "--save plan.json" in row
    assert len(row) <= 80
    done = CliRunner().invoke(app, [*line.split(), "--write", str(tmp_path / "out")])
    assert (done.exit_code == 0) is starts
    assert (tmp_path / "out" / "launch.sh").exists() is starts
