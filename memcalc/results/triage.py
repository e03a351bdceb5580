"""The answer of ``memcalc triage``: what was read, where the bytes went, why it ran out, and what would help."""

from typing import Literal

from memcalc.results.estimates import Answer, Verdict, schema
from memcalc.specs.strict import Frozen

Confidence = Literal["certain", "likely", "possible"]
DOUBT = "whether this is the job"
"""How a sentence begins that says why figures and changes may be those of another job than the one that failed."""


class GpuProcess(Frozen):
    """Another process on the GPU, as the message names it."""

    pid: int
    """As the driver numbers it."""
    bytes: int
    """What it holds on the GPU [bytes]."""


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
    """The GPU's number; None where nothing says it."""
    line: int
    """Where it stands in the log, from 1; 0 for a snapshot."""
    tried: int | None
    """What the driver was asked for: a segment, which may be larger than the tensor."""
    capacity: int | None
    """Of the GPU [bytes]."""
    free: int | None
    """Of the GPU, when the request failed [bytes]."""
    allocated: int | None
    """In live blocks of PyTorch's allocator [bytes]."""
    unallocated: int | None
    """Reserved but unallocated: holes, since segments that are wholly free had been given back before."""
    reserved: int | None
    """In segments of PyTorch's allocator [bytes]."""
    private_pools: int | None
    """Of what is allocated, in private pools, such as those of CUDA graphs [bytes]."""
    limit: int | None
    """What a memory fraction that was set allows."""
    this_process: int | None
    """What it holds on the GPU, inside and outside PyTorch's allocator [bytes]."""
    outside: int | None
    """Of this process, outside PyTorch's allocator: context, libraries, communicators."""
    others: tuple[GpuProcess, ...]
    """As far as the message lists them."""
    phase: str
    """What ran; empty where nothing says it."""
    evidence: str
    """The line that the phase was read from."""
    site: str
    """The innermost line of the program's own code."""


class TriageShare(Frozen):
    """The bytes of one category."""

    category: str
    """What the bytes are, such as activations."""
    bytes: int
    """Alive at the moment that is explained [bytes]."""
    blocks: int
    """Live blocks, [1]."""
    known_by: str
    """What the category was inferred from."""


class TriageSite(Frozen):
    """The bytes of one call site."""

    site: str
    """The line of the program that made them."""
    category: str
    """What the bytes are, such as activations."""
    bytes: int
    """Alive at the moment that is explained [bytes]."""
    blocks: int
    """Live blocks, [1]."""
    stack: tuple[str, ...]
    """From the innermost frame outwards."""


class TriageGrowth(Frozen):
    """A call site whose live bytes grow from step to step."""

    site: str
    """The line of the program that made them."""
    bytes_per_step: float
    """Mean growth [bytes]."""
    blocks_per_step: float
    """Mean growth in live blocks, [1]."""
    steps: int
    """Intervals that were seen, the first step's aside."""


class TriageMemory(Frozen):
    """What the allocator of a snapshot holds."""

    device: int
    """The GPU's number."""
    moment: str
    """Of which moment the shares are: the failed request, the peak of the trace, or the end."""
    allocated: int
    """Bytes asked for and alive at that moment."""
    end_allocated: int
    """Bytes of live blocks at the end."""
    end_reserved: int
    """Bytes in segments at the end."""
    holes: int
    """Free bytes in segments that are partly used."""
    largest_hole: int
    """The largest of those free blocks [bytes]."""
    segments: int
    """That the allocator holds at the end, [1]."""
    entries: int
    """Entries of the trace."""
    steps: int
    """Steps that were found in the trace; 0 for none."""
    steps_by: str
    """What the steps were found by."""
    step_peaks: tuple[int, ...]
    """Peak of live blocks in each step, of the last 64 at most [bytes]."""
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
    """A component, allocated, reserved, device, outside PyTorch, or capacity."""
    measured: int
    """As read [bytes]; what a message says is allocated counts with the request that failed."""
    estimated: int
    """At the peak [bytes]; components in the phase that ran, where it is known."""


class TriageCause(Frozen):
    """One cause, with what speaks for it."""

    code: str
    """Stable; each has its line in docs/triage.md."""
    title: str
    """The cause in a few words."""
    confidence: Confidence
    """How sure it is."""
    evidence: tuple[str, ...]
    """What was read that speaks for it, with figures."""
    bytes: int | None
    """What it accounts for, where that is known."""
    remedy: str
    """The usual smallest change, where the job is not known."""


class TriageChange(Frozen):
    """A change, proved by the estimate of the job with it."""

    change: str
    """As it is typed."""
    device: int
    """Predicted device memory with it [bytes]."""
    saves: int
    """Bytes of device memory beside the job as it is."""
    verdict: Verdict
    """Of the job with it."""
    enough: bool
    """Whether it fits, and saves what the failed request lacked, where that is known."""
    own_code: bool = False
    """Whether the framework cannot be told it, so that somebody has to write it."""


class Triage(Answer):
    """The answer of ``memcalc triage``."""

    schema_: Literal["memcalc.triage/1"] = schema("memcalc.triage/1")
    kind: Literal["message", "snapshot"]
    """What was read: a message, or a log that holds one; or a snapshot."""
    source: str
    """The file's name, or stdin, or text."""
    answered: bool
    """Whether a cause is at least likely."""
    summary: str
    """One line: the likeliest cause, or that nothing failed, or that nothing can be told."""
    failures: tuple[TriageFailure, ...]
    """The first one of each rank."""
    memory: TriageMemory | None
    """Of a snapshot's device; None for a message."""
    shares: tuple[TriageShare, ...]
    """Of a snapshot, the largest first."""
    sites: tuple[TriageSite, ...]
    """Of a snapshot, the 12 at most that hold most."""
    growth: tuple[TriageGrowth, ...]
    """Of a snapshot with four steps or more, the 8 fastest at most."""
    comparison: tuple[TriageComparison, ...]
    """Measured beside estimated; empty without a job."""
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
