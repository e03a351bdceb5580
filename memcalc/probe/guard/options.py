"""How a run is to be guarded, checked before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from memcalc.errors import CombinationError, InputError, UnknownNameError
from memcalc.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from memcalc.probe.guard.pressure import Meter

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
