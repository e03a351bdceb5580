"""A memory snapshot of torch as checked, compact records, over the forms that its versions write.

2.0 names no address of a block and keeps frames in a block's ``history``; 2.1 to 2.13 have ``frames`` with each block,
``device_traces`` and ``allocator_settings`` (``torch/csrc/cuda/memory_snapshot.cpp``, ``torch/cuda/memory.py``). Equal
stacks are the same object many times over, so that each is read once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memcalc.errors import FileError
from memcalc.probe.triage.frames import Frame
from memcalc.probe.triage.plain_pickle import PlainPickleError, load_plain, looks_like_pickle

LARGEST_SNAPSHOT = 4 << 30
"""Bytes of a file that is read; a snapshot takes three to ten times its size in memory."""
ALLOC, FREE, OOM = 0, 1, 2
_KINDS = {"alloc": ALLOC, "free_requested": FREE, "free_completed": FREE, "oom": OOM}
_PYTHON = (".py", ".pyx", ".ipynb")
_MOST_FRAMES = 1000
_LARGEST = 1 << 62
Entry = tuple[int, int, int, int, int]
"""Kind, address (of an out of memory what was free), bytes, stream, number of the stack."""


@dataclass(frozen=True, slots=True)
class Stack:
    """One stack: its Python frames, the innermost first, and what its C++ frames give away."""

    frames: tuple[Frame, ...]
    engine: bool = False
    """Autograd's engine ran: a C++ frame says so."""
    blas: bool = False
    """A library asked for its workspace."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment."""

    address: int
    size: int
    requested: int
    active: bool
    stack: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What one request to the driver gave, or one mapped range of an expandable segment."""

    device: int
    total: int
    stream: int
    expandable: bool
    private: bool
    blocks: tuple[Block, ...]


@dataclass(slots=True)
class Snapshot:
    """A snapshot."""

    segments: list[Segment] = field(default_factory=list)
    traces: list[list[Entry]] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=lambda: [Stack(())])
    """The first is the empty one."""
    settings: str = ""
    expandable: bool = False

    @property
    def device(self) -> int:
        """The device that holds most, of those with a trace if there is one."""
        total_by_device: dict[int, int] = {}
        for segment in self.segments:
            total_by_device[segment.device] = total_by_device.get(segment.device, 0) + segment.total
        for device, trace in enumerate(self.traces):
            if trace:
                failed = any(entry[0] == OOM for entry in trace[-100:])
                total_by_device[device] = total_by_device.get(device, 0) + (1 << 62 if failed else 0)
        return max(total_by_device, key=lambda device: total_by_device[device], default=0)


def read_snapshot(content: bytes, name: str) -> Snapshot:
    """Return the snapshot that a file holds, or raise FileError in one sentence."""
    try:
        data = load_plain(content) if looks_like_pickle(content) else json.loads(content.decode("utf-8-sig"))
        return _Reader(len(content)).read(data)
    except PlainPickleError as error:
        raise FileError("file", name, f"the pickle {error}") from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        reason = error if isinstance(error, _FormError) else "must be a memory snapshot, as a pickle or as JSON"
        raise FileError("file", name, str(reason)) from None


class _FormError(ValueError):
    """Data that is no snapshot."""


class _Reader:
    """Reads data of any kind as a snapshot; what it walks is bounded by the size of the file.

    A pickle can name one list many times, so that a small file could stand for endless work.
    """

    def __init__(self, size: int) -> None:
        self.left = size
        self.out = Snapshot()
        self.index_by_id: dict[int, int] = {}
        self.index_by_frames: dict[Any, int] = {(): 0}

    def read(self, data: Any) -> Snapshot:
        if isinstance(data, list):  # torch.cuda.memory_snapshot() and 1.13: the segments alone
            data = {"segments": data, "device_traces": []}
        if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
            raise _FormError("must be a memory snapshot: a table with segments and device_traces")
        for segment in self._each(data["segments"], "segments"):
            self.out.segments.append(self._segment(segment))
        for trace in self._each(data.get("device_traces") or [], "device_traces", list):
            self.out.traces.append(self._trace(trace))
        settings = data.get("allocator_settings")
        if isinstance(settings, dict):
            configured = settings.get("PYTORCH_CUDA_ALLOC_CONF") or settings.get("PYTORCH_ALLOC_CONF") or ""
            self.out.settings = str(configured)[:200] if isinstance(configured, str) else ""
            self.out.expandable = settings.get("expandable_segments") is True
        return self.out

    def _each(self, items: Any, what: str, kind: type = dict) -> list[Any]:
        """A list of tables, counted."""
        if not isinstance(items, list):
            raise _FormError(f"must have a list of {what}")
        self.left -= 2 * len(items)
        if self.left < 0:
            raise _FormError("must not name the same part of itself again and again")
        if not all(type(item) is kind for item in items):
            raise _FormError(f"must have {what} that are {'lists' if kind is list else 'tables'}")
        return items

    def _segment(self, table: dict[Any, Any]) -> Segment:
        address = next_address = _number(table, "address", 0)
        blocks = []
        for block in self._each(table.get("blocks", []), "blocks"):
            size = _number(block, "size")
            next_address = _number(block, "address", next_address)
            state = block.get("state")
            active = state != "inactive"
            requested, frames = _number(block, "requested_size", size), block.get("frames")
            history = block.get("history")
            if frames is None and type(history) is list and history and type(history[0]) is dict:
                frames, requested = history[0].get("frames"), _number(history[0], "real_size", requested)
            blocks.append(Block(next_address, size, min(requested, size) or size, active, self._stack(frames)))
            next_address += size
        pool = table.get("segment_pool_id")
        return Segment(
            device=_number(table, "device", 0),
            total=_number(table, "total_size", next_address - address),
            stream=_number(table, "stream", 0, least=-_LARGEST),
            expandable=table.get("is_expandable") is True,
            private=isinstance(pool, tuple | list) and any(pool),
            blocks=tuple(blocks),
        )

    def _trace(self, entries: list[Any]) -> list[Entry]:
        records: list[Entry] = []
        known, kinds, out = self.index_by_id, _KINDS, records.append
        for entry in self._each(entries, "trace entries"):
            action = entry.get("action")
            kind = kinds.get(action) if type(action) is str else None
            if kind is None:  # segments, which the blocks show, and the snapshot itself
                continue
            frames = entry.get("frames")
            stack = known.get(id(frames)) if frames else 0
            if stack is None:
                stack = self._stack(frames)
            address, size = entry.get("addr" if kind != OOM else "device_free", 0), entry.get("size")
            stream = entry.get("stream", 0)
            if not (
                type(address) is type(size) is int
                and 0 <= size < _LARGEST
                and type(stream) is int
                and abs(stream) < _LARGEST
            ):
                raise _FormError("must have trace entries with whole numbers for addr and size")
            out((kind, address, size, stream, stack))
        return records

    def _stack(self, frames: Any) -> int:
        if not frames:
            return 0
        if type(frames) is not list:
            raise _FormError("must have lists of frames")
        key = id(frames)  # the data outlives the reader, so that no other list gets this number
        if key not in self.index_by_id:
            self.left -= 2 * min(len(frames), _MOST_FRAMES)
            stack = self._made(frames[:_MOST_FRAMES])
            plain = tuple((frame.file, frame.line, frame.name) for frame in stack.frames), stack.engine, stack.blas
            if plain not in self.index_by_frames:
                self.index_by_frames[plain] = len(self.out.stacks)
                self.out.stacks.append(stack)
            self.index_by_id[key] = self.index_by_frames[plain]
        return self.index_by_id[key]

    def _made(self, frames: list[Any]) -> Stack:
        python_frames, engine, blas = [], False, False
        for frame in frames:
            if type(frame) is not dict:
                raise _FormError("must have frames that are tables")
            file, name, line = frame.get("filename"), frame.get("name"), frame.get("line", 0)
            if not (type(file) is str and type(name) is str and type(line) is int and -1 <= line < 1 << 31):
                raise _FormError("must have frames with filename, name and line")
            if file.endswith(_PYTHON) or file.startswith("<"):
                python_frames.append(Frame(file[:400], line, name[:200]))
            else:
                engine = engine or "autograd::Engine" in name or "evaluate_function" in name
                blas = blas or "CUDABlas" in name or "cublas" in name or "Workspace" in name
        return Stack(tuple(python_frames), engine, blas)


def _number(table: dict[Any, Any], key: str, default: int | None = None, least: int = 0) -> int:
    value = table.get(key, default)
    if type(value) is not int or not least <= value < _LARGEST:
        if value is None and default is not None:
            return default
        raise _FormError(f"must have whole numbers for {key}")
    return value


# The trace of one device as lifetimes: what each allocation's birth and death were, and what was alive when.

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
BEFORE = -1
"""The birth of what the recording found there already."""


@dataclass(frozen=True)
class Lifetimes:
    """Every allocation of a device, in columns, and the trace that they were read from."""

    size: Ints
    """Bytes asked for."""
    stack: Ints
    """Where it was made; 0 where that is not known."""
    born: Ints
    """Index of the entry that made it, or BEFORE."""
    died: Ints
    """Index of the entry that freed it, or the number of entries for what is alive at the end."""
    stream: Ints
    kinds: Ints
    """Of each entry."""
    stacks: Ints
    """Of each entry."""
    failed: int | None
    """Index of the last out of memory."""
    tried: int | None
    free: int | None
    """What the driver had free then."""

    @property
    def entries(self) -> int:
        """How many entries the trace has."""
        return len(self.kinds)

    def alive_at(self, moment: int) -> Bools:
        """Which lifetimes are there right after an entry."""
        return (self.born <= moment) & (self.died > moment)

    def running(self) -> Ints:
        """Live bytes after each entry; the first is before all of them."""
        change = np.zeros(self.entries + 2, dtype=np.int64)
        np.add.at(change, self.born + 1, self.size)
        np.add.at(change, np.minimum(self.died, self.entries) + 1, -self.size)
        return np.cumsum(change)[: self.entries + 1]

    def moment(self) -> tuple[int, str]:
        """The entry that is explained: the failed request, else the peak."""
        if self.failed is not None:
            return self.failed, "the failed request"
        if not self.entries:
            return 0, "the end"
        index = int(np.argmax(self.running())) - 1
        return max(index, 0), "the peak of the trace"


def lifetimes_of(snapshot: Snapshot, device: int) -> Lifetimes:
    """Return the lifetimes of a device; without a trace, what its blocks hold at the end."""
    trace = snapshot.traces[device] if device < len(snapshot.traces) else []
    rows, alive = _walked(trace)
    count = len(trace)
    for segment in snapshot.segments:
        if segment.device != device:
            continue
        for block in segment.blocks:
            if not block.active:
                continue
            row = alive.pop(block.address, None)
            if row is None:
                rows.append([block.requested, block.stack, BEFORE, count, segment.stream])
            elif rows[row][1] == 0:
                rows[row][1] = block.stack
    failed = max((row for row, entry in enumerate(trace) if entry[0] == OOM), default=None)
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    size, stack, born, died, stream = (table[:, column].copy() for column in range(5))
    return Lifetimes(
        size=size,
        stack=stack,
        born=born,
        died=died,
        stream=stream,
        kinds=np.fromiter((entry[0] for entry in trace), np.int64, count),
        stacks=np.fromiter((entry[4] for entry in trace), np.int64, count),
        failed=failed,
        tried=None if failed is None else trace[failed][2],
        free=None if failed is None else trace[failed][1],
    )


def _walked(trace: list[Entry]) -> tuple[list[list[Any]], dict[int, int]]:
    """Rows of size, stack, birth, death and stream, and which are alive at the end by address.

    A free is reported twice, when it is asked for and when it is done: the first counts. One of an address that the
    trace did not make is of something older, whose own stack is unknown.
    """
    rows: list[list[Any]] = []
    alive: dict[int, int] = {}
    freed: set[int] = set()
    count = len(trace)
    for index, (kind, address, size, stream, stack) in enumerate(trace):
        if kind == ALLOC:
            before = alive.get(address)
            if before is not None:  # its free was not recorded (skip_actions)
                rows[before][3] = index
            alive[address] = len(rows)
            freed.discard(address)
            rows.append([size, stack, index, count, stream])
        elif kind == FREE:
            row = alive.pop(address, None)
            if row is not None:
                rows[row][3] = index
                freed.add(address)
            elif address not in freed:
                freed.add(address)
                rows.append([size, 0, BEFORE, index, stream])
    return rows, alive
