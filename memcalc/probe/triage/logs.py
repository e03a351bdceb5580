"""A log as the failures in it: messages with their figures, the rank that wrote them, and the stack above them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memcalc.probe.triage.frames import Frame
from memcalc.units import GIB, KIB, MIB, TIB

_SIZE = r"(?<![\d.])(\d{1,16}(?:\.\d{1,6})?) ?(bytes|[KMGT]i?B)"
_UNITS = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB, "KB": KIB, "MB": MIB, "GB": GIB, "TB": TIB}
"""MPS writes KB, MB and GB and divides by powers of 1024 (``MPSAllocator.mm``, format_size)."""
_NONSENSE = 1 << 50
"""NVML's "not available" is printed as 17179869184 GiB; no device has a PiB."""
HOST_FORMS = ("host allocator", "killed", "data loader", "shared memory")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one message [bytes]; None where it has none."""

    form: str
    backend: str = "CUDA"
    device: int | None = None
    tried: int | None = None
    capacity: int | None = None
    free: int | None = None
    allocated: int | None = None
    unallocated: int | None = None
    reserved: int | None = None
    private_pools: int | None = None
    limit: int | None = None
    this_process: int | None = None
    processes: tuple[tuple[int, int], ...] = ()
    """Other entries of the driver's list: process id and bytes."""


