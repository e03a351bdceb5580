"""Files that look like one job and are another: each kind of a public sample, in the least words that show it.

What each script does with its words is said where it is not plain: nothing here is of a real file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memcalc.convert.shell_values import Token
from memcalc.convert.shell_words import number_of
from memcalc.errors import IdleError, InputError, MissingError, ObjectiveError
from memcalc.preflight import check
from memcalc.preflight.job import read_files
from memcalc.preflight.merge import merge
from memcalc.preflight.roles import role_words
from memcalc.results.check import Check

TRAINER = "--model_name_or_path meta-llama/Llama-2-7b-hf --bf16 --model_max_length 2048 --per_device_train_batch_size 4"
LORA = "torchrun --nproc_per_node 8 train.py " + TRAINER + " --learning_rate 1e-5 --lora_rank 8 --use_peft True "
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=128 "
    "data.max_prompt_length=512 data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen3-1.7B "
    "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.tensor_model_parallel_size=1 "
)
EACH = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 "
)
TOTAL = EACH.replace("_per_gpu", "")
FACTORY = (
    "model_name_or_path: Qwen/Qwen2.5-3B\nstage: sft\ndo_train: true\ncutoff_len: 1024\nlearning_rate: 1.0e-5\n"
    "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nbf16: true\n"
)
PAIRS = (
    "model_name_or_path: Qwen/Qwen2.5-0.5B\nbeta: 0.1\nmax_length: 1024\nmax_prompt_length: 512\n"
    "learning_rate: 1.0e-6\nper_device_train_batch_size: 2\nbf16: true\n"
)


def checked(folder: Path, name: str, text: str, **given: Any) -> Check:
    """Check one file."""
    (folder / name).write_text(text, encoding="utf-8")
    return check([str(folder / name)], gpu="h100", **given)


def sentence(folder: Path, name: str, text: str, kind: type[Exception] = MissingError, **given: Any) -> str:
    """The sentence with which a file is asked about or refused."""
    with pytest.raises(kind) as error:
        checked(folder, name, text, **given)
    return str(error.value)


# ------------------------------------------------------------------------------------------------- how many ranks


@pytest.mark.parametrize(
    ("launch", "where"),
    [
        (f"torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES train.py {TRAINER} --do_train", "torchrun --nnodes is"),
        (f"torchrun --nproc_per_node $EACH --nnodes 2 train.py {TRAINER} --do_train", "torchrun --nproc_per_node is"),
        (f"{VERL}{EACH}trainer.n_gpus_per_node=8 trainer.nnodes=$NODES", "trainer.nnodes is 'NODES'"),
        (f"{VERL}{EACH}trainer.n_gpus_per_node=$EACH trainer.nnodes=1", "trainer.n_gpus_per_node is 'EACH'"),
    ],
)
def test_ranks_that_a_run_alone_knows_are_asked_for_and_no_default_stands_for_them(
    tmp_path: Path, launch: str, where: str
) -> None:
    """One node, or verl's 8 GPUs of a node, were counted."""
    found = sentence(tmp_path, "run.sh", launch)
    assert "--gpus (line of run.sh: " in found
    assert where in found
    assert checked(tmp_path, "run.sh", launch, gpus=16).verdict


def test_a_batch_of_all_ranks_of_verl_is_no_batch_of_one_where_their_number_is_open(tmp_path: Path) -> None:
    found = sentence(tmp_path, "run.sh", f"{VERL}{TOTAL}trainer.n_gpus_per_node=$EACH trainer.nnodes=1")
    assert "--micro-batch (line of run.sh: actor_rollout_ref.actor.ppo_micro_batch_size is of all ranks" in found
    assert "--set rl.logprob_batch" in found


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("echo $LIST | awk -F',' '{print NF}'", "3"),
        ("echo \"$LIST\" | awk -F, '{ print NF }'", "3"),
        ("echo ${LIST} | tr ',' '\\n' | wc -l", "3"),
        ("awk -F, '{print NF}' <<< \"$LIST\"", "3"),
        ("tr ',' '\\n' <<< $LIST | wc -l", "3"),
        ("echo $OTHER | awk -F',' '{print NF}'", ""),
        ("echo $LIST | awk -F';' '{print NF}'", ""),
    ],
)
def test_parts_between_commas_are_counted_as_bash_counts_them(command: str, count: str) -> None:
    assert number_of(command, {"LIST": Token("4,5,6")}) == count


