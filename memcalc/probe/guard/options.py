"""How a run is to be guarded, checked before it starts, and when memory counts as short."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from memcalc.errors import CombinationError, InputError, UnknownNameError
from memcalc.frameworks import habits_of
from memcalc.frameworks.environment import ALLOCATOR
from memcalc.units import GIB, parse_bytes, parse_count

if TYPE_CHECKING:
    from memcalc.specs.strategy import Strategy


OnPressure = Literal["report", "step", "restart"]
Stop = Literal["raise", "flag"]

KEPT_FREE = 0.05
"""Share of the usable memory that is kept free unless a threshold is given: a choice, not a measurement."""
WINDOWS = 3
"""Windows in a row with room to spare, before a step is taken back."""


@dataclass(frozen=True)
class Options:
    """The options of :func:`memcalc.guard`."""

    model: Any = None
    """The module in which recomputation is switched."""
    blocks: Any = None
    """Its blocks, where they are not found."""
    every: int = 10
    """Optimizer steps between reports."""
    threshold: float | str | None = None
    """A size, or a share of what is usable, that may be reserved."""
    recompute_limit: float | None = None
    """Milliseconds of an optimizer step that recomputation may take."""
    accumulation_limit: int | None = None
    """Micro-batches that an optimizer step may have."""
    micro_batch: int | None = None
    """Sequences of a micro-batch, where there is no plan."""
    accumulation_steps: int | None = None
    """Micro-batches of an optimizer step, where there is no plan."""
    on_pressure: OnPressure = "report"
    restart_dir: str | None = None
    """Where a restart's files are written."""
    to: str | None = None
    """The format of a restart's config; by the plan's framework where None."""
    stop: Stop = "raise"
    """Whether a restart is raised, or kept for the loop to ask for."""
    relax: bool = False
    """Whether steps are taken back once there is room."""
    reset_peaks: bool = True
    """Whether torch's peaks begin anew with each window."""
    name: str | None = None
    """What the run is called in reports; the model's name where None."""
    jsonl: str | None = None
    prometheus: bool = False
    port: int | None = None
    address: str | None = None
    """Where the port listens: this machine alone (127.0.0.1) where None."""
    textfile: str | None = None
    registry: Any = None
    """A registry of prometheus_client."""
    meter: Meter | None = None
    """Where readings come from; CUDA's allocator where None."""
    preset_dirs: Iterable[str] = field(default=())

    def __post_init__(self) -> None:
        if parse_count(self.every, "every") < 1:
            raise InputError("every", self.every, "must be a number of optimizer steps, at least 1")
        for name in ("accumulation_limit", "micro_batch", "accumulation_steps"):
            value = getattr(self, name)
            if value is not None and parse_count(value, name) < 1:
                raise InputError(name, value, "must be a whole number, at least 1")
        if self.recompute_limit is not None and not 0 < self.recompute_limit < float("inf"):
            raise InputError("recompute_limit", self.recompute_limit, "must be milliseconds per step, above 0")
        for name, allowed in (("on_pressure", get_args(OnPressure)), ("stop", get_args(Stop))):
            if getattr(self, name) not in allowed:
                raise UnknownNameError(name, getattr(self, name), f"must be one of {', '.join(allowed)}", allowed)
        if self.address is not None and self.port is None:
            raise CombinationError("address", self.address, "a port listens there: give port too")
        if self.relax and self.on_pressure != "step":
            raise CombinationError("relax", self.relax, "takes back steps: on_pressure='step'")

    @property
    def publishes(self) -> bool:
        """Whether there are gauges for Prometheus."""
        return self.prometheus or self.port is not None or self.textfile is not None or self.registry is not None

    def renamed(self, textfile: str | None) -> Options:
        """The same with a rank's own file for Prometheus."""
        return replace(self, textfile=textfile)


def check_given(options: Options, *, planned: bool) -> None:
    """Refuse options that belong to a run with a plan, or to one without."""
    if planned:
        given = next((name for name in ("micro_batch", "accumulation_steps") if getattr(options, name)), None)
        if given is not None:
            raise CombinationError(given, getattr(options, given), "the plan says it")
        return
    for name, usual in (("on_pressure", "report"), ("restart_dir", None)):
        if getattr(options, name) != usual:
            raise CombinationError(name, getattr(options, name), "there is no plan to go over to: give a saved plan")


def limit_of(threshold: float | str | None, usable: int) -> int:
    """Return the reserved bytes above which memory is short.

    ``threshold`` is a size, such as ``"37 GiB"``, or a share of what is usable.

    >>> limit_of(None, 1000), limit_of(0.8, 1000), limit_of("1 KiB", 1000)
    (950, 800, 1024)
    """
    if threshold is None:
        return int((1 - KEPT_FREE) * usable)
    if isinstance(threshold, float):
        if not 0 < threshold <= 1:
            raise InputError("threshold", threshold, "must be a size, or a share above 0 and up to 1 of what is usable")
        return int(threshold * usable)
    return parse_bytes(threshold, "threshold")


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
