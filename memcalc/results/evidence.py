"""What measured runs say of a kind of job: how far predictions were off, and the range that follows."""

from __future__ import annotations

from memcalc.specs.step_time import Kind
from memcalc.specs.strict import Figure, Frozen


class ErrorSummary(Frozen):
    """The errors of some of the figures; ``None`` where there are none."""

    count: int
    """Figures that were compared, [1]."""
    median_abs_error: float | None
    """Median of |error| [-]."""
    p90_abs_error: float | None
    """90th percentile of |error|, interpolated between the two nearest."""
    worst: float | None
    """The largest |error|."""
    worst_id: str | None
    """The run with the largest |error|; ``None`` also where errors are kept without their runs."""


class FigureErrors(ErrorSummary):
    """The errors of one figure."""

    figure: Figure
    """The one whose errors these are."""


class Evidence(Frozen):
    """Measured runs of a kind of job, or of the nearest kind that has any."""

    kind: Kind
    """Of the job."""
    nearest: Kind | None
    """Of the runs; ``None`` where no run is near."""
    differs: tuple[str, ...]
    """In what the runs differ from the job, each in a few words; empty where they are of its kind."""
    runs: int
    """Runs with a scored figure; 0 where no run is near."""
    figures: tuple[FigureErrors, ...]
    """One for each figure that was measured; empty where no run is near."""
    ran: int
    """Runs that fitted, and have a prediction."""
    false_rejects: int
    """Of those that ran, how many were predicted not to fit."""
    ran_out: int
    """Runs that ran out of memory, and have a prediction."""
    false_fits: int
    """Of those that ran out of memory, how many were said to fit."""
    allocator: str
    """The class of allocator whose runs gave the range."""
    ranged_kind: str = ""
    """The kind of job on it whose range it is; empty where it is that of all kinds."""
    low: float
    """Lower end of the range of reserved and device memory [-]."""
    high: float
    """Upper end of that range [-]."""
    coverage: float
    """Share of measured figures that the range was made to hold [-]."""
    crossed: float
    """Share within ranges that were fitted without the figure's own document [-]."""
    ranged: int
    """Figures that the range stands on."""
    documents: int
    """Documents that they were read from."""
