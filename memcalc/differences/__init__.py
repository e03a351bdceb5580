"""Two jobs beside one another: what is different, and what each change costs or saves."""

from __future__ import annotations

from memcalc.differences.answer import diff

__all__ = ["diff"]