_CACHING = re.compile(r"\b(CUDA|HIP|XPU|NPU|MLU|MUSA|DPCPP|GCU|PrivateUse\w*) out of memory\b", re.IGNORECASE)
_CUT = re.compile(r"()[Tt]ried to allocate [\d.]+ [KMGT]?i?[Bb]\w*[. ]{1,2}\(?(?:GPU|NPU) \d")
"""The message without its first words."""
_FORMS = (
    ("caching", _CACHING),
    ("caching", _CUT),
    ("cudaMallocAsync", re.compile(r"Allocation on device\s*\d*\s*would exceed allowed memory")),
    ("MPS", re.compile(r"MPS backend out of memory")),
    ("host allocator", re.compile(r"DefaultCPUAllocator: (?:can't allocate|not enough) mem|Unable to mmap \d+ byte")),
    ("NCCL", re.compile(r"Cuda failure (?:\d+ )?'?out of memory'?|Failed to CUDA (?:calloc|malloc|host alloc)")),
    ("driver", re.compile(
        r"CUDA(?: driver)? error: out of memory|cuda runtime error \(2\) ?: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|hipErrorOutOfMemory|HIP error: out of memory|cudaErrorMemoryAllocation|error=2 : out of memory"
    )),
    ("library", re.compile(r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED")),
    ("other framework", re.compile(r"RESOURCE_EXHAUSTED: Out of memory|ResourceExhaustedError")),
    ("shared memory", re.compile(r"killed by signal: Bus error|insufficient shared memory|\(shm\)")),
    ("data loader", re.compile(
        r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)"
    )),
    ("killed", re.compile(
        r"oom[-_]kill|Out of memory: Kill|OOMKilled|OUT_OF_MEMORY|^\S*\s*Killed\s*$|exitcode\s*:\s*-9\b|signal 9\b"
        r"|SIGKILL|exit (?:code|status) 137|Killed signal"
    )),
)  # fmt: skip
"""In the order in which one speaks before another."""


def figures_of(text: str, line: str) -> Figures | None:
    """Return the figures of a message that begins on `line`; `text` is it and what follows, as one line.

    >>> said = "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity; 25.38 MiB free)"
    >>> figures_of(said, said).tried, figures_of(said, said).device
    (20971520, 0)
    """
    for form, sign in _FORMS:
        match = sign.search(line)
        if match is not None:
            return _read(form, match, text)
    return None


def _read(form: str, match: re.Match[str], text: str) -> Figures:
    if form == "caching":
        return _caching(match[1].upper() or "CUDA", text)
    if form == "cudaMallocAsync":
        return _malloc_async(text)
    if form == "MPS":
        allocated, other = _size(rf"MPS allocated: {_SIZE}", text), _size(rf"other allocations: {_SIZE}", text)
        in_use = None if allocated is None or other is None else allocated + other
        tried, limit = _size(rf"Tried to allocate {_SIZE}", text), _size(rf"max allowed: {_SIZE}", text)
        return Figures(
            form, "MPS", tried=tried, limit=limit, allocated=allocated, reserved=allocated, this_process=in_use
        )
    if form == "host allocator":
        request = re.search(r"(?:tried to allocate|mmap) (\d+) bytes", text)
        return Figures(form, "host", tried=int(request[1]) if request else None)
    return Figures(form, "host" if form in HOST_FORMS else "HIP" if "hip" in match[0].lower() else "CUDA")


def _caching(backend: str, text: str) -> Figures:
    old = re.search(r"\([GNXM][PL]U \d+;", text) is not None
    reserved = _size(rf"{_SIZE} reserved in total", text)
    allocated = _size(rf"{_SIZE} already allocated", text) if old else _size(rf"{_SIZE} is allocated by PyTorch", text)
    cached = _size(rf"{_SIZE} cached", text)
    unallocated = _size(rf"{_SIZE} is reserved by PyTorch but unallocated", text)
    if unallocated is None and allocated is not None:
        unallocated = cached if cached is not None else None if reserved is None else max(reserved - allocated, 0)
    if reserved is None and None not in (allocated, unallocated):
        reserved = (allocated or 0) + (unallocated or 0)
    this_process = _size(rf"this process has {_SIZE} memory in use", text)
    listed = (
        (int(pid), size_of(number, unit))
        for pid, number, unit in re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
    )
    return Figures(
        form="reserved" if old and "reserved in total" in text else "cached" if old else "capacity",
        backend=backend,
        device=_device(text),
        tried=_size(rf"[Tt]ried to allocate {_SIZE}", text),
        capacity=_size(rf"{_SIZE} total capacity", text) if old else _size(rf"total capaci?ty of {_SIZE}", text),
        free=_size(rf"{_SIZE} free", text) if old else _size(rf"of which {_SIZE} is free", text),
        allocated=allocated,
        unallocated=unallocated,
        reserved=reserved,
        private_pools=_size(rf"with {_SIZE} allocated in private pools", text),
        limit=_size(rf"{_SIZE} allowed", text),
        this_process=this_process or None,  # 0 is what NVML answers where it may not say
        processes=tuple((pid, size) for pid, size in listed if size < _NONSENSE),
    )


def _malloc_async(text: str) -> Figures:
    device = re.search(r"on device\s*(\d+)", text)
    limit = _size(rf"PyTorch limit \(set by user-supplied memory fraction\)\s*: {_SIZE}", text)
    return Figures(
        "cudaMallocAsync",
        device=int(device[1]) if device else None,
        tried=_size(rf"Requested\s*: {_SIZE}", text),
        capacity=_size(rf"Device limit\s*: {_SIZE}", text),
        free=_size(rf"Free \(according to CUDA\)\s*: {_SIZE}", text),
        allocated=_size(rf"Currently allocated\s*: {_SIZE}", text),
        limit=limit,
    )


def _device(text: str) -> int | None:
    match = re.search(r"\b(?:GPU|NPU|XPU|MLU|device)\s+(\d+)", text)
    return int(match[1]) if match else None


def _size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    size = size_of(match[1], match[2])
    return size if size < _NONSENSE else None


def size_of(number: str, unit: str) -> int:
    """Return a printed size [bytes].

    >>> size_of("2.00", "GiB")
    2147483648
    """
    return round(float(number) * _UNITS[unit])


_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(
    r"^\s*(?:\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\s+)?(?:\[(?:rank|default)?(\d+)\]:\s?"
    r"|\(\w*?(?:[Rr]ank|TP|DP|PP)[ _=]?(\d+)[^)]*\)\s|(\d+):\s)"
)
"""Prefixes of torchrun, of workers that name their rank, and of srun --label, behind a time."""
_BOX = "│| \t\v\f\xa0"
_PYTHON = re.compile(r'File "([^"]{1,400})", line (\d{1,9}), in (\S{1,200})')
_NOTEBOOK = re.compile(r"^(?:File )?(\S{1,400}\.py)(?::(\d{1,9}))?,? in (\w{1,100})\(")
_BOXED = re.compile(r"^[│|]?\s*(\S{1,400}\.py):(\d{1,9}) in (\w{1,100})")
_ARROW = re.compile(r"^\s*(?:-+>|❱)\s*(\d{1,9})\s?(.*)$")
_MARKS = re.compile(r"^[\s^~]*$")
_START = re.compile(r"Traceback \(most recent call last\)|^-{40,}$")
_STEP = re.compile(
    r"(\d{1,9})/(\d{1,9}) \[(?:\d+:)?\d+:\d+<|\b(?:step|iter|iteration|global_step)[ =:\]'\"]{1,3}(\d{1,9})\b",
    re.IGNORECASE,
)
_NEXT = re.compile(r"Traceback \(most|\b[A-Z]{3,5} out of memory|During handling of the above")
_WORDS = (
    "emory", "ALLOC_FAILED", "kill", "Kill", "KILL", "signal", "exitcode", "137", "EXHAUSTED", "Cuda fail", "OUT_OF",
    "Failed to CUDA", "ried to alloc", "shm", "exited unexpectedly",
)  # fmt: skip
_REACH = 12
"""Lines after the first that may belong to a message: terminals and mail wrap it."""
_LOOK_BACK = 600
"""Lines above a message in which its traceback is looked for."""
_NEAR = 40
"""Lines above a message within which its innermost frame must be: else the stack is another error's."""
_LONGEST_LINE = 8000
_MOST_READ = 5000
"""Different lines that are looked at in full."""
MOST_FAILURES = 64


@dataclass(frozen=True, slots=True)
class OomEvent:
    """One out of memory in a log."""

    figures: Figures
    rank: str
    line: int
    stack: tuple[Frame, ...]
    """The innermost frame first."""
    steps_before: int | None
    """The last number of a step that the log shows above it."""
    after: str = ""
    """The text of the message."""


@dataclass(frozen=True, slots=True)
class Log:
    """The out-of-memory events of a log."""

    events: tuple[OomEvent, ...]
    expandable: bool
    """Whether it shows that ``expandable_segments:True`` was set, apart from PyTorch's own advice."""


def read_log(text: str) -> Log:
    """Return the failures of a log, each rank's first; host-memory ones only where no device ran out.

    A launcher kills the other ranks after one has failed, so that their signals say nothing while a device's message
    stands in the log.
    """
    lines = [_ANSI.sub("", line[:_LONGEST_LINE]) for line in text.replace("\r", "\n").split("\n")]
    ranks = [_rank(line) for line in lines]
    events = list(_incidents(lines, ranks))
    device = [event for event in events if event.figures.form not in HOST_FORMS]
    by_failure = {_key(event.rank, event.figures): event for event in device or events}
    detailed_ranks = {rank for rank, _, detailed in by_failure if detailed}
    failures = [
        event
        for (rank, _, detailed), event in by_failure.items()
        if detailed or (rank not in detailed_ranks and (rank or not detailed_ranks))
    ]
    advice = re.sub(r"(?:try setting|by setting)\s+PYTORCH_\w+=expandable_segments:True", "", " ".join(text.split()))
    return Log(tuple(failures[:MOST_FAILURES]), "expandable_segments:True" in advice)


def _rank(line: str) -> str:
    match = _RANK.match(line)
    return next((part for part in match.groups() if part), "") if match else ""


def _key(rank: str, figures: Figures) -> tuple[str, int | None, bool]:
    """What makes two messages the same failure: a program may go on, and report the next one."""
    return rank, figures.device, figures.tried is not None


def _incidents(lines: list[str], ranks: list[str]) -> Iterator[OomEvent]:
    """The first message of each failure; a stack is looked for above these alone."""
    seen = set()
    examined: set[tuple[str, str]] = set()
    for index, line in enumerate(lines):
        if not _suspect(line) or (ranks[index], _plain(line)) in examined:
            continue
        if len(examined) > _MOST_READ:
            return
        examined.add((ranks[index], _plain(line)))
        following = [_plain(text) for text in _same_rank(lines, ranks, index, index + _REACH)]
        message = _until_next(" ".join(" ".join(following).split()), len(following[0]))
        figures = figures_of(message, following[0])
        if figures is None or (_key(ranks[index], figures), figures.form in HOST_FORMS) in seen:
            continue
        seen.add((_key(ranks[index], figures), figures.form in HOST_FORMS))
        stack, steps = _stack(lines, ranks, index), _steps(lines, index)
        yield OomEvent(figures, ranks[index], index + 1, stack, steps, message[:1200])


def _until_next(message: str, least: int) -> str:
    """A message without the next one, or what else begins below it."""
    following = _NEXT.search(message, min(least, len(message)))
    return message[: following.start()] if following else message


def _suspect(line: str) -> bool:
    """Whether a line may begin a message: a quick test, without a pattern."""
    return any(word in line for word in _WORDS)


def _plain(line: str) -> str:
    return _RANK.sub("", line).strip(_BOX)


def _same_rank(lines: list[str], ranks: list[str], start: int, stop: int) -> list[str]:
    return [
        lines[index]
        for index in range(max(start, 0), min(stop, len(lines)))
        if ranks[index] == ranks[min(max(start, 0), len(lines) - 1)]
    ]


def _stack(lines: list[str], ranks: list[str], index: int) -> tuple[Frame, ...]:
    """The frames above a message, the innermost first; those below it where none is above, as some editors show it."""
    first = index
    while first > max(index - _LOOK_BACK, 0) and not (
        ranks[first] == ranks[index] and first < index and _START.search(lines[first])
    ):
        first -= 1
    above = [_RANK.sub("", lines[row]) for row in range(first, index) if ranks[row] == ranks[index]]
    frames = list(_frames(above))
    if frames and any(True for _ in _frames(above[-_NEAR:])):
        return tuple(reversed(frames))
    below = [_RANK.sub("", line) for line in _same_rank(lines, ranks, index, index + 4 * _REACH)]
    return tuple(_frames(below))


def _frames(lines: list[str]) -> Iterator[Frame]:
    for index, line in enumerate(lines):
        match = _PYTHON.search(line)
        if match is not None:
            yield Frame(match[1], int(match[2]), match[3], _code(lines, index + 1))
            continue
        match = _NOTEBOOK.match(line.strip()) or _BOXED.match(line.strip())
        if match is not None:
            number, code = _arrow(lines, index + 1)
            yield Frame(match[1], int(match[2] or number), match[3], code)


def _code(lines: list[str], index: int) -> str:
    """The source line below a frame, if it has one."""
    if index < len(lines):
        line = lines[index].strip()
        if line and not _PYTHON.search(line) and not _MARKS.match(line):
            return line[:200]
    return ""


def _arrow(lines: list[str], start: int) -> tuple[int, str]:
    """The marked line of a notebook's or a boxed traceback."""
    for line in lines[start : start + 12]:
        inner = line.strip("│| ")
        match = _ARROW.match(inner)
        if match is not None:
            return int(match[1]), match[2].strip("│ ")[:200]
        if _NOTEBOOK.match(inner) or _BOXED.match(inner):
            break
    return 0, ""


def _steps(lines: list[str], index: int) -> int | None:
    """The last number of a step above a message."""
    for line in reversed(lines[max(index - _LOOK_BACK, 0) : index]):
        matches = list(_STEP.finditer(line[-400:]))
        if matches and "File " not in line:
            return int(matches[-1][1] or matches[-1][3])
    return None
