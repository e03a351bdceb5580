"""Plans that are searched for a format, and written at once: what is listed is what can be started."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import memcalc
from memcalc.cli.app import app
from memcalc.errors import CombinationError, FileError
from memcalc.files import write_folder
from memcalc.handoff import plan_to, started
from memcalc.handoff.written import write_plan

JOB: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "h100", "gpus": 2}


def test_every_plan_that_is_listed_for_a_format_is_written_by_it() -> None:
    plans = plan_to("trainer", top=3, **JOB, advice=False)
    assert [plan.rank for plan in plans.plans] == [1, 2, 3]
    assert {plan.strategy.framework for plan in plans.plans} == {"fsdp2"}
    assert "--to trainer" in plans.command
    for plan in plans.plans:
        files = memcalc.export(plans, to="trainer", rank=plan.rank)
        assert json.loads(files["training_args.json"])["fsdp_config"]["version"] == 2


def test_a_plan_for_the_trainer_is_of_what_accelerate_runs_by_itself() -> None:
    """prepare_model and set_mixed_precision of Accelerate: autocast, and gradients that are reduced in 16 bits."""
    for name in ("trainer", "axolotl"):
        (plan,) = plan_to(name, top=1, recompute="full", **JOB, advice=False).plans
        assert (plan.strategy.autocast, plan.strategy.reduce_dtype) == (True, "bf16")
        done = write_plan(plan, name, None, ())
        assert not [note for note in done.notes if "what runs has" in note]


def test_adapters_of_a_gpu_without_bf16_are_planned_and_written_in_fp16() -> None:
    """The Trainer's ``fp16`` scales the loss under autocast, over a base that is loaded in float16."""
    job: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "t4", "lora": 16, "quantize": "nf4", "recompute": "full"}
    for framework, gpus in (("hf", 1), ("ddp", 2)):
        (plan,) = memcalc.plan(**job, framework=framework, gpus=gpus, top=1, advice=False).plans
        done = write_plan(plan, "trainer", None, ())
        said = json.loads(done.files[Path("training_args.json")])
        assert (said["fp16"], said["bf16"], said["dtype"]) == (True, False, "float16")
        assert (plan.strategy.autocast, done.notes) == (True, ())
    sharded = {"gpu": "v100-16g", "gpus": 2, "quantize": None, "framework": "fsdp2"}
    (plan,) = plan_to("trainer", top=1, **(job | sharded), advice=False).plans
    done = write_plan(plan, "trainer", None, ())
    assert (plan.strategy.autocast, plan.strategy.reduce_dtype) == (True, "bf16")
    assert not [note for note in done.notes if "what runs has" in note]


def test_axolotl_trains_all_weights_without_bf16_under_deepspeed_or_in_fp32() -> None:
    """It loads fp16 weights for ``fp16``, whose gradients torch's GradScaler refuses; DeepSpeed scales by itself.

    In fp32 ``sdpa`` takes PyTorch's math kernel where heads are grouped: the fused one has none with enable_gqa.
    """
    job: dict[str, Any] = {"model": "llama-3.2-1b", "gpu": "v100-32g", "gpus": 8, "recompute": "full", "micro_batch": 1}
    (plan,) = plan_to("axolotl", top=1, offload="none", **job, advice=False).plans
    files = write_plan(plan, "axolotl", None, ()).files
    assert plan.strategy.framework == "deepspeed"
    assert "fp16: true" in files[Path("config.yaml")]
    (plan,) = plan_to("axolotl", top=1, offload="none", tp=1, precision="fp32", **job, advice=False).plans
    assert plan.strategy.attention == "math"
    assert "attn_implementation: sdpa" in write_plan(plan, "axolotl", None, ()).files[Path("config.yaml")]


def test_axolotl_on_one_gpu_trains_the_16_bit_weights_that_it_loads() -> None:
    """resolve_dtype loads in bf16, under autocast; FSDP 1, which casts to fp32, was planned with offload."""
    job: dict[str, Any] = {**JOB, "gpus": 1, "recompute": "full", "micro_batch": 1}
    (plan,) = plan_to("axolotl", top=1, **job, advice=False).plans
    assert (plan.strategy.precision, plan.strategy.autocast, plan.strategy.zero) == ("bf16", True, 0)
    assert not plan.strategy.offload


