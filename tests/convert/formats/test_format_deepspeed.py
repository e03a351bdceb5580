"""DeepSpeed's JSON: what is read by hand from DeepSpeed 0.19's sources, and DeepSpeed's own parser beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_files import FOLDER, JOB, check, codes, config_of, defaults, read, there_and_back, words
from drawing import drawn
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import memcalc
from memcalc.convert.formats import get_format, render_config
from memcalc.convert.formats.base import ConfigJob
from memcalc.errors import InputError
from memcalc.handoff.written import write_plan

FILES = tuple(sorted(path.name for path in (FOLDER / "deepspeed").glob("*.json")))
SAID: dict[str, dict[str, Any]] = {
    "zero2.json": {
        "micro_batch": 4, "accumulation": 1, "train_batch": 32, "mixed": "fp16", "zero": 2, "optimizer": "adamw",
        "optimizer_impl": "foreach", "strategy.reduce_bucket_size": 200_000_000, "strategy.overlap_comm": True,
    },
    "zero3_offload_auto.json": {
        "zero": 3, "offload": ("optimizer", "params"), "offload_to": "cpu", "optimizer": "adamw",
        "optimizer_impl": "fused", "strategy.sub_group_size": 10**9, "strategy.max_live_parameters": 10**9,
        "strategy.overlap_comm": True, "strategy.state_dict": "full",
        "filled_in": (
            "strategy.reduce_bucket_size", "strategy.zero_prefetch_bucket", "strategy.persistence_threshold",
        ),
    },
    "megatron_zero2.json": {
        "accumulation": 1, "train_batch": 8, "mixed": "fp16", "zero": 2, "strategy.reduce_bucket_size": 7_000_000,
        "strategy.partition_activations": True,
    },
    "perf_zero1.json": {"accumulation": 2, "train_batch": 32, "mixed": "fp16", "zero": 1},
    "compile_zero3.json": {
        "train_batch": 8, "mixed": "bf16", "zero": 3, "strategy.overlap_comm": False, "optimizer": "adamw",
        "optimizer_impl": "fused",
    },
    "autotuning_zero3.json": {
        "micro_batch": 1, "zero": 3, "strategy.reduce_bucket_size": 500_000_000, "strategy.overlap_comm": False,
        "strategy.zero_prefetch_bucket": 500_000_000, "strategy.persistence_threshold": 1_000_000,
        "strategy.max_live_parameters": 10**9, "strategy.sub_group_size": 10**12,
    },
    "fp32.json": {"micro_batch": 3, "train_batch": 24, "optimizer": "adamw", "optimizer_impl": "fused"},
    "nvme.json": {
        "micro_batch": 2, "mixed": "bf16", "zero": 3, "offload": ("optimizer", "params"), "offload_to": "nvme",
    },
    "pure_bf16.json": {
        "micro_batch": 1, "accumulation": 4, "precision": "bf16", "zero": 1, "optimizer": "adamw",
        "optimizer_impl": "fused", "strategy.grad_accum_dtype": "bf16",
    },
    "autocast.json": {
        "micro_batch": 4, "precision": "bf16-autocast", "zero": 3, "optimizer": "lion", "optimizer_impl": "fused",
    },
    "bf16_states.json": {
        "micro_batch": 1, "accumulation": 1, "precision": "bf16", "autocast": True, "zero": 3, "optimizer": "adamw",
        "optimizer_impl": "fused", "strategy.overlap_comm": True, "strategy.reduce_bucket_size": 50_000_000,
        "strategy.persistence_threshold": 0,
    },
    "zeropp.json": {
        "micro_batch": 4, "mixed": "bf16", "zero": 3, "strategy.reduce_bucket_size": 10_000_000,
        "strategy.overlap_comm": True,
    },
    "autotp.json": {
        "micro_batch": 4, "mixed": "bf16", "zero": 1, "tp": 4, "optimizer": "adamw", "optimizer_impl": "fused",
    },
}  # fmt: skip

NOT_COUNTED = {
    "autotuning_zero3.json": ("zero_optimization.contiguous_gradients",),
    "compile_zero3.json": ("zero_optimization.contiguous_gradients",),
    "megatron_zero2.json": (
        "zero_optimization.allgather_bucket_size", "activation_checkpointing.contiguous_memory_optimization",
    ),
    "nvme.json": ("aio.block_size", "aio.queue_depth"),
    "zero2.json": ("zero_optimization.allgather_bucket_size",),
    "zeropp.json": tuple(
        f"zero_optimization.zero_{what}" for what in ("hpz_partition_size", "quantized_weights", "quantized_gradients")
    ),
}  # fmt: skip
"""By file what differs from DeepSpeed's default and is in no figure."""


