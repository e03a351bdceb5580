"""The type of a column: a NumPy array of integers (bytes, counts) or floats (seconds) that broadcasts."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
