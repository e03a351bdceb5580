"""Each runtime's habits as data: which terms exist, in which dtype, alive in which phase."""

from memcalc.frameworks.habits import Habits, Widths
from memcalc.frameworks.table import FRAMEWORKS, habits_of

__all__ = ["FRAMEWORKS", "Habits", "Widths", "habits_of"]
