"""memcalc check: verdicts, exit codes, what is asked for, edits that are proved, and forms for machines."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import memcalc
from memcalc.cli.app import app
from memcalc.errors import InputError, MissingError
from memcalc.preflight import answer, check

LARGE = """\
{
  // "comment": none, this is JSON
  "train_micro_batch_size_per_gpu": 8,
  "gradient_accumulation_steps": 4,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 1,
    "overlap_comm": true
  }
}
""".replace('  // "comment": none, this is JSON\n', "")
WORDS = ("--model", "llama-2-7b", "--gpu", "a100-80g", "--gpus", "8", "--seq-len", "2048")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a DeepSpeed JSON that does not fit, in which commands run."""
    (tmp_path / "ds.json").write_text(LARGE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_SCRIPT_CONTEXT", raising=False)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["check", *words])


def test_a_job_that_does_not_fit_ends_with_1_and_its_edit_with_0(job: Path) -> None:
    first = run("ds.json", *WORDS, "--fix")
    assert first.exit_code == 1
    assert first.stdout.startswith("does not fit")
    assert (job / "ds.json").read_text(encoding="utf-8") == LARGE, "the original stays"
    assert run("ds.fits.json", *WORDS).exit_code == 0


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({"verdict": "tight", "flushes": 3, "expandable_verdict": "fits"}, "is tight: gpt2 needs ",
         ", and frees its cache 3 times per step; with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it fits"),
        ({"verdict": "does-not-fit", "expandable_verdict": "tight"}, "does not fit: gpt2 needs ",
         "; with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True it is tight"),
    ],
)  # fmt: skip
def test_the_summary_says_what_a_full_card_does_and_what_cures_it(
    changes: dict[str, Any], begins: str, ends: str, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del job
    real = answer.estimate_merged

    def full(*args: Any, **options: Any) -> Any:
        assert options == {"advice": True}
        return real(*args, **options).model_copy(update=changes)

    monkeypatch.setattr(answer, "estimate_merged", full)
    found = memcalc.check(["ds.json"], model="gpt2", gpu="a100-80g", gpus=8, seq_len=1024)
    assert found.summary.startswith(begins)
    assert ends in found.summary


def test_the_edit_keeps_the_global_batch_and_every_other_line(job: Path) -> None:
    run("ds.json", *WORDS, "--fix")
    before, after = LARGE.splitlines(), (job / "ds.fits.json").read_text(encoding="utf-8").splitlines()
    assert [line for line in before if line not in after] == [
        '  "train_micro_batch_size_per_gpu": 8,',
        '  "gradient_accumulation_steps": 4,',
    ]
    data = json.loads("\n".join(after))
    assert data["train_micro_batch_size_per_gpu"] * data["gradient_accumulation_steps"] == 8 * 4


def test_the_diff_is_what_patch_applies(job: Path) -> None:
    patch = shutil.which("patch")
    if patch is None:
        pytest.skip("needs patch(1)")
    found = memcalc.check(["ds.json"], model="llama-2-7b", gpu="a100-40g", gpus=8, seq_len=2048)
    assert found.fix is not None
    edit = found.fix.edits[0]
    subprocess.run([patch, "ds.json"], input=edit.diff.encode(), check=True, cwd=job, capture_output=True)
    assert (job / "ds.json").read_text(encoding="utf-8") == edit.text


def test_what_the_user_pins_is_never_edited(job: Path) -> None:
    del job
    found = memcalc.check(["ds.json"], model="llama-2-7b", gpu="a100-80g", gpus=8, seq_len=2048, micro_batch=4)
    assert found.fix is not None
    assert not [change for change in found.fix.changes if change.startswith("micro-batch")]


def test_a_fix_is_the_fewest_settings(job: Path) -> None:
    """One setting suffices on 80 GiB: a smaller micro-batch, with the accumulation that keeps the global batch."""
    del job
    wide = memcalc.check(["ds.json"], model="llama-2-7b", gpu="a100-80g", gpus=8, seq_len=2048).fix
    assert wide is not None
    assert {change.split()[0] for change in wide.changes} == {"micro-batch", "accumulation"}


def test_up_to_three_edits_are_named_each_with_its_memory_and_speed(job: Path) -> None:
    """The first is the smallest edit; each, written by its number, comes to the figures that it was named with."""
    answer = memcalc.check(["ds.json"], model="llama-2-7b", gpu="a100-80g", gpus=8, seq_len=2048)
    assert 2 <= len(answer.fixes) <= 3
    assert answer.fixes[0] == answer.fix
    assert len({fix.changes for fix in answer.fixes}) == len(answer.fixes)
    for number, fix in enumerate((fix for fix in answer.fixes if fix.edits), 1):
        assert fix.verdict == "fits"
        assert 0 < fix.slowest < fix.tokens_per_second_per_gpu < fix.fastest
        (job / "ds.fits.json").unlink(missing_ok=True)
        assert run("ds.json", *WORDS, "--fix", "--edit", str(number)).exit_code == 1
        after = memcalc.check(["ds.fits.json"], model="llama-2-7b", gpu="a100-80g", gpus=8, seq_len=2048)
        assert after.estimate.peak.device == fix.peak
        assert after.estimate.command == fix.command
    result = run("ds.json", *WORDS, "--fix", "--edit", "9", "--force")
    assert result.exit_code == 2
    assert f"from 1 to {len(answer.fixes)}" in result.stderr


@pytest.mark.slow
def test_what_the_edited_file_cannot_say_is_a_change_by_hand(job: Path) -> None:
    """A DeepSpeed JSON has no word for the model's own checkpoints: the job that is asked to have them is the proof."""
    words = {"model": "llama-2-7b", "gpu": "a100-80g", "gpus": 8, "seq_len": 2048}
    fixes = memcalc.check(["ds.json"], **words).fixes
    [(number, hand)] = [(number, fix) for number, fix in enumerate(fixes, 1) if not fix.edits]
    assert hand.changes == ("recompute none → full",)
    assert hand.peak == memcalc.check(["ds.json"], **words, recompute="full").estimate.peak.device
    result = run("ds.json", *WORDS, "--fix", "--edit", str(number))
    assert result.exit_code == 2
    assert "made by hand" in result.stderr
    assert [path.name for path in job.iterdir()] == ["ds.json"]
    assert "recompute none → full (by hand)" in run("ds.json", *WORDS).stdout


LLAMA_FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B
stage: sft
do_train: true
finetuning_type: lora
dataset: mine
template: llama3
cutoff_len: 8192
output_dir: out
per_device_train_batch_size: 32
gradient_accumulation_steps: 2
bf16: true
"""


def test_a_format_that_is_not_edited_has_changes_by_hand(job: Path) -> None:
    """LLaMA-Factory's YAML, which said that no edit makes it fit: one made by hand comes to the figure."""
    words = ("--gpu", "a100-80g", "--gpus", "1")
    (job / "lf.yaml").write_text(LLAMA_FACTORY, encoding="utf-8")
    first = memcalc.check(["lf.yaml"], gpu="a100-80g", gpus=1).fix
    assert first is not None
    micro, accumulation = (change.rpartition(" ")[2] for change in first.changes)
    assert int(micro) * int(accumulation) == 32 * 2
    edited = LLAMA_FACTORY.replace("batch_size: 32", f"batch_size: {micro}").replace(
        "steps: 2", f"steps: {accumulation}"
    )
    (job / "lf.yaml").write_text(edited, encoding="utf-8")
    assert memcalc.check(["lf.yaml"], gpu="a100-80g", gpus=1).estimate.peak.device == first.peak
    assert run("lf.yaml", *words).exit_code == 0


TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 4
seq_len = 8192
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


@pytest.mark.slow
def test_compiled_blocks_are_an_edit_where_the_file_can_say_them(job: Path) -> None:
    """Fused kernels keep less and take less time than the same job without: of one micro-batch, the faster is named."""
    (job / "titan.toml").write_text(TORCHTITAN, encoding="utf-8")
    fixes = memcalc.check(["titan.toml"], gpu="h100", gpus=8).fixes
    compiled = next(fix for fix in fixes if "compile none → blocks" in fix.changes)
    assert "enable = true" in compiled.edits[0].text
    (job / "titan.toml").write_text(compiled.edits[0].text, encoding="utf-8")
    after = memcalc.check(["titan.toml"], gpu="h100", gpus=8).estimate
    assert (after.peak.device, after.strategy.compile) == (compiled.peak, "blocks")
    plain = next(fix for fix in fixes if fix.changes == compiled.changes[1:])
    assert compiled.peak < plain.peak
    assert compiled.tokens_per_second_per_gpu > plain.tokens_per_second_per_gpu


def test_nothing_is_overwritten_unasked(job: Path) -> None:
    (job / "ds.fits.json").write_text("mine", encoding="utf-8")
    result = run("ds.json", *WORDS, "--fix")
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert (job / "ds.fits.json").read_text(encoding="utf-8") == "mine"
    assert run("ds.json", *WORDS, "--fix", "--force").exit_code == 1
    assert (job / "ds.fits.json").read_text(encoding="utf-8") != "mine"
    assert sorted(path.name for path in job.iterdir()) == ["ds.fits.json", "ds.json"]


def test_all_that_is_missing_is_asked_for_at_once(job: Path) -> None:
    del job
    result = run("ds.json", "--model", "llama-2-7b")
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in ("--gpu,", "--gpus", "--seq-len"))
    assert "--micro-batch" not in result.stderr


