"""What the library answers: typed records whose ``model_dump(mode="json")`` is the published JSON.

Bytes are integers, times are seconds. Field names are fixed (``memcalc.estimate/1``, ``memcalc.plan/1``).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.specs.model import Frozen
from memcalc.specs.runs import Figure
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


class StepTime(Frozen):
    """A step's time and its parts [s]."""

    step: float
    tokens_per_second_per_gpu: float
    mfu: float
    compute: float
    recompute: float
    communication: float
    offload: float
    bubble: float


class PlanPeak(Frozen):
    """The three figures of a plan [bytes]."""

    allocated: int
    reserved: int
    device: int
    phase: str
    stage: int


class Plan(Frozen):
    """One ranked plan."""

    rank: int
    gpus: int
    strategy: Strategy
    accumulation_steps: int
    global_batch: int
    data_parallel: int
    peak: PlanPeak
    verdict: Verdict
    time: StepTime
    host_memory: int
    tier_memory: int
    gpu_hours: float
    """For the answer's token budget; more where a large batch needs more tokens."""
    statistical_efficiency: float
    """1 / (1 + B / B_crit); 1 without a critical batch."""
    why: str
    """One sentence: why it is listed."""
    command: str
    """A ``memcalc estimate`` line that explains this plan byte by byte."""


class Nearest(Frozen):
    """A change that would make the job fit."""

    change: str
    device: int
    """Bytes on the device with the change."""
    tokens_per_second_per_gpu: float
    throughput: float | None
    """Over that of the job as asked for, had it fitted; ``None`` where that cannot run at all."""


class Remedy(Frozen):
    """What one remedy saves and costs beside plain 16-bit training."""

    change: str
    """As it is typed."""
    reserved: int
    """Bytes that the allocator reserves with it, by the closed form of the search."""
    saved: float
    """Share of the memory that it saves."""
    slower: float
    """Share of the time that it adds; negative where it saves time."""
    roi: float | None
    """``saved`` over ``slower``; ``None`` where it costs no time."""
    tokens_per_second_per_gpu: float


class RecipeStep(Frozen):
    """One step of the usual order of tuning."""

    stage: Literal["start", "16-bit compute", "recompute", "offload", "fill the card"]
    change: str
    strategy: Strategy
    device: int
    """Bytes on the device."""
    fits: bool
    tokens_per_second_per_gpu: float


class Plans(Frozen):
    """The answer of ``memcalc plan``."""

    schema_: Literal["memcalc.plan/1"] = Field(default="memcalc.plan/1", alias="schema", serialization_alias="schema")
    version: str
    model: ModelFacts
    hardware: HardwareFacts
    objective: str
    token_budget: int
    """Tokens for which GPU-hours are told."""
    seq_len: int
    searched: int
    feasible: int
    elapsed: float
    plans: tuple[Plan, ...]
    pareto: tuple[int, ...]
    nearest: tuple[Nearest, ...]
    too_large: str
    """When nothing fits: the component that is too large, in one sentence; empty otherwise."""
    recipe: tuple[RecipeStep, ...]
    """The usual order of tuning, where it was asked for."""
    remedies: tuple[Remedy, ...]
    asked: str
    """Why the strategy that was asked about is not the first plan; empty where none was."""
    capacity: int
    warnings: tuple[str, ...]
    assumptions: dict[str, str]
    command: str


class RunScore(Frozen):
    """One measured figure beside the predicted one [bytes]; ``error`` is predicted / measured - 1."""

    id: str
    figure: Figure
    measured: int
    predicted: int
    error: float
    within: bool
    """Whether the measured figure lies within the interval, moved from ``device`` at the peak to this figure."""
    group: str
    grade: str
    framework: str
    """Name and era, as the run gives them."""
    gpu: str
    gpus: int
    rank: str
    source: str
    software: str


class RunVerdict(Frozen):
    """Whether a run fitted, and what was said of it."""

    id: str
    group: str
    outcome: Literal["fits", "oom"]
    verdict: Verdict
    device: int
    """Predicted [bytes]."""
    capacity: int
    """Of the GPU [bytes]."""
    wrong: bool
    """A false fit (it ran out of memory, and the verdict is fits), or a false reject."""


class RunUnknown(Frozen):
    """A measured figure whose kind the source does not say, beside the three predicted ones [bytes]; not scored."""

    id: str
    measured: int
    allocated: int
    reserved: int
    device: int


class RunReason(Frozen):
    """A run without a prediction, or one that is explained, and why."""

    id: str
    reason: str


class ErrorSummary(Frozen):
    """The errors of some of the figures; ``None`` where there are none."""

    count: int
    median_abs_error: float | None
    p90_abs_error: float | None
    """90th percentile of |error|, interpolated between the two nearest."""
    worst: float | None
    """The largest |error|."""
    worst_id: str | None


class ErrorGroup(ErrorSummary):
    """The errors of a part of the runs and one figure."""

    by: Literal["group", "framework", "gpu", "figure"]
    name: str
    figure: Figure


class TargetResult(ErrorSummary):
    """An aim, and what was reached."""

    name: str
    figure: Figure
    median_target: float
    p90_target: float
    met: bool | None
    """``None`` where no run counts."""


class ValidationSummary(ErrorSummary):
    """All scored figures, and the verdicts."""

    false_fits: int
    ran_out: int
    """Runs that ran out of memory and have a prediction."""
    false_rejects: int
    ran: int
    """Runs that fitted and have a prediction."""
    covered: int
    """Reserved and device figures within the interval."""
    covered_of: int
    coverage_claim: float | None
    """The coverage that the interval claims; ``None`` where it claims none."""


class Validation(Frozen):
    """The answer of ``memcalc validate``."""

    schema_: Literal["memcalc.validate/1"] = Field(
        default="memcalc.validate/1", alias="schema", serialization_alias="schema"
    )
    version: str
    runs: tuple[RunScore, ...]
    summary: ValidationSummary
    groups: tuple[ErrorGroup, ...]
    targets: tuple[TargetResult, ...]
    verdicts: tuple[RunVerdict, ...]
    unknown: tuple[RunUnknown, ...]
    explained: tuple[RunReason, ...]
    not_modelled: tuple[RunReason, ...]
    left_out: tuple[RunReason, ...]
