"""What files say of loading, resuming, evaluation and saving becomes the job's, or is said not to be counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import codes, config_of, defaults, words
from transformers import TrainingArguments

from memcalc.convert.config import Config
from memcalc.convert.document import Document
from memcalc.convert.formats import get_format
from memcalc.preflight.job import estimate_merged
from memcalc.preflight.merge import merge
from memcalc.results.estimates import Estimate

HEADS = {
    "trainer": "output_dir: out\nlearning_rate: 1e-5\nper_device_train_batch_size: 1\nbf16: true\n",
    "llamafactory": "model_name_or_path: llama-2-7b\nfinetuning_type: full\ncutoff_len: 2048\n",
    "axolotl": "base_model: llama-2-7b\nsequence_len: 2048\nmicro_batch_size: 1\nadapter: null\nbf16: true\n",
    "accelerate": "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\n",
    "torchtune": "model: {_component_: torchtune.models.llama2.llama2_7b}\nbatch_size: 1\ndtype: bf16\n",
}
JOB = {"model": "llama-2-7b", "gpu": "h100", "gpus": 8, "seq_len": 2048}


def said(name: str, text: str) -> Config:
    """The config of a format's first lines with some more."""
    return config_of(Path(f"{name}.yaml"), HEADS[name] + text, name, "yaml")


def estimated(*configs: Config, **given: Any) -> Estimate:
    """The estimate of some configs."""
    return estimate_merged(merge(configs, {**JOB, **given}), ())


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("stated", "form"),
    [("FULL_STATE_DICT", "full"), ("SHARDED_STATE_DICT", "sharded"), ("1", "full"), ("3", "sharded")],
)
def test_a_state_dict_of_fsdp_has_its_type(version: int, stated: str, form: str) -> None:
    text = f"fsdp_config:\n  fsdp_version: {version}\n  fsdp_state_dict_type: {stated}\n"
    assert words(said("accelerate", text))["strategy.state_dict"] == form
    nested = f"fsdp: [full_shard]\nfsdp_config:\n  version: {version}\n  state_dict_type: {stated}\n"
    assert words(said("trainer", nested))["strategy.state_dict"] == form


def test_what_nothing_is_said_of_is_what_the_framework_writes() -> None:
    """Transformers 5.23 training_args.py: FULL_STATE_DICT; Accelerate 1.15 dataclasses.py: by FSDP's version."""
    launched = [said("accelerate", f"fsdp_config:\n  fsdp_version: {version}\n") for version in (1, 2)]
    assert [defaults(config).get("strategy.state_dict") for config in launched] == ["full", None]
    assert all(defaults(config)["strategy.loading"] == "rank-0" for config in launched)  # commands/launch.py
    own = defaults(said("trainer", "fsdp: [full_shard]\nfsdp_config: {version: 2}\n"))
    assert own["strategy.state_dict"] == "full"
    assert "strategy.loading" not in own


def test_the_trainer_agrees_on_what_its_files_leave_out() -> None:
    arguments = {each.name: each.default for each in TrainingArguments.__dataclass_fields__.values()}
    assert arguments["per_device_eval_batch_size"] == defaults(said("trainer", ""))["eval_micro_batch"]
    assert arguments["eval_strategy"] == "no"
    assert not any(arguments[key] for key in ("do_eval", "do_predict", "eval_on_start", "prediction_loss_only"))


@pytest.mark.parametrize("name", ["trainer", "llamafactory"])
@pytest.mark.parametrize("line", ["eval_strategy: steps", "do_eval: true", "do_predict: true", "eval_on_start: true"])
def test_each_way_to_ask_for_an_evaluation_counts(name: str, line: str) -> None:
    assert defaults(said(name, ""))["evaluates"] is False
    trains = "do_train: true\n" if name == "llamafactory" else ""
    assert words(said(name, f"{trains}{line}\n"))["evaluates"] is True


@pytest.mark.parametrize(
    ("lines", "evaluates"), [("", False), ("val_set_size: 0.1", True), ("val_set_size: 0.1\neval_strategy: no", False)]
)
def test_axolotl_evaluates_where_it_has_samples_and_is_not_told_not_to(lines: str, evaluates: bool) -> None:
    config = said("axolotl", f"{lines}\n")
    assert {**defaults(config), **words(config)}["evaluates"] is evaluates


def test_the_last_checkpoint_of_axolotl_counts_where_it_is_the_larger_one() -> None:
    lines = "fsdp_version: 2\nfsdp_config:\n  state_dict_type: SHARDED_STATE_DICT\n"
    assert words(said("axolotl", lines))["strategy.state_dict"] == "sharded"
    last = f"{lines}  final_state_dict_type: FULL_STATE_DICT\n"
    assert words(said("axolotl", last))["strategy.state_dict"] == "full"


@pytest.mark.parametrize("key", ["prediction_loss_only", "batch_eval_metrics"])
def test_an_evaluation_that_keeps_its_loss_alone_is_told_nothing_of_logits(key: str) -> None:
    from memcalc.preflight.lints import LintContext, evaluation_keeps_logits

    for line, found in ((f"{key}: true", 0), (f"{key}: false", 1)):
        configs = [said("trainer", f"eval_strategy: steps\n{line}\n")]
        job = merge(configs, {**JOB, "framework": "hf", "zero": 3})
        assert len(list(evaluation_keeps_logits(LintContext(job, tuple(configs), estimate_merged(job, ()))))) == found


