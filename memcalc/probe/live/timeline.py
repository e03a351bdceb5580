"""Counts live bytes after every operator of a training step, by dispatch and finalizers of storages."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memcalc.probe.live.saved import Where


@dataclasses.dataclass
class Event:
    """One storage born or freed; ``live`` is the sum after it."""

    step: int
    phase: str
    """``forward``, ``backward`` or ``optimizer``."""
    part: str
    """Block, ``embedding``, ``head``; in backward that of the gradient last seen."""
    op: str
    """The operator that ran, and in backward the autograd node."""
    storage: int
    delta: int
    live: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    kind: str = ""
    """``parameter``, ``buffer``, ``input``, ``grad`` or ``state``, where known."""


class Timeline(TorchDispatchMode):
    """Follows storages from birth to death; the peak is the largest ``live`` of the events."""

    def __init__(self, where: Where) -> None:
        super().__init__()
        self.where, self.events = where, list[Event]()
        self.live, self.step, self.phase, self.op = 0, 0, "init", ""
        self.sizes: dict[int, int] = {}
        self.kinds: dict[int, str] = {}
        self.backward_part = ""
        self.serial, self.ids = 0, dict[int, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its local operators come back here
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node() if self.phase == "backward" else None
        self.op = str(func).removeprefix("aten.") + (f" < {node.name()}" if node else "")
        if func is torch.ops.aten.add.Tensor and node and _sole_owner(args[0], args[1]):
            return args[0].add_(args[1])
        out, passing = func(*args, **(kwargs or {})), list[tuple[int, int]]()
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        for size in within(func, args):
            self.serial += 1
            passing.append((self.serial, size))
            self._note(self.serial, size)
        for serial, size in passing:
            self._note(serial, -size)
        return out

    @property
    def part(self) -> str:
        """The block that runs forward, or that backward has reached."""
        if self.phase == "backward" and not self.where.stack:
            return self.backward_part
        return self.where.part if self.phase in {"forward", "backward"} else ""

    def add(self, tensor: torch.Tensor, kind: str = "") -> None:
        """Start to follow the storage of ``tensor``, unless it is known."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.ids:
            return
        self.serial += 1
        self.ids[key] = self.serial
        self._note(self.serial, storage.nbytes(), tuple(tensor.shape), str(tensor.dtype)[6:], kind)
        weakref.finalize(storage, self._freed, key).atexit = False

    def _note(self, serial: int, delta: int, shape: tuple[int, ...] = (), dtype: str = "", kind: str = "") -> None:
        self.live += delta
        self.sizes[serial] = self.sizes.get(serial, 0) + delta
        if kind:
            self.kinds[serial] = kind
        event = Event(self.step, self.phase, self.part, self.op, serial, delta, self.live, shape, dtype, kind)
        self.events.append(event)

    def _freed(self, key: int) -> None:
        serial = self.ids.pop(key)
        self._note(serial, -self.sizes[serial])

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Count a storage whose size was changed in place, as FSDP does to free and refill its buffers."""
        serial = self.ids.get(storage._cdata)
        if serial is not None and storage.nbytes() != before:
            self.op = "resize_"
            self._note(serial, storage.nbytes() - before)

    def mark(self, tensor: torch.Tensor | None, kind: str) -> None:
        """Set the kind of the storage of ``tensor``, if it is followed."""
        if tensor is None:
            return
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        serial = self.ids.get(local.untyped_storage()._cdata)
        if serial is not None:
            self.kinds[serial] = kind


def within(func: Any, args: Any) -> list[int]:
    """Bytes of what CUDA's kernel of an operator allocates and frees again, of which a fake tensor knows nothing.

    A softmax's backward multiplies the gradient by the result (``softmax_backward_cuda_out`` in
    ``aten/src/ATen/native/cuda/SoftMax.cu``). That of flash attention sums rows and the queries' gradient in fp32, and
    makes keys' and values' for all heads (``mha_bwd`` in ``transformers/cuda/flash_attn/flash_api.cpp``).
    """
    aten = torch.ops.aten
    if func is aten._softmax_backward_data.default:
        return [args[0].nbytes]
    if func is aten._scaled_dot_product_flash_attention_backward.default:
        query, key, value, _, rows = args[1:6]
        groups = query.shape[1] // key.shape[1]
        return [rows.nbytes, 4 * query.numel(), *([key.nbytes * groups, value.nbytes * groups] if groups > 1 else [])]
    return []


ALONE = (4, 2)
"""Use counts of a tensor and its storage that only the engine's buffer holds, as a dispatch mode sees them."""


