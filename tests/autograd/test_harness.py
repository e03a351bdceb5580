"""The harness itself: figures that other people measured or derived, and the rules of PyTorch that it imitates."""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from autograd import mixer_kernels, models, parallel, timeline
from autograd.measure import saved_bytes
from memcalc.probe.live.cuda_like import cuda_like, kernel
from memcalc.probe.live.step_models import recompute_groups
from memcalc.probe.live.timeline import Event, Steps

MIB = 2**20
LLAMA_2_7B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008}
LLAMA_3_8B = LLAMA_2_7B | {"num_key_value_heads": 8, "intermediate_size": 14336}
GPT2 = {"n_embd": 768, "n_head": 12, "n_inner": None, "n_positions": 1024}
BERT_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}


@pytest.mark.parametrize(
    ("family", "sizes", "seq", "options", "expected"),
    [
        # 20 + 4 kv/a + 8 f/h + 4a/h + 8/h
        ("llama-2", LLAMA_2_7B, 2048, {}, 45.533),
        ("llama-3", LLAMA_3_8B, 2048, {}, 49.033),
        ("llama-2", LLAMA_2_7B, 2048, {"attention": "eager"}, 141.502),
        ("llama-2", LLAMA_2_7B, 2048, {"precision": "fp32"}, 83.033),
        ("llama-2", LLAMA_2_7B, 2048, {"precision": "fp32+autocast"}, 55.533),
        ("titan", {"dim": 4096, "heads": 32, "kv": 32, "ffn": 11008}, 2048, {}, 37.533),
        ("gpt2", GPT2, 1024, {}, 58.083),
        ("gpt2", GPT2, 1024, {"dropout": False}, 56.083),
        ("gpt2", GPT2, 1024, {"attention": "eager"}, 138.021),
        # Korthikanti and others 2022, equation 2: 34 + 5as/h; then two layer norms' statistics, and the log-sum-exp
        ("bert", BERT_LARGE, 512, {"attention": "eager"}, 34 + 5 * 16 * 512 / 1024 + 16 / 1024),
        ("bert", BERT_LARGE, 512, {}, 34.078),
        ("llama-2", LLAMA_2_7B, 2048, {"recompute": "full"}, 2),
        ("llama-2", LLAMA_2_7B, 2048, {"recompute": "full", "precision": "fp32"}, 4),
    ],
)
def test_bytes_a_block_for_each_token_and_hidden_unit(
    family: str, sizes: dict[str, Any], seq: int, options: dict[str, Any], expected: Any
) -> None:
    saved = saved_bytes(family, batch=1, seq=seq, **options, **sizes)
    width = next(sizes[name] for name in ("hidden_size", "n_embd", "dim") if name in sizes)
    assert saved.bytes_at(1) / (seq * width) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(
    ("policy", "groups"),
    [("none", []), ("full", [[0], [1], [2], [3], [4]]), ("every-2", [[1], [3]]), ("segments-2", [[0, 1, 2], [3, 4]])],
)
def test_recompute_groups(policy: str, groups: list[list[int]]) -> None:
    assert [list(group) for group in recompute_groups(policy, 5)] == groups
    if policy == "every-2":  # as Transformers counts
        assert [list(group) for group in recompute_groups(policy, 5, first=True)] == [[0], [2], [4]]


def test_a_segment_keeps_one_input() -> None:
    saved = saved_bytes("llama-3", recompute="segments-1")
    hidden = models.BATCH * models.SEQ * 96 * 2
    assert [saved.bytes_at(block) for block in range(3)] == [hidden, 0, 0]


@pytest.mark.parametrize(
    ("dtype", "kv", "masked", "expected"),
    [
        (torch.bfloat16, 2, False, "flash"),
        (torch.bfloat16, 4, True, "efficient"),
        (torch.float32, 4, False, "efficient"),
        (torch.float32, 2, False, "math"),
    ],
)
def test_attention_kernel(dtype: torch.dtype, kv: int, masked: bool, expected: Any) -> None:
    q, k = torch.empty(1, 4, 8, 16, dtype=dtype), torch.empty(1, kv, 8, 16, dtype=dtype)
    assert kernel(q, k, k, q if masked else None, "auto") == expected


