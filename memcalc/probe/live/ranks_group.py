"""The group of all ranks that torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

__all__ = ["joined"]


@contextlib.contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the group of all ranks, as frameworks do: NCCL on GPUs, whose communicators are made at their first use."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
