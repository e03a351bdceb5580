"""Peaks of whole training steps, against what PyTorch itself allocated on fake tensors (version 2.13, second step)."""

from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc.grid import Grid, Layout
from memcalc.ledger import PHASES, Ledger
from memcalc.specs.block import Attention, Block, Mlp
from memcalc.specs.model import BlockGroup, Model
from memcalc.specs.options import SharedSettings
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces
from memcalc.units import MIB

NO_WORKSPACES = Workspaces(0, 0)
FSDP2: list[tuple[dict[str, Any], float, float]] = [
    ({"recompute": "none"}, 21_537.5, 0.0001),
    ({"recompute": "full"}, 16_066.7, 0.0001),
    ({"recompute": "full", "optimizer_impl": "fused"}, 15_344.1, 0.0001),
    ({"recompute": "full", "zero": 2}, 24_203.9, 0.0001),
]
"""Llama-2-7B on 8 ranks, 1 x 2048 tokens each: choice, measured peak [MiB], relative error that the model reaches."""


def without_workspaces(answer: Any) -> float:
    """Return the allocated peak in MiB less what fake tensors do not have: BLAS workspaces."""
    workspaces = sum(term.bytes for term in answer.terms if term.name == "BLAS workspaces")
    assert workspaces > 0
    return float(answer.peak.allocated - workspaces) / MIB


@pytest.mark.parametrize(("choice", "measured", "tolerance"), FSDP2)
def test_llama_on_fsdp2(choice: dict[str, Any], measured: float, tolerance: float) -> None:
    answer = memcalc.estimate(
        model="llama-2-7b",
        gpu="a100-80g",
        gpus=8,
        seq_len=2048,
        global_batch=8,
        framework="fsdp2",
        precision="bf16-mixed",
        kernels="fused",
        **choice,
    )
    assert without_workspaces(answer) == pytest.approx(measured, rel=tolerance)


def test_parts_of_the_fsdp2_peak() -> None:
    """Full recomputation with the fused optimizer peaks at the first block's backward; each part as PyTorch gave it."""
    answer = memcalc.estimate(
        model="llama-2-7b",
        gpu="a100-80g",
        gpus=8,
        seq_len=2048,
        global_batch=8,
        framework="fsdp2",
        precision="bf16-mixed",
        kernels="fused",
        recompute="full",
        optimizer_impl="fused",
    )
    assert answer.peak.phase == "backward-first"
    bytes_of = {term.name: term.bytes / MIB for term in answer.terms if answer.peak.phase in term.phases}
    assert bytes_of["weights"] == pytest.approx(3213.1, abs=0.1)
    assert bytes_of["gradients at the first block's backward"] == pytest.approx(2895.1, abs=0.1)
    assert bytes_of["adamw moments"] == pytest.approx(6426.4, abs=0.2)
    assert bytes_of["gathered embedding, norm and head"] == pytest.approx(500.0, abs=0.1)
    assert bytes_of["gathered block"] == pytest.approx(386.0, abs=0.1)
    assert bytes_of["flat buffer of a gathered block"] == pytest.approx(386.0, abs=0.1)
    assert bytes_of["reduce-scatter input of a block"] == pytest.approx(772.0, abs=0.1)


def small_llama() -> Model:
    """Return the untied Llama of 1.5 billion parameters that was measured."""
    attention = Attention(heads=32, kv_heads=8, head_dim=64)
    block = Block(hidden=2048, attention=attention, mlp=Mlp(ffn=8192))
    groups = (BlockGroup(count=16, block=block),)
    return Model(
        name="llama-1.5b",
        family="llama",
        hidden=2048,
        vocab=128_256,
        max_positions=8192,
        groups=groups,
        source="measured",
    )


def plain_ledger(recompute: str, impl: str) -> Ledger:
    """Return the ledger of one step of the small Llama on one GPU, in fp32, without workspaces.

    Attention with grouped queries in fp32 has no fused kernel in PyTorch: it takes the one that keeps the scores.
    """
    fixed = SharedSettings(
        framework="plain", seq_len=2048, global_batch=1, attention="math", kernels="fused", optimizer_impl=impl
    )
    grid = Grid(fixed, (Layout(),), ("fp32",), (recompute,), (0,), ((),), (1,))
    return build_ledger(ModelOnGrid(small_llama(), grid), NO_WORKSPACES)


PLAIN = [
    ("none", "foreach", 34_523.5, 0.0001),
    ("full", "foreach", 28_581.8, 0.0001),
    ("full", "loop", 24_869.6, 0.0001),
    ("full", "fused", 23_983.5, 0.0001),
]
"""Recompute policy, optimizer, measured peak [MiB], relative error that the model reaches."""


@pytest.mark.parametrize(("recompute", "impl", "measured", "tolerance"), PLAIN)
def test_small_llama_on_one_gpu(recompute: str, impl: str, measured: float, tolerance: float) -> None:
    peak = int(np.max(plain_ledger(recompute, impl).peak())) / MIB
    assert peak == pytest.approx(measured, rel=tolerance)


@pytest.mark.parametrize(
    ("recompute", "impl", "phase"), [("none", "foreach", "loss"), ("full", "foreach", "step"), ("full", "loop", "step")]
)
def test_the_place_of_the_peak(recompute: str, impl: str, phase: str) -> None:
    ledger = plain_ledger(recompute, impl)
    assert max(PHASES, key=lambda name: int(np.max(ledger.phase(name)))) == phase


def test_foreach_and_loop_differ_by_their_temporaries() -> None:
    """At the step foreach holds a fifth copy of the weights, a loop two of the largest tensor."""
    steps = {impl: int(np.max(plain_ledger("full", impl).phase("step"))) / MIB for impl in ("foreach", "loop")}
    assert steps["foreach"] - steps["loop"] == pytest.approx(28_581.8 - 24_869.6, abs=0.5)
