"""Memory of a process outside its tensors: CUDA context, BLAS workspaces, and the caching allocator's rounding."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from memcalc.allocator import replay
from memcalc.probe.live.steps import own_uuid, version_of
from memcalc.probe.measure import smi
from memcalc.units import MIB

# The caching allocator's answers to planned requests, compared with those of :mod:`memcalc.allocator`.

Counters = tuple[int, int]
"""Allocated and reserved [bytes]."""


@dataclass(frozen=True)
class Scene:
    """Requests on a stream of their own, whose pools are empty."""

    name: str
    steps: tuple[int, ...]
    """Bytes to allocate; or -n: the n-th allocation is freed."""


SCENES = (
    Scene("rounding of a small request", (1, 513)),
    Scene("the largest small request", (MIB, MIB, 1)),
    Scene("the smallest large request", (MIB + 1, 9 * MIB, 9 * MIB)),
    Scene("the largest request in a shared segment", (10 * MIB - 512,)),
    Scene("the smallest request with a segment of its own", (10 * MIB,)),
    Scene("rounding of a segment", (10 * MIB + 1,)),
    Scene("a large rest of 1 MiB", (12 * MIB, -1, 11 * MIB)),
    Scene("a large rest above 1 MiB", (12 * MIB, -1, 11 * MIB - 512)),
    Scene("best fit", (16 * MIB, 12 * MIB, -1, -2, 12 * MIB, 16 * MIB)),
)
"""Each shows one rule of the allocator."""


@dataclass(frozen=True)
class Seen:
    """One scene, and the counters after each of its steps, from zero."""

    scene: Scene
    counters: tuple[Counters, ...]


def watch(allocate: Callable[[Any, int], Any], cuda: Any = torch.cuda) -> list[Seen]:
    """Play the scenes on the device; `allocate` takes a stream and bytes, and returns what keeps them alive."""
    return [Seen(scene, tuple(_steps(scene, allocate, cuda))) for scene in SCENES]


def _steps(scene: Scene, allocate: Callable[[Any, int], Any], cuda: Any) -> Iterator[Counters]:
    stream, tensors = cuda.Stream(), list[Any]()
    allocated, reserved = cuda.memory_allocated(), cuda.memory_reserved()
    for step in scene.steps:
        if step > 0:
            tensors.append(allocate(stream, step))
        else:
            tensors[-step - 1] = None
        yield cuda.memory_allocated() - allocated, cuda.memory_reserved() - reserved


def on_stream(stream: Any, size: int) -> torch.Tensor:
    """Allocate on a stream."""
    with torch.cuda.stream(stream):
        return torch.empty(size, dtype=torch.uint8, device="cuda")


def played(scene: Scene, *, expandable: bool) -> tuple[Counters, ...]:
    """Return the counters of a scene in the replay."""
    events: list[tuple[str, int, int, int, str]] = []
    counters, allocations = [], 0
    for step in scene.steps:
        allocations += step > 0
        events.append(("alloc", allocations, step, 0, "") if step > 0 else ("free", -step, 0, 0, ""))
        end = replay(events, expandable=expandable)
        counters.append((end.allocated_end, end.reserved_end))
    return tuple(counters)


def differences(seen: list[Seen], *, expandable: bool) -> list[str]:
    """Describe each difference between the allocator and the replay: a wrong rule, not noise."""
    sentences = []
    for scene, counters in ((observed.scene, observed.counters) for observed in seen):
        expected = played(scene, expandable=expandable)
        step = next((i for i, pair in enumerate(zip(counters, expected, strict=True)) if pair[0] != pair[1]), None)
        if step is not None:
            real, replayed = counters[step], expected[step]
            sentences.append(
                f"{scene.name}: after step {step + 1} of {list(scene.steps)} the allocator has {real[0]} bytes "
                f"allocated and {real[1]} reserved, the replay {replayed[0]} and {replayed[1]}"
            )
    return sentences


def sizes(seen: list[Seen]) -> dict[str, int]:
    """Return the sizes that the scenes show [bytes]."""
    first = {observed.scene.name: observed.counters[0] for observed in seen}
    rounding, small = first["rounding of a small request"]
    sizes_by_name = {
        "rounding": rounding,
        "small_segment": small,
        "large_segment": first["the smallest large request"][1],
        "segment_of_10_mib_and_1": first["rounding of a segment"][1],
    }
    return {name: size for name, size in sizes_by_name.items() if size > 0}


@dataclass
class MachineRecord:
    """Fields of a `[[probe]]`; those that could not be read are absent, with a note why."""

    bare_context: int | None = None
    context: int | None = None
    blas_workspace: int | None = None
    allocator: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """Return the fields that are known; notes become the comment."""
        measured = {name: getattr(self, name) for name in ("bare_context", "context", "blas_workspace", "allocator")}
        comment = "; ".join(dict.fromkeys(self.notes))
        return {name: value for name, value in measured.items() if value} | ({"comment": comment} if comment else {})


def run_machine(job: dict[str, Any]) -> dict[str, Any]:
    """Measure them on this process's GPU; a CPU has none of them."""
    if job["device"] != "cuda":
        record = MachineRecord(notes=["a CPU has no context, no BLAS workspaces and no caching allocator"])
        return {"machine": record.fields()}
    record = MachineRecord()
    contexts(record, Meter())
    allocator(record)
    return {"machine": record.fields()}


