"""Whose arguments a script has: what is not known is asked for or refused by name, and never counted as another job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.convert.launchers import names_other_work
from memcalc.errors import IdleError, MissingError, ObjectiveError, UnknownFormatError
from memcalc.preflight import check
from memcalc.results.check import Check

TRAINER = "--model_name_or_path meta-llama/Llama-2-7b-hf --bf16 --model_max_length 2048 --per_device_train_batch_size 4"
SIZES = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 64 --vocab-size 50257"
)


def checked(folder: Path, text: str, **given: Any) -> Check:
    """Check a script."""
    (folder / "run.sh").write_text(text, encoding="utf-8")
    return check([str(folder / "run.sh")], gpu="h100", **given)


def refused(folder: Path, text: str, **given: Any) -> str:
    """Return the sentence with which a script is asked about or refused."""
    with pytest.raises(MissingError) as error:
        checked(folder, text, **given)
    return str(error.value)


# ------------------------------------------------------------------------------------------- training, or other work


@pytest.mark.parametrize(
    "script",
    [
        "internvl/train/internvl_chat_finetune.py", "finetune_chat.py", "finetune_and_eval.py", "train_generator.py",
        "inference_aware_finetune.py", "tests/train.py", "/data/bench/train.py", "setup/train.py", "llm_eval/sft.py",
        "my-server/train.py", "verl.trainer.main_trainer", "bench_finetune.py", "chatglm_lora.py",
    ],
)  # fmt: skip
def test_a_script_that_trains_is_no_other_work(script: str) -> None:
    assert not names_other_work(script)


@pytest.mark.parametrize(
    "script",
    [
        "tools/preprocess_data.py", "convert_pretrained_checkpoint.py", "examples/chatbot.py", "lm_eval", "eval/run.py",
        "merge_lora.py", "prepare_sft_data.py", "generate_train_data.py", "vllm.entrypoints.openai.api_server",
        "evaluate_finetuned.py", "embed_datasets.py", "train_tokenizer/convert.py",
        "examples/conversion/hf_megatron_roundtrip_multi_gpu.py", "run_conversion.py",
    ],
)  # fmt: skip
def test_other_work_is_known_by_its_name(script: str) -> None:
    assert names_other_work(script)


def test_the_flags_of_a_training_go_before_the_name(tmp_path: Path) -> None:
    answer = checked(tmp_path, f"torchrun --nproc_per_node 8 chat/serve_model.py {TRAINER}")
    assert answer.estimate.workload.micro_batch == 4


@pytest.mark.parametrize("line", ["singularity exec x.sif pip install deepspeed vllm", "docker build -t deepspeed ."])
def test_packages_and_images_are_no_trainings(tmp_path: Path, line: str) -> None:
    with pytest.raises(UnknownFormatError):
        checked(tmp_path, line)


# ----------------------------------------------------------------------------------------------- whose arguments


def test_src_train_is_llamafactorys_by_its_flags_alone(tmp_path: Path) -> None:
    """The most usual path of a training script: the same flags come to the same job wherever it stands."""
    answers = [
        checked(tmp_path, f"torchrun --nproc_per_node 8 {name} {TRAINER}") for name in ("src/train.py", "train.py")
    ]
    assert answers[0].estimate.strategy == answers[1].estimate.strategy
    assert not answers[0].estimate.strategy.lora
    factory = checked(tmp_path, f"torchrun --nproc_per_node 8 src/train.py --stage sft --template llama2 {TRAINER}")
    assert factory.estimate.strategy.lora


def test_a_trainer_that_is_not_known_is_asked_about(tmp_path: Path) -> None:
    """Its framework too: ZeRO-3 and a step of 128 sequences would be an invention."""
    text = "torchrun --nproc_per_node 8 ./finetuning.py --enable_thing --steps 5"
    given = {"model": "llama-2-7b", "seq_len": 2048, "micro_batch": 1}
    said = refused(tmp_path, text, **given)
    assert "--framework (line of run.sh: ./finetuning.py has arguments of its own" in said
    assert checked(tmp_path, text, framework="fsdp2", **given).verdict
    assert checked(tmp_path, f"#MEMCALC --model llama-2-7b --seq-len 2048 --micro-batch 1\n{text}").verdict


def test_a_model_that_only_such_a_trainers_arguments_name_is_asked_for_with_the_reason(tmp_path: Path) -> None:
    """The line names it, so that "not in run.sh" alone would be untrue; with it given, nothing more is asked."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}')
    text = "torchrun --nproc_per_node 8 finetuning.py --deepspeed ds.json --model_name_or_path meta-llama/Llama-2-7b-hf"
    said = refused(tmp_path, text, seq_len=2048)
    assert "--model (line of run.sh: finetuning.py has arguments of its own, which memcalc does not know)" in said
    assert checked(tmp_path, text, seq_len=2048, model="llama-2-7b").verdict


@pytest.mark.parametrize(
    "command",
    [
        "python scripts/pissa_init.py --model_name_or_path meta-llama/Meta-Llama-3-8B --output_dir models/pissa",
        "python run_longbench.py --task kv --model_name_or_path meta-llama/Llama-3.1-8B --output_dir r --data_dir d",
        "deepspeed --module lab.trainers.text.sft --model_name_or_path meta-llama/Llama-3.1-8B --output_dir o --set x",
    ],
)
def test_a_models_path_and_a_folder_are_no_training(tmp_path: Path, command: str) -> None:
    """Such scripts merge, evaluate, or have files of their own: 8 sequences on fp32 weights would be an invention."""
    assert "has arguments of its own" in refused(tmp_path, command, gpus=8, seq_len=2048)


