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
    """The answer."""
    strategy: Strategy
    """Every field resolved."""
    seq_len: int
    """Tokens a sequence."""
    accumulation_steps: int
    """Micro-batches of one rank in an optimizer step, [1]."""
    global_batch: int
    """Sequences an optimizer step, over all ranks."""
    peak: PlanPeak
    """The three figures."""
    component: str
    """The largest component at the peak."""
    free: int
    """Bytes of the GPU that stay free."""
    verdict: Verdict
    """As ``estimate`` gives it."""
    time: StepTime
    """Predicted."""
    host_memory: int
    """Bytes of host memory that one node needs for what is offloaded."""
    tier_memory: int
    """Bytes that one node needs of NVMe or CXL memory; 0 where that is not the tier."""
    command: str
    """A ``memcalc estimate`` line that explains it byte by byte."""


class Miss(Frozen):
    """A value that does not get the wanted verdict, and how many bytes it lacks."""

    value: int | str
    """Beyond the answer."""
    verdict: Verdict
    """As ``estimate`` gives it."""
    device: int
    """Bytes on the device."""
    missing: int
    """Bytes at least: of the first request that cannot be met, or by which the device figure is beyond the capacity."""
    parameters: int | None = None
    """Of a model, [1]."""


class CurvePoint(Frozen):
    """What ``estimate`` gives for the answer's strategy at another value [bytes]."""

    value: int
    """Of what was asked for."""
    global_batch: int
    """Sequences an optimizer step, over all ranks."""
    components: Components
    """At the peak."""
    device: int
    """What nvidia-smi shows for the process."""
    verdict: Verdict
    """As ``estimate`` gives it."""
    retries: int
    """How often the allocator gave its cache back in two steps: less is reserved then."""


class Inverse(Frozen):
    """The answer of an inverse question: the last value that fits, and the first that does not."""

    schema_: Literal["memcalc.max/1", "memcalc.min/1"] = Field(alias="schema", serialization_alias="schema")
    """The name and version of this record."""
    version: str
    """Of memcalc."""
    what: str
    """What was asked for."""
    answer: int | str | None
    """The last value that fits; None where none does."""
    step: int
    """Only multiples of it were asked for."""
    safe: bool
    """Whether the verdict had to be ``fits``."""
    model: ModelFacts
    """Name and size."""
    hardware: HardwareFacts
    """What it runs on."""
    best: Fit | None
    """The answer's fastest strategy."""
    beyond: tuple[Miss, ...]
    """The next values, which do not fit."""
    curve: tuple[CurvePoint, ...] = ()
    """The answer's strategy at values below and above it, where it was asked for."""
    limit: str
    """What stands against more, in one sentence."""
    searched: int
    """Strategies, [1]."""
    replayed: int
    """Of them through the allocator, [1]."""
    elapsed: float
    """Time of the search [s]."""
    capacity: int
    """Of the GPU [bytes]."""
    warnings: tuple[str, ...]
    """Sentences."""
    assumptions: dict[str, str]
    """Every default that the user did not give: field and the value taken."""
    command: str
    """A command line that reproduces the answer."""
