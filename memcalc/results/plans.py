"""What a search answers: ranked plans, the table of a sweep, and the last value that fits."""

from typing import Any, Literal

from pydantic import Field

from memcalc.results.details import Evidence, SearchedStrategy
from memcalc.results.estimates import (
    Answer,
    Components,
    Estimate,
    HardwareFacts,
    ModelFacts,
    Peak,
    StepTime,
    Verdict,
    schema,
)
from memcalc.specs.job import JobRecord, Mode
from memcalc.specs.strategy import Strategy
from memcalc.specs.strict import Frozen

UNMEASURED_OFFLOAD = "no measured offload runs to compare with; speed may be half or double"
"""What is said of the time of plans that offload."""


class PlanPeak(Peak):
    """The three figures of a plan [bytes]."""


class Plan(Frozen):
    """One ranked plan."""

    rank: int
    """From 1, the best."""
    gpus: int
    """In all, [1]."""
    strategy: Strategy
    """Every field resolved."""
    accumulation_steps: int
    """Micro-batches of one rank in an optimizer step, [1]."""
    global_batch: int
    """Sequences an optimizer step, over all ranks."""
    data_parallel: int
    """Ranks, [1]."""
    peak: PlanPeak
    """The three figures."""
    verdict: Verdict
    """As ``estimate`` gives it."""
    flushes: int = 0
    """How often a step makes the allocator give its cache back."""
    time: StepTime
    """Predicted."""
    host_memory: int
    """Bytes of host memory that one node needs for what is offloaded."""
    tier_memory: int
    """Bytes that one node needs of NVMe or CXL memory; 0 where that is not the tier."""
    unknown: tuple[str, ...] = ()
    """Memories off the GPU that it needs and whose size is unknown, so that nobody can say whether it runs."""
    gpu_hours: float
    """For the answer's token budget; more where a large batch needs more tokens."""
    statistical_efficiency: float
    """1 / (1 + B / B_crit); 1 without a critical batch."""
    why: str
    """One sentence: why it is listed."""
    parts: int = 0
    """How many things it has that plain data parallelism has not: degrees, shards, recomputation, offloads; what is
    seldom done counts twice."""
    own_code: tuple[str, ...] = ()
    """What has to be written that the framework cannot be told, a sentence for each part."""
    special: tuple[str, ...] = ()
    """What it is listed for: ``best``, ``fastest``, ``simplest``, ``smallest``, ``more headroom``, …"""
    job: JobRecord
    """The estimate of this plan."""
    command: str
    """The command line of ``job``, which explains the plan byte by byte."""


RemedyGroup = Literal[
    "same training",
    "another framework",
    "numerics",
    "fewer trained parameters",
    "shorter sequences",
    "other hardware",
    "not enough",
]
"""What a change costs the user, the least first; ``not enough`` are those that come near and do not fit."""


class Nearest(Frozen):
    """A change with which the job fits, or nearly does."""

    change: str
    """As it is typed."""
    device: int
    """Bytes on the device with the change."""
    tokens_per_second_per_gpu: float
    """With the change [tokens/s]."""
    throughput: float | None
    """Over that of the job without its memory limit; ``None`` where that cannot run at all."""
    verdict: Verdict = "fits"
    """As ``estimate`` gives it for the fastest plan with the change."""
    group: RemedyGroup = "same training"
    """What it costs."""
    slowest: float = 0.0
    """Throughput at the long end of the range of its step [tokens/s]."""
    fastest: float = 0.0
    """At the short end [tokens/s]."""
    host_memory: int = 0
    """Bytes of host memory that one node needs for what is offloaded."""
    unknown: tuple[str, ...] = ()
    """Memories off the GPU that it needs and whose size is unknown, so that nobody can say whether it runs."""
    job: JobRecord | None = None
    """The job with the change."""
    command: str = ""
    """The command line of ``job``."""
    estimate: JobRecord | None = Field(default=None, exclude=True)
    """The strategy of which the figures are, as the job of its estimate; not written."""


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
    """With it [tokens/s]."""


class RecipeStep(Frozen):
    """One step of the usual order of tuning."""

    stage: Literal["start", "16-bit compute", "recompute", "offload", "fill the card"]
    """What the step is about."""
    change: str
    """What it changes, as it is typed."""
    strategy: Strategy
    """After it."""
    device: int
    """Bytes on the device."""
    fits: bool
    """Whether it fits on the GPU."""
    tokens_per_second_per_gpu: float
    """After it [tokens/s]."""


