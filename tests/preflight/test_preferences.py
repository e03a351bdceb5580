"""Preferences, rewards and GRPO in files of axolotl, LLaMA-Factory and ms-swift, answered as ``memcalc rl`` does.

Defaults are those of axolotl 0.18, LLaMA-Factory 0.9 (hparams) and ms-swift 4.6 (rlhf_args.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import CombinationError, MissingError, ObjectiveError
from memcalc.posttraining import rl
from memcalc.preflight.job import read_files
from memcalc.preflight.merge import merge
from memcalc.preflight.roles import role_words

AXOLOTL = """\
base_model: Qwen/Qwen2.5-1.5B
datasets: [{path: pairs}]
sequence_len: 1536
micro_batch_size: 2
gradient_checkpointing: true
attn_implementation: flash_attention_2
"""
GRPO = (
    AXOLOTL
    + """\
rl: grpo
gradient_accumulation_steps: 4
trl: {use_vllm: true, vllm_mode: colocate, num_generations: 4, max_completion_length: 768, beta: 0.01, top_p: 0.9}
vllm: {gpu_memory_utilization: 0.35, tensor_parallel_size: 2}
"""
)
FACTORY = """\
model_name_or_path: Qwen/Qwen2.5-1.5B
template: qwen
do_train: true
cutoff_len: 1001
per_device_train_batch_size: 3
bf16: true
"""
SWIFT = "NPROC_PER_NODE=4 swift rlhf --model Qwen/Qwen2.5-1.5B --dataset x --max_length 1200 --torch_dtype bfloat16 "
LORA = "adapter: lora\nlora_r: 8\nlora_target_linear: true\n"
ONLINE = "--rlhf_type grpo --use_vllm true --vllm_mode colocate --max_completion_length 400 "


def words(folder: Path, name: str, text: str, **given: Any) -> dict[str, Any]:
    (folder / name).write_text(text, encoding="utf-8")
    return role_words(merge(read_files([str(folder / name)]), {"gpu": "h100", **given}), ())


def findings(folder: Path, name: str, text: str) -> set[str]:
    (folder / name).write_text(text, encoding="utf-8")
    return {f.field for config in read_files([str(folder / name)]) for f in config.findings if f.code != "MC004"}


# ---------------------------------------------------------------------------------------------------------- axolotl


@pytest.mark.parametrize(
    ("says", "algorithm"),
    [
        ("rl: dpo", "dpo"), ("rl: ipo", "dpo"), ("rl: kto", "kto"), ("rl: orpo", "orpo"), ("rl: simpo", "simpo"),
        ("reward_model: true", "reward"),
    ],
)  # fmt: skip
def test_axolotl(tmp_path: Path, says: str, algorithm: str) -> None:
    found = words(tmp_path, "a.yaml", f"{AXOLOTL}{says}\n", gpus=2)
    assert (found["algorithm"], found["framework"], found["logits"]) == (algorithm, "trl", "plain")
    assert (found["prompt"] + found["response"], found["micro_batch"], found["gpus"]) == (1536, 2, 2)
    assert findings(tmp_path, "a.yaml", f"{AXOLOTL}{says}\n") == set()


def test_what_dpo_of_axolotl_says_of_reference_and_logits(tmp_path: Path) -> None:
    """Liger's kernels of blocks do not fuse the loss of pairs; dpo_use_liger_kernel does."""
    liger = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_rms_norm: true\nliger_rope: true\n"
    assert words(tmp_path, "a.yaml", f"{AXOLOTL}rl: dpo\n{liger}", gpus=1)["logits"] == "plain"
    assert words(tmp_path, "a.yaml", f"{AXOLOTL}rl: dpo\ndpo_use_liger_kernel: true\n", gpus=1)["logits"] == "fused"
    assert "reference" not in words(tmp_path, "a.yaml", f"{AXOLOTL}rl: dpo\n", gpus=1)
    found = words(tmp_path, "a.yaml", f"{AXOLOTL}rl: dpo\nprecompute_ref_log_probs: true\n", gpus=1)
    assert found["reference"] is False


