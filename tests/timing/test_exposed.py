"""What a step waits for messages by kind, and how busy a GPU can be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from drawing import drawn
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st

from memcalc import api, catalog
from memcalc.errors import InputError, MissingError
from memcalc.results.estimates import ExposedMessages, StepTime
from memcalc.timing.forecast import KINDS

WORDS: dict[str, Any] = {"model": "llama-2-7b", "gpu": "h100", "seq_len": 4096, "micro_batch": 1, "global_batch": 64}


def step(**words: Any) -> StepTime:
    return api.single(**{**WORDS, **words}).time()


def sent(time: StepTime) -> set[str]:
    """Return the kinds of messages that a step waits for."""
    return {name for name, seconds in time.messages.model_dump().items() if seconds}


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ({"gpus": 1}, set()),
        ({"gpus": 8, "zero": 3}, {"data"}),
        ({"gpus": 8, "framework": "megatron", "zero": 0}, {"data"}),
        ({"gpus": 8, "framework": "megatron", "tp": 8}, {"tensor"}),
        ({"gpus": 8, "framework": "megatron", "pp": 8}, {"pipeline"}),
        ({"gpus": 64, "framework": "megatron", "tp": 4, "pp": 2, "zero": 1}, {"tensor", "pipeline", "data"}),
        ({"gpus": 8, "framework": "megatron", "ep": 8, "model": "mixtral-8x7b"}, {"expert", "data"}),
        ({"gpus": 16, "framework": "megatron", "tp": 2, "cp": 8}, {"tensor", "context", "data"}),
    ],
)
def test_messages_are_those_of_the_layout(words: dict[str, Any], kinds: set[str]) -> None:
    """Only ranks that share something send it; context-parallel ranks also reduce gradients together."""
    time = step(**words)
    assert sent(time) == kinds
    assert sum(time.messages.model_dump().values()) == pytest.approx(time.communication)


def test_tensor_messages_do_not_depend_on_data_parallel_ranks() -> None:
    """Replicas add messages of their own kind alone: each has the same micro-batches as before."""
    words = {"framework": "megatron", "tp": 8, "zero": 1}
    alone = step(**words, gpus=8, global_batch=8)
    many = step(**words, gpus=32, global_batch=32)
    assert many.messages.tensor == pytest.approx(alone.messages.tensor)
    assert many.messages.data > alone.messages.data == 0


def test_a_slower_network_costs_those_who_use_it() -> None:
    """Tensor-parallel ranks share a node; data-parallel ranks do not."""
    one = api.single(**WORDS, framework="megatron", gpus=64, tp=8, zero=1)
    slower = one.job.node.model_copy(update={"internode_bytes_per_s_per_gpu": 5e9})
    fast, slow = one.time(), replace(one, job=replace(one.job, node=slower)).time()
    assert slow.messages.tensor == pytest.approx(fast.messages.tensor)
    assert slow.messages.data > fast.messages.data


def test_every_kind_of_a_step_has_its_messages() -> None:
    assert list(KINDS) == list(ExposedMessages.model_fields)


# ------------------------------------------------------------------------------------------ how busy a GPU can be

MODELS = ("gpt2", "llama-2-7b", "llama-3-8b", "gemma-2-9b", "mixtral-8x7b", "gpt3-175b")
GPUS = tuple(catalog.names("gpu"))
LAYOUTS: tuple[dict[str, int], ...] = (
    {"gpus": 1}, {"gpus": 8}, {"gpus": 8, "tp": 8}, {"gpus": 64, "tp": 8, "pp": 2}, {"gpus": 64, "cp": 4},
    {"gpus": 64, "ep": 8},
)  # fmt: skip


@cache
def model_of(name: str) -> Any:
    return api.load_model(name)


@drawn(150, suppress_health_check=[HealthCheck.filter_too_much])
@given(
    model=st.sampled_from(MODELS),
    gpu=st.sampled_from(GPUS),
    layout=st.sampled_from(LAYOUTS),
    framework=st.sampled_from(("fsdp2", "megatron", "deepspeed")),
    precision=st.sampled_from(("bf16-mixed", "bf16", "fp32", "fp8-mixed", "fp16-mixed")),
    recompute=st.sampled_from(("none", "full", "selective-core-attn")),
    seq_len=st.sampled_from((512, 4096, 131072, 1 << 20)),
    micro_batch=st.sampled_from((1, 16)),
    attention=st.sampled_from(("flash", "eager")),
)
def test_no_gpu_is_busier_than_it_can_be(model: str, layout: dict[str, int], micro_batch: int, **words: Any) -> None:
    """Neither the model's operations nor all that are multiplied exceed the peak, whatever is trained on what."""
    batch = 2 * layout["gpus"] * micro_batch
    try:
        time = step(**words, **layout, model=model_of(model), micro_batch=micro_batch, global_batch=batch)
    except (InputError, MissingError):
        assume(False)
    assert 0 < time.mfu <= 1
    assert 0 < time.hfu <= 1


@pytest.mark.parametrize("gpu", ["rtx-3090", "a100-80g", "h100", "b200"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_gpu_is_not_busier_at_a_million_tokens(gpu: str, recompute: str) -> None:
    """All but the score matrix is nothing there; what a causal kernel leaves out is no operation of the hardware."""
    time = step(gpu=gpu, gpus=1, seq_len=1 << 20, global_batch=8, recompute=recompute)
    assert 0 < time.mfu <= 1
    assert 0 < time.hfu <= 1