def test_the_first_plan_that_a_format_says_is_not_told_apart_from_one_that_it_does_not() -> None:
    """The Trainer recomputes one block in four, and axolotl all or none."""
    job = {**JOB, "model": "llama-3.1-8b", "gpu": "l40s", "gpus": 4, "lora": "16:all-linear"}
    first, second = plan_to("axolotl", top=2, **job, advice=False).plans
    assert first.special[0] == "best"
    assert "vs #1" not in first.why
    assert (
        f"{100 * (second.time.tokens_per_second_per_gpu / first.time.tokens_per_second_per_gpu - 1):+.1f}%".replace(
            "-", "−"
        )
        in second.why
    )


def test_ms_swifts_adapters_need_no_word_of_their_own() -> None:
    (plan,) = plan_to(
        "swift_megatron", top=1, model="llama-3.1-8b", gpu="h100", gpus=8, lora=16, tp=2, pp=1, advice=False
    ).plans
    assert plan.strategy.lora_classes == "swift"


def test_a_format_of_another_framework_is_refused() -> None:
    with pytest.raises(CombinationError, match="Megatron-LM arguments is for --framework megatron"):
        plan_to("megatron", framework="fsdp2", **JOB)


def test_torchtitans_toml_is_planned_for_the_release_that_reads_it() -> None:
    found = plan_to(
        "torchtitan", top=1, model="llama-3.1-8b", gpu="h100", gpus=8, recompute="full", pp=1, cp=1, advice=False
    )
    assert found.plans[0].strategy.framework == "torchtitan@2026-02"


def run(*parts: str) -> Any:
    return CliRunner().invoke(app, [*parts], prog_name="memcalc")


def test_a_plan_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--model", "llama-3.2-1b", "--gpu", "h100", "--gpus", "2", "--framework", "deepspeed", "--top", "1")
    done = run("plan", *words, "--write", "job")
    assert done.exit_code == 0, done.stderr
    files = {path.name for path in (tmp_path / "job").iterdir()}
    assert files == {"ds_config.json", "training_args.json", "train.py", "launch.sh"}
    launcher = (tmp_path / "job" / "launch.sh").read_text(encoding="utf-8")
    assert "\ndeepspeed --num_gpus 2 train.py training_args.json\n" in launcher
    line = re.search(r"^# memcalc (check .*)$", launcher, re.MULTILINE)
    assert line is not None
    monkeypatch.chdir(tmp_path / "job")
    assert run(*line[1].split()).exit_code == 0
    monkeypatch.chdir(tmp_path)
    again = run("plan", *words, "--write", "job")
    assert (again.exit_code, "--force" in again.stderr) == (2, True)
    assert run("plan", *words, "--write", "job", "--force").exit_code == 0


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 4096,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize("framework", ["ddp", "deepspeed", "fsdp2"])
def test_a_model_that_is_a_relative_path_is_found_from_the_jobs_folder_and_from_elsewhere(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "models" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ("--model", "models/config.json", "--gpu", "h100", "--gpus", "2", "--framework", framework, "--top", "1")
    done = run("plan", *words, "--write", "job")
    assert done.exit_code == 0, done.stderr
    texts = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "job").iterdir())
    named = {name.removesuffix("config.json") for name in re.findall(r'[^"\s]*models/config\.json', texts)}
    assert named == {f"{tmp_path}/models/"}
    launcher = (tmp_path / "job" / "launch.sh").read_text(encoding="utf-8")
    line = re.search(r"^# memcalc (check .*)$", launcher, re.MULTILINE)
    assert line is not None
    monkeypatch.chdir(tmp_path / "job")
    assert run(*line[1].split()).exit_code == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    words_there = [
        str(tmp_path / "job" / word) if (tmp_path / "job" / word).is_file() else word for word in line[1].split()
    ]
    assert run(*words_there).exit_code == 0


