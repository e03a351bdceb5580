"""The answer of ``memcalc calibrate``: each figure before and after, what held-back rows say, what is structural."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.specs.calibration import Calibration, Part
from memcalc.specs.model import Frozen


class CalibratedFigure(Frozen):
    """One figure of the shipped data beside what was measured."""

    part: Part
    """What it belongs to."""
    name: str
    """Within its part; with its class of allocator, or what a rate is of."""
    unit: str
    """Of ``shipped``, ``fitted``, ``low`` and ``high``; ``-`` for a share."""
    shipped: float | None
    """None where no figure is shipped."""
    fitted: float
    """As measured on this kind of GPU."""
    low: float | None = None
    """Ends of the readings, or of refits without a part of the rows; none for an end of a range."""
    high: float | None = None
    """The upper end, where ``low`` is the lower one."""
    rows: int
    """Readings that it stands on, [1]."""
    written: bool
    """Whether held-back rows are predicted better with its part."""


class Calibrated(Frozen):
    """The answer of ``memcalc calibrate``."""

    schema_: Literal["memcalc.calibrate/1"] = Field(
        default="memcalc.calibrate/1", alias="schema", serialization_alias="schema"
    )
    """The name and version of this record."""
    version: str
    """Of memcalc."""
    gpu: str
    """The preset that was calibrated."""
    figures: tuple[CalibratedFigure, ...]
    """All that were fitted, those that are not written among them."""
    calibration: Calibration
    """What the file holds."""
    not_predicted: tuple[str, ...]
    """Rows that memcalc cannot predict, which are not used."""