def test_gpus_follow_from_the_batch(job: Path) -> None:
    """256 = 8 × 4 × 8 ranks."""
    (job / "ds.json").write_text(LARGE.replace('"bf16"', '"train_batch_size": 256, "bf16"'), encoding="utf-8")
    found = memcalc.check(["ds.json"], model="llama-2-7b", gpu="a100-80g", seq_len=2048)
    assert found.estimate.hardware.gpus == 8


def test_a_file_that_names_an_unknown_model_is_answered_with_the_nearest() -> None:
    from memcalc.preflight.names import model_named

    assert model_named("meta-llama/Meta-Llama-3-8B-Instruct") == "llama-3-8b"
    assert model_named("mistralai/Mistral-7B-v0.1") == "mistral-7b-v0.1"
    with pytest.raises(MissingError, match="give --model"):
        model_named("acme/Secret-9B")


@pytest.mark.parametrize(("said", "code"), [("--brief", 1), ("SLURM", 1)])
def test_a_prolog_gets_one_line(job: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int) -> None:
    del job
    words = [*WORDS, "--brief"] if said == "--brief" else [*WORDS]
    if said == "SLURM":
        monkeypatch.setenv("SLURM_SCRIPT_CONTEXT", "prolog_slurmd")
    result = run("ds.json", *words)
    assert result.exit_code == code
    assert result.stdout.startswith("memcalc: does not fit: llama-2-7b needs ")
    assert result.stdout.count("\n") == 1