def test_grpo_of_axolotl(tmp_path: Path) -> None:
    """4 ranks of 2 samples and 4 micro-batches are 8 prompts of 4; an engine of 2 ranks gets 16 sequences."""
    found = words(tmp_path, "a.yaml", GRPO, gpus=4, settings={"rl.prompt": 512})
    assert (found["samples"], found["response"], found["reference"], found["prompts"]) == (4, 768, True, 8)
    assert (found["utilization"], found["engine_tp"], found["sleep"], found["max_seqs"]) == (0.35, 2, "0", 16)
    server = GRPO.replace("vllm_mode: colocate", "vllm_mode: server")
    found = words(tmp_path, "a.yaml", server, gpus=4, settings={"rl.prompt": 512, "rl.engine_gpus": 2})
    assert (found["gpus"], found["engine_gpus"], "utilization" in found) == (6, 2, False)
    assert findings(tmp_path, "a.yaml", GRPO.replace("top_p: 0.9", "async_prefetch: true, tempperature: 1")) == {
        "trl.async_prefetch", "trl.tempperature",
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- LLaMA-Factory


@pytest.mark.parametrize(
    ("says", "algorithm"),
    [
        ("stage: dpo", "dpo"), ("stage: dpo\npref_loss: hinge", "dpo"), ("stage: dpo\npref_loss: orpo", "orpo"),
        ("stage: dpo\npref_loss: simpo", "simpo"), ("stage: kto", "kto"), ("stage: rm", "reward"),
    ],
)  # fmt: skip
def test_llamafactory(tmp_path: Path, says: str, algorithm: str) -> None:
    """Pairs are padded to a multiple of 8; blocks are checkpointed unless told otherwise; adapters by default."""
    text = f"{FACTORY}{says}\n"
    found = words(tmp_path, "f.yaml", text, gpus=1)
    assert (found["algorithm"], found["framework"], found["recompute"]) == (algorithm, "llamafactory", "full")
    assert (found["prompt"] + found["response"], found["micro_batch"], found["lora"]) == (1008, 3, "8:all-linear")
    assert findings(tmp_path, "f.yaml", text) == set()


def test_logits_of_llamafactory() -> None:
    """A value head's model makes logits of all tokens and their fp32 copy; KTO reads pairs beside its first logits."""
    job: dict[str, Any] = {
        "model": "qwen2.5-1.5b", "gpu": "h100", "gpus": 1, "prompt": 512, "response": 512, "micro_batch": 2,
        "lora": "8", "advice": False,
    }  # fmt: skip

    def update(framework: str, algorithm: str) -> int:
        return max(phase.roles.get("logits", 0) for phase in rl(framework=framework, algorithm=algorithm, **job).phases)

    logits = 2 * 1024 * 151936
    assert update("llamafactory", "reward") == 6 * 2 * logits
    assert update("trl", "reward") == 0
    assert update("llamafactory", "kto") == 20 * logits
    with pytest.raises(CombinationError, match="is not counted"):
        rl(framework="llamafactory", algorithm="grpo", **job)


# --------------------------------------------------------------------------------------------------------- ms-swift


@pytest.mark.parametrize(
    ("says", "algorithm"),
    [
        ("", "dpo"), ("--rlhf_type kto", "kto"), ("--rlhf_type orpo", "orpo"), ("--rlhf_type simpo", "simpo"),
        ("--rlhf_type cpo", "simpo"), ("--rlhf_type rm", "reward"),
    ],
)  # fmt: skip
def test_swift(tmp_path: Path, says: str, algorithm: str) -> None:
    found = words(tmp_path, "s.sh", SWIFT + says)
    assert (found["algorithm"], found["gpus"], found["micro_batch"]) == (algorithm, 4, 1)
    assert (found["prompt"] + found["response"], found["lora"]) == (1200, "8:all-linear")
    assert findings(tmp_path, "s.sh", SWIFT + says) == set()


def test_grpo_of_swift(tmp_path: Path) -> None:
    """A KL term of 0.04, 8 samples, and an engine that may take 0.9 and never sleeps, by default."""
    found = words(tmp_path, "s.sh", SWIFT + ONLINE)
    assert (found["algorithm"], found["prompt"], found["response"], found["samples"]) == ("grpo", 1200, 400, 8)
    assert (found["reference"], found["utilization"], found["sleep"], found["park"]) == (True, 0.9, "0", "none")
    more = (
        "--beta 0 --sleep_level 1 --offload_optimizer true --offload_model true --vllm_max_model_len 1000 "
        "--vllm_gpu_memory_utilization 0.4 --log_entropy true --advantage_estimator rloo --vllm_max_num_seqs 32"
    )
    found = words(tmp_path, "s.sh", f"{SWIFT}{ONLINE}{more}")
    assert (found["algorithm"], found["prompt"], found["reference"], found["park"]) == (
        "rloo", 600, False, "optimizer,params",
    )  # fmt: skip
    assert (found["sleep"], found["utilization"], found["entropy"], found["max_seqs"]) == ("1", 0.4, True, 32)


def test_a_yaml_of_swift(tmp_path: Path) -> None:
    text = (
        "model: Qwen/Qwen2.5-1.5B\nrlhf_type: dpo\ntuner_type: full\nmax_length: 600\nprecompute_ref_log_probs: true\n"
    )
    found = words(tmp_path, "s.yaml", text, gpus=1)
    assert (found["algorithm"], found["reference"], "lora" in found) == ("dpo", False, False)


# ------------------------------------------------------------------------------------------- what has no verdict


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", f"{AXOLOTL}rl: dpo\n{LORA}rl_adapter_ref_model: true\n",
         "a reference model of its own (rl_adapter_ref_model"),
        ("f.yaml", f"{FACTORY}stage: dpo\nref_model: other\n", "a reference model of its own (ref_model other)"),
        ("f.yaml", f"{FACTORY}stage: dpo\nfinetuning_type: full\nref_model: other\n", "the policy's first weights"),
        ("f.yaml", f"{FACTORY}stage: ppo\nreward_model: x\n", "whose answers Transformers generates"),
        ("a.yaml", f"{AXOLOTL}model_type: AutoModelForSequenceClassification\n", "a classifier in the head's place"),
        ("s.sh", f"{SWIFT}--tuner_type full --ref_model other", "a reference model of its own"),
        ("s.sh", f"{SWIFT}{ONLINE}--reward_model one two", "has 2 reward models"),
        ("s.sh", f"{SWIFT}--rlhf_type gkd", "trains by GKD"),
    ],
)  # fmt: skip
def test_what_is_not_counted_has_no_verdict(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ObjectiveError) as raised:
        words(tmp_path, name, text, gpus=2)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", GRPO, "--set rl.prompt=… (the longest prompt"),
        ("a.yaml", GRPO.replace("use_vllm: true, vllm_mode: colocate, ", ""), "--set rl.engine=… (use_vllm is off"),
        ("s.sh", f"{SWIFT}{ONLINE.replace('colocate', 'server')}", "--set rl.engine_gpus=…"),
    ],
)
def test_what_no_file_says_is_asked_for(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(MissingError) as raised:
        words(tmp_path, name, text, gpus=2)
    assert says in str(raised.value)


def test_a_pack_of_swift_holds_both_answers_of_a_pair(tmp_path: Path) -> None:
    """ms-swift 3602360a, swift/dataset/packing.py, create_packed_idx: the lengths of both are added up."""
    text = f"{SWIFT} --rlhf_type dpo "
    whole, packed = (words(tmp_path, "dpo.sh", text + more) for more in ("", "--packing true --attn_impl flash_attn"))
    assert whole["prompt"] + whole["response"] == 2 * (packed["prompt"] + packed["response"]) == 1200
    alone = words(tmp_path, "kto.sh", f"{SWIFT} --rlhf_type kto --packing true --attn_impl flash_attn")
    assert alone["prompt"] + alone["response"] == 1200


# ------------------------------------------------------------------------------------------- what a config is called


@pytest.mark.parametrize("name", ["dpo/default.yaml", "tulu_dpo.yaml"])
def test_a_config_that_is_called_after_a_method_is_no_fine_tuning(tmp_path: Path, name: str) -> None:
    """open-instruct's configs/train_configs/dpo/default.yaml has no key of DPO: it was estimated as fine-tuning."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    text = "model_name_or_path: Qwen/Qwen2.5-1.5B\nmax_seq_length: 512\noutput_dir: o\nnum_train_epochs: 1\n"
    text += "per_device_train_batch_size: 1\nbf16: true\n"
    assert words(tmp_path, name, text, gpus=1)["algorithm"] == "dpo"
    said = [finding.message for config in read_files([str(tmp_path / name)]) for finding in config.findings]
    assert any(f"{name} is called after DPO" in message for message in said)
    given = {"settings": {"rl.algorithm": "sft"}}
    assert words(tmp_path, name, text, gpus=1, **given)["algorithm"] == "sft"
    plain = merge(read_files([_written(tmp_path / "sft_after_dpo.yaml", text)]), {"gpu": "h100", "gpus": 1})
    assert not plain.algorithm


def _written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)
