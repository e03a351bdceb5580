"""A plan handed on: saved with what to go back to, and written as a framework's own config."""

from __future__ import annotations

from memcalc.handoff.exporting import export
from memcalc.handoff.saved import load, save

__all__ = ["export", "load", "save"]
