"""Measured runs: what was trained, on what, how, and the memory that somebody read.

A runs file holds `[[run]]` tables; it may also say which published runs were left out (`[[left_out]]`), why a run is
far off (`[[explained]]`), and which accuracy is aimed at (`[[target]]`). What `memcalc probe` measures beside runs
stands in `[[probe]]`, `[[rate]]` and `[[communicator]]`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from memcalc.errors import InputError, UnknownNameError
from memcalc.specs.probes import Communicator, Probe, Rate
from memcalc.specs.strict import Size, Strict, Text, Texts

__all__ = [
    "FIGURES",
    "GRADES",
    "Explained",
    "Figure",
    "LeftOut",
    "Measured",
    "MeasuredPhase",
    "Run",
    "RunsFile",
    "Target",
]

Figure = Literal["allocated", "reserved", "device"]
"""What `torch.cuda.max_memory_allocated()`, `torch.cuda.max_memory_reserved()` and nvidia-smi read."""
FIGURES: tuple[Figure, ...] = ("allocated", "reserved", "device")
Grade = Literal["A", "A-", "B"]
"""A and A-: every setting was read in the source; B: something is assumed, or was read coarsely."""
GRADES: tuple[str, ...] = ("A", "A-", "B")

MeasuredPhase = Literal["forward", "loss", "backward", "step"]
"""Forward up to the last block; final norm, head and loss; backward of all; the optimizer step."""

_RANK = re.compile(r"max|last|first stage|\d+|stage ([1-9]\d*) of ([1-9]\d*)")
_RANK_ALLOWED = 'must be max, last, first stage, a rank number, or such as "stage 2 of 16" (stages count from 1)'


def _rank(value: object) -> str:
    """Check which rank was read; a number may stand as one."""
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    found = _RANK.fullmatch(text)
    if found is None or (found[1] and int(found[1]) > int(found[2])):
        raise InputError("rank", value, _RANK_ALLOWED)
    return text


class Measured(Strict):
    """The figures that were read [bytes]."""

    allocated: Size | None = None
    reserved: Size | None = None
    device: Size | None = None
    unknown: Size | None = None
    """A figure whose source does not say which of the three it is: listed, never scored."""

    @property
    def figures(self) -> dict[Figure, int]:
        """The figures of a known kind."""
        read = {name: getattr(self, name) for name in FIGURES}
        return {name: value for name, value in read.items() if value is not None}


class Run(Strict):
    """One run."""

    id: Text
    source: Text
    """Where the figure was read, with a commit or a date."""
    grade: Grade
    model: Text | dict[str, Any]
    """A preset, a config.json, or an inline table."""
    gpu: Text
    gpu_memory: Size | None = None
    """Replaces the preset's capacity [bytes]."""
    context: Size | None = None
    """Replaces the preset's CUDA context [bytes], where a campaign states its own."""
    gpus: Annotated[int, Field(gt=0)] = 1
    workload: dict[str, Any] = Field(default_factory=dict)
    strategy: dict[str, Any] = Field(default_factory=dict)
    """Options of the command line with underscores, or any further field of a strategy."""
    software: str = ""
    measured: Measured = Measured()
    rank: Annotated[str, BeforeValidator(_rank)] = "max"
    """Which rank was read."""
    outcome: Literal["fits", "oom"] = "fits"
    tokens_per_second_per_gpu: Annotated[float, Field(gt=0)] | None = None
    assumed: Texts = ()
    """Fields filled from context."""
    group: Text = "other"
    comment: str = ""
    probe: Text | None = None
    """The `[[probe]]` in which it was measured."""
    phases: dict[MeasuredPhase, Size] = Field(default_factory=dict)
    """Allocated peak of each phase of the second step [bytes]."""
    first_phases: dict[MeasuredPhase, Size] = Field(default_factory=dict)
    """The same of the first step, at whose end the optimizer's states are made."""
    reserved_phases: dict[MeasuredPhase, Size] = Field(default_factory=dict)
    """Reserved peak of each phase of the second step [bytes]."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Time of one optimizer step, the median of several after the first two [s]."""


class LeftOut(Strict):
    """A published run that cannot be compared, and why."""

    id: Text
    reason: Text


class Explained(Strict):
    """Why one or several runs are far from the prediction."""

    id: Text | None = None
    ids: Texts = ()
    reason: Text

    @model_validator(mode="after")
    def _names_a_run(self) -> Explained:
        if not self.every_id:
            raise ValueError("id or ids must be given")
        return self

    @property
    def every_id(self) -> tuple[str, ...]:
        """The runs it speaks of."""
        return (*self.ids, self.id) if self.id else self.ids


class Target(Strict):
    """An accuracy that is aimed at for some of the runs: the largest median and 90th percentile of |error|."""

    name: Text
    figure: Figure
    median: Annotated[float, Field(gt=0)]
    p90: Annotated[float, Field(gt=0)]
    only: dict[str, list[Any]] = Field(default_factory=dict)
    """Field of a run, such as `group` or `strategy.quantize`, and the values that count; "" stands for not given."""
    never: dict[str, list[Any]] = Field(default_factory=dict)
    """Field of a run, and the values that do not count."""

    @model_validator(mode="after")
    def _fields_of_a_run(self) -> Target:
        for name in (*self.only, *self.never):
            if name.partition(".")[0] not in Run.model_fields:
                raise UnknownNameError("field", name, "must be a field of a run", Run.model_fields)
        return self


class RunsFile(Strict):
    """The content of one file, or of several taken together."""

    run: Annotated[tuple[Run, ...], Field(strict=False)] = ()
    left_out: Annotated[tuple[LeftOut, ...], Field(strict=False)] = ()
    explained: Annotated[tuple[Explained, ...], Field(strict=False)] = ()
    target: Annotated[tuple[Target, ...], Field(strict=False)] = ()
    probe: Annotated[tuple[Probe, ...], Field(strict=False)] = ()
    rate: Annotated[tuple[Rate, ...], Field(strict=False)] = ()
    communicator: Annotated[tuple[Communicator, ...], Field(strict=False)] = ()
