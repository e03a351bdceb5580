"""The answers that go from one job to another: ``memcalc diff`` by what differs, a ladder by one remedy at a time."""

from typing import Literal

from memcalc.results.estimates import (
    Answer,
    Components,
    Estimate,
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


SideKind = Literal["words", "files", "saved plan", "plans", "estimate"]
Value = bool | int | float | str | None
"""As the options and the JSON of an estimate have it; a list is its text with commas, None where it is not said."""


class DiffField(Frozen):
    """One field that is different."""

    field: str
    """A word of the options, or a field of ``--set`` by its dotted name."""
    before: Value
    """Without the change."""
    after: Value
    """With the change."""
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
    """Outside the allocator: context and communicators [bytes]."""


class DiffFigures(Frozen):
    """One job's figures [bytes, s]."""

    verdict: Verdict
    """As ``estimate`` gives it."""
    allocated: int
    """At the peak [bytes]."""
    reserved: int
    """At the peak [bytes]."""
    device: int
    """At the peak [bytes]."""
    phase: str
    """Where the peak stands."""
    capacity: int
    """Of the GPU [bytes]."""
    components: DiffComponents
    """Of ``device`` at the peak [bytes]."""
    host_memory: int
    """Of one node, for what is offloaded [bytes]."""
    tier_memory: int
    """NVMe or CXL memory of one node [bytes]; 0 where that is not the tier."""
    step: float
    """Predicted time of one optimizer step [s]."""
    tokens_per_second_per_gpu: float
    """Predicted throughput [tokens/s]."""
    parts: dict[str, float]
    """What adds up to ``step``, by name, messages by kind [s]."""


class DiffCost(Frozen):
    """What is more, or where negative less [bytes, s]."""

    allocated: int
    """At the peak [bytes]."""
    reserved: int
    """At the peak [bytes]."""
    device: int
    """At the peak [bytes]."""
    components: DiffComponents
    """Of ``device``, each at its own job's peak [bytes]."""
    host_memory: int
    """Of one node [bytes]."""
    tier_memory: int
    """NVMe or CXL memory of one node [bytes]."""
    step: float
    """Time of one optimizer step [s]."""
    tokens_per_second_per_gpu: float
    """Throughput [tokens/s]."""
    parts: dict[str, float]
    """What adds up to ``step``, by name, messages by kind [s]."""
    throughput: float
    """Share by which tokens a second on each GPU grow."""


class DiffStep(Frozen):
    """One change, or several that work only together, applied to all that came before."""

    name: str
    """What changes, in a few words, such as ``micro-batch 1 → 2``."""
    fields: tuple[DiffField, ...]
    """What is different from the step before; first what was said, then what follows from it."""
    together: bool
    """Whether it is several changes of which none is possible here without the others."""
    cost: DiffCost
    """Beside the step before."""
    after: DiffFigures
    """Of the job with this step and all before it."""
    alone: DiffCost | None
    """The same change applied to A by itself; None where that is impossible."""
    impossible: str
    """Why it is impossible alone; empty where it is not."""
    job: JobRecord
    """The estimate of the job after this step."""
    command: str
    """The command line of ``job``."""


class DiffTerm(Frozen):
    """A named number of bytes at the peak of each job; 0 where it is not alive there, or does not exist."""

    component: str
    """Which of the components it belongs to."""
    name: str
    """As the estimate calls it."""
    before: int
    """At the peak of A [bytes]."""
    after: int
    """At the peak of B [bytes]."""
    change: int
    """after - before [bytes]."""
    kind: Literal["appears", "vanishes", "grows", "shrinks"]
    """``appears`` from 0, ``vanishes`` to 0."""


class DiffSide(Frozen):
    """One of the two jobs."""

    name: str
    """As it was given."""
    kind: SideKind
    """What it was given as."""
    estimate: Estimate
    """Of the whole job."""
    time: StepTime
    """Predicted."""
    figures: DiffFigures
    """Those that are compared."""
    remarks: tuple[str, ...]
    """What was found while its files were read."""


class Diff(Answer):
    """The answer of ``memcalc diff``; the costs of all steps add up to the total, byte by byte."""

    schema_: Literal["memcalc.diff/1"] = schema("memcalc.diff/1")
    a: DiffSide
    """The job from which the changes start."""
    b: DiffSide
    """The job at which they end."""
    fields: tuple[DiffField, ...]
    """All that is different once every default is resolved; empty for two jobs that are the same."""
    total: DiffCost
    """From A to B."""
    steps: tuple[DiffStep, ...]
    """In the order in which they are applied; the last one ends at B."""
    terms: tuple[DiffTerm, ...]
    """All that differ, the largest change first."""
    warnings: tuple[str, ...]
    """What the figures do not know; one that is of one job alone begins with A or B."""
    command: str
    """The line that reproduces the answer; empty where a side was no text."""
