"""Memory and rates of several ranks; each function runs in every process that torchrun started."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh

from memcalc.formulas import communication as comm
from memcalc.probe.live.machine import UnsteadyError, outside
from memcalc.probe.live.rates import Timer, name_of
from memcalc.probe.live.step_models import Training, build
from memcalc.probe.live.steps import CountingMeter, CudaMeter, Phases, device_figure, figures_of, software, train
from memcalc.probe.live.timeline import Timeline, resizing
from memcalc.probe.measure import smi
from memcalc.units import GIB, KIB, MIB

FIRST_USE = (4 * KIB, 4 * MIB, 256 * MIB)
"""Payloads of a first use: NCCL chooses protocol and algorithm by size, and connects each when it is first chosen."""
FIRST_USE_CPU = (4 * KIB,)


def run_collectives(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measure what communicators take, one after another, and the rates of collectives by size.

    On a CPU the same collectives run, and no communicator is reported: they take no device memory.
    """
    device = job["device"]
    with joined(device):
        communicators = list(_communicators(device))
        rates = list(_rates(device, job.get("bytes") or _payloads(device)))
    return {"communicators": communicators if device == "cuda" else [], "rates": rates}


# -------------------------------------------------------------------------------------------------------- communicators


@dataclass(frozen=True)
class Group:
    """A process group, and what runs in it first."""

    kind: str
    ranks: int
    collective: str
    group: Any