def test_json_has_the_fields_of_the_interface(job: Path) -> None:
    (job / "ds.json").write_text(LARGE.replace("overlap_comm", "overlap_com"), encoding="utf-8")
    data = json.loads(run("ds.json", *WORDS, "--format", "json").stdout)
    assert data["schema"] == "memcalc.check/1"
    assert data["verdict"] == data["estimate"]["verdict"] == "does-not-fit"
    assert [file["path"] for file in data["files"]] == ["ds.json"]
    assert {"severity", "field", "message", "suggestion"} <= set(data["files"][0]["findings"][0])
    assert json.loads(run("ds.json", *WORDS, "--brief", "--format", "json").stdout) == data


def test_annotations_stand_at_the_line(job: Path) -> None:
    (job / "ds.json").write_text(LARGE.replace("overlap_comm", "overlap_com"), encoding="utf-8")
    lines = run("ds.json", *WORDS, "--format", "github").stdout.splitlines()
    assert lines[0].startswith("::warning file=ds.json,line=7,title=MC001::zero_optimization.overlap_com is not")
    assert lines[-1].startswith("::error file=ds.json,line=1,title=MC100::does not fit")


def test_a_message_cannot_forge_an_annotation(job: Path) -> None:
    (job / "ds.json").write_text(LARGE.replace("overlap_comm", "x%\\n::error::y"), encoding="utf-8")
    lines = run("ds.json", *WORDS, "--format", "github").stdout.splitlines()
    assert all(line.startswith("::") for line in lines)
    assert not [line for line in lines if line.startswith("::error::")]


