"""The answer of ``memcalc triage``: what was read, where the bytes went, why it ran out, and what would help."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from memcalc.results.estimates import Verdict
from memcalc.specs.model import Frozen

Confidence = Literal["certain", "likely", "possible"]


class GpuProcess(Frozen):
    """Another process on the GPU, as the message names it."""

    pid: int
    bytes: int


class TriageFailure(Frozen):
    """One out of memory as it was reported; bytes are None where nothing says them.

    A message prints two decimals, so that its figures are right to half a hundredth of the unit that it prints.
    """

    form: str
    """The kind of message: which allocator, driver or library wrote it."""
    backend: str
    """CUDA, HIP, XPU, NPU, MPS, or host."""
    rank: str
    """As the log's prefix says it; empty where there is none."""
    device: int | None
    line: int
    """Where it stands in the log, from 1; 0 for a snapshot."""
    tried: int | None
    """What the driver was asked for: a segment, which may be larger than the tensor."""
    capacity: int | None
    free: int | None
    allocated: int | None
    unallocated: int | None
    """Reserved but unallocated: holes, since segments that are wholly free had been given back before."""
    reserved: int | None
    private_pools: int | None
    limit: int | None
    """What a memory fraction that was set allows."""
    this_process: int | None
    outside: int | None
    """Of this process, outside PyTorch's allocator: context, libraries, communicators."""
    others: tuple[GpuProcess, ...]
    phase: str
    """What ran; empty where nothing says it."""
    evidence: str
    """The line that the phase was read from."""
    site: str
    """The innermost line of the program's own code."""


class TriageShare(Frozen):
    """The bytes of one category."""

    category: str
    bytes: int
    blocks: int
    known_by: str
    """What the category was inferred from."""


class TriageSite(Frozen):
    """The bytes of one call site."""

    site: str
    category: str
    bytes: int
    blocks: int
    stack: tuple[str, ...]
    """From the innermost frame outwards."""


class TriageGrowth(Frozen):
    """A call site whose live bytes grow from step to step."""

    site: str
    bytes_per_step: float
    blocks_per_step: float
    steps: int
    """Intervals that were seen, the first step's aside."""


class TriageMemory(Frozen):
    """What the allocator of a snapshot holds."""

    device: int
    moment: str
    """Of which moment the shares are: the failed request, the peak of the trace, or the end."""
    allocated: int
    """Bytes asked for and alive at that moment."""
    end_allocated: int
    """Bytes of live blocks at the end."""
    end_reserved: int
    holes: int
    """Free bytes in segments that are partly used."""
    largest_hole: int
    segments: int
    entries: int
    """Entries of the trace."""
    steps: int
    """Steps that were found in the trace; 0 for none."""
    steps_by: str
    """What the steps were found by."""
    step_peaks: tuple[int, ...]
    replay_reserved: int | None
    """Reserved at the peak when the trace is replayed as it was recorded."""
    replay_expandable: int | None
    """The same with expandable segments."""
    replay_repeats: bool
    """Whether the failed request fails in the replay too."""
    replay_serves: bool
    """Whether the replay serves it with expandable segments."""
    settings: str
    """``PYTORCH_CUDA_ALLOC_CONF`` as the snapshot has it."""


class TriageComparison(Frozen):
    """A measured figure beside the estimate's."""

    name: str
    measured: int
    estimated: int


class TriageCause(Frozen):
    """One cause, with what speaks for it."""

    code: str
    """Stable; each has its line in docs/triage.md."""
    title: str
    confidence: Confidence
    evidence: tuple[str, ...]
    bytes: int | None
    """What it accounts for, where that is known."""
    remedy: str
    """The usual smallest change, where the job is not known."""


class TriageChange(Frozen):
    """A change, proved by the estimate of the job with it."""

    change: str
    """As it is typed."""
    device: int
    saves: int
    """Bytes of device memory beside the job as it is."""
    verdict: Verdict
    enough: bool
    """Whether it fits, and saves what the failed request lacked, where that is known."""


class Triage(Frozen):
    """The answer of ``memcalc triage``."""

    schema_: Literal["memcalc.triage/1"] = Field(
        default="memcalc.triage/1", alias="schema", serialization_alias="schema"
    )
    version: str
    kind: Literal["message", "snapshot"]
    source: str
    """The file's name, or stdin, or text."""
    answered: bool
    """Whether a cause is at least likely."""
    summary: str
    failures: tuple[TriageFailure, ...]
    """The first one of each rank."""
    memory: TriageMemory | None
    shares: tuple[TriageShare, ...]
    sites: tuple[TriageSite, ...]
    growth: tuple[TriageGrowth, ...]
    comparison: tuple[TriageComparison, ...]
    estimate: str
    """What the estimate of the job says, in one sentence; empty without a job."""
    causes: tuple[TriageCause, ...]
    """The most certain first."""
    changes: tuple[TriageChange, ...]
    """Proved ones, the smallest first; empty without a job."""
    unknown: tuple[str, ...]
    """What cannot be known from what was given."""
    record: tuple[str, ...]
    """The lines that would record what is missing."""
    command: str
    """The estimate of the job, as a command; empty without a job."""
