"""Where an export is written, and whether it is offered."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from memcalc.cli.app import app
from memcalc.errors import FileError
from memcalc.files import begun_folder, output_path


def test_a_name_that_ends_in_a_slash_is_a_folder(tmp_path: Path) -> None:
    """The folder is made, unless nothing comes into it; as a file's name it is refused."""
    name = f"{tmp_path / 'new'}/"
    with begun_folder(name):
        pass
    assert not Path(name).exists()
    with begun_folder(name) as folder:
        (folder / "train.py").write_text("")
    assert [path.name for path in Path(name).iterdir()] == ["train.py"]
    with pytest.raises(FileError, match="path of a file"):
        output_path(f"{tmp_path / 'other'}/", force=False)


@pytest.mark.parametrize(("model", "offered"), [("llama-2-7b", True), ("distilbert-base", False)])
def test_only_what_can_be_exported_is_offered(model: str, offered: bool, tmp_path: Path) -> None:
    """No script is written for DistilBERT; the line that is offered writes the config."""
    path = tmp_path / "plan.json"
    said = CliRunner().invoke(app, ["plan", "--model", model, "--gpu", "a100-80g", "--gpus", "8", "--save", str(path)])
    assert said.exit_code == 0
    lines = [line for line in said.stderr.splitlines() if "memcalc export" in line]
    assert bool(lines) is offered
    config = tmp_path / "config"
    config.mkdir()
    written = CliRunner().invoke(app, ["export", str(path), "--output", str(config)])
    assert (written.exit_code == 0) is offered
