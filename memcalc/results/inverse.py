"""The answer of an inverse question."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.results.estimates import Components, HardwareFacts, ModelFacts, Verdict
from memcalc.results.plans import PlanPeak, StepTime
from memcalc.specs.model import Frozen
from memcalc.specs.strategy import Strategy


class Fit(Frozen):
    """The strategy of an inverse question's answer, with the figures that ``estimate`` gives for it."""

    value: int | str
    strategy: Strategy
    seq_len: int
    accumulation_steps: int
    global_batch: int
    peak: PlanPeak
    component: str
    """The largest component at the peak."""
    free: int
    """Bytes of the GPU that stay free."""
    verdict: Verdict
    time: StepTime
    host_memory: int
    tier_memory: int
    command: str
    """A ``memcalc estimate`` line that explains it byte by byte."""


class Miss(Frozen):
    """A value that does not get the wanted verdict, and how many bytes it lacks."""

    value: int | str
    verdict: Verdict
    device: int
    missing: int
    """Bytes at least: of the first request that cannot be met, or by which the device figure is beyond the capacity."""
    parameters: int | None = None


class CurvePoint(Frozen):
    """What ``estimate`` gives for the answer's strategy at another value [bytes]."""

    value: int
    global_batch: int
    components: Components
    device: int
    verdict: Verdict
    retries: int
    """How often the allocator gave its cache back in two steps: less is reserved then."""


class Inverse(Frozen):
    """The answer of an inverse question: the last value that fits, and the first that does not."""

    schema_: Literal["memcalc.max/1", "memcalc.min/1"] = Field(alias="schema", serialization_alias="schema")
    version: str
    what: str
    answer: int | str | None
    step: int
    safe: bool
    model: ModelFacts
    hardware: HardwareFacts
    best: Fit | None
    beyond: tuple[Miss, ...]
    curve: tuple[CurvePoint, ...] = ()
    """The answer's strategy at values below and above it, where it was asked for."""
    limit: str
    """What stands against more, in one sentence."""
    searched: int
    replayed: int
    elapsed: float
    capacity: int
    warnings: tuple[str, ...]
    assumptions: dict[str, str]
    command: str
