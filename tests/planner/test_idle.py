"""Nothing is taken and ignored: what is told moves a figure, is refused, or is named as without effect."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.frameworks import habits_of
from memcalc.planner.idle import IDLE
from memcalc.specs.options import FIELDS

JOB: dict[str, Any] = {
    "model": "llama-3.2-1b", "gpu": "h100", "gpus": 8, "seq_len": 1024, "micro_batch": 1, "global_batch": 16,
}  # fmt: skip
NUMBERS = {"count": 3, "bytes": "64 MiB", "fraction": 0.25, "factor": 1.5, "targets": "q"}
SAID = ("peak", "time", "terms", "off_gpu", "occasions", "interval", "verdict", "host_memory", "warnings")
VERSIONS = {"bnb", "peft"}
"""Releases of packages: they say what is installed, not what is to be done."""
QUICK = ("fsdp2", "deepspeed", "megatron")


def values_of(name: str) -> list[Any]:
    """Values of a field that are not its default."""
    option = FIELDS[name]
    if option.kind == "flag":
        return [not option.default]
    return [value for value in option.values if value != option.default] or [NUMBERS.get(option.kind, "0.40")]


def as_it_is(framework: str, name: str, value: Any) -> bool:
    """Whether the job does so anyhow."""
    habits = habits_of(framework)
    own = {
        "checkpoint": "reentrant" if habits.reentrant else "non-reentrant",
        "whole_accumulation": habits.whole_accumulation,
        "overlap_comm": habits.overlaps_reduction,
        "overlap_param_gather": habits.overlaps_gather,
        "overlap_p2p": habits.overlaps_stages,
        "reduce_dtype": "bf16" if habits.reduces_as in ("compute", "weights") else "fp32",
        "expandable_segments": habits.expandable_segments,
    }
    field = name.rpartition(".")[2]
    return field in VERSIONS or own.get(field) == value or (field == "grad_accum_dtype" and value != "fp32")


def told(framework: str, name: str, value: Any) -> dict[str, Any] | None:
    """What the answer says with a field told; None where it is refused."""
    words = {**JOB, "framework": framework, "recompute": "full" if name == "strategy.checkpoint" else None}
    try:
        answer = memcalc.estimate(**words, settings={name: value} if value is not None else None, advice=False)
    except memcalc.errors.CombinationError:
        return None
    return {part: value for part, value in answer.model_dump().items() if part in SAID}


@pytest.mark.parametrize(
    "framework",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp1", "ddp", "torchtitan", "torchtune"))],
)
def test_no_field_is_taken_and_ignored(framework: str) -> None:
    plain = {name: told(framework, name, None) for name in ("strategy.checkpoint", "strategy.etp")}
    ignored = [
        f"{name}={value}"
        for name in FIELDS
        for value in values_of(name)
        if not as_it_is(framework, name, value)
        and told(framework, name, value) == plain.get(name, plain["strategy.etp"])
    ]
    assert ignored == []


@pytest.mark.parametrize(
    ("framework", "field", "value", "why"),
    [
        ("fsdp2", "strategy.reduce_bucket_size", 3, "unit by unit"),
        ("torchtitan", "strategy.partition_activations", True, "only DeepSpeed has it"),
        ("deepspeed", "strategy.whole_accumulation", True, "no FSDP"),
        ("fsdp1", "strategy.te", "2.1", "TransformerEngine"),
        ("ddp", "strategy.state_dict", "full", "shards no weights"),
        ("hf", "strategy.wgrad_fusion", False, "only Megatron-LM has it"),
        ("deepspeed", "strategy.overlap_param_gather", True, "only Megatron-LM has it"),
    ],
)
def test_what_a_framework_lacks_is_refused(framework: str, field: str, value: Any, why: str) -> None:
    with pytest.raises(memcalc.errors.CombinationError, match=rf"{field}.*{why}"):
        memcalc.estimate(**JOB, framework=framework, settings={field: value})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"settings": {"strategy.max_live_parameters": 3}, "zero": 2}, "strategy.max_live_parameters 3"),
        ({"cp_kind": "a2a"}, "--cp-kind a2a"),
        ({"offload_to": "nvme"}, "--offload-to nvme"),
        ({"settings": {"strategy.checkpoint": "reentrant"}, "recompute": "none"}, "strategy.checkpoint reentrant"),
    ],
)
def test_what_another_strategy_would_use_is_named(words: dict[str, Any], said: str) -> None:
    answer = memcalc.estimate(**JOB, framework="deepspeed", **words)
    assert [text for text in answer.warnings if IDLE in text and text.startswith(said)]


def test_files_state_what_their_runtime_has_no_use_for(tmp_path: Any) -> None:
    """A DeepSpeed file of stage 2 with sizes of stage 3 is read as it is, without a warning."""
    path = tmp_path / "ds_config.json"
    path.write_text(
        '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "bf16": {"enabled": true}, '
        '"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 3, "sub_group_size": 5}}'
    )
    words = {name: JOB[name] for name in ("model", "gpu", "gpus", "seq_len")}
    assert not [text for text in memcalc.check([str(path)], **words).estimate.warnings if IDLE in text]
