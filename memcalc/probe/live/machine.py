"""What a process needs beside its tensors: CUDA context, BLAS workspaces, and the habits of the caching allocator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from memcalc.probe.live.machine_allocator import differences, on_stream, sizes, watch
from memcalc.probe.live.machine_meter import Meter, UnsteadyError

__all__ = ["Found", "allocator", "contexts", "load", "run_machine", "workspaces"]


@dataclass
class Found:
    """Fields of a `[[probe]]`: what could not be read is not there, and a note says why."""

    bare_context: int | None = None
    context: int | None = None
    blas_workspace: int | None = None
    allocator: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """Return the fields that are known; notes become the comment."""
        known = {name: getattr(self, name) for name in ("bare_context", "context", "blas_workspace", "allocator")}
        said = "; ".join(dict.fromkeys(self.notes))
        return {name: value for name, value in known.items() if value} | ({"comment": said} if said else {})


def run_machine(job: dict[str, Any]) -> dict[str, Any]:
    """Measure them on this process's GPU; a CPU has none of them."""
    if job["device"] != "cuda":
        found = Found(notes=["a CPU has no context, no BLAS workspaces and no caching allocator"])
        return {"machine": found.fields()}
    found = Found()
    contexts(found, Meter())
    allocator(found)
    return {"machine": found.fields()}


def contexts(found: Found, meter: Meter, cuda: Any = torch.cuda, device: str = "cuda") -> None:
    """Read the context before any kernel, the workspaces at their first use, and the context after training steps."""
    meter.begin()
    cuda.synchronize()  # makes the context
    bare = _beside(found, meter, cuda)
    _workspaces_into(found, cuda, device)
    load(found, half(cuda), device)
    loaded = _beside(found, meter, cuda)
    if bare is None or loaded is None:
        return
    found.bare_context, found.context = bare, loaded
    found.notes.append(f"context: {meter.source}")


def _beside(found: Found, meter: Meter, cuda: Any) -> int | None:
    """Return what this process holds beyond what its allocator reserves [bytes], or note why that is not known."""
    try:
        held = meter.held()
    except UnsteadyError as error:
        found.notes.append(f"no context: {error}")
        return None
    if held is None:
        found.notes.append("no context: nvidia-smi does not show this process's memory")
        return None
    return held - int(cuda.memory_reserved())


# ---------------------------------------------------------------------------------------------------------- workspaces


def _workspaces_into(found: Found, cuda: Any, device: str) -> None:
    kept, cleared = workspaces(half(cuda), cuda, device)
    found.blas_workspace = kept.pop("first", None)
    found.allocator |= {f"blas_{name}": size for name, size in kept.items() if size > 0}
    total = (found.blas_workspace or 0) + sum(kept.values())
    if cleared != total:
        found.notes.append(f"products keep {total} bytes, of which clearing the BLAS workspaces gives back {cleared}")


def half(cuda: Any = torch.cuda) -> torch.dtype:
    """Return the 16-bit format that this GPU multiplies in hardware."""
    return torch.bfloat16 if cuda.get_device_capability()[0] >= 8 else torch.float16  # Ampere


def workspaces(dtype: torch.dtype, cuda: Any = torch.cuda, device: str = "cuda") -> tuple[dict[str, int], int]:
    """Return what products leave in the allocator by where they first run, and what clearing gives back [bytes].

    PyTorch has a cuBLAS handle for each thread, and of each handle a workspace for each stream
    (aten/src/ATen/cuda/CublasHandlePool.cpp); backward runs in a thread of its own, and a product with a bias goes
    through cuBLASLt, whose workspace may be one of its own.
    """
    left, right, bias = (torch.ones(shape, dtype=dtype, device=device) for shape in ((256, 256), (256, 256), (256,)))
    left.requires_grad_()
    kept: dict[str, int] = {}
    side = cuda.Stream()

    def note(name: str, before: int) -> int:
        cuda.synchronize()
        kept[name] = cuda.memory_allocated() - before
        return before + kept[name]

    held = cuda.memory_allocated()
    with torch.no_grad():
        left @ right
        held = note("first", held)
        with cuda.stream(side):
            left @ right
        held = note("second_stream", held)
        fn.linear(left, right, bias)
        held = note("with_bias", held)
    (left @ right).sum().backward()
    left.grad = None
    held = note("backward_thread", held)
    torch._C._cuda_clearCublasWorkspaces()
    return kept, held - cuda.memory_allocated()


# ---------------------------------------------------------------------------------------------------------------- load


class _Block(nn.Module):
    """Both kinds of norms, attention, both kinds of MLPs: most kernels that training a Transformer loads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output of the same shape."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attention(self.first(x)).chunk(3, -1)
        )
        mixed = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + fn.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        y = self.second(x)
        return x + self.down(fn.silu(self.gate(y)) * fn.gelu(self.up(y)))


def load(found: Found, dtype: torch.dtype, device: str = "cuda") -> None:
    """Train a small model for two steps under autocast and in 16 bits, by each implementation of AdamW."""
    for pure in (False, True):
        for fused in (False, True):
            try:
                _train(device, dtype, pure=pure, fused=fused)
            except RuntimeError as error:
                found.notes.append(f"not run before the context was read: {str(error).splitlines()[0]}")


def _train(device: str, dtype: torch.dtype, *, pure: bool, fused: bool) -> None:
    width, heads, vocab = 128, 2, 256
    model = nn.Sequential(
        nn.Embedding(vocab, width), _Block(width, heads), _Block(width, heads), nn.Linear(width, vocab)
    )
    model.to(device, dtype if pure else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)
    tokens = torch.arange(vocab, device=device).view(2, 128)
    for _ in range(2):
        with torch.autocast(device, dtype, enabled=not pure):
            logits = model(tokens)
        fn.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# ----------------------------------------------------------------------------------------------------------- allocator


def allocator(found: Found, cuda: Any = torch.cuda, allocate: Any = on_stream) -> None:
    """Play planned requests, and note every difference from the replay."""
    backend = cuda.get_allocator_backend()
    if backend != "native":
        found.notes.append(f"the allocator is {backend}, which is not the one that is replayed")
        return
    seen = watch(allocate, cuda)
    expandable = any(segment.get("is_expandable", False) for segment in cuda.memory_snapshot())
    found.allocator |= sizes(seen)
    if expandable:
        found.notes.append("segments are expandable")
    found.notes += [f"structural: {said}" for said in differences(seen, expandable=expandable)]
