"""The command line: its frozen options, its examples, its files and exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.cli.options import Shared, given, job
from memcalc.cli.registry import EXAMPLES, MAIN, PANELS, SECOND_EXAMPLES
from memcalc.errors import InputError
from memcalc.planner.limits import candidates
from memcalc.specs.posttraining import RL_OPTIONS

LINE = ("--model", "llama-2-7b", "--gpu", "a100-80g", "--gpus", "8", "--zero", "3", "--recompute", "full")
OPTIONS = """\
--model --gpu --gpus --node --seq-len --micro-batch --global-batch --framework --precision --optimizer
--optimizer-in-backward --optimizer-impl --zero --tp --sp --no-sp --pp --pp-schedule --vpp --cp --cp-kind --ep
--dp-replicate --moe-dispatcher --expert-imbalance --ep-overlap --tp-comm-overlap --cuda-graphs --zero-gather
--recompute --offload --offload-to --compress-activations --attention --loss --lora --adapter-dtype
--lengths --batching --token-budget --pad-multiple --images --image-size --vision
--autocast --no-autocast --also-train --quantize --kernels --compile --calibration --format --output --set --preset-dir
--force --module --inputs --loss-fn --block-class
"""
"""What scripts rely on: options may be added, none may be renamed or dropped."""
ESTIMATE = {
    "": "schema version model workload hardware strategy peak interval budget verdict components saved phases stages "
    "terms off_gpu host_memory tier_memory warnings",
    "model": "name parameters active_parameters",
    "peak": "allocated reserved device phase stage",
    "interval": "low high coverage allocator kind",
    "budget": "capacity context libraries reserve usable",
    "components": "parameters gradients optimizer activations buffers reserve",
    "saved": "per_block outside_blocks total",
}
TERM = "component name bytes phases formula inputs source"
PLAN = "rank strategy accumulation_steps global_batch data_parallel peak verdict time host_memory tier_memory"
TIME = """\
step tokens_per_second_per_gpu mfu hfu compute host recompute communication messages offload optimizer bubble low high
validated basis"""

OWN_GPU = """
vendor = "nvidia"
arch = "Mine"
memory_bytes = 17179869184
bandwidth_bytes_per_s = 9e11
peak_flops = { bf16 = 1e14 }
gpus_per_node = 1
flash_attention = true
source = { memory = "the label" }
date = "2026-11"
"""


def run(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), env=env, prog_name="memcalc")


def shown(*arguments: str) -> Any:
    result = run(*arguments, "--format", "json")
    assert result.exit_code in {0, 1}, result.stderr
    return json.loads(result.stdout)


# ---------------------------------------------------------------------------------------------- options and examples


@pytest.mark.parametrize("command", ["plan", "estimate", "explain"])
def test_options_are_frozen(command: str) -> None:
    declared = {flag for option in _options(command) for flag in (*option.opts, *option.secondary_opts)}
    searching = {"--top", "--objective", "--critical-batch", "--tokens", "--why", "--recipe", "--save", "--rank"}
    searching |= {"--all", "--beyond", "--to", "--write"}
    pictures = {"--chart", "--timeline"} & declared
    roles = {f"--{option.name.replace('_', '-')}" for option in RL_OPTIONS} - {"--micro-batch", "--framework"}
    roles |= {"--no-reference"}
    screen = {"--verbose", "-v"}
    own = {"plan": {*searching, *pictures, *roles}, "estimate": pictures, "explain": {"--fold", "--only"}}[command]
    assert own <= declared
    assert screen <= declared
    assert declared - {"--help", "-h"} - own - screen == set(OPTIONS.split())


def _options(command: str) -> list[Any]:
    group: Any = typer.main.get_command(app)
    return [option for option in group.commands[command].params if option.param_type_name == "option"]


def test_no_option_is_hidden_from_help() -> None:
    assert [option.name for option in _options("plan") if option.hidden] == []


@pytest.mark.parametrize("option", [option for option in job() if option.values], ids=lambda option: option.name)
def test_help_names_every_choice(option: Shared) -> None:
    words = set(re.findall(r"[\w+-]+", option.help + option.metavar.replace("|", " ")))
    assert [name for name in option.values if name not in words] == []


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_shows_the_example(command: str) -> None:
    result = run(command, "--help", env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})
    assert result.exit_code == 0
    assert EXAMPLES[command] in " ".join(result.stdout.replace("\\\n", "").split())


RUN = [
    pytest.param(command, marks=pytest.mark.slow) if command in {"probe", "validate"} else command
    for command in sorted(set(EXAMPLES) - {"ui"})  # which runs until it is interrupted: tests/ui
]


@pytest.mark.parametrize("command", RUN)
def test_the_example_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that an example names are in docs/examples."""
    for path in (Path(__file__).resolve().parents[2] / "docs" / "examples").iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes().replace(b"[2048, 8192]", b"2048"))  # half the sweep
    monkeypatch.chdir(tmp_path)
    result = run(*shlex.split(EXAMPLES[command])[1:])
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("panel", ["Job", "Parallelism", "Memory", "Output"])
def test_help_is_in_panels(panel: str) -> None:
    assert f" {panel} " in run("plan", "--help-all").stdout


