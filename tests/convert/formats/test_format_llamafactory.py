"""LLaMA-Factory's YAML: what is read from configs in the shape of its examples, against its source at ff6d4d12e.

Expected words are derived from hparams/*.py, model/adapter.py (init_adapter), model/model_utils/checkpointing.py,
quantization.py, attention.py and liger_kernel.py, train/sft/workflow.py and data/processor/supervised.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import finetuning
import pytest

from memcalc.convert.formats.base import key_table
from memcalc.errors import IdleError, InputError, MissingError, ObjectiveError

HERE = finetuning.CONFIGS / "llamafactory"
SCHEMA = json.loads((Path(__file__).parents[2] / "schemas" / "llamafactory.json").read_text())["fields"]

LORA = {"lora": "8:all-linear", "weights": "bf16", "mixed": "bf16", "workload.lora_dropout": 0.0}
FULL = {"lora": None, "weights": "fp32", "mixed": "bf16"}  # what is trained is cast to fp32
RUN = {
    "recompute": "full", "strategy.checkpoint": "reentrant", "seq_len": 2048, "micro_batch": 1,
    "varying_lengths": True, "attention": None, "kernels": "model", "loss": "standard",
}  # fmt: skip
"""Of all examples: each block is computed again, and nothing is packed."""

EXPECTED: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "qwen3-lora": ({**LORA, "accumulation": 8, "optimizer": "adamw", "optimizer_impl": "fused"}, []),
    "qwen3-lora-ds3": ({**LORA, "accumulation": 2}, []),
    "qwen3-qlora": ({**LORA, "quantize": "nf4-dq", "strategy.prepare_kbit": None}, []),
    "qwen3-full-ds3": (FULL, []),
    "fsdp-qlora": ({**LORA, "quantize": "nf4-dq"}, []),
    "galore": (
        {
            "weights": "bf16",
            "mixed": "no",
            "accumulation": 1,
            "optimizer": "galore-adamw",
            "strategy.galore_rank": 128,
            "strategy.galore_targets": "all-linear",
            "optimizer_in_backward": True,
        },
        [],
    ),
    "oft": ({"lora": None, "weights": "bf16"}, []),
    "gptq": ({**LORA, "quantize": None}, []),
    "pretrain": ({**LORA, "varying_lengths": False}, []),  # stage pt packs
    "fp8-ds3": ({**FULL, "seq_len": 1024}, [("MC002", "fp8")]),
    "muon": ({**FULL, "optimizer": "muon"}, []),
    "ray": ({**LORA, "gpus": 4}, []),
}


REFUSED = {
    "badam": "use_badam True, with which one block",
    "llama-pro-freeze": "finetuning_type freeze, with which some",
}
"""Examples that train another part of the model than is counted."""


def test_every_example_has_its_expectation() -> None:
    assert {path.stem for path in HERE.glob("*.yaml")} == {*EXPECTED, *REFUSED}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_examples_that_train_parts_of_the_model_are_refused_by_their_key(name: str) -> None:
    with pytest.raises(ObjectiveError, match=REFUSED[name]):
        finetuning.read(HERE / f"{name}.yaml")


@pytest.mark.parametrize("key", sorted(key_table("llamafactory").tables["refused"]))
def test_what_makes_another_job_of_a_file_is_refused_where_it_is_on(key: str) -> None:
    config = f"model_name_or_path: x\ntemplate: y\ndo_train: true\n{key}: "
    with pytest.raises((ObjectiveError, MissingError), match=key):
        finetuning.read_text(f"{config}{'freeze' if key == 'finetuning_type' else 'true'}\n")
    if key not in ("finetuning_type", "use_mca"):
        assert finetuning.said(finetuning.read_text(f"{config}false\n"))["seq_len"] == 2048


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_examples_are_read_as_llamafactory_reads_them(name: str) -> None:
    words, findings = EXPECTED[name]
    config = finetuning.read(HERE / f"{name}.yaml")
    found = finetuning.said(config)
    expected = {**RUN, **words}
    assert {word: found.get(word) for word in expected} == expected
    assert finetuning.engines(config) == {"trainer"}
    assert finetuning.codes(config) == findings


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("finetuning_type: full\nbf16: true", {"weights": "fp32", "mixed": "bf16"}),
        ("finetuning_type: full\npure_bf16: true", {"weights": "bf16", "mixed": "no"}),
        ("finetuning_type: full\nfp16: true", {"weights": "fp32", "mixed": "fp16"}),
        ("finetuning_type: lora\nfp16: true", {"weights": "fp16", "mixed": "fp16"}),
        ("accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}", {"sync_each_batch": True}),
        ("quantization_bit: 8", {"quantize": "int8"}),
        ("quantization_bit: 4\nquantization_method: bitsandbytes", {"quantize": "nf4-dq"}),
        ("quantization_bit: 4\ndouble_quantization: false", {"quantize": "nf4"}),
        ("quantization_bit: 4\nupcast_layernorm: true", {"strategy.prepare_kbit": True}),
        ("flash_attn: fa2", {"attention": "flash"}),
        ("flash_attn: disabled", {"attention": "eager"}),
        ("enable_liger_kernel: true", {"kernels": "fused", "loss": "fused-linear"}),
        ("disable_gradient_checkpointing: true", {"recompute": "none", "strategy.checkpoint": None}),
        ("use_reentrant_gc: false", {"strategy.checkpoint": "non-reentrant"}),
        ("use_unsloth_gc: true", {"offload": ("activations",), "recompute": "full"}),
        # rows of 2048 + 1 tokens are padded to a multiple of 8
        ("packing: true", {"seq_len": 2056, "varying_lengths": False}),
        ("cutoff_len: 1000\nneat_packing: true", {"seq_len": 1008}),
        ("stage: pt", {"seq_len": 2048, "varying_lengths": False}),
        ("fsdp: full_shard auto_wrap", {"zero": 3, "strategy.checkpoint": "non-reentrant"}),
        ("fsdp: [shard_grad_op]\nfsdp_config: {fsdp_version: 1}", {"zero": 2, "strategy.checkpoint": "reentrant"}),
        ("additional_target: embed_tokens,lm_head", {"also_train": ("embedding", "head")}),
        ("lora_target: q_proj, v_proj\nlora_rank: 64", {"lora": "64:q,v"}),
        ("flash_attn: fa2", {"attention": "flash", "strategy.flash_version": None}),
        ("flash_attn: fa3", {"attention": "flash", "strategy.flash_version": 3}),
        ("", {"micro_batch": 8, "accumulation": 1, "lora": "8:all-linear", "mixed": "no", "weights": "bf16"}),
    ],
)
def test_settings_one_by_one(lines: str, words: dict[str, Any]) -> None:
    config = finetuning.read_text(f"model_name_or_path: x\ntemplate: llama3\ndo_train: true\n{lines}\n")
    found = finetuning.said(config)
    assert {word: found.get(word) for word in words} == words


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("finetuning_type: lora2", "lora"),
        ("quantization_bit: 3", "quantization_bit"),
        ("flash_attn: fa4", "fa3"),
        ("cutoff_len: many", "cutoff_len"),
        ("optim: adamw_bnb_8bits", "adamw_bnb_8bit"),
        ("stage: grpo", "stage"),
        ("bf16: 3", "bf16"),
    ],
)
def test_wrong_values_are_refused_by_name(lines: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        finetuning.read_text(f"model_name_or_path: x\ntemplate: llama3\n{lines}\n")


def test_unknown_keys_are_named_with_the_nearest() -> None:
    (finding,) = finetuning.read_text("model_name_or_path: x\ntemplate: y\nlora_ranks: 8\n").findings
    assert (finding.code, finding.field, finding.suggestion) == ("MC001", "lora_ranks", "did you mean lora_rank?")


@pytest.mark.parametrize(("name", "asked"), [("gptq", "--quantize"), ("oft", "--lora")])
def test_what_a_file_cannot_tell_is_asked_for(name: str, asked: str) -> None:
    with pytest.raises(MissingError, match=asked):
        finetuning.checked([HERE / f"{name}.yaml"], gpu="h100", gpus=1)


def test_deepspeed_that_it_names_decides_the_sharding() -> None:
    estimate = finetuning.checked([HERE / "qwen3-full-ds3.yaml"], gpu="h100", gpus=8)
    assert (estimate.strategy.framework, estimate.strategy.zero) == ("deepspeed", 3)
    assert estimate.strategy.precision == "bf16-mixed"
    assert estimate.workload.global_batch == 1 * 2 * 8


# ------------------------------------------------------------------------------------------------------- public runs

PLAIN = """
model_name_or_path: {model}
template: default
finetuning_type: lora
lora_rank: 16
lora_dropout: 0.1
lora_target: q_proj,k_proj,v_proj,o_proj
cutoff_len: {length}
per_device_train_batch_size: {micro}
flash_attn: fa2
optim: adamw_torch
"""


@pytest.mark.parametrize(("run_id", "more", "fields"), [
    ("fms-021", "", {}),
    ("fms-037", "bf16: true\nquantization_bit: 4\nupcast_layernorm: true\n", {"strategy.bnb": "0.43"}),
])  # fmt: skip
def test_public_runs_in_its_form(run_id: str, more: str, fields: dict[str, str], tmp_path: Path) -> None:
    """Runs of the Hugging Face Trainer, for none of LLaMA-Factory's own is published with its memory."""
    run = finetuning.runs()[run_id]
    path = tmp_path / "run.yaml"
    work = run.workload
    path.write_text(PLAIN.format(model=run.model, length=work["seq_len"], micro=work["micro_batch"]) + more)
    typed = {"strategy.peft": "0.13", **fields}
    finetuning.same_as_run(run_id, path, framework="hf@4.48", settings=typed)


