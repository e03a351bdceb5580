"""Liger's gated MLP: what its one function keeps, and memory that its backward writes over."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcalc.api import load_model
from memcalc.frameworks import habits_of
from memcalc.runs import read_runs
from memcalc.trace.layers import BlockConfig
from memcalc.trace.template import Template, trace
from memcalc.validation import predict

RUNS = Path(__file__).resolve().parents[2] / "presets" / "runs"
LIGER = ("norms", "mlp")


@pytest.mark.parametrize("name", ["liger-qwen15b-bf16w-2x4096", "liger-llama1b-bf16w-gc-4x4096"])
def test_a_trainer_with_ligers_kernels_allocates_what_was_measured(name: str) -> None:
    """Three tensors of the MLP's width in each block, kept or computed again: with a fourth 15.8% and 4.6% more.

    The loss makes the head's gradient, which waits for the embedding's: 3.1% and 5.5% are reserved less without it.
    """
    [run] = [run for run in read_runs([str(RUNS / "trainers-h200.toml")]).run if run.id.endswith(name)]
    assert predict(run).peak.allocated == pytest.approx(run.measured.allocated, rel=1e-3)
    assert predict(run).peak.reserved == pytest.approx(run.measured.reserved, rel=0.025)


def of_width(template: Template, ffn: int) -> tuple[int, int]:
    """Return how many tensors of the MLP's width are kept, and how many backward makes."""
    kept = [record for record in template.kept_records if record.size.elements == ffn]
    made = [template.records[event] for event in template.backward if event >= 0]
    return len(kept), sum(record.size.elements == ffn for record in made)


CASES = [
    # Liger-Kernel 0.8.5 ops/swiglu.py and ops/geglu.py: save_for_backward(a, b), beside the down projection's input;
    # backward stores to a_ptr and b_ptr, and the product's gradient alone is new
    ("llama-3-8b", LIGER, (3, 1)),
    ("gemma-2-2b", LIGER, (3, 1)),
    # fms-acceleration, torchtitan: activation and product are operators; PyTorch's derivatives.yaml
    ("llama-3-8b", ("norms",), (4, 4)),
    # transformers/swiglu.py, LigerPhi3SwiGLUMLP: chunks of one projection, of which ensure_contiguous makes copies
    ("phi-3-mini-3.8b", LIGER, (3, 1)),
]


@pytest.mark.parametrize(("name", "in_place", "expected"), CASES)
def test_tensors_of_the_mlps_width(name: str, in_place: tuple[str, ...], expected: tuple[int, int]) -> None:
    block = load_model(name).main.block
    template = trace(block, BlockConfig(kernels="fused", in_place=in_place))
    assert of_width(template, block.own_mlp.ffn) == expected


@pytest.mark.parametrize(
    ("framework", "gated"),
    [("hf", True), ("hf@4.52", True), ("hf@4.48", False), ("ddp", False), ("deepspeed", True), ("torchtitan", False)],
)
def test_frameworks_whose_fused_kernels_are_ligers(framework: str, gated: bool) -> None:
    """In runs of hf@4.45 to 4.48 they are those of fms-acceleration: fms.toml has four tensors, within 0.02%."""
    assert ("mlp" in habits_of(framework).in_place_kernels) == gated
