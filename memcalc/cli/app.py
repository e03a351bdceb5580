"""All commands: importing their modules registers them."""

from __future__ import annotations

from memcalc.cli import answers, jobs, measurements, presets, serving  # noqa: F401 - importing registers commands
from memcalc.cli.registry import app

__all__ = ["app"]