# -------------------------------------------------------------------------------------------------------- its schema

OLD = {
    "warmup_ratio", "save_safetensors", "evaluation_strategy", "logging_dir", "group_by_length",
    "include_tokens_per_second", "fp16_opt_level", "half_precision_backend", "use_liger_kernel",
}  # fmt: skip
"""Arguments of Transformers before 5.0, which LLaMA-Factory takes with those releases."""


def _trainer() -> set[str]:
    from transformers import Seq2SeqTrainingArguments

    return {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}


def test_keys_are_fields_and_fields_are_keys() -> None:
    known = {key.rstrip(".") for key in key_table("llamafactory").names("of_lora", "not_modelled", "harmless")}
    fields = set(SCHEMA) | _trainer()
    assert known - fields <= OLD
    lines = "".join(f"{name}: null\n" for name in sorted(fields - {"model_name_or_path"}))
    assert not finetuning.read_text(f"model_name_or_path: x\n{lines}").findings


def test_stated_defaults_are_those_of_the_source() -> None:
    found = finetuning.said(finetuning.read_text("model_name_or_path: x\ntemplate: y\ndo_train: true\n"))
    default = {name: value for name, (_, value) in SCHEMA.items()}
    assert found["seq_len"] == default["cutoff_len"]
    assert found["lora"] == f"{default['lora_rank']}:all-linear"
    assert default["lora_target"] == "all"
    assert found["workload.lora_dropout"] == default["lora_dropout"]
    assert (default["finetuning_type"], default["stage"], default["packing"]) == ("lora", "sft", None)
    assert default["use_reentrant_gc"] is True
    assert default["disable_gradient_checkpointing"] is False
    assert default["quantization_type"] == "nf4"
    assert default["double_quantization"] is True
    assert not any(default[name] for name in ("pure_bf16", "upcast_layernorm", "enable_liger_kernel"))


