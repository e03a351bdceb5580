"""Many jobs at once: every combination of lists of words, to one table."""

from memcalc.sweeps.run import sweep

__all__ = ["sweep"]
