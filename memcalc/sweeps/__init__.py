"""Many jobs at once: every combination of lists of options, to one table."""

from memcalc.sweeps.run import sweep

__all__ = ["sweep"]