def test_sarif_is_whole(job: Path) -> None:
    del job
    log: dict[str, Any] = json.loads(run("ds.json", *WORDS, "--format", "sarif").stdout)
    results = log["runs"][0]["results"]
    rules = {rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]}
    assert log["version"] == "2.1.0"
    assert {one["ruleId"] for one in results} == rules
    assert {one["level"] for one in results} <= {"error", "warning", "note"}
    assert all(one["locations"][0]["physicalLocation"]["region"]["startLine"] >= 1 for one in results)


def test_what_is_left_to_the_framework_is_shown(job: Path) -> None:
    (job / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1}', encoding="utf-8")
    found = memcalc.check(["ds.json"], model="llama-2-7b", gpu="a100-80g", gpus=8, seq_len=2048)
    defaults = {default.field: default.value for default in found.files[0].defaults}
    assert defaults["zero_optimization.stage"] == 0
    assert defaults["bf16.enabled"] == "no"
    assert found.estimate.strategy.precision == "fp32"


def test_a_check_is_the_estimate_that_it_names(job: Path) -> None:
    """The command that is printed has the same bytes."""
    del job
    found = memcalc.check(["ds.json"], model="llama-2-7b", gpu="a100-80g", gpus=8, seq_len=2048)
    words = found.command.split()[1:]
    result = CliRunner().invoke(app, [*words, "--format", "json"])
    assert json.loads(result.stdout)["peak"] == found.estimate.peak.model_dump()


def test_an_era_of_the_trainer_has_its_own_optimizer_where_no_file_names_one(tmp_path: Path) -> None:
    """training_args.py: adamw_torch, whose step copies all second moments, before 4.54; a file's own word stays.

    Then weights, gradients, two moments and the copy of 7,615,616,512 weights are 10 bytes each in bf16, 71 GiB: of
    such a step ms-swift's examples/train/full/train.sh of December 2024 says that it takes 76.
    """
    arguments = {
        "output_dir": "out", "bf16": True, "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
        "gradient_checkpointing": True, "per_device_train_batch_size": 1,
    }  # fmt: skip
    for name, more in {"left": {}, "named": {"optim": "adamw_torch_fused"}}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**arguments, **more}), encoding="utf-8")
    words: dict[str, Any] = {"gpu": "h200", "gpus": 1, "seq_len": 2048, "precision": "bf16", "framework": "hf@4.49"}
    left, named = (check([str(tmp_path / f"{name}.json")], **words) for name in ("left", "named"))
    assert left.estimate.strategy.optimizer_impl == "foreach"
    assert named.estimate.strategy.optimizer_impl == "fused"
    assert 10 * 7_615_616_512 <= left.estimate.peak.allocated < 1.01 * 10 * 7_615_616_512
    assert "adamw_torch" in {default.usual for default in left.files[0].defaults}


