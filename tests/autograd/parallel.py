"""Data-parallel training steps on a fake process group: nothing is sent, and every rank looks like rank 0."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from autograd import measure, models, timeline
from memcalc.probe.live.cuda_like import cuda_like

SHAPES = "_propagate_tensor_meta_non_cached"
"""DTensor's method that runs an operator on whole fake tensors, for the shape of its result."""
REAL_SHAPES = getattr(ShardingPropagator, SHAPES)


def shapes_apart(self: ShardingPropagator, schema: Any) -> Any:
    """Run that method outside of the harness's modes: on a GPU its tensors have no memory."""
    with _disable_current_modes():
        return REAL_SHAPES(self, schema)


@contextlib.contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """Make this process rank 0 of ``world`` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with contextlib.ExitStack() as stack:
            for name in ("_verify_param_shape_across_processes", "_sync_module_states"):  # they read values
                stack.enter_context(mock.patch.object(nn.parallel.distributed, name, return_value=None))
            stack.enter_context(mock.patch.object(ShardingPropagator, SHAPES, shapes_apart))
            yield
    finally:
        dist.destroy_process_group()


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard: bool,
    root: bool | None = None,
    compute: torch.dtype,
    reduce: torch.dtype,
) -> None:
    """Apply FSDP2 to every block, then to the root, which keeps its weights after forward unless ``root`` is true."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for block in models.blocks_of(model).values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=root)


def fsdp_timeline(
    family: str,
    world: int,
    *,
    reshard: bool = True,
    root: bool | None = None,
    compute: torch.dtype = torch.bfloat16,
    reduce: torch.dtype = torch.float32,
    recompute: str = "none",
    optimizer: str = "foreach",
    rule: str = "adamw",
    batch: int = models.BATCH,
    seq: int = models.SEQ,
    layers: int | None = None,
    attention: str = "flash",
    dropout: bool | float | None = None,
    steps: int = 2,
    micro_batches: int = 1,
    **changes: Any,
) -> timeline.Steps:
    """Train with FSDP2 over ``world`` ranks: fp32 shards, ``compute`` parameters, ``reduce`` gradients on the wire."""
    with fake_ranks(world), contextlib.ExitStack() as stack:
        mesh = init_device_mesh("cpu", (world,))
        stack.enter_context(cuda_like("auto" if attention == "flash" else attention))
        model, run, _ = measure.build(
            family,
            precision="fp32",
            attention=attention,
            dropout=dropout,
            recompute=recompute,
            batch=batch,
            seq=seq,
            layers=layers,
            **changes,
        )
        shard(model, mesh, reshard=reshard, root=root, compute=compute, reduce=reduce)
        return timeline.train(model, run, timeline.optimizer_of(model, optimizer, rule), steps, micro_batches)


class _Reducer:
    """DDP's reducer, less the regrouping of buckets by arrival, which reads values and keeps their sum."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @staticmethod
    def _rebuild_buckets() -> bool:
        return False


def _sent(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hand the bucket back: the fake group's all-reduce has no result to wait for."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def ddp_timeline(
    family: str,
    world: int,
    *,
    precision: str = "fp32",
    recompute: str = "none",
    optimizer: str = "foreach",
    rule: str = "adamw",
    bucket_view: bool = False,
    batch: int = models.BATCH,
    seq: int = models.SEQ,
    layers: int | None = None,
    attention: str = "flash",
    dropout: bool | float | None = None,
    steps: int = 2,
    micro_batches: int = 1,
    **changes: Any,
) -> timeline.Steps:
    """Train with DistributedDataParallel over ``world`` ranks."""
    with fake_ranks(world), cuda_like("auto" if attention == "flash" else attention):

        def adapt(model: nn.Module) -> nn.Module:
            wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
            wrapped.register_comm_hook(None, _sent)
            wrapped.reducer = _Reducer(wrapped.reducer)
            return wrapped

        model, run, _ = measure.build(
            family,
            precision=precision,
            attention=attention,
            dropout=dropout,
            recompute=recompute,
            batch=batch,
            seq=seq,
            layers=layers,
            adapt=adapt,
            **changes,
        )
        return timeline.train(model, run, timeline.optimizer_of(model, optimizer, rule), steps, micro_batches)
