"""Achieved rates by size: matrix products, fused attention, the device's memory, copies to and from the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as fn

from memcalc.formulas import flops
from memcalc.units import KIB, MIB


@dataclass(frozen=True)
class Sizes:
    """What is timed; each list goes from small to large."""

    dtypes: tuple[torch.dtype, ...]
    products: tuple[tuple[int, int, int], ...]
    """Rows, columns, and the inner dimension."""
    attention: tuple[tuple[int, int, int], ...]
    """Heads, head dimension, sequence."""
    attention_tokens: int
    """Tokens of a batch, if a sequence is shorter."""
    memory: tuple[int, ...]
    """Bytes of one tensor."""
    copies: tuple[int, ...]


_SQUARES = tuple((n, n, n) for n in (128, 256, 512, 1024, 2048, 4096, 8192))
_LAYERS = tuple(
    (tokens, columns, inner)
    for tokens in (512, 2048, 8192)
    for columns, inner in ((1024, 1024), (4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096))
)
"""Linear layers as Llama-like models have them."""


def sizes_of(device: str, changes: dict[str, Any]) -> Sizes:
    """Return the sizes for a device; `changes` replaces lists by name."""
    if device == "cuda":
        halves = (torch.bfloat16, torch.float16) if torch.cuda.get_device_capability()[0] >= 8 else (torch.float16,)
        sizes = Sizes(
            dtypes=(*halves, torch.float32),
            products=tuple(sorted((*_SQUARES, *_LAYERS), key=lambda mnk: mnk[0] * mnk[1] * mnk[2])),
            attention=tuple((2048 // d, d, seq) for seq in (256, 1024, 2048, 4096, 8192, 16384) for d in (64, 128)),
            attention_tokens=8192,
            memory=tuple(64 * KIB << (2 * i) for i in range(8)),
            copies=tuple(64 * KIB << (2 * i) for i in range(7)),
        )
    else:
        sizes = Sizes(
            dtypes=(torch.float32,),
            products=((16, 16, 16), (64, 64, 64), (128, 96, 64)),
            attention=((2, 16, 32), (2, 16, 64)),
            attention_tokens=64,
            memory=(64 * KIB, MIB),
            copies=(),
        )
    return replace(sizes, **{name: _tuples(value) for name, value in changes.items()})


def _tuples(value: Any) -> Any:
    """Lists of JSON as tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


CACHE = 256 << 20
"""Operands are rotated over as many bytes, so that they come from the device's memory and not from its cache."""
MOST_SETS = 16


@dataclass(frozen=True)
class Operation:
    """One thing to time: `run` takes the number of the operand set."""

    kind: str
    dtype: str
    shape: dict[str, int]
    work: int
    """FLOP or bytes."""
    run: Callable[[int], Any]


@dataclass
class Timer:
    """Times operations on the device's own clock; on a CPU by the host's.

    A sample is a batch of launches without a wait in between, as training launches them, long enough to be measured;
    the median over the samples is kept.
    """

    device: str
    sample: float = 0.004
    """Least length of one sample [s]."""
    samples: int = 7
    most: int = 2048
    """Launches in one sample."""
    cuda: Any = torch.cuda
    clock: Callable[[], float] = field(default=time.perf_counter)

    def seconds(self, run: Callable[[int], Any]) -> float:
        """Return the time of one operation [s]."""
        self.batch(run, 2)  # loads kernels and picks algorithms
        count = 1
        while (taken := self.batch(run, count)) < self.sample and count < self.most:
            count = min(self.most, max(2 * count, int(count * self.sample / max(taken, 1e-9))))
        return statistics.median(self.batch(run, count) for _ in range(self.samples)) / count

    def batch(self, run: Callable[[int], Any], count: int) -> float:
        """Return the time of `count` operations in a row [s]."""
        if self.device != "cuda":
            start = self.clock()
            for i in range(count):
                run(i)
            return self.clock() - start
        first, last = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.cuda.synchronize()
        first.record()
        for i in range(count):
            run(i)
        last.record()
        self.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1000


def run_rates(job: dict[str, Any]) -> dict[str, Any]:
    """Time all operations, each kind within its share of the job's `seconds`; small sizes come first.

    What does not fit the device's memory, or is not there for a dtype, is left out.
    """
    device = job["device"]
    sizes = sizes_of(device, job.get("sizes", {}))
    timer = Timer(device) if device == "cuda" else Timer(device, sample=0.0005, samples=3, most=64)
    kinds = (matmuls, attention, memory, *((copies,) if device == "cuda" else ()))
    share = job.get("seconds", 45.0) / len(kinds)
    return {"rates": [rate for kind in kinds for rate in _timed(kind(device, sizes), timer, share)]}