def test_under_deepspeed_too_until_the_trainers_default_was_fused(tmp_path: Path) -> None:
    """LLaMA-Factory's issue 5977 of November 2024: 8B in full by its ZeRO-3 file, out of memory on eight RTX 3090."""
    (tmp_path / "job.yaml").write_text(
        "model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct\nstage: sft\ndo_train: true\nfinetuning_type: full\n"
        "deepspeed: ds.json\ncutoff_len: 1024\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\n"
        "fp16: true\n",
        encoding="utf-8",
    )
    stage = {"stage": 3, "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 1e9}
    text = json.dumps({"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "zero_optimization": stage})
    (tmp_path / "ds.json").write_text(text, encoding="utf-8")
    words: dict[str, Any] = {"gpu": "rtx-3090", "gpus": 8}
    eras = ("deepspeed@2024-11", "deepspeed@2025-11")
    then, now = (check([str(tmp_path / "job.yaml")], **words, framework=era).estimate for era in eras)
    assert (then.strategy.optimizer_impl, now.strategy.optimizer_impl) == ("foreach", "fused")
    assert (then.verdict, now.verdict) == ("does-not-fit", "does-not-fit")
    shard = 8_030_261_248 // 8  # less than a sub-group: the step has one more fp32 copy of it
    assert then.peak.allocated - now.peak.allocated == pytest.approx(4 * shard, rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tp", "abc"), "tp 'abc'"),
        (("--tp", "2/4"), "takes one value"),
        (("--zero", "5"), "zero '5'"),
        (("--set", "strategy.x=1"), "set 'strategy.x'"),
        (("--framework", "nope"), "framework 'nope'"),
    ],
)
def test_what_is_typed_is_checked_before_anything_follows_from_it(job: Path, words: tuple[str, ...], said: str) -> None:
    del job
    result = run("ds.json", *WORDS, *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_setting_that_is_a_word_is_that_word(job: Path) -> None:
    del job
    words = [word for word in WORDS if word not in ("--seq-len", "2048")]
    assert run("ds.json", *words, "--set", "workload.seq_len=2048", "--brief").exit_code == 1


def test_an_unknown_model_is_asked_for_in_the_sentence_of_all_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "job.yaml").write_text(
        "base_model: someone/unknown-9b\nsequence_len: 4096\nmicro_batch_size: 2\ndatasets: []\n"
        "adapter: lora\nlora_r: 8\nlora_target_modules: [some_layer]\n"
    )
    result = run(str(tmp_path / "job.yaml"), "--gpu", "h100", "--gpus", "8")
    said = " ".join(result.output.split())
    assert result.exit_code == 3
    assert "--lora (" in said
    assert "--model (the model 'someone/unknown-9b'" in said


@pytest.mark.parametrize(
    ("base", "kept", "absent"),
    [("THUDM/GLM-4-32B-0414", "16:q,v,down", "gate"), ("zai-org/GLM-4.7-Flash", "16:gate,down", "q, v")],
)
def test_layers_that_the_model_has_not_get_no_adapter_and_are_named(
    tmp_path: Path, base: str, kept: str, absent: str
) -> None:
    """PEFT passes over them: GLM-4's gate is a part of a packed layer, and MLA has no matrix of queries or values."""
    pytest.importorskip("yaml")
    (tmp_path / "job.yaml").write_text(
        f"base_model: {base}\nsequence_len: 4096\nmicro_batch_size: 2\ndatasets: []\n"
        "adapter: lora\nlora_r: 16\nlora_target_modules: [q_proj, v_proj, gate_proj, down_proj]\n"
    )
    result = check([str(tmp_path / "job.yaml")], gpu="b200", gpus=8, framework="hf@4.49")  # a layer for each expert
    assert str(result.estimate.strategy.lora) == kept
    assert [finding.code for file in result.files for finding in file.findings if absent in finding.message] == [
        "MC001"
    ]


def test_adapters_of_no_layer_that_the_model_has_are_refused(tmp_path: Path) -> None:
    """As PEFT refuses them."""
    pytest.importorskip("yaml")
    (tmp_path / "job.yaml").write_text(
        "base_model: THUDM/GLM-4-32B-0414\nsequence_len: 4096\nmicro_batch_size: 2\ndatasets: []\n"
        "adapter: lora\nlora_r: 16\nlora_target_modules: [gate_proj, up_proj]\n"
    )
    with pytest.raises(InputError, match="glm-4-32b-0414 has q, k, v"):
        check([str(tmp_path / "job.yaml")], gpu="h100", gpus=8)
