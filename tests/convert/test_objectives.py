"""Files and commands that train something else than the next token, or nothing: refused by name, without a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memcalc.convert.objectives import METHODS, method_of_keys, method_of_script
from memcalc.convert.shell_words import folder_of
from memcalc.errors import InputError, MemcalcError, MissingError
from memcalc.preflight import check

SIZES = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --micro-batch-size 8 --global-batch-size 64 "
    "--seq-length 2048 --max-position-embeddings 2048 --vocab-size 50257 --fp16"
)
MEGATRON = "torchrun --nproc_per_node 8 {script} " + SIZES
TRL = "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 2\noutput_dir: out\nmax_length: 1024\n"
LLAMAFACTORY = "model_name_or_path: meta-llama/Llama-3.1-8B\ntemplate: llama3\nfinetuning_type: full\n"
AXOLOTL = "base_model: meta-llama/Llama-3.1-8B\nsequence_len: 2048\nmicro_batch_size: 1\ndatasets: []\n"
TORCHTUNE = "model: {_component_: torchtune.models.llama3.llama3_8b}\ncheckpointer: {_component_: x}\n"
OTHERS = [
    ("run.sh", MEGATRON.format(script="pretrain_t5.py"), "pretrain_t5.py, which trains an encoder and a decoder"),
    ("run.sh", MEGATRON.format(script="/opt/megatron/pretrain_bert.py"), "pretrain_bert.py"),
    ("run.sh", MEGATRON.format(script="pretrain_mamba.py"), "state-space blocks"),
    ("run.sh", MEGATRON.format(script="train_rl.py"), "train_rl.py"),
    ("run.sh", MEGATRON.format(script="pretrain_gpt.py") + " --spec megatron.mamba mamba_stack_spec", "state-space"),
    ("gkd.yaml", TRL + "teacher_model_name_or_path: meta-llama/Llama-3.1-70B\n", "trains by GKD"),
    (
        "run.sh",
        "accelerate launch examples/scripts/gkd.py --config gkd.yaml",
        "trains by GKD (examples/scripts/gkd.py)",
    ),
    ("lf.yaml", LLAMAFACTORY + "do_train: true\nstage: ppo\nreward_model: x\n", "trains by stage: ppo"),
    ("lf.yaml", LLAMAFACTORY + "do_train: true\nuse_mca: true\n", "LLaMA-Factory's Megatron"),
    ("v1.yaml", "model: Qwen/Qwen3-4B\nmodel_class: llm\npeft_config: {name: lora, r: 16}\n", "LLaMA-Factory v1"),
    ("ax.yaml", AXOLOTL + "rl: ebft\n", "trains by EBFT (rl: ebft)"),
    ("ax.yaml", AXOLOTL + "process_reward_model: true\n", "trains by PRM"),
    ("tt.yaml", "policy_model: {_component_: x}\nreward_and_value_model: {_component_: y}\n", "trains by PPO"),
    ("tt.yaml", TORCHTUNE + "loss: {_component_: torchtune.rlhf.loss.DPOLoss}\n", "trains by DPO"),
    ("tt.yaml", TORCHTUNE + "grpo_samples: 16\nref_checkpointer: {_component_: x}\n", "trains by GRPO"),
    ("run.sh", "tune run --nproc_per_node 8 knowledge_distillation_distributed --config kd.yaml", "DISTILLATION"),
    ("run.sh", "deepspeed --module openrlhf.cli.train_kd --model.beta 1", "starts OpenRLHF's train_kd"),
    ("run.sh", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_batch_size=1024", "starts verl"),
    ("run.sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=veomni", "trains by verl's veomni"),
    (
        "run.sh",
        "python3 -m verl.trainer.main_ppo actor@actor_rollout_ref.actor=mlite_actor actor_rollout_ref.rollout.n=4",
        "trains by verl's mlite",
    ),
    (
        "run.sh",
        "python3 -m verl.trainer.main_ppo --config-name=ppo_torchtitan_trainer actor_rollout_ref.rollout.n=4",
        "trains by verl's ppo_torchtitan_trainer",
    ),
    (
        "run.sh",
        "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer actor_rollout_ref.rollout.n=4",
        "no figures for a critic by verl's Megatron workers",
    ),
    ("run.sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=trtllm", "generates by trtllm"),
]
IDLE = [
    ("run.sh", "tune run generate --config generation.yaml", "generate"),
    ("run.sh", "python tools/preprocess_data.py --input x --num-layers 24", "tools/preprocess_data.py"),
    ("run.sh", "#SBATCH --nodes=1\npython tools/convert_checkpoint.py --hidden-size 8\n", "convert_checkpoint.py"),
    ("lf.yaml", LLAMAFACTORY + "export_dir: merged\n", "export_dir"),
    ("lf.yaml", LLAMAFACTORY + "infer_backend: vllm\n", "infer_backend"),
    ("lf.yaml", LLAMAFACTORY + "do_predict: true\n", "do_predict"),
    ("tt.yaml", TORCHTUNE + "prompt: hello\nmax_new_tokens: 300\n", "prompt"),
]
CONFIGS = Path(__file__).parents[1] / "configs" / "objectives"
GIVEN: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "seq_len": 1024, "micro_batch": 1}


def refused(folder: Path, name: str, text: str) -> MemcalcError:
    """Return what check says of a file, whatever is given beside it."""
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(MemcalcError) as error:
        check([str(folder / name)], **GIVEN)
    return error.value


@pytest.mark.parametrize(("name", "text", "words"), OTHERS)
def test_what_trains_otherwise_has_no_verdict(tmp_path: Path, name: str, text: str, words: str) -> None:
    error = refused(tmp_path, name, text)
    assert isinstance(error, MissingError)
    assert error.exit_code == 3
    assert words in str(error)
    assert str(error).startswith(name)


@pytest.mark.parametrize(("name", "text", "words"), IDLE)
def test_what_trains_nothing_says_so(tmp_path: Path, name: str, text: str, words: str) -> None:
    error = refused(tmp_path, name, text)
    assert isinstance(error, InputError)
    assert "starts no training" in str(error)
    assert words in str(error)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("torchtune-dpo.yaml", "trains by DPO"),
        ("torchtune-kd.yaml", "DISTILLATION"),
        ("megatron-mamba.sh", "state-space blocks"),
    ],
)
def test_published_files_of_other_objectives_have_no_verdict(config: str, words: str) -> None:
    with pytest.raises(MissingError) as error:
        check([str(CONFIGS / config)], **GIVEN)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        TRL,
        LLAMAFACTORY + "do_predict: false\nper_device_train_batch_size: 1\ncutoff_len: 512\n",
        TRL + "loss_type: nll\n",
        TRL + "optim_args: beta=0.1\n",
        TRL + "adam_beta1: 0.9\n",
    ],
)
def test_supervised_training_is_no_other(tmp_path: Path, text: str) -> None:
    (tmp_path / "sft.yaml").write_text(text, encoding="utf-8")
    assert check([str(tmp_path / "sft.yaml")], gpu="h100", gpus=8).verdict


def test_each_method_has_its_sentence_and_its_script() -> None:
    for method in METHODS:
        assert method_of_script(f"examples/{method.replace('-', '_')}.py") == method
    for script in ("train.py", "sft.py", "run_clm.py", "grpc_server.py", "pretrain_gpt.py", "finetune_lora"):
        assert method_of_script(script) == ""
    assert method_of_keys({"learning_rate": 1e-5, "loss_type": "nll"}) == ("", "")


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        (
            "--checkpoint-activations",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers 2",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
        ),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 12",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 12",
        ),
        ("--model-parallel-size 2", "--tensor-model-parallel-size 2"),
    ],
)
def test_flags_of_earlier_megatron_count_as_they_did(tmp_path: Path, older: str, newer: str) -> None:
    answers = []
    for name, flags in (("old.sh", older), ("new.sh", f"{newer} --transformer-impl local")):
        (tmp_path / name).write_text(f"{MEGATRON.format(script='pretrain_gpt.py')} {flags}", encoding="utf-8")
        answers.append(check([str(tmp_path / name)], gpu="h100"))
    old, new = answers
    assert old.estimate.peak == new.estimate.peak
    assert old.estimate.strategy == new.estimate.strategy
    assert any("before 2023" in finding.message for file in old.files for finding in file.findings)
    assert not any("before 2023" in finding.message for file in new.files for finding in file.findings)


HERE = [
    "$(pwd)", "`pwd`", "$PWD", "${PWD}", '$(dirname "$0")', '"$(dirname "${BASH_SOURCE[0]}")"', "$(dirname $0)",
    '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
    '$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )',
    '$(dirname "$(readlink -f "$0")")',
]  # fmt: skip
CONFIG = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'


@pytest.mark.parametrize("folder", HERE)
@pytest.mark.parametrize("flag", ["--deepspeed {}/ds.json", "--deepspeed={}/ds.json"])
def test_a_path_from_the_scripts_own_folder_is_found(tmp_path: Path, folder: str, flag: str) -> None:
    (tmp_path / "ds.json").write_text(CONFIG, encoding="utf-8")
    arguments = "--model_name_or_path meta-llama/Llama-2-7b-hf --bf16 --output_dir out"
    text = f"DIR={folder}\ndeepspeed --num_gpus 8 train.py {flag.format('$DIR')} {arguments}\n"
    (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    assert check([str(tmp_path / "run.sh")], gpu="h100", seq_len=1024).estimate.strategy.zero == 2


def test_another_commands_output_stays_unknown() -> None:
    assert not any(map(folder_of, ("ls", "dirname /etc/passwd", "cd /tmp && pwd", "pwd; ls", "dirname $1")))


def test_accelerate_without_a_config_runs_on_all_gpus(tmp_path: Path) -> None:
    """Source: Accelerate 1.15 commands/launch.py, _validate_launch_command: multi_gpu where more than one is found."""
    arguments = "train.py --model_name_or_path meta-llama/Llama-2-7b-hf --output_dir out --learning_rate 1e-5"
    (tmp_path / "run.sh").write_text(f"accelerate launch --num_processes 8 {arguments}", encoding="utf-8")
    found = check([str(tmp_path / "run.sh")], gpu="h100", seq_len=1024).estimate
    assert (found.strategy.framework, found.hardware.gpus, found.strategy.dp) == ("ddp", 8, 8)


ASKED = """N=$(nvidia-smi -L | wc -l)
torchrun --nproc_per_node=$N train.py --model_name_or_path meta-llama/Llama-2-7b-hf --output_dir out --bf16 \\
    --per_device_train_batch_size 1 --gradient_accumulation_steps $1
