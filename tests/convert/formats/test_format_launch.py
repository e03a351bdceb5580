"""Launch scripts: what they ask of Slurm, how many ranks they start, and which configs they hand over.

Expected words follow from the scripts by hand, by the manual of sbatch and the launchers' own documentation.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

from memcalc.convert.config import Config
from memcalc.convert.directives import Request, options_of, sbatch_options, seconds, variables
from memcalc.convert.document import parse_document, read_document
from memcalc.convert.edits import edit_document
from memcalc.convert.formats import get_format
from memcalc.convert.launchers import launch_of
from memcalc.convert.shell import read_script
from memcalc.errors import FileError, InputError, MemcalcError, MissingError, ObjectiveError, UnknownNameError
from memcalc.preflight import check

CONFIGS = Path(__file__).parents[2] / "configs" / "launch"
LAUNCH = get_format("launch")


def read(name: str) -> Config:
    return LAUNCH.read(read_document(CONFIGS / name))


def of(text: str, name: str = "run.sh") -> Config:
    return LAUNCH.read(parse_document(Path(name), text, "shell"))


def words(config: Config) -> dict[str, Any]:
    return {one.name: one.value for one in config.settings}


def asked(config: Config) -> dict[str, str]:
    return {one.name: one.unknown for one in config.settings if one.unknown}


EXAMPLES: dict[str, tuple[dict[str, Any], list[tuple[str, str, dict[str, Any]]]]] = {
    # name: words, then for each reference its format, its path, and some of the values that are handed over
    "bloom-176b.slurm": (
        {"nodes": 48, "gpus_per_node": 8, "gpu": "a100", "time_limit": 100 * 3600},
        [
            (
                "megatron",
                "",
                {
                    "tensor_model_parallel_size": "4",
                    "pipeline_model_parallel_size": "12",
                    "num_layers": "70",
                    "hidden_size": "14336",
                    "micro_batch_size": "2",
                    "global_batch_size": "2048",
                    "rampup_batch_size": ["192", "16", "9_765_625"],
                    "bf16": True,
                    "checkpoint_activations": True,
                    "exit_duration_in_mins": "5990",
                },
            ),
            (
                "deepspeed",
                "",
                {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2048, "bf16": {"enabled": True}},
            ),
        ],
    ),
    "gpt2-hf-deepspeed.slurm": (
        {"nodes": 16, "gpus_per_node": 4, "gpu": "v100-32g", "time_limit": 1800},
        [
            ("trainer", "", {"per_device_train_batch_size": "10", "fp16": True, "model_type": "gpt2"}),
            (
                "deepspeed",
                "",
                {"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": "auto", "initial_scale_power": 8}},
            ),
        ],
    ),
    "megatron-llama3-8b.sh": (
        {"nodes": 1, "gpus_per_node": 8},
        [
            (
                "megatron",
                "",
                {
                    "num_layers": "32",
                    "num_query_groups": "8",
                    "seq_length": "8192",
                    "fp8_format": "hybrid",
                    "fp8_param_gather": True,
                    "use_distributed_optimizer": True,
                    "vocab_size": "128256",
                    "mock_data": True,
                },
            ),
            ("launch", "", {"gpu": "h100-80g"}),
        ],
    ),
    "torchtitan-multinode.slurm": (
        {
            "nodes": 4,
            "gpus_per_node": 8,
            "gpu": "h100",
            "host_memory": 8 * 200 << 30,
            "strategy.expandable_segments": True,
        },
        [
            (
                "torchtitan",
                "",
                {"job": {"config_file": "./train_configs/llama3_8b.toml"}, "training": {"local_batch_size": "2"}},
            )
        ],
    ),
    "torchtitan-run-train.sh": (
        {"gpus_per_node": 4},
        [
            (
                "torchtitan",
                "",
                {
                    "job": {"config_file": "./llama3_8b.toml"},
                    "training": {"seq_len": "4096"},
                    "parallelism": {"tensor_parallel_degree": "2"},
                },
            )
        ],
    ),
    "handbook-sft.slurm": (
        {"nodes": 1, "gpus_per_node": 8},
        [
            (
                "accelerate",
                "recipes/accelerate_configs/deepspeed_zero3.yaml",
                {"num_processes": "8", "num_machines": "1"},
            ),
            ("trainer", "recipes/zephyr-7b-beta/sft/config_full.yaml", {}),
        ],
    ),
    "accelerate-fsdp.slurm": (
        {"nodes": 4, "gpus_per_node": 4, "gpu": "a100", "time_limit": 2 * 3600 - 60, "own_arguments": None},
        [
            (
                "accelerate",
                "",
                {
                    "distributed_type": "FSDP",
                    "mixed_precision": "bf16",
                    "num_processes": "16",
                    "fsdp_config": {
                        "fsdp_version": "2",
                        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                        "fsdp_activation_checkpointing": "true",
                    },
                },
            )
        ],
    ),
    "deepspeed-megatron.sh": (
        {"nodes": 1, "gpus_per_node": 2},
        [
            ("megatron", "", {"num_layers": "24", "micro_batch_size": "4", "fp16": True}),
            (
                "deepspeed",
                "",
                {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}},
            ),
        ],
    ),
    "qwen-lora.sh": (
        {"nodes": 1, "gpus_per_node": None},
        [
            (
                "trainer",
                "",
                {"model_name_or_path": "Qwen/Qwen-7B", "gradient_accumulation_steps": "8", "use_lora": True},
            ),
            ("deepspeed", "finetune/ds_config_zero2.json", {}),
        ],
    ),
    "axolotl.slurm": ({"nodes": 2, "gpus_per_node": 8}, [("axolotl", "train.yaml", {"micro_batch_size": "4"})]),
    "llamafactory-fsdp.sh": (
        {},
        [
            ("accelerate", "examples/accelerate/fsdp_config.yaml", {}),
            ("llamafactory", "examples/extras/fsdp_qlora/llama3_lora_sft.yaml", {}),
        ],
    ),
    "llamafactory-cli.sh": (
        {"nodes": 2, "gpus_per_node": 4},
        [("llamafactory", "examples/train_full/qwen3_full_sft.yaml", {"per_device_train_batch_size": "4"})],
    ),
    "torchtune.sh": (
        {"nodes": 1, "gpus_per_node": 8},
        [
            (
                "torchtune",
                "./8B_full.yaml",
                {"batch_size": "4", "recipe": "full_finetune_distributed", "enable_activation_checkpointing": "True"},
            )
        ],
    ),
    "litgpt.sh": (
        {},
        [("litgpt", "lora.yaml", {"command": "finetune_lora", "train": {"micro_batch_size": "2"}, "devices": "4"})],
    ),
}


def test_every_example_is_here() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_shapes(name: str) -> None:
    config = read(name)
    expected, references = EXAMPLES[name]
    assert words(config) == expected
    assert [(one.format, one.path) for one in config.references] == [(form, path) for form, path, _ in references]
    for reference, (_, _, values) in zip(config.references, references, strict=True):
        given = reference.document or reference.over
        found = given.data if given else {}
        assert {key: found.get(key) for key in values} == values


def test_what_only_a_run_tells_is_asked_for() -> None:
    assert asked(read("qwen-lora.sh")) == {"gpus_per_node": "$(python -c 'import torch; print(torch.c"}


def test_the_name_of_a_script_of_many_lines_is_one_line_where_it_is_asked_for() -> None:
    """A quote that is closed far below; found by tests/fuzz.py."""
    config = of("torchrun --nproc_per_node 8 'tools/\nmy_run.py' --width 3\n")
    said = [*asked(config).values(), *(finding.message for finding in config.findings)]
    assert any("tools/ my_run.py" in text for text in said)
    assert not any("\n" in text for text in said)


def test_a_file_that_the_script_writes_is_not_looked_for() -> None:
    for name in ("gpt2-hf-deepspeed.slurm", "bloom-176b.slurm", "deepspeed-megatron.sh"):
        config = read(name)
        assert all("deepspeed_config" not in one.document.data for one in config.references if one.document)
        assert "deepspeed" not in config.references[0].document.data  # type: ignore[union-attr]


def test_a_here_document_is_edited_where_its_values_are_written() -> None:
    config = read("deepspeed-megatron.sh")
    flags, written = (one.document for one in config.references)
    assert flags is not None
    assert written is not None
    text = config.document.text
    assert edit_document(written, {("train_micro_batch_size_per_gpu",): 2}) == text.replace(
        "MICRO_BATCH=4", "MICRO_BATCH=2"
    )
    assert edit_document(flags, {("micro_batch_size",): 2}) == text.replace("MICRO_BATCH=4", "MICRO_BATCH=2")
    assert edit_document(written, {("train_batch_size",): 32}) == text.replace(
        '"train_batch_size" : 64', '"train_batch_size" : 32'
    )
    assert written.line(("train_batch_size",)) == text[: text.index('"train_batch_size"')].count("\n") + 1


def test_values_that_a_run_decides_are_unknown_in_a_here_document() -> None:
    text = 'cat <<E > d.json\n{"train_batch_size": $B, "zero_optimization": {"stage": $(cat s)}, "x": "a$B"}\nE\n'
    config = of(
        f"{text}deepspeed --num_gpus 2 t.py --deepspeed_config d.json --per_device_train_batch_size 1 --output_dir o\n"
    )
    written = config.references[-1].document
    assert written is not None
    assert written.data == {"zero_optimization": {}}
    assert set(written.unknown) == {("train_batch_size",), ("zero_optimization", "stage"), ("x",)}


# -------------------------------------------------------------------------------------------------------------- Slurm


@pytest.mark.parametrize(
    ("lines", "nodes", "each", "whole"),
    [
        ("--nodes=2 --gres=gpu:8", 2, 8, 16),
        ("-N 2 --gres=gpu:a100:4,tmp:5G", 2, 4, 8),
        ("-N2 --gpus-per-node=h100:8", 2, 8, 16),
        ("--gpus=16 --nodes=2", 2, 8, 16),
        ("-G 16", None, None, 16),
        ("--gpus=16 --ntasks=16", None, None, 16),
        ("--nodes=4 --ntasks=4 --gpus-per-task=8", 4, 8, 32),
        ("--nodes=2 --ntasks-per-node=8 --gpus-per-task=1", 2, 8, 16),
        ("--ntasks=16 --ntasks-per-node=4 --gres=gpu:4", 4, 4, 16),
        ("--nodes=2 --tres-per-task=gres/gpu:4", 2, 4, 8),
        ("--nodes=2 --gpus-per-socket=2 --sockets-per-node=2", 2, 4, 8),
        ("--gres=gpu", 1, 1, 1),
        ("--gres=gpu:2,gpu:v100:2 --nodes=1-1", 1, 4, 4),
        ("--nodes=2-4 --gres=gpu:8", None, 8, None),
        ("--nodes=2 --gres=none --gpus-per-node=4", 2, 4, 8),
        ("--nodes=3", 3, None, None),
    ],
)
def test_gpus_that_are_asked_for(lines: str, nodes: int | None, each: int | None, whole: int | None) -> None:
    request = Request(sbatch_options("#!/bin/bash\n" + "".join(f"#SBATCH {one}\n" for one in [lines])))
    assert (request.nodes, request.gpus[1], request.gpus[2]) == (nodes, each, whole)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("--mem=100G --nodes=2", 100 << 30),
        ("--mem=4096", 4096 << 20),
        ("--mem=0", None),
        ("--mem-per-gpu=50G --gres=gpu:4", 200 << 30),
        ("--mem-per-cpu=2G --cpus-per-task=8 --ntasks-per-node=4", 64 << 30),
    ],
)
def test_host_memory_is_of_a_node(lines: str, expected: int | None) -> None:
    assert Request(sbatch_options(f"#SBATCH {lines}\n")).memory[1] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:30:15", 9015),
        ("1-2", 26 * 3600),
        ("1-2:30", 26 * 3600 + 1800),
        ("1-2:30:15", 26 * 3600 + 1815),
        ("UNLIMITED", None),
    ],
)
def test_limits_of_time(text: str, expected: int | None) -> None:
    assert seconds(text) == expected


def test_lines_end_at_the_first_command_and_comments_are_passed() -> None:
    text = "#!/bin/bash\n##SBATCH --nodes=9\n# c\n\n#SBATCH --nodes=2   # two\n#SBATCH --gres=gpu:4\n"
    text += "cd x\n#SBATCH --nodes=7\n"
    options = sbatch_options(text)
    assert {name: option.value for name, option in options.items()} == {"nodes": "2", "gres": "gpu:4"}
    assert text[options["nodes"].begin : options["nodes"].end] == "2"


def test_later_lines_have_their_way_and_quotes_are_taken_off() -> None:
    options = sbatch_options("#SBATCH --nodes=2 --job-name='a b'\n#SBATCH -N 3 -t 10:00 -C \"a100&nvlink\"\n")
    assert {name: option.value for name, option in options.items()} == {
        "nodes": "3", "job-name": "a b", "time": "10:00", "constraint": "a100&nvlink",
    }  # fmt: skip


def test_variables_of_the_job_are_those_that_slurm_sets() -> None:
    text = "#SBATCH --nodes=4 --ntasks-per-node=2 --gpus-per-node=a100:8 --cpus-per-task=6\n"
    found = variables(Request(sbatch_options(text)))
    assert {name: value for name, value in found.items() if value is not None} == {
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NNODES": "4",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_NTASKS": "8",
        "SLURM_NPROCS": "8",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_GPUS_PER_NODE": "a100:8",
        "SLURM_CPUS_PER_TASK": "6",
    }
    assert found["SLURM_JOB_ID"] is None
    assert "SLURM_NTASKS" not in variables(Request(sbatch_options("#SBATCH --nodes=2\n")))


def test_options_of_srun_end_where_its_command_begins() -> None:
    found, count = options_of(
        (word, 0) for word in ["-N2", "--exclusive", "-l", "--gres", "gpu:4", "python", "-n", "3"]
    )
    assert ({name: option.value for name, option in found.items()}, count) == (
        {"nodes": "2", "exclusive": "", "label": "", "gres": "gpu:4"},
        5,
    )


def test_every_option_of_sbatch_with_hyphens_is_one_name() -> None:
    text = "#SBATCH --nodes=1 --gpus-per-socket=4 --sockets-per-node=2 --kill-on-invalid-dep=yes\n"
    config = of(text + "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2\n")
    assert not [finding.field for finding in config.findings if finding.field.startswith("#SBATCH")]


def test_an_option_of_sbatch_that_does_not_exist_is_a_warning_with_the_nearest() -> None:
    config = of("#SBATCH --gpus-per-nod=8\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2\n")
    assert [(one.code, one.suggestion) for one in config.findings] == [
        ("MC001", "did you mean #SBATCH --gpus-per-node?")
    ]


@pytest.mark.parametrize(
    ("constraint", "gpu"),
    [
        ("a100", "a100"),
        ("v100-32g", "v100-32g"),
        ("h100&nvlink", "h100"),
        ("haswell", None),
        ("a100|h100", None),
        ("ib", None),
    ],
)
def test_a_constraint_names_a_gpu_if_it_is_called_so(constraint: str, gpu: str | None) -> None:
    config = of(f"#SBATCH --gres=gpu:8 -C '{constraint}'\nsrun python pretrain_gpt.py\n")
    assert words(config).get("gpu") == gpu


def test_several_types_of_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="2 types"):
        of("#SBATCH --gres=gpu:a100:4,gpu:v100:4\npython train.py\n")


# ---------------------------------------------------------------------------------------------------------- launchers

GPT = "pretrain_gpt.py --num-layers 2 --hidden-size 8"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"torchrun --nproc-per-node=8 {GPT}", {"gpus_per_node": 8, "nodes": 1}),
        (f"torchrun --standalone --nnodes 2 --nproc_per_node 4 {GPT}", {"gpus_per_node": 4, "nodes": 2}),
        (f"torchrun {GPT}", {"gpus_per_node": 1, "nodes": 1}),
        (f"torchrun --nnodes 2:4 --nproc_per_node 8 {GPT}", {"gpus_per_node": 8, "nodes": 2}),
        (f"CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc-per-node=gpu {GPT}", {"gpus_per_node": 3, "nodes": 1}),
        (f"torchrun --nproc-per-node auto {GPT}", {"gpus_per_node": None, "nodes": 1}),
        (f"python -m torch.distributed.launch --use_env --nproc_per_node=4 {GPT}", {"gpus_per_node": 4, "nodes": 1}),
        (f"python3.11 -u -m torch.distributed.run --nproc-per-node 4 {GPT}", {"gpus_per_node": 4, "nodes": 1}),
        (f"deepspeed --num_gpus 4 --num_nodes 2 {GPT}", {"gpus_per_node": 4, "nodes": 2}),
        (f"deepspeed --include localhost:4,5,6 {GPT}", {"gpus_per_node": 3, "nodes": 1}),
        (f"deepspeed --include 'a:0,1@b:0,1' {GPT}", {"gpus_per_node": 2, "nodes": 2}),
        (f"deepspeed --hostfile h {GPT}", {"gpus_per_node": None, "nodes": None}),
        (f"deepspeed -H h --num_nodes 2 --num_gpus 8 {GPT}", {"gpus_per_node": 8, "nodes": 2}),
        (f"python {GPT}", {"gpus": 1}),
        (f"srun -N 2 --ntasks-per-node=8 --gpus-per-node=8 python -u {GPT}", {"nodes": 2, "gpus_per_node": 8}),
        (f"srun -N 2 --ntasks-per-node=8 python {GPT}", {"nodes": 2, "gpus_per_node": 8}),
        (f"nohup env X=1 torchrun --nproc_per_node 2 {GPT} &", {"gpus_per_node": 2, "nodes": 1}),
        (f"apptainer exec --nv img.sif torchrun --nproc_per_node 2 {GPT}", {"gpus_per_node": 2, "nodes": 1}),
        (f"docker run --gpus all --name x image torchrun --nproc_per_node 2 {GPT}", {"gpus_per_node": 2, "nodes": 1}),
        (f"time uv run torchrun --nproc_per_node 2 {GPT} 2>&1 | tee log", {"gpus_per_node": 2, "nodes": 1}),
        ("CUDA_VISIBLE_DEVICES=0,1 tune run full_finetune_single_device batch_size=2", {"gpus": 1}),
        ("tune run --nproc_per_node 2 lora_finetune_distributed --config a.yaml", {"gpus_per_node": 2, "nodes": 1}),
        ("axolotl train a.yml", {}),
    ],
)  # fmt: skip
def test_ranks(command: str, expected: dict[str, Any]) -> None:
    config = of(command + "\n")
    assert words(config) == expected
    assert len(config.references) == 1


def test_what_slurm_says_stands_where_the_launcher_leaves_it_to_the_run() -> None:
    text = "#SBATCH --nodes=2 --gres=gpu:4\nG=$(nvidia-smi -L | wc -l)\n"
    text += "srun torchrun --nnodes $N --nproc_per_node $G t.py a.yaml\n"
    assert words(of(text)) == {"nodes": 2, "gpus_per_node": 4}
    assert asked(of(text.replace("#SBATCH", "#"))) == {"nodes": "N", "gpus_per_node": "$(nvidia-smi -L | wc -l)"}


@pytest.mark.parametrize(
    ("command", "form", "path", "over"),
    [
        ("accelerate launch -m axolotl.cli.train a.yml --bf16=true", "axolotl", "a.yml", {"bf16": "true"}),
        ("python -m axolotl.cli.train a.yml", "axolotl", "a.yml", None),
        ("axolotl train a.yml --launcher torchrun -- --nproc_per_node=8", "axolotl", "a.yml", None),
        ("axolotl train a.yml --launcher=accelerate --bf16=true", "axolotl", "a.yml", {"bf16": "true"}),
        ("torchrun src/train.py a.yaml", "llamafactory", "a.yaml", None),
        ("llamafactory-cli train --stage sft --finetuning_type lora", "llamafactory", "", {"stage": "sft"}),
        ("torchrun run_sft.py r/config.yaml --bf16 true", "trainer", "r/config.yaml", {"bf16": "true"}),
        ("torchrun sft.py --config c.yaml --bf16", "trainer", "c.yaml", {"bf16": True}),
        ("trl sft --config c.yaml --bf16", "trainer", "c.yaml", {"bf16": True}),
        ("python run_clm.py args.json", "trainer", "args.json", None),
        ("python run_clm.py --output_dir o --per_device_train_batch_size 4", "trainer", "", {"output_dir": "o"}),
        ("tune run lora_finetune_single_device --config ./a.yaml seed=2", "torchtune", "./a.yaml", {"seed": "2"}),
        ("litgpt pretrain p --config c.yaml", "litgpt", "c.yaml", {"model_name": "p", "command": "pretrain"}),
        ("torchrun -m torchtitan.train --module m --config 8b", "torchtitan", "", {"module": "m", "config": "8b"}),
        ("torchrun train.py --job.config_file a.toml", "torchtitan", "", {"job": {"config_file": "a.toml"}}),
        ("torchrun pretrain_gpt.py --micro-batch-size 4", "megatron", "", {"micro_batch_size": "4"}),
    ],
)  # fmt: skip
def test_scripts_and_whose_arguments_they_take(command: str, form: str, path: str, over: dict[str, Any] | None) -> None:
    reference = of(command + "\n").references[-1]
    assert (reference.format, reference.path) == (form, path)
    given = reference.document or reference.over
    found = given.data if given else None
    assert found is over is None or (found is not None and over is not None and over.items() <= found.items())


def test_options_of_accelerate_go_where_its_yaml_has_them() -> None:
    config = of(
        "accelerate launch --config_file a.yaml --use_deepspeed --zero-stage 3 --offload_optimizer_device=cpu "
        "--deepspeed_config_file ds.json --mixed_precision $P --num_processes 8 train.py args.yaml\n"
    )
    over = config.references[0].over
    assert over is not None
    assert over.data == {
        "distributed_type": "DEEPSPEED",
        "num_processes": "8",
        "deepspeed_config": {"zero_stage": "3", "offload_optimizer_device": "cpu", "deepspeed_config_file": "ds.json"},
    }
    assert over.unknown == {("mixed_precision",): "P"}


def test_commands_that_do_not_train_are_passed() -> None:
    text = "python prepare_data.py\ntorchrun --nproc_per_node 2 tools/convert_ckpt.py --num-layers 2\n"
    text += "torchrun --nproc_per_node 4 t.py a.yaml\n"
    assert words(of(text + "python evaluate.py\n")) == {"gpus_per_node": 4, "nodes": 1}


def test_one_of_several_trainings_is_chosen() -> None:
    text = "torchrun --nproc_per_node 2 a.py a.yaml\ntorchrun --nproc_per_node 4 b.py b.yaml\n"
    with pytest.raises(
        MissingError, match=r"starts 2 jobs \(1: torchrun a\.py of line 1; 2: torchrun b\.py of line 2\)"
    ):
        of(text)
    config = of(f"#MEMCALC --launch 2\n{text}")
    assert words(config)["gpus_per_node"] == 4
    assert [one.path for one in config.references] == ["b.yaml"]
    with pytest.raises(InputError, match="must be from 1 to 2"):
        of(f"#MEMCALC --launch 3\n{text}")
    again = "if [ -f x ]; then\n  torchrun a.py a.yaml\nelse\n  torchrun a.py a.yaml\nfi\n"
    assert [one.path for one in of(again).references] == ["a.yaml"]


def test_arguments_of_no_known_framework_are_a_warning() -> None:
    config = of("torchrun --nproc_per_node 2 train.py --bs 8\n")
    assert [one.code for one in config.findings] == ["MC001"]
    assert not config.references


def test_a_script_that_is_called_after_a_method_is_no_training_on_the_next_token() -> None:
    """What main.py does is not in its arguments, which are its own; those of TRL tell it themselves."""
    command = "accelerate launch main.py --model_name_or_path x --output_dir y --learning_rate 1e-5"
    with pytest.raises(ObjectiveError, match="trains by ORPO"):
        of(command, "run_orpo.sh")
    assert of(command + " --max_prompt_length 512 --beta 0.1", "run_dpo.sh")
    assert of(command, "sft_before_dpo.sh")


def test_a_policy_beside_an_engine_is_no_pretraining() -> None:
    """Trainers of slime take Megatron-LM's flags beside those of the rollout."""
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --tensor-model-parallel-size 2"
    with pytest.raises(ObjectiveError, match="beside the engine that generates"):
        of(f"ray job submit -- python3 train.py {flags} --rollout-batch-size 32 --advantage-estimator grpo")


