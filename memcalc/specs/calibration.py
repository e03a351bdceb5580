"""A calibration: what was measured on one kind of GPU, in place of the shipped figures.

`memcalc calibrate` writes it from measured runs, and every command that estimates takes it. Each figure says on how
many rows it stands and how far they spread; what was left at the shipped value says why.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from memcalc.specs.step_time import Constant, Reserve
from memcalc.specs.strict import Strict, Text, Texts

_LARGEST = 2**40
_SHARES = ("matmul", "attention", "inside", "between", "inside_tensor", "between_tensor", "hidden", "window", "float8")
"""Constants that are a share of something: none is above 1.5, which leaves room for a boost clock."""


def _said(value: object) -> str:
    """A field of a strategy as a residual names it."""
    return (",".join(value) or "none") if isinstance(value, tuple) else str(value)


Part = Literal["context", "workspace", "communicators", "reserve", "step time"]
Day = Annotated[str, Field(pattern=r"^(\d{4}-\d{2}-\d{2})?$")]


class Measure(Strict):
    """A size that was read several times."""

    bytes: Annotated[int, Field(ge=0, le=_LARGEST)]
    """The median [bytes]."""
    low: Annotated[int, Field(ge=0, le=_LARGEST)]
    """The least of those that are no outliers [bytes]."""
    high: Annotated[int, Field(ge=0, le=_LARGEST)]
    """The largest [bytes]."""
    rows: Annotated[int, Field(gt=0)]
    """Readings."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.low <= self.bytes <= self.high:
            raise ValueError("must have low <= bytes <= high")
        return self


class FittedReserve(Reserve):
    """What no mechanism predicts, of one class of allocator, as measured here."""

    @model_validator(mode="after")
    def _finite(self) -> Self:
        sizes = (self.low, self.middle, self.high, self.limit, self.coverage)
        if not all(math.isfinite(size) for size in sizes) or max(map(abs, sizes)) > 10:
            raise ValueError("must have shares between -1 and 10")
        if not (self.low <= 0 <= self.high and self.limit >= 0 and self.middle > -0.5):
            raise ValueError("must have low <= 0 <= high, limit >= 0 and middle above -0.5")
        return self


class FittedConstant(Constant):
    """One constant of the step-time model, as measured here."""

    value: float = Field(gt=0, allow_inf_nan=False)
    """In the constant's unit."""
    rows: int = Field(gt=0)
    """Timed runs or operations that it was fitted on."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.value > (1.5 if self.name in _SHARES else 1e6):
            raise ValueError(f"{self.name} must be at most {1.5 if self.name in _SHARES else 1e6:g}")
        return self


class Gain(Strict):
    """Errors of rows that were held back, by the shipped figures and by the calibration."""

    part: Part
    """The part of the calibration that is judged."""
    figure: Text
    """What was predicted: device, reserved, step time, or device - reserved."""
    unit: Literal["share", "bytes"]
    """Of the errors: a share of the measured figure, or bytes."""
    rows: Annotated[int, Field(ge=0)]
    """Held back."""
    median: tuple[float, float]
    """|error| before and after."""
    p90: tuple[float, float]
    """90th percentile of |error| before and after."""
    covered: tuple[int, int] | None = None
    """Rows within the range, before and after; none where there is no range."""
    width: tuple[float, float] | None = None
    """Of the range, over the prediction."""
    score: tuple[float, float] | None = None
    """Interval score of the range, over the prediction: width, and 40 times what a figure lies outside."""
    better: bool
    """Whether the calibration predicts them better; if not, the part was not written."""

    @field_validator("median", "p90", "covered", "width", "score", mode="before")
    @classmethod
    def _pair(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value


class Left(Strict):
    """A part that stays at the shipped value."""

    part: Part
    """The part's name."""
    reason: Text
    """Why, in one sentence."""


