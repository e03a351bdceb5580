"""The group of all ranks that torchrun started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["joined"]

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
