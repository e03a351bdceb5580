"""Records memory snapshots in torch's own form from real training steps on the CPU.

Torch records them on CUDA alone. Here a dispatch mode follows each storage of real steps from birth to death with the
Python frames of that moment, and memcalc's replay of the caching allocator gives addresses, segments and, with a
capacity, the failed request; what is dumped has the tables of ``torch/csrc/cuda/memory_snapshot.cpp``, and torch's own
``_memory_viz`` reads it. As on CUDA, the engine's backward has no frames of the main thread.

    python tests/snapshots.py FOLDER    writes those that the documents show
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memcalc.allocator.caching import _Allocator
from memcalc.allocator.pools import ADDRESS, LARGE_SEGMENT, SHIFT, SMALL_REQUEST, Rules

BASE = 0x7F2000000000
ENGINE = "_engine_run_backward"
OWN = re.compile(
    r"_dynamo|_compile\.py|_python_dispatch|weakref\.py|snapshots\.py:(__torch_dispatch__|add|freed|_write)$"
)
"""Frames of the recording itself."""
Frames = list[dict[str, Any]]
Dump = Callable[[], None]


class Recorder(TorchDispatchMode):
    """Follows storages and writes what ``torch.cuda.memory._snapshot()`` would."""

    def __init__(self, capacity: int | None = None, *, entries: int | None = None) -> None:
        super().__init__()
        self.allocator = _Allocator(capacity, Rules(False, LARGE_SEGMENT, None))
        self.capacity, self.entries = capacity, entries
        self.trace: list[dict[str, Any]] = []
        self.blocks: dict[int, tuple[int, int, int, Frames]] = {}
        self.known: dict[int, int] = {}
        self.cached: dict[tuple[Any, ...], Frames] = {}
        self.serial = 0
        self.done = False
        self.on_failure: Dump = lambda: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out

    def add(self, tensor: torch.Tensor) -> None:
        """Give the storage of a tensor its place, unless it has one."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.known or not storage.nbytes() or self.done:
            return
        self.serial += 1
        key, size, frames = self.serial, storage.nbytes(), self.frames()
        pool = (self.allocator.small if size <= SMALL_REQUEST else self.allocator.large)[0]
        rounded = (size + 511) & -512
        at = pool.take(rounded) or self.allocator._grow(pool, rounded)
        if at is None:
            free = (self.capacity or 0) - self.allocator.device.reserved
            self._write("oom", None, rounded, frames, device_free=free)
            self.on_failure()
            raise torch.OutOfMemoryError(self.message(size, free))
        self.allocator.live[key] = pool, *at, size
        self.known[storage._cdata] = key
        self.blocks[key] = (BASE + at[0], at[1] - at[0], size, frames)
        self._write("alloc", BASE + at[0], size, frames)
        weakref.finalize(storage, self.freed, storage._cdata, key).atexit = False

    def freed(self, data: int, key: int) -> None:
        """Give a storage's place back."""
        self.known.pop(data, None)
        if self.done:
            return
        address, _, size, _ = self.blocks.pop(key)
        frames = self.frames()
        self._write("free_requested", address, size, frames)
        self._write("free_completed", address, size, frames)
        pool, start, end, _ = self.allocator.live.pop(key)
        pool.give(start, end)

    def _write(self, action: str, address: int | None, size: int, frames: Frames, **more: int) -> None:
        where = more if address is None else {"addr": address}
        self.trace.append(
            {
                "action": action,
                **where,
                "size": size,
                "stream": 0,
                "time_us": 1_700_000_000_000_000 + 7 * len(self.trace),
                "frames": frames,
            }
        )

    def frames(self) -> Frames:
        """The Python frames of now, the innermost first; of the engine's thread in backward."""
        found, frame = [], sys._getframe(2)
        while frame is not None and frame.f_code.co_name not in {ENGINE, "recorded"}:
            found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        key = tuple(one for one in found if not OWN.search(f"{one[0]}:{one[2]}"))
        if key not in self.cached:
            self.cached[key] = [{"name": name, "filename": shown(file), "line": line} for file, line, name in key]
        return self.cached[key]

    def message(self, size: int, free: int) -> str:
        """What PyTorch would raise."""
        held = sum(block[1] for block in self.blocks.values())
        holes = self.allocator.device.reserved - held
        mib = 1 << 20
        return (
            f"CUDA out of memory. Tried to allocate {max(size, 2 * mib) / mib:.2f} MiB. GPU 0 has a total capacity of "
            f"{(self.capacity or 0) / mib:.2f} MiB of which {free / mib:.2f} MiB is free. Of the allocated memory "
            f"{held / mib:.2f} MiB is allocated by PyTorch, and {holes / mib:.2f} MiB is reserved by PyTorch but "
            "unallocated."
        )

    def snapshot(self) -> dict[str, Any]:
        """The tables of ``torch.cuda.memory._snapshot()``."""
        segments = []
        live = {address: (size, requested, frames) for address, size, requested, frames in self.blocks.values()}
        for kind, pools in (("small", self.allocator.small), ("large", self.allocator.large)):
            for stream, pool in pools.items():
                free = {BASE + (packed & ADDRESS): packed >> SHIFT for packed in pool.free}
                for start, end in sorted(pool.segments.items()):
                    segments.append(_segment(BASE + start, end - start, kind, stream, live, free))
        segments.sort(key=lambda one: one["address"])
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
            "expandable_segments": False, "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {"1": 0}}  # fmt: skip
        trace = self.trace if self.entries is None else self.trace[-self.entries :]
        return {
            "segments": segments,
            "device_traces": [trace],
            "allocator_settings": settings,
            "external_annotations": [],
        }


