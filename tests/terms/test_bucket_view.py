"""DDP's gradients as views of its buckets, against torch's own DistributedDataParallel in one process on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memcalc
from memcalc.units import GIB

JOB: dict[str, Any] = {
    "model": "llama-2-7b", "gpu": "h100", "gpus": 8, "seq_len": 2048, "micro_batch": 1, "framework": "ddp",
    "precision": "bf16", "optimizer": "sgd", "optimizer_impl": "fused",
}  # fmt: skip
GRADIENTS = 2 * 6_738_415_616
"""Bytes of the gradients of Llama 2 7B in bf16."""


def named(settings: dict[str, Any]) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return bytes and phases of the terms that speak of gradients or buckets."""
    terms = memcalc.estimate(**JOB, settings=settings).terms
    return {term.name: (term.bytes, term.phases) for term in terms if "bucket" in term.name or "gradients" in term.name}


def test_the_second_copy_is_gone() -> None:
    plain, views = named({}), named({"strategy.bucket_view": True})
    assert plain["all-reduce buckets"][0] == GRADIENTS
    assert "all-reduce buckets" not in views
    assert views["gradients"][0] == GRADIENTS


def test_the_one_copy_stays_from_step_to_step() -> None:
    """The buckets outlive zero_grad(set_to_none=True), so that gradients are there in the forward too."""
    views = named({"strategy.bucket_view": True})
    alive = {phase for size, phases in views.values() if size == GRADIENTS for phase in phases}
    assert {"forward-last", "forward", "loss", "backward-last", "backward-first", "step"} <= alive


def test_the_peak_falls_by_a_copy_where_the_step_is_the_peak() -> None:
    job = {**JOB, "optimizer": "adamw", "optimizer_impl": "foreach", "recompute": "full"}
    before = memcalc.estimate(**job)
    after = memcalc.estimate(**job, settings={"strategy.bucket_view": True})
    assert before.peak.phase == after.peak.phase == "step"
    assert before.peak.allocated - after.peak.allocated == GRADIENTS
    assert before.peak.device - after.peak.device > GIB


STEPS = """
import os, sys, torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
wrapped = DistributedDataParallel(model, gradient_as_bucket_view=sys.argv[2] == "True")
for _ in range(3):  # the buckets are built anew after the first backward
    wrapped(torch.ones(2, 8)).sum().backward()
    print(*sorted({p.grad.untyped_storage().data_ptr() for p in model.parameters()}))
    wrapped.zero_grad(set_to_none=True)
sys.stdout.flush()
os._exit(0)
"""
"""In a process of its own, which ends without taking down the group's threads: that may wait for ever."""


@pytest.mark.slow
@pytest.mark.parametrize("as_view", [True, False])
def test_torch_keeps_gradients_in_its_buckets(tmp_path: Path, as_view: bool) -> None:
    """With views all gradients of a bucket share one storage, which is the same one after zero_grad and a step."""
    pytest.importorskip("torch", reason="pip install torch")
    command = [sys.executable, "-c", STEPS, f"{tmp_path}/store", str(as_view)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    storages = [line.split() for line in printed.splitlines()]
    assert len(storages) == 3
    assert len(storages[-1]) == (1 if as_view else 4)
    assert (storages[1] == storages[2]) or not as_view


WRAPPED = [
    # framework, GPUs, ZeRO stage, adapters, parameters whose gradients are copied
    ("ddp", 8, 0, None, GRADIENTS // 2),
    ("hf", 8, 0, None, GRADIENTS // 2),
    ("hf@4.45", 2, 0, None, GRADIENTS // 2),
    ("litgpt", 8, 0, None, GRADIENTS // 2),
    # two matrices of 4096 to 8 and back in each of 32 blocks: litgpt's adapters are in the dtype of its weights
    ("litgpt", 8, 0, "8:q,v", 32 * 2 * 2 * 8 * 4096),
    ("hf", 1, 0, None, 0),
    ("litgpt", 1, 0, None, 0),
    ("hf", 8, 3, None, 0),
    ("litgpt", 8, 2, None, 0),
]


@pytest.mark.parametrize(("framework", "gpus", "zero", "lora", "copied"), WRAPPED)
def test_who_has_the_second_copy(framework: str, gpus: int, zero: int, lora: str | None, copied: int) -> None:
    """Whoever wraps whole replicas in DDP has it; nobody on one GPU or where FSDP shards."""
    job = {**JOB, "framework": framework, "gpus": gpus, "optimizer": "adamw"}
    answer = memcalc.estimate(**job, zero=zero, lora=lora, global_batch=gpus)
    assert sum(term.bytes for term in answer.terms if term.name == "all-reduce buckets") == 2 * copied


def test_no_program_asks_for_views_by_itself() -> None:
    """Accelerate 1.15, on which the Trainer stands, and Lightning 2.6, on which litgpt does, as installed."""
    utils = pytest.importorskip("accelerate.utils")
    strategies = pytest.importorskip("lightning.fabric.strategies")
    assert utils.DistributedDataParallelKwargs().gradient_as_bucket_view is False
    assert strategies.DDPStrategy()._ddp_kwargs == {}


def test_views_stay_an_option_of_ddp() -> None:
    """The Trainer cannot ask for them: what would change nothing is refused."""
    with pytest.raises(memcalc.errors.CombinationError, match=r"strategy\.bucket_view.*only ddp has it"):
        memcalc.estimate(**{**JOB, "framework": "hf", "zero": 0}, settings={"strategy.bucket_view": True})


def test_ddps_first_broadcast_leaves_a_cache_as_large_as_the_weights() -> None:
    """27.5 GiB on each of two GPUs, and 17.2 on one: ms-swift a3731f998 (2024-12) examples/train, LoRA of Qwen2.5-7B.

    Its log has what the allocator reserves. Where four GPUs hold the model twice the same script says 14 GiB.
    """
    words: dict[str, Any] = {
        "model": "qwen2.5-7b", "gpu": "a100-80g", "gpus": 2, "precision": "bf16", "seq_len": 256, "micro_batch": 1,
        "global_batch": 16, "recompute": "full", "lora": "8:all-linear", "zero": 0, "advice": False,
    }  # fmt: skip
    eras = ("hf@4.46", "ddp@2.5", "ddp@2.8", "ddp")
    older, torch25, torch28, newest = (memcalc.estimate(**words, framework=era).peak for era in eras)
    for peak in (older, torch25):
        assert peak.reserved == pytest.approx(27.5 * 2**30, rel=0.08)
        assert peak.allocated == pytest.approx(newest.allocated, rel=0.01)
    assert torch28.reserved == newest.reserved < 17.2 * 2**30
    small = memcalc.estimate(**words | {"gpu": "rtx-4090"}, framework="ddp@2.5")  # its cache is given back in time
    assert small.verdict != "does-not-fit"


def test_a_step_that_needs_more_takes_that_cache() -> None:
    """States and activations of a whole fine-tuning lie where the copies of the weights were."""
    words: dict[str, Any] = {
        "model": "qwen2.5-0.5b", "gpu": "a100-80g", "gpus": 2, "precision": "bf16", "seq_len": 1024, "micro_batch": 8,
        "global_batch": 16, "recompute": "none", "zero": 0, "advice": False,
    }  # fmt: skip
    before, after = (memcalc.estimate(**words, framework=era).peak.reserved for era in ("ddp@2.5", "ddp"))
    assert before == pytest.approx(after, rel=0.02)