def test_a_trainer_named_after_a_method_whose_arguments_are_its_own_is_refused(tmp_path: Path) -> None:
    command = "deepspeed --module lab.trainers.text.dpo --model_name_or_path meta-llama/Llama-3.1-8B --output_dir o"
    assert "does not read its arguments: give memcalc rl what it trains" in refused(tmp_path, command, gpus=8)


def test_the_trainers_default_batch_counts_only_where_all_arguments_are_the_trainers(tmp_path: Path) -> None:
    """A script with arguments of its own may have defaults of its own, as subclasses of TrainingArguments do."""
    plain = (
        "torchrun --nproc_per_node 8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --output_dir o --optim sgd"
    )
    assert checked(tmp_path, plain, seq_len=512).estimate.strategy.micro_batch == 8
    assert "--micro-batch (line of run.sh: per_device_train_batch_size is not said" in refused(
        tmp_path, f"{plain} --conversation_template llama3", seq_len=512
    )


def test_a_trainer_that_is_told_not_to_train_does_not(tmp_path: Path) -> None:
    text = f"python run.py {TRAINER} --do_train False --do_predict True"
    with pytest.raises(IdleError, match="starts no training"):
        checked(tmp_path, text)


def test_a_deepspeed_config_that_only_a_run_knows_is_asked_for(tmp_path: Path) -> None:
    """It was counted as DDP, without a word."""
    text = f"deepspeed --num_gpus 8 train.py {TRAINER} --deepspeed $DS_CONFIG"
    assert "--zero (line of run.sh: deepspeed is 'DS_CONFIG', a file that only a run knows" in refused(tmp_path, text)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    job = check([str(tmp_path / "ds.json"), str(tmp_path / "run.sh")], gpu="h100")
    assert isinstance(job, Check)
    assert (job.estimate.strategy.framework, job.estimate.strategy.zero) == ("deepspeed", 2)


def test_a_recipe_of_a_script_without_the_trainer_asks_what_ranks_share(tmp_path: Path) -> None:
    """Transformers' run_clm_no_trainer.py and open-instruct's: Accelerate's config says it, none of their arguments."""
    text = "model_name_or_path: meta-llama/Llama-2-7b-hf\nmax_seq_length: 512\nper_device_train_batch_size: 1\n"
    (tmp_path / "sft.yaml").write_text(text + "output_dir: o\nwith_tracking: true\n", encoding="utf-8")
    (tmp_path / "one.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n", encoding="utf-8")
    alone = [str(tmp_path / "sft.yaml")]
    with pytest.raises(MissingError, match=r"--framework \(line of sft.yaml: with_tracking is .* --precision"):
        check(alone, gpu="h100", gpus=8)
    with pytest.raises(MissingError, match=r"not in sft.yaml: --zero .* Pass it"):
        check(alone, gpu="h100", gpus=8, framework="deepspeed", precision="bf16-mixed")
    given = check(alone, gpu="h100", gpus=8, framework="deepspeed", zero=3, precision="bf16-mixed")
    assert isinstance(given, Check)
    assert (given.estimate.strategy.framework, given.estimate.strategy.zero) == ("deepspeed", 3)
    job = check([str(tmp_path / "one.yaml"), str(tmp_path / "sft.yaml")], gpu="h100")
    assert isinstance(job, Check)
    assert job.estimate.strategy.framework == "ddp"


def test_a_script_that_loads_16_bit_weights_without_a_key_counts_so(tmp_path: Path) -> None:
    """open-instruct's finetune.py (dtype=torch.bfloat16 of from_pretrained): weights, gradients and moments in bf16."""
    arguments = (
        "--model_name_or_path Qwen/Qwen3-0.6B --max_seq_length 1024 --per_device_train_batch_size 1 --output_dir o"
    )
    wide = {"finetune.py": "bf16-autocast", "open_instruct/finetune.py": "bf16", "tuning/sft_trainer.py": "bf16"}
    for script, precision in wide.items():
        job = checked(tmp_path, f"accelerate launch --mixed_precision bf16 --num_processes 1 {script} {arguments}")
        assert isinstance(job, Check)
        assert job.estimate.strategy.precision == precision


def test_a_command_behind_quoted_ands_is_the_one_that_trains(tmp_path: Path) -> None:
    r"""open-instruct's large_test_script.sh: `\&\&python` of what mason.py runs was read as mason.py's own flags."""
    text = f"python mason.py --gpus 8 -- source a.sh \\&\\&python open_instruct/grpo_fast.py {TRAINER} --beta 0.0"
    assert "starts open-instruct (open_instruct/grpo_fast.py)" in refused(tmp_path, text)


