"""The answer to one strategy, and the facts that all answers share."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import Field

from memcalc.results.details import LengthFacts, Occasion, Timeline
from memcalc.specs.job import JobRecord
from memcalc.specs.strategy import Strategy
from memcalc.specs.strict import Frozen

Verdict = Literal["fits", "tight", "does-not-fit"]
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""What turns expandable segments on."""


class Answer(Frozen):
    """Base of what a command answers."""

    schema_: str
    """The name and version of this record."""
    version: str
    """Of memcalc."""
    drawing: ClassVar[Callable[[Any], str | None] | None] = None
    """What draws an answer for a notebook; the package sets it, since nothing here can draw."""
    telling: ClassVar[Callable[[Any], str | None] | None] = None
    """What writes an answer as a terminal shows it; set likewise."""

    def __str__(self) -> str:
        """The answer as the command line shows it; the whole record where it has no screen, as in `repr`."""
        telling = type(self).telling
        return (telling and telling(self)) or repr(self)

    def _repr_html_(self) -> str | None:
        """The answer as Jupyter shows it; None where only its text is shown."""
        drawing = type(self).drawing
        return drawing(self) if drawing else None


def flushed(flushes: int) -> str:
    """How often the allocator frees its cache, in words.

    >>> flushed(1), flushed(3)
    ('once per step', '3 times per step')
    """
    return "once per step" if flushes == 1 else f"{flushes} times per step"


def mended(verdict: Verdict, expandable: Verdict | None) -> str:
    """What a job does with expandable segments, in words, where that is better than its verdict without; else empty.

    >>> mended("tight", "fits"), mended("does-not-fit", "tight"), mended("tight", "tight")
    ('fits', 'is tight', '')
    """
    if verdict != "fits" and expandable == "fits":
        return "fits"
    return "is tight" if (verdict, expandable) == ("does-not-fit", "tight") else ""


def schema(name: str) -> Any:
    """The field that names a record: ``schema`` in JSON."""
    return Field(default=name, alias="schema", serialization_alias="schema")


class ModelFacts(Frozen):
    """The model by name and size."""

    name: str
    """As the preset or the file calls it."""
    parameters: int
    """All that are stored, [1]."""
    active_parameters: int
    """Those that one token passes; fewer than all in a mixture of experts, [1]."""


class HardwareFacts(Frozen):
    """The hardware that the answer is for."""

    gpu: str
    """The preset."""
    gpus: int
    """In all, [1]."""
    node: str
    """The preset of the host, or of the rack that it stands in."""
    nodes: int
    """Hosts, [1]."""
    gpus_per_node: int
    """That one host has, [1]."""


class WorkloadFacts(Frozen):
    """What is fed; an accumulation step is one forward and backward of one micro-batch."""

    seq_len: int
    """Tokens a sequence."""
    micro_batch: int
    """Sequences a forward pass on one data-parallel rank."""
    global_batch: int
    """Sequences an optimizer step, over all ranks."""
    accumulation_steps: int
    """Micro-batches of one rank in an optimizer step, [1]."""
    tokens_per_step: int
    """Tokens an optimizer step, over all ranks."""


class Peak(Frozen):
    """The three figures, and where the peak stands, all of the stage that reserves most [bytes]."""

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


class Interval(Frozen):
    """The range of ``device`` [bytes]; ``coverage`` is the measured share of runs inside, null where not measured."""

    low: int
    """Bytes."""
    high: int
    """Bytes."""
    coverage: float | None
    """Share, [1]."""

    allocator: str = "caching"
    """The class of allocator whose measured runs gave the range."""
    kind: str = ""
    """The kind of job on it; empty where the range is that of all kinds, or of the allocator of 2021."""


class Budget(Frozen):
    """What the GPU has [bytes]: ``usable`` = capacity - context - libraries - reserve."""

    capacity: int
    """Of the GPU, as the driver tells it."""
    context: int
    """Of the CUDA driver, outside the allocator."""
    libraries: int
    """Communicators, outside the allocator."""
    reserve: int
    """Kept for what the allocator reserves beyond every prediction."""
    usable: int
    """The largest prediction of ``reserved`` that fits."""


class ActivationBudget(Frozen):
    """The budget worked backwards [bytes]: ``available`` is ``usable`` less states, buffers, cache and margin."""

    phase: str
    """In which activations are largest; all is counted there."""
    usable: int
    """The largest prediction of ``reserved`` that fits."""
    parameters: int
    """Weights, as the framework keeps them."""
    gradients: int
    """Whole or sharded, as the framework keeps them."""
    optimizer: int
    """Moments, and master weights where the optimizer keeps them."""
    buffers: int
    """Buckets, gathered weights, workspaces."""
    cache: int
    """Reserved by the allocator at the peak, and unused."""
    margin: int
    """For what measured runs needed beyond their prediction: all but one of twenty."""
    available: int
    """What is left for activations; below zero where the rest alone is too much."""
    activations: int
    """What they take of it."""
    micro_batch: int
    """The largest that fits with the margin and divides the global batch, of the sizes that a search tries; 0 for none.
    By the closed form, of a job that does not fit by a replay too: ``memcalc max micro-batch`` replays every size."""
    segments: int | None
    """The fewest checkpointed segments of the blocks with which this micro-batch fits with the margin, in the same way;
    1 needs no checkpoint, None where no number of them is enough."""


class Components(Frozen):
    """Bytes at the peak phase; their sum is ``peak.reserved``."""

    parameters: int
    """Weights, as the framework keeps them."""
    gradients: int
    """Whole or sharded, as the framework keeps them."""
    optimizer: int
    """Moments, and master weights where the optimizer keeps them."""
    activations: int
    """What is kept for backward, and what a pass holds while it runs."""
    buffers: int
    """Such as gathered weights, buckets and workspaces."""
    reserve: int
    """Reserved beyond what is allocated."""


