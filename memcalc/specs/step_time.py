"""The constants of the step-time model: each with its unit, where it comes from, and how firmly it is known."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from memcalc.specs.model import Frozen

__all__ = ["Constant", "ErrorRow", "LeftOut", "Order", "Span", "StepTimeTable"]


class Constant(Frozen):
    """One number of the model."""

    name: str
    """What it is."""
    of: str = ""
    """Which GPU, architecture, kind of kernels or optimizer it speaks of; all where empty."""
    value: float = Field(ge=0)
    """In its unit."""
    unit: str
    low: float
    """The least value in refits that leave a source out; the value itself where nothing was fitted."""
    high: float
    """The largest."""
    source: str
    """Where it was read, or "fitted"."""


class Span(Frozen):
    """How far measured steps lie from predicted ones, for one kind of job."""

    name: str
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


class ErrorRow(Frozen):
    """|predicted / measured - 1| of the published runs of one source, or of all."""

    name: str
    runs: int
    median: float
    p90: float
    crossed_median: float
    """The same by constants that were fitted without the source."""
    crossed_p90: float


class Order(Frozen):
    """Pairs of comparable runs, and how many of them the model puts in the right order."""

    name: str
    pairs: int
    right: int
    crossed_right: int


class LeftOut(Frozen):
    """Runs that were not fitted on."""

    runs: int
    reason: str


class StepTimeTable(Frozen):
    """All of them."""

    constant: tuple[Constant, ...]
    span: tuple[Span, ...]
    error: tuple[ErrorRow, ...] = ()
    order: tuple[Order, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    gpus: dict[str, int]
    """Published runs by the GPU that they were measured on."""

    def with_measured(self, gpu: str, constants: Sequence[Constant], runs: int) -> StepTimeTable:
        """Return the table of one GPU, with constants that were measured on it in a number of runs."""
        counts = {**self.gpus, gpu: max(self.gpus.get(gpu, 0), runs)}
        return self.model_copy(update={"constant": (*self.constant, *constants), "gpus": counts})

    def value(self, name: str, *of: str) -> float:
        """The value of the first of the things named that has one of its own; an error where none has."""
        known = {row.of: row.value for row in self.constant if row.name == name}
        return next(known[one] for one in of if one in known)

    def span_of(self, name: str) -> Span:
        """The range of one kind of job."""
        return next(row for row in self.span if row.name == name)