def test_trainers_defaults_are_those_of_transformers() -> None:
    from transformers import Seq2SeqTrainingArguments

    theirs = {field.name: field.default for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    found = finetuning.said(finetuning.read_text("model_name_or_path: x\ntemplate: y\ndo_train: true\n"))
    assert found["micro_batch"] == theirs["per_device_train_batch_size"]
    assert found["eval_micro_batch"] == theirs["per_device_eval_batch_size"]
    assert found["accumulation"] == theirs["gradient_accumulation_steps"]
    assert theirs["optim"] == "adamw_torch_fused"
    assert found["optimizer_impl"] == "fused"


@pytest.mark.parametrize(
    "rest",
    ["", "trust_remote_code: true\n", "task: mmlu_test\nn_shot: 5\n", "do_train: true\ntokenized_path: saves/data\n"],
)
def test_files_that_evaluate_or_save_tokens_train_nothing(rest: str) -> None:
    """``llamafactory-cli eval`` (hparams/evaluation_args.py); data/loader.py ends where it has saved the tokens."""
    with pytest.raises(IdleError, match="starts no training"):
        finetuning.read_text(f"model_name_or_path: x\nfinetuning_type: lora\ntemplate: y\n{rest}")
    assert finetuning.read_text("model_name_or_path: x\ntokenized_path: z\nlearning_rate: 1e-4\ntemplate: y\n")


def test_a_file_with_keys_of_a_wrapper_is_asked_for_its_micro_batch() -> None:
    """LLaMA-Factory stops at keys that it has not (hparams/parser.py): a wrapper takes them out, and fills in."""
    text = "model_name_or_path: x\ntemplate: y\ndo_train: true\n"
    asked = [setting.reason for setting in finetuning.read_text(f"{text}global_batch_size: 16\n").settings]
    assert any("what reads the file has arguments of its own (global_batch_size)" in reason for reason in asked)
    assert finetuning.said(finetuning.read_text(text))["micro_batch"] == 8


def test_dora_is_counted_over_a_base_that_is_not_quantised() -> None:
    """model/adapter.py hands use_dora on to PEFT."""
    text = "model_name_or_path: x\ntemplate: y\nfinetuning_type: lora\nuse_dora: true\n"
    config = finetuning.read_text(text)
    assert finetuning.said(config)["strategy.lora_kernels"] == "dora"
    assert not config.findings
    quantised = finetuning.read_text(f"{text}quantization_bit: 4\n")
    assert "strategy.lora_kernels" not in finetuning.said(quantised)
    assert [finding.code for finding in quantised.findings] == ["MC002"]
