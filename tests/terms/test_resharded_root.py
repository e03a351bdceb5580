"""A root that FSDP 2 shards again after forward: the loss runs without its weights where it is outside of the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import memcalc
from memcalc import api
from memcalc.allocator import replay
from memcalc.convert.formats import get_format, render_config
from memcalc.convert.formats.base import ConfigJob
from memcalc.events import step_events
from memcalc.specs.flat import from_flat
from memcalc.specs.model import Model
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import Workspaces
from memcalc.units import MIB

SIZES: dict[str, dict[str, int]] = {
    "1b": {"n_layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128_256},
    "3b": {"n_layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128_256},
    "8b": {"n_layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336, "vocab": 128_256},
    "13b": {"n_layers": 40, "hidden": 5120, "heads": 40, "kv_heads": 40, "ffn": 13_824, "vocab": 32_000},
    "small": {"n_layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 704, "vocab": 8000},
}
ALWAYS = {"strategy.reshard": "always"}
LATER = ("loss", "backward-last", "backward-first", "backward-end")


def model_of(name: str) -> Model:
    """Return a Llama in torchtitan's style, with a head of its own."""
    return from_flat({"name": name, "max_positions": 8192, "tied": False} | SIZES[name])


def estimate(name: str, ranks: int, settings: dict[str, str], **words: Any) -> Any:
    """Return the estimate of a job on FSDP 2, a micro-batch a step."""
    job: dict[str, Any] = {
        "model": model_of(name), "gpu": "h100", "gpus": ranks, "framework": "fsdp2", "kernels": "fused",
        "precision": "bf16-mixed", "zero": 3, "optimizer_impl": "fused", "micro_batch": 1,
    }  # fmt: skip
    job |= words
    return memcalc.estimate(
        **job, global_batch=job["micro_batch"] * ranks, settings={"strategy.checkpoint": "non-reentrant"} | settings
    )


def largest(answer: Any, phases: tuple[str, ...]) -> float:
    """Return the most that is allocated in some phases, in MiB, without workspaces."""
    workspaces = sum(term.bytes for term in answer.terms if term.name == "BLAS workspaces")
    return float(max(answer.phases[phase] for phase in phases) - workspaces) / MIB


STEPS = [
    # model, micro-batch, tokens, ranks, recompute, MiB at most in loss and backward with a root that reshards
    ("1b", 2, 4096, 8, "full", 14_744.7),
    ("3b", 1, 4096, 16, "none", 20_301.2),
    ("8b", 1, 8192, 8, "full", 25_691.5),
    ("8b", 1, 1024, 64, "full", 7_864.5),
    ("1b", 1, 2048, 8, "full", 5_614.2),
    ("13b", 1, 4096, 32, "full", 10_715.9),
]


@pytest.mark.parametrize(("name", "batch", "tokens", "ranks", "recompute", "measured"), STEPS)
def test_peaks_of_steps_of_pytorch(
    name: str, batch: int, tokens: int, ranks: int, recompute: str, measured: float
) -> None:
    """Second steps on fake tensors (PyTorch 2.13, fused AdamW, reshard_after_forward=True on the root).

    Their rotary tables, 8 bytes for each token and pair of a head's dimensions, are left out of ours.
    """
    sizes = SIZES[name]
    tables = 8 * tokens * sizes["hidden"] // sizes["heads"] // 2 / MIB
    answer = estimate(name, ranks, ALWAYS, micro_batch=batch, seq_len=tokens, recompute=recompute)
    assert largest(answer, LATER) == pytest.approx(measured - tables, abs=0.2)


def test_only_the_loss_runs_without_the_root() -> None:
    """The root is 2 V h weights and a norm; the last block's buffer is not there either before backward has begun."""
    kept, freed = (estimate("8b", 8, settings, seq_len=8192, recompute="full") for settings in ({}, ALWAYS))
    root, block = 2 * (2 * 128_256 * 4096 + 4096), 2 * (218_103_808 + 2 * 4096)
    assert kept.phases["loss"] - freed.phases["loss"] == root + block
    same = ("forward-last", *LATER[1:], "step")
    assert {phase: kept.phases[phase] for phase in same} == {phase: freed.phases[phase] for phase in same}


