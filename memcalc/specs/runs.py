"""Measured runs: what was trained, on what, how, and the memory that somebody read.

A runs file holds `[[run]]` tables, or `[[sweep]]` tables of runs that share most of their fields, with where they were
published (`[[publication]]`); it may also say which published runs were left out (`[[left_out]]`), why a run is far off
(`[[explained]]`), and which accuracy is aimed at (`[[target]]`). What `memcalc probe` measures beside runs stands in
`[[probe]]`, `[[rate]]` and `[[communicator]]`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from memcalc.errors import InputError, UnknownNameError
from memcalc.specs.strict import FIGURES, Figure, Size, Strict, Text, Texts

RateKind = Literal[
    "matmul",
    "attention",
    "attention-backward",
    "memory",
    "host-to-device",
    "device-to-host",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
]
"""What was timed: matrix products, fused attention, the GPU's memory, copies to and from pinned host memory,
collectives."""


class Probe(Strict):
    """One probe of one kind of GPU: where its runs and rates come from, and what a process needs beside tensors."""

    id: Text
    """Its name in the file, to which rows refer."""
    gpu: Text
    """A preset's name."""
    name: Text
    """What the driver calls the GPU."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    """The day on which it ran, as 2026-11-22."""
    driver: str = ""
    """The driver's version."""
    cuda: str = ""
    """That torch was built for."""
    torch: Text
    """PyTorch's version."""
    software: str = ""
    """Further packages with their versions."""
    memcalc: Text
    """The version that measured."""
    gpus: Annotated[int, Field(gt=0)] = 1
    """GPUs of the machine that took part."""
    memory: Size | None = None
    """Capacity that torch reports [bytes]."""
    settings: dict[str, str] = Field(default_factory=dict)
    """Environment variables that change memory or speed, such as PYTORCH_CUDA_ALLOC_CONF."""
    context: Size | None = None
    """Device memory of a process beyond what its allocator reserves, after training steps [bytes]."""
    bare_context: Size | None = None
    """The same before the first kernel [bytes]."""
    blas_workspace: Size | None = None
    """What one cuBLAS handle keeps in the allocator [bytes]."""
    allocator: dict[str, Size] = Field(default_factory=dict)
    """Sizes that the allocator was seen to use, such as rounding, small_segment, large_segment [bytes]."""
    comment: str = ""
    """What else was noted."""


class Rate(Strict):
    """One timed operation."""

    probe: Text
    """The `[[probe]]` in which it was timed."""
    kind: RateKind
    """What was timed."""
    dtype: str = ""
    """Of the operands; empty where it has none."""
    shape: dict[str, Annotated[int, Field(gt=0)]] = Field(default_factory=dict)
    """Such as m, n, k; or batch, heads, seq, head_dim; or bytes."""
    work: Annotated[float, Field(gt=0)]
    """FLOP of one operation; bytes that one GPU reads and writes, or sends in a collective."""
    seconds: Annotated[float, Field(gt=0)]
    """Of one operation: the median of several."""
    gpus: Annotated[int, Field(gt=0)] = 1
    """GPUs that took part."""


class Communicator(Strict):
    """Device memory that appeared outside the allocator with the first use of a process group."""

    probe: Text
    """The `[[probe]]` in which it was measured."""
    kind: Literal["world", "group"]
    """All ranks, or a further group of some or all of them."""
    ranks: Annotated[int, Field(gt=1)]
    """Of the process group."""
    gpus: Annotated[int, Field(gt=1)]
    """Of the job."""
    collective: Text
    """The first that was run, such as all-reduce."""
    bytes: Annotated[int, Field(ge=0)]
    """On the GPU of the rank that was read [bytes]."""


Outcome = Literal["fits", "oom", "failed"]
Grade = Literal["A", "A-", "B"]
"""A and A-: every setting was read in the source; B: something is assumed, or was read coarsely."""
GRADES: tuple[str, ...] = ("A", "A-", "B")

MeasuredPhase = Literal["forward", "loss", "backward", "step"]
"""Forward up to the last block; final norm, head and loss; backward of all; the optimizer step."""