def test_a_config_of_a_scripts_own_counts_for_nothing_and_is_asked_about(tmp_path: Path) -> None:
    """It was read as the Trainer's: `use_fsdp: true` was DDP in fp32 with a micro-batch of 8, which nobody wrote."""
    own = tmp_path / "my.yaml"
    own.write_text("model: gpt2\nlr: 1e-4\nbatch_size: 4\nuse_fsdp: true\n", encoding="utf-8")
    line = "torchrun --nproc_per_node 8 train.py"
    for arguments in ("--config my.yaml", "my.yaml"):
        question = refused(tmp_path, f"{line} {arguments}", seq_len=512)
        assert "--framework (line of my.yaml: it has settings of its script's own" in question
        assert "--micro-batch" in question
    job = checked(tmp_path, f"{line} --config my.yaml", seq_len=512, model="gpt2", framework="fsdp2", micro_batch=4)
    assert (job.estimate.strategy.framework, job.estimate.strategy.micro_batch) == ("fsdp2", 4)
    written = f"cat > own.yaml <<'END'\n{own.read_text(encoding='utf-8')}END\n{line} --config own.yaml"
    assert "--framework (line of run.sh: it has settings" in refused(tmp_path, written, seq_len=512)
    with pytest.raises(ObjectiveError, match=r"my\.yaml trains by GRPO"):
        checked(tmp_path, "python geometry3k_grpo.py --config my.yaml")
    own.write_text("use_lora: true\n", encoding="utf-8")
    with pytest.raises(ObjectiveError, match=r"my\.yaml has use_lora True"):
        checked(tmp_path, f"{line} --config my.yaml")


def test_a_trainers_config_is_read_of_any_script_that_takes_it(tmp_path: Path) -> None:
    text = "model_name_or_path: gpt2\nper_device_train_batch_size: 2\nlearning_rate: 1e-4\nmax_seq_length: 512\n"
    (tmp_path / "sft.yaml").write_text(text, encoding="utf-8")
    assert checked(tmp_path, "python train.py --config sft.yaml").estimate.strategy.micro_batch == 2
    (tmp_path / "few.yaml").write_text("model_name_or_path: gpt2\npacking: true\n", encoding="utf-8")
    assert checked(tmp_path, "trl sft --config few.yaml", gpus=1).estimate.strategy.micro_batch == 8


def test_a_batch_under_a_name_of_the_scripts_own_is_asked_for(tmp_path: Path) -> None:
    """The Trainer's default of 8 stood in for `batch_size: 4`."""
    text = "model_name: gpt2\nlearning_rate: 1e-4\nbatch_size: 4\noutput_dir: out\nmax_seq_length: 512\n"
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(MissingError, match=r"--micro-batch .* arguments of its own \(batch_size\)"):
        check([str(tmp_path / "my.yaml")], gpu="h100", gpus=8)


def test_a_config_most_of_whose_keys_are_nobodys_is_no_trainers(tmp_path: Path) -> None:
    """What shares its states is its script's: it was counted as DDP in fp32."""
    text = "total_length: 512\ndataset: x\nlr: 1e-6\nbase_model: gpt2\nstart_idx: 0\neps: 1\noutput_dir: o\n"
    (tmp_path / "my.yaml").write_text(f"{text}per_device_train_batch_size: 1\n", encoding="utf-8")
    given = {"model": "gpt2", "gpu": "h100", "gpus": 8, "seq_len": 512}
    with pytest.raises(MissingError, match=r"--framework .* --precision"):
        check([str(tmp_path / "my.yaml")], **given)
    job = check([str(tmp_path / "my.yaml")], **given, framework="fsdp2", precision="bf16-mixed")
    assert isinstance(job, Check)
    assert (job.estimate.strategy.framework, job.estimate.strategy.precision) == ("fsdp2", "bf16-mixed")


def test_mixed_precision_of_a_script_that_hands_it_to_accelerate_counts(tmp_path: Path) -> None:
    """`Accelerator(mixed_precision=args.mixed_precision)`: it was fp32, with a warning of an unknown argument."""
    flags = "--model_name_or_path gpt2 --max_seq_length 512 --per_device_train_batch_size 1 --output_dir o"
    job = checked(tmp_path, f"torchrun --nproc_per_node 2 train.py {flags} --mixed_precision bf16")
    assert job.estimate.strategy.precision == "bf16-autocast"


def test_a_script_that_patches_copies_or_plots_is_not_the_training(tmp_path: Path) -> None:
    text = f"python patch_verl_grpo.py --file x\npython plot_loss.py --file y\npython train.py {TRAINER}\n"
    assert checked(tmp_path, text).estimate.strategy.micro_batch == 4


def test_arguments_in_a_variable_that_a_run_sets_are_no_config_file(tmp_path: Path) -> None:
    """It said that the config is 'ARGS', a file to be given."""
    text = f'ARGS="{TRAINER}"\nif [ "$USE_LORA" = 1 ]; then ARGS="$ARGS --lora_r 16"; fi\n'
    text += "torchrun train.py $ARGS --deepspeed x.json\n"
    (tmp_path / "x.json").write_text("{}", encoding="utf-8")
    assert "run.sh hands $ARGS to its training, whose words only a run knows" in refused(tmp_path, text)


@pytest.mark.parametrize("module", ["venv env", "build --wheel", "twine upload x", "pip install x"])
def test_what_makes_an_environment_or_a_package_is_no_job(tmp_path: Path, module: str) -> None:
    with pytest.raises(UnknownFormatError, match="must start a training"):
        checked(tmp_path, f"python -m {module}\n")


def test_a_length_alone_does_not_make_a_script_trls(tmp_path: Path) -> None:
    """It was bf16 with checkpoints and a loss without logits, TRL's defaults: 159 GiB of 223 that run (7B)."""
    flags = "--model_name_or_path gpt2 --max_length 512 --per_device_train_batch_size 2 --output_dir o"
    line = "torchrun --nproc_per_node 8 {} " + flags
    own = checked(tmp_path, line.format("train.py")).estimate.strategy
    assert (own.precision, own.recompute, own.loss) == ("fp32", "none", "standard")
    for script in ("examples/scripts/sft.py", "-m trl.scripts.sft", "run_sft.py"):
        assert _runs_as_trl(checked(tmp_path, line.format(script)))


