"""What measured runs say of the kind of job that an answer is about."""

from __future__ import annotations

from memcalc.results.comparison import ErrorSummary
from memcalc.specs.evidence import Kind
from memcalc.specs.model import Frozen
from memcalc.specs.runs import Figure


class FigureErrors(ErrorSummary):
    """The errors of one figure."""

    figure: Figure


class Evidence(Frozen):
    """Measured runs of a kind of job, or of the nearest kind that has any."""

    kind: Kind
    """Of the job."""
    nearest: Kind | None
    """Of the runs; ``None`` where no run is near."""
    differs: tuple[str, ...]
    """In what the runs differ from the job, each in a few words; empty where they are of its kind."""
    runs: int
    figures: tuple[FigureErrors, ...]
    ran: int
    false_rejects: int
    ran_out: int
    false_fits: int
    allocator: str
    """The class of allocator whose runs gave the range."""
    low: float
    """Lower end of the range of reserved and device memory [-]."""
    high: float
    coverage: float
    """Share of measured figures that the range was made to hold [-]."""
    crossed: float
    """Share within ranges that were fitted without the figure's own document [-]."""
    ranged: int
    """Figures that the range stands on."""
    documents: int
    """Documents that they were read from."""
