"""The newcomer's path through the tour: a first plan, a config of one's own, an exported config, in four commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from exported_files import write_exported
from test_docs import ROOT, blocks, run, write_files

from memcalc import catalog

PAGE = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
PATH = list(blocks(PAGE[PAGE.index("Or leave the choice") : PAGE.index("## Output formats")]))
COMMANDS = [command for block in PATH for command in block.commands]
CODES = [block.code for block in PATH for _ in block.commands]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new user's folder, with the files that the page calls the user's own."""
    monkeypatch.chdir(tmp_path)
    write_files(PAGE, tmp_path)
    return tmp_path


def test_the_first_plan_of_the_readme_is_where_the_path_begins() -> None:
    """A plan for a shipped model on shipped GPUs, with nothing to write before."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [command for block in blocks(readme) for command in block.commands]
    for command in (next(c for c in commands if c.startswith("memcalc plan ")), COMMANDS[0]):
        words = shlex.split(command)
        assert words[words.index("--gpu") + 1] in catalog.names("gpu")
        assert catalog.model(words[words.index("--model") + 1]).num_layers


def test_at_most_four_commands() -> None:
    assert [shlex.split(command)[1] for command in COMMANDS] == ["plan", "check", "plan", "export"]


def test_the_commands_lead_to_a_config_that_fits(folder: Path) -> None:
    """In order, in an empty folder: each ends as the page says, and what is written is another job."""
    outputs = [run(command, folder) for command in COMMANDS]
    assert [output.exit_code for output in outputs] == CODES
    own = json.loads((folder / "ds_config.json").read_text(encoding="utf-8"))
    written = write_exported(outputs[-1].stdout, folder)
    checked = run(COMMANDS[1].replace("ds_config.json", "training_args.json"), folder)
    assert checked.exit_code == 0, checked.output
    exported = json.loads(written["ds_config.json"])
    assert (
        exported["train_batch_size"] == own["train_micro_batch_size_per_gpu"] * own["gradient_accumulation_steps"] * 8
    )
    changed = ("zero_optimization", "train_micro_batch_size_per_gpu")
    assert [exported[name] for name in changed] != [own[name] for name in changed]
