"""Where records go: the log, a file of JSON lines, Prometheus."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from memcalc.errors import InputError, MissingError
from memcalc.files import output_path
from memcalc.probe.guard.options import Reading
from memcalc.results.plans import Plan

if TYPE_CHECKING:
    from memcalc.probe.guard.options import Options

Value = int | float | str | None


@dataclass(frozen=True)
class Window:
    """What is known at a reporting step."""

    name: str
    step: int
    rank: int
    plan: Plan | None
    """The plan in force; None for a run without one."""
    steps_taken: int
    """Steps to safer plans so far, less those that were taken back."""
    sample: Reading | None
    retries: int
    """Of the window."""
    recompute_ms: float | None
    pressure: bool
    micro_batch: int | None = None
    """Sequences; None where nobody says it."""
    accumulation_steps: int | None = None
    """Micro-batches of an optimizer step, likewise."""
    recompute_over: bool = False
    """Whether recomputation took longer than its limit."""
    accumulation_over: bool = False
    """Whether a step has more micro-batches than its limit."""

    def values(self) -> dict[str, Value]:
        """The record; bytes and milliseconds, None where nothing was measured."""
        read, plan = self.sample, self.plan
        peak = plan.peak if plan is not None else None
        reserved, allocated = (read.reserved_peak, read.allocated_peak) if read else (None, None)
        return {
            "plan": self.name,
            "rank": self.rank,
            "step": self.step,
            "steps_taken": self.steps_taken,
            "recompute": plan.strategy.recompute if plan is not None else None,
            "micro_batch": self.micro_batch,
            "accumulation_steps": self.accumulation_steps,
            "cuda_memory_reserved_peak": reserved,
            "cuda_memory_allocated_peak": allocated,
            "predicted_reserved_peak": None if peak is None else peak.reserved,
            "predicted_allocated_peak": None if peak is None else peak.allocated,
            "predicted_device_peak": None if peak is None else peak.device,
            "reserved_difference": None if reserved is None or peak is None else reserved - peak.reserved,
            "allocated_difference": None if allocated is None or peak is None else allocated - peak.allocated,
            "allocator_retries": self.retries,
            "checkpoint_recompute_time_ms": None if self.recompute_ms is None else round(self.recompute_ms, 3),
            "pressure": int(self.pressure),
            "recompute_over": int(self.recompute_over),
            "accumulation_over": int(self.accumulation_over),
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


GAUGES = {
    "cuda_memory_reserved_peak": ("", "Bytes that the allocator reserved at most in the window."),
    "cuda_memory_allocated_peak": ("", "Bytes of tensors at most in the window."),
    "checkpoint_recompute_time_ms": ("", "Milliseconds that checkpoints computed again in one optimizer step."),
    "accumulation_steps": ("", "Micro-batches of an optimizer step."),
    "micro_batch": ("memcalc_", "Sequences of a micro-batch."),
    "predicted_reserved_peak": ("memcalc_", "Bytes reserved that the plan in force predicts."),
    "predicted_allocated_peak": ("memcalc_", "Bytes of tensors that the plan in force predicts."),
    "predicted_device_peak": ("memcalc_", "Bytes on the device that the plan in force predicts."),
    "reserved_difference": ("memcalc_", "Reserved peak less the predicted one, in bytes."),
    "allocated_difference": ("memcalc_", "Allocated peak less the predicted one, in bytes."),
    "allocator_retries": ("memcalc_", "Allocations of the window that made the allocator free its cache."),
    "steps_taken": ("memcalc_", "Steps to safer plans so far."),
    "step": ("memcalc_", "Optimizer steps so far."),
    "pressure": ("memcalc_", "1 where memory was short in the window, else 0."),
    "recompute_over": ("memcalc_", "1 where recomputation took longer than its limit, else 0."),
    "accumulation_over": ("memcalc_", "1 where one step has more micro-batches than its limit, else 0."),
}
"""Of each number of the record, what its metric's name begins with, and its help."""

