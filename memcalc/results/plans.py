"""The answer of a search: ranked plans, and what is said beside them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.results.estimates import HardwareFacts, ModelFacts, Verdict
from memcalc.specs.model import Frozen
from memcalc.specs.strategy import Strategy


class StepTime(Frozen):
    """A step's time and its parts [s]."""

    step: float
    """One optimizer step [s]."""
    tokens_per_second_per_gpu: float
    """Throughput [tokens/s]."""
    mfu: float
    """Share of the GPU's peak that the model's own operations reach, [1]."""
    compute: float
    """Forward and backward [s]."""
    recompute: float
    """Forward passes that backward runs again [s]."""
    communication: float
    """Messages that nothing hides [s]."""
    offload: float
    """Transfers that nothing hides, and steps on the CPU [s]."""
    optimizer: float
    """On the GPU [s]."""
    bubble: float
    """Waiting for other stages of the pipeline [s]."""
    hfu: float
    """Share of the peak that the device multiplies at, recomputation included [-]."""
    low: float
    """The shortest step of the range [s]."""
    high: float
    """Range of the step that published runs support [s]."""
    validated: bool
    """Whether published runs of this kind support it."""
    basis: str
    """What the range stands on."""


class PlanPeak(Frozen):
    """The three figures of a plan [bytes]."""

    allocated: int
    """``torch.cuda.max_memory_allocated()``."""
    reserved: int
    """``torch.cuda.max_memory_reserved()``."""
    device: int
    """What nvidia-smi shows for the process."""
    phase: str
    """Of the step, in which the most is allocated."""
    stage: int
    """Of the pipeline, from 0."""


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
    time: StepTime
    """Predicted."""
    host_memory: int
    """Bytes of host memory that one node needs for what is offloaded."""
    tier_memory: int
    """Bytes that one node needs of NVMe or CXL memory; 0 where that is not the tier."""
    gpu_hours: float
    """For the answer's token budget; more where a large batch needs more tokens."""
    statistical_efficiency: float
    """1 / (1 + B / B_crit); 1 without a critical batch."""
    why: str
    """One sentence: why it is listed."""
    parts: int = 0
    """How many things it has that plain training on one GPU has not: degrees, shards, recomputation, offloads."""
    special: tuple[str, ...] = ()
    """What it has before the other plans, or how it differs from one, in a few words each."""
    command: str
    """A ``memcalc estimate`` line that explains this plan byte by byte."""


class Nearest(Frozen):
    """A change that would make the job fit."""

    change: str
    """As it is typed."""
    device: int
    """Bytes on the device with the change."""
    tokens_per_second_per_gpu: float
    """With the change [tokens/s]."""
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


class Plans(Frozen):
    """The answer of ``memcalc plan``."""

    schema_: Literal["memcalc.plan/1"] = Field(default="memcalc.plan/1", alias="schema", serialization_alias="schema")
    """The name and version of this record."""
    version: str
    """Of memcalc."""
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
    feasible: int
    """Those of them that fit, [1]."""
    elapsed: float
    """Time of the search [s]."""
    plans: tuple[Plan, ...]
    """The best first; empty where nothing fits."""
    pareto: tuple[int, ...]
    """Ranks of the plans than which no other is better in everything."""
    nearest: tuple[Nearest, ...]
    """Smallest changes that would make the job fit, where nothing does."""
    too_large: str
    """When nothing fits: the component that is too large, in one sentence; empty otherwise."""
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
    command: str
    """A command line that reproduces the answer."""
