"""The two gradients of a weight that is embedding and head: whether autograd adds them up in a third tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import memcalc
from memcalc import catalog
from memcalc.runs import read_runs
from memcalc.validation import predict

RUNS = Path(__file__).resolve().parents[2] / "presets" / "runs"
VOCAB, HIDDEN = 500, 32


class LossWithHead(torch.autograd.Function):
    """Keeps the gradients that its forward has made, as ``LigerFusedLinearCrossEntropyFunction`` (0.8.5) does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Make both gradients."""
        ctx.save_for_backward(torch.zeros_like(x).detach(), torch.zeros_like(weight).detach())
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        """Hand them on."""
        grad_input, grad_weight = ctx.saved_tensors
        return grad_input, grad_weight


def sums(dtype: torch.dtype, loss: str, *, autocast: bool) -> list[str]:
    """Return how autograd adds tensors of the weight's shape, on a CPU; no mode may stand around it."""
    weight = torch.nn.Parameter(torch.zeros(VOCAB, HIDDEN, dtype=dtype))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        x = functional.embedding(tokens, weight) * 2
        if loss == "fused-linear":
            out: torch.Tensor = LossWithHead.apply(x, weight)
        else:
            out = functional.cross_entropy(functional.linear(x, weight)[0].float(), tokens[0])
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        out.backward()
    added = [e for e in seen.events() if e.name.startswith("aten::add") and e.input_shapes]
    return [e.name for e in added if e.input_shapes[0] == [VOCAB, HIDDEN]]


@pytest.mark.parametrize("loss", ["standard", "fused-linear"])
@pytest.mark.parametrize(
    ("precision", "autocast", "dtype"),
    [
        ("fp32", False, torch.float32),
        ("bf16", False, torch.bfloat16),
        ("bf16", True, torch.bfloat16),  # nothing is cast, and so nothing cast back
        ("bf16-autocast", True, torch.float32),
    ],
)
def test_the_sum_is_a_tensor_of_its_own_where_autograd_makes_one(
    precision: str, autocast: bool, dtype: torch.dtype, loss: str
) -> None:
    model = catalog.model("smollm2-135m")
    words = {"autocast": autocast} if precision == "bf16" else {}
    answer = memcalc.estimate(
        model=model, gpu="h100", framework="hf", gpus=1, seq_len=512, micro_batch=1, global_batch=1,
        precision=precision, loss=loss, **words,
    )  # fmt: skip
    [tensors] = [t.bytes for t in answer.terms if t.name == "gradients of embedding and head, and their sum"]
    in_place = sums(dtype, loss, autocast=autocast) == ["aten::add_"]
    # The embedding's is one of the gradients at the end of backward
    assert tensors == (1 if in_place else 2) * model.vocab * model.hidden * dtype.itemsize


def test_a_tied_model_whose_peak_is_the_end_of_backward_allocates_what_was_measured() -> None:
    """Qwen2-VL-2B in bf16 under autocast, of which one tensor of the embedding's size is 2.4%."""
    [run] = [run for run in read_runs([str(RUNS / "trainers-h200.toml")]).run if "trainer-qwen2vl" in run.id]
    assert predict(run).peak.allocated == pytest.approx(run.measured.allocated, rel=3e-3)
