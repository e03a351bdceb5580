"""What a probe finds out about a machine beside training runs: overheads, rates, and communicators."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from memcalc.specs.strict import Size, Strict, Text

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
