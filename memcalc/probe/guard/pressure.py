"""Whether memory is short, and whether there is room again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memcalc.frameworks import habits_of
from memcalc.frameworks.environment import ALLOCATOR
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.specs.strategy import Strategy


@dataclass(frozen=True)
class Reading:
    """The allocator's figures at one moment [bytes]; peaks are since the last reset."""

    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    retries: int = 0
    """Allocations so far that succeeded only after the cache had been given back."""
    ooms: int = 0
    """Allocations so far that failed."""


class Meter(Protocol):
    """Where readings come from."""

    def read(self) -> Reading | None:
        """Return the figures without waiting for the device; None where there is nothing to read yet."""

    def reset_peaks(self) -> None:
        """Begin a new window."""

    def release(self) -> None:
        """Give cached memory back, so that what is reserved falls to what a smaller step needs."""


class NoMeter:
    """The meter of a run without a device allocator: it reads nothing."""

    def read(self) -> Reading | None:
        """Return nothing."""
        return None

    def reset_peaks(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class PressureLevel:
    """Whether memory is short in one window, and what was reserved."""

    short: str = ""
    """Why memory is short; empty where it is not."""
    reserved: int = 0
    """Bytes that were reserved in the window."""
    retries: int = 0


class PressureRule:
    """Compares each window's readings with the limit, and with those of the window before."""

    def __init__(self, limit: int | None, *, peaks: bool = True) -> None:
        self.limit = limit
        self._peaks = peaks
        self._last: Reading | None = None

    def level(self, sample: Reading | None) -> PressureLevel:
        """Judge a window: short where more is reserved than the limit, or where the allocator ran out on the way.

        Peaks that are never reset say nothing about one window; then what is reserved at its end counts.
        """
        if sample is None:
            return PressureLevel()
        last, self._last = self._last, sample
        reserved = sample.reserved_peak if self._peaks else sample.reserved
        retries = sample.retries - last.retries if last else 0
        failed = sample.ooms - last.ooms if last else 0
        reasons = []
        if self.limit is not None and reserved > self.limit:
            reasons.append(f"reserved {reserved / GIB:.2f} GiB, above {self.limit / GIB:.2f} GiB")
        if retries > 0 or failed > 0:
            reasons.append(f"the allocator gave its cache back {retries} times to find room, and failed {failed} times")
        return PressureLevel("; ".join(reasons), reserved, retries)

    def has_room(self, reserved: int, more: int) -> bool:
        """Whether a plan that needs so much more than the one in force would stay below the limit."""
        return self.limit is not None and reserved > 0 and reserved + more <= self.limit


# Settings that change memory where it is short, and that exist in the run's framework.


CACHED = 0.1
"""Share of what is reserved that may be unused before the allocator's settings are named: a choice."""


def settings_for(sample: Reading | None, strategy: Strategy | None, buffer_bytes: int = 0) -> Iterator[str]:
    """Yield what can be set: the allocator's rules, and under FSDP 1 the width of the model's own buffers.

    FSDP 1 has ``buffer_dtype`` (torch 2.13 distributed/fsdp/api.py, MixedPrecision); FSDP 2's policy has none
    (_fully_shard/_fsdp_api.py). ``buffer_bytes`` are those of fp32 buffers.
    """
    if sample is not None and sample.reserved_peak - sample.allocated_peak > CACHED * sample.reserved_peak:
        unused = (sample.reserved_peak - sample.allocated_peak) / GIB
        yield from (f"{unused:.2f} GiB are cached and unused: {text}" for text in _allocator(strategy))
    shards = strategy is not None and strategy.zero >= 2 and habits_of(strategy.framework).flat_units
    if shards and buffer_bytes:
        yield f"MixedPrecision(buffer_dtype=torch.bfloat16) halves {buffer_bytes / GIB:.2f} GiB of buffers"


def _allocator(strategy: Strategy | None) -> Iterator[str]:
    """Yield the setting of the allocator that is not in force yet."""
    configured = " ".join(os.environ.get(name, "") for name in ALLOCATOR).lower()
    expandable = "expandable_segments:true" in configured or bool(strategy and strategy.expandable_segments)
    if expandable or "cudamallocasync" in configured:
        return
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    if "max_split_size_mb" not in configured:
        setting += ", or max_split_size_mb:512 where the driver has no virtual memory"
    yield setting
