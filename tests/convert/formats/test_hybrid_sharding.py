"""Replicas of the shards in every config that has them: read, written, and the same plan to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import finetuning
import pytest
from command_lines import keywords
from config_files import config_of

import memcalc
from memcalc.errors import CombinationError, InputError
from memcalc.handoff import exported
from memcalc.handoff.saved import estimate_of, saved_plan
from memcalc.preflight import check

JOB: dict[str, Any] = {
    "model": "llama-3-8b", "gpu": "h100", "gpus": 32, "seq_len": 2048, "global_batch": 64, "micro_batch": 1,
    "recompute": "full", "offload": "none", "tp": 1, "pp": 1, "cp": 1,
}  # fmt: skip
WRITTEN = [
    # format, framework, replicas, what is written in which file
    ("fsdp2", "fsdp2", 4, "REPLICAS = 4"),
    ("torchtitan", "torchtitan@2026-02", 4, "data_parallel_shard_degree = 8\ndata_parallel_replicate_degree = 4"),
    ("accelerate", "fsdp2", 2, "dp_replicate_size: 2, parallelism_config_dp_shard_size: 16"),
    ("accelerate", "fsdp1", 4, "fsdp_sharding_strategy: HYBRID_SHARD,"),
    ("axolotl", "fsdp2", 4, "dp_replicate_size: 4\ndp_shard_size: 8"),
    ("megatron", "megatron", 4, "--num-distributed-optimizer-instances 4"),
]


@pytest.mark.parametrize(("to", "framework", "replicas", "said"), WRITTEN)
def test_what_is_written_is_read_back_as_the_plan(
    to: str, framework: str, replicas: int, said: str, tmp_path: Path
) -> None:
    words = {**JOB, "framework": framework, "dp_replicate": replicas}
    words |= {"zero": 1} if framework == "megatron" else {"zero": 3}
    words |= {"precision": "bf16", "autocast": True} if to == "axolotl" else {}  # whose FSDP 2 casts nothing to fp32
    saved = saved_plan(memcalc.plan(**words, top=1), 1)
    done = exported(saved, to)
    assert any(said in text for text in done.files.values())
    for path, text in done.files.items():
        (tmp_path / path).write_text(text, encoding="utf-8")
    given = keywords(done.check)
    assert not {"dp_replicate", "strategy.dp_replicate"} & {*given, *given["settings"]}
    again = check([str(tmp_path / name) for name in given.pop("files")], **given).estimate
    plan = estimate_of(saved)
    assert again.strategy.dp_replicate == plan.strategy.dp_replicate == replicas
    assert again.strategy.dp == 32
    decided = {"peak", "components"} if to in ("axolotl", "accelerate") else set()  # how gradients accumulate
    for part in {"peak", "components", "workload", "hardware"} - decided:
        assert getattr(again, part) == getattr(plan, part), part


READ = [
    # format, text, flags of the check, replicas
    ("accelerate", ("distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nfsdp_config:\n"
        "  fsdp_sharding_strategy: NO_SHARD\n"), {"zero": 3}, 16),
    ("accelerate", ("distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nfsdp_config:\n"
        "  fsdp_sharding_strategy: HYBRID_SHARD_ZERO2\n"), {"zero": 2}, 2),
    ("axolotl", ("base_model: meta-llama/Meta-Llama-3-8B\nmicro_batch_size: 1\nfsdp: [no_shard, auto_wrap]\n"
        "fsdp_config:\n  offload_params: false\n"), {"zero": 3, "framework": "hf"}, 16),
    ("llamafactory", ("model_name_or_path: meta-llama/Meta-Llama-3-8B\ntemplate: llama3\ndo_train: true\n"
        "fsdp: no_shard\nfsdp_config: {fsdp_version: 1}\n"), {"zero": 3, "framework": "hf"}, 16),
    ("foundry", ("model: {name: hf_causal_lm, pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B}\n"
        "train_loader: {name: text}\noptimizer: {name: decoupled_adamw}\nmax_duration: 1ba\n"
        "fsdp_config: {sharding_strategy: NO_SHARD, activation_checkpointing: true}\n"),
        {"zero": 3, "framework": "fsdp1", "checkpoint": "reentrant-inside"}, 16),
    ("accelerate", ("distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\nfsdp_config:\n  fsdp_version: 2\n"
        "parallelism_config:\n  parallelism_config_dp_replicate_size: 4\n"
        "  parallelism_config_dp_shard_size: 4\n"), {"zero": 3}, 4),
    ("axolotl", ("base_model: meta-llama/Meta-Llama-3-8B\nmicro_batch_size: 1\nfsdp_version: 2\ndp_shard_size: 4\n"
        "fsdp_config:\n  offload_params: false\n"), {"zero": 3}, 4),
    ("axolotl", ("base_model: meta-llama/Meta-Llama-3-8B\nmicro_batch_size: 1\nfsdp_version: 2\ndp_replicate_size: 2\n"
        "fsdp_config:\n  offload_params: false\n"), {"zero": 3}, 2),
    ("torchtune", ("model:\n  _component_: torchtune.models.llama3.llama3_8b\ndata_parallel_replicate_dim: 2\n"
        "data_parallel_shard_dim: 8\nbatch_size: 1\n"), {"framework": "torchtune"}, 2),
    ("litgpt", ("model_name: Meta-Llama-3-8B\ncommand: pretrain\ndevices: 8\nnum_nodes: 2\ntrain:\n"
        "  micro_batch_size: 1\n  global_batch_size: 16\nprecision: bf16-true\n"), {"framework": "litgpt"}, 2),
    ("torchtitan", ('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\n[parallelism]\n'
        "data_parallel_replicate_degree = 4\n"), {"zero": 3}, 4),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "found", "replicas"), READ)
def test_what_is_said_is_read(form: str, text: str, found: dict[str, Any], replicas: int, tmp_path: Path) -> None:
    path = tmp_path / f"job.{'toml' if form == 'torchtitan' else 'yaml'}"
    path.write_text(text, encoding="utf-8")
    given = {"model": "llama-3-8b", "gpus": 16, "seq_len": 2048, "micro_batch": 1, "global_batch": 16}
    answer = check([str(path)], gpu="h100", **given)
    assert answer.estimate.strategy.dp_replicate == replicas
    assert {name: getattr(answer.estimate.strategy, name) for name in found} == found
    assert not [one for file in answer.files for one in file.findings if "replicate" in one.field]


def test_fsdp_2_has_no_strategy_that_shards_nothing() -> None:
    text = "model_name_or_path: x\ntemplate: llama3\nfsdp: no_shard\nfsdp_config: {fsdp_version: 2}\n"
    with pytest.raises(InputError, match="full_shard or shard_grad_op"):
        finetuning.read_text(text)


def test_fsdp_1_names_what_it_has_for_stage_0() -> None:
    with pytest.raises(CombinationError, match="--dp-replicate"):
        memcalc.estimate(model="llama-3.2-1b", gpu="h100", gpus=8, framework="fsdp1", zero=0)


def test_torchtitans_replicas_without_shards_are_ddp(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\n[training]\nlocal_batch_size = 1\n[parallelism]\n'
    text += "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1\n"
    config = config_of(tmp_path / "train.toml", text, "torchtitan")
    assert [finding.code for finding in config.findings if "replicate" in finding.field] == ["MC002"]
    assert "dp_replicate" not in {said.name for said in config.settings}


def test_fsdp1_has_one_replica_a_node() -> None:
    words = {**JOB, "framework": "fsdp1", "zero": 3, "dp_replicate": 2}
    with pytest.raises(CombinationError, match="one replica per node: 4"):
        exported(saved_plan(memcalc.plan(**words, top=1), 1), "accelerate")


@pytest.mark.parametrize(("gpus", "says"), [(8, ["dp_shard_size is 16, which does not divide 8 GPUs"]), (32, [])])
def test_shards_that_no_number_of_replicas_makes_the_ranks(gpus: int, says: list[str], tmp_path: Path) -> None:
    """In axolotl 0.18 (utils/distributed.py) a mesh is of 16 ranks, or of two replicas of 16."""
    text = "base_model: meta-llama/Meta-Llama-3-8B\nmicro_batch_size: 1\nfsdp_version: 2\ndp_shard_size: 16\n"
    path = tmp_path / "job.yaml"
    path.write_text(f"{text}fsdp_config:\n  offload_params: false\n", encoding="utf-8")
    answer = check([str(path)], gpu="h100", gpus=gpus, seq_len=2048)
    found = [one for file in answer.files for one in file.findings if one.field == "dp_shard_size"]
    assert [one.message.partition(";")[0] for one in found] == says
    assert answer.estimate.strategy.dp_replicate == max(gpus // 16, 1)