class Plans(Answer):
    """The answer of ``memcalc plan``."""

    schema_: Literal["memcalc.plan/1"] = schema("memcalc.plan/1")
    model: ModelFacts
    """Name and size."""
    hardware: HardwareFacts
    """What the plans run on."""
    objective: str
    """By which they are ranked."""
    token_budget: int
    """Tokens for which GPU-hours are told."""
    seq_len: int
    """Tokens a sequence."""
    searched: int
    """Strategies, [1]."""
    bounded: int = 0
    """Of them those that were not evaluated, since their states alone do not come near to fitting, [1]."""
    feasible: int
    """Those of them that fit, [1]."""
    elapsed: float = Field(default=0.0, exclude=True)
    """Time of the search [s]; not written, so that the same question has the same answer byte for byte."""
    plans: tuple[Plan, ...]
    """The best first; empty where nothing fits."""
    cloud: tuple[SearchedStrategy, ...] = Field(default=(), exclude=True)
    """Of the strategies that fit the best of each idea and the frontier, for a chart; not written."""
    pareto: tuple[int, ...]
    """Ranks of the plans than which no other is better in everything."""
    without_offload: int | None = None
    """Of several numbers of GPUs the fewest on which a plan without offload fits."""
    tight_without_offload: tuple[int, ...] = ()
    """The next fewer, as far as such a plan is tight."""
    nearest: tuple[Nearest, ...]
    """Smallest changes that would make the job fit, where nothing does."""
    too_large: str
    """When nothing fits: the component that is too large, in one sentence; empty otherwise."""
    closest: str = ""
    """When nothing fits: a ``memcalc estimate`` line of the strategy that is closest to fitting; empty otherwise."""
    closest_job: JobRecord | None = None
    """The job of that line; ``None`` where there is none."""
    recipe: tuple[RecipeStep, ...]
    """The usual order of tuning, where it was asked for."""
    remedies: tuple[Remedy, ...]
    """What each returns, where the recipe was asked for."""
    asked: str
    """Why the strategy that was asked about is not the first plan; empty where none was."""
    capacity: int
    """Of the GPU [bytes]."""
    warnings: tuple[str, ...]
    """Sentences."""
    assumptions: dict[str, str]
    """Every default that the user did not give: field and the value taken."""
    job: JobRecord
    """What was asked, to ask it again."""
    command: str
    """The command line of ``job``."""


class Swept(Answer):
    """The answer of a sweep."""

    schema_: Literal["memcalc.sweep/1"] = schema("memcalc.sweep/1")
    mode: Mode
    """What is asked of each job: its best plan, or the estimate of its one strategy."""
    jobs: int
    """In all, [1]."""
    product: str
    """The lists that were multiplied."""
    counts: dict[str, int]
    """Jobs by status: fits, tight, does-not-fit, error."""
    columns: tuple[str, ...]
    """Names, in the order of a written table."""
    rows: tuple[dict[str, Any], ...] = ()
    """One for each job, by column; none where they were written to a file."""


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
    unknown: tuple[str, ...] = ()
    """Memories off the GPU that it needs and whose size is unknown, so that nobody can say whether it runs."""
    job: JobRecord
    """The estimate of the strategy."""
    command: str
    """The command line of ``job``, which explains it byte by byte."""


class Miss(Frozen):
    """A value that does not get the wanted verdict, and how many bytes it lacks."""

    value: int | str
    """Beyond the answer."""
    verdict: Verdict
    """As ``estimate`` gives it."""
    device: int
    """Bytes on the device."""
    missing: int
    """Bytes by which it is above the capacity: the device figure, or of what is tight the one of its margin."""
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


class Inverse(Answer):
    """The answer of an inverse question: the last value that fits, and the first that does not."""

    schema_: Literal["memcalc.max/1", "memcalc.min/1"] = Field(alias="schema", serialization_alias="schema")
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
    elapsed: float = Field(default=0.0, exclude=True)
    """Time of the search [s]; not written, so that the same question has the same answer byte for byte."""
    capacity: int
    """Of the GPU [bytes]."""
    warnings: tuple[str, ...]
    """Sentences."""
    assumptions: dict[str, str]
    """Every default that the user did not give: field and the value taken."""
    job: JobRecord
    """What was asked, to ask it again."""
    command: str
    """The command line of ``job``."""


# A plan as a file: what was asked, the plan that was chosen, and what to go back to if it does not run.


class SavedPlan(Answer):
    """What ``memcalc plan --save`` writes and ``memcalc export`` reads."""

    schema_: Literal["memcalc.saved-plan/2"] = schema("memcalc.saved-plan/2")
    job: JobRecord
    """The search that found it."""
    asked: str
    """The command line of ``job``."""
    plan: Plan
    """The one that was chosen, with its own job."""
    fallback: tuple[Plan, ...]
    """Safer plans of the same job, GPUs, layout and global batch: each needs clearly less than the one before."""
    no_fallback: str
    """Why there is no safer plan; empty where there is one."""
    notes: tuple[str, ...]
    """What the file does not carry, or was not written for."""


class Review(Frozen):
    """An answer made ready to be shown."""

    subject: Literal["strategy", "plan", "saved", "closest"]
    """What the estimate is of: what was typed, a plan of a search, a saved plan, or what is closest to fitting."""
    estimate: Estimate | None
    """``None`` where no strategy can run at all."""
    plans: Plans | None
    """The search, where there was one."""
    chosen: Plan | None
    """The plan that the estimate is of."""
    fallback: tuple[Plan, ...] = ()
    """What a saved plan goes back to."""
    no_fallback: str = ""
    """Why a saved plan has no safer one; empty elsewhere."""
    evidence: Evidence | None
    """What measured runs say of its kind of job; ``None`` without an estimate."""
    given: dict[str, str]
    """What was typed: word and value."""
    searched: dict[str, str]
    """What the search chose: word and value."""
    assumptions: dict[str, str]
    """Every default that was taken: field and value."""
    warnings: tuple[str, ...]
    """What the figures do not know."""
    command: str
    """The ``memcalc report`` line that makes the page again."""
    notes: tuple[str, ...] = ()
    """What is said of a saved plan's file."""
