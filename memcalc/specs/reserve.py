"""What no mechanism predicts: how far measured memory lies from the prediction, by allocator and kind of job."""

from __future__ import annotations

from pydantic import Field

from memcalc.specs.strict import Frozen


class Reserve(Frozen):
    """One class: the range of measured / predicted - 1, of reserved or device memory."""

    name: str
    """The class of allocator."""
    kind: str = ""
    """The kind of job on it; empty where the range is that of all kinds."""
    weight: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of the range that the kind's own figures make; the rest is that of all kinds [-]."""
    low: float = Field(gt=-1.0)
    """Lower end of the range [-]."""
    middle: float = 0.0
    """What is added to the prediction: reserved by an allocator whose rules are not replayed [-]."""
    high: float
    """Upper end of the range [-]."""
    limit: float
    """Upper end that only the part of runs beyond the coverage exceeds: what the verdict asks for [-]."""
    coverage: float
    """Share of runs that the range was made to hold [-]."""
    crossed: float
    """Share of runs within a range that was fitted without their own source, widened alike [-]."""
    figures: int
    """Measured figures that the range was fitted on."""
    sources: int
    """Documents that they were read from."""
    source: str
    """Where the range comes from."""
