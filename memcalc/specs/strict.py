"""How records are declared: their bases, fields of those that hold measurements, and the option that a field holds.

Modules of such records leave their annotations as they are (no ``from __future__ import annotations``): pydantic
compiles each of a thousand texts again, at every start.
"""

from typing import Annotated, Any, Literal, NamedTuple

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


Kind = Literal[
    "name", "flag", "count", "bytes", "fraction", "factor", "version", "text", "list",
    "framework", "stage", "policy", "offload", "lora", "parts", "targets", "batch", "calibration",
]  # fmt: skip
"""How a value is read; those of the second line have a form of their own (:data:`memcalc.planner.request.PARSERS`)."""
PANELS = ("Job", "Parallelism", "Memory", "Step time only", "Adapters")
"""The panels of ``--help``, in their order; options of the fourth change no byte."""
JOB, PARALLELISM, MEMORY, STEP_TIME, ADAPTERS = PANELS


class Option(NamedTuple):
    """What a field's own name, type and default do not say of the option that sets it."""

    meaning: str
    """One sentence, for the reference and, where ``help`` is empty, for ``--help``."""
    unit: str = ""
    """What a number counts; empty for what is no number."""
    panel: str = ""
    """The panel of ``--help``; empty for what ``--set`` alone takes."""
    metavar: str = ""
    """What stands for the value in ``--help``."""
    help: str = ""
    """What ``--help`` says; ``{values}`` are the allowed values as in a sentence, ``{list}`` with commas alone,
    ``{default}`` is the default."""
    kind: Kind | Literal[""] = ""
    """How a value is read, where the field's type does not say it."""
    group: str = "strategy"
    """First part of the dotted name for ``--set``; empty where ``--set`` does not take it."""
    derived: bool = False
    """It follows from others, so that nobody sets it."""
    axis: bool = False
    """The strategies of one grid differ in it: an axis of the grid, or a column of its layouts."""
    searched: bool = False
    """``plan`` takes several values of it."""
    degree: Literal["", "ranks", "experts", "replicas"] = ""
    """A degree of the parallel layout: one that multiplies the number of GPUs, one that shares out the experts, or one
    that parts the data-parallel ranks."""
    needs_lora: bool = False
    """It says something beside adapters alone."""
    needs: Literal["", "tp", "ep", "experts"] = ""
    """What it says nothing without: a degree above 1, or a model with routed experts."""
    uncounted: str = ""
    """What it takes in memory that is not modelled, where it is not at its default."""
    negative: bool = False
    """It has a ``--no-`` form."""
    required: bool = False
    """The command cannot run without it."""
    completed_by: str = ""
    """The presets whose names complete it on the command line."""
    least: int = 1
    """The smallest number that is taken."""
    most: int = 1_000_000
    """The largest number that is taken."""
    after: str = ""
    """The option that it follows on the command line, where that is not the one declared before it."""
    step: int = 80
    """Its turn where ``diff`` applies changes: job, states, layout, what is saved or recomputed, batch."""
    alone: str = ""
    """Its value on the command line where the flag stands without one; it needs one where empty."""
    remedy: int = 0
    """Its turn to be left open where nothing fits; 0 where it stays as given."""
    name: str = ""
    """The field's name; this and all below are read from the declaration."""
    values: tuple[str, ...] = ()
    """Allowed values; empty where they are no list of names."""
    default: Any = None
    """Its value where it is not given."""

    @property
    def word(self) -> str:
        """What names it in a job's record: the library's keyword, or the dotted name of ``--set``."""
        return self.name if self.panel else self.key

    @property
    def key(self) -> str:
        """The dotted name for ``--set``; empty where it has none."""
        return f"{self.group}.{self.name}" if self.group else ""

    @property
    def text(self) -> str:
        """What ``--help`` says."""
        *most, last = self.values or ("",)
        listed = ", ".join(self.values)
        values = f"{', '.join(most)} or {last}" if most else last
        return (self.help or self.meaning).format(values=values, list=listed, default=self.default)
