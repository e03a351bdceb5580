"""The CUDA caching allocator as a meter."""

from __future__ import annotations

import torch

from memcalc.probe.guard.meter import Meter, NoMeter, Reading

__all__ = ["CudaMeter", "usual_meter"]


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


def usual_meter(*, resets: bool = True) -> Meter:
    """Return the meter of this machine."""
    return CudaMeter(resets=resets) if torch.cuda.is_available() else NoMeter()
