"""The Trainer's arguments: what is read by hand from Transformers 5.23 and TRL 1.16, and their own classes beside."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_files import FOLDER, JOB, check, codes, config_of, defaults, read, there_and_back, words
from drawing import drawn
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import memcalc
from memcalc.api import load_model
from memcalc.convert.argument_source import flag_document
from memcalc.convert.config import Config
from memcalc.convert.formats import get_format, recognise, render_config
from memcalc.convert.formats.base import ConfigJob
from memcalc.convert.formats.trainer_writer import script_text
from memcalc.convert.shell import read_script
from memcalc.errors import CombinationError, InputError
from memcalc.frameworks import habits_of
from memcalc.handoff import exported
from memcalc.handoff.saved import saved_plan
from memcalc.preflight.job import estimate_merged
from memcalc.preflight.merge import merge

SAID: dict[str, dict[str, Any]] = {
    "run_clm.json": {
        "micro_batch": 4, "evaluates": True, "eval_micro_batch": 4, "model": "meta-llama/Llama-2-7b-hf",
        "weights": "bf16",
        "seq_len": 1024, "varying_lengths": False, "batch_rule": "pad-max",
    },
    "fsdp2.json": {
        "micro_batch": 2, "accumulation": 4, "mixed": "bf16", "zero": 2, "recompute": "full",
        "strategy.checkpoint": "non-reentrant", "checkpoints_by_fsdp2": True,
    },
    "fsdp1.json": {"micro_batch": 2, "mixed": "bf16", "engine": "fsdp1", "offload": ("params",)},
    "alpaca.yaml": {
        "micro_batch": 4, "evaluates": False, "eval_micro_batch": 4, "accumulation": 8, "mixed": "bf16",
        "seq_len": 512,
        "model": "meta-llama/Llama-2-7b-hf",
    },
    "sft_full.yaml": {
        "micro_batch": 2, "accumulation": 8, "evaluates": True, "model": "Qwen/Qwen2-0.5B", "varying_lengths": False,
        "batch_rule": "bfd",
    },
    "sft_lora.yaml": {
        "micro_batch": 2, "accumulation": 8, "model": "Qwen/Qwen2-0.5B", "lora": "32:q,v,gate,up,down",
        "weights": "bf16", "attention": "flash", "seq_len": 2048, "varying_lengths": False, "batch_rule": "bfd",
    },
    "sft_qlora.yaml": {
        "micro_batch": 4, "recompute": "full", "checkpoints_wrapped": True, "optimizer": "paged-adamw",
        "model": "meta-llama/Llama-2-7b-hf", "lora": "64:all-linear", "workload.lora_dropout": 0.1,
        "quantize": "nf4-dq", "adapter_dtype": "bf16", "weights": "bf16", "seq_len": 1024,
    },
    "deepspeed_inline.json": {
        "micro_batch": 4, "accumulation": 2, "mixed": "bf16", "optimizer": "adamw", "optimizer_impl": "foreach",
    },
    "bnb8.json": {
        "micro_batch": 1, "accumulation": 4, "mixed": "fp16", "recompute": "full", "checkpoints_wrapped": True,
        "optimizer": "adamw-8bit", "strategy.wide_embedding_moments": True,
    },
    "liger_compile.yaml": {
        "micro_batch": 8, "mixed": "bf16", "recompute": "every-2",
        "optimizer": "adafactor", "optimizer_impl": "loop", "compile": "model", "kernels": "fused",
        "loss": "fused-linear", "varying_lengths": True, "batch_rule": "grouped",
    },
    "galore.yaml": {
        "micro_batch": 2, "recompute": "full", "checkpoints_wrapped": True, "strategy.checkpoint": "reentrant",
        "optimizer": "galore-adamw", "optimizer_impl": "loop", "strategy.galore_targets": "attention,mlp",
    },
}  # fmt: skip
ALWAYS = {"engine": "trainer", "accelerated": True}
TRL = {"sft_full.yaml", "sft_lora.yaml", "sft_qlora.yaml"}
FOUND = {
    "fsdp1.json": {("MC115", "fsdp_config.fsdp_reshard_after_forward")},
    "sft_full.yaml": {("MC004", "loss_type")},
    "sft_lora.yaml": {("MC004", "loss_type")},
    "sft_qlora.yaml": {("MC004", "loss_type")},
    "galore.yaml": {("MC002", "neftune_noise_alpha")},
}


@pytest.mark.parametrize("name", sorted(SAID))
def test_reads_what_the_file_says(name: str) -> None:
    config = read(f"trainer/{name}")[0]
    found = words(config)
    assert found == {**ALWAYS, **SAID[name], **({"trl": True} if name in TRL else {})}
    assert codes(config) == FOUND.get(name, set())


@pytest.mark.parametrize("path", sorted((FOLDER / "trainer").glob("*.[jy]*")), ids=lambda path: path.name)
def test_each_file_is_known_for_what_it_is(path: Path) -> None:
    from memcalc.convert.document import read_document

    assert recognise(read_document(path)).name == ("fsdp_config" if path.name == "fsdp_options.json" else "trainer")


def arguments() -> Any:
    """Return TrainingArguments, or skip."""
    pytest.importorskip("transformers", reason="pip install transformers accelerate")
    from transformers import TrainingArguments

    return TrainingArguments


def test_the_trainers_defaults_are_those_that_are_read(tmp_path: Path) -> None:
    own = arguments()(output_dir=str(tmp_path), use_cpu=True)
    config = config_of(tmp_path / "a.json", '{"output_dir": "x", "logging_steps": 1}', "trainer")
    found = defaults(config)
    assert found["micro_batch"] == own.per_device_train_batch_size
    assert found["eval_micro_batch"] == own.per_device_eval_batch_size
    assert found["accumulation"] == own.gradient_accumulation_steps
    assert found["recompute"] == ("full" if own.activation_checkpointing else "none")
    assert (found["optimizer"], found["optimizer_impl"]) == ("adamw", "fused")
    assert own.optim.value == "adamw_torch_fused"
    assert found["mixed"] == ("bf16" if own.bf16 else "fp16" if own.fp16 else "no")


def test_every_argument_is_known(tmp_path: Path) -> None:
    kind = arguments()
    data = {field.name: None for field in dataclasses.fields(kind)}
    config = config_of(tmp_path / "a.json", json.dumps(data), "trainer")
    assert not [field for code, field in codes(config) if code == "MC001"]


def test_every_optimizer_is_known(tmp_path: Path) -> None:
    arguments()
    from transformers.training_args import OptimizerNames

    for name in OptimizerNames:
        if name.value.endswith(("_xla", "_npu_fused")):
            continue
        config = config_of(tmp_path / "a.json", json.dumps({"optim": name.value}), "trainer")
        assert config.get("optimizer"), name.value


@pytest.mark.parser
def test_trls_defaults_are_those_that_are_read(tmp_path: Path) -> None:
    reason = "pip install --no-deps trl datasets pandas multiprocess dill xxhash aiohttp requests"
    pytest.importorskip("trl", reason=reason)
    from trl import ModelConfig, SFTConfig

    own, model = SFTConfig(output_dir=str(tmp_path), use_cpu=True), ModelConfig()
    config = config_of(tmp_path / "a.yaml", "output_dir: x\nuse_peft: true\n", "trainer", "yaml")
    found = defaults(config)
    assert found["seq_len"] == own.max_length
    assert found["recompute"] == ("full" if own.gradient_checkpointing else "none")
    assert found["mixed"] == ("bf16" if own.bf16 else "no")
    assert found["weights"] == {"float32": "fp32"}[model.dtype]
    assert found["lora"] == str(model.lora_r)
    assert found["workload.lora_dropout"] == model.lora_dropout
    names = {field.name for kind in (SFTConfig, ModelConfig) for field in dataclasses.fields(kind)}
    config = config_of(tmp_path / "b.json", json.dumps(dict.fromkeys(names)), "trainer")
    assert not [field for code, field in codes(config) if code == "MC001"]


def flags(command: str) -> Config:
    """Return the config of a command's flags."""
    script = read_script(command)
    return get_format("trainer").read(flag_document(Path("train.sh"), command, script.commands[0].tokens))