class Residual(Strict):
    """An error that is structural: reported, and not absorbed in any figure."""

    kind: Literal["allocated", "phase", "step time", "correlation", "workspace"]
    """What the error is of."""
    where: Text
    """What the rows share, such as attention = eager; all rows where nothing is."""
    error: float
    """Median of predicted / measured - 1; of a correlation its coefficient."""
    rows: Texts
    """Runs, or probes."""
    shared: dict[str, str] = Field(default_factory=dict)
    """Fields of a strategy that the rows share, with their values."""
    says: Text
    """The finding, in one sentence."""

    def speaks_of(self, strategy: Mapping[str, Any]) -> bool:
        """Whether a job with the fields of a strategy is one of those whose allocated bytes are wrong.

        >>> found = Residual(kind="allocated", where="zero = 3", error=0.1, rows=(), shared={"zero": "3"}, says="so")
        >>> found.speaks_of({"zero": 3, "tp": 1}), found.speaks_of({"zero": 1})
        (True, False)
        """
        everywhere = self.kind == "allocated" and (self.shared or self.where == "all rows")
        return bool(everywhere) and all(_said(strategy.get(name)) == value for name, value in self.shared.items())


class Calibration(Strict):
    """The content of a file."""

    schema_: Literal["memcalc.calibration/1"] = Field(alias="schema", serialization_alias="schema")
    """Names the form of the file."""
    gpu: Text
    """The preset of the GPU that it is of."""
    memcalc: Text
    """Version that fitted it."""
    rows: Annotated[int, Field(ge=0)]
    """Measured runs that it was fitted on."""
    held_back: Annotated[int, Field(ge=0)]
    """Further runs that only judged it."""
    first: Day = ""
    """When the first probe ran; empty where no row says a date."""
    last: Day = ""
    """When the last one ran."""
    probes: Texts = ()
    """Names of the probes whose rows it was fitted on."""
    sources: Texts = ()
    """Documents of rows that no probe measured."""
    torch: Texts = ()
    """Versions of PyTorch on which they were measured."""
    cuda: Texts = ()
    """Versions of CUDA."""
    driver: Texts = ()
    """Versions of the driver."""
    context: Measure | None = None
    """Memory of a process outside its allocator, without communicators."""
    workspace: Measure | None = None
    """Of one cuBLAS handle."""
    world: Measure | None = None
    """Of the first communicator."""
    group: Measure | None = None
    """Of each further one."""
    reserve: Annotated[tuple[FittedReserve, ...], Field(strict=False)] = ()
    """Ranges of reserved and device memory."""
    constant: Annotated[tuple[FittedConstant, ...], Field(strict=False)] = ()
    """Constants of the step-time model."""
    left: Annotated[tuple[Left, ...], Field(strict=False)] = ()
    """Parts that stay as shipped."""
    gain: Annotated[tuple[Gain, ...], Field(strict=False)] = ()
    """How much better held-back rows are predicted."""
    residual: Annotated[tuple[Residual, ...], Field(strict=False)] = ()
    """Errors that no figure absorbs."""
    note: Texts = ()
    """What else its user should know."""

    @property
    def empty(self) -> bool:
        """Whether it changes nothing."""
        return not (self.context or self.workspace or self.world or self.group or self.reserve or self.constant)

    @property
    def dates(self) -> str:
        """When it was measured.

        >>> Calibration(schema="memcalc.calibration/1", gpu="h100", memcalc="0.1.0", rows=9, held_back=3).dates
        'no date given'
        """
        days = sorted({day for day in (self.first, self.last) if day})
        return " to ".join(days) or "no date given"

    @property
    def basis(self) -> str:
        """What it stands on.

        >>> words = {"schema": "memcalc.calibration/1", "gpu": "h100", "memcalc": "0.1.0", "held_back": 0}
        >>> Calibration(**words, rows=40, probes=("a",)).basis, Calibration(**words, rows=0, probes=("a", "b")).basis
        ('40 rows of 1 probe', '2 probes')
        """
        probes = f"{len(self.probes)} probe{'' if len(self.probes) == 1 else 's'}" if self.probes else ""
        rows = f"{self.rows} row{'' if self.rows == 1 else 's'}" if self.rows or not probes else ""
        return " of ".join(filter(None, (rows, probes)))

    @property
    def said(self) -> str:
        """One clause for every answer that was made with it."""
        return f"of {self.gpu} ({self.dates}, {self.basis})"

    def reserve_of(self, allocator: str) -> Reserve | None:
        """The range of a class of allocator, where one was fitted."""
        return next((row for row in self.reserve if row.name == allocator), None)
