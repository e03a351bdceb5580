"""The answer to one strategy, and the facts that all answers share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.specs.model import Frozen
from memcalc.specs.strategy import Strategy

Verdict = Literal["fits", "tight", "does-not-fit"]


class ModelFacts(Frozen):
    """The model by name and size."""

    name: str
    parameters: int
    active_parameters: int


class HardwareFacts(Frozen):
    """The hardware that the answer is for."""

    gpu: str
    gpus: int
    node: str
    nodes: int
    gpus_per_node: int


class WorkloadFacts(Frozen):
    """What is fed; an accumulation step is one forward and backward of one micro-batch."""

    seq_len: int
    micro_batch: int
    global_batch: int
    accumulation_steps: int
    tokens_per_step: int


class Peak(Frozen):
    """The three figures, and where the peak stands [bytes]."""

    allocated: int
    reserved: int
    device: int
    phase: str
    stage: int


class Interval(Frozen):
    """The range of ``device`` [bytes]; ``coverage`` is the measured share of runs inside, null where not measured."""

    low: int
    high: int
    coverage: float | None

    allocator: str = "caching"
    """The class of allocator whose measured runs gave the range."""


class Budget(Frozen):
    """What the GPU has [bytes]: ``usable`` = capacity - context - libraries - reserve."""

    capacity: int
    context: int
    libraries: int
    reserve: int
    usable: int


class Components(Frozen):
    """Bytes at the peak phase; their sum is ``peak.reserved``."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    reserve: int


class Saved(Frozen):
    """Bytes that one micro-batch keeps for backward."""

    per_block: int
    outside_blocks: int
    total: int


class StagePeak(Frozen):
    """One pipeline stage's own peak [bytes]."""

    stage: int
    allocated: int
    reserved: int
    device: int
    phase: str
    layers: int
    in_flight: int = 1
    """Micro-batches whose activations the stage keeps at once, in units of its own blocks."""
    phases: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Allocated bytes by phase and component; the sum of ``phase``, where the peak stands, is ``allocated``."""


class TermFacts(Frozen):
    """One named, explained number of bytes."""

    component: str
    name: str
    bytes: int
    phases: tuple[str, ...]
    formula: str
    inputs: dict[str, Any]
    source: str


class OffGpuTerm(TermFacts):
    """One named, explained number of bytes that a rank keeps off the GPU."""

    tier: Literal["host", "nvme", "cxl"]
    """The memory in which it lies."""


class TimelinePart(Frozen):
    """Where a part of the step begins; it lasts up to the next."""

    position: int
    phase: str
    micro_batch: int
    """From 0 in the order of the schedule; -1 for the optimizer's step."""


class Timeline(Frozen):
    """One stage's memory over a step, allocation by allocation, as a replay of the allocator gives it."""

    stage: int
    events: int
    """Allocations and frees of the step; 0 where the allocator of the framework's era had other rules."""
    micro_batches: int
    """Micro-batches that were replayed; those of a longer accumulation repeat them."""
    limited: bool
    """Whether the replay had the GPU's memory; without an end where a request could not be met there."""
    peak_allocated: int
    """The largest figure of the step [bytes]; whole blocks of the allocator, so that it is above the ledger's."""
    peak_reserved: int
    """The largest of both steps that are replayed, after the last time that the cache was given back [bytes]."""
    position: tuple[int, ...]
    """Events from 0 at which the figures below stand: the least and the most of each short run of events."""
    allocated: tuple[int, ...]
    """Bytes."""
    reserved: tuple[int, ...]
    """Bytes; by mechanisms alone, without the share that measured runs reserve beyond them."""
    components: dict[str, tuple[int, ...]]
    """Bytes that were asked for; what is allocated beside their sum is the rounding of blocks."""
    parts: tuple[TimelinePart, ...]


class Estimate(Frozen):
    """The answer of ``memcalc estimate``."""

    schema_: Literal["memcalc.estimate/1"] = Field(
        default="memcalc.estimate/1", alias="schema", serialization_alias="schema"
    )
    version: str
    model: ModelFacts
    workload: WorkloadFacts
    hardware: HardwareFacts
    strategy: Strategy
    peak: Peak
    interval: Interval
    budget: Budget
    verdict: Verdict
    components: Components
    saved: Saved
    phases: dict[str, int]
    stages: tuple[StagePeak, ...]
    timeline: tuple[Timeline, ...] = ()
    """One step over time on a few stages, where it was asked for."""
    terms: tuple[TermFacts, ...]
    off_gpu: tuple[OffGpuTerm, ...]
    """What one rank keeps off the GPU, on the stage that keeps most there."""
    host_memory: int
    """Bytes of host memory that one node needs for what is offloaded, buffers included."""
    tier_memory: int
    """Bytes that one node needs of NVMe or CXL memory, where that is the tier; 0 elsewhere."""
    warnings: tuple[str, ...]
    assumptions: dict[str, str]
    """Every default that the user did not give: field and the value taken."""
    command: str
    """A command line that reproduces the answer."""
