"""The answer of ``memcalc calibrate``: each figure before and after, what held-back rows say, what is structural."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.specs.calibration import Calibration, Part
from memcalc.specs.model import Frozen


class CalibratedFigure(Frozen):
    """One figure of the shipped data beside what was measured."""

    part: Part
    name: str
    unit: str
    shipped: float | None
    """None where no figure is shipped."""
    fitted: float
    low: float | None = None
    """Ends of the readings, or of refits without a part of the rows; none for an end of a range."""
    high: float | None = None
    rows: int
    written: bool
    """Whether held-back rows are predicted better with its part."""


class Calibrated(Frozen):
    """The answer of ``memcalc calibrate``."""

    schema_: Literal["memcalc.calibrate/1"] = Field(
        default="memcalc.calibrate/1", alias="schema", serialization_alias="schema"
    )
    version: str
    gpu: str
    figures: tuple[CalibratedFigure, ...]
    calibration: Calibration
    """What the file holds."""
    not_predicted: tuple[str, ...]
    """Rows that memcalc cannot predict, which are not used."""