def _runs_as_trl(job: Check) -> bool:
    strategy = job.estimate.strategy
    return (strategy.precision, strategy.recompute, strategy.loss) == ("bf16-autocast", "full", "fused-linear")


def test_trls_own_commands_have_its_defaults_whatever_they_are_told(tmp_path: Path) -> None:
    """They asked for a length, and were fp32 without checkpoints, where no key is TRL's alone (base_config.py)."""
    flags = "--model_name_or_path gpt2 --dataset_name x --per_device_train_batch_size 2 --output_dir o"
    keys = "model_name_or_path: gpt2\ndataset_name: x\nper_device_train_batch_size: 2\noutput_dir: o\n"
    (tmp_path / "few.yaml").write_text(keys, encoding="utf-8")
    for line in (f"trl sft {flags}", f"python trl/scripts/sft.py {flags}", "trl sft --config few.yaml"):
        job = checked(tmp_path, line, gpus=1)
        assert _runs_as_trl(job)
        assert job.estimate.workload.seq_len == 1024


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("run_glue.py", "--task_name mrpc", "another head than a language model's"),
        ("run_swag_no_trainer.py", "", "another head"),
        ("run_qa.py", "", "another head"),
        ("train_classifier.py", "", "another head"),
        ("train.py", "--teacher_path Qwen/Qwen2.5-7B", "holds a teacher beside"),
        ("-m FlagEmbedding.finetune.embedder.encoder_only.base", "--query_max_len 32", "compares vectors of texts"),
        ("train_lora_flux.py", "", "a model of pictures"),
        ("train.py", "--num_layers_to_train 4", "has num_layers_to_train 4"),
        ("train.py", "--training_method refuel", "has training_method refuel"),
    ],
)
def test_scripts_and_arguments_of_other_objectives_are_declined(
    tmp_path: Path, script: str, flags: str, words: str
) -> None:
    with pytest.raises(ObjectiveError, match=words):
        checked(tmp_path, f"torchrun --nproc_per_node 8 {script} {TRAINER} --learning_rate 1e-5 {flags}")


SWITCHES = [
    "--lora_enable True", "--bits 4", "--use_qlora", "--q_lora True", "--train_mode qlora",
    "--tune_mm_mlp_adapter True", "--mm_tunable_parts mm_mlp_adapter", "--freeze_backbone True",
    "--use_unsloth True", "--peft_method lora",
    "--trainable q_proj,v_proj", "--quantization int4", "--spectrum_config_path x.yaml",
    "--classifier_dropout 0.1", "--model_class custom", "--use_customized_optim 1", "--source_max_len 384",
    "--second_per_device_train_batch_size 8",
]  # fmt: skip


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("script", [f"train.py {TRAINER}", "my_loop.py --steps 5"])
def test_a_switch_of_a_script_that_chooses_what_is_trained_is_refused(tmp_path: Path, switch: str, script: str) -> None:
    name, _, value = switch[2:].partition(" ")
    said = refused(tmp_path, f"torchrun --nproc_per_node 8 {script} {switch}")
    assert f"run.sh has {name} {value or True}, a switch of its own script" in said


@pytest.mark.parametrize("stage", ["--zero_stage 3", "--zero_stage 0", "--actor_zero_stage 2"])
def test_a_script_that_makes_its_deepspeed_config_itself_is_declined(tmp_path: Path, stage: str) -> None:
    """DeepSpeed-Chat's, whose fp16, offload and losses (of answers, pairs, rewards) its own flags tell."""
    with pytest.raises(ObjectiveError, match=rf"has {stage[2:]} and no DeepSpeed config"):
        checked(tmp_path, f"deepspeed main.py {TRAINER} --learning_rate 1e-5 {stage} --deepspeed")


@pytest.mark.parametrize(
    "switch", ["--lora_enable False", "--bits 16", "--freeze_backbone false", "--lora_weight_path ''", "--q_lora False"]
)
def test_a_switch_that_is_off_says_nothing(tmp_path: Path, switch: str) -> None:
    assert checked(tmp_path, f"torchrun --nproc_per_node 8 train.py {TRAINER} {switch}").verdict


def test_switches_of_pefts_examples_are_read(tmp_path: Path) -> None:
    """PEFT 0.21 examples/sft: utils.py, create_and_prepare_model; train.py, ModelArguments."""
    flags = (
        "--use_peft_lora True --lora_r 8 --lora_target_modules all-linear --use_reentrant True --gradient_checkpointing"
    )
    found = checked(
        tmp_path,
        f"torchrun --nproc_per_node 8 train.py {TRAINER} {flags} --use_4bit_quantization True --use_nested_quant True",
    ).estimate.strategy
    assert (found.quantize, found.checkpoint, str(found.lora)) == ("nf4-dq", "reentrant", "8:q,k,v,o,gate,up,down")


