"""What this machine is: asked in a process of its own, since a look at a GPU takes a context on it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

__all__ = ["run_look"]

PACKAGES = ("transformers", "peft")


def run_look(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return versions, and what torch says of the first GPU that it sees; a CPU is not described."""
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda or "", "gpus": 0}
    facts |= {name: _version(name) for name in PACKAGES}
    if job["device"] == "cuda" and torch.cuda.is_available():
        first = torch.cuda.get_device_properties(0)
        facts |= {
            "gpus": torch.cuda.device_count(),
            "name": first.name,
            "memory": first.total_memory,
            "uuid": str(getattr(first, "uuid", "")),
        }
    return {"look": facts}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