def test_a_new_folder_is_there_with_all_its_files_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        write_folder(tmp_path / "job", {"a": "1", "no/such": "2"}, force=False)
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path / "job", {"a": "1", "b": "2"}, force=False)
    assert {path.name: path.read_text() for path in (tmp_path / "job").iterdir()} == {"a": "1", "b": "2"}
    with pytest.raises(FileError, match="must be a folder"):
        write_folder(tmp_path / "job" / "a", {"a": "1"}, force=False)


@pytest.mark.slow
def test_what_would_fit_is_what_the_format_says() -> None:
    """Neither torchtitan nor Megatron-LM is told adapters, a quantised base or 8-bit states."""
    large = {"model": "llama-3.1-70b", "gpu": "a100-80g", "gpus": 8, "offload": "none", "pp": 1, "cp": 1}
    for to in ("torchtitan", "megatron"):
        found = plan_to(to, **large)
        assert not found.plans
        changes = [answer.change for answer in found.nearest]
        assert any("--gpus" in change for change in changes), changes
        assert not any(re.search("adamw-8bit|--lora|--quantize", change) for change in changes), changes
        assert all(f"--to {to}" in answer.command for answer in found.nearest)


def test_each_format_is_of_a_framework_where_none_is_named() -> None:
    """What is written for several GPUs runs FSDP 2, the default of Transformers' Trainer.

    Adapters train beside copies of their base where these fit.
    """
    for to, words, framework in (
        ("axolotl", {"gpus": 1}, "hf"),
        ("axolotl", {"gpus": 2}, "fsdp2"),
        ("accelerate", {"gpus": "2/4"}, "fsdp2"),
        ("accelerate", {"gpus": 1}, "hf"),
        ("trainer", {"gpus": 2, "lora": 8, "precision": "bf16"}, "ddp"),
        ("trainer", {"gpus": 2, "lora": 8, "precision": "bf16", "model": "qwen2.5-72b", "gpu": "h100"}, "fsdp2"),
        ("deepspeed", {"gpus": 2}, "deepspeed"),
    ):
        found = plan_to(to, **{**JOB, "model": "gpt2", "precision": "fp32", **words}, top=1, advice=False).plans
        assert {plan.strategy.framework for plan in found} == {framework}


def test_a_plan_for_axolotl_is_of_what_axolotl_sets_by_itself() -> None:
    """PYTORCH_ALLOC_CONF (utils/__init__.py), and gradients that are reduced after each micro-batch, as is written."""
    for words in ({"zero": 2}, {"lora": "16", "zero": 3}):
        (plan,) = plan_to(
            "axolotl", top=1, recompute="full", offload="none", micro_batch=1, **JOB, **words, advice=False
        ).plans
        assert (plan.strategy.expandable_segments, plan.strategy.reduce_dtype) == (True, "bf16")
        done = write_plan(plan, "axolotl", None, ())
        assert "sync_each_batch: true" in done.files[Path("config.yaml")]
        assert "activation_checkpointing: true" in done.files[Path("config.yaml")]  # before FSDP wraps the blocks
        assert not [note for note in done.notes if "what runs has" in note]


def test_a_mixture_whose_experts_axolotl_leaves_in_fp32_names_the_setting_that_plans_it() -> None:
    words: dict[str, Any] = {"model": "qwen1.5-moe-a2.7b", "gpu": "h200", "gpus": 1, "framework": "hf", "seq_len": 1024}
    words |= {"lora": "16:q,v", "quantize": "nf4-dq", "precision": "bf16", "autocast": True, "recompute": "full"}
    told, untold = (
        write_plan(
            memcalc.estimate(**words, settings={"strategy.expandable_segments": True, **more}), "axolotl", None, ()
        )
        for more in ({"strategy.kbit_experts": True, "strategy.kbit_passing": True}, {})
    )
    assert "; --set strategy.kbit_experts=true plans what runs." in " ".join(untold.notes)
    assert "what runs" not in " ".join(told.notes)


