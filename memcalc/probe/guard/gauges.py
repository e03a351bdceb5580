"""The record as gauges of Prometheus, one series for each rank.

Two processes never listen on one port: each rank of a machine serves its own, ``port`` plus its local rank. In the
client's multiprocess mode (``PROMETHEUS_MULTIPROC_DIR``) the first rank of a machine serves all of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from memcalc.errors import InputError, MissingError
from memcalc.probe.guard.record import Value

if TYPE_CHECKING:
    from memcalc.probe.guard.options import Options

__all__ = ["GAUGES", "Gauges"]

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
    "allocator_retries": ("memcalc_", "Allocations of the window for which the cache had to be given back."),
    "steps_taken": ("memcalc_", "Steps to safer plans so far."),
    "step": ("memcalc_", "Optimizer steps so far."),
    "pressure": ("memcalc_", "1 where memory was short in the window, else 0."),
}
"""Of each number of the record, what its metric's name begins with, and its help."""

_KNOWN: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Gauges by registry: a second guard of a process uses those of the first."""


class Gauges:
    """Gauges with the labels ``plan`` and ``rank``, and what shows them where that was asked for."""

    def __init__(self, options: Options, local_rank: int) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            said = "prometheus_client is needed for metrics: pip install 'memcalc[prometheus]'."
            raise MissingError(said) from None
        self._client = client
        self._registry = options.registry or client.REGISTRY
        if self._registry not in _KNOWN:
            _KNOWN[self._registry] = {key: self._made(key) for key in GAUGES}
        self._gauges = _KNOWN[self._registry]
        self._names = [GAUGES[key][0] + key for key in GAUGES]
        self._textfile = options.textfile
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

        whole = self._client.CollectorRegistry()
        MultiProcessCollector(whole)  # type: ignore[no-untyped-call]
        return self._listening(port, whole)

    def _listening(self, port: int, registry: Any) -> Any:
        try:
            return self._client.start_http_server(port, registry=registry)[0]
        except (OSError, OverflowError) as error:
            raise InputError("port", port, f"must be free to listen on ({error})") from None

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