def test_adapters_alone_do_not_make_a_script_trls(tmp_path: Path) -> None:
    answer = checked(
        tmp_path, f"torchrun --nproc_per_node 8 train.py {TRAINER} --lora_r 8 --lora_target_modules q_proj"
    )
    assert answer.estimate.strategy.loss == "standard"
    assert not any("SFTTrainer" in finding.message for file in answer.files for finding in file.findings)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"torchrun tasks/main.py --task MNLI {SIZES}", "with --task"),
        (f"torchrun examples/multimodal/train.py --language-model-type mistral_7b --freeze-LM {SIZES}", "vision tower"),
        (f"torchrun train_esm2.py {SIZES}", "masked tokens"),
        (f"torchrun pretrain_gpt.py --optimizer ademamix --ademamix-alpha 8 {SIZES}", "a third moment"),
        ("accelerate launch train_dreambooth.py --learning_rate 1e-5 --output_dir x", "a model of pictures"),
        (
            "python finetune_it.py --pretrained_model_name_or_path a/b --train_batch_size 1 --height 432",
            r"a model of pictures \(finetune_it.py: height\)",
        ),
        ("uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base trainer.epochs=1", "starts SkyRL"),
        ("uv run --with x -m prime_rl.trainer.sft.train @ a.toml", "starts prime-rl"),
        ("accelerate launch open_instruct/grpo_fast.py --beta 0.0 --learning_rate 1e-6", "starts open-instruct"),
        (f"torchrun run.py --model_recipe_name qwen3_30b {SIZES}", "starts Megatron-Bridge"),
        (f"torchrun llava.py --language-model-checkpoint x {SIZES}", "vision tower"),
        ("nemo llm pretrain --factory llama3_8b -y", r"starts NeMo \(nemo.llm.pretrain\)"),
    ],
)
def test_scripts_that_train_something_else_are_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ObjectiveError, match=words):
        checked(tmp_path, line)


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        ("experiment_name: a\ntrial_name: b\ncluster: {n_nodes: 1}\ntrain_dataset: {path: c}\n", "AReaL"),
        ("model: {model_path: a}\ndata: {train_path: b}\ntrain: {accelerator: {ep_size: 8}}\n", "VeOmni"),
        (
            "data: {micro_batch_size: 4, max_length: 1024}\nmodel: {partial_pretrain: Qwen/Qwen3-8B}\n",
            "verl's fsdp_sft_trainer",
        ),
        ("pipe_parallel_size: 1\nmodel-parallel-size: 4\nfp16: {enabled: true}\nnum_layers: 2\n", "GPT-NeoX"),
        ("model_id: x\ncontext_length: 512\nnum_devices: 2\ndeepspeed: {config_path: y}\noutput_dir: z\n", "LLMForge"),
        ("trainer: {devices: 8}\nmodel: {tensor_model_parallel_size: 2, num_layers: 2}\n", "NeMo"),
        ("train: {train_iters: 20, micro_batch_size: 1}\nmodel: {seq_length: 4096}\n", "Megatron-Bridge"),
        ("type: sft\nmicro_batch_size: 1\nmodel: {name_or_path: x}\ndata: {sources: []}\n", "ArcticTraining"),
        ("exp_name: a\npretrain: Qwen/Qwen3-8B\nsave_steps: 9\nactor_train: {device_mapping: 0}\n", "ROLL"),
        ("recipe: X\nstep_scheduler: {local_batch_size: 8}\nmodel: {_target_: y}\n", "NeMo Automodel"),
        ("work_group: amd\nexp_name: a\nmodules: {pre_trainer: {framework: megatron}}\n", "Primus"),
        ("train_cfgs: {per_device_train_batch_size: 1}\ndata_cfgs: {train_size: 9}\n", "align-anything"),
        ("system: {bf16: true}\nmodel: {num_layers: 2, micro_batch_size: 1}\n", "FlagScale"),
        ("MODEL_ARGS: {trainer.devices: 8, model.num_layers: 2}\n", "NeMo"),
        ("model: {d_model: 64}\noptimizer: {learning_rate: 1e-3}\ndevice_train_microbatch_size: 1\n", "OLMo"),
        ("project_name: a\ntraining_type: sft\ntraining_config: {num_train_epochs: 1}\n", "leap-finetune"),
    ],
)
def test_configs_of_trainers_that_are_not_read_are_named(tmp_path: Path, text: str, trainer: str) -> None:
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ObjectiveError, match=trainer):
        check([str(tmp_path / "config.yaml")], gpu="h100", gpus=8)


def test_a_toml_of_another_trainer_is_not_torchtitans(tmp_path: Path) -> None:
    text = '[model]\nname = "Qwen/Qwen3-4B"\n[data]\nname = "a/b"\nseq_len = 4096\nbatch_size = 32\n'
    (tmp_path / "sft.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ObjectiveError, match="prime-rl"):
        check([str(tmp_path / "sft.toml")], gpu="h100", gpus=8)


def test_pictures_by_torchtitan_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[model]\nname = "flux"\nflavor = "flux-dev"\n[training]\nsteps = 9\n')
    with pytest.raises(ObjectiveError, match="a model of pictures"):
        check([str(tmp_path / "a.toml")], gpu="h100", gpus=8, model="llama-3.1-8b")


@pytest.mark.parametrize("flag", ["--overlapped-distributed-optimizer", "--t5-swiglu", "--RMSNorm"])
def test_arguments_of_forks_of_megatron_are_refused(tmp_path: Path, flag: str) -> None:
    assert "an argument of a fork of Megatron-LM" in refused(tmp_path, f"torchrun pretrain_gpt.py {SIZES} {flag}")


def test_a_slurm_script_without_a_training_is_no_job_of_its_own(tmp_path: Path) -> None:
    """Files beside it say what runs; alone it says how many GPUs there are, and no more."""
    text = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n${header} ${arguments}\n"
    given = {"model": "llama-2-7b", "seq_len": 2048, "micro_batch": 1}
    assert "--framework (line of run.sh: #SBATCH lines have no training beside them" in refused(tmp_path, text, **given)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}', "utf-8")
    answer = check([str(tmp_path / "run.sh"), str(tmp_path / "ds.json")], gpu="h100", **given)
    assert (answer.estimate.strategy.zero, answer.estimate.hardware.gpus) == (3, 16)