@pytest.mark.slow
def test_a_config_that_runs_otherwise_than_planned_names_what_plans_it() -> None:
    words: dict[str, Any] = {"model": "gpt-oss-20b", "gpu": "h100", "gpus": 8}  # FSDP 2's script has no experts
    plans = memcalc.plan(top=1, framework="fsdp2", **words, advice=False)
    notes = " ".join(started(plans, plans.plans[0], None).notes)
    assert "; --to trainer plans what runs." in notes
    planned = plan_to("trainer", top=1, **words, advice=False)
    assert "what runs" not in " ".join(started(planned, planned.plans[0], "trainer").notes)


@pytest.mark.slow
def test_fsdp_1_is_written_for_accelerate_which_reduces_as_often_by_itself() -> None:
    """Of a GPT-2, whose norms autocast computes in fp32; those of OLMo and Llama are so by their classes."""
    best = memcalc.plan(model="gpt2-xl", gpu="a100-40g", gpus=8, framework="fsdp1", advice=False).plans[0]
    assert best.accumulation_steps > 1
    (note,) = (note for note in write_plan(best, "accelerate", None, ()).notes if "what runs has" in note)
    assert "autocast True" in note
    assert "whole-accumulation" not in note


def test_where_tensor_parallelism_alone_fits_a_launcher_that_has_none_is_planned_without() -> None:
    """FSDP 2's script splits weights by TP, of which Accelerate's config says nothing: 3B on four cards of 24 GB."""
    words: dict[str, Any] = {"model": "smollm3-3b", "gpu": "rtx-4090", "gpus": 4}
    assert {plan.strategy.tp for plan in memcalc.plan(**words, advice=False).plans} == {2, 4}
    assert [plan.strategy.tp for plan in plan_to("trainer", **words, advice=False).plans] == [1]
    # with policies of operators too, which no launcher has: what is refused is then not the degree
    words = {"model": "mistral-nemo-12b", "gpu": "l40s", "gpus": 8}
    (only,) = plan_to("accelerate", **words, advice=False).plans
    assert (only.strategy.tp, only.strategy.recompute) == (1, "full")


@pytest.mark.slow
def test_what_axolotl_says_under_deepspeed_alone_is_its_way_out() -> None:
    """One card of 32 GB under a 4B: offloaded by FSDP, weights that axolotl does not load in fp32; by ZeRO they fit."""
    with pytest.raises(CombinationError) as refused:
        plan_to("axolotl", model="qwen3-4b", gpu="rtx-5090", gpus=1)
    line = str(refused.value).rstrip(".").rpartition("; plan what it can say: memcalc ")[2]
    assert "--framework deepspeed --to axolotl" in line
    answer = run(*line.split())
    assert (answer.exit_code, answer.stdout[:4]) == (0, "fits")


def test_fsdp_1_is_said_to_be_deprecated_by_estimate_and_plan() -> None:
    words = {**JOB, "framework": "hf", "recompute": "full"}
    for several in (memcalc.estimate(**words, zero=3), memcalc.plan(**words, zero=3, top=1)):
        assert any("Transformers 5 deprecates" in text and "--to trainer" in text for text in several.warnings)
    for other in ({"gpus": 1}, {"zero": 0}, {"zero": 3, "framework": "fsdp2"}):
        assert not any("deprecates" in text for text in memcalc.estimate(**{**words, **other}).warnings)


def test_an_evaluation_has_as_many_sequences_at_a_time_as_a_step_unless_it_is_said(tmp_path: Path) -> None:
    """The Trainer's default of 8 takes more than the step that was planned; what is written evaluates within it."""
    words = {**JOB, "gpus": 1, "lora": "16", "micro_batch": 2, "recompute": "none"}
    plans = plan_to("trainer", top=1, **words, advice=False)
    arguments = json.loads(memcalc.export(plans, to="trainer")["training_args.json"])
    path = tmp_path / "training_args.json"
    path.write_text(json.dumps({**arguments, "eval_strategy": "steps"}), encoding="utf-8")
    checked = memcalc.check([str(path)], gpu="h100", gpus=1)
    (evaluation,) = [each for each in checked.estimate.occasions if each.name == "evaluation"]
    assert evaluation.allocated < checked.estimate.peak.allocated
    assert "MC111" not in {finding.code for finding in checked.files[0].findings}
    stated = plan_to("trainer", top=1, **words, settings={"workload.eval_micro_batch": 4}, advice=False)
    assert json.loads(memcalc.export(stated, to="trainer")["training_args.json"])["per_device_eval_batch_size"] == 4