def test_gpus_that_a_script_counts_from_what_it_shows_are_its_ranks(tmp_path: Path) -> None:
    lines = "export CUDA_VISIBLE_DEVICES=4,5\nEACH=$(echo $CUDA_VISIBLE_DEVICES | awk -F',' '{print NF}')\n"
    (tmp_path / "run.sh").write_text(f"{lines}{VERL}{EACH}trainer.n_gpus_per_node=$EACH trainer.nnodes=1")
    assert role_words(merge(read_files([str(tmp_path / "run.sh")]), {"gpu": "h100"}), ())["gpus"] == 2


def test_options_that_a_branch_sets_are_not_none_where_a_run_chooses_the_branch(tmp_path: Path) -> None:
    """Arguments of the script choose it, and none is given: the job was one in fp32, without recomputation."""
    script = (
        'if [ $1 = fp16 ]; then\n  pr_options=" \\\n  --fp16"\nelif [ $1 = bf16 ]; then\n  pr_options=" \\\n  --bf16"\n'
        'fi\nrun="torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 '
        "--vocab-size 128 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --disable-bias-linear "
        '${pr_options} ${EXTRA_ARGS}"\neval ${run}\n'
    )
    assert "hands $pr_options to its training" in sentence(tmp_path, "run.sh", script)
    assert checked(tmp_path, "run.sh", f"set -- bf16\n{script}").estimate.strategy.precision == "bf16-mixed"


# ------------------------------------------------------------------------------------------------ what is trained


def test_targets_under_pefts_own_name_are_read(tmp_path: Path) -> None:
    """They were no setting, and the layers of PEFT's default were counted."""
    answer = checked(tmp_path, "run.sh", f"{LORA}--target_modules q_proj,k_proj,down_proj")
    assert str(answer.estimate.strategy.lora) == "8:q,k,down"


@pytest.mark.parametrize("named", ["--target_modules all", "--lora_target_modules some_layer"])
def test_targets_that_are_words_of_a_script_are_asked_for(tmp_path: Path, named: str) -> None:
    found = sentence(tmp_path, "run.sh", f"{LORA}{named}")
    key, word = named[2:].split()
    assert f"--lora (line of run.sh: {key} names layers that memcalc does not know ({word}))" in found
    assert checked(tmp_path, "run.sh", f"{LORA}{named}", lora="8:all-linear").verdict


@pytest.mark.parametrize(
    "switch",
    ["num_virtual_tokens: 20", "pre_seq_len: 128", "finetuning_type: oft", "use_ia3: true", "tuning_type: lora"],
)
def test_other_ways_to_train_a_few_weights_are_refused(tmp_path: Path, switch: str) -> None:
    text = f"model_name: Qwen/Qwen2.5-3B\nlearning_rate: 1.0e-5\nper_device_train_batch_size: 1\n{switch}\n"
    found = sentence(tmp_path, "args.yaml", text, gpus=1, seq_len=512)
    assert f"has {switch.split(':', maxsplit=1)[0]} " in found


@pytest.mark.parametrize("stage", ["--zero_stage 2", "--zero_stage 3"])
def test_a_stage_of_zero_is_no_ddp(tmp_path: Path, stage: str) -> None:
    """Of OpenRLHF's and Safe RLHF's manner: the stage is a word of the script, which makes DeepSpeed's config of it."""
    found = sentence(
        tmp_path, "run.sh", f"deepspeed --num_gpus 8 --module a.finetune {TRAINER} --learning_rate 1e-5 {stage}"
    )
    assert f"has {stage[2:]} and no DeepSpeed config" in found
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    beside = f"deepspeed --num_gpus 8 train.py {TRAINER} --learning_rate 1e-5 {stage} --deepspeed ds.json"
    assert checked(tmp_path, "run.sh", beside).estimate.strategy.zero == 3


def test_a_config_of_llamafactory_that_a_script_of_another_name_reads_is_llamafactorys(tmp_path: Path) -> None:
    """It counted as the Trainer's: without its length, its targets, and what ``finetuning_type`` says."""
    (tmp_path / "sft.yaml").write_text(f"{FACTORY}finetuning_type: lora\nlora_rank: 4\ntemplate: qwen\n")
    answer = checked(tmp_path, "run.sh", "python my_sft.py sft.yaml")
    assert (str(answer.estimate.strategy.lora), answer.estimate.workload.seq_len) == ("4:q,k,v,o,gate,up,down", 1024)


def test_a_sign_of_llamafactory_beside_keys_that_it_refuses_is_none(tmp_path: Path) -> None:
    """Its parser stops at a key that it has not (hparams/parser.py, allow_extra_keys)."""
    text = FACTORY.replace("stage: sft\n", "").replace("cutoff_len", "max_seq_length") + "dataset_dir: data\n"
    answer = checked(tmp_path, "args.yaml", text, gpus=1)
    assert (str(answer.estimate.strategy.lora or ""), answer.estimate.workload.seq_len) == ("", 1024)


