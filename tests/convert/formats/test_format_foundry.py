"""llm-foundry's YAML: what is read from configs in the shape of its own, against its source at 8c8dd48f (0.22).

Expected words are derived from command_utils/train.py, utils/config_utils.py, models/mpt/configuration_mpt.py and
Composer 64051888 (distributed/dist_strategy.py, utils/parallelism.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import finetuning
import pytest

import memcalc
from memcalc.errors import IdleError, InputError, MissingError, ObjectiveError, UnknownFormatError
from memcalc.specs.flat import from_flat
from memcalc.terms.parameters import model_count

HERE = finetuning.CONFIGS / "foundry"
FULL = {"recompute": "full", "strategy.checkpoint": "non-reentrant"}
PLAIN = {
    "sharded": 3, "mixed": "bf16", "accelerated": False, "attention": "flash", "loss": "fused-kernel",
    "optimizer": "adamw", "optimizer_impl": "loop", "strategy.reduce_dtype": "bf16", "varying_lengths": False,
    "strategy.expandable_segments": True, "evaluates": None, "strategy.state_dict": None, "precision": None,
    "lora": None, "offload": None, "dp_replicate": None, "dp_shard": None, **FULL,
}  # fmt: skip
HUB = {"accelerated": True, "loss": None}
EXPECTED: dict[str, dict[str, Any]] = {
    "mpt-1b": {"seq_len": 2048, "micro_batch": 8, "train_batch": 256, "eval_micro_batch": 8},
    # Composer's own defaults: reductions in fp32 (DEFAULT), reentrant checkpoints, whole state dicts
    "mpt-7b-default": {
        "seq_len": 4096, "strategy.reduce_dtype": "fp32", "strategy.checkpoint": "reentrant-inside",
        "strategy.state_dict": "full",
    },
    "mpt-gqa-glu": {"accelerated": True, "optimizer": "lion", "sharded": 2, "micro_batch": 1},
    "mpt-125m-torch": {
        "sharded": 0, "mixed": "no", "attention": "eager", "loss": "standard", "recompute": "none",
        "strategy.checkpoint": None, "strategy.reduce_dtype": None, "strategy.expandable_segments": None,
    },
    "mpt-30b-hybrid": {"dp_shard": 0, "offload": ("activations",), "seq_len": 8192},
    "llama-3-8b-sft": {**HUB, "model": "meta-llama/Meta-Llama-3-8B", "train_batch": 48, "eval_micro_batch": 4},
    "llama-3-8b-lora": {
        **HUB, "lora": "32:q,k,v,o", "workload.lora_dropout": 0.05, "varying_lengths": True, "micro_batch": None,
    },
    # attention is eager where nothing is said; FULL leaves the units in fp32, under autocast
    "opt-eager": {
        "attention": "eager", "loss": None, "mixed": None, "accelerated": None, "precision": "bf16-autocast",
        "strategy.reduce_dtype": "fp32",
    },
    "qwen-narrow": {
        "attention": "sdpa", "loss": None, "mixed": None, "accelerated": None, "precision": "bf16",
        "optimizer": "lion", "strategy.reduce_dtype": None,
    },
    "llama-replicas": {
        **HUB, "dp_replicate": 2, "recompute": "none", "strategy.checkpoint": None, "strategy.reduce_dtype": "fp32",
    },
}  # fmt: skip


def test_every_example_has_its_expectation() -> None:
    assert {path.stem for path in HERE.glob("*.yaml")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_examples_are_read_as_llm_foundry_reads_them(name: str) -> None:
    config = finetuning.read(HERE / f"{name}.yaml")
    found = finetuning.said(config)
    expected = {**PLAIN, **EXPECTED[name]}
    assert {word: found.get(word) for word in expected} == expected
    assert finetuning.engines(config) == {"fsdp1" if expected["sharded"] else "ddp"}
    assert not [code for code in finetuning.codes(config) if code != ("MC002", "model.loss_fn")]


def parameters(name: str) -> int:
    sizes = finetuning.said(finetuning.read(HERE / f"{name}.yaml"))["model"]
    return int(model_count(from_flat(sizes)).total)


def test_mpt_has_the_parameters_of_its_modules() -> None:
    """modeling_mpt.py, layers/blocks.py and ffn.py: Wqkv, out_proj, up and down with biases, learned positions."""
    hidden, layers, words, positions = 2048, 24, 50_368, 2048
    matrices = 4 * hidden**2 + 2 * 4 * hidden**2
    biases = (3 + 1 + 4 + 1) * hidden
    norms = 2 * 2 * hidden
    own = layers * (matrices + biases + norms) + 2 * hidden + (words + positions) * hidden
    assert parameters("mpt-1b") == own


def test_a_gated_mpt_without_biases_has_fewer_heads_and_no_positions() -> None:
    hidden, layers, words, ffn, kv = 3072, 28, 50_368, 8192, 8 * 128
    matrices = 2 * hidden**2 + 2 * hidden * kv + 3 * hidden * ffn
    assert parameters("mpt-gqa-glu") == layers * (matrices + 2 * hidden) + hidden + 2 * words * hidden


def test_alibi_in_flash_attention_takes_no_matrix() -> None:
    assert finetuning.said(finetuning.read(HERE / "mpt-7b-default.yaml"))["model"]["positions"] == "none"


def checked(name: str, **words: Any) -> memcalc.Estimate:
    return finetuning.checked([HERE / f"{name}.yaml"], gpu="h100", **words)


def test_several_gpus_shard_as_fsdp_1() -> None:
    estimate = checked("mpt-1b", gpus=8)
    plan = estimate.strategy
    assert (plan.framework, plan.zero, plan.precision, plan.autocast) == ("fsdp1", 3, "bf16-mixed", False)
    assert (plan.recompute, plan.reduce_dtype) == ("full", "bf16")
    assert estimate.workload.global_batch == 256


def test_one_gpu_trains_without_what_its_fsdp_config_says() -> None:
    """train.py: FSDP is dropped on one GPU, and with it checkpointing, which prepare_fsdp_module alone applies."""
    plan = checked("mpt-1b", gpus=1).strategy
    assert (plan.framework, plan.zero, plan.precision, plan.recompute) == ("plain", 0, "bf16-autocast", "none")


def test_without_an_fsdp_config_ranks_are_replicas() -> None:
    plan = checked("mpt-125m-torch", gpus=8).strategy
    assert (plan.framework, plan.zero, plan.precision) == ("ddp", 0, "fp32")


def test_autocast_runs_over_the_units_of_a_model_of_transformers() -> None:
    assert checked("llama-3-8b-sft", gpus=8).strategy.autocast


def test_a_micro_batch_is_no_larger_than_a_ranks_share() -> None:
    """calculate_batch_size_info: 48 sequences on 8 ranks are 6 each, whatever device_train_microbatch_size says."""
    estimate = checked("llama-3-8b-sft", gpus=8)
    assert (estimate.strategy.micro_batch, estimate.workload.global_batch) == (6, 48)
    assert checked("llama-3-8b-sft", gpus=2).strategy.micro_batch == 8


def test_replicas_divide_the_ranks() -> None:
    assert checked("llama-replicas", gpus=16).strategy.dp_replicate == 2


def test_a_micro_batch_that_the_trainer_looks_for_is_asked_for() -> None:
    with pytest.raises(MissingError, match="device_train_microbatch_size is auto"):
        checked("llama-3-8b-lora", gpus=8)


BASE = (
    "model: {name: mpt_causal_lm}\ntrain_loader: {name: text}\noptimizer: {name: decoupled_adamw}\n"
    "max_duration: 1ba\nmax_seq_len: 2048\nglobal_train_batch_size: 8\ndevice_train_microbatch_size: 1\n"
)


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("compile_config: {}", ""),
        ("compile_config: {mode: default}", "compile_config"),
        ("max_split_size_mb: 512", "max_split_size_mb"),
        ("algorithms: {alibi: {max_sequence_length: 4096}}", "algorithms.alibi"),
        ("precision: amp_fp8", "precision"),
        ("fsdp_config: {keep_low_precision_grads: true}", "fsdp_config.keep_low_precision_grads"),
    ],
)
def test_what_is_not_counted_is_named(lines: str, key: str) -> None:
    found = {field for code, field in finetuning.codes(finetuning.read_text(f"{BASE}{lines}\n")) if code == "MC002"}
    assert found - {"model.loss_fn"} == ({key} if key else set())


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        (BASE.replace("mpt_causal_lm", "finetune_embedding_model"), ObjectiveError, "finetune_embedding_model"),
        (f"{BASE}only_hf_checkpoint: true\n", IdleError, "only_hf_checkpoint"),
        (f"{BASE}fsdp_config: {{sharding_strategy: SOME_SHARD}}\n", InputError, "full_shard"),
        (BASE.replace("decoupled_adamw", "adafactor"), InputError, "decoupled_lionw"),
        (f"{BASE}precision: amp_bf12\n", InputError, "amp_bf16"),
    ],
)
def test_what_it_does_not_train_or_take_is_refused(text: str, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        finetuning.read_text(text)


def test_experts_of_megablocks_are_asked_for_as_the_model_that_they_are(tmp_path: Path) -> None:
    path = tmp_path / "moe.yaml"
    path.write_text(BASE.replace("{name: mpt_causal_lm}", "{name: mpt_causal_lm, ffn_config: {ffn_type: mb_dmoe}}"))
    with pytest.raises(MissingError, match="ffn_type is mb_dmoe"):
        finetuning.checked([path], gpu="h100", gpus=8)


def test_an_interpolation_that_only_a_run_tells_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "env.yaml"
    path.write_text(BASE.replace("max_seq_len: 2048", "max_seq_len: ${oc.env:LENGTH}"))
    with pytest.raises(MissingError, match="--seq-len"):
        finetuning.checked([path], gpu="h100", gpus=8)


def test_composers_launcher_says_ranks_and_overrides(tmp_path: Path) -> None:
    """`composer -n N train/train.py FILE key=value` (Composer 0.33, cli/launcher.py; command_utils/train.py)."""
    config = tmp_path / "mpt.yaml"
    config.write_text((HERE / "mpt-1b.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    script = tmp_path / "run.sh"
    line = "composer -n 4 train/train.py mpt.yaml max_seq_len=1024 device_train_microbatch_size=2 scheduler.t_max=5ba\n"
    script.write_text(line, encoding="utf-8")
    found = finetuning.checked([script], gpu="h100")
    assert (found.hardware.gpus, found.workload.seq_len, found.strategy.micro_batch) == (4, 1024, 2)
    script.write_text("composer train/train.py mpt.yaml\n", encoding="utf-8")
    with pytest.raises(MissingError, match="--gpus"):
        finetuning.checked([script], gpu="h100")
    script.write_text("composer install\n", encoding="utf-8")  # PHP's
    with pytest.raises(UnknownFormatError):
        finetuning.checked([script], gpu="h100")