_RANK = re.compile(r"max|last|first stage|\d+|stage ([1-9]\d*) of ([1-9]\d*)")
_RANK_ALLOWED = 'must be max, last, first stage, a rank number, or such as "stage 2 of 16" (stages count from 1)'


def _rank(value: object) -> str:
    """Check which rank was read; a number may stand as one."""
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    match = _RANK.fullmatch(text)
    if match is None or (match[1] and int(match[1]) > int(match[2])):
        raise InputError("rank", value, _RANK_ALLOWED)
    return text


class Measured(Strict):
    """The figures that were read [bytes]."""

    allocated: Size | None = None
    """What ``max_memory_allocated`` read [bytes]."""
    reserved: Size | None = None
    """What ``max_memory_reserved`` read [bytes]."""
    device: Size | None = None
    """What nvidia-smi showed for the process [bytes]."""
    unknown: Size | None = None
    """A figure whose source does not say which of the three it is: listed, never scored."""

    @property
    def figures(self) -> dict[Figure, int]:
        """The figures of a known kind."""
        read = {name: getattr(self, name) for name in FIGURES}
        return {name: value for name, value in read.items() if value is not None}


class Run(Strict):
    """One run."""

    id: Text
    """Its name, unique over all files."""
    source: Text
    """Where the figure was read, with a commit or a date."""
    grade: Grade
    """A, A-: every setting was read; B: something was assumed, or read coarsely."""
    model: Text | dict[str, Any]
    """A preset, a config.json, or an inline table."""
    gpu: Text
    """A preset's name."""
    gpu_memory: Size | None = None
    """Replaces the preset's capacity [bytes]."""
    context: Size | None = None
    """Replaces the preset's CUDA context [bytes], where a campaign states its own."""
    gpus: Annotated[int, Field(gt=0)] = 1
    """GPUs of the job."""
    network: Annotated[float, Field(gt=0)] | None = None
    """Replaces the node's rate from one GPU to other nodes, one direction [bytes/s]."""
    adapters: Annotated[int, Field(gt=0)] | None = None
    """Replaces the node's network adapters [-]."""
    workload: dict[str, Any] = Field(default_factory=dict)
    """seq_len, micro_batch, global_batch and the like, as options with underscores."""
    strategy: dict[str, Any] = Field(default_factory=dict)
    """Options of the command line with underscores, or any further field of a strategy."""
    software: str = ""
    """Versions, as free text."""
    measured: Measured = Measured()
    """The figures."""
    rank: Annotated[str, BeforeValidator(_rank)] = "max"
    """Which rank was read."""
    outcome: Outcome = "fits"
    """Whether it ran, or ran out of memory: then a figure is a bound; what failed ran out of memory or crashed."""
    tokens_per_second_per_gpu: Annotated[float, Field(gt=0)] | None = None
    """Measured throughput [tokens/s]."""
    mfu: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Model FLOP/s over the GPU's dense peak, as published [-]."""
    tflops: Annotated[float, Field(gt=0)] | None = None
    """Model FLOP/s of a GPU, as published [TFLOP/s]."""
    not_fitted: str = ""
    """Why no model of step time, and no range, may be fitted on it; empty where it may."""
    assumed: Texts = ()
    """Fields filled from context."""
    group: Text = "other"
    """How the report groups it."""
    sweep: str = ""
    """Runs of one sweep differ in layout alone, so that their order says something; empty without one."""
    comment: str = ""
    """What else the source says."""
    probe: Text | None = None
    """The `[[probe]]` in which it was measured."""
    phases: dict[MeasuredPhase, Size] = Field(default_factory=dict)
    """Allocated peak of each phase of the second step [bytes]."""
    first_phases: dict[MeasuredPhase, Size] = Field(default_factory=dict)
    """The same of the first step, at whose end the optimizer's states are made."""
    reserved_phases: dict[MeasuredPhase, Size] = Field(default_factory=dict)
    """Reserved peak of each phase of the second step [bytes]."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Time of one optimizer step, the median of several after the first two [s]."""