def parser() -> Any:
    """Return DeepSpeed's own parser."""
    reason = "pip install --no-deps deepspeed py-cpuinfo hjson einops ninja"
    pytest.importorskip("deepspeed", reason=reason)
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig


@pytest.mark.parametrize("name", FILES)
def test_reads_what_the_file_says(name: str) -> None:
    (config,) = read(f"deepspeed/{name}")
    found = words(config)
    found.pop("engine", None)
    assert found == SAID[name]
    assert codes(config) == {("MC002", field) for field in NOT_COUNTED.get(name, ())}


@pytest.mark.parser
@pytest.mark.parametrize("name", FILES)
def test_its_own_parser_resolves_the_same(name: str) -> None:
    data = json.loads((FOLDER / "deepspeed" / name).read_text())
    if '"auto"' in json.dumps(data):
        pytest.skip("the Trainer fills in what is auto before DeepSpeed reads it")
    if "train_micro_batch_size_per_gpu" in data:
        data.pop("train_batch_size", None)  # here there is one rank
    found = parser()(data)
    (config,) = read(f"deepspeed/{name}")
    zero = found.zero_config
    assert config.get("zero") == zero.stage
    assert config.get("mixed", "no") == ("fp16" if found.float16_config.enabled else "bf16" if (
        found.bfloat16_config.enabled and not found.bfloat16_config.bf16_optimizer_states) else "no")  # fmt: skip
    for word, value in (
        ("strategy.reduce_bucket_size", zero.reduce_bucket_size),
        ("strategy.zero_prefetch_bucket", zero.prefetch_bucket_size),
        ("strategy.persistence_threshold", zero.param_persistence_threshold),
        ("strategy.sub_group_size", zero.sub_group_size),
        ("strategy.overlap_comm", zero.overlap_comm),
    ):
        assert config.get(word, value) == value
    if config.get("accumulation") is not None:
        assert config.get("accumulation") == found.gradient_accumulation_steps


@pytest.mark.parser
def test_its_defaults_are_memcalcs() -> None:
    from memcalc.frameworks.habits import Zero

    found, own = parser()({"train_micro_batch_size_per_gpu": 1}).zero_config, Zero()
    assert (own.bucket, own.gather_bucket, own.prefetch_bucket, own.persistence, own.max_live, own.sub_group) == (
        found.reduce_bucket_size, found.allgather_bucket_size, found.prefetch_bucket_size,
        found.param_persistence_threshold, found.max_live_parameters, found.sub_group_size,
    )  # fmt: skip


@pytest.mark.parser
def test_every_field_of_zero_is_known(tmp_path: Path) -> None:
    parser()
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    tables = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    data: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    for table, kind in tables.items():
        data[table] = {field.alias or name: None for name, field in kind.model_fields.items()}
    config = config_of(tmp_path / "ds.json", json.dumps(data), "deepspeed")
    assert not [field for code, field in codes(config) if code == "MC001"]


def test_the_defaults_are_shown() -> None:
    (config,) = read("deepspeed/fp32.json")
    assert defaults(config) == {"engine": "deepspeed", "mixed": "no", "zero": 0}
    (config,) = read("deepspeed/nvme.json")
    assert defaults(config)["accumulation"] == 1


def test_auto_follows_the_models_width() -> None:
    """Llama 2 7B has a hidden size of 4096 (Accelerate's accelerator.py, hidden_size_based_keys)."""
    plan = check("deepspeed/zero3_offload_auto.json", gpus=8, micro_batch=1, precision="bf16-mixed").strategy
    assert plan.reduce_bucket_size == 4096 * 4096
    assert plan.zero_prefetch_bucket == int(0.9 * 4096 * 4096)
    assert plan.persistence_threshold == 40_960


def test_the_micro_batch_follows_from_the_whole() -> None:
    plan = check("deepspeed/perf_zero1.json", gpus=4)
    assert (plan.workload.micro_batch, plan.workload.accumulation_steps) == (4, 2)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"train_micro_batch_size_per_gpu": "four"}, "train_micro_batch_size_per_gpu"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled"),
        ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "offload_optimizer.device"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, data: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        config_of(tmp_path / "ds.json", json.dumps(data), "deepspeed")