def test_the_head_finds_its_weights_in_a_short_forward() -> None:
    """With few tokens the root and the buffer of its gather outweigh the loss where backward begins."""
    freed = estimate("8b", 64, ALWAYS, seq_len=128, recompute="full")
    terms = {term.name: term.bytes for term in freed.terms if "loss" in term.phases}
    root = 2 * (2 * 128_256 * 4096 + 4096)
    assert terms["gathered embedding, norm and head"] + terms["flat buffer of the unit gathered last"] > root


def test_torchtitan_always() -> None:
    """Norm and head are a unit that `always` alone reshards: 2 V h less in the loss (torchtitan b5bcd76)."""

    def loss(era: str, policy: str, **words: Any) -> int:
        answer = memcalc.estimate(
            model="llama-3-8b", gpu="h100", gpus=8, seq_len=8192, micro_batch=1, global_batch=8, zero=3,
            framework=f"torchtitan@{era}", precision="bf16-mixed", settings={"strategy.reshard": policy}, **words,
        )  # fmt: skip
        return int(answer.phases["loss"])

    head, block = 2 * (128_256 * 4096 + 4096), 2 * (218_103_808 + 2 * 4096)
    assert loss("2026-02", "default") - loss("2026-02", "always") == head + block
    # chunks of hidden states take the head's weights in the loss; an older PyTorch keeps a root whatever it is told
    assert loss("2026-06", "default", loss="chunked") == loss("2026-06", "always", loss="chunked")
    # there, the last block that `default` keeps is the flat buffer of its gather under `always`
    assert loss("2025-02", "default") == loss("2025-02", "always")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_pytorch_itself(recompute: str) -> None:
    """Closed form and replay, against a step of PyTorch on fake tensors whose peak is in the loss."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from autograd import parallel

    sizes = SIZES["small"]
    shape: dict[str, Any] = {
        "dim": sizes["hidden"],
        "heads": 4,
        "kv": 2,
        "ffn": 704,
        "vocab": sizes["vocab"],
        "longest": 128,
    }
    steps = parallel.fsdp_timeline(
        "titan", 4, root=True, recompute=recompute, optimizer="fused", batch=4, seq=128, layers=4, **shape
    )
    single = api.single(
        model=model_of("small"), gpu="h100", gpus=4, framework="fsdp2", zero=3, precision="bf16-mixed", seq_len=128,
        kernels="fused", micro_batch=4, global_batch=16, optimizer_impl="fused", recompute=recompute,
        settings={"strategy.checkpoint": "non-reentrant"} | ALWAYS,
    )  # fmt: skip
    census = ModelOnGrid(single.job.model, single.grid)
    ledger = build_ledger(census, Workspaces(0, 0))
    played = replay(step_events(census, ledger, 0, observed=False)).peak_requested
    assert played == pytest.approx(steps.peak().live, rel=1e-3)
    assert int(np.max(ledger.peak())) == pytest.approx(steps.peak().live, rel=1e-3)


@pytest.mark.slow
def test_a_loss_inside_of_the_model_gains_nothing() -> None:
    """A class of Transformers given labels: backward gathers the root before the loss's own backward."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from autograd import parallel

    words: dict[str, Any] = {"batch": 4, "seq": 128, "layers": 4, "vocab_size": 8000, "recompute": "full"}
    kept, freed = (parallel.fsdp_timeline("llama-3", 4, root=root, **words).peak() for root in (None, True))
    assert (kept.live, kept.phase) == (freed.live, freed.phase)


@pytest.mark.parametrize("name", ["accelerate", "trainer", "axolotl"])
def test_programs_whose_model_computes_the_loss_are_not_written_for(name: str) -> None:
    words = {"precision": "bf16", "autocast": True} if name == "axolotl" else {"precision": "bf16-mixed"}
    found = memcalc.estimate(
        model="llama-3.2-1b", gpu="h100", gpus=8, framework="fsdp2", zero=3, settings=ALWAYS, **words
    )
    with pytest.raises(memcalc.errors.CombinationError, match="reshard"):
        render_config(get_format(name), ConfigJob.of(found))