@pytest.mark.parametrize(("stem", "algorithm"), [("kto", "kto"), ("run_orpo", "orpo"), ("pairs", "dpo")])
def test_keys_of_several_trainers_of_preferences_are_of_the_one_that_the_file_is_called_after(
    tmp_path: Path, stem: str, algorithm: str
) -> None:
    (tmp_path / f"{stem}.yaml").write_text(PAIRS)
    merged = merge(read_files([str(tmp_path / f"{stem}.yaml")]), {"gpu": "h100", "gpus": 1})
    assert role_words(merged, ())["algorithm"] == algorithm


def test_arguments_that_date_a_config_before_tiled_losses_have_whole_logits(tmp_path: Path) -> None:
    """TRL 0.28 has no max_prompt_length (trainer/dpo_config.py), 1.15 makes logits in tiles."""
    framework = {}
    for stem, text in (("old", PAIRS), ("new", PAIRS.replace("max_prompt_length: 512\n", ""))):
        (tmp_path / f"{stem}.yaml").write_text(text)
        merged = merge(read_files([str(tmp_path / f"{stem}.yaml")]), {"gpu": "h100", "gpus": 1})
        framework[stem] = role_words(merged, ())["framework"]
    assert framework == {"old": "trl@1.14", "new": "trl"}


@pytest.mark.parametrize("stem", ["evaluate_base", "retrieve"])
def test_a_config_that_is_called_after_other_work_and_has_nothing_of_a_step_trains_nothing(
    tmp_path: Path, stem: str
) -> None:
    text = "model_name_or_path: Qwen/Qwen2.5-0.5B\nuse_peft: false\nbf16: true\nreport_to: none\nmax_length: 512\n"
    assert "starts no training" in sentence(tmp_path, f"{stem}.yaml", text, IdleError, gpus=1)
    assert checked(tmp_path, f"{stem}.yaml", f"{text}learning_rate: 1.0e-5\n", gpus=1, micro_batch=1).verdict


# ------------------------------------------------------------------------------------------------- whose words


def test_a_fork_of_torchtitan_with_a_vocabulary_of_its_own_has_another_model(tmp_path: Path) -> None:
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\nvocab_size = 256\n'
    )
    found = sentence(tmp_path, "train.toml", text, gpus=8)
    assert "--model (line of train.toml: training.vocab_size gives llama3 8B another vocabulary" in found


def test_words_of_megatron_before_fsdps_own_are_llm_recipes(tmp_path: Path) -> None:
    line = (
        "mpirun -np 8 python examples/finetuning.py --seq-length 8192 --micro-batch-size 1 --global-batch-size 256 "
        "--base-model meta-llama/Llama-3.1-8B --bf16 --sharding-strategy FULL_SHARD --fsdp-activation-checkpointing"
    )
    assert "starts llm-recipes or llama-recipes (examples/finetuning.py)" in sentence(
        tmp_path, "run.sh", line, ObjectiveError
    )


@pytest.mark.parametrize("old", ["--sft_type full", "--model_id_or_path Qwen/Qwen2-7B"])
def test_arguments_of_ms_swift_2_are_refused(tmp_path: Path, old: str) -> None:
    """What they say was no setting, so that `full` was counted as the adapters of 4.6's default."""
    line = f"swift sft --model Qwen/Qwen2-7B --dataset a --max_length 2048 {old}"
    assert f"ms-swift 2 ({old[2:].split(maxsplit=1)[0]})" in sentence(tmp_path, "run.sh", line, ObjectiveError)


def test_a_trainer_of_jax_is_named_before_its_files_are_looked_for(tmp_path: Path) -> None:
    line = "python MaxText/train.py MaxText/configs/base.yml base_emb_dim=4096 per_device_batch_size=2"
    assert "starts MaxText (MaxText/train.py)" in sentence(tmp_path, "run.sh", line, ObjectiveError)


def test_four_bits_beside_plain_adapters_of_axolotl_are_refused_in_its_own_words(tmp_path: Path) -> None:
    """loaders/model.py quantizes for qlora alone, and PEFT's prepare_model_for_kbit_training has the 16-bit base."""
    text = (
        "base_model: NousResearch/Llama-3.2-1B\nadapter: lora\nlora_r: 32\nlora_target_modules: [q_proj, v_proj]\n"
        "load_in_4bit: true\nsequence_len: 2048\nmicro_batch_size: 2\nlearning_rate: 1.0e-4\nbf16: true\n"
    )
    found = sentence(tmp_path, "a.yml", text, InputError, gpus=1)
    assert "load_in_4bit True: must be beside adapter: qlora" in found