def test_lora_that_a_script_does_not_train_is_none(tmp_path: Path) -> None:
    """yangjianxin1/Firefly train.py: train_mode decides, and its full files have lora_rank all the same."""
    text = f"torchrun --nproc_per_node 8 train.py {TRAINER} --lora_rank 64 --train_mode full"
    assert not checked(tmp_path, text).estimate.strategy.lora


def test_simpo_has_no_reference(tmp_path: Path) -> None:
    """princeton-nlp/SimPO, scripts/simpo_trainer.py: its configs have TRL's keys of DPO beside its own."""
    (tmp_path / "simpo.yaml").write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\nbeta: 2.0\n"
        "gamma_beta_ratio: 0.5\nmax_length: 1024\noutput_dir: x\n",
        encoding="utf-8",
    )
    answer: Any = check([str(tmp_path / "simpo.yaml")], gpu="h100", gpus=8)
    assert answer.algorithm == "simpo"


# ------------------------------------------------------------------------------------------------------ run by others


def test_a_command_behind_a_lone_double_hyphen_is_the_one_that_trains(tmp_path: Path) -> None:
    inner = f"accelerate launch --mixed_precision bf16 --num_processes 8 train.py {TRAINER}"
    text = f"python mason.py --num_nodes 8 --gpus 8 -- {inner}"
    assert "--gpus (line of run.sh: train.py is started by mason.py" in refused(tmp_path, text)
    found = checked(tmp_path, text, gpus=64).estimate
    assert (found.hardware.gpus, found.strategy.precision) == (64, "bf16-autocast")
    behind = f"python mason.py --gpus 8 -- source setup.sh \\&\\& python train.py {TRAINER}"
    assert checked(tmp_path, behind, gpus=8).estimate.hardware.gpus == 8


@pytest.mark.parametrize(
    "text",
    [
        f'if nvidia-smi | grep -q H100; then pr="--bf16"; else pr="--fp16"; fi\ntorchrun pretrain_gpt.py {SIZES} $pr',
        f'if [ $1 = a ]; then pr="--bf16"; elif [ $1 = b ]; then pr="--fp16"; fi\ntorchrun pretrain_gpt.py {SIZES} $pr',
    ],
)
def test_flags_that_hang_on_a_run_are_asked_for(tmp_path: Path, text: str) -> None:
    said = refused(tmp_path, text)
    assert "run.sh hands $pr to its training, whose words only a run knows" in said
    assert (
        checked(tmp_path, f"{text} --log-interval 1".replace("$pr", "--bf16")).estimate.strategy.precision
        == "bf16-mixed"
    )


def test_words_of_several_lines_are_named_in_one(tmp_path: Path) -> None:
    said = refused(tmp_path, f"A=(\n  --seed 1\n  $(--layers 2\n)\n)\ntorchrun pretrain_gpt.py {SIZES} ${{A[@]}}")
    assert "whose words only a run knows" in said
    assert "\n" not in said


def test_the_arguments_of_a_script_are_given_in_a_copy(tmp_path: Path) -> None:
    text = (
        f'if [ $1 = a ]; then pr="--bf16"; elif [ $1 = b ]; then pr="--fp16"; fi\ntorchrun pretrain_gpt.py {SIZES} $pr'
    )
    assert checked(tmp_path, f"set -- a\n{text}").estimate.strategy.precision == "bf16-mixed"
    assert checked(tmp_path, f"set -- b\n{text}").estimate.strategy.precision == "fp16-mixed"


def test_more_arguments_that_nobody_sets_are_none(tmp_path: Path) -> None:
    answer = checked(tmp_path, f"torchrun --nproc_per_node 8 train.py {TRAINER} $EXTRA")
    assert answer.estimate.workload.micro_batch == 4


def test_a_config_that_a_run_names_is_asked_for_as_a_file(tmp_path: Path) -> None:
    text = "accelerate launch --num_processes 8 scripts/run_r1_grpo.py --config $1"
    assert "--model (line of run.sh: config is '$1', a file that only a run knows: give it as a FILE, or" in refused(
        tmp_path, text
    )


CONFIGS = {
    "axolotl train $1 --micro-batch-size 2": "axolotl YAML",
    "llamafactory-cli train configs/$NAME.yaml": "LLaMA-Factory YAML",
    "tune run --nproc_per_node 8 full_finetune_distributed --config $CONFIG batch_size=2": "torchtune YAML",
    "litgpt finetune_full --config $CONFIG --train.micro_batch_size 2": "litgpt YAML",
    "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file $1 --training.seq_len 512": "torchtitan TOML",
    "trl sft --config $1": "arguments of Transformers' Trainer",
    "uv run examples/run_grpo.py --config $CONFIG_PATH policy.model_name=Qwen/Qwen3-1.7B": "NeMo-RL YAML",
    "python -m verl.trainer.main_ppo --config-path $P --config-name x actor_rollout_ref.rollout.n=5": "verl's config",
    f"accelerate launch --config_file $1 train.py {TRAINER} --output_dir x": "Accelerate YAML",
}