@pytest.mark.parametrize(
    ("model", "words"),
    [("gpt-oss-20b", {}), ("jamba-v0.1", {}), ("llama-3-8b", {"loss": "fused-linear"})],
    ids=["experts", "hybrid", "loss"],
)
def test_what_no_script_runs_is_planned_as_the_trainer_runs_it_where_no_framework_is_named(
    model: str, words: dict[str, Any]
) -> None:
    """Accelerate 1.15 (set_mixed_precision, prepare_model): 16-bit reductions, and autocast over the shards."""
    plans = memcalc.plan(model=model, gpu="h100", gpus=16, top=1, advice=False, **words)
    strategy = plans.plans[0].strategy
    assert (strategy.framework, strategy.autocast, strategy.reduce_dtype) == ("fsdp2", True, "bf16")
    done = started(plans, plans.plans[0], None)
    assert done.format == "trainer"
    assert not [note for note in done.notes if "what runs" in note]
    again = memcalc.estimate(**plans.plans[0].job.keywords())
    assert again.peak.device == plans.plans[0].peak.device


def test_an_optimizer_of_bitsandbytes_is_written_for_axolotl_whatever_its_form() -> None:
    """Its kernels update in place (bitsandbytes optimizer.py), so that no form of PyTorch's is meant."""
    for optimizer, name in (("adamw-8bit", "adamw_bnb_8bit"), ("lion", "lion_32bit"), ("muon", "muon")):
        (plan,) = plan_to(
            "axolotl", model="llama-3.2-1b", gpu="h100", gpus=2, optimizer=optimizer, top=1, advice=False
        ).plans
        done = write_plan(plan, "axolotl", None, ())
        assert f"optimizer: {name}" in done.files[Path("config.yaml")]
        assert (plan.strategy.optimizer, plan.own_code) == (optimizer, ())


def test_a_refusal_keeps_what_training_computes_where_another_format_says_it() -> None:
    with pytest.raises(CombinationError) as kept:
        plan_to("fsdp2", model="llama-3.2-1b", gpu="h100", gpus=2, optimizer="adamw-8bit", top=1)
    assert "--optimizer adamw-8bit --framework fsdp2 --to trainer" in str(kept.value)


def test_a_policy_that_a_format_has_not_does_not_hide_those_that_it_has() -> None:
    """One block in two is the fastest of one GPU; axolotl checkpoints all blocks or none, whatever ``top`` is."""
    job: dict[str, Any] = {"model": "llama-3-8b", "gpu": "h100", "gpus": 1, "optimizer": "adamw-8bit"}
    fastest = memcalc.plan(framework="hf", precision="bf16", autocast=True, top=1, advice=False, **job).plans[0]
    assert fastest.strategy.recompute.startswith("every")
    first = [plan_to("axolotl", top=top, **job, advice=False).plans[0].strategy for top in (1, 6)]
    assert first[0] == first[1]
    assert first[0].recompute == "full"


def test_adapters_beside_copies_of_their_base_are_written_by_each_launcher_to_the_byte() -> None:
    """Without FSDP the Trainer's files on several GPUs are DDP's, by whatever name the plan has them."""
    job: dict[str, Any] = {"model": "llama-3.2-1b", "gpus": 4, "lora": 16, "recompute": "full", "zero": 0}
    for gpu in ("h100", "v100-32g"):  # in bf16, and in fp16, in which adapters are fp32 too
        (plan,) = memcalc.plan(gpu=gpu, **job, top=1, advice=False).plans
        for name in ("trainer", "accelerate"):
            assert not write_plan(plan, name, None, ()).notes
