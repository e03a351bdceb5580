"""Accelerate's YAML: what is read by hand from Accelerate 1.15's sources, and its own loader beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import FOLDER, JOB, check, codes, config_of, read, there_and_back, words
from drawing import drawn
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import memcalc
from memcalc.convert.formats import get_format, render_config
from memcalc.convert.formats.base import ConfigJob
from memcalc.errors import CombinationError, InputError
from memcalc.preflight.job import estimate_merged
from memcalc.preflight.merge import merge

RANKS = {"gpus": 8, "gpus_per_node": 8, "nodes": 1, "mixed": "bf16"}
SAID: dict[str, dict[str, Any]] = {
    "fsdp_template.yaml": {
        "gpus": 2, "gpus_per_node": 2, "mixed": "bf16", "zero": 3, "strategy.loading": "rank-0",
        "strategy.state_dict": "sharded",
    },
    "multi_gpu.yaml": {"gpus": 2, "gpus_per_node": 2, "mixed": "bf16", "engine": "ddp"},
    "multi_node.yaml": {"gpus": 16, "gpus_per_node": 8, "nodes": 2, "engine": "ddp"},
    "deepspeed_file.yaml": {"gpus": 2, "gpus_per_node": 2, "engine": "deepspeed"},
    "fp8.yaml": {"gpus": 1, "mixed": "bf16", "engine": "trainer"},
    "cp.yaml": {
        **RANKS, "engine": "fsdp2", "zero": 3, "cp": 8, "recompute": "full", "strategy.checkpoint": "non-reentrant",
        "strategy.loading": "every-rank", "strategy.state_dict": "sharded", "checkpoints_by_fsdp2": True,
    },
    "tp_hsdp.yaml": {**RANKS, "engine": "fsdp2", "zero": 2, "tp": 2, "dp_replicate": 2},
    "trl_fsdp1.yaml": {
        **RANKS, "engine": "fsdp1", "offload": ("params",), "strategy.loading": "rank-0", "strategy.state_dict": "full",
    },
    "trl_single_gpu.yaml": {"gpus": 1, "mixed": "bf16", "engine": "trainer"},
    "trl_zero2.yaml": {**RANKS, "engine": "deepspeed", "zero": 2, "offload": ("optimizer",), "offload_to": "cpu"},
    "trl_zero3.yaml": {**RANKS, "engine": "deepspeed", "zero": 3, "accumulation": 4, "strategy.state_dict": "full"},
    "compiled.yaml": {**RANKS, "engine": "fsdp2", "zero": 3, "compile": "blocks"},
}  # fmt: skip
FOUND = {
    "fp8.yaml": {("MC002", "mixed_precision"), ("MC002", "fp8_config")},
    "trl_fsdp1.yaml": {
        ("MC115", "fsdp_config.fsdp_reshard_after_forward"), ("MC002", "fsdp_config.fsdp_forward_prefetch"),
    },
    "compiled.yaml": {("MC002", "fsdp_config.fsdp_auto_wrap_policy")},
}  # fmt: skip


def accelerate() -> Any:
    """Return Accelerate, or skip."""
    return pytest.importorskip("accelerate", reason="pip install accelerate")


@pytest.mark.parametrize("name", sorted(SAID))
def test_reads_what_the_file_says(name: str) -> None:
    config = read(f"accelerate/{name}")[0]
    found = words(config)
    found.pop("accelerated")
    assert found == SAID[name]
    assert codes(config) == FOUND.get(name, set())


def test_each_file_of_the_folder_is_here() -> None:
    assert {path.name for path in (FOLDER / "accelerate").glob("*")} == set(SAID)


@pytest.mark.parametrize("name", sorted(SAID))
def test_its_own_loader_takes_the_files(name: str) -> None:
    accelerate()
    from accelerate.commands.config.config_args import load_config_from_file

    found = load_config_from_file(str(FOLDER / "accelerate" / name))
    config = read(f"accelerate/{name}")[0]
    if found.num_processes > 0 and str(found.distributed_type.value) != "NO":
        assert config.get("gpus") == found.num_processes
    assert config.get("nodes", 1) == found.num_machines


def test_a_config_that_is_named_is_read() -> None:
    configs = read("accelerate/deepspeed_file.yaml", "deepspeed/zero3_offload_auto.json")
    assert [config.format for config in configs] == ["accelerate", "deepspeed"]


def test_the_plugin_takes_the_strategy_from_sharding_strategy_alone() -> None:
    """The reason for MC115: with FSDP 1 `reshard_after_forward` has no say."""
    accelerate()
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import ShardingStrategy

    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, reshard_after_forward="SHARD_GRAD_OP")
    assert (plugin.sharding_strategy or plugin.reshard_after_forward) == ShardingStrategy.FULL_SHARD
    assert FullyShardedDataParallelPlugin(fsdp_version=2).reshard_after_forward is True


def test_launch_has_the_defaults_that_are_read() -> None:
    accelerate()
    from accelerate.commands.launch import launch_command_parser

    told = vars(launch_command_parser().parse_args(["script.py"]))
    assert told["fsdp_version"] == "1"
    assert told["fsdp_sharding_strategy"] == "FULL_SHARD"
    assert told["fsdp_reshard_after_forward"] == "true"
    assert told["fsdp_auto_wrap_policy"] is None
    assert told["fsdp_activation_checkpointing"] == "false"
    assert told["parallelism_config_cp_comm_strategy"] == "allgather"


ULYSSES = """\
distributed_type: DEEPSPEED
num_processes: 8
mixed_precision: bf16
deepspeed_config:
  zero_stage: 3