def test_a_config_of_verl_that_is_called_after_a_placement_of_its_own_is_refused(tmp_path: Path) -> None:
    """Verl's examples/split_placement gives actor and critic GPUs of their own: its config has main_ppo's keys."""
    text = (
        "actor_rollout_ref: {model: {path: Qwen/Qwen3-1.7B}}\nalgorithm: {adv_estimator: gae}\ndata: {train_files: a}\n"
    )
    found = sentence(tmp_path, "ppo_trainer_split.yaml", text, ObjectiveError)
    assert "gives its roles GPUs of their own" in found


SWIFT = "swift sft --model Qwen/Qwen2-7B --dataset a --max_length 2048 --torch_dtype bfloat16 "


@pytest.mark.parametrize(
    "line",
    [
        "--tuner_type full --freeze_parameters_ratio 0.9", "--tuner_type full --lisa_activated_layers 2",
        "--tuner_type full --freeze_parameters model.embed_tokens", "--tuner_type lora --freeze_llm true",
    ],
)  # fmt: skip
def test_parts_that_ms_swift_freezes_are_not_counted_as_trained(tmp_path: Path, line: str) -> None:
    key, value = line.rpartition("--")[2].split()
    assert f"has {key} {value}, with which" in sentence(tmp_path, "run.sh", SWIFT + line, ObjectiveError)
    assert checked(
        tmp_path, "run.sh", f"{SWIFT}--tuner_type lora --freeze_parameters_ratio 0.9 --freeze_llm false"
    ).verdict


def test_parts_that_megatron_trains_in_full_beside_adapters_are_refused(tmp_path: Path) -> None:
    line = (
        "NPROC_PER_NODE=2 megatron sft --model Qwen/Qwen3-30B-A3B --dataset a --tuner_type lora --lora_rank 8 "
        "--target_modules all-linear --modules_to_save word_embeddings output_layer --expert_model_parallel_size 2 "
        "--micro_batch_size 1 --global_batch_size 8 --max_length 2048"
    )
    found = sentence(tmp_path, "run.sh", line, ObjectiveError)
    assert "has modules_to_save word_embeddings, output_layer, which Megatron-LM trains" in found


def test_sizes_that_overrides_give_a_new_model_are_asked_for(tmp_path: Path) -> None:
    """Transformers' run_clm.py: n_layer=2 counted as the whole of the model that config_name names."""
    line = (
        "python run_clm.py --config_name gpt2 --config_overrides n_layer=2,n_embd=128 --do_train --output_dir o "
        "--per_device_train_batch_size 8 --block_size 512 --num_train_epochs 1"
    )
    found = sentence(tmp_path, "run.sh", line)
    assert "--model (line of run.sh: config_overrides gives a model that is made anew other sizes" in found


def test_neat_packing_beside_packing_is_a_setting_of_llamafactory(tmp_path: Path) -> None:
    """It was said to be none, since the key before it was enough."""
    text = f"{FACTORY}finetuning_type: lora\ntemplate: qwen\npacking: true\nneat_packing: true\n"
    answer = checked(tmp_path, "sft.yaml", text, gpus=1)
    assert not any("neat_packing" in finding.message for file in answer.files for finding in file.findings)


def test_a_config_of_deepspeed_that_is_called_after_evaluation_trains_nothing(tmp_path: Path) -> None:
    """DeepSpeed-Chat's manner has one for evaluation beside that of the training, without an optimizer."""
    text = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}'
    given = {"gpus": 8, "model": "llama-2-7b", "seq_len": 2048}
    assert "starts no training" in sentence(tmp_path, "ds_eval_config.json", text, IdleError, **given)
    assert checked(tmp_path, "ds_retrieval.json", text, **given).verdict


# ------------------------------------------------------------------------------------------------ a fourth sample


