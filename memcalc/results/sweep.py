"""The answer of a sweep."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.specs.model import Frozen
from memcalc.specs.sweep import Mode


class Swept(Frozen):
    """The answer of a sweep."""

    schema_: Literal["memcalc.sweep/1"] = Field(default="memcalc.sweep/1", alias="schema", serialization_alias="schema")
    """The name and version of this record."""
    version: str
    """Of memcalc."""
    mode: Mode
    """What is asked of each job: its best plan, or the estimate of its one strategy."""
    jobs: int
    """In all, [1]."""
    product: str
    """The lists that were multiplied."""
    counts: dict[str, int]
    """Jobs by status: fits, tight, does-not-fit, error."""
    columns: tuple[str, ...]
    """Names, in the order of a written table."""
    rows: tuple[dict[str, Any], ...] = ()
    """One for each job, by column; none where they were written to a file."""