def _sole_owner(old: torch.Tensor, new: Any) -> bool:
    """Return whether the engine would add ``new`` into ``old`` in place.

    ``accumulate`` of input_buffer.cpp does so when nothing else holds the old gradient, but never under a dispatch
    mode: without this, every residual connection would hold one gradient too many. Profiles of real tensors show the
    same choices.
    """
    if torch.is_grad_enabled() or not isinstance(new, torch.Tensor) or (old.shape, old.dtype) != (new.shape, new.dtype):
        return False
    return (old._use_count(), torch._C._storage_Use_Count(old.untyped_storage()._cdata)) == ALONE


@dataclasses.dataclass
class Steps:
    """The events of some training steps."""

    events: list[Event]
    kinds: dict[int, str]

    def peak(self, step: int = 2) -> Event:
        """Return the first event of ``step`` at which most bytes are live."""
        return max((e for e in self.events if e.step == step), key=lambda e: e.live)

    def alive_at(self, event: Event) -> list[tuple[str, Event, int]]:
        """Return (kind, birth, bytes) of all storages alive right after ``event``, largest first."""
        births: dict[int, Event] = {}
        sizes: dict[int, int] = {}
        for e in self.events:
            births.setdefault(e.storage, e)
            sizes[e.storage] = sizes.get(e.storage, 0) + e.delta
            if e is event:
                break
        alive = [(self.kinds.get(s, ""), births[s], n) for s, n in sizes.items() if n]
        return sorted(alive, key=lambda a: -a[2])

    def by_kind(self, event: Event) -> dict[str, int]:
        """Return live bytes by kind right after ``event``; activations and temporaries have the kind ``""``."""
        sums: dict[str, int] = {}
        for kind, _, size in self.alive_at(event):
            sums[kind] = sums.get(kind, 0) + size
        return sums


@contextlib.contextmanager
def resizing(line: Timeline) -> Iterator[None]:
    """Count storages whose size is changed in place while the body runs."""
    real = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        out = real(storage, size)
        line.resized(storage, before)
        return out

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


def _follow_backward(line: Timeline, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    def after(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            first = next((t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad), None)
            if first is not None and line.phase == "forward":
                first.register_hook(lambda _: setattr(line, "backward_part", path))

        return hook

    for path, block in blocks.items():
        block.register_forward_hook(after(path))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: line.mark(p.grad, "grad"))


def train(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    run: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int = 2,
    micro_batches: int = 1,
    inputs: Iterable[torch.Tensor] = (),
) -> Steps:
    """Run ``steps`` training steps of ``micro_batches`` each and count, on real tensors or inside ``cuda_like``."""
    line = Timeline(Where(model, blocks))
    known = ("parameter", model.parameters()), ("buffer", model.buffers()), ("input", inputs)
    for kind, tensors in known:
        for tensor in tensors:
            line.add(tensor, kind)
    _follow_backward(line, model, blocks)
    gc.collect()
    gc.disable()
    try:
        with line, resizing(line):
            for line.step in range(1, steps + 1):
                _one_step(line, run, optimizer, micro_batches)
    finally:
        gc.enable()
    return Steps(line.events, line.kinds)


def _one_step(
    line: Timeline, run: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, micro_batches: int
) -> None:
    for _ in range(micro_batches):
        line.where.seen.clear()
        line.phase = "forward"
        loss = run()
        line.phase, line.backward_part = "backward", "head"
        loss.backward()
    line.phase = "optimizer"
    optimizer.step()
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                line.mark(value, "state")
    del loss
    optimizer.zero_grad()


def adamw(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Return AdamW, ``foreach``, ``loop`` or ``fused``."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(parameters, foreach=kind == "foreach", fused=kind == "fused")
