"""One decision for all ranks: the largest of what each says, at the same step."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import distributed

from memcalc.errors import CombinationError

__all__ = ["Ranks"]


class Ranks:
    """The ranks of the run, one where torch.distributed is not initialised.

    What is agreed goes over a group of its own on gloo, so that the device's stream is neither used nor waited for;
    without gloo it goes over the run's own group, which waits for the device at reporting steps.
    """

    def __init__(self) -> None:
        self.many = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if self.many else int(os.environ.get("RANK", "0"))
        self.world = distributed.get_world_size() if self.many else int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", str(self.rank)))
        own = self.many and distributed.is_gloo_available()
        self._group = distributed.new_group(backend="gloo") if own else None
        self._device = "cpu" if own or not torch.cuda.is_available() else "cuda"

    def check(self, gpus: int) -> None:
        """Refuse a run on other ranks than the plan's, on which its global batch would be another."""
        if self.world != gpus:
            raise CombinationError("ranks", self.world, f"the plan is for {gpus}, and its global batch depends on them")
        if self.world > 1 and not self.many:
            said = "torch.distributed must be initialised first, so that all ranks take the same step"
            raise CombinationError("ranks", self.world, said)

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return for each number the largest of all ranks, which must all call this at the same step."""
        if not self.many:
            return list(values)
        told = torch.tensor(values, dtype=torch.int64, device=self._device)
        distributed.all_reduce(told, op=distributed.ReduceOp.MAX, group=self._group)
        return [int(value) for value in told.tolist()]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None
        self.many = False
