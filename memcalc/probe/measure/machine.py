"""Jobs that measure the machine."""

from __future__ import annotations

from memcalc.probe.measure.jobs import Job

__all__ = ["machine_jobs"]


def machine_jobs(device: str, gpus: int) -> list[Job]:  # noqa: ARG001
    """Return the jobs that are no training rows."""
    return [Job("machine", "machine", {}, seconds=60.0), Job("rates", "rates", {"seconds": 45.0}, seconds=60.0)]
