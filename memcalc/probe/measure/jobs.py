"""What a probe is made of: jobs, each run in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Job"]


@dataclass(frozen=True)
class Job:
    """One measurement, for one fresh process or for one of torchrun's groups of them."""

    kind: str
    """Which measurement, and so which function of the live side."""
    id: str
    """Its name in the output; each stands once."""
    settings: dict[str, Any]
    """What the function is given, as JSON."""
    ranks: int = 1
    """Processes; more than one are started by torchrun."""
    seconds: float = 0.0
    """Rough need of time [s]."""
    memory: int = 0
    """Rough need of device memory [bytes]."""