@pytest.mark.parametrize(("line", "title"), CONFIGS.items())
def test_a_model_does_not_stand_for_the_rest_of_a_config_that_a_run_names(
    tmp_path: Path, line: str, title: str
) -> None:
    """All else that such a file says would be a default of its framework's."""
    given = {"model": "llama-3.1-8b", "gpus": 8, "seq_len": 2048, "micro_batch": 1}
    assert f"pass that file ({title}) as a FILE too" in refused(tmp_path, line, **given)


@pytest.mark.parametrize("order", [1, -1])
def test_a_config_that_a_run_names_is_read_beside_its_script(tmp_path: Path, order: int) -> None:
    """The command's flags have their way over it, in whichever order both are given."""
    (tmp_path / "run.sh").write_text("axolotl train $1 --micro-batch-size 2\n", encoding="utf-8")
    text = "base_model: meta-llama/Llama-2-7b-hf\nsequence_len: 1024\nmicro_batch_size: 1\nbf16: true\ndatasets: []\n"
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}', encoding="utf-8")
    files = [str(tmp_path / name) for name in ("run.sh", "own.yaml", "ds.json")][::order]
    answer = check(files, gpu="h100", gpus=8)
    assert isinstance(answer, Check)
    assert (answer.estimate.workload.micro_batch, answer.estimate.workload.seq_len) == (2, 1024)


TRL = "trl sft --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True --max_length 2048"


@pytest.mark.parametrize(
    ("options", "framework", "zero", "gpus"),
    [
        ("--accelerate_config zero3 --num_processes 4", "deepspeed", 3, 4),
        ("--accelerate_config zero2", "deepspeed", 2, 8),
        ("--accelerate_config fsdp1", "hf", 3, 8),
        ("--accelerate_config multi_gpu --num_processes 2", "ddp", 0, 2),
        ("--accelerate_config single_gpu", "hf", 0, 1),
        ("--num_processes 4", "ddp", 0, 4),
        ("--accelerate_config own.yaml --num_processes 16 --num_machines 2", "deepspeed", 1, 16),
    ],
)
def test_what_trl_hands_to_accelerate(tmp_path: Path, options: str, framework: str, zero: int, gpus: int) -> None:
    """A config by the name that TRL ships it under, or by its path (cli/accelerate_config.py of TRL 1.16)."""
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {zero_stage: 1}\n"
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    job = checked(tmp_path, f"{TRL} {options}\n").estimate
    assert (str(job.strategy.framework).partition("@")[0], job.strategy.zero, job.hardware.gpus) == (
        framework, zero, gpus,
    )  # fmt: skip


def test_accelerate_of_a_yaml_for_trl(tmp_path: Path) -> None:
    """What is said in the YAML goes to the launcher too; the command's own flags have their way over it."""
    text = (
        "model_name_or_path: meta-llama/Llama-2-7b-hf\nmax_length: 2048\naccelerate_config: zero3\nnum_processes: 4\n"
    )
    (tmp_path / "sft.yaml").write_text(f"{text}output_dir: out\nbf16: true\n", encoding="utf-8")
    for flags, gpus in (("", 4), ("--num_processes 2", 2)):
        job = checked(tmp_path, f"trl sft --config sft.yaml {flags}\n").estimate
        assert (job.strategy.zero, job.hardware.gpus) == (3, gpus)


def test_an_accelerate_config_that_a_run_names_is_asked_for(tmp_path: Path) -> None:
    said = refused(tmp_path, f"{TRL} --accelerate_config $LAYOUT\n", gpus=8)
    assert "a config that only a run knows (LAYOUT): pass that file (Accelerate YAML)" in said


def test_a_job_of_fms_hf_tuning_is_asked_what_its_ranks_share(tmp_path: Path) -> None:
    """Its table for `accelerate launch` was ignored, and the job counted as DDP."""
    text = '{"model_name_or_path": "meta-llama/Llama-2-7b-hf", "output_dir": "o", "per_device_train_batch_size": 1,'
    text += ' "max_length": 2048, "num_train_epochs": 1, "accelerate_launch_args": {"use_fsdp": true}}'
    (tmp_path / "job.json").write_text(text, encoding="utf-8")
    with pytest.raises(MissingError, match="accelerate_launch_args says what ranks share"):
        check([str(tmp_path / "job.json")], gpu="h100", gpus=8)


def test_a_short_flag_behind_the_script_is_no_part_of_its_name(tmp_path: Path) -> None:
    answer = checked(tmp_path, f"torchrun --nproc_per_node 8 train.py -s {TRAINER} --num_train_epochs 1")
    assert answer.estimate.workload.micro_batch == 4


@pytest.mark.parametrize("root", ["$(realpath $HERE/..)", '$(dirname "$HERE")', '$(cd "$HERE/.." && pwd)'])
def test_a_folder_that_is_found_from_a_variable_is_known(tmp_path: Path, root: str) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    script = tmp_path / "jobs" / "run.sh"
    script.write_text(
        f'HERE=$(cd "$(dirname "$0")" && pwd)\nROOT={root}\n'
        f"deepspeed --num_gpus 8 train.py {TRAINER} --output_dir x --deepspeed $ROOT/ds.json\n"
    )
    answer = check([str(script), str(tmp_path / "ds.json")], gpu="h100")
    assert isinstance(answer, Check)
    assert answer.estimate.strategy.zero == 2


