"""Closed forms: pure functions of one to five lines, numbers or columns in, bytes or seconds out."""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
"""A column: a NumPy array of integers (bytes, counts) or floats (seconds), or one number.

NumPy's stubs give arithmetic between scalars and arrays no common type, and every formula takes both.
"""