def contexts(record: MachineRecord, meter: Meter, cuda: Any = torch.cuda, device: str = "cuda") -> None:
    """Read the context before any kernel, the workspaces at their first use, and the context after training steps."""
    meter.begin()
    cuda.synchronize()  # makes the context
    bare = _outside_allocator(record, meter, cuda)
    _record_workspaces(record, cuda, device)
    load(record, half(cuda), device)
    loaded = _outside_allocator(record, meter, cuda)
    if bare is None or loaded is None:
        return
    record.bare_context, record.context = bare, loaded
    record.notes.append(f"context: {meter.source}")


def _outside_allocator(record: MachineRecord, meter: Meter, cuda: Any) -> int | None:
    """Return what this process holds beyond what its allocator reserves [bytes], or note why that is not known."""
    try:
        used = meter.in_use()
    except UnsteadyError as error:
        record.notes.append(f"no context: {error}")
        return None
    if used is None:
        record.notes.append("no context: nvidia-smi does not show this process's memory")
        return None
    return used - int(cuda.memory_reserved())


# ---------------------------------------------------------------------------------------------------------- workspaces


def _record_workspaces(record: MachineRecord, cuda: Any, device: str) -> None:
    sizes, cleared = workspaces(half(cuda), cuda, device)
    record.blas_workspace = sizes.pop("first", None)
    record.allocator |= {f"blas_{name}": size for name, size in sizes.items() if size > 0}
    total = (record.blas_workspace or 0) + sum(sizes.values())
    if cleared != total:
        record.notes.append(f"products keep {total} bytes, of which clearing the BLAS workspaces frees {cleared}")


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
    sizes: dict[str, int] = {}
    side = cuda.Stream()

    def note(name: str, before: int) -> int:
        cuda.synchronize()
        sizes[name] = cuda.memory_allocated() - before
        return before + sizes[name]

    allocated = cuda.memory_allocated()
    with torch.no_grad():
        left @ right
        allocated = note("first", allocated)
        with cuda.stream(side):
            left @ right
        allocated = note("second_stream", allocated)
        fn.linear(left, right, bias)
        allocated = note("with_bias", allocated)
    (left @ right).sum().backward()
    left.grad = None
    allocated = note("backward_thread", allocated)
    torch._C._cuda_clearCublasWorkspaces()
    return sizes, allocated - cuda.memory_allocated()


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