def _timed(operations: Iterator[Operation], timer: Timer, seconds: float) -> Iterator[dict[str, Any]]:
    """Time the operations until the time is up."""
    end = timer.clock() + seconds
    while timer.clock() < end:
        try:
            operation = next(operations)
            taken = timer.seconds(operation.run)
        except StopIteration:
            return
        except torch.cuda.OutOfMemoryError:
            return  # what follows is larger
        yield {
            "kind": operation.kind,
            "dtype": operation.dtype,
            "shape": operation.shape,
            "work": float(operation.work),
            "seconds": taken,
        }
        del operation  # its operands go before the next ones are made


def name_of(dtype: torch.dtype) -> str:
    """Return how the estimator calls a dtype."""
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _sets(nbytes: int, device: str) -> int:
    return min(MOST_SETS, -(-CACHE // nbytes)) if device == "cuda" else 2


def matmuls(device: str, sizes: Sizes) -> Iterator[Operation]:
    """Products of m × k by k × n, as linear layers run them: the second operand is stored transposed."""
    for m, n, k in sizes.products:
        for dtype in sizes.dtypes:
            width = dtype.itemsize
            sets = _sets(width * (m * k + n * k + m * n), device)
            # values of training's size: a GPU multiplies zeros with less power, hence faster
            pairs = [tuple(torch.randn(s, device=device, dtype=dtype) for s in ((m, k), (n, k))) for _ in range(sets)]

            def run(i: int, pairs: Any = pairs) -> torch.Tensor:
                left, right = pairs[i % len(pairs)]
                return fn.linear(left, right)

            yield Operation("matmul", name_of(dtype), {"m": m, "n": n, "k": k}, flops.matmul_flops(m, k, n), run)
            del pairs, run


def attention(device: str, sizes: Sizes) -> Iterator[Operation]:
    """Causal attention in one kernel, forward and backward; the work is that of the unmasked half.

    Backward makes five products where forward makes two, so that its work is 2.5 times as much.
    """
    dtype = sizes.dtypes[0]
    for heads, head_dim, seq in sizes.attention:
        batch = max(sizes.attention_tokens // seq, 1)
        q, k, v = (
            torch.randn(batch, heads, seq, head_dim, device=device, dtype=dtype).requires_grad_() for _ in range(3)
        )
        work = flops.attention_flops(batch * seq, seq, heads * head_dim, causal=1)
        shape = {"batch": batch, "heads": heads, "seq": seq, "head_dim": head_dim}

        def forward(_: int, q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
            with torch.no_grad():
                return fn.scaled_dot_product_attention(q, k, v, is_causal=True)

        yield Operation("attention", name_of(dtype), shape, work, forward)
        out = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)

        def backward(_: int, out: Any = out, leaves: Any = (q, k, v), grad: Any = grad) -> Any:
            return torch.autograd.grad(out, leaves, grad, retain_graph=True)

        yield Operation("attention-backward", name_of(dtype), shape, work * 5 // 2, backward)
        del q, k, v, out, grad, forward, backward


def memory(device: str, sizes: Sizes) -> Iterator[Operation]:
    """A copy, which reads and writes as much, and a sum of two, which reads twice what it writes."""
    for nbytes in sizes.memory:
        elements = nbytes // 4
        source, other, target = (torch.ones(elements, device=device) for _ in range(3))

        def copy(_: int, target: Any = target, source: Any = source) -> Any:
            return target.copy_(source)

        def add(_: int, target: Any = target, source: Any = source, other: Any = other) -> Any:
            return torch.add(source, other, out=target)

        for reads, run in ((1, copy), (2, add)):
            shape = {"bytes": 4 * elements, "reads": reads, "writes": 1}
            yield Operation("memory", "fp32", shape, (reads + 1) * 4 * elements, run)
        del source, other, target, copy, add, run


def copies(_: str, sizes: Sizes) -> Iterator[Operation]:
    """Copies between pinned host memory and the device."""
    for nbytes in sizes.copies:
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        for kind, target, source in (("host-to-device", there, host), ("device-to-host", host, there)):

            def run(_: int, target: Any = target, source: Any = source) -> Any:
                return target.copy_(source, non_blocking=True)

            yield Operation(kind, "", {"bytes": nbytes}, nbytes, run)
        del host, there, target, source, run
