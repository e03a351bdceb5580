"""The answer of a sweep."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.specs.model import Frozen
from memcalc.specs.sweep import Mode


class Swept(Frozen):
    """The answer of a sweep."""

    schema_: Literal["memcalc.sweep/1"] = Field(default="memcalc.sweep/1", alias="schema", serialization_alias="schema")
    version: str
    mode: Mode
    jobs: int
    product: str
    """The lists that were multiplied."""
    counts: dict[str, int]
    """Jobs by status: fits, tight, does-not-fit, error."""
    columns: tuple[str, ...]
    rows: tuple[dict[str, Any], ...] = ()
    """One for each job, by column; none where they were written to a file."""