@pytest.mark.parametrize(
    ("script", "trainer"),
    [
        ("run_train.py --config-file config.yaml", "nanotron"),
        ("examples/nlp/language_modeling/megatron_gpt_pretraining.py trainer.devices=8", "NeMo"),
        ("scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config", "Megatron-Bridge"),
    ],
)
def test_a_trainer_whose_arguments_are_not_read_is_declined_by_name(script: str, trainer: str) -> None:
    with pytest.raises(ObjectiveError, match=f"starts {trainer}"):
        of(f"torchrun --nproc_per_node 8 {script}")


def test_a_text_that_starts_nothing_is_refused() -> None:
    with pytest.raises(FileError, match="must start a training"):
        of("hello world\n")


# -------------------------------------------------------------------------------------------------- words and variables


def test_lines_of_memcalc_have_their_way() -> None:
    text = (
        "#MEMCALC --model llama-3-8b --gpu 'a100-80g' --seq-len 8k --set strategy.reduce_dtype=bf16 --no-sp\n"
        "#MEMCALC --zero=3 # why\n# MEMCALC --model x\ntorchrun t.py a.yaml\n"
    )
    reference = of(text).references[-1]
    assert reference.document is not None
    assert words(LAUNCH.read(reference.document)) == {
        "model": "llama-3-8b", "gpu": "a100-80g", "seq_len": 8000, "sp": False, "zero": 3,
        "strategy.reduce_dtype": "bf16",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "error", "said"),
    [
        ("--modle x", UnknownNameError, "did you mean '--model'"),
        ("--set strategy.reduce_dtpye=bf16", UnknownNameError, "did you mean 'strategy.reduce_dtype'"),
        ("--set x", InputError, "NAME=VALUE"),
        ("--seq-len many", InputError, "--seq-len"),
        ("--optimizer adamww", InputError, "did you mean"),
        ("--model", InputError, "must have a value"),
        ("--seq-len $N", InputError, "nothing expands it"),
        ("model x", UnknownNameError, "must be an option"),
        ("--calibration ../secret.toml", InputError, "must lie in the script.s folder"),
        ("--calibration /etc/hostname", InputError, "must lie in the script.s folder"),
    ],
)
def test_wrong_words_are_refused_by_name(line: str, error: type[MemcalcError], said: str) -> None:
    with pytest.raises(error, match=said.replace("$", r"\$")) as caught:
        of(f"#MEMCALC {line}\ntorchrun t.py a.yaml\n")
    assert "run.sh" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected", "codes"),
    [
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", {"strategy.expandable_segments": True}, []),
        ("export PYTORCH_ALLOC_CONF=expandable_segments:False", {"strategy.expandable_segments": False}, []),
        (
            "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128,roundup_power2_divisions:[256:1,>:8]",
            {},
            ["MC002", "MC002"],
        ),
        ("export PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync", {}, ["MC002"]),
        ("export PYTORCH_CUDA_ALLOC_CONF=backend:native,expandable_segment:True", {}, ["MC001"]),
        ("export CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8", {"strategy.blas_workspace": (4096 * 2 + 16 * 8) * 1024}, []),
        ("export NCCL_NVLS_ENABLE=1 NCCL_DEBUG=INFO CUDA_DEVICE_MAX_CONNECTIONS=1", {}, ["MC002"]),
        ("export NCCL_NVLS_ENABLE=0 CUDA_LAUNCH_BLOCKING=0", {}, []),
    ],
)
def test_environment(line: str, expected: dict[str, Any], codes: list[str]) -> None:
    config = of(f"{line}\ntorchrun t.py a.yaml\n")
    assert {key: value for key, value in words(config).items() if key.startswith("strategy")} == expected
    assert [one.code for one in config.findings] == codes


