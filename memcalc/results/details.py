"""Details of an estimate: a step over time, lengths, what is done beside its steps, what runs of its kind measured."""

from typing import Any, Literal

from memcalc.specs.step_time import Kind
from memcalc.specs.strict import Figure, Frozen


class TimelinePart(Frozen):
    """Where a part of the step begins; it lasts up to the next."""

    position: int
    """Events from 0."""
    phase: str
    """A key of the estimate's ``phases``."""
    micro_batch: int
    """From 0 in the order of the schedule; -1 for the optimizer's step."""


class Timeline(Frozen):
    """One stage's memory over a step, allocation by allocation, as a replay of the allocator gives it."""

    stage: int
    """Of the pipeline, from 0."""
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
    """In order."""


# What an estimate says of sequences that differ in length.


class LengthFacts(Frozen):
    """Lengths of the data, the micro-batches made of them, and how many steps fit."""

    lengths: str
    """A file, or the quantiles of a log-normal."""
    batching: str
    """How they become micro-batches: a value of ``--batching``."""
    sequences: int
    """That the file has, or that stand for the distribution [1]."""
    median: int
    """Half of the sequences are no longer [tokens]."""
    p99: int
    """99% of the sequences are no longer [tokens]."""
    longest: int
    """The longest sequence [tokens]."""
    rows: int
    """Of the longest micro-batch that can be made, for which peak and components are said [sequences]."""
    tokens: int
    """Of each of its rows [tokens]."""
    mean_tokens: float
    """Of a micro-batch, padding included [tokens]."""
    replayed: int
    """Micro-batches that the allocator was simulated over, those of one rank in their order; 0 where it was not [1]."""
    shapes: int
    """Different ones among them [1]."""
    alone: int
    """Reserved where every micro-batch is the longest [bytes]."""
    in_sequence: int
    """Reserved after the others, when the longest comes [bytes]."""
    grows: bool = False
    """Whether each new shape adds to what the cache keeps, so that a longer run reserves more, up to the whole card."""
    steps: int
    """Optimizer steps that were made, over all ranks [1]."""
    fitting: float
    """Share of them whose micro-batches all fit with the 95% margin, [1]."""
    running: float
    """Share of them whose micro-batches all fit as predicted, [1]."""
    fitting_tokens: int
    """Tokens of the largest micro-batch among them that fits with the margin; 0 for none [tokens]."""
    seed: int
    """Of the order in which sequences come."""


class OccasionPart(Frozen):
    """One named number of bytes of an occasion."""

    name: str
    """What it is."""
    bytes: int
    """Of one rank on the GPU; of all ranks of one node on the host."""
    tier: Literal["gpu", "host"]
    """The memory in which it lies."""
    formula: str
    """In the symbols of ``inputs``."""
    inputs: dict[str, Any]
    """What was put in, by symbol."""
    source: str
    """Who says so: a framework's file and version."""


class Occasion(Frozen):
    """Loading, resuming, evaluation, generation or saving, with its own peak."""

    name: Literal["loading", "resuming", "evaluation", "generation", "saving"]
    """Which of them."""
    when: str
    """What it does, in a few words."""
    certain: bool
    """Whether the job says that it does this; else it is what its framework does where nothing is said."""
    allocated: int
    """The most that one GPU holds, on the fullest stage of the pipeline [bytes]."""
    host: int
    """What one node's host memory holds, beside what is offloaded [bytes]."""
    fits: bool
    """Whether ``allocated`` is at most the ``usable`` memory of the budget."""
    batch_outputs: int = 0
    """Of an evaluation: the outputs of one batch of all ranks, which a loop with metrics keeps [bytes]."""
    parts: tuple[OccasionPart, ...]
    """What it is made of, the largest first."""


class SearchedStrategy(Frozen):
    """A strategy that a search found to fit, by the closed form of the search: what a chart draws of it."""

    gpus: int
    """In all, [1]."""
    device: int
    """Bytes on the device."""
    tokens_per_second_per_gpu: float
    """Throughput [tokens/s]."""
    frontier: bool
    """Whether no other strategy on as many GPUs is both smaller and faster."""


class ErrorSummary(Frozen):
    """The errors of some of the figures; ``None`` where there are none."""

    count: int
    """Figures that were compared, [1]."""
    median_abs_error: float | None
    """Median of |error| [-]."""
    p90_abs_error: float | None
    """90th percentile of |error|, interpolated between the two nearest."""
    worst: float | None
    """The largest |error|."""
    worst_id: str | None
    """The run with the largest |error|; ``None`` also where errors are kept without their runs."""


class FigureErrors(ErrorSummary):
    """The errors of one figure."""

    figure: Figure
    """The one whose errors these are."""


class Evidence(Frozen):
    """Measured runs of a kind of job, or of the nearest kind that has any."""

    kind: Kind
    """Of the job."""
    nearest: Kind | None
    """Of the runs; ``None`` where no run is near."""
    differs: tuple[str, ...]
    """In what the runs differ from the job, each in a few words; empty where they are of its kind."""
    runs: int
    """Runs with a scored figure; 0 where no run is near."""
    figures: tuple[FigureErrors, ...]
    """One for each figure that was measured; empty where no run is near."""
    ran: int
    """Runs that fitted, and have a prediction."""
    false_rejects: int
    """Of those that ran, how many were predicted not to fit."""
    ran_out: int
    """Runs that ran out of memory, and have a prediction."""
    false_fits: int
    """Of those that ran out of memory, how many were said to fit."""
    allocator: str
    """The class of allocator whose runs gave the range."""
    ranged_kind: str = ""
    """The kind of job on it whose range it is; empty where it is that of all kinds."""
    low: float
    """Lower end of the range of reserved and device memory [-]."""
    high: float
    """Upper end of that range [-]."""
    coverage: float
    """Share of measured figures that the range was made to hold [-]."""
    crossed: float
    """Share within ranges that were fitted without the figure's own document [-]."""
    ranged: int
    """Figures that the range stands on."""
    documents: int
    """Documents that they were read from."""