class Sweep(Strict):
    """Runs as the rows of a table; what they share stands beside it, as fields of a run."""

    columns: Texts
    """Which field each column holds, dotted inside a table: ``strategy.tp``."""
    rows: Annotated[tuple[Annotated[tuple[Any, ...], Field(strict=False)], ...], Field(strict=False)]
    """A row a run; an empty text stands for what a run does not give."""

    @model_validator(mode="after")
    def _as_wide_as_the_columns(self) -> Self:
        wrong = next((number for number, row in enumerate(self.rows, 1) if len(row) != len(self.columns)), None)
        if wrong is not None:
            raise ValueError(f"row {wrong} must have {len(self.columns)} values, one a column")
        return self

    def tables(self, shared: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Each row as the table of a run, over what all share."""
        for row in self.rows:
            table = dict(shared)
            for column, value in zip(self.columns, row, strict=True):
                if value == "":
                    continue
                name, _, key = column.partition(".")
                table[name] = {**table.get(name, {}), key: value} if key else value
            yield table


class Publication(Strict):
    """Where the runs of a group were published, and what to know before they are used."""

    group: Text
    """The group of its runs."""
    citation: Text
    """Who, what, when."""
    address: Text
    """Where it is read."""
    caveats: Texts = ()
    """What it does not say, and what was assumed."""


class LeftOut(Strict):
    """A published run that cannot be compared, and why."""

    id: Text
    """The run's name."""
    reason: Text
    """Why, in one sentence."""


class Explained(Strict):
    """Why one or several runs are far from the prediction."""

    id: Text | None = None
    """One run's name."""
    ids: Texts = ()
    """Several runs' names."""
    reason: Text
    """Why, in one sentence."""

    @model_validator(mode="after")
    def _names_a_run(self) -> Self:
        if not self.every_id:
            raise ValueError("id or ids must be given")
        return self

    @property
    def every_id(self) -> tuple[str, ...]:
        """The runs it speaks of."""
        return (*self.ids, self.id) if self.id else self.ids


class Target(Strict):
    """An accuracy that is aimed at for some of the runs: the largest median and 90th percentile of |error|."""

    name: Text
    """What the report calls it."""
    figure: Figure
    """Which of the figures."""
    median: Annotated[float, Field(gt=0)]
    """The largest median of |error| [-]."""
    p90: Annotated[float, Field(gt=0)]
    """The largest 90th percentile of |error| [-]."""
    only: dict[str, list[Any]] = Field(default_factory=dict)
    """Field of a run, such as `group` or `strategy.quantize`, and the values that count; "" stands for not given."""
    never: dict[str, list[Any]] = Field(default_factory=dict)
    """Field of a run, and the values that do not count."""

    @model_validator(mode="after")
    def _fields_of_a_run(self) -> Self:
        for name in (*self.only, *self.never):
            if name.partition(".")[0] not in Run.model_fields:
                raise UnknownNameError("field", name, "must be a field of a run", Run.model_fields)
        return self


class RunsFile(Strict):
    """The content of one file, or of several taken together; a sweep stands as its runs."""

    run: Annotated[tuple[Run, ...], Field(strict=False)] = ()
    """The runs."""
    publication: Annotated[tuple[Publication, ...], Field(strict=False)] = ()
    """Where groups of runs were published."""
    left_out: Annotated[tuple[LeftOut, ...], Field(strict=False)] = ()
    """Published runs that cannot be compared."""
    explained: Annotated[tuple[Explained, ...], Field(strict=False)] = ()
    """Reasons of runs far from their prediction."""
    target: Annotated[tuple[Target, ...], Field(strict=False)] = ()
    """Accuracies that are aimed at."""
    probe: Annotated[tuple[Probe, ...], Field(strict=False)] = ()
    """Probes in which runs and rates were measured."""
    rate: Annotated[tuple[Rate, ...], Field(strict=False)] = ()
    """Timed operations."""
    communicator: Annotated[tuple[Communicator, ...], Field(strict=False)] = ()
    """Device memory of process groups."""
