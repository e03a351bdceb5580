"""The answer of a ladder: a baseline, then one remedy after another, under each reading of 16-bit training."""

from __future__ import annotations

from typing import Literal

from memcalc.results.estimates import (
    Answer,
    Components,
    HardwareFacts,
    Interval,
    ModelFacts,
    Peak,
    StepTime,
    Verdict,
    schema,
)
from memcalc.specs.job import JobRecord
from memcalc.specs.strategy import Strategy
from memcalc.specs.strict import Frozen

Kind = Literal["fp32", "pure-16-bit", "fp32-master", "fp32-shards", "autocast"]


class Storage(Frozen):
    """What a framework keeps of each trained parameter under a precision [bytes an element]."""

    kind: Kind
    """``fp32-master``: a copy beside 16-bit weights; ``fp32-shards``: the sharded weights are their own master."""
    said: str
    """The same as a sentence."""
    parameter: int
    """The weight that is computed with."""
    gradient: int
    """As it is kept up to the step."""
    master: int
    """A second, fp32 weight; 0 where there is none."""
    moment: int
    """Each of the optimizer's moments, where the optimizer has no width of its own."""
    cached: int
    """16-bit copies that autocast keeps from forward to backward."""


class LadderStage(Frozen):
    """One stage, with the figures that ``memcalc estimate`` gives for its command."""

    stage: int
    """0 is the start."""
    change: str
    """What it adds to the stage before, as typed after ``--stage``; empty at the start."""
    also: dict[str, str]
    """Defaults that change with it, such as the attention kernel."""
    storage: Storage
    """What is kept of each trained parameter."""
    strategy: Strategy
    """Every field resolved."""
    accumulation_steps: int
    """Micro-batches of one rank in an optimizer step, [1]."""
    global_batch: int
    """Sequences an optimizer step, over all ranks."""
    peak: Peak
    """The three figures."""
    interval: Interval
    """Where measured runs lie beside the prediction."""
    verdict: Verdict
    """As ``estimate`` gives it."""
    components: Components
    """Bytes at the peak phase."""
    context: int
    """Bytes that the process holds outside the allocator: with the components they make ``peak.device``."""
    phases: dict[str, int]
    """Bytes allocated in each phase of a step, on the pipeline stage where the peak stands."""
    saved: int
    """Bytes on the device less than at the stage before; negative where it needs more."""
    time: StepTime | None
    """Predicted, also where it does not fit; ``None`` where the GPU's peak is not known."""
    speed: float | None
    """Its tokens a second over those of the stage before."""
    host_memory: int
    """Bytes of host memory that one node needs for what is offloaded."""
    tier_memory: int
    """Bytes that one node needs of NVMe or CXL memory; 0 where that is not the tier."""
    job: JobRecord
    """The estimate of this stage."""
    command: str
    """The command line of ``job``."""


class LadderReading(Frozen):
    """The stages under one reading of the precision."""

    name: Literal["pure-16-bit", "fp32-master", "autocast", "fp32"]
    """What the precision is taken to mean."""
    precision: str
    """At the last stage."""
    storage: Storage
    """At the last stage."""
    stages: tuple[LadderStage, ...]
    """The start first."""
    first: int | None
    """The first stage that fits, be it tight; ``None`` where none does."""
    left_out: tuple[str, ...]
    """Stages that are not possible here, and why."""
    warnings: tuple[str, ...]
    """What the figures do not know; one that is not of all stages names its own."""


class Ladder(Answer):
    """The answer of ``memcalc ladder``."""

    schema_: Literal["memcalc.ladder/1"] = schema("memcalc.ladder/1")
    model: ModelFacts
    """Name and size."""
    hardware: HardwareFacts
    """What it runs on."""
    seq_len: int
    """Tokens a sequence."""
    capacity: int
    """Of one GPU [bytes]."""
    recipe: bool
    """Whether the stages are those of the usual order of tuning, which takes a remedy only where it is needed."""
    readings: tuple[LadderReading, ...]
    """Those of which at least one stage is possible."""
    left_out: tuple[str, ...]
    """Readings that are not possible here, and why."""
    assumptions: dict[str, str]
    """Defaults that hold at every stage of every reading: field and value."""
    job: JobRecord
    """What was asked, to ask it again."""
    command: str
    """The command line of ``job``."""
