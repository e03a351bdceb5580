"""ms-swift's commands and files: what is read from configs in the shape of its examples, against 3602360a.

Expected words are derived from swift/arguments/*.py, swift/trainers/arguments.py and mixin.py, swift/config/*.json and
swift/megatron/arguments/megatron_args.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import finetuning
import pytest

import memcalc
from memcalc.convert.config import Config
from memcalc.convert.formats.base import ConfigJob, get_format
from memcalc.errors import CombinationError, InputError, MissingError, ObjectiveError
from memcalc.handoff.written import write_plan
from memcalc.preflight.job import read_files
from memcalc.preflight.merge import merge

HERE = finetuning.CONFIGS / "swift"
PLAIN = {
    "weights": "bf16", "mixed": "bf16", "micro_batch": 1, "recompute": "full", "optimizer": "adamw",
    "loss": "standard", "kernels": "model", "evaluates": False,
}  # fmt: skip
"""Where nothing else is said: autocast in bf16 over bf16 weights, each block computed again."""
ADAPTERS = {"lora": "8:all-linear", "workload.lora_dropout": 0.05}
PACKED = {"varying_lengths": False, "batch_rule": "bfd", "attention": "flash"}
EXPECTED: dict[str, dict[str, Any]] = {
    "lora.sh": {**PLAIN, **ADAPTERS, "accumulation": 16, "seq_len": 2048, "evaluates": True, "eval_micro_batch": 1},
    "full-zero3.sh": {**PLAIN, **PACKED, "lora": None, "seq_len": 8192, "loss": "fused-linear", "kernels": "fused"},
    "fsdp2.sh": {**PLAIN, **ADAPTERS, "zero": 3, "strategy.checkpoint": "non-reentrant", "accumulation": 8},
    "torchrun.sh": {**PLAIN, "lora": None, "accumulation": 4, "seq_len": 8192},  # 32 / 4 / 2
    "pretrain.sh": {**PLAIN, **PACKED, "micro_batch": 2, "seq_len": 16384, "batch_goal": 16, "accumulation": None},
    "qlora.yaml": {**PLAIN, "weights": None, "lora": "16:q,v", "quantize": "nf4-dq", "micro_batch": 4},
    "galore.yaml": {**PLAIN, "optimizer": "galore-adamw", "strategy.galore_rank": 64, "optimizer_in_backward": None},
    "images.sh": {
        **PLAIN, "vision": "trained", "workload.image_pixels": 1003520, "batch_rule": "grouped",
        "strategy.checkpoint": "reentrant",
    },
    "adalora.yaml": {**PLAIN, "lora": None},
    "fp32.yaml": {**PLAIN, "weights": "fp32", "mixed": "fp16", "recompute": "none"},
}  # fmt: skip
MEGATRON: dict[str, dict[str, Any]] = {
    "megatron-dense.sh": {
        "framework": "megatron", "precision": "bf16-mixed", "tp": 8, "sp": True, "seq_len": 8192, "micro_batch": 1,
        "global_batch": 16, "recompute": "full", "loss": "fused-kernel", "attention": "flash", "zero": 1,
        "workload.attention_mask": False, "strategy.wgrad_fusion": True, "strategy.etp": 1,
    },
    "megatron-lora.sh": {
        "lora": "8:all-linear", "strategy.lora_classes": "swift", "tp": 2, "workload.lora_dropout": 0.05,
    },
    "megatron-lora-moe.sh": {"lora": "8:all-linear", "ep": 2, "recompute": "full", "loss": "fused-kernel"},
    "megatron-lora-235b.sh": {"lora": "8:all-linear", "tp": 4, "ep": 8, "strategy.etp": 1, "sp": True},
    "megatron-moe.yaml": {
        "framework": "megatron", "tp": 2, "ep": 8, "strategy.etp": 1, "recompute": "selective-core-attn",
        "moe_dispatcher": "alltoall", "strategy.wgrad_fusion": False, "offload": ("optimizer",), "global_batch": 8,
    },
}  # fmt: skip


def _config(name: str) -> Config:
    configs = read_files([str(HERE / name)])
    return next(config for config in configs if config.format.startswith("swift"))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_examples_are_read_as_ms_swift_reads_them(name: str) -> None:
    found = finetuning.said(_config(name))
    assert {word: found.get(word) for word in EXPECTED[name]} == EXPECTED[name]
    assert not [finding for finding in _config(name).findings if finding.code == "MC001"]


@pytest.mark.parametrize("name", sorted(MEGATRON))
def test_examples_of_megatron_are_read_with_its_defaults(name: str) -> None:
    found = finetuning.said(_config(name))
    assert {word: found.get(word) for word in MEGATRON[name]} == MEGATRON[name]
    assert not [finding for finding in _config(name).findings if finding.code == "MC001"]


def test_every_example_has_its_expectation() -> None:
    declined = {"dpo.sh"}
    assert {path.name for path in HERE.iterdir()} == {*EXPECTED, *MEGATRON, *declined}


@pytest.mark.parametrize(
    ("name", "framework", "zero", "gpus", "batch"),
    [
        ("full-zero3.sh", "deepspeed", 3, 8, 16),
        ("torchrun.sh", "deepspeed", 2, 8, 32),
        ("fsdp2.sh", "fsdp2", 3, 2, 16),
        ("lora.sh", "hf", 0, 1, 16),
        # 2 a rank and 4 ranks reach 16 in two micro-batches
        ("pretrain.sh", "deepspeed", 2, 4, 16),
        ("megatron-dense.sh", "megatron", 1, 8, 16),
    ],
)
def test_who_shares_the_states_and_how_many_ranks_there_are(
    name: str, framework: str, zero: int, gpus: int, batch: int
) -> None:
    estimate = finetuning.checked([HERE / name], gpu="h100")
    assert (estimate.strategy.framework, estimate.strategy.zero) == (framework, zero)
    assert (estimate.hardware.gpus, estimate.workload.global_batch) == (gpus, batch)


@pytest.mark.parametrize(
    "before",
    [
        "env NPROC_PER_NODE=4", "docker exec -e CUDA_VISIBLE_DEVICES=4,5,6,7 -e NPROC_PER_NODE=4 box",
        "docker run --gpus=all --env=NPROC_PER_NODE=4 image", "mpirun -x NPROC_PER_NODE=4",
        "singularity exec --env A=1,NPROC_PER_NODE=4,B image.sif", "srun --export=ALL,NPROC_PER_NODE=4",
    ],
)  # fmt: skip
def test_variables_are_those_of_what_runs_the_command(tmp_path: Path, before: str) -> None:
    """One GPU counted: words before the command were passed over."""
    flags = "--model Qwen/Qwen2.5-1.5B --tuner_type lora --max_length 512 --torch_dtype bfloat16"
    (tmp_path / "run.sh").write_text(f"{before} swift sft {flags} --per_device_train_batch_size 1\n", encoding="utf-8")
    assert finetuning.checked([tmp_path / "run.sh"], gpu="h100").hardware.gpus == 4


@pytest.mark.parametrize("there", [True, False])
def test_a_config_of_fsdp_that_the_script_writes_is_read_wherever_it_lies(tmp_path: Path, there: bool) -> None:
    """Its folder is what a run alone knows, and the flag counted for nothing."""
    name = "fsdp" if there else "other"
    text = (
        f"OUT=$(date +%s)\ncat > $OUT/{name}.json <<'EOF'\n"
        '{"fsdp": "full_shard auto_wrap offload", '
        '"fsdp_config": {"fsdp_version": 2, "activation_checkpointing": true}}\n'
        "EOF\nNPROC_PER_NODE=2 swift sft --model Qwen/Qwen2.5-1.5B --tuner_type full --max_length 512 "
        "--torch_dtype bfloat16 --per_device_train_batch_size 1 --fsdp $OUT/fsdp.json\n"
    )
    (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    if there:
        plan = finetuning.checked([tmp_path / "run.sh"], gpu="h100").strategy
        assert (plan.framework, plan.zero, plan.recompute, plan.offload) == ("fsdp2", 3, "full", ("params",))
    else:
        with pytest.raises(MissingError, match="--zero"):
            finetuning.checked([tmp_path / "run.sh"], gpu="h100")


def test_checkpoints_are_reentrant_where_one_process_runs_alone() -> None:
    job = {"model": "llama-3.2-1b", "gpu": "h100", "settings": {}}
    alone, several = (merge([_config("lora.sh")], {**job, "gpus": gpus}) for gpus in (1, 4))
    assert alone.settings["strategy.checkpoint"] == "reentrant"
    assert several.settings.get("strategy.checkpoint", "non-reentrant") == "non-reentrant"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", {"lora": "8:all-linear", "weights": "bf16", "mixed": "bf16", "micro_batch": 1, "seq_len": None}),
        ("train_type: full", {"lora": None}),
        ("torch_dtype: float16", {"weights": "fp16", "mixed": "fp16"}),
        ("torch_dtype: float32\nbf16: true", {"weights": "fp32", "mixed": "bf16"}),
        ("quant_method: bnb\nquant_bits: 8", {"quantize": "int8"}),
        ("quant_method: bnb\nquant_bits: 4\nbnb_4bit_use_double_quant: false", {"quantize": "nf4"}),
        ("lora_dtype: bfloat16", {"adapter_dtype": "bf16"}),
        ("padding_free: true", {"batch_rule": "flatten", "varying_lengths": True}),
        ("use_liger_kernel: true", {"loss": "fused-linear", "kernels": "fused"}),
        # a loss of its own weighs tokens, and Liger's is not called
        ("use_liger_kernel: true\nloss_scale: react", {"loss": "standard", "kernels": "fused"}),
        (
            "tuner_type: lora\nuse_liger_kernel: true\nloss_type: cross_entropy",
            {"loss": "standard", "kernels": "fused"},
        ),
        ("use_liger_kernel: true\nlabel_smoothing_factor: 0.1", {"loss": "standard", "kernels": "fused"}),
        ("use_liger_kernel: true\nloss_scale: default+ignore_empty_think", {"loss": "fused-linear"}),
        ("gradient_checkpointing_kwargs: {use_reentrant: true}", {"strategy.checkpoint": "reentrant"}),
        ("optimizer: muon", {"optimizer": "muon"}),
        ("modules_to_save: [embed_tokens, lm_head]", {"also_train": ("embedding", "head")}),
        ("freeze_aligner: false", {"vision": "projector"}),
        ("target_modules: [q_proj, k_proj]\nlora_rank: 4", {"lora": "4:q,k"}),
        ("attn_impl: flash_attention_3", {"attention": "flash", "strategy.flash_version": 3}),
        ("deepspeed: zero1\nattn_impl: eager", {"attention": "eager", "strategy.checkpoint": "reentrant"}),
        ("val_dataset: [x]\nsave_strategy: 'no'", {"evaluates": False}),
        ("val_dataset: [x]\nper_device_eval_batch_size: 3", {"evaluates": True, "eval_micro_batch": 3}),
    ],
)
def test_settings_one_by_one(lines: str, words: dict[str, Any]) -> None:
    tuner = "" if "_type" in lines else "tuner_type: lora\n"
    found = finetuning.said(finetuning.read_text(f"model: x\n{tuner}{lines}\n"))
    assert {word: found.get(word) for word in words} == words


def test_layers_beside_all_linear_ones_are_named() -> None:
    """tuner.py, get_target_modules, adds them to what it finds; they counted for nothing, and nothing said so."""
    config = finetuning.read_text("model: x\ntuner_type: lora\ntarget_modules: [all-linear, embed_tokens, lm_head]\n")
    (finding,) = [finding for finding in config.findings if finding.field == "target_modules"]
    assert (finding.code, "adapters of embed_tokens, lm_head" in finding.message) == ("MC002", True)
    assert finetuning.said(config)["lora"] == "8:all-linear"


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("tuner_type: lorra", "lora"),
        ("tuner_type: lora\ntorch_dtype: bf15", "bfloat16"),
        ("tuner_type: lora\nmax_length: many", "max_length"),
        ("tuner_type: lora\noptim: adamw_bnb_8bits", "adamw_bnb_8bit"),
        ("tuner_type: lora\ndeepspeed: '{zero'", "zero2"),
    ],
)
def test_wrong_values_are_refused_by_name(lines: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        finetuning.read_text(f"model: x\n{lines}\n")


def test_unknown_keys_are_named_with_the_nearest() -> None:
    (finding,) = [one for one in finetuning.read_text("model: x\ntuner_type: lora\nlora_rnk: 8\n").findings
                  if one.code == "MC001"]  # fmt: skip
    assert (finding.field, finding.suggestion) == ("lora_rnk", "did you mean lora_rank?")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("swift rlhf --rlhf_type gkd --model x", "trains by GKD"),
        ("swift rlhf --rlhf_type ppo --model x", "trains by PPO"),
        ("megatron rlhf --rlhf_type kto --model x", "trains by KTO"),
        ("swift sft --model x --task_type seq_cls --num_labels 2", "a classifier in the head's place"),
        ("NPROC_PER_NODE=8 swift sft --model x --sequence_parallel_size 8", "over 8 ranks"),
        ("NPROC_PER_NODE=2 megatron sft --model x --tuner_type lora_llm", "beside a whole vision part"),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model x", "for NPROC_PER_NODE=4"),
        ("NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1,2,3 swift sft --model x", "4 GPUs to 2 processes"),
    ],
)
def test_what_there_are_no_figures_for_is_declined(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.sh").write_text(text + "\n")
    with pytest.raises(ObjectiveError, match=says):
        finetuning.checked([tmp_path / "run.sh"], model="llama-3.2-1b", gpu="h100", seq_len=1024)


def test_a_published_example_of_another_objective_has_no_verdict() -> None:
    with pytest.raises(ObjectiveError):
        finetuning.checked([HERE / "dpo.sh"], gpu="h100")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", {"lora": "8:all-linear", "strategy.lora_classes": "swift", "workload.lora_dropout": 0.05}),
        ("--target_modules linear_qkv linear_proj --lora_rank 32", {"lora": "32:qkv,o"}),
        ("--target_modules linear_fc1 linear_fc2 --lora_dropout 0", {"lora": "8:gate_up,down"}),
        ("--target_modules all-router all-linear", {"lora": "8:all-linear"}),
        ("--lora_dtype float32", {"adapter_dtype": None}),
    ],
)
def test_adapters_of_megatron_have_the_names_of_its_layers(tmp_path: Path, lines: str, words: dict[str, Any]) -> None:
    (tmp_path / "run.sh").write_text(f"megatron sft --model x --train_type lora {lines}\n")
    (config,) = (one for one in read_files([str(tmp_path / "run.sh")]) if one.format == "swift_megatron")
    found = finetuning.said(config)
    assert {word: found.get(word) for word in words} == words


def test_a_plan_with_adapters_is_written_in_the_names_of_megatron_and_read_again(tmp_path: Path) -> None:
    job = {"model": "qwen3-30b-a3b", "gpu": "h100", "gpus": 8, "framework": "megatron", "lora": "16", "ep": 8}
    plans = memcalc.plan(**job, top=1, settings={"strategy.lora_classes": "swift", "strategy.etp": 1})
    kept = memcalc.save(plans, str(tmp_path / "plan.json"), rank=1)
    (text,) = (text for name, text in memcalc.export(kept, to="swift_megatron").items() if name.endswith(".yaml"))
    assert "target_modules: [linear_qkv, linear_proj, linear_fc1, linear_fc2]" in text
    (tmp_path / "sft.yaml").write_text(text)
    again = finetuning.checked([tmp_path / "sft.yaml"], gpu="h100", gpus=8)
    assert again.peak.device == plans.plans[0].peak.device
    assert again.strategy.lora_classes == "swift"


def test_a_pattern_of_layers_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("megatron sft --model x --tuner_type lora --target_regex '.*experts.*'\n")
    with pytest.raises(MissingError, match=r"--lora .*target_regex"):
        finetuning.checked([tmp_path / "run.sh"], model="qwen2.5-7b", gpu="h100", seq_len=1024)


@pytest.mark.parametrize("name", ["megatron-lora-moe.sh", "megatron-lora-235b.sh"])
def test_published_examples_of_adapters_take_what_their_first_line_says(name: str) -> None:
    """62 GiB a GPU by the former's, of sequences up to the length that is counted; GPUs of 80 GiB by the latter's."""
    estimate = finetuning.checked([HERE / name], gpu="a100-80g")
    low, high = (55, 65) if name.endswith("moe.sh") else (62, 79)
    assert low < estimate.peak.device / 2**30 < high


def test_another_tuner_is_asked_for_with_its_reason() -> None:
    with pytest.raises(MissingError, match=r"--lora .*tuner_type is adalora, which is not modelled"):
        finetuning.checked([HERE / "adalora.yaml"], gpu="h100", gpus=1)


def test_a_command_reads_the_file_that_it_names_under_its_flags(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text((HERE / "qlora.yaml").read_text())
    (tmp_path / "run.sh").write_text("NPROC_PER_NODE=2 swift sft sft.yaml --per_device_train_batch_size 2\n")
    estimate = finetuning.checked([tmp_path / "run.sh"], gpu="h100")
    assert (estimate.strategy.micro_batch, estimate.strategy.quantize, estimate.hardware.gpus) == (2, "nf4-dq", 2)


def test_ranks_share_a_sequence_under_deepspeed(tmp_path: Path) -> None:
    """examples/train/sequence_parallel/sequence_parallel_512k.sh of ms-swift: "GPU Memory: 8 * 80GiB", which ran.

    Each of eight ranks holds 64,000 tokens: the inputs of 64 blocks alone are 39 GiB, and 312 GiB were they all on one.
    """
    words = "--model Qwen/QwQ-32B --tuner_type lora --torch_dtype bfloat16 --packing true --max_length 512000"
    more = "--use_liger_kernel true --deepspeed zero3_offload --attn_impl flash_attn --sequence_parallel_size 8"
    (tmp_path / "run.sh").write_text(f"NPROC_PER_NODE=8 swift sft {words} --gradient_accumulation_steps 2 {more}\n")
    estimate = finetuning.checked([tmp_path / "run.sh"], gpu="a100-80g")
    assert (estimate.strategy.cp, estimate.strategy.dp, estimate.workload.global_batch) == (8, 1, 2)
    inputs = 64 * 64_000 * 5120 * 2
    assert inputs < estimate.components.activations < 2 * inputs
    assert estimate.verdict == "tight"


# ------------------------------------------------------------------------------- what `megatron sft` itself refuses

SFT: dict[str, Any] = {"model": "qwen3-8b", "gpu": "h100", "gpus": 8, "framework": "megatron", "seq_len": 4096,
                       "micro_batch": 1, "global_batch": 64, "recompute": "full"}  # fmt: skip


def _written(**words: Any) -> dict[str, Any]:
    settings = words.pop("settings", {})
    form = get_format("swift_megatron")
    estimate = memcalc.estimate(**SFT | words, settings=settings)
    model = memcalc.api.load_model(estimate.model.name)
    assert form.write is not None
    return form.write(ConfigJob.of(estimate, model))


def test_muon_with_sharded_states_is_ms_swifts_dist_muon() -> None:
    """megatron_args.py, _check_muon: `muon` asserts that no reduction and no gather overlaps."""
    sharded = _written(optimizer="muon", zero=1)
    assert (sharded["optimizer"], sharded["overlap_grad_reduce"]) == ("dist_muon", True)
    assert sharded["use_distributed_optimizer"] is False
    plain = _written(optimizer="muon", zero=0, settings={"strategy.overlap_comm": False})
    assert (plain["optimizer"], plain["overlap_grad_reduce"]) == ("muon", None)


@pytest.mark.parametrize(("name", "zero"), [("muon", 0), ("dist_muon", 1)])
def test_who_shares_muons_states_is_in_its_name(tmp_path: Path, name: str, zero: int) -> None:
    """`muon` switches use_distributed_optimizer off, which is on by default; `dist_muon` shares states by layers."""
    (tmp_path / "run.sh").write_text(f"megatron sft --model x --optimizer {name} --micro_batch_size 1\n")
    (config,) = (one for one in read_files([str(tmp_path / "run.sh")]) if one.format == "swift_megatron")
    assert finetuning.said(config)["zero"] == zero


@pytest.mark.parametrize(("words", "says"), [
    ({"optimizer": "muon", "zero": 0}, "overlap_comm=false"),
    ({"attention": "eager"}, "attention"),
    ({"model": "mixtral-8x7b"}, "mcore-bridge"),
    ({"model": "mistral-7b-v0.1"}, "mcore-bridge"),
    ({"model": "deepseek-v2-lite", "ep": 4, "moe_dispatcher": "allgather"}, "alltoall"),
    ({"gpu": "b200", "precision": "fp8-mixed",
      "settings": {"strategy.float8": "mxfp8", "strategy.float8_all_gather": True}}, "float8_all_gather=false"),
], ids=str)  # fmt: skip
def test_what_megatron_sft_does_not_start_is_refused(words: dict[str, Any], says: str) -> None:
    """TransformerConfig and DistributedDataParallelConfig of core 0.20, get_model_meta and MegatronArguments."""
    with pytest.raises(CombinationError, match=says):
        _written(**words)


@pytest.mark.parametrize("form", ["megatron", "swift_megatron"])
def test_a_job_of_one_data_parallel_rank_has_nothing_to_overlap(form: str) -> None:
    estimate = memcalc.estimate(**SFT | {"tp": 8}, settings={})
    assert "overlap" not in next(iter(write_plan(estimate, form, None, ()).files.values()))