def test_a_length_may_be_abbreviated_as_pefts_scripts_do() -> None:
    """A parser takes it for `--max_seq_length`, which TRL has no longer: none of its newest defaults hold."""
    config = flags("train.py --model_name_or_path m --max_seq_len 2048 --packing True --output_dir out --bf16 True")
    found = {said.name: said.value for said in config.settings}
    assert found["seq_len"] == 2048
    assert "loss" not in found
    assert not [finding for finding in config.findings if finding.field == "max_seq_len"]


def test_flags_say_the_same() -> None:
    config = flags(
        "sft.py --model_name_or_path Qwen/Qwen2-0.5B --max_length 2048 --packing --dtype bfloat16 --use_peft "
        "--lora_r 32 --lora_target_modules q_proj v_proj --per_device_train_batch_size=2 --no_gradient_checkpointing "
        """--output_dir out --gradient_checkpointing_kwargs '{"use_reentrant": false}' --deepspeed zero3.json"""
    )
    found = {said.name: said.value for said in config.settings}
    wanted = {"micro_batch": 2, "seq_len": 2048, "lora": "32:q,v", "weights": "bf16", "recompute": "none"}
    assert {word: found[word] for word in wanted} == wanted
    (reference,) = config.references
    assert (reference.format, reference.path) == ("deepspeed", "zero3.json")
    assert not [field for code, field in codes(config) if code == "MC001"]


