"""``memcalc triage``: where the bytes went, from a message or a memory snapshot."""

from memcalc.probe.triage.answer import triage

__all__ = ["triage"]
