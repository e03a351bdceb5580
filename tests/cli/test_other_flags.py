"""Flags and values of other tools are answered with what memcalc calls them, and every answer can be typed."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from memcalc.cli.app import app
from memcalc.cli.options import BY_COMMAND, FLAG_ANSWERS, answer_for
from memcalc.convert.formats.base import WRITABLE
from memcalc.errors import InputError
from memcalc.planner.request import check_words
from memcalc.specs.options import BY_NAME, COMMAND_LINE, MEANT

FLAGS = {row.name.replace("_", "-") for row in COMMAND_LINE}
OUTPUTS = {"output", "format", "tight"}
NUMBERED = {"N": "2"}


def typed(answer: str) -> list[list[str]]:
    """The options that an answer names, each with its value."""
    plain = re.sub(r"\(.*?\)", "", answer).replace(" or ", " ").replace(" for the opposite", "")
    return [shlex.split(part) for part in re.split(r"\s*--", plain) if part.strip()]


@pytest.mark.parametrize("answer", sorted(set(FLAG_ANSWERS.values())))
def test_every_answer_can_be_typed(answer: str) -> None:
    for name, *value in typed(answer):
        assert name in FLAGS | OUTPUTS, answer
        if not value or value[0] in ("NAME", "FILE"):
            continue
        if name == "set":
            key, _, setting = value[0].partition("=")
            check_words({}, {key: setting})
        else:
            check_words({name.replace("-", "_"): NUMBERED.get(value[0], value[0])}, None)


def test_no_flag_of_ours_has_an_answer() -> None:
    assert not FLAGS & set(FLAG_ANSWERS)
    assert len(FLAG_ANSWERS) > 150


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--batch-size", ("--micro-batch", "--global-batch")),
        ("--gradient-checkpointing", ("--recompute full",)),
        ("--gradient_checkpointing", ("--recompute full",)),
        ("--zero-stage", ("--zero",)),
        ("--fsdp", ("--framework fsdp2",)),
        ("--qlora", ("--lora 16", "--quantize nf4")),
        ("--cpu-offload", ("--offload optimizer", "--offload params")),
        ("--per-device-train-batch-size", ("--micro-batch",)),
        ("--max-seq-length", ("--seq-len",)),
        ("--deepspeed", ("--framework deepspeed",)),
        ("--bf16", ("--precision bf16-mixed",)),
        ("--fp16", ("--precision fp16-mixed",)),
        ("--num-gpus", ("--gpus",)),
        ("--tensor-parallel-size=8", ("--tp",)),
    ],
)
@pytest.mark.parametrize("command", ["estimate", "plan", "check", "max"])
def test_a_flag_of_another_tool_gets_our_word(flag: str, says: tuple[str, ...], command: str) -> None:
    what = ["seq-len"] if command == "max" else []
    result = CliRunner().invoke(app, [command, *what, "--model", "7b", "--gpu", "h100", flag, "4"], prog_name="memcalc")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"memcalc: unknown option '{flag.partition('=')[0]}': memcalc says ")
    assert all(word in result.stderr for word in says), result.stderr


def test_what_no_tool_has_gets_no_answer() -> None:
    assert answer_for("--frobnicate") is None


@pytest.mark.parametrize(("option", "word"), [(o, w) for o, words in MEANT.items() for w in words])
def test_a_value_of_another_tool_is_no_value_of_ours_and_means_one(option: str, word: str) -> None:
    instead = MEANT[option][word]
    if option == "to":
        assert word not in WRITABLE
        assert instead in WRITABLE
        return
    assert option in BY_NAME
    given = check_words({option: instead}, None).given[option]
    assert str(given) == instead or given == tuple(instead.split(","))
    with pytest.raises(InputError) as error:
        check_words({option: word}, None)
    said = error.value.suggestion
    assert said is not None
    assert said == instead or option == "quantize"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--gpus 8 --framework fsdp", "did you mean 'fsdp2'?"),
        ("--gpus 8 --framework zero", "did you mean 'deepspeed'?"),
        ("--gpus 8 --framework any", "it is not searched"),
        ("--gpus 8 --offload cpu", "--offload-to cpu; did you mean 'optimizer'?"),
        ("--gpus 8 --tp 3", "--tp 3: it does not divide 8 GPUs"),
        ("--gpus eight", "must be a whole number from 1 to 1,000,000"),
        ("--gpus 0", "must be a whole number from 1 to 1,000,000"),
        ("--output plans.ods", "a table ends in .md, .csv"),
    ],
)
def test_common_slips_lead_on(line: str, says: str) -> None:
    typed_line = ["estimate", "--model", "7b", "--gpu", "a100-80g", *line.split()]
    result = CliRunner().invoke(app, typed_line, prog_name="memcalc")
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_page_is_html() -> None:
    line = ["report", "--model", "7b", "--gpu", "a100-80g", "--output", "page.txt"]
    result = CliRunner().invoke(app, line, prog_name="memcalc")
    assert result.exit_code == 2
    assert "must end in .html" in result.stderr


@pytest.mark.parametrize(
    ("gpu", "model", "says"),
    [
        ("a100", "7b", "it may be a100-40g, a100-80g, a100-pcie-40g or a100-pcie-80g"),
        ("h100", "vit", "vit-base-16, vit-giant-14"),
        ("h100", "acme/secret-9b", "give the path of its config.json"),
    ],
)
def test_a_name_that_may_be_several_lists_them(gpu: str, model: str, says: str) -> None:
    result = CliRunner().invoke(app, ["estimate", "--model", model, "--gpu", gpu], prog_name="memcalc")
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize("command", BY_COMMAND)
def test_answers_of_a_command_name_its_own_options(command: str) -> None:
    """An engine and post-training have options that a training job has not, and none of its layout."""
    listed: Any = typer.main.get_command(app)
    own = {name for option in listed.commands[command].params for name in (*option.opts, *option.secondary_opts)}
    flags = BY_COMMAND[command]
    assert not {f"--{flag}" for flag in flags} & own
    for answer in set(flags.values()):
        assert set(re.findall(r"--[a-z-]+", answer)) <= own


def test_an_option_of_another_command_is_answered_by_this_one() -> None:
    words = [
        "--algorithm",
        "grpo",
        "--framework",
        "verl",
        "--model",
        "qwen2.5-7b",
        "--gpu",
        "h100",
        "--gpus",
        "8",
        "--tensor-parallel-size",
        "2",
    ]
    result = CliRunner().invoke(app, ["rl", *words])
    assert result.exit_code == 2
    assert "--engine-tp N" in result.output