def test_help_is_not_cut_at_80_columns() -> None:
    narrow = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    assert "--optimizer-in-backward" in run("plan", "--help-all", env=narrow).stdout


@pytest.mark.parametrize("command", MAIN)
def test_help_is_one_screen_of_what_most_people_need(command: str) -> None:
    lines = run(command, "--help").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert f"memcalc {command} --help-all" in " ".join(" ".join(lines).split())
    assert sum(line.lstrip().startswith("memcalc ") for line in lines) >= 2


@pytest.mark.parametrize("command", sorted({*EXAMPLES} - {*MAIN}))
def test_help_of_few_options_has_them_all_in_the_same_form(command: str) -> None:
    text = run(command, "--help").stdout
    assert text.startswith(f"Usage: memcalc {command} ")
    assert "╭" not in text
    assert [option.opts[0] for option in _options(command) if f"\n  {option.opts[0]}" not in text] == []
    assert text.endswith(f"\nExample\n  {EXAMPLES[command]}\n")


@pytest.mark.parametrize("command", ["", *EXAMPLES])
def test_help_is_45_lines_at_the_most(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every command and of the list of them, where a terminal has 80 columns."""
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    shown_help = run(*command.split(), "--help").stdout
    assert len(shown_help.splitlines()) <= 45
    assert max(map(len, shown_help.splitlines())) <= 80


def test_help_of_all_commands_is_measured() -> None:
    group: Any = typer.main.get_command(app)
    assert set(group.commands) == set(EXAMPLES)


_OPTIMIZERS = next(option for option in job() if option.name == "optimizer")


def test_a_list_of_names_that_help_cuts_says_so() -> None:
    """All names are behind --help-all; those that fit are whole ones."""
    lines = run("estimate", "--help").stdout.splitlines()
    start = next(at for at, line in enumerate(lines) if "--optimizer" in line)
    cut = " ".join(lines[start : start + 2]).split("NAME", 1)[1]
    assert cut.rstrip().endswith(", …")
    assert {name.strip() for name in cut.replace("…", "").split(",") if name.strip()} < {*_OPTIMIZERS.values}


@pytest.mark.parametrize("command", MAIN)
def test_all_options_are_shown_when_all_are_asked_for(command: str) -> None:
    shown_options = run(command, "--help-all", env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).stdout
    assert [option.opts[0] for option in _options(command) if option.opts[0] not in shown_options] == []


def test_commands_are_grouped_by_what_is_asked() -> None:
    text = run("--help").stdout
    places = [text.index(f"\n{panel}\n") for panel in PANELS]
    assert places == sorted(places)
    assert list(SECOND_EXAMPLES) == sorted(MAIN, key=list(SECOND_EXAMPLES).index)


def test_version() -> None:
    assert run("--version").stdout == f"memcalc {memcalc.__version__}\n"


def test_without_a_command_the_help_is_shown() -> None:
    result = run()
    assert result.exit_code == 2
    assert "estimate" in result.stdout


def test_completion_knows_models_and_choices() -> None:
    completed = _complete("memcalc estimate --model llama-2-")
    assert "llama-2-7b" in completed
    assert "gpt2" not in completed


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("max se", {"seq-len"}),
        ("min ", {"gpus"}),
        ("models llama-2-7b", {"llama-2-7b"}),
        ("gpus gb2", {"gb200"}),
        ("nodes gb200", {"gb200-nvl72"}),
        ("plan --objective th", {"throughput"}),
        ("estimate --recompute sel", {"selective-ops", "selective-core-attn"}),
        ("estimate --recompute ev", {"every-"}),
        ("plan --recompute none/sq", {"none/sqrt"}),
        ("estimate --offload optimizer,p", {"optimizer,params"}),
        ("rl --framework v", {"verl"}),
        ("serve --engine v", {"vllm"}),
        ("export plan.json --to tr", {"trainer"}),
        ("ladder --reading p", {"pure-16-bit"}),
        ("calibrate probes.toml --gpu gb2", {"gb200"}),
        ("rl --trainer x", set()),
    ],
)
def test_completion_knows_the_values_that_help_lists(line: str, names: set[str]) -> None:
    """Also of arguments, and of the last of several values; what is completed is itself a word that works."""
    completed = run(env={"_MEMCALC_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args",
                         "_TYPER_COMPLETE_ARGS": f"memcalc {line}"}).output  # fmt: skip
    assert set(completed.split()) == names


def _complete(line: str) -> str:
    asked = {"_MEMCALC_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
    return str(run(env=asked).output)


# --------------------------------------------------------------------------------------------------------- the answers


def test_estimate_has_the_published_fields() -> None:
    answer = shown("estimate", *LINE)
    assert answer["schema"] == "memcalc.estimate/1"
    for place, names in ESTIMATE.items():
        held = answer[place] if place else answer
        assert set(names.split()) <= set(held)
        assert not place or set(names.split()) == set(held)
    assert all(set(term) == set(TERM.split()) for term in answer["terms"])
    assert sum(answer["components"].values()) == answer["peak"]["reserved"]


def test_plan_has_the_published_fields() -> None:
    answer = shown("plan", "--model", "llama-2-7b", "--gpu", "a100-80g", "--gpus", "8", "--top", "2")
    assert answer["schema"] == "memcalc.plan/1"
    assert {"searched", "feasible", "plans", "pareto", "nearest", "warnings"} <= set(answer)
    assert len(answer["plans"]) == 2
    for plan in answer["plans"]:
        assert set(PLAN.split()) <= set(plan)
        assert set(plan["time"]) == set(TIME.split())


def test_the_command_printed_gives_the_same_answer() -> None:
    answer = shown("estimate", *LINE)
    assert shown(*shlex.split(answer["command"])[1:])["peak"] == answer["peak"]


def test_a_plan_explains_itself() -> None:
    plan = shown("plan", "--model", "llama-2-7b", "--gpu", "a100-80g", "--gpus", "8", "--top", "1")["plans"][0]
    estimated = shown(*shlex.split(plan["command"])[1:])
    assert estimated["verdict"] != "does-not-fit"
    assert estimated["peak"]["allocated"] == plan["peak"]["allocated"]


def test_a_job_too_large_exits_with_1() -> None:
    large = ("--model", "llama-2-70b", "--gpu", "v100-16g", "--gpus", "1", "--precision", "fp32")
    assert run("estimate", *large).exit_code == 1
    assert run("plan", *large).exit_code == 1


@pytest.mark.parametrize("kind", ["models", "gpus", "nodes"])
def test_presets_are_listed_as_published(kind: str) -> None:
    answer = shown(kind)
    assert answer["schema"] == f"memcalc.{kind}/1"
    assert answer[kind]
    assert all({"name", "aliases", "source"} <= set(row) for row in answer[kind])


def test_models_and_gpus_have_the_published_fields() -> None:
    assert {"family", "parameters", "active_parameters", "blocks"} <= set(shown("models", "llama-2-7b")["models"][0])
    assert {"capacity", "context"} <= set(shown("gpus", "a100-80g")["gpus"][0])


def test_one_preset_is_shown_with_its_source() -> None:
    assert "source" in run("models", "llama-2-7b").stdout
    assert shown("models", "llama-2-7b")["models"][0]["parameters"] == 6738415616


def test_a_model_that_is_counted_alone_says_so_and_is_no_answer() -> None:
    (row,) = shown("models", "deberta-v3-base")["models"]
    assert row["parameters"] == 184_551_780
    assert "no estimate is made: nothing models its disentangled attention" in row["notes"]
    assert not any(model.counted_parts for model in candidates(None, None, ()))


def test_search_finds_parts_of_names_then_the_nearest() -> None:
    within = [row["name"] for row in shown("gpus", "--search", "A100")["gpus"]]
    assert within
    assert all("a100" in name for name in within)
    assert "rtx-4090" in [row["name"] for row in shown("gpus", "--search", "rtx-4909")["gpus"]]


def test_own_presets_come_first(tmp_path: Path) -> None:
    folder = tmp_path / "gpus"
    folder.mkdir()
    (folder / "mine.toml").write_text(OWN_GPU)
    assert shown("gpus", "mine", "--preset-dir", str(tmp_path))["gpus"][0]["capacity"] == 2**34


# ------------------------------------------------------------------------------------------------- words and files


def test_given_leaves_out_what_was_not_typed() -> None:
    typed = {"tp": "2", "sp": None, "set": ["strategy.zero=3", "workload.x = a=b"], "preset_dir": ["d"]}
    assert given(typed) == {"tp": "2", "preset_dirs": ("d",), "settings": {"strategy.zero": "3", "workload.x": "a=b"}}


def test_false_is_kept_as_given() -> None:
    assert given({"sp": False})["sp"] is False


@pytest.mark.parametrize("pair", ["", "=", "=x", "nothing"])
def test_a_setting_needs_key_and_value(pair: str) -> None:
    with pytest.raises(InputError, match="key=value"):
        given({"set": [pair]})


def test_output_follows_the_ending_of_the_file(tmp_path: Path) -> None:
    target = tmp_path / "gpus.json"
    result = run("gpus", "--output", str(target))
    assert (result.exit_code, result.stdout) == (0, "")
    assert json.loads(target.read_text())["schema"] == "memcalc.gpus/1"
    assert list(tmp_path.iterdir()) == [target]


def test_output_replaces_only_with_force_and_keeps_the_mode(tmp_path: Path) -> None:
    target = tmp_path / "gpus.csv"
    target.write_text("mine")
    target.chmod(0o640)
    assert run("gpus", "--output", str(target)).exit_code == 2
    assert target.read_text() == "mine"
    assert run("gpus", "--output", str(target), "--force").exit_code == 0
    assert target.read_text().startswith("name,")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_output_follows_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "real.md", tmp_path / "link.md"
    target.write_text("old")
    link.symlink_to(target)
    assert run("gpus", "--output", str(link), "--force").exit_code == 0
    assert link.is_symlink()
    assert target.read_text() != "old"


def process(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "memcalc", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, **env})


def test_pipes_get_plain_text_in_100_columns_or_as_told() -> None:
    assert max(map(len, process("gpus").stdout.splitlines())) <= 100
    assert max(map(len, process("gpus", COLUMNS="60").stdout.splitlines())) <= 60
    assert "\x1b" not in process("gpus").stdout
    assert "\x1b[" in process("gpus", FORCE_COLOR="1").stdout
    assert "\x1b" not in process("gpus", FORCE_COLOR="1", NO_COLOR="1").stdout


def test_a_c_locale_gets_ascii_in_the_same_columns() -> None:
    said = process("estimate", *LINE, LC_ALL="C", COLUMNS="80").stdout
    assert said.isascii()
    assert max(map(len, said.partition("Next, ")[0].splitlines())) <= 80


def test_a_narrow_encoding_is_no_error() -> None:
    result = process("gpus", "--search", "a100", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_a_reader_that_leaves_is_no_error() -> None:
    line = f"{shlex.quote(sys.executable)} -m memcalc gpus --format json | head -c 1"
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("{", "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
def test_a_reader_that_leaves_changes_no_exit_code(tmp_path: Path) -> None:
    """1 would say that the job does not fit."""
    page = shlex.quote(str(tmp_path / "a.html"))
    words = f"report --model gpt2 --gpu a100-40g --gpus 1 --estimate --output {page}"
    line = f"({shlex.quote(sys.executable)} -m memcalc {words}; echo $? >&2) | true"
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert result.stderr == "0\n"


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys; from memcalc.cli.app import app\n"
        "try: app(['--version'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'tabulate'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        ("gpus", {"numpy", "memcalc.frameworks", "memcalc.sweeps", "memcalc.terms"}),
        ("models gpt2", {"memcalc.ledger", "memcalc.planner.search", "memcalc.sweeps"}),
        (
            "plan --model gpt2 --gpu a100-40g --gpus 1 --recompute none",
            {"memcalc.convert.config", "memcalc.posttraining", "memcalc.handoff", "memcalc.sweeps", "numpy.ma"},
        ),
        (
            "estimate --model gpt2 --gpu a100-40g --gpus 8 --zero 3",
            {"memcalc.planner.search", "memcalc.results.plans", "memcalc.specs.posttraining", "numpy.ma", "tabulate"},
        ),
        (
            "check ds.json --model gpt2 --gpu a100-40g --gpus 1 --seq-len 512",
            {"memcalc.planner.search", "memcalc.posttraining"},
        ),
    ],
)
def test_a_command_imports_nothing_of_what_it_does_not_do(line: str, foreign: set[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    code = f"import sys; from memcalc.cli.app import app\ntry: app({shlex.split(line)})\nexcept SystemExit: pass\n"
    code += f"print(sorted({foreign} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr
    assert len(result.stdout.splitlines()) > 2


def test_an_interrupt_exits_as_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memcalc.cli.presets.show", _interrupt)
    assert run("gpus").exit_code == 130


def _interrupt(*_: object) -> int:
    raise KeyboardInterrupt


def test_a_module_that_is_run_is_called_by_the_commands_name() -> None:
    """So that its completion, which a shell knows by that name, is the command's."""
    line = [sys.executable, "-m", "memcalc", "export", "--help"]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    assert "Usage: memcalc export" in said