def test_removed_and_unknown_keys_are_warned_of(tmp_path: Path) -> None:
    data = {
        "zero_optimization": {"stage": 3, "mics_shard_size": 8, "stage3_max_live_parameter": 1},
        "amp": {"enabled": True},
    }
    config = config_of(tmp_path / "ds.json", json.dumps(data), "deepspeed")
    assert codes(config) == {
        ("MC002", "zero_optimization.mics_shard_size"), ("MC002", "amp"),
        ("MC001", "zero_optimization.stage3_max_live_parameter"),
    }  # fmt: skip
    (unknown,) = [finding for finding in config.findings if finding.code == "MC001"]
    assert "zero_optimization.stage3_max_live_parameters" in unknown.suggestion


PLANS = st.fixed_dictionaries(
    {
        "framework": st.just("deepspeed"),
        "gpus": st.sampled_from([2, 8]),
        "zero": st.sampled_from([0, 1, 2, 3]),
        "precision": st.sampled_from(["bf16-mixed", "fp16-mixed", "fp32", "bf16-autocast", "bf16"]),
        "optimizer": st.sampled_from(["adamw", "lion", "sgd", "sgd-momentum", "muon"]),
        "micro_batch": st.sampled_from([1, 3]),
        "global_batch": st.sampled_from([24, 48]),
        "recompute": st.sampled_from(["none", "full"]),
        "offload": st.sampled_from(["none", "optimizer", "optimizer,params"]),
        "settings": st.fixed_dictionaries(
            {},
            optional={
                "strategy.reduce_bucket_size": st.sampled_from([10**7, 5 * 10**8]),
                "strategy.overlap_comm": st.booleans(),
                "strategy.grad_accum_dtype": st.just("fp32"),
                "strategy.sub_group_size": st.just(10**8),
                "strategy.autocast": st.booleans(),
            },
        ),
    }
)


@given(plan=PLANS)
@drawn(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_there_and_back(tmp_path: Path, plan: dict[str, Any]) -> None:
    if plan["optimizer"].startswith("sgd"):  # DeepSpeed takes torch's, which is multi-tensor
        plan["optimizer_impl"] = "foreach"
    try:
        memcalc.estimate(**JOB, **plan)
    except InputError:
        return
    beside = {"gpus": plan["gpus"], "recompute": plan["recompute"]}
    there_and_back(tmp_path, ("deepspeed",), plan, beside)


@pytest.mark.parser
@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "bf16-autocast"])
def test_its_own_parser_takes_what_is_written(zero: int, precision: str) -> None:
    kind = parser()
    plan = memcalc.estimate(**JOB, framework="deepspeed", gpus=1, zero=zero, precision=precision, global_batch=4)
    data = json.loads(render_config(get_format("deepspeed"), ConfigJob.of(plan)))
    found = kind(data)
    assert found.zero_config.stage == zero
    assert found.train_micro_batch_size_per_gpu == plan.strategy.micro_batch
    assert found.gradient_accumulation_steps == plan.workload.accumulation_steps
    assert found.bfloat16_config.enabled == (precision != "bf16-autocast")
    assert found.torch_autocast_enabled == (precision == "bf16-autocast")


@pytest.mark.parametrize("target", ["deepspeed", "trainer"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_autocast_over_narrow_weights_is_written(target: str, precision: str) -> None:
    """bf16 casts the weights and torch_autocast runs over them: one without the other is another job."""
    words: dict[str, Any] = {**JOB, "framework": "deepspeed", "zero": 3, "precision": precision, "global_batch": 4}
    for autocast in (False, True):
        plan = memcalc.estimate(**words, gpus=1, recompute="full", settings={"strategy.autocast": autocast})
        files = write_plan(plan, target, None, ()).files
        data = next(json.loads(text) for path, text in files.items() if path.name == "ds_config.json")
        assert data["bf16"]["enabled"]
        assert data.get("torch_autocast") == ({"enabled": True, "dtype": "bfloat16"} if autocast else None)


def test_the_batch_of_all_ranks_is_not_said_beside_tensor_parallelism() -> None:
    """DeepSpeedConfig multiplies by dist.get_world_size(), Transformers by all processes: both refuse another one."""
    job = {"model": "llama-3-8b", "gpu": "h100", "gpus": 8, "framework": "deepspeed", "seq_len": 2048,
           "micro_batch": 2, "global_batch": 16, "zero": 1, "recompute": "full"}  # fmt: skip
    for tp, batch in ((1, 16), (2, None)):
        done = write_plan(memcalc.estimate(**job, tp=tp), "deepspeed", None, ())
        said = next(json.loads(text) for path, text in done.files.items() if path.name == "ds_config.json")
        assert said.get("train_batch_size") == batch
        assert said["gradient_accumulation_steps"] == tp
