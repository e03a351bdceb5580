"""A folder of other people's examples: each file is read, asked about, declined by name, or said to train nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memcalc.cli.app import app
from memcalc.errors import FileError
from memcalc.preflight import answer as module
from memcalc.preflight.answer import survey

AXOLOTL = (
    "base_model: NousResearch/Llama-2-7b-hf\nsequence_len: 4096\nmicro_batch_size: 2\n"
    "datasets: []\noptimizer: adamw_torch\n"
)
FILES = {
    "a/train.yaml": (AXOLOTL, "read"),
    "a/ebft.yaml": (f"{AXOLOTL}rl: ebft\n", "declined"),
    "a/counted.yaml": (AXOLOTL.replace("NousResearch/Llama-2-7b-hf", "microsoft/deberta-v3-base"), "declined"),
    "b/ds.json": ('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}', "asked"),
    "b/swift.sh": ("NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B --per_device_train_batch_size 1\n", "asked"),
    "b/swift-gkd.sh": ("NPROC_PER_NODE=8 swift rlhf --rlhf_type gkd --model Qwen/Qwen2.5-7B\n", "declined"),
    "b/infer.sh": ("llamafactory-cli export merge.yaml\n", "no-training"),
    "c/nanotron.yaml": ("general: {}\nmodel: {}\ntokens: {}\nparallelism: {}\noptimizer: {}\n", "declined"),
    "c/foundry.yaml": ("model: {}\ntrain_loader: {}\noptimizer: {}\nmax_duration: 10ba\n", "asked"),
    "c/conf.sh": ('if [ -z ${CKPT} ]; then CKPT=x; fi\nMODEL_ARGS="--num-layers 4 --hidden-size 64"\n', "declined"),
    "c/prompts.json": ('{"greeting": "hello"}', "unknown-format"),
    "c/broken.json": ("{", "refused"),
}

DECLINED = (
    ("a/ebft.yaml", "EBFT"),
    ("b/swift-gkd.sh", "GKD"),
    ("c/nanotron.yaml", "nanotron"),
    ("c/conf.sh", "variables"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("yaml")
    for name, (text, _) in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "a/notes.txt").write_text("no config")
    (tmp_path / ".hidden.json").write_text("{}")
    (tmp_path / "c/link.json").symlink_to(tmp_path / "b/ds.json")
    return tmp_path


def test_each_file_is_what_it_is(folder: Path) -> None:
    result = survey(str(folder), gpu="h100", gpus=8)
    assert {file.path: file.outcome for file in result.files} == {name: outcome for name, (_, outcome) in FILES.items()}
    assert result.counts == {"asked": 3, "declined": 5, "no-training": 1, "read": 1, "refused": 1, "unknown-format": 1}
    assert all(bool(file.reason) == (file.outcome != "read") for file in result.files)


def test_what_is_declined_is_declined_by_its_name(folder: Path) -> None:
    reasons = {file.path: file.reason for file in survey(str(folder), gpu="h100", gpus=8).files}
    for path, name in DECLINED:
        assert name in reasons[path]
    assert "--model" in reasons["c/foundry.yaml"]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["check", *words], prog_name="memcalc")


def test_the_command_counts_by_folder(folder: Path) -> None:
    answer = run("--survey", str(folder), "--gpu", "h100", "--gpus", "8", "--format", "json")
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["schema"] == "memcalc.survey/1"
    table = run("--survey", str(folder), "--gpu", "h100", "--gpus", "8", "--format", "markdown").stdout
    assert f"{len(FILES)} files below" in table
    assert "| a " in table


def test_a_survey_takes_a_folder_alone(folder: Path) -> None:
    assert run("--survey", str(folder), "x.json").exit_code == 2
    assert run("--survey", str(folder / "nowhere")).exit_code == 2


def test_a_folder_in_place_of_a_file_leads_to_what_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the file that names the others; to all of several jobs; to the line that an export left there."""
    monkeypatch.chdir(tmp_path)
    job = Path("DIR")
    job.mkdir()

    def said() -> str:
        answer = run("DIR", "--gpu", "h100")
        assert answer.exit_code == 2
        return answer.stderr

    (job / "notes.json").write_text('{"unrelated": 1}', encoding="utf-8")
    assert said() == (
        "memcalc: file 'DIR': is a folder without a config or launch script that is known; "
        "--survey DIR says why, file by file.\n"
    )
    arguments = {"output_dir": "x", "per_device_train_batch_size": 1, "deepspeed": "ds_config.json", "bf16": True}
    (job / "args.json").write_text(json.dumps(arguments), encoding="utf-8")
    (job / "ds_config.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    assert said() == "memcalc: file 'DIR': is a folder; give the file that starts its job: DIR/args.json.\n"
    (job / "other.json").write_text(json.dumps(arguments | {"deepspeed": None}), encoding="utf-8")
    assert "give the files of one job: of DIR/args.json, DIR/other.json; --survey DIR reads each of them" in said()
    (job / "launch.sh").write_text("# memcalc check args.json --gpu h100\ntorchrun train.py args.json\n")
    assert said().endswith("check its job with: cd DIR && memcalc check args.json --gpu h100.\n")


def test_a_script_in_python_is_no_dead_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it is answered with options to give; beside its job's files, as `*` has them, with a note."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("from unsloth import FastLanguageModel\nmodel = load()\n", encoding="utf-8")
    job = ("--model", "llama-3-8b", "--gpu", "h100", "--gpus", "1", "--seq-len", "2048")
    alone = run("train.py", *job)
    assert alone.exit_code == 2
    assert "is Python, of which no setting is read: give them as options" in alone.stderr
    command = alone.stderr.partition("as in memcalc ")[2].partition(", or the")[0]
    assert CliRunner().invoke(app, command.split()).exit_code == 0
    Path("args.json").write_text(json.dumps({"output_dir": "x", "per_device_train_batch_size": 1, "bf16": True}))
    assert "give the file that starts its job: args.json" in run(".", *job).stderr
    both, config = run("args.json", "train.py", *job), run("args.json", *job)
    assert "train.py is Python, of which no setting is read" in both.stdout
    assert both.stdout.splitlines()[0] == config.stdout.splitlines()[0]


def test_a_folder_beyond_all_bounds_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 3)
    with pytest.raises(FileError, match="at most 3 configs"):
        survey(str(folder))


def test_post_training_with_images_is_declined(tmp_path: Path) -> None:
    """It is read, and what it needs is not modelled: no value of it is wrong."""
    script = "NPROC_PER_NODE=8 swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-VL-7B-Instruct --train_type lora\n"
    (tmp_path / "dpo.sh").write_text(script)
    [file] = survey(str(tmp_path), gpu="h100", gpus=8, seq_len=4096).files
    assert file.outcome == "declined"
    assert "images" in file.reason
