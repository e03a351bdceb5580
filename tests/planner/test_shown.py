"""What is shown is what is counted: one stage, a reason for each verdict, and a term for every byte of the device."""

from __future__ import annotations

from typing import Any

import pytest

import memcalc
from memcalc.results.estimates import Estimate
from memcalc.validation import figures_of

UNEVEN: dict[str, Any] = {
    "model": "deepseek-v2", "gpu": "b200", "framework": "torchtitan", "gpus": 256, "pp": 2, "zero": 3,
    "recompute": "mlp",
}  # fmt: skip
"""Its last stage allocates most and its first one reserves most."""
PIECES: dict[str, Any] = {
    "model": "mistral-nemo-12b", "gpu": "h20", "framework": "fsdp1", "gpus": 8, "seq_len": 4096, "micro_batch": 3,
    "zero": 3, "recompute": "attention", "loss": "fused-linear", "compile": "blocks",
}  # fmt: skip
"""It would have room if what the allocator has free lay in one piece."""
JOBS = [
    UNEVEN,
    PIECES,
    {"model": "llama-2-7b", "gpu": "a100-80g", "framework": "megatron", "gpus": 16, "tp": 2, "pp": 4},
    {"model": "llama-2-7b", "gpu": "a100-80g", "framework": "hf", "gpus": 8, "zero": 3, "global_batch": 32},
    {"model": "gpt2", "gpu": "v100-32g", "framework": "megatron@2021-05", "gpus": 8, "tp": 2},
    {"model": "llama-2-7b", "gpu": "a100-40g", "framework": "plain"},
]


def alive(found: Estimate, component: str) -> int:
    """Return the bytes of a component's terms at the peak."""
    return sum(t.bytes for t in found.terms if t.component == component and found.peak.phase in t.phases)


@pytest.mark.parametrize("words", JOBS, ids=[f"{job['model']}-{job['framework']}" for job in JOBS])
def test_every_byte_of_the_device_is_a_term_of_one_stage(words: dict[str, Any]) -> None:
    found = memcalc.estimate(**words)
    stage = found.stages[found.peak.stage]
    for name in ("allocated", "reserved", "device", "phase", "stage"):
        assert getattr(found.peak, name) == getattr(stage, name)
    assert found.phases == {phase: sum(parts.values()) for phase, parts in stage.phases.items()}
    assert found.phases[found.peak.phase] == found.peak.allocated == max(found.phases.values())
    for name, size in found.components.model_dump().items():
        assert alive(found, name) == size, name
    assert sum(found.components.model_dump().values()) == found.peak.reserved
    assert sum(term.bytes for term in found.outside) == found.peak.device - found.peak.reserved
    assert found.peak.reserved == max(stage.reserved for stage in found.stages)


def test_a_measured_largest_figure_is_compared_with_that_of_all_stages() -> None:
    """Runs report the largest allocated figure of their ranks, whichever stage reserves most."""
    from memcalc.specs.runs import Run

    found = memcalc.estimate(**UNEVEN)
    assert found.peak.allocated < max(stage.allocated for stage in found.stages)
    run = Run.model_construct(rank="max", gpus=256)
    figures = figures_of(run, found)
    assert figures["allocated"] == found.stages[1].allocated
    assert figures["reserved"] == found.stages[0].reserved


def test_communicators_are_named_with_their_ranks() -> None:
    found = memcalc.estimate(model="llama-2-7b", gpu="a100-80g", framework="megatron", gpus=16, tp=2, pp=4)
    ranks = {term.inputs["group"]: term.inputs["ranks"] for term in found.outside if "group" in term.inputs}
    assert ranks == {"world": 16, "tp": 2, "pp": 4, "dp": 2, "mp": 8, "dist_opt": 16}
    assert sum(t.bytes for t in found.outside if t.name != "context") == found.budget.libraries
    assert found.outside[0].bytes == found.budget.context
    assert all(term.source for term in found.outside)
    (alone,) = memcalc.estimate(model="gpt2", gpu="a100-80g", framework="plain").outside
    assert alone.name == "context"


def test_the_reserve_of_an_allocator_that_is_not_replayed_has_its_share() -> None:
    """presets/reserve.toml gives the allocator of 2021 a middle of its own, today's has none."""
    old = memcalc.estimate(model="gpt2", gpu="v100-32g", framework="deepspeed@2021-04", gpus=8, tp=2)
    today = memcalc.estimate(model="gpt2", gpu="v100-32g", framework="deepspeed", gpus=8)
    shares = [[t for t in found.terms if t.formula == "m · R"] for found in (old, today)]
    assert [len(terms) for terms in shares] == [1, 0]
    (share,) = shares[0]
    assert share.bytes == int(share.inputs["m"] * share.inputs["R"])


def test_what_does_not_fit_says_why() -> None:
    from memcalc import report

    pieces = memcalc.estimate(**PIECES)
    assert pieces.verdict == "does-not-fit"
    assert pieces.peak.device < pieces.budget.capacity
    assert "in pieces that are too small" in pieces.reason
    assert pieces.reason in report.render(report.of_estimate(pieces), "plain", width=400)
    large = memcalc.estimate(model="llama-2-7b", gpu="a100-40g", framework="plain")
    over = (large.peak.device - large.budget.capacity) / 2**30
    assert (large.verdict, large.reason) == ("does-not-fit", f"the GPU lacks {over:.1f} GiB")
    fits = memcalc.estimate(model="gpt2", gpu="a100-40g", framework="plain")
    assert (fits.verdict, fits.reason) == ("fits", "")


def test_whole_gradients_are_gradients_and_the_trainer_has_them_by_default() -> None:
    """Accelerate 1.15 accelerator.py, no_sync: all micro-batches but a step's last run under FSDP's own no_sync."""
    words: dict[str, Any] = {"model": "llama-2-7b", "gpu": "a100-80g", "gpus": 8, "zero": 3}
    several, one = (memcalc.estimate(framework="hf", global_batch=batch, **words) for batch in (16, 8))
    plain = memcalc.estimate(framework="fsdp1", global_batch=16, **words)
    whole = [term for term in several.terms if "unsharded gradients" in term.name]
    assert [(term.component, term.bytes) for term in whole] == [("gradients", 2 * 6_738_415_616)]
    assert several.components.gradients == 2 * 6_738_415_616
    for other in (one, plain):
        assert not [term for term in other.terms if "unsharded gradients" in term.name]