def test_a_script_of_its_own_that_is_called_after_a_method_is_no_fine_tuning(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 8 main.py --config-name=a.yaml"
    found = sentence(tmp_path, "grpo_rank0.sh", line, ObjectiveError)
    assert "trains by GRPO (by its name)" in found


def test_rows_of_llamafactory_of_2023_are_as_long_as_source_and_target(tmp_path: Path) -> None:
    """They were no settings, and the default of today's ``cutoff_len`` was counted."""
    text = FACTORY.replace("cutoff_len: 1024", "max_source_length: 2048") + "finetuning_type: lora\ntemplate: llama2\n"
    assert checked(tmp_path, "sft.yaml", text, gpus=1).estimate.workload.seq_len == 2560


def test_a_file_called_after_qlora_with_a_rank_alone_asks_for_layers_and_base(tmp_path: Path) -> None:
    text = TRAINER.replace("--", "").replace("bf16", "bf16 true").split()
    data = "".join(f"{key}: {value}\n" for key, value in zip(text[::2], text[1::2], strict=True))
    found = sentence(tmp_path, "qwen-qlora.yaml", f"{data}learning_rate: 1.0e-4\nlora_rank: 64\nstyle: a\n", gpus=1)
    assert "--lora (line of" in found
    assert "--quantize (line of qwen-qlora.yaml: lora_rank is of a file that is called after QLoRA" in found
    given = {"gpus": 1, "lora": "64:all-linear", "quantize": "nf4"}
    answer = checked(tmp_path, "qwen-qlora.yaml", f"{data}learning_rate: 1.0e-4\nlora_rank: 64\nstyle: a\n", **given)
    assert not any(finding.code == "MC003" for finding in answer.files[0].findings)


@pytest.mark.parametrize("stage", [1, 2])
def test_weights_are_offloaded_at_stage_3_alone(tmp_path: Path, stage: int) -> None:
    """Below it DeepSpeed's engine takes no ``offload_param`` (runtime/engine.py): 15 GiB of an 8B were left out."""
    moved = '"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}'
    given: dict[str, Any] = {"gpus": 8, "model": "llama-3.1-8b", "seq_len": 512, "micro_batch": 1}
    text = f'{{"bf16": {{"enabled": true}}, "zero_optimization": {{"stage": {stage}, {moved}}}}}'
    answer = checked(tmp_path, "ds.json", text, **given)
    assert answer.estimate.strategy.offload == ("optimizer",)
    assert any("offload_param.device counts for nothing" in finding.message for finding in answer.files[0].findings)
    yaml = (
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\ndeepspeed_config:\n"
        f"  zero_stage: {stage}\n  offload_optimizer_device: cpu\n  offload_param_device: cpu\n"
    )
    assert checked(tmp_path, "acc.yaml", yaml, **given).estimate.peak == answer.estimate.peak
    with pytest.raises(InputError, match="parameters are offloaded at --zero 3"):
        checked(tmp_path, "ds.json", text, **given, offload="params")


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (f"{LORA}--style a", "--lora (line of run.sh: lora_rank is said without layers"),
        (f"{LORA}--peft_config lora.yaml", "has peft_config lora.yaml, a switch of its own script"),
        (
            "accelerate launch refl.py --resolution 512 --center_crop --train_batch_size 2 --learning_rate 1e-5",
            "trains a model of pictures (refl.py: center_crop",
        ),
        (
            f"MODEL=\nMODEL=${{MODEL:-}}\n{LORA}".replace("meta-llama/Llama-2-7b-hf", '"$MODEL"'),
            "the files name the model by a variable or a field that is empty; give --model",
        ),
        (
            f"A=\naccelerate launch --config_file configs/$A.yaml train.py {TRAINER} --do_train",
            "which is an ending alone. Set its variable in a copy of the script",
        ),
        ("torchrun --nproc_per_node 8 $WHAT --epochs 3", "what torchrun starts has arguments of its own"),
        ("#SBATCH --nodes=1\n./run_train.sh --model a/b --bits 4", "run_train.sh"),
    ],
)  # fmt: skip
def test_what_a_script_leaves_open_is_asked_for_by_its_words(tmp_path: Path, line: str, asked: str) -> None:
    """Layers of adapters were PEFT's default, a file of them nothing; an empty name was no model of a type error."""
    assert asked in sentence(tmp_path, "run.sh", line)


def test_what_starts_a_training_is_seen_through(tmp_path: Path) -> None:
    torchrun = f"torchrun --nproc_per_node 2 train.py {TRAINER} --do_train"
    for line in (
        f"env PYTHON_BIN=/opt/bin/python OUT=a {torchrun}",
        f'tmux new-session -d -s train "source env\n{torchrun}"',
        f"screen -dmS train bash -c '{torchrun}'",
        f"{{\n{torchrun}\n}} 2>&1 | tee log",
    ):
        assert checked(tmp_path, "run.sh", line).estimate.hardware.gpus == 2


def test_a_script_in_python_is_said_to_be_one_whatever_quotes_it_has(tmp_path: Path) -> None:
    """It was read as a shell's: `a quote of line 1 is not closed`, or an `=` that starts something."""
    for text in ("name = 'it''s'; x = \"a\n", "if a:\n" * 80, "train = trainer.train()\npython = train(model = a)\n"):
        assert "is Python, of which no setting is read" in sentence(tmp_path, "train_sft.py", text, InputError)
