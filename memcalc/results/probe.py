"""The answer of ``memcalc probe``: every job, what was read and what was predicted."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.specs.model import Frozen

ProbeStatus = Literal["planned", "measured", "oom", "failed", "skipped", "waiting"]
"""Would run; ran; ran out of memory; ended otherwise without a result; left out, with the reason; not reached."""


class ProbeFigure(Frozen):
    """One figure of a run beside its prediction [bytes]."""

    name: str
    """allocated, reserved, device, or a phase of the second step."""
    measured: int
    predicted: int
    error: float
    """Predicted over measured, less one."""


class ProbedJob(Frozen):
    """One job of a probe."""

    id: str
    kind: str
    status: ProbeStatus
    reason: str = ""
    """Why it was left out, or how it ended."""
    memory: int = 0
    """Predicted need of device memory [bytes]."""
    need: float = 0.0
    """Rough need of time [s]."""
    ranks: int = 1
    meant_to_fail: bool = False
    figures: tuple[ProbeFigure, ...] = ()
    seconds: float | None = None
    """Measured time of one step [s]."""
    found: str = ""
    """In words, of a measurement of the machine."""


class Probed(Frozen):
    """The answer of ``memcalc probe``."""

    schema_: Literal["memcalc.probe/1"] = Field(default="memcalc.probe/1", alias="schema", serialization_alias="schema")
    version: str
    device: str
    gpu: str
    """The preset."""
    name: str
    """What the driver calls the GPU."""
    capacity: int
    """Of the GPU [bytes]; 0 for a CPU."""
    free: int
    """What other processes left of it [bytes]."""
    suite: str
    dry_run: bool
    jobs: tuple[ProbedJob, ...]
    counts: dict[str, int]
    """Jobs by status."""
    resumed: int = 0
    """Results that an earlier, interrupted call had left."""
    need: float = 0.0
    """Rough need of time of the jobs that would run, or that wait [s]."""
    output: str = ""
    """The runs file; empty after a dry run."""
    commands: tuple[str, ...] = ()
    """What can be done next."""
