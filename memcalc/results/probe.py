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
    """As read [bytes]."""
    predicted: int
    """As estimated [bytes]."""
    error: float
    """Predicted over measured, less one."""


class ProbedJob(Frozen):
    """One job of a probe."""

    id: str
    """Within the suite."""
    kind: str
    """Which measurement, such as ``step``, ``machine`` or ``rates``."""
    status: ProbeStatus
    """What became of it."""
    reason: str = ""
    """Why it was left out, or how it ended."""
    memory: int = 0
    """Predicted need of device memory [bytes]."""
    need: float = 0.0
    """Rough need of time [s]."""
    ranks: int = 1
    """Processes, [1]."""
    meant_to_fail: bool = False
    """Whether it is there to run out of memory."""
    figures: tuple[ProbeFigure, ...] = ()
    """Those that have a prediction; empty for a job that did not run."""
    seconds: float | None = None
    """Measured time of one step [s]."""
    found: str = ""
    """In words, of a measurement of the machine."""


class Probed(Frozen):
    """The answer of ``memcalc probe``."""

    schema_: Literal["memcalc.probe/1"] = Field(default="memcalc.probe/1", alias="schema", serialization_alias="schema")
    """The name and version of this record."""
    version: str
    """Of memcalc."""
    device: str
    """``cuda`` or ``cpu``."""
    gpu: str
    """The preset."""
    name: str
    """What the driver calls the GPU."""
    capacity: int
    """Of the GPU [bytes]; 0 for a CPU."""
    free: int
    """What other processes left of it [bytes]."""
    suite: str
    """``full``, ``small``, ``steps`` or ``machine``."""
    dry_run: bool
    """Whether jobs were planned and none was run."""
    jobs: tuple[ProbedJob, ...]
    """Those of the suite, in the order in which they are run."""
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
