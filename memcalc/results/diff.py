"""The answer of ``memcalc diff``: what changed between two jobs, and what each change costs or saves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.results.estimates import Components, Estimate, Verdict
from memcalc.results.plans import StepTime
from memcalc.specs.model import Frozen

SideKind = Literal["words", "files", "saved plan", "plans", "estimate"]
Value = bool | int | float | str | None
"""As the options and the JSON of an estimate have it; a list is its text with commas, None where it is not said."""


class DiffField(Frozen):
    """One field that is different."""

    field: str
    """A word of the options, or a field of ``--set`` by its dotted name."""
    before: Value
    after: Value
    follows: bool
    """Whether nobody said it: a default, or a number that follows from what was said."""

    @property
    def option(self) -> str:
        """The field as it is typed: an option without its dashes, or a field of ``--set``."""
        return self.field if "." in self.field else self.field.replace("_", "-")

    @property
    def was(self) -> str:
        """The value before, as text."""
        return self._text(self.before)

    @property
    def now(self) -> str:
        """The value after, as text."""
        return self._text(self.after)

    def _text(self, value: Value) -> str:
        if value is None or value == "":
            return "default" if "." in self.field else "none"
        return str(value).lower() if isinstance(value, bool) else str(value)


class DiffComponents(Components):
    """The bytes of ``device`` at the peak: the components, and what the process holds outside the allocator."""

    context: int


class DiffFigures(Frozen):
    """One job's figures [bytes, s]."""

    verdict: Verdict
    allocated: int
    reserved: int
    device: int
    phase: str
    """Where the peak stands."""
    capacity: int
    components: DiffComponents
    host_memory: int
    tier_memory: int
    step: float
    tokens_per_second_per_gpu: float


class DiffCost(Frozen):
    """What is more, or where negative less [bytes, s]."""

    allocated: int
    reserved: int
    device: int
    components: DiffComponents
    host_memory: int
    tier_memory: int
    step: float
    tokens_per_second_per_gpu: float
    throughput: float
    """Share by which tokens a second on each GPU grow."""


class DiffStep(Frozen):
    """One change, or several that work only together, applied to all that came before."""

    name: str
    fields: tuple[DiffField, ...]
    """What is different from the step before; first what was said, then what follows from it."""
    together: bool
    """Whether it is several changes of which none is possible here without the others."""
    cost: DiffCost
    after: DiffFigures
    alone: DiffCost | None
    """The same change applied to A by itself; None where that is impossible."""
    impossible: str
    """Why it is impossible alone; empty where it is not."""
    command: str
    """The ``memcalc estimate`` line of the job after this step."""


class DiffTerm(Frozen):
    """A named number of bytes at the peak of each job; 0 where it is not alive there, or does not exist."""

    component: str
    name: str
    before: int
    after: int
    change: int
    kind: Literal["appears", "vanishes", "grows", "shrinks"]


class DiffSide(Frozen):
    """One of the two jobs."""

    name: str
    """As it was given."""
    kind: SideKind
    estimate: Estimate
    time: StepTime
    figures: DiffFigures
    remarks: tuple[str, ...]
    """What was found while its files were read."""


class Diff(Frozen):
    """The answer of ``memcalc diff``; the costs of all steps add up to the total, byte by byte."""

    schema_: Literal["memcalc.diff/1"] = Field(default="memcalc.diff/1", alias="schema", serialization_alias="schema")
    version: str
    a: DiffSide
    b: DiffSide
    fields: tuple[DiffField, ...]
    """All that is different once every default is resolved; empty for two jobs that are the same."""
    total: DiffCost
    """From A to B."""
    steps: tuple[DiffStep, ...]
    terms: tuple[DiffTerm, ...]
    """All that differ, the largest change first."""
    warnings: tuple[str, ...]
    command: str
    """The line that reproduces the answer; empty where a side was no text."""