"""


def test_what_is_asked_is_an_option_and_satisfied_by_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(ASKED, encoding="utf-8")
    with pytest.raises(MissingError) as error:
        check([str(tmp_path / "run.sh")], gpu="h100")
    for option in ("--gpus ", "--global-batch ", "--seq-len"):
        assert option in str(error.value)
    answer = check([str(tmp_path / "run.sh")], gpu="h100", gpus=8, global_batch=64, seq_len=512).estimate
    assert (answer.hardware.gpus, answer.workload.accumulation_steps) == (8, 8)


ADAPTERS = AXOLOTL + "adapter: lora\nlora_r: 16\nlora_target_modules: {targets}\n"


@pytest.mark.parametrize(
    ("targets", "lora"),
    [
        (r"'model.language_model.layers.[\d]+.(mlp|self_attn).(up|down|gate|q|k|v|o)_proj'", "16:all-linear"),
        (r"'.*\.(q_proj|v_proj)'", "16:q,v"),
        ("[q_proj, v_proj]", "16:q,v"),
    ],
)
def test_a_pattern_of_layers_needs_no_run(tmp_path: Path, targets: str, lora: str) -> None:
    """Source: PEFT 0.19 tuners/tuners_utils.py, check_target_module_exists: a text must match the whole path."""
    (tmp_path / "ax.yaml").write_text(ADAPTERS.format(targets=targets), encoding="utf-8")
    strategy = check([str(tmp_path / "ax.yaml")], gpu="h100", gpus=8).estimate.strategy
    given = check([str(tmp_path / "ax.yaml")], gpu="h100", gpus=8, lora=lora).estimate
    assert given.strategy.lora in (strategy.lora, lora)
    assert check([str(tmp_path / "ax.yaml")], gpu="h100", gpus=8).estimate.peak == given.peak


@pytest.mark.parametrize("targets", ["'model.layers.(0|1|2).mlp.up_proj'", "'(a+)+b'", "'['"])
def test_a_pattern_that_blocks_differ_in_is_asked_for(tmp_path: Path, targets: str) -> None:
    (tmp_path / "ax.yaml").write_text(ADAPTERS.format(targets=targets), encoding="utf-8")
    with pytest.raises(MissingError, match=r"not in ax\.yaml: --lora"):
        check([str(tmp_path / "ax.yaml")], gpu="h100", gpus=8)


def test_modules_beside_all_linear_are_no_unknown_setting(tmp_path: Path) -> None:
    (tmp_path / "ax.yaml").write_text(ADAPTERS.format(targets="[q_proj]") + "lora_target_linear: true\n", "utf-8")
    answer = check([str(tmp_path / "ax.yaml")], gpu="h100", gpus=8)
    assert not [finding for finding in answer.files[0].findings if "lora_target_modules" in finding.message]
    assert answer.estimate.strategy.lora == "16:q,k,v,o,gate,up,down"


def test_defaults_are_the_frameworks_own_values(tmp_path: Path) -> None:
    (tmp_path / "lf.yaml").write_text(LLAMAFACTORY + "do_train: true\n", encoding="utf-8")
    answer = check([str(tmp_path / "lf.yaml")], gpu="h100", gpus=8)
    defaults = {default.field: default.usual for default in answer.files[0].defaults}
    assert defaults["packing"] == "false"
    assert defaults["disable_gradient_checkpointing"] == "false"
    assert defaults["optim"] == "adamw_torch_fused"
    assert defaults["bf16"] in ("false", "")
