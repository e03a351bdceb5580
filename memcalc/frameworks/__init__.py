"""Each runtime's habits as data: which copies of a parameter exist, in which width, and which buffers it keeps."""

from memcalc.frameworks.habits import FRAMEWORKS, Habits, Widths, habits_of

__all__ = ["FRAMEWORKS", "Habits", "Widths", "habits_of"]