def load(record: MachineRecord, dtype: torch.dtype, device: str = "cuda") -> None:
    """Train a small model for two steps under autocast and in 16 bits, by each implementation of AdamW."""
    for pure in (False, True):
        for fused in (False, True):
            try:
                _train(device, dtype, pure=pure, fused=fused)
            except RuntimeError as error:
                record.notes.append(f"not run before the context was read: {str(error).splitlines()[0]}")


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


def allocator(record: MachineRecord, cuda: Any = torch.cuda, allocate: Any = on_stream) -> None:
    """Play planned requests, and note every difference from the replay."""
    backend = cuda.get_allocator_backend()
    if backend != "native":
        record.notes.append(f"the allocator is {backend}, which is not the one that is replayed")
        return
    observed = watch(allocate, cuda)
    expandable = any(segment.get("is_expandable", False) for segment in cuda.memory_snapshot())
    record.allocator |= sizes(observed)
    if expandable:
        record.notes.append("segments are expandable")
    record.notes += [f"structural: {difference}" for difference in differences(observed, expandable=expandable)]


# --------------------------------------------------------------------------------------------------- the driver's count


_READINGS = 3
_PAUSE_S = 0.1


class UnsteadyError(RuntimeError):
    """Two readings differ although this process did nothing in between."""


def steady(read: Callable[[], int], *, pause: float = _PAUSE_S, readings: int = _READINGS) -> int:
    """Return the value of `read` if several calls agree; else raise :class:`UnsteadyError`."""
    first = read()
    for _ in range(readings - 1):
        time.sleep(pause)
        again = read()
        if again != first:
            raise UnsteadyError(
                f"device memory changed by {again - first} bytes while nothing ran here: another process uses the GPU"
            )
    return first


def outside(cuda: Any = torch.cuda, *, pause: float = _PAUSE_S) -> int:
    """Return what all processes use on the device, without this process's allocator [bytes]."""
    cuda.synchronize()
    return steady(lambda: _in_use(cuda), pause=pause) - int(cuda.memory_reserved())


def _in_use(cuda: Any) -> int:
    free, total = cuda.mem_get_info()
    return int(total - free)


@dataclass
class Meter:
    """What nvidia-smi shows of this process, the context included; it makes no context by looking."""

    cuda: Any = torch.cuda
    pause: float = _PAUSE_S
    before: dict[str, int] = field(default_factory=dict)
    """By GPU, before this process had a context [bytes]."""
    source: str = ""
    """How the last figure was read."""

    def begin(self) -> None:
        """Read what each GPU holds before."""
        self.before = {card.uuid: card.used for card in smi.cards()}

    def in_use(self) -> int | None:
        """Return what this process has on its GPU, all kernels done [bytes]; None where nvidia-smi does not show it.

        Where it does not list the process, as in many containers, the growth of the whole GPU stands for it.
        """
        self.cuda.synchronize()
        uuid = own_uuid(list(self.before))
        if uuid is None:
            return None
        if smi.used_by_process(os.getpid(), uuid) is not None:
            self.source = "nvidia-smi's figure of the process"
            return steady(lambda: smi.used_by_process(os.getpid(), uuid) or 0, pause=self.pause)
        self.source = "growth of nvidia-smi's figure of the GPU"
        grown = steady(lambda: self._used(uuid), pause=self.pause) - self.before[uuid]
        return grown if grown > 0 else None

    @staticmethod
    def _used(uuid: str) -> int:
        return next((card.used for card in smi.cards() if card.uuid == uuid), 0)


# ---------------------------------------------------------------------------------------------------------------- look


def run_look(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return versions, and torch's properties of the first visible GPU; a CPU is not described."""
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "gpus": 0}
    facts |= {name: version_of(name) for name in ("transformers", "peft")}
    if job["device"] == "cuda" and torch.cuda.is_available():
        first = torch.cuda.get_device_properties(0)
        facts |= {
            "gpus": torch.cuda.device_count(),
            "name": first.name,
            "memory": first.total_memory,
            "uuid": str(getattr(first, "uuid", "")),
        }
    return {"look": facts}
