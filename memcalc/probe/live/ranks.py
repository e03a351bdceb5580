"""What several ranks need and reach together; each function runs in every process that torchrun started."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memcalc.formulas import communication as comm
from memcalc.probe.live.machine_meter import UnsteadyError, outside
from memcalc.probe.live.ranks_group import joined
from memcalc.probe.live.ranks_sharded import run_sharded
from memcalc.probe.live.rates import Timer, name_of
from memcalc.units import GIB, KIB, MIB

__all__ = ["Group", "appeared", "groups_of", "run_collectives", "run_sharded"]

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
    room = torch.empty(2 * max(payloads), dtype=torch.uint8, device=device)  # in the allocator before the first reading
    for group in groups_of(world, dist.new_group):
        grown = appeared(partial(_first_use, group, payloads, room), device)
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


def _first_use(group: Group, payloads: tuple[int, ...], room: torch.Tensor) -> None:
    """Run the collective once for each payload, in memory that is there already."""
    for payload in payloads:
        whole = room[:payload]
        share = room[payload : payload + payload // group.ranks]
        whole = whole[: share.numel() * group.ranks]
        if group.collective == "all-to-all":
            dist.all_to_all_single(room[payload : payload + whole.numel()], whole, group=group.group)
        elif group.collective == "all-reduce":
            dist.all_reduce(whole, group=group.group)
        else:
            dist.all_gather_into_tensor(whole, share, group=group.group)
            dist.reduce_scatter_tensor(share, whole, group=group.group)


# ---------------------------------------------------------------------------------------------------------------- rates


def _payloads(device: str) -> list[int]:
    return [64 * KIB << (2 * i) for i in range(8)] if device == "cuda" else [4 * KIB, 64 * KIB]


def _rates(device: str, payloads: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what this rank timed: bytes are those that one rank sends in a ring, as the estimate counts them."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ranks, timer = dist.get_world_size(), Timer(device)
    for payload in payloads:
        whole = torch.ones(payload // dtype.itemsize // ranks * ranks, dtype=dtype, device=device)
        share = torch.ones(whole.numel() // ranks, dtype=dtype, device=device)
        nbytes = whole.numel() * dtype.itemsize
        collectives: dict[str, tuple[Callable[[int], Any], Callable[[int, int], Any]]] = {
            "all-reduce": (partial(_all_reduce, whole), comm.all_reduce_bytes),
            "all-gather": (partial(_all_gather, whole, share), comm.all_gather_bytes),
            "reduce-scatter": (partial(_reduce_scatter, whole, share), comm.reduce_scatter_bytes),
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


def _all_reduce(whole: torch.Tensor, _: int) -> None:
    dist.all_reduce(whole)


def _all_gather(whole: torch.Tensor, share: torch.Tensor, _: int) -> None:
    dist.all_gather_into_tensor(whole, share)


def _reduce_scatter(whole: torch.Tensor, share: torch.Tensor, _: int) -> None:
    dist.reduce_scatter_tensor(share, whole)


def _seconds(timer: Timer, run: Callable[[int], Any], nbytes: int) -> float:
    """Return the time of one collective [s]; all ranks run as many, so that the number depends on the size alone."""
    count = max(2, min(50, GIB // (8 * nbytes)))
    timer.batch(run, 2)
    return statistics.median(timer.batch(run, count) for _ in range(5)) / count
