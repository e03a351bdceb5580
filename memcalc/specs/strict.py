"""Bases of the records, and fields of those that hold measurements.

The three figures that are measured.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from memcalc.errors import InputError
from memcalc.units import parse_bytes


class Frozen(BaseModel):
    """Base of the records: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class Strict(BaseModel):
    """Base of the records of what was measured: besides, no text is taken for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)


def _size(value: object, info: ValidationInfo) -> int:
    """Read a size [bytes]; nothing that a run can hold is of size 0."""
    field = info.field_name or "size"
    size = parse_bytes(value, field)
    if not size:
        raise InputError(field, value, "must be above 0")
    return size


Size = Annotated[int, BeforeValidator(_size)]
"""Bytes, written as a number or with a unit."""
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]


Figure = Literal["allocated", "reserved", "device"]
"""What `torch.cuda.max_memory_allocated()`, `torch.cuda.max_memory_reserved()` and nvidia-smi read."""
FIGURES: tuple[Figure, ...] = ("allocated", "reserved", "device")