@pytest.mark.parametrize("line", ["CUBLAS_WORKSPACE_CONFIG=4096", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:1"])
def test_wrong_variables_are_refused_by_name(line: str) -> None:
    with pytest.raises(InputError, match=line.partition("=")[0]):
        of(f"export {line}\ntorchrun t.py a.yaml\n")


JOB = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gres=gpu:a100:8
#MEMCALC --model llama-2-7b --gpu a100-80g --seq-len 4096 --recompute full
MBS=32   # as large as fits
GAS=1
cat <<EOF > ds.json
{
  "train_micro_batch_size_per_gpu": $MBS,
  "gradient_accumulation_steps": $GAS,
  "zero_optimization": {"stage": 2},
  "bf16": {"enabled": true}
}
EOF
srun deepspeed --num_gpus $SLURM_GPUS_ON_NODE train.py --deepspeed_config ds.json
"""


def test_a_job_that_does_not_fit_is_edited_where_its_variables_are_set(tmp_path: Path) -> None:
    path = tmp_path / "run.slurm"
    path.write_text(JOB, encoding="utf-8")
    found = check([str(path)])
    estimate = found.estimate
    assert (found.verdict, estimate.workload.global_batch, estimate.hardware.gpus) == ("does-not-fit", 256, 8)
    assert (estimate.strategy.micro_batch, estimate.strategy.zero, estimate.strategy.precision) == (32, 2, "bf16-mixed")
    assert not [one for file in found.files for one in file.findings if one.code == "MC003"]
    assert found.fix is not None
    micro, steps = (
        int(re.findall(rf"^{name}=(\d+)", found.fix.edits[0].text, re.MULTILINE)[0]) for name in ("MBS", "GAS")
    )
    assert micro * steps == 32
    assert micro < 32
    assert found.fix.edits[0].text == JOB.replace("MBS=32", f"MBS={micro}").replace("GAS=1", f"GAS={steps}")
    path.write_text(found.fix.edits[0].text, encoding="utf-8")
    assert check([str(path)]).verdict != "does-not-fit"


@given(
    st.integers(1, 64),
    st.integers(1, 16),
    st.permutations(["--rdzv_backend c10d", "--standalone", "--tee 3", "--max-restarts=0"]),
    st.sampled_from(["", "srun -N 3 -l ", "nohup ", "env A=1 "]),
)
@drawn(60)
def test_options_in_any_order(nodes: int, each: int, others: list[str], lead: str) -> None:
    options = [f"--nnodes={nodes}", f"--nproc_per_node {each}", *others]
    launch = launch_of(read_script(f"{lead}torchrun {' '.join(options)} t.py --x 1\n").commands[0])
    assert launch is not None
    assert launch.script == "t.py"
    assert [launch.options[name].value.text for name in ("nnodes", "nproc_per_node")] == [str(nodes), str(each)]  # type: ignore[union-attr]


BARE = (
    "deepspeed --num_gpus 8 train.py --model_name_or_path gpt2 --do_train --per_device_train_batch_size 4 "
    "--block_size 512 --output_dir o --fp16 --deepspeed"
)
"""DeepSpeed's own switch (deepspeed.add_config_arguments), which its examples pass beside --deepspeed_config."""


def test_a_bare_switch_of_deepspeed_takes_its_config_from_beside(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}')
    (tmp_path / "run.sh").write_text(f"{BARE} --deepspeed_config ds.json\n")
    strategy = check([str(tmp_path / "run.sh")], gpu="h100").estimate.strategy
    assert (strategy.framework, strategy.zero) == ("deepspeed", 2)
    (tmp_path / "run.sh").write_text(f"{BARE}\n")
    with pytest.raises(MissingError, match=r"--zero .*deepspeed is on, and its config is not given"):
        check([str(tmp_path / "run.sh")], gpu="h100")
    assert check([str(tmp_path / "run.sh")], gpu="h100", zero=1).estimate.strategy.zero == 1


def test_what_expr_prints_is_worked_out() -> None:
    text = "each=4\nnodes=2\ntorchrun --nproc_per_node $(expr $each \\* $nodes) t.py --do_train --fp16\n"
    assert words(of(text))["gpus_per_node"] == 8
    (asked,) = [one for one in of(text.replace("each=4", "")).settings if one.name == "gpus_per_node"]
    assert asked.value is None