parallelism_config:
  parallelism_config_sp_size: 4
  parallelism_config_dp_shard_size: 2
"""


def test_ranks_of_ulysses_share_a_sequence(tmp_path: Path) -> None:
    """Accelerate 1.15 parallelism_config.py: sp_size ranks of DeepSpeed; their weights are divided over all eight."""
    found = config_of(tmp_path / "accelerate.yaml", ULYSSES, "accelerate")
    assert words(found) | {"cp": 4, "cp_kind": "a2a", "zero": 3} == words(found)
    assert not {finding.code for finding in found.findings}
    given = {"model": "qwen3-4b", "gpu": "h100", "seq_len": 32768, "micro_batch": 1, "global_batch": 16}
    estimate = estimate_merged(merge([found], given), ())
    assert (estimate.strategy.framework, estimate.strategy.cp, estimate.strategy.dp) == ("deepspeed", 4, 2)
    assert estimate.workload.accumulation_steps == 8
    assert estimate.components.parameters < 4_022_468_096 * 2 * 1.1 / 8


def test_deepspeed_says_how_many_ranks_share_a_sequence(tmp_path: Path) -> None:
    """DeepSpeed 0.18.2 runtime/config.py: a batch is of as many ranks fewer."""
    text = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "sequence_parallel_size": 4}'
    found = config_of(tmp_path / "ds_config.json", text, "deepspeed")
    assert words(found)["cp"] == 4
    given = {"model": "qwen3-4b", "gpu": "h100", "gpus": 8, "seq_len": 32768, "precision": "bf16-mixed"}
    estimate = estimate_merged(merge([found], given), ())
    assert (estimate.strategy.cp, estimate.strategy.cp_kind, estimate.strategy.dp) == (4, "a2a", 2)


def test_wrong_values_are_named(tmp_path: Path) -> None:
    for text, said in (
        ("distributed_type: FSPD\n", "distributed_type"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 3\n", "fsdp_version"),
        ("distributed_type: MULTI_GPU\nnum_processes: many\n", "num_processes"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 5\n", "zero_stage"),
    ):
        with pytest.raises(InputError, match=said):
            config_of(tmp_path / "a.yaml", text, "accelerate")


def test_an_unknown_key_is_warned_of_with_the_nearest(tmp_path: Path) -> None:
    table = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_ofload_params: true\n"
    text = f"distributed_type: FSDP\nfsdp_config:\n{table}"
    config = config_of(tmp_path / "a.yaml", text, "accelerate")
    (finding,) = config.findings
    assert (finding.code, finding.suggestion) == ("MC001", "did you mean fsdp_config.fsdp_offload_params?")


def test_a_no_without_quotes_is_false_to_yaml_and_none_to_accelerate(tmp_path: Path) -> None:
    """``yaml.safe_load`` gives False, which is none of the kinds that ``commands/launch.py`` starts anything for."""
    lead = "compute_environment: LOCAL_MACHINE\n"
    plain = config_of(tmp_path / "a.yaml", f"{lead}distributed_type: no\nmixed_precision: no\n", "accelerate")
    quoted = config_of(tmp_path / "a.yaml", f"{lead}distributed_type: 'NO'\nmixed_precision: 'no'\n", "accelerate")
    assert words(plain) == words(quoted)
    assert words(plain)["engine"] == "trainer"


def test_fp16_of_before_0_12(tmp_path: Path) -> None:
    config = config_of(tmp_path / "a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 4\nfp16: true\n", "accelerate")
    assert config.get("mixed") == "fp16"


PLANS = st.fixed_dictionaries(
    {
        "framework": st.sampled_from(["hf", "fsdp1", "fsdp2", "ddp", "deepspeed"]),
        "gpus": st.sampled_from([1, 8, 16]),
        "zero": st.sampled_from([0, 1, 2, 3]),
        "tp": st.sampled_from([1, 2]),
        "cp": st.sampled_from([1, 2]),
        "precision": st.sampled_from(["bf16-mixed", "bf16-autocast", "fp32", "bf16"]),
        "recompute": st.sampled_from(["none", "full"]),
        "offload": st.sampled_from(["none", "params", "optimizer", "optimizer,params"]),
        "compile": st.sampled_from(["none", "model", "blocks"]),
        "settings": st.just({"strategy.reduce_dtype": "bf16"}),
    }
)


@given(plan=PLANS)
@drawn(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_and_back(tmp_path: Path, plan: dict[str, Any]) -> None:
    """What the YAML cannot say stands beside: batches, what the script loads, and recomputation outside of FSDP."""
    plan = {key: value for key, value in plan.items() if not (key in {"tp", "cp"} and value == 1)}
    sharded = plan["framework"] in {"fsdp1", "fsdp2"} or (plan["framework"] == "hf" and plan["zero"])
    if sharded and plan["precision"] == "bf16-mixed":
        plan["autocast"] = True
    if plan.get("cp"):
        plan["cp_kind"] = "a2a" if plan["framework"] == "deepspeed" else "allgather"
    try:
        before = memcalc.estimate(**JOB, **plan)
        render_config(get_format("accelerate"), ConfigJob.of(before))
    except InputError:
        return
    if plan["precision"] == "bf16-autocast" and (sharded or plan["framework"] == "deepspeed"):
        return  # Accelerate has FSDP's and DeepSpeed's own mixed precision there
    beside: dict[str, Any] = {
        "micro_batch": before.strategy.micro_batch, "global_batch": before.workload.global_batch,
        "framework": before.strategy.framework, "settings": plan["settings"],
        "weights": "bf16" if plan["precision"] == "bf16" else "fp32",
    }  # fmt: skip
    if not sharded:
        beside["recompute"] = plan["recompute"]
    there_and_back(tmp_path, ("accelerate",), plan, beside)


def test_its_own_loader_takes_what_is_written(tmp_path: Path) -> None:
    accelerate()
    from accelerate.commands.config.config_args import load_config_from_file

    for framework, zero, ranks in (
        ("fsdp2", 2, 1),
        ("hf", 3, 1),
        ("ddp", 0, 1),
        ("deepspeed", 3, 1),
        ("deepspeed", 3, 4),
    ):
        precision = "bf16-mixed" if zero else "bf16-autocast"
        plan = memcalc.estimate(**JOB, framework=framework, gpus=8, zero=zero, cp=ranks, precision=precision)
        path = tmp_path / f"{framework}.yaml"
        path.write_text(render_config(get_format("accelerate"), ConfigJob.of(plan)))
        found = load_config_from_file(str(path))
        assert found.num_processes == 8
        assert found.mixed_precision == "bf16"
        assert yaml.safe_load(path.read_text())["distributed_type"] == found.distributed_type.value
        assert int(found.parallelism_config.get("parallelism_config_sp_size", 1)) == ranks


def test_what_it_cannot_say_is_refused() -> None:
    plan = memcalc.estimate(**JOB, framework="megatron", gpus=8, tp=2)
    with pytest.raises(CombinationError, match="framework"):
        render_config(get_format("accelerate"), ConfigJob.of(plan))


def test_fsdp_casts_up_what_was_loaded_in_16_bits() -> None:
    """Accelerate's fsdp2_prepare_model and prepare_model; DDP leaves the weights as they are, under autocast."""
    told: dict[str, Any] = {"micro_batch": 1, "weights": "bf16"}
    assert check("accelerate/cp.yaml", **told).strategy.precision == "bf16-mixed"
    plan = check("accelerate/multi_gpu.yaml", **told).strategy
    assert (plan.precision, plan.autocast) == ("bf16", True)
    assert check("accelerate/multi_gpu.yaml", micro_batch=1, weights="fp32").strategy.precision == "bf16-autocast"
    assert check("accelerate/trl_zero3.yaml", **told).strategy.precision == "bf16-mixed"


def test_the_release_of_accelerate_says_what_fsdp_2_checkpoints() -> None:
    """1.8 to 1.14 wrap each module of a block, 1.15 the block (utils/fsdp_utils.py, fsdp2_apply_ac): MC104 says so."""
    told: dict[str, Any] = {"micro_batch": 1, "weights": "bf16"}
    found = {era: check("accelerate/cp.yaml", **told, framework=f"fsdp2{era}").strategy for era in ("", "@2026-06")}
    assert [plan.recompute for plan in found.values()] == ["full", "submodules"]
    assert check("accelerate/cp.yaml", **told, framework="fsdp2@2025-05").strategy.recompute == "full"