def _segment(
    start: int, size: int, kind: str, stream: int, live: dict[int, Any], free: dict[int, int]
) -> dict[str, Any]:
    blocks, at = [], start
    while at < start + size:
        if at in live:
            length, requested, frames = live[at]
            state = "active_allocated"
        else:
            length, requested, frames, state = free[at], 0, [], "inactive"
        blocks.append({"address": at, "size": length, "requested_size": requested, "state": state, "frames": frames})
        at += length
    active = sum(block["size"] for block in blocks if block["state"] != "inactive")
    asked = sum(block["requested_size"] for block in blocks)
    return {"device": 0, "address": start, "total_size": size, "allocated_size": active, "active_size": active,
        "requested_size": asked, "stream": stream, "segment_type": kind, "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": blocks}  # fmt: skip


def shown(file: str) -> str:
    """A path without what is particular to a machine."""
    for part in ("site-packages/", "dist-packages/"):
        if part in file:
            return f"/opt/lib/python3.11/site-packages/{file.split(part, 1)[1]}"
    return "/job/train.py" if file == __file__ else f"/opt/lib/python3.11/{Path(file).name}"


class Block(nn.Module):
    """A small transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between an embedding and an output layer."""

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batch(vocab: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab, (rows, length))
    return tokens, tokens.clone()


def healthy(
    dump: Dump, steps: int = 4, width: int = 128, layers: int = 4, vocab: int = 512, rows: int = 4, length: int = 64
) -> None:
    """A training loop that keeps nothing."""
    model = Model(width, layers, vocab)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(steps):
        tokens, labels = batch(vocab, rows, length)
        loss = model(tokens, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    dump()


def leaking(
    dump: Dump, steps: int = 6, width: int = 128, layers: int = 4, vocab: int = 512, rows: int = 4, length: int = 64
) -> None:
    """A penalty is added up for the log without ``item()``: its graph of every step stays."""
    model = Model(width, layers, vocab)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    penalty = torch.zeros(())
    for _ in range(steps):
        tokens, labels = batch(vocab, rows, length)
        loss = model(tokens, labels)
        hidden = model.embed(tokens)
        penalty = penalty + hidden.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss, hidden
    dump()


def evaluating(
    dump: Dump, steps: int = 2, width: int = 128, layers: int = 16, vocab: int = 512, rows: int = 4, length: int = 256
) -> None:
    """Training with short rows, then an evaluation with gradients on."""
    model = Model(width, layers, vocab)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(steps):
        tokens, labels = batch(vocab, 1, 32)
        model(tokens, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluate(model, vocab, rows, length, dump)


def evaluate(model: nn.Module, vocab: int, rows: int, length: int, dump: Dump) -> None:
    model.eval()
    for _ in range(2):
        tokens, labels = batch(vocab, rows, length)
        model(tokens, labels).item()
    dump()


def evaluating_quietly(dump: Dump) -> None:
    """The same evaluation under ``no_grad``."""
    model = Model(128, 16, 512)
    with torch.no_grad():
        evaluate(model, 512, 4, 256, dump)


def wide_vocabulary(dump: Dump, steps: int = 3) -> None:
    """Logits of many words over a small model."""
    healthy(dump, steps, width=64, layers=2, vocab=8192, rows=4, length=128)


def fragmenting(dump: Dump) -> None:
    """Small tensors that stay between larger ones that go: no hole is as large as what is asked for at the end."""
    pairs = [(torch.empty(1 << 20), torch.empty(300_000)) for _ in range(24)]
    kept = [small for _, small in pairs]
    del pairs
    kept.append(torch.empty(12 << 20))
    dump()


def recorded(job: Callable[[Dump], None], capacity: int | None = None, *, entries: int | None = None) -> dict[str, Any]:
    """Run a job and return the snapshot that it dumps; where it runs out of memory, that of the failed request."""
    gc.collect()
    recorder = Recorder(capacity, entries=entries)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.disable()
    taken: list[dict[str, Any]] = []

    def dump() -> None:
        recorder.done = True
        taken.append(recorder.snapshot())

    recorder.on_failure = dump
    try:
        with recorder, contextlib.suppress(torch.OutOfMemoryError):
            job(dump)
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    return taken[0]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, job, capacity in (("leak", leaking, None), ("logits", wide_vocabulary, 66 << 20)):
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(recorded(job, capacity)))
