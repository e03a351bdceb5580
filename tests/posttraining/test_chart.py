"""The picture of phases and roles: parts are as long as what roles hold, and what no GPU has is struck out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.report.charts.posttraining import chart
from memcalc.report.palette import ROLES
from memcalc.units import GIB

GRPO: dict[str, Any] = {
    "algorithm": "grpo", "framework": "verl", "model": "qwen2.5-7b", "gpu": "h100", "gpus": 8, "prompt": 1024,
    "response": 2048, "micro_tokens": 16384,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{}, {"algorithm": "ppo", "reward_model": "qwen2.5-7b"}, {"micro_tokens": None, "micro_batch": 16}]
)
def test_parts_are_as_long_as_what_roles_hold(changes: dict[str, Any]) -> None:
    words = {name: value for name, value in (GRPO | changes).items() if value is not None}
    answer = memcalc.rl(**words)
    picture = chart(answer)
    figure = Figure(figsize=picture.size)
    picture.draw(figure)
    (axes,) = figure.axes
    drawn = {patch.get_gid(): patch for patch in axes.patches if patch.get_gid()}
    assert set(drawn) == set(picture.tips)
    for index, phase in enumerate(answer.phases):
        assert list(phase.roles)
        assert set(phase.roles) <= set(ROLES)
        for name, size in phase.roles.items():
            assert drawn[f"phase-{index}-{name}"].get_width() == pytest.approx(size / GIB)
        ends = [
            drawn[f"phase-{index}-{name}"].get_x() + drawn[f"phase-{index}-{name}"].get_width() for name in phase.roles
        ]
        assert max(ends) == pytest.approx(phase.allocated / GIB)
        assert f"{phase.name} {phase.allocated / GIB:.2f}" in picture.alt
    beyond = sum(patch.get_hatch() is not None for patch in axes.patches)
    assert beyond == sum(phase.allocated > answer.capacity for phase in answer.phases)


def test_no_two_roles_have_the_same_colour() -> None:
    assert len(set(ROLES.values())) == len(ROLES)


def test_the_command_draws_it(tmp_path: Path) -> None:
    target = tmp_path / "phases.svg"
    typed = [part for name, value in GRPO.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(app, ["rl", *typed, "--chart", str(target)])
    assert result.exit_code == 0
    assert "old log-probs" in target.read_text(encoding="utf-8")
    assert CliRunner().invoke(app, ["rl", *typed, "--chart", str(tmp_path / "phases.gif")]).exit_code == 2