def test_generation_has_the_tokens_that_files_allow() -> None:
    """``generation_max_length`` has the prompt in it; LLaMA-Factory's ``max_new_tokens`` has not, and is 1024."""
    lines = "predict_with_generate: true\nmax_seq_length: 512\neval_strategy: epoch\n"
    told = said("trainer", f"{lines}generation_max_length: 640\n")
    assert words(told)["workload.eval_new_tokens"] == 128
    assert ("MC002", "predict_with_generate") in codes(said("trainer", lines))
    result = estimated(told, framework="hf", zero=3)
    assert [each.certain for each in result.occasions if each.name == "generation"] == [True]
    factory = said("llamafactory", "predict_with_generate: true\n")
    assert defaults(factory)["workload.eval_new_tokens"] == 1024
    longer = said("llamafactory", "predict_with_generate: true\ngeneration_max_length: 6144\n")
    assert words(longer)["workload.eval_new_tokens"] == 4096


@pytest.mark.parametrize("name", ["trainer", "llamafactory", "axolotl", "torchtune"])
def test_a_job_that_resumes_says_so(name: str) -> None:
    for value, resumes in (("out/checkpoint-500", True), ("true", True), ("false", False), ("null", False)):
        config = said(name, f"resume_from_checkpoint: {value}\n")
        assert words(config).get("workload.resumes", False) is resumes, (name, value)


def test_resuming_counts_where_it_is_known_and_else_is_said_not_to() -> None:
    config = said("trainer", "resume_from_checkpoint: out/last\n")
    known = estimated(config, framework="deepspeed", zero=3, precision="bf16-mixed")
    assert [each.certain for each in known.occasions if each.name == "resuming"] == [True]
    unknown = estimated(config, framework="megatron", precision="bf16-mixed")
    said_so = [warning for warning in unknown.warnings if warning.startswith("resuming is not counted")]
    assert len(said_so) == 1
    assert "workload.resumes" in said_so[0]


def test_one_rank_that_reads_is_one_copy_on_the_host() -> None:
    sizes = {}
    for flag in ("true", "false"):
        lines = f"fsdp_config:\n  fsdp_version: 2\n  fsdp_cpu_ram_efficient_loading: {flag}\n"
        result = estimated(said("accelerate", lines), micro_batch=1)
        sizes[flag] = next(each.host for each in result.occasions if each.name == "loading")
    assert sizes["false"] == 8 * sizes["true"]
    assert sizes["true"] == pytest.approx(4 * 6_738_415_616, rel=1e-4)


@pytest.mark.parametrize("key", ["stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"])
@pytest.mark.parametrize(("value", "form"), [("true", "full"), ("false", "sharded")])
def test_deepspeed_gathers_at_stage_3_alone(key: str, value: str, form: str) -> None:
    for stage, found in ((3, form), (2, None)):
        text = f'{{"zero_optimization": {{"stage": {stage}, "{key}": {value}}}}}'
        assert words(config_of(Path("ds.json"), text, "deepspeed")).get("strategy.state_dict") == found
    lines = f"deepspeed_config: {{zero_stage: 3, zero3_save_16bit_model: {value}, zero3_init_flag: false}}\n"
    head = HEADS["accelerate"].replace("FSDP", "DEEPSPEED")
    launched = config_of(Path("a.yaml"), head + lines, "accelerate", "yaml")
    assert words(launched)["strategy.state_dict"] == form
    assert ("MC002", "deepspeed_config.zero3_init_flag") in codes(launched)


def test_torchtitan_validates_at_a_length_of_its_own_and_writes_shards() -> None:
    text = "[training]\nseq_len = 8192\n[validation]\nenable = true\n[checkpoint]\nenable = true\n"
    text += "async_mode = 'async'\n"
    config = config_of(Path("t.toml"), text, "torchtitan")
    assert words(config)["strategy.state_dict"] == "sharded"
    assert {("MC002", "validation.seq_len"), ("MC002", "checkpoint.async_mode")} <= codes(config)
    same = config_of(Path("t.toml"), text.replace("[checkpoint]", "seq_len = 8192\n[checkpoint]"), "torchtitan")
    assert ("MC002", "validation.seq_len") not in codes(same)


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        ("", "sharded"),
        ("--ckpt-format torch_dist --use-dist-ckpt", "sharded"),
        ("--ckpt-format torch", "full"),
        ("--dist-ckpt-optim-fully-reshardable", "full-on-gpu"),
        ("--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient", "full"),
        ("--dist-ckpt-optim-fully-reshardable --overlap-grad-reduce", None),
        ("--ckpt-format fsdp_dtensor", None),
    ],
)
def test_megatron_says_how_its_distributed_optimizer_is_written(flags: str, form: str | None) -> None:
    stated: dict[str, Any] = dict.fromkeys(("bf16", "async_save", "save", "load"), True)
    parts = flags.removeprefix("--").split(" --") if flags else []
    for part in parts:
        name, _, value = part.partition(" ")
        stated[name.replace("-", "_")] = value or True
    shared = megatron({**stated, "use_distributed_optimizer": True})
    assert words(shared).get("strategy.state_dict") == form
    warned = {field for code, field in codes(shared) if code == "MC002"}
    assert bool(warned) is (form is None)
    assert {("MC004", "async_save"), ("MC004", "load")} <= codes(shared)
    alone = megatron({**stated, "finetune": True})
    assert "strategy.state_dict" not in words(alone)
    assert ("MC004", "load") not in codes(alone)


def megatron(stated: dict[str, Any]) -> Config:
    """The config of some flags of Megatron-LM."""
    return get_format("megatron").read(Document(Path("m.sh"), "flags", "", {**stated, "num_layers": 2}))
