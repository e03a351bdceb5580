"""What is fitted on measured runs and shipped: errors by kind of job, and the constants of the step-time model."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field

from memcalc.specs.strict import Figure, Frozen

FEWEST, SOURCES = 10, 3
"""Published runs, and documents that they were read from, below which times of what they share are not validated."""


class Kind(Frozen):
    """What sets jobs apart whose predictions were measured apart."""

    framework: str
    """Without its era."""
    adapters: bool = False
    """Adapters are trained beside frozen weights."""
    experts: bool = False
    """The model is a mixture of experts."""
    offload: bool = False
    """Something is kept off the GPU."""


class KindErrors(Kind):
    """The measured runs of one kind beside their predictions."""

    runs: int = Field(ge=0)
    """Runs with a scored figure."""
    ran: int = Field(ge=0)
    """Runs that ran."""
    false_rejects: int = Field(ge=0)
    """Of those that ran, how many were predicted not to fit."""
    ran_out: int = Field(ge=0)
    """Runs that ran out of memory."""
    false_fits: int = Field(ge=0)
    """Of those that ran out of memory, how many were said to fit."""
    errors: dict[Figure, tuple[float, ...]]
    """predicted / measured - 1 of each figure [-]."""


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


class Constant(Frozen):
    """One number of the model."""

    name: str
    """What it is."""
    of: str = ""
    """Which GPU, architecture, kind of kernels or optimizer it speaks of; all where empty."""
    value: float = Field(ge=0)
    """In its unit."""
    unit: str
    """Of ``value``, ``low`` and ``high``."""
    low: float
    """The least value in refits that leave a source out; the value itself where nothing was fitted."""
    high: float
    """The largest."""
    source: str
    """Where it was read, or "fitted"."""
    prior: float | None = None
    """Where it was expected before any run was looked at; None where nothing was expected."""
    prior_low: float | None = None
    """Lower end of what was expected, in 19 of 20 cases."""
    prior_high: float | None = None
    """Upper end."""
    runs: int = Field(default=0, ge=0)
    """Runs whose step it moves; where there is none, its value is what was expected."""
    sources: int = Field(default=0, ge=0)
    """Sources of these runs."""


class Span(Frozen):
    """How far measured steps lie from predicted ones, for one kind of job."""

    name: str
    """The kind of job."""
    low: float = Field(gt=-1.0)
    """Lower end of measured / predicted - 1 [-]."""
    high: float
    """Upper end [-]."""
    coverage: float
    """Share of runs that the range holds, none of which its constants were fitted on [-]; 0 where it is a guess."""
    rows: int
    """Published runs that it was fitted on."""
    sources: int
    """Documents that they were read from."""
    basis: str
    """What a reader is told."""
    median: float | None = None
    """Of |predicted / measured - 1| of these runs by constants that were fitted without their source [-]."""
    inside: float | None = None
    """Share of them that lies in the range [-]."""
    crossed: float | None = None
    """Share of the runs of a source that lies in the range made without it, runs of one source counted as alike as they
    are [-]."""
    by_source: float | None = None
    """The same share, the mean over sources [-]."""


class ErrorRow(Frozen):
    """|predicted / measured - 1| of the published runs of one source, or of all."""

    name: str
    """The source, or all."""
    runs: int
    """Published runs with throughput."""
    median: float
    """Of |error| [-]."""
    p90: float
    """90th percentile of |error| [-]."""
    crossed_median: float
    """The same by constants that were fitted without the source."""
    crossed_p90: float
    """Its 90th percentile."""


class ExpertsRow(Frozen):
    """Errors of the published runs of mixtures of experts of one source, or of all; none was fitted on."""

    name: str
    """The source, or all."""
    runs: int
    """Published runs with throughput."""
    median: float
    """Of |predicted / measured - 1| of a step [-]."""
    p90: float
    """Its 90th percentile [-]."""
    bias: float
    """Median of predicted / measured - 1 [-]."""


class Order(Frozen):
    """Pairs of comparable runs, and how many of them the model puts in the right order."""

    name: str
    """Which pairs: all that compare, or those that differ in layout alone."""
    pairs: int
    """How many there are."""
    right: int
    """Of these, how many are in the measured order."""
    crossed_right: int
    """The same by constants that were fitted without the source."""


class Sweeps(Frozen):
    """How the layouts of a source's sweeps are put in order, by constants that were fitted without the source."""

    name: str
    """The source."""
    sweeps: int
    """Of one model on one number of GPUs with one kernel of attention, each of at least three layouts."""
    layouts: int
    """Of all of them."""
    pairs: int
    """Pairs of layouts of a sweep that are more than 3% apart."""
    right: int
    """Of these, how many are in the measured order."""
    regret: float
    """Speed that is lost by taking the layout that is said to be fastest, mean over sweeps [-]."""
    first: int
    """Sweeps whose fastest layout is among the three that are said to be fastest."""


class LeftOut(Frozen):
    """Runs that were not fitted on."""

    runs: int
    """How many."""
    reason: str
    """Why, in one sentence."""


class Support(Frozen):
    """Published runs of dense models that have one thing in common, whether they were fitted on or not."""

    trait: Literal["gpu", "framework", "sharding", "adapters"]
    """The GPU; the framework on its architecture; what shares weights over nodes; the frozen base of adapters on it."""
    name: str
    """Which."""
    runs: int
    """How many there are."""
    sources: int
    """Documents that they were read from."""


class StepTimeTable(Frozen):
    """All of them."""

    written_by: str = ""
    """What makes the file."""
    constant: tuple[Constant, ...]
    """The fitted constants."""
    span: tuple[Span, ...]
    """Ranges of a step by kind of job."""
    error: tuple[ErrorRow, ...] = ()
    """Errors by source."""
    experts: tuple[ExpertsRow, ...] = ()
    """Errors of mixtures of experts by source."""
    order: tuple[Order, ...] = ()
    """Right orders by source."""
    sweeps: tuple[Sweeps, ...] = ()
    """Order within published sweeps over layouts, by source."""
    left_out: tuple[LeftOut, ...] = ()
    """Runs that were not fitted on."""
    gpus: dict[str, int]
    """Runs that were fitted on, by the GPU that they were measured on."""
    support: tuple[Support, ...] = ()
    """Where ranges were measured."""
    own_runs: int = 0
    """Runs on the very GPU, whose constants are its own."""

    def with_measured(self, constants: Sequence[Constant], runs: int) -> Self:
        """Return the table of one GPU, with constants that were measured on it in a number of runs."""
        return self.model_copy(update={"constant": (*self.constant, *constants), "own_runs": runs})

    def supports(self, trait: str, name: str) -> bool:
        """Whether enough runs of enough sources have it."""
        return any(
            row.runs >= FEWEST and row.sources >= SOURCES
            for row in self.support
            if (row.trait, row.name) == (trait, name)
        )

    def value(self, name: str, *of: str) -> float:
        """The value of the first of the things named that has one of its own; an error where none has."""
        known = {row.of: row.value for row in self.constant if row.name == name}
        return next(known[one] for one in of if one in known)

    def span_of(self, name: str) -> Span:
        """The range of one kind of job."""
        return next(row for row in self.span if row.name == name)