@pytest.mark.parametrize(
    ("name", "asked", "stored"),
    [
        ("unsloth/llama-3-8b-Instruct-bnb-4bit", "", "nf4-dq"),
        ("unsloth/llama-3-8b-Instruct-bnb-4bit", " --load_in_8bit", "nf4-dq"),
        ("TheBloke/Llama-2-7B-GPTQ-Int4", "", "gptq-int4"),
        ("unsloth/llama-3-8b-Instruct", " --load_in_8bit", "int8"),
        ("unsloth/llama-3-8b-Instruct", "", None),
    ],
)
def test_a_checkpoint_that_is_stored_quantised_stays_so(name: str, asked: str, stored: str | None) -> None:
    """Transformers 5.23 quantizers/auto.py, ``merge_quantization_configs``: the checkpoint's own config goes first."""
    config = flags(f"sft.py --model_name_or_path {name} --max_length 2048 --use_peft --output_dir x{asked}")
    assert {setting.name: setting.value for setting in config.settings}.get("quantize") == stored


@pytest.mark.parametrize(("kernel", "generation"), [("flash_attention_2", None), ("flash_attention_3", 3)])
def test_the_kernel_says_its_generation(kernel: str, generation: int | None) -> None:
    config = flags(f"sft.py --model_name_or_path x --max_length 2048 --output_dir x --attn_implementation {kernel}")
    found = {setting.name: setting.value for setting in config.settings}
    assert (found["attention"], found.get("strategy.flash_version")) == ("flash", generation)


def test_a_switch_of_a_scripts_own_asks_for_its_rank() -> None:
    """TRL's switch is use_peft, with a rank of 16; of another script it is not known (FastChat has 8, Qwen 64)."""
    command = "sft.py --model_name_or_path x --max_length 2048 --output_dir x"
    own, trl = flags(f"{command} --use_lora"), flags(f"{command} --use_peft")
    assert [setting.unknown for setting in own.settings if setting.name == "lora"] == ["-"]
    assert [setting.value for setting in trl.settings if setting.name == "lora"] == ["16"]


def test_a_flag_that_only_a_run_tells_stays_open() -> None:
    config = flags("run.py --per_device_train_batch_size $BATCH --output_dir out --bf16 True")
    (said,) = [said for said in config.settings if said.name == "micro_batch"]
    assert "BATCH" in said.unknown


