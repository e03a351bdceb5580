"""What the guard reads of a device's memory: a small protocol, so that any source of readings can stand in for CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Meter", "NoMeter", "Reading"]


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
