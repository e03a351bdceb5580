"""Pre-flight: a job's own config files, joined to one job, estimate_merged, and the smallest edit that makes it fit."""

from __future__ import annotations

from memcalc.preflight.answer import check, check_estimate

__all__ = ["check", "check_estimate"]
