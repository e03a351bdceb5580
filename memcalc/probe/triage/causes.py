"""The causes that triage knows: what each is called, and the smallest change that usually helps."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.results.triage import Confidence, TriageCause
from memcalc.units import format_bytes

__all__ = ["KNOWN", "cause", "ranked", "said"]


@dataclass(frozen=True)
class Known:
    """A cause as it is told."""

    title: str
    remedy: str
    words: tuple[tuple[str, str], ...] = ()
    """Options of the estimate that stand for the remedy."""


KNOWN = {
    "growth": Known(
        "memory grows from step to step: something of each step is kept",
        "keep numbers, not tensors (loss.item(), detach()), and clear lists that outlive a step",
    ),
    "fragmentation": Known(
        "fragmentation: the holes between live tensors would have held the request",
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the job starts (torch 2.9: PYTORCH_ALLOC_CONF)",
    ),
    "other-process": Known(
        "another process holds the memory that was missing",
        "end the other process or take another GPU (nvidia-smi lists them; of containers, the host's)",
    ),
    "ranks-on-one-gpu": Known(
        "other ranks of the job have contexts on this GPU",
        "call torch.cuda.set_device(local_rank) before anything touches CUDA, and torch.load with map_location",
    ),
    "outside-pytorch": Known(
        "this process holds much outside PyTorch's allocator",
        "look for other libraries in the process (another framework, communicators, graphs); fewer process groups, "
        "smaller NCCL_BUFFSIZE",
    ),
    "limit": Known(
        "a limit that was set is reached, not the card's",
        "raise or drop torch.cuda.set_per_process_memory_fraction",
    ),
    "driver-refused": Known(
        "the driver refused although it reports enough free memory",
        "look at limits outside of PyTorch: WSL or Windows, a vGPU or MIG slice, another process at that moment, the "
        "shared memory of an APU; expandable segments ask the driver in another way",
    ),
    "no-room-for-context": Known(
        "there was no room for a CUDA context or a library's handle: the GPU was full before a tensor was asked for",
        "free the GPU first: another process holds it",
    ),
    "one-tensor": Known(
        "one tensor is larger than what the card has",
        "find its shape at the line that is shown; a batch or a length enters it twice, or a shape is wrong",
    ),
    "logits": Known(
        "the logits and their loss: tokens times vocabulary",
        "a fused or chunked loss that never stores them all (Liger, cut cross-entropy), or fewer tokens a micro-batch",
        (("loss", "fused-linear"),),
    ),
    "attention-scores": Known(
        "attention scores or masks are stored: length times length",
        "flash or memory-efficient attention (attn_implementation flash_attention_2 or sdpa), without a dense mask",
        (("attention", "flash"),),
    ),
    "evaluation-outputs": Known(
        "evaluation keeps its predictions on the GPU",
        "move them to the host as they come: eval_accumulation_steps, preprocess_logits_for_metrics, or .cpu()",
    ),
    "evaluation-graph": Known(
        "evaluation records for backward, and keeps its activations",
        "run it under torch.no_grad() or torch.inference_mode()",
    ),
    "generation": Known(
        "generation: keys and values of every token are kept",
        "smaller batches or fewer new tokens in evaluation; a quantised or offloaded cache",
    ),
    "first-step": Known(
        "the optimizer's states are made at the first step, on top of weights and gradients",
        "8-bit or sharded states, or states on the host",
        (("optimizer", "adamw-8bit"), ("zero", "2"), ("zero", "3"), ("offload", "optimizer")),
    ),
    "optimizer-temporaries": Known(
        "the optimizer's temporaries: its foreach kernels copy lists of tensors",
        "fused=True, or foreach=False",
        (("optimizer_impl", "fused"), ("optimizer_impl", "loop")),
    ),
    "gather": Known(
        "whole weights are gathered on top of what is there",
        "smaller wrapped units, less prefetch (limit_all_gathers, stage3_max_live_parameters)",
    ),
    "loading": Known(
        "the weights do not fit while they are loaded",
        "load on the host or on the meta device and shard, in 16 bits; torch.load with map_location='cpu'",
        (("zero", "3"), ("quantize", "nf4")),
    ),
    "recompute": Known(
        "backward computes a block again: all of its activations are there at once",
        "smaller checkpointed units, or fewer tokens a micro-batch",
    ),
    "too-large": Known(
        "the job's own tensors fill the card",
        "a smaller micro-batch with more accumulation, recomputation of activations, sharded states",
    ),
    "unexplained": Known(
        "the process holds more than the job that was told",
        "check that the job ran as told; else record a snapshot, which names the call sites",
    ),
    "longer-batch": Known(
        "earlier steps had fitted: this one was larger, or something had grown",
        "log tensor shapes or token counts of a step; cap the length, or sort by length and try the longest first",
    ),
    "host-memory": Known(
        "the host's memory ran out, not the GPU's",
        "fewer or lighter data-loader workers, no copies of the data set in each; ask the queue for more memory",
    ),
    "shared-memory": Known(
        "the shared memory of data-loader workers ran out, not the GPU's",
        "a larger /dev/shm (docker --shm-size), fewer workers, or set_sharing_strategy('file_system')",
    ),
    "not-pytorch": Known(
        "another framework's allocator ran out",
        "memcalc reads PyTorch's messages; look at that framework's own report, and at what else holds the GPU",
    ),
}  # fmt: skip
"""By code."""
_RANK = {"certain": 0, "likely": 1, "possible": 2}


def cause(code: str, confidence: Confidence, *evidence: str, size: int | None = None) -> TriageCause:
    """Return a cause of a code with what speaks for it."""
    known = KNOWN[code]
    return TriageCause(
        code=code, title=known.title, confidence=confidence, evidence=evidence, bytes=size, remedy=known.remedy
    )


def ranked(found: list[TriageCause]) -> tuple[TriageCause, ...]:
    """Order causes by how sure they are, then by what they account for; each code once, the surest.

    That the job fills the card comes after whatever says more.
    """
    once: dict[str, TriageCause] = {}
    for one in sorted(found, key=_order):
        once.setdefault(one.code, one)
    return tuple(once.values())


def _order(one: TriageCause) -> tuple[int, bool, float]:
    return _RANK[one.confidence], one.code == "too-large", -(float("inf") if one.bytes is None else one.bytes)


def said(size: float) -> str:
    """Return a size as evidence has it.

    >>> said(3 << 30), said(20 << 20), said(2048), said(512)
    ('3.00 GiB', '20.0 MiB', '2.0 KiB', '512 B')
    """
    for unit, least, digits in (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if abs(size) >= least:
            return format_bytes(size, unit, digits)
    return format_bytes(size, "B", 0)
