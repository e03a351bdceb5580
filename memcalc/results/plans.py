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
    tokens_per_second_per_gpu: float
    mfu: float
    compute: float
    recompute: float
    communication: float
    offload: float
    optimizer: float
    bubble: float
    hfu: float
    """Share of the peak that the device multiplies at, recomputation included [-]."""
    low: float
    high: float
    """Range of the step that published runs support [s]."""
    validated: bool
    basis: str
    """What the range stands on."""


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
    parts: int = 0
    """How many things it has that plain training on one GPU has not: degrees, shards, recomputation, offloads."""
    special: tuple[str, ...] = ()
    """What it has before the other plans, or how it differs from one, in a few words each."""
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
