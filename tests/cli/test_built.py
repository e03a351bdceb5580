"""A command is built with the options that its line names, and answers as one that has them all."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from memcalc.cli.app import app
from memcalc.cli.registry import Commands

LINES = (
    "estimate --model gpt2 --gpu v100-32g --lora --set strategy.fused_norms=true --format json",
    "plan --model gpt2 --gpu=v100-32g --gpus 1 --tp 1 --zero=0 --offload none --format json",
    "max seq-len --model gpt2 --gpu v100-32g --step 512 --format json",
    "gpus a100-80g -v",
    "estimate --model gpt2 --gpu v100-32g --zreo 3",
    "estimate --model gpt2",
    "estimate --model gpt2 --gpu",
    "estimate --help",
)


def answers(line: str) -> tuple[int, str]:
    """Return exit code and text of a command, less what a clock says."""
    result = CliRunner().invoke(app, line.split(), prog_name="memcalc")
    kept = [row for row in result.output.splitlines() if '"elapsed"' not in row]
    return result.exit_code, "\n".join(kept)


@pytest.mark.parametrize("line", LINES)
def test_what_a_line_does_not_name_changes_nothing(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as whole:
        whole.setattr(Commands, "for_line", lambda self, name, _: self.get(name))
        everything = answers(line)
    with monkeypatch.context() as fresh:
        fresh.setattr("memcalc.cli.registry._COMMANDS._built", {})
        assert answers(line) == everything


def made(*args: str) -> list[Any]:
    """Return the parameters of a command that is built for a line."""
    from memcalc.cli.registry import _COMMANDS

    commands = Commands()
    for name in _COMMANDS:
        commands.add(name, _COMMANDS._makers[name])
    return list(commands.for_line(args[0], args[1:]).params)


def test_only_a_line_that_needs_them_has_all_options() -> None:
    lines = (("--model", "7b", "--tp=2"), ("--model", "7b", "--help"))
    few, whole = ({part.name for part in made("plan", *line)} for line in lines)
    assert few < whole
    assert {"model", "gpu", "tp"} <= few
    assert "pp" not in few