def groups_of(world: int, new_group: Callable[[list[int]], Any]) -> Iterator[Group]:
    """Yield the groups in the order in which they are first used; every rank makes all of them."""
    everyone = list(range(world))
    yield Group("world", world, "all-reduce", None)
    yield Group("group", world, "all-reduce", new_group(everyone))
    half = world // 2
    if half > 1:
        halves = [new_group(everyone[i : i + half]) for i in range(0, half * 2, half)]
        mine = min(dist.get_rank() // half, 1)
        yield Group("group", half, "all-reduce", halves[mine])
    yield Group("group", world, "all-gather and reduce-scatter", new_group(everyone))
    yield Group("group", world, "all-to-all", new_group(everyone))


def _communicators(device: str) -> Iterator[dict[str, Any]]:
    world = dist.get_world_size()
    payloads = FIRST_USE if device == "cuda" else FIRST_USE_CPU
    # in the allocator before the first reading
    buffer = torch.empty(2 * max(payloads), dtype=torch.uint8, device=device)
    for group in groups_of(world, dist.new_group):
        grown = appeared(partial(_first_use, group, payloads, buffer), device)
        if grown is not None:
            yield {
                "kind": group.kind,
                "ranks": group.ranks,
                "gpus": world,
                "collective": group.collective,
                "bytes": grown,
            }


def appeared(use: Callable[[], None], device: str, cuda: Any = torch.cuda) -> int | None:
    """Return the device memory that `use` leaves outside the allocator [bytes].

    None on a CPU, and where another process moves the figure: the rank goes on with the others all the same.
    """
    if device != "cuda":
        use()
        return None
    before = _outside(cuda)
    use()
    after = _outside(cuda)
    return None if before is None or after is None else max(after - before, 0)


def _outside(cuda: Any) -> int | None:
    try:
        return outside(cuda)
    except UnsteadyError:
        return None


def _first_use(group: Group, payloads: tuple[int, ...], buffer: torch.Tensor) -> None:
    """Run the collective once for each payload, in memory that is there already."""
    for payload in payloads:
        full = buffer[:payload]
        share = buffer[payload : payload + payload // group.ranks]
        full = full[: share.numel() * group.ranks]
        if group.collective == "all-to-all":
            dist.all_to_all_single(buffer[payload : payload + full.numel()], full, group=group.group)
        elif group.collective == "all-reduce":
            dist.all_reduce(full, group=group.group)
        else:
            dist.all_gather_into_tensor(full, share, group=group.group)
            dist.reduce_scatter_tensor(share, full, group=group.group)


# ---------------------------------------------------------------------------------------------------------------- rates


def _payloads(device: str) -> list[int]:
    return [64 * KIB << (2 * i) for i in range(8)] if device == "cuda" else [4 * KIB, 64 * KIB]


def _rates(device: str, payloads: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what this rank timed: bytes are those that one rank sends in a ring, as the estimate counts them."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ranks, timer = dist.get_world_size(), Timer(device)
    for payload in payloads:
        full = torch.ones(payload // dtype.itemsize // ranks * ranks, dtype=dtype, device=device)
        share = torch.ones(full.numel() // ranks, dtype=dtype, device=device)
        nbytes = full.numel() * dtype.itemsize
        collectives: dict[str, tuple[Callable[[int], Any], Callable[[int, int], Any]]] = {
            "all-reduce": (partial(_all_reduce, full), comm.all_reduce_bytes),
            "all-gather": (partial(_all_gather, full, share), comm.all_gather_bytes),
            "reduce-scatter": (partial(_reduce_scatter, full, share), comm.reduce_scatter_bytes),
        }
        for kind, (run, sent) in collectives.items():
            yield {
                "kind": kind,
                "dtype": name_of(dtype),
                "shape": {"bytes": nbytes, "ranks": ranks},
                "work": float(sent(nbytes, ranks)),
                "seconds": _seconds(timer, run, nbytes),
                "gpus": ranks,
            }


def _all_reduce(full: torch.Tensor, _: int) -> None:
    dist.all_reduce(full)


def _all_gather(full: torch.Tensor, share: torch.Tensor, _: int) -> None:
    dist.all_gather_into_tensor(full, share)


def _reduce_scatter(full: torch.Tensor, share: torch.Tensor, _: int) -> None:
    dist.reduce_scatter_tensor(share, full)


def _seconds(timer: Timer, run: Callable[[int], Any], nbytes: int) -> float:
    """Return the time of one collective [s]; all ranks run as many, so that the number depends on the size alone."""
    count = max(2, min(50, GIB // (8 * nbytes)))
    timer.batch(run, 2)
    return statistics.median(timer.batch(run, count) for _ in range(5)) / count


# --------------------------------------------------------------------------------------------------------------- group


_PATIENCE_S = 120.0
"""After which a collective that a rank never joins fails [s]."""


@contextlib.contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the group of all ranks, as frameworks do: NCCL on GPUs, whose communicators are made at their first use.

    A group that is there already is used, and left. After an error it is left as it is: to end it would wait for ranks
    that may never come.
    """
    if dist.is_initialized():
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=_PATIENCE_S))
    yield
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- FSDP2 and DDP step by step


COUNTED_STEPS, TIMED_STEPS = 2, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RealLine(Timeline):
    """Counts what a GPU would allocate, without the CPU's substitutes.

    DTensor asks fake tensors of global shape what an operator gives, once for each shape. Gloo reduces and scatters in
    a copy of its input, which shows when its work is waited for and the result is split off; NCCL needs none.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.split.Tensor and args[0].untyped_storage()._cdata not in self.ids:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, tensor: torch.Tensor, kind: str = "") -> None:
        """Follow the storage of a tensor with values."""
        if not isinstance(tensor, FakeTensor):
            super().add(tensor, kind)


class ShardedMeter(CountingMeter):
    """Counts storages whose size FSDP changes in place as well."""

    def __init__(self, training: Training) -> None:
        super().__init__(training, RealLine)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(resizing(self._line))
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._stack.close()


def run_sharded(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train on all ranks; each figure is the largest of any rank."""
    device = job["device"]
    before = {card.uuid: card.used for card in smi.cards()} if device == "cuda" else {}
    with joined(device):
        figures = _trained(job, device, before)
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, figures)
    return {"run": largest_of(by_rank)}


def _trained(job: Mapping[str, Any], device: str, before: Mapping[str, int]) -> dict[str, Any]:
    torch.manual_seed(0)
    training = build(
        job, device, adapt=lambda model, blocks: distributed(model, blocks, job["run"]["strategy"], device)
    )
    training.micro_batches = max(training.micro_batches // dist.get_world_size(), 1)
    if device != "cuda":
        return figures_of(train(training, ShardedMeter(training), lambda steps: steps >= COUNTED_STEPS)) | {
            "software": software()
        }
    gc.collect()
    torch.cuda.empty_cache()
    ends: list[float] = []

    def after(steps: int) -> bool:  # every rank makes as many steps
        torch.cuda.synchronize()
        ends.append(time.perf_counter())
        return steps >= COUNTED_STEPS + TIMED_STEPS

    phases: Phases = train(training, CudaMeter(), after)
    figures = figures_of(phases)
    device_bytes, source = device_figure(before)
    if device_bytes is not None:
        figures["measured"]["device"] = device_bytes
    seconds = [last - first for first, last in zip(ends[COUNTED_STEPS:], ends[COUNTED_STEPS + 1 :], strict=False)]
    return figures | {"seconds": statistics.median(seconds), "software": software(), "comment": source}


def distributed(
    model: nn.Module, blocks: Mapping[str, nn.Module], strategy: Mapping[str, Any], device: str
) -> nn.Module:
    """Return the model as the strategy's framework trains it."""
    if strategy["framework"] == "ddp":
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[torch.cuda.current_device()] if device == "cuda" else None
        )
    shard(model, blocks, strategy, device)
    return model


def shard(model: nn.Module, blocks: Mapping[str, nn.Module], strategy: Mapping[str, Any], device: str) -> None:
    """Apply FSDP2 to every block, then to the root, as torchtitan does: fp32 shards, 16-bit compute."""
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError:  # torch 2.4 and 2.5
        from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=DTYPES[strategy.get("reduce_dtype", "fp32")])
    reshard = strategy["zero"] == 3
    for block in blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def largest_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the rank that needs most, phase by phase; a comment says where ranks differ.

    >>> ranks = [{"measured": {"allocated": size}, "phases": {"step": size}} for size in (7, 9)]
    >>> largest_of(ranks)["phases"], largest_of(ranks)["comment"]
    ({'step': 9}, 'allocated of rank 0: 7')
    """
    first = ranks[0]
    merged = {name: _merged(value, [figures.get(name) for figures in ranks]) for name, value in first.items()}
    differ = [
        f"{name} of rank 0: {size}" for name, size in first["measured"].items() if size != merged["measured"][name]
    ]
    comments = [part for part in (first.get("comment", ""), *differ) if part]
    return merged | {"rank": "max"} | ({"comment": "; ".join(comments)} if comments else {})


def _merged(first: Any, values: list[Any]) -> Any:
    """Return the largest numbers of all ranks, and the first rank's words."""
    if isinstance(first, dict):
        return {name: max(value[name] for value in values if name in value) for name in first}
    return first if isinstance(first, str) else max(values)