@pytest.mark.parametrize("name", ["/data/qwen/7B", "/ckpt/70b", "../models/v1.5-8B/"])
def test_a_folder_that_says_a_size_alone_is_no_preset(tmp_path: Path, name: str) -> None:
    text = f"torchrun --nproc_per_node 8 train.py {TRAINER}".replace("meta-llama/Llama-2-7b-hf", name)
    if "v1.5" in name:
        assert "give --model" in refused(tmp_path, text) or "--model (" in refused(tmp_path, text)
    else:
        assert "by its size alone" in refused(tmp_path, text)


def test_an_unknown_micro_batch_is_asked_for_by_an_option_that_there_is(tmp_path: Path) -> None:
    text = f"torchrun --nproc_per_node 8 train.py {TRAINER}".replace("batch_size 4", "batch_size $(cat mbs)")
    assert "--micro-batch (" in refused(tmp_path, text)
    assert "--accelerated" not in refused(tmp_path, text)
    assert checked(tmp_path, text, micro_batch=2).estimate.workload.micro_batch == 2


# ------------------------------------------------------------------------------------------------ what is beside it


def test_a_config_that_a_framework_ships_is_known(tmp_path: Path) -> None:
    """LLaMA-Factory ff6d4d12e examples/deepspeed/ds_z3_offload_config.json; jobs name it by this path."""
    lines = [
        "model_name_or_path: Qwen/Qwen2.5-7B", "stage: sft", "do_train: true", "finetuning_type: full", "bf16: true",
        "cutoff_len: 2048", "per_device_train_batch_size: 1", "deepspeed: examples/deepspeed/ds_z3_offload_config.json",
    ]  # fmt: skip
    (tmp_path / "job.yaml").write_text("\n".join(lines), encoding="utf-8")
    answer = check([str(tmp_path / "job.yaml")], gpu="h100", gpus=8)
    assert (answer.estimate.strategy.zero, set(answer.estimate.strategy.offload)) == (3, {"optimizer", "params"})
    messages = [finding.message for file in answer.files for finding in file.findings]
    assert any("is not there: counted as LLaMA-Factory ff6d4d12e ships it" in message for message in messages)


def test_sub_groups_of_no_elements_are_the_tensors() -> None:
    """Axolotl's zero3.json has sub_group_size 0: DeepSpeed then ends a group behind each tensor."""
    words = {"model": "llama-2-7b", "gpu": "a100-80g", "gpus": 2, "framework": "deepspeed", "zero": 3, "seq_len": 512}
    answer = memcalc.estimate(**words, settings={"strategy.sub_group_size": 0})
    copy = next(term.bytes for term in answer.terms if term.name == "fp32 copy of the gradients")
    assert copy == 4 * 32000 * 4096 // 2


def test_images_in_post_training_are_refused_before_anything_is_asked_for(tmp_path: Path) -> None:
    text = "accelerate launch --num_processes 8 grpo.py --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct --max_steps 9"
    with pytest.raises(ObjectiveError, match="its tokens depend on the size of its images"):
        checked(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"torchrun pretrain_gpt.py --num-experts 64 64 128 {SIZES}", "a number of experts for each layer"),
        (
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm reward_model.rm_type=prime",
            "trains a second model as its reward",
        ),
    ],
)
def test_what_is_counted_once_for_all_is_refused_where_it_is_not(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(ObjectiveError, match=words):
        checked(tmp_path, line)


def test_megatrons_arguments_under_deepspeeds_third_stage_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1}',
        encoding="utf-8",
    )
    text = f"deepspeed --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json {SIZES}"
    assert "ZeRO-3 what Megatron's arguments describe" in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("tokenizer", "vocab"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50304),
        ("--vocab-file $1 --merge-file $2", 50304),
        ("--vocab-file v --merge-file data/gpt2-merges.txt", 50304),
        ("--vocab-file v", 0),
        ("--vocab-file v --merge-file gpt-neox-20b/merges.txt", 0),
    ],
)
def test_gpt2s_tokenizer_has_gpt2s_vocabulary(tmp_path: Path, tokenizer: str, vocab: int) -> None:
    """pretrain_gpt.py takes GPT2BPETokenizer by default: 50257 tokens, filled up to a multiple of 128."""
    text = f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES.replace('--vocab-size 50257', tokenizer)} --bf16"
    if not vocab:
        assert "--set model.vocab=" in refused(tmp_path, text)
        return
    sizes = SIZES.replace("50257", str(vocab))
    whole = checked(tmp_path, f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} --bf16").estimate
    assert checked(tmp_path, text).estimate.peak == whole.peak


def test_other_work_of_any_length_is_named_in_one_short_line(tmp_path: Path) -> None:
    """A quote that is never closed makes the rest of a script one word, and a script may start a hundred programs."""
    path = tmp_path / "run.sh"
    path.write_text("swift 'eval\n" + "--flag value \\\n" * 200 + "'\n", encoding="utf-8")
    with pytest.raises(IdleError, match="starts no training") as one:
        memcalc.check([str(path)])
    path.write_text("".join(f"python eval_{n}.py\n" for n in range(100)), encoding="utf-8")
    with pytest.raises(IdleError, match=r"eval_0\.py, eval_1\.py, eval_2\.py, eval_3\.py, …") as many:
        memcalc.check([str(path)])
    assert all("\n" not in str(error.value) and len(str(error.value)) < 200 for error in (one, many))