class Saved(Frozen):
    """Bytes that one micro-batch keeps for backward."""

    per_block: int
    """Of the main group of blocks."""
    outside_blocks: int
    """Such as the head and the loss."""
    total: int
    """Of the fullest stage."""


class StagePeak(Frozen):
    """One pipeline stage's own peak [bytes]."""

    stage: int
    """From 0."""
    allocated: int
    """Bytes."""
    reserved: int
    """Bytes."""
    device: int
    """Bytes."""
    phase: str
    """In which the most is allocated."""
    layers: int
    """Blocks of the stage, [1]."""
    in_flight: int = 1
    """Micro-batches whose activations the stage keeps at once, in units of its own blocks."""
    phases: dict[str, dict[str, int]] = Field(default_factory=dict)
    """Allocated bytes by phase and component; the sum of ``phase``, where the peak stands, is ``allocated``."""


class TermFacts(Frozen):
    """One named, explained number of bytes."""

    component: str
    """A name of :class:`Components`; ``context`` for what lies outside of the allocator."""
    name: str
    """What it is."""
    bytes: int
    """On one GPU of the stage where the peak stands."""
    phases: tuple[str, ...]
    """In which it is alive."""
    formula: str
    """In the symbols of ``inputs``."""
    inputs: dict[str, Any]
    """What was put in, by symbol."""
    source: str
    """Who says so: a paper, or a framework's file and version."""


class OffGpuTerm(TermFacts):
    """One named, explained number of bytes that a rank keeps off the GPU."""

    tier: Literal["host", "nvme", "cxl"]
    """The memory in which it lies."""


class ExposedMessages(Frozen):
    """What a step waits for messages [s], by the ranks that they go between; their sum is ``communication``.

    Kinds share the computation that hides them: each is what is added to those before it.
    """

    tensor: float
    """Between tensor-parallel ranks [s]."""
    context: float
    """Keys and values between context-parallel ranks, beyond the attention that runs beside them [s]."""
    expert: float
    """Tokens on their way to experts and back [s]."""
    pipeline: float
    """Between stages of the pipeline [s]."""
    data: float
    """Gathers of weights and reductions of gradients between data-parallel ranks, sharded or not [s]."""


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
    host: float
    """What the device waits for launches, and what a step takes beside its micro-batches and its update [s]."""
    recompute: float
    """Forward passes that backward runs again [s]."""
    communication: float
    """Messages that nothing hides [s]."""
    messages: ExposedMessages
    """The same by kind [s]."""
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

    @property
    def parts(self) -> dict[str, float]:
        """What adds up to the step, messages by kind [s]."""
        messages = self.messages.model_dump()
        before = {name: getattr(self, name) for name in ("compute", "host", "recompute")}
        return {**before, **messages, **{name: getattr(self, name) for name in ("bubble", "optimizer", "offload")}}


class Estimate(Answer):
    """The answer of ``memcalc estimate``."""

    schema_: Literal["memcalc.estimate/1"] = schema("memcalc.estimate/1")
    model: ModelFacts
    """Name and size."""
    workload: WorkloadFacts
    """What is fed."""
    hardware: HardwareFacts
    """What it runs on."""
    strategy: Strategy
    """Every field resolved."""
    peak: Peak
    """The three figures."""
    interval: Interval
    """Where measured runs lie beside the prediction."""
    budget: Budget
    """What the GPU has."""
    activation_budget: ActivationBudget | None = None
    """What of it is left for activations; None for a recorded module."""
    verdict: Verdict
    """``tight``: fits, but one measured run of twenty would not have, or only after the cache was given back. What the
    job is told to do beside its steps has to fit too."""
    flushes: int = 0
    """How often a step makes the allocator give its cache back; where its rules are not replayed 1 stands for one or
    more."""
    reason: str = ""
    """Why it does not fit; empty where it does."""
    components: Components
    """At the peak."""
    saved: Saved
    """For backward."""
    phases: dict[str, int]
    """Bytes allocated in each phase of a step, on the stage where the peak stands."""
    stages: tuple[StagePeak, ...]
    """One of the pipeline each."""
    timeline: tuple[Timeline, ...] = ()
    """One step over time on a few stages, where it was asked for."""
    terms: tuple[TermFacts, ...]
    """Of the stage where the peak stands: all that are not zero."""
    outside: tuple[TermFacts, ...] = ()
    """The context and each communicator; their sum is ``peak.device`` less ``peak.reserved``."""
    off_gpu: tuple[OffGpuTerm, ...]
    """What one rank keeps off the GPU, on the stage that keeps most there."""
    time: StepTime | None = None
    """The predicted step, with its range; None where the GPU's preset has no peak for the precision."""
    host_memory: int
    """Bytes of host memory that one node needs for what is offloaded, buffers included."""
    tier_memory: int
    """Bytes that one node needs of NVMe or CXL memory, where that is the tier; 0 elsewhere."""
    occasions: tuple[Occasion, ...] = ()
    """What the job does beside its steps, each with a peak of its own: loading, resuming, evaluation, saving."""
    expandable_device: int | None = None
    """The device figure with expandable segments [bytes], where the allocator's cache is large or the card full, the
    framework's PyTorch has them, and advice is wanted."""
    expandable_verdict: Verdict | None = None
    """The verdict with them."""
    lengths: LengthFacts | None = None
    """Where sequences differ in length (``--lengths``): the micro-batches, and how many steps fit."""
    warnings: tuple[str, ...]
    """Sentences."""
    assumptions: dict[str, str]
    """Every default that the user did not give: field and the value taken."""
    job: JobRecord
    """What was asked, to ask it again."""
    command: str
    """The command line of ``job``."""
