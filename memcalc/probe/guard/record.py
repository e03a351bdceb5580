"""What is reported of a window: one flat record, as a line of a log and as a line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from memcalc.probe.guard.meter import Reading
from memcalc.results import Plan

__all__ = ["Value", "Window", "as_json", "as_line"]

Value = int | float | str | None


@dataclass(frozen=True)
class Window:
    """What is known at a reporting step."""

    name: str
    step: int
    rank: int
    plan: Plan
    """The plan in force."""
    steps_taken: int
    """Steps to safer plans so far, less those that were taken back."""
    reading: Reading | None
    retries: int
    """Of the window."""
    recompute_ms: float | None
    pressure: bool

    def values(self) -> dict[str, Value]:
        """The record; bytes and milliseconds, None where nothing was measured."""
        read, plan, peak = self.reading, self.plan, self.plan.peak
        reserved, allocated = (read.reserved_peak, read.allocated_peak) if read else (None, None)
        return {
            "plan": self.name,
            "rank": self.rank,
            "step": self.step,
            "steps_taken": self.steps_taken,
            "recompute": plan.strategy.recompute,
            "micro_batch": plan.strategy.micro_batch,
            "accumulation_steps": plan.accumulation_steps,
            "cuda_memory_reserved_peak": reserved,
            "cuda_memory_allocated_peak": allocated,
            "predicted_reserved_peak": peak.reserved,
            "predicted_allocated_peak": peak.allocated,
            "predicted_device_peak": peak.device,
            "reserved_difference": None if reserved is None else reserved - peak.reserved,
            "allocated_difference": None if allocated is None else allocated - peak.allocated,
            "allocator_retries": self.retries,
            "checkpoint_recompute_time_ms": None if self.recompute_ms is None else round(self.recompute_ms, 3),
            "pressure": int(self.pressure),
        }


def as_line(values: dict[str, Value]) -> str:
    """Return a record as words of a log line.

    >>> as_line({"plan": "gpt2 small", "step": 10, "checkpoint_recompute_time_ms": None})
    'plan="gpt2 small" step=10 checkpoint_recompute_time_ms=-'
    """
    return " ".join(f"{name}={_word(value)}" for name, value in values.items())


def as_json(values: dict[str, Value]) -> str:
    """Return a record as a line of JSON."""
    return json.dumps({"schema": "memcalc.guard/1", **values}) + "\n"


def _word(value: Value) -> str:
    if value is None:
        return "-"
    text = str(value)
    return json.dumps(text) if not text or set(text) & set(' "=\n') else text