_KNOWN: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Gauges by registry: a second guard of a process uses those of the first."""


class Gauges:
    """Gauges with the labels ``plan`` and ``rank``, and their server or file if there is one."""

    def __init__(self, options: Options, local_rank: int) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            message = "prometheus_client is needed for metrics: pip install 'memcalc[prometheus]'."
            raise MissingError(message) from None
        self._client = client
        self._registry = options.registry or client.REGISTRY
        if self._registry not in _KNOWN:
            _KNOWN[self._registry] = {key: self._made(key) for key in GAUGES}
        self._gauges = _KNOWN[self._registry]
        self._names = [GAUGES[key][0] + key for key in GAUGES]
        self._textfile = options.textfile
        self._address = options.address or "127.0.0.1"
        self._server = None if options.port is None else self._served(options.port, local_rank)

    def _made(self, key: str) -> Any:
        """Return a gauge; of several processes the newest value of each rank counts."""
        lead, text = GAUGES[key]
        return self._client.Gauge(
            lead + key, text, ("plan", "rank"), registry=self._registry, multiprocess_mode="mostrecent"
        )

    def _served(self, port: int, local_rank: int) -> Any:
        """Listen on a port of the rank's own, or for all where the client collects from all."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return self._listening(port + local_rank, self._registry)
        if local_rank:
            return None
        from prometheus_client.multiprocess import MultiProcessCollector

        all_ranks = self._client.CollectorRegistry()
        MultiProcessCollector(all_ranks)  # type: ignore[no-untyped-call]
        return self._listening(port, all_ranks)

    def _listening(self, port: int, registry: Any) -> Any:
        try:
            return self._client.start_http_server(port, self._address, registry=registry)[0]
        except (OSError, OverflowError) as error:
            raise InputError("port", port, f"must be free to listen on at {self._address} ({error})") from None

    def show(self, values: dict[str, Value]) -> None:
        """Take the values of a record; what was not measured in it keeps its last value."""
        labels = str(values["plan"]), str(values["rank"])
        for key, gauge in self._gauges.items():
            value = values[key]
            if isinstance(value, int | float):
                gauge.labels(*labels).set(value)
        if self._textfile is not None:  # what else a registry has, such as the process's own, would stand in two files
            self._client.write_to_textfile(self._textfile, self._registry.restricted_registry(self._names))

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


LOG = logging.getLogger("memcalc.guard")


def of_rank(path: str, rank: int, world: int) -> str:
    """Return a rank's own file.

    >>> of_rank("runs/guard.jsonl", 3, 8), of_rank("guard.jsonl", 0, 1)
    ('runs/guard.rank3.jsonl', 'guard.jsonl')
    """
    file = Path(path)
    return path if world == 1 else str(file.with_name(f"{file.stem}.rank{rank}{file.suffix}"))


class Reporter:
    """One rank's records."""

    def __init__(self, options: Options, rank: int, local_rank: int, world: int) -> None:
        self._lines = None
        if options.jsonl is not None:
            self._lines = output_path(of_rank(options.jsonl, rank, world), force=True)
        self._gauges = None
        if options.publishes:
            named = options.textfile and of_rank(options.textfile, rank, world)
            self._gauges = Gauges(options.renamed(named), local_rank)

    def report(self, values: dict[str, Value]) -> None:
        """Write a record to log, file and gauges; a file that cannot be written does not end a run."""
        if LOG.isEnabledFor(logging.INFO):
            LOG.info("%s", as_line(values))
        try:
            if self._lines is not None:
                with self._lines.open("a", encoding="utf-8") as stream:
                    stream.write(as_json(values))
            if self._gauges is not None:
                self._gauges.show(values)
        except OSError as error:
            LOG.warning("step %s: the report was not written: %s.", values["step"], error)

    def close(self) -> None:
        """Stop listening."""
        if self._gauges is not None:
            self._gauges.close()
            self._gauges = None
