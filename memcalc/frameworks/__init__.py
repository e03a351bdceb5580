"""Each runtime's habits as data: which terms exist, in which dtype, alive in which phase."""

from memcalc.frameworks.habits import Habits, Widths
from memcalc.frameworks.table import FRAMEWORKS, grows_segments, habits_of

__all__ = ["FRAMEWORKS", "Habits", "Widths", "grows_segments", "habits_of"]