def test_dispatcher_is_as_before_afterwards() -> None:
    with cuda_like():
        pass
    x = torch.ones(4, 4, requires_grad=True)
    assert torch.nn.functional.dropout(x, 0.5, True).grad_fn.name() == "MulBackward0"


def test_gradients_are_added_in_place_where_the_engine_does_so() -> None:
    """Count additions out of place: two in a profile of real tensors, and so two births under the harness."""
    linear = torch.nn.Linear(100, 100)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.linear = torch.nn.Parameter(torch.zeros(10, 100)), linear

        def forward(self) -> torch.Tensor:
            h = self.x * 1.0
            y = h + self.linear(torch.relu(h))
            return (y + self.linear(torch.nn.functional.layer_norm(y, (100,)))).exp().sum()

    real = Block()
    loss = real()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss.backward()
    expected = sum(event.name == "aten::add" for event in recorded.events())
    with cuda_like():
        linear = torch.nn.Linear(100, 100)
        fake = Block()
        steps = timeline.train(fake, fake, timeline.adamw(fake, "fused"), 1)
    births = [e for e in steps.events if e.op.startswith("add.Tensor <") and e.delta > 0 and e.phase == "backward"]
    assert len(births) == expected > 0


BIG = {
    "dim": 2048,
    "layers": 16,
    "heads": 32,
    "kv": 8,
    "ffn": 8192,
    "vocab": 128256,
    "batch": 1,
    "seq": 2048,
    "longest": 2048,
}


@pytest.mark.parametrize(
    ("recompute", "optimizer", "expected", "phase"),
    [
        ("none", "foreach", 34523.5, "backward"),
        pytest.param("full", "foreach", 28581.8, "optimizer", marks=pytest.mark.slow),
        pytest.param("full", "loop", 24869.6, "optimizer", marks=pytest.mark.slow),
        pytest.param("full", "fused", 23983.5, "backward", marks=pytest.mark.slow),
    ],
)
def test_peak_of_one_device(recompute: str, optimizer: str, expected: Any, phase: str) -> None:
    peak = timeline.step_timeline("titan", recompute=recompute, optimizer=optimizer, **BIG).peak()
    assert peak.phase == phase
    assert peak.live / MIB == pytest.approx(expected, abs=1)


SEVEN = {
    "dim": 4096,
    "layers": 32,
    "heads": 32,
    "kv": 32,
    "ffn": 11008,
    "vocab": 32000,
    "batch": 1,
    "seq": 2048,
    "longest": 2048,
}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"recompute": "full", "optimizer": "fused"}, 15344.1, marks=pytest.mark.slow),
        pytest.param({}, 21537.5, marks=pytest.mark.slow),
        pytest.param({"recompute": "full"}, 16066.7, marks=pytest.mark.slow),
        pytest.param({"recompute": "full", "reshard": False}, 24203.9, marks=pytest.mark.slow),
    ],
)
def test_peak_of_fsdp2_on_8_ranks(options: dict[str, Any], expected: Any) -> None:
    peak = parallel.fsdp_timeline("titan", 8, **options, **SEVEN).peak()
    assert peak.live / MIB == pytest.approx(expected, abs=1)


def peak_of_optimizer(steps: Steps) -> Event:
    return max((e for e in steps.events if (e.step, e.phase) == (2, "optimizer")), key=lambda e: e.live)


@pytest.mark.slow
def test_ddp_keeps_a_second_copy_of_gradients_unless_they_are_views_of_buckets() -> None:
    plain, views = (parallel.ddp_timeline("titan", 8, bucket_view=view) for view in (False, True))
    alone = timeline.step_timeline("titan")
    gradients = sum(n for kind, _, n in alone.alive_at(peak_of_optimizer(alone)) if kind == "grad")
    assert peak_of_optimizer(plain).live - peak_of_optimizer(alone).live == pytest.approx(gradients, rel=1e-3)
    assert peak_of_optimizer(views).live == pytest.approx(peak_of_optimizer(alone).live, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_every_family_runs(family: str) -> None:
    with mixer_kernels.installed(family):
        saved = saved_bytes(family)
    assert len(saved.blocks) >= 3
    assert not [kept for kept in saved.storages if "checkpoint" in kept.node]
