"""The CUDA caching allocator as a meter."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.utils import checkpoint as checkpoints

from memcalc.errors import CombinationError
from memcalc.probe.guard.pressure import Meter, NoMeter, Reading


class CudaMeter:
    """``torch.cuda``'s own statistics of the current device: one call of its C++ code, which does not synchronise.

    A reset of the peaks is torch's own, so that ``torch.cuda.max_memory_allocated`` begins anew with each window;
    without ``resets`` they are left alone, and are those since the user's own last reset.
    """

    def __init__(self, *, resets: bool = True) -> None:
        self._resets = resets

    def read(self) -> Reading | None:
        """Return the figures of ``torch.cuda.memory_stats``; None before CUDA is used."""
        stats = torch.cuda.memory_stats_as_nested_dict()
        if not stats:
            return None
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Reading(
            allocated=allocated["current"],
            allocated_peak=allocated["peak"],
            reserved=reserved["current"],
            reserved_peak=reserved["peak"],
            retries=stats["num_alloc_retries"],
            ooms=stats["num_ooms"],
        )

    def reset_peaks(self) -> None:
        """Begin a new window."""
        if self._resets and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def release(self) -> None:
        """Give cached memory back to the driver."""
        torch.cuda.empty_cache()


def device_bytes() -> int | None:
    """Return the memory of this rank's GPU [bytes]; None where there is none."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def wide_buffer_bytes(model: Any) -> int:
    """Return the bytes of a model's fp32 buffers, such as tables of angles; 0 where it is no module."""
    buffers = model.buffers() if isinstance(model, torch.nn.Module) else ()
    return sum(each.untyped_storage().nbytes() for each in buffers if each.dtype == torch.float32)


def usual_meter(*, resets: bool = True) -> Meter:
    """Return the meter of this machine."""
    return CudaMeter(resets=resets) if torch.cuda.is_available() else NoMeter()


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
        has_gloo = self.many and distributed.is_gloo_available()
        self._group = distributed.new_group(backend="gloo") if has_gloo else None
        self._device = "cpu" if has_gloo or not torch.cuda.is_available() else "cuda"

    def check(self, gpus: int) -> None:
        """Refuse a run on other ranks than the plan's, on which its global batch would be another."""
        if self.world != gpus:
            raise CombinationError("ranks", self.world, f"the plan is for {gpus}, and its global batch depends on them")
        if self.world > 1 and not self.many:
            allowed = "torch.distributed must be initialised first, so that all ranks take the same step"
            raise CombinationError("ranks", self.world, allowed)

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return for each number the largest of all ranks, which must all call this at the same step."""
        if not self.many:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.int64, device=self._device)
        distributed.all_reduce(agreed, op=distributed.ReduceOp.MAX, group=self._group)
        return [int(value) for value in agreed.tolist()]

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None and distributed.is_initialized():
            distributed.destroy_process_group(self._group)
        self._group = None
        self.many = False


Span = Callable[[], float | None]
"""A span of time [ms], or None until the device has reached its end."""


class RecomputeTimer:
    """Times recomputation while it is armed: by CUDA events that are read once they have passed, or by the clock."""

    def __init__(self) -> None:
        self.armed = False
        self._inside = self._on_device = False
        self._samples: list[list[Span]] = []
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Patch torch's checkpoints to be timed, until :meth:`remove`."""
        frame, function, timer = checkpoints._CheckpointFrame, checkpoints.CheckpointFunction, self
        backward = function.backward

        class _CheckpointFrame(frame):  # type: ignore[valid-type, misc]
            """torch's own frame, with a function to recompute that can be timed."""

            def __init__(self, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
                super().__init__(timer.timed(recompute_fn), *args, **kwargs)

        def timed_backward(ctx: Any, *grads: Any) -> Any:
            if timer.armed:
                ctx.run_function = timer.timed(ctx.run_function)
            return backward(ctx, *grads)

        checkpoints._CheckpointFrame = _CheckpointFrame
        function.backward = staticmethod(timed_backward)
        self._undo = [
            lambda: setattr(checkpoints, "_CheckpointFrame", frame),
            lambda: setattr(function, "backward", staticmethod(backward)),
        ]

    def remove(self) -> None:
        """Leave torch as it was; frames that are still alive go on without being timed."""
        self.armed = False
        while self._undo:
            self._undo.pop()()

    def timed(self, again: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is timed while the timer is armed; one inside another counts once."""

        def run(*args: Any) -> Any:
            if not self.armed or self._inside:
                return again(*args)
            self._inside = True
            end = _begin_on_device() if self._on_device else _begin()
            try:
                return again(*args)
            finally:  # torch stops a recomputation early by an exception of its own
                self._samples[-1].append(end())
                self._inside = False

        return run

    def arm(self) -> None:
        """Begin a sample: time from here on."""
        self.armed = True
        self._on_device = torch.cuda.is_initialized()
        self._samples.append([])

    def disarm(self) -> None:
        """Time no more."""
        self.armed = False

    def collect(self) -> float | None:
        """Return the time of the last sample that the device has finished [ms]; None where there is none.

        It never waits for the device: what is not known yet is looked at again in the next window.
        """
        for index in range(len(self._samples) - 1, -1, -1):
            times = [span() for span in self._samples[index]]
            ready = [ms for ms in times if ms is not None]
            if len(ready) == len(times):
                del self._samples[: index + 1]
                return sum(ready, 0.0)
        return None


def _begin_on_device() -> Callable[[], Span]:
    """Begin a span of the device's stream; what is returned ends it."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()

    def end() -> Span:
        last.record()
        return lambda: first.elapsed_time(last) if last.query() else None

    return end


def _begin() -> Callable[[], Span]:
    """Begin a span of the clock."""
    started = time.perf_counter()

    def end() -> Span:
        took = 1e3 * (time.perf_counter() - started)
        return lambda: took

    return end
