"""The type of a column: a NumPy array of integers (bytes, counts) or floats (seconds), or one number."""

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""NumPy's stubs give arithmetic between scalars and arrays no common type, and every formula takes both."""
