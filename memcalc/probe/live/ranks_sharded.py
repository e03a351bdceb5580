"""Training steps on several ranks: FSDP2 and DistributedDataParallel, read phase by phase."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh

from memcalc.probe.live.ranks_group import joined
from memcalc.probe.live.step_models import Training, build
from memcalc.probe.live.steps import CountingMeter, CudaMeter, Phases, device_figure, figures_of, software, train
from memcalc.probe.live.timeline import Timeline, resizing
from memcalc.probe.measure import smi

__all__ = ["distributed", "largest_of", "run_sharded", "shard"]

COUNTED_STEPS, TIMED_STEPS = 2, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class RealLine(Timeline):
    """Counts what a GPU would hold, and not what stands in for it on a CPU.

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
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, figures)
    return {"run": largest_of(every)}


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
    held, how = device_figure(before)
    if held is not None:
        figures["measured"]["device"] = held
    seconds = [last - first for first, last in zip(ends[COUNTED_STEPS:], ends[COUNTED_STEPS + 1 :], strict=False)]
    return figures | {"seconds": statistics.median(seconds), "software": software(), "comment": how}


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


def largest_of(every: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the rank that needs most, phase by phase; a comment says where ranks differ.

    >>> ranks = [{"measured": {"allocated": size}, "phases": {"step": size}} for size in (7, 9)]
    >>> largest_of(ranks)["phases"], largest_of(ranks)["comment"]
    ({'step': 9}, 'allocated of rank 0: 7')
    """
    first = every[0]
    merged = {name: _merged(value, [one.get(name) for one in every]) for name, value in first.items()}
    differ = [
        f"{name} of rank 0: {size}" for name, size in first["measured"].items() if size != merged["measured"][name]
    ]
    said = [part for part in (first.get("comment", ""), *differ) if part]
    return merged | {"rank": "max"} | ({"comment": "; ".join(said)} if said else {})


def _merged(first: Any, every: list[Any]) -> Any:
    """Return the largest numbers of all ranks, and the first rank's words."""
    if isinstance(first, dict):
        return {name: max(one[name] for one in every if name in one) for name in first}
    return first if isinstance(first, str) else max(every)