def test_wrong_values_are_named(tmp_path: Path) -> None:
    for data, said in (
        ({"optim": "adamw_torch_fuzed"}, "adamw_torch_fused"),
        ({"bf16": True, "fp16": True}, "fp16"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size"),
        ({"fsdp": "ful_shard"}, "full_shard"),
        ({"gradient_checkpointing_kwargs": "reentrant"}, "gradient_checkpointing_kwargs"),
    ):
        with pytest.raises(InputError, match=said):
            config_of(tmp_path / "a.json", json.dumps(data), "trainer")


def test_a_misspelt_argument_is_warned_of(tmp_path: Path) -> None:
    text = '{"output_dir": "x", "gradient_acumulation_steps": 8}'
    (finding,) = config_of(tmp_path / "a.json", text, "trainer").findings
    assert (finding.code, finding.suggestion) == ("MC001", "did you mean gradient_accumulation_steps?")


# ------------------------------------------------------------------------------------------------------- joined files


def test_fsdp_of_the_trainer_accumulates_whole_gradients() -> None:
    """Trainer 5.23 runs all micro-batches but the last under no_sync; `sync_each_batch` ends that."""
    estimate = check("trainer/fsdp2.json", gpus=8)
    assert (estimate.strategy.framework, estimate.strategy.whole_accumulation) == ("fsdp2", True)
    assert estimate.strategy.reduce_dtype == "bf16"
    parameters = 6_738_415_616  # of Llama 2 7B
    whole = [term.bytes for term in estimate.terms if "unsharded gradients" in term.name]
    assert whole == [2 * parameters]
    synced = check("trainer/fsdp2.json", gpus=8, sync_each_batch=True)
    assert synced.strategy.whole_accumulation is None
    assert estimate.peak.allocated > synced.peak.allocated


@pytest.mark.parametrize(
    ("framework", "whole"),
    [
        ("fsdp2@2025-08", None), ("fsdp2@2.8", None), ("fsdp2@2025-10", True), ("fsdp2@2.9", True),
    ],
)  # fmt: skip
def test_accelerate_before_1_11_reduces_each_micro_batch_of_fsdp_2(framework: str, whole: bool | None) -> None:
    """Accelerate 1.10.1 accelerator.py, no_sync: FSDP 2's modules have none; 1.11.0 (October 2025) tells them itself.

    axolotl's README of gpt-oss-20b in full on 4 GPUs of 80 GB, from August 2025, says 46 GiB: 39 less than whole ones.
    """
    assert check("trainer/fsdp2.json", gpus=8, framework=framework).strategy.whole_accumulation is whole


@pytest.mark.parametrize(
    ("adapters", "version", "dtype", "noted"),
    [
        (True, 2, "bfloat16", True),
        (True, 1, "bfloat16", False),
        (False, 2, "bfloat16", False),
        (True, 2, "float32", False),
    ],
)
def test_who_casts_a_frozen_base_is_noted(
    tmp_path: Path, *, adapters: bool, version: int, dtype: str, noted: bool
) -> None:
    """Accelerate v1.6.0 to v1.12.0: fsdp2_prepare_model, model.to(torch.float32); v1.13.0 casts what is trained."""
    data = {
        "output_dir": "x", "dtype": dtype, "bf16": True, "use_peft": adapters, "fsdp": True,
        "fsdp_config": {"fsdp_version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }  # fmt: skip
    config = config_of(tmp_path / "a.json", json.dumps({**data, "loss_type": "nll"}), "trainer")
    job = merge((config,), {**JOB, "gpus": 8})
    assert any("1.6 to 1.12" in finding.message for _, finding in job.findings) == noted


def test_gradients_that_no_sync_keeps_whole_are_named_and_sharded_by_an_edit(tmp_path: Path) -> None:
    """Trainer 5.23, `_run_epoch`: `sync_each_batch` of Accelerate's accumulation plugin leaves no_sync out."""
    path = tmp_path / "a.json"
    data = {"bf16": True, "dtype": "float32", "fsdp": True, "fsdp_config": {"version": 1}, "block_size": 2048}
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "gradient_checkpointing": True}
    path.write_text(json.dumps({**data, **batch, "output_dir": "x"}))
    answer = memcalc.check([str(path)], model="llama-2-7b", gpu="a100-40g", gpus=4)
    assert answer.verdict == "tight"
    (said,) = (
        found.message for found in answer.files[0].findings if found.code == "MC109" and "no_sync" in found.message
    )
    assert said.endswith(f"{2 * 6_738_415_616 / 2**30:.1f} GiB per GPU")  # of 16 bits each
    told = json.loads(answer.fixes[0].edits[0].text)
    assert told["accelerator_config"]["gradient_accumulation_kwargs"] == {"sync_each_batch": True}
    path.write_text(json.dumps(told))
    again = memcalc.check([str(path)], model="llama-2-7b", gpu="a100-40g", gpus=4)
    assert again.estimate.peak.device == answer.fixes[0].peak
    whole, shards = answer.estimate.components.gradients, again.estimate.components.gradients
    parameters = 6_738_415_616  # of which 16-bit ones are whole, and fp32 ones shared by four
    assert whole >= 2 * parameters > 1.1 * parameters > shards  # with a block's own


def test_a_frozen_base_is_sharded_in_the_dtype_that_it_was_loaded_in(tmp_path: Path) -> None:
    """FSDP's policy casts gathered weights (``param_dtype``); Accelerate 1.13 and later casts no frozen shards."""
    path = tmp_path / "a.json"
    for dtype, width in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        half = dtype == "float16"
        data = {"bf16": not half, "fp16": half, "dtype": dtype, "use_peft": True, "fsdp": True, "loss_type": "nll"}
        path.write_text(json.dumps({**data, "output_dir": "x", "fsdp_config": {"version": 2}}))
        estimate = check(str(path), gpus=8)
        (frozen,) = [term.bytes for term in estimate.terms if term.name == "frozen weights"]
        assert abs(frozen - width * 6_738_415_616 // 8) < 2**20
        assert estimate.strategy.precision.startswith("fp16" if half else "bf16")


def test_the_launcher_decides_what_runs_the_ranks() -> None:
    told = {"trl_fsdp1.yaml": "hf", "cp.yaml": "fsdp2", "multi_gpu.yaml": "ddp", "trl_zero3.yaml": "deepspeed"}
    for name, framework in told.items():
        plan = check("trainer/bnb8.json", f"accelerate/{name}", precision="bf16").strategy
        assert plan.framework == framework
    assert check("trainer/bnb8.json", "accelerate/trl_single_gpu.yaml").strategy.framework == "hf"


def test_mixed_precision_of_the_launcher_holds_where_the_trainer_says_nothing() -> None:
    """training_args.py reads ACCELERATE_MIXED_PRECISION first; TRL turns bf16 on itself."""
    plan = check("trainer/run_clm.json", "accelerate/multi_gpu.yaml").strategy
    assert (plan.precision, plan.autocast) == ("bf16", True)
    assert check("trainer/run_clm.json", gpus=2).strategy.precision == "bf16"
    sft = ("accelerate/multi_node.yaml", "trainer/sft_full.yaml")
    assert check(*sft, model="llama-2-7b").strategy.precision == "bf16-autocast"


def test_what_loads_the_weights_is_assumed_out_loud() -> None:
    job = merge(read("trainer/bnb8.json"), {**JOB, "gpus": 1})
    assert [finding.code for _, finding in job.findings] == ["MC004"]
    told = merge(read("trainer/bnb8.json"), {**JOB, "gpus": 1, "weights": "bf16"})
    assert not told.findings


def test_deepspeeds_optimizer_goes_first_and_its_values_must_match(tmp_path: Path) -> None:
    """integrations/deepspeed.py: deepspeed_optim_sched, fill_match."""
    trainer = tmp_path / "t.json"
    trainer.write_text('{"output_dir": "x", "bf16": true, "optim": "adamw_bnb_8bit", "deepspeed": "ds.json"}')
    table = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW"}}
    (tmp_path / "ds.json").write_text(json.dumps({**table, "zero_optimization": {"stage": 2}}))
    from memcalc.preflight.job import read_files

    job = merge(read_files([str(trainer)]), {**JOB, "gpus": 8})
    assert job.options["optimizer"] == "adamw"
    assert "strategy.wide_embedding_moments" not in job.settings
    (error,) = [finding for _, finding in job.findings if finding.code == "MC106"]
    assert error.field == "train_micro_batch_size_per_gpu"
    assert "per_device_train_batch_size of t.json 8, its default" in error.message


def test_auto_is_what_the_trainer_says() -> None:
    plan = check("trainer/deepspeed_inline.json", gpus=8)
    assert (plan.workload.micro_batch, plan.workload.accumulation_steps) == (4, 2)
    assert (plan.strategy.precision, plan.strategy.zero) == ("bf16-mixed", 2)
    assert plan.strategy.reduce_bucket_size == 4096 * 4096


def test_adapters_follow_the_runtime() -> None:
    """DeepSpeed casts adapters to 16 bits, FSDP and DDP leave PEFT's fp32 ones; a frozen base stays as loaded."""
    told: dict[str, Any] = {"model": "llama-2-7b"}
    for name, wanted in (
        ("multi_gpu.yaml", ("bf16", True, "fp32")),
        ("cp.yaml", ("bf16", True, "fp32")),
        ("trl_zero3.yaml", ("bf16-mixed", False, "bf16")),
    ):
        config = [read("trainer/sft_lora.yaml")[0], read(f"accelerate/{name}")[0]]
        job = merge(config, {**JOB, **told, "cp": 1, "accumulation": 1})
        plan = estimate_merged(job, ()).strategy
        assert (plan.precision, plan.autocast, plan.adapter_dtype) == wanted, name


def test_trl_makes_checkpoints_reentrant_with_adapters_under_zero_3() -> None:
    """sft_trainer.py of 1.16: "PEFT + DeepSpeed ZeRO-3 requires reentrant checkpointing"."""
    files = read("trainer/sft_lora.yaml")[0], read("accelerate/trl_zero3.yaml")[0]
    job = merge(files, {**JOB, "accumulation": 4})
    assert "strategy.checkpoint" not in job.settings  # reentrant, as memcalc's deepspeed is
    assert habits_of(job.options["framework"]).reentrant
    files = read("trainer/sft_lora.yaml")[0], read("accelerate/trl_zero2.yaml")[0]
    assert merge(files, JOB).settings["strategy.checkpoint"] == "non-reentrant"


def test_an_edit_stands_where_the_setting_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's checkpointing is in the launcher's file, and the Trainer's gets nothing that would do nothing there."""
    monkeypatch.chdir(tmp_path)
    Path("train.json").write_text(
        '{"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "bf16": true, "output_dir": "out"}'
    )
    Path("fsdp.yaml").write_text((FOLDER / "accelerate" / "fsdp_template.yaml").read_text())
    found = memcalc.check(["train.json", "fsdp.yaml"], model="llama-2-7b", gpu="h100", gpus=8, seq_len=16384)
    assert found.verdict == "does-not-fit"
    assert found.fix is not None
    added = {
        edit.path: [line for line in edit.diff.split("\n")[2:] if line.startswith("+")] for edit in found.fix.edits
    }
    assert added["fsdp.yaml"] == ["+  fsdp_activation_checkpointing: true"]
    assert all("batch_size" in line for line in added.get("train.json", []))


SHARDED = """
import os, sys, torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
mesh = distributed.init_device_mesh("cpu", (1,))
for reduced in (torch.bfloat16, torch.float32):
    model = torch.nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduced))
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 8)).sum().backward()
    (own,) = model._get_fsdp_state()._fsdp_param_group.fsdp_params
    whole = own.unsharded_accumulated_grad
    whole = own._unsharded_param.grad if whole is None else whole
    print(model.weight.grad is None, whole.dtype, *whole.shape)
sys.stdout.flush()
os._exit(0)
"""
"""In a process of its own, which ends without taking down the group's threads: that may wait for ever."""


def test_fsdp_2_keeps_whole_gradients_without_synchronisation(tmp_path: Path) -> None:
    """As Accelerate's no_sync does: set_requires_gradient_sync(False), in the dtype of the reduction."""
    pytest.importorskip("torch", reason="pip install torch")
    command = [sys.executable, "-c", SHARDED, f"{tmp_path}/store"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert printed.splitlines() == ["True torch.bfloat16 8 8", "True torch.float32 8 8"]


# ------------------------------------------------------------------------------------------------------ what is written

PLANS = st.fixed_dictionaries(
    {
        "framework": st.sampled_from(["hf", "fsdp2", "ddp", "deepspeed"]),
        "gpus": st.sampled_from([1, 8]),
        "zero": st.sampled_from([0, 2, 3]),
        "precision": st.sampled_from(["bf16-mixed", "bf16-autocast", "fp32", "bf16"]),
        "optimizer": st.sampled_from(["adamw", "adamw-8bit", "paged-adamw", "lion-8bit", "adafactor", "sgd-momentum"]),
        "micro_batch": st.sampled_from([1, 4]),
        "recompute": st.sampled_from(["none", "full", "every-2"]),
        "offload": st.sampled_from(["none", "params"]),
        "compile": st.sampled_from(["none", "model"]),
        "global_batch": st.sampled_from([32, 64]),
        "kernels": st.sampled_from(["model", "fused"]),
        "loss": st.sampled_from(["standard", "fused-linear", "fused-kernel"]),
        "whole": st.booleans(),
    }
)


def resolved(plan: dict[str, Any]) -> dict[str, Any] | None:
    """Return the words of a plan that the Trainer can run, or None."""
    sharded = plan["framework"] == "fsdp2" or (plan["framework"] == "hf" and plan["zero"] > 0)
    if plan["precision"] == "bf16-autocast" and (sharded or plan["framework"] == "deepspeed"):
        return None
    fields: dict[str, Any] = {}
    if plan["optimizer"].endswith("8bit"):
        fields["strategy.wide_embedding_moments"] = True
    if sharded:
        fields["strategy.reduce_dtype"] = "bf16" if plan["precision"] != "fp32" else "fp32"
        if plan["whole"] and plan["global_batch"] > plan["micro_batch"] * plan["gpus"]:
            fields["strategy.whole_accumulation"] = plan["framework"] != "hf"  # which has no_sync by itself
    impl = {"adamw": "fused", "adafactor": "loop", "sgd-momentum": "foreach"}.get(plan["optimizer"])
    kept = {key: value for key, value in plan.items() if key != "whole"}
    if plan["framework"] == "hf" and not sharded and plan["gpus"] > 1:
        kept["framework"] = "ddp"  # the Trainer's own arguments over several processes, and read as such
    if sharded and plan["precision"] == "bf16-mixed":
        kept["autocast"] = True
    return {**kept, "settings": fields, **({"optimizer_impl": impl} if impl else {})}


@given(plan=PLANS)
@drawn(50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_and_back(tmp_path: Path, plan: dict[str, Any]) -> None:
    words_of = resolved(plan)
    if words_of is None:
        return
    try:
        before = memcalc.estimate(**JOB, **words_of)
        render_config(get_format("trainer"), ConfigJob.of(before))
    except InputError:
        return
    beside: dict[str, Any] = {"gpus": plan["gpus"], "weights": "bf16" if plan["precision"] == "bf16" else "fp32"}
    if plan["framework"] == "deepspeed":  # a DeepSpeed config stands beside
        beside |= {key: words_of[key] for key in ("framework", "zero", "offload", "precision")}
    if plan["optimizer"] in {"adamw-8bit", "paged-adamw", "lion-8bit"}:  # bitsandbytes has one form of them
        beside["optimizer_impl"] = before.strategy.optimizer_impl
    there_and_back(tmp_path, ("trainer",), words_of, beside)


@pytest.mark.parametrize("targets", ["q,v", "attention", "all"])
def test_galore_there_and_back(tmp_path: Path, targets: str) -> None:
    fields = {"strategy.galore_rank": 64, "strategy.galore_targets": targets}
    plan = {"framework": "hf", "optimizer": "galore-adamw", "optimizer_impl": "loop", "precision": "bf16"}
    there_and_back(tmp_path, ("trainer",), {**plan, "settings": fields}, {"weights": "bf16", "gpus": 1})


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({"optim_target_modules": "all-linear"}, {"strategy.galore_targets": "all"}),
        ({"optim_target_modules": ["q_proj", "mlp"]}, {"strategy.galore_targets": "q,mlp"}),
        ({"optim_args": "rank=64, update_proj_gap=100"}, {"strategy.galore_rank": "64"}),
        ({"optim": "galore_adamw_layerwise"}, {"optimizer_in_backward": True}),
    ],
)
def test_galore_of_the_trainer(tmp_path: Path, stated: dict[str, Any], found: dict[str, Any]) -> None:
    text = json.dumps({"output_dir": "out", "optim": "galore_adamw", **stated})
    config = config_of(tmp_path / "args.json", text, "trainer")
    assert found.items() <= {said.name: said.value for said in config.settings}.items()


def script_arguments(plan: Any) -> Any:
    """Return the arguments of the script that is written beside the Trainer's."""
    names: dict[str, Any] = {"__name__": __name__}  # dataclasses look their module up
    text = script_text(ConfigJob.of(plan, load_model(plan.model.name)))
    exec(compile(text, "script", "exec"), names)  # noqa: S102
    return names["ScriptArguments"]


def test_the_trainer_takes_what_is_written(tmp_path: Path) -> None:
    kind = arguments()
    from transformers import HfArgumentParser

    for framework, zero, gpus in (("hf", 0, 1), ("hf", 3, 8), ("fsdp2", 2, 8), ("ddp", 0, 8)):
        plan = memcalc.estimate(
            **JOB, framework=framework, zero=zero, gpus=gpus, recompute="full", micro_batch=2, global_batch=64,
            optimizer="adamw", optimizer_impl="fused", precision="bf16-autocast" if not zero else "bf16-mixed",
        )  # fmt: skip
        data = json.loads(render_config(get_format("trainer"), ConfigJob.of(plan)))
        own, script = HfArgumentParser((kind, script_arguments(plan))).parse_dict(
            {**data, "output_dir": str(tmp_path), "use_cpu": True}
        )
        assert (script.model_name_or_path, script.block_size, script.dtype) == (
            "meta-llama/Llama-2-7b-hf",
            JOB["seq_len"],
            "float32",
        )
        assert (own.per_device_train_batch_size, own.gradient_accumulation_steps) == (2, 64 // 2 // gpus)
        assert own.bf16
        assert own.optim.value == "adamw_torch_fused"
        if zero:
            assert own.fsdp_plugin_args["fsdp_version"] == (2 if framework == "fsdp2" else 1)
            assert own.fsdp_plugin_args["activation_checkpointing"] is True
            synced = {"sync_each_batch": True} if framework == "fsdp2" else None  # hf is counted with no_sync
            assert own.accelerator_config.gradient_accumulation_kwargs == synced
        else:
            assert own.activation_checkpointing is True


def test_what_it_cannot_say_is_refused() -> None:
    for word, plan in (
        ("framework", {"framework": "megatron", "gpus": 8}),
        ("optimizer", {"framework": "ddp", "gpus": 2, "optimizer": "muon", "precision": "bf16"}),
        ("recompute", {"framework": "ddp", "gpus": 2, "recompute": "segments-4", "precision": "bf16"}),
        ("zero", {"framework": "hf", "gpus": 8, "zero": 2}),
    ):
        estimate = memcalc.estimate(**JOB, **plan)
        with pytest.raises(CombinationError, match=word):
            render_config(get_format("trainer"), ConfigJob.of(estimate))


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 176,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512,
    "max_position_embeddings": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
"""A model that trains in a second."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        {"recompute": "none", "precision": "bf16-autocast"},
        {"recompute": "full", "precision": "bf16-autocast"},
        {"recompute": "every-2", "precision": "bf16-autocast"},
        {"recompute": "full", "lora": "4:all-linear", "also_train": "head"},
        {"recompute": "none", "lora": "4", "autocast": True},
    ],
    ids=str,
)
def test_what_is_written_trains(strategy: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script, the arguments and the launch line as they are exported, on the CPU."""
    pytest.importorskip("transformers")
    if "lora" in strategy:
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(
        json.dumps({**TINY, "tie_word_embeddings": "lora" not in strategy}), encoding="utf-8"
    )
    plans = memcalc.plan(
        model="config.json", gpu="h100", gpus=2, framework="ddp", offload="none", seq_len=32, micro_batch=2,
        global_batch=8, top=1, **strategy, advice=False,
    )  # fmt: skip
    done = exported(saved_plan(plans))
    for path, text in done.files.items():
        path.write_text(text, encoding="utf-8")
    arguments_file = Path("training_args.json")
    arguments_file.write_text(json.dumps({**json.loads(arguments_file.read_text()), "use_cpu": True}))
    command = [sys.executable, "-m", "torch.distributed.run", *done.launch.split()[1:]]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "'train_loss'" in ran.stdout + ran.stderr


def test_an_earlier_trl_holds_the_logits_of_all_tokens() -> None:
    """TRL 1.6 and earlier, trainer/sft_config.py: nll is the default of `loss_type`; Liger replaces it by its own."""
    losses = {}
    for era in ("hf", "hf@5.12", "hf@4.57"):
        for liger in (False, True):
            told: dict[str, Any] = {"framework": era, "gpus": 1, "kernels": "fused" if liger else "model"}
            plan = check("trainer/sft_full.yaml", **told).strategy
            losses[era, liger] = plan.loss, plan.tiled_loss
    newest = [losses.pop(("hf", liger)) for liger in (False, True)]
    assert newest == [("fused-linear", True)] * 2
    assert losses == {
        (era, liger): ("fused-linear" if liger else "standard", False)
        for era in ("hf@5.12", "hf@4.57")
        for liger in (False, True)
    }
    own = check("trainer/sft_full.yaml", framework="hf@4.57", gpus=1, loss="fused-kernel")
    assert own.strategy.loss == "fused-kernel"


@pytest.mark.parametrize(
    ("dtype", "warned"), [({}, True), ({"dtype": "float32"}, True), ({"dtype": "bfloat16"}, False)]
)
def test_trls_default_dtype_under_a_quantized_base_is_fp32(tmp_path: Path, dtype: dict[str, str], warned: bool) -> None:
    """TRL 1.16 scripts/sft.py: what is not quantized is loaded in ``ModelConfig.dtype``, float32 unless it is given.

    Embedding and head of Qwen2.5-7B, 152,064 × 3,584 each, take two bytes more; what a block hands on is twice as wide.
    """
    data = dtype | {
        "model_name_or_path": "Qwen/Qwen2.5-7B", "use_peft": True, "load_in_4bit": True, "output_dir": "x",
        "per_device_train_batch_size": 1, "gradient_checkpointing": True, "max_length": 2048, "bf16": True,
    }  # fmt: skip
    path = tmp_path / "sft.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    config = config_of(path, path.read_text(), "trainer")
    said = [finding.message for finding in config.findings if finding.field == "dtype"]
    assert any("in fp32, as it is counted" in message for message in said) == warned
    wide = memcalc.check([str(path)], gpu="rtx-3090", gpus=1).estimate
    path.write_text(json.dumps(data | {"dtype": "bfloat16"}), encoding="utf-8")
    narrow = memcalc.check([str(path)], gpu="rtx-3090", gpus=1).estimate
    ends = 2 * 2 * 152_064 * 3_584
    assert wide.components.parameters - narrow.components.parameters == pytest.approx(ends * warned, rel=0.001)
    assert wide.strategy.kbit_ends == warned
