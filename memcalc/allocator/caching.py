"""The events of a job put through the allocator, and the counters that it would read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from memcalc.allocator.pools import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    OWN_SEGMENT,
    ROUND_LARGE,
    SMALL_REQUEST,
    Device,
    ExpandablePool,
    Pool,
    Rules,
    round_up,
    segment_bytes,
)
from memcalc.errors import InputError
from memcalc.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_KINDS = ("alloc", "free", "mark", "record", "drop", "sync", "empty")


class Event(NamedTuple):
    """One thing that happens to the allocator; `replay` takes the plain 5-tuple as well, which is faster to make.

    ``kind`` is one of ``alloc`` (`key`, `size`, `stream`), ``free`` (`key`), ``mark`` (`name`: a phase begins),
    ``record`` (`key`, `stream`: ``Tensor.record_stream``, another stream uses the block), ``drop`` (the same, and it is
    freed at once; its ``free`` follows after ``sync``), ``sync`` (`stream`: that stream has done what was put on it,
    blocks freed meanwhile come back) and ``empty`` (``torch.cuda.empty_cache``).
    `key` names an allocation and may be used again after its free; `size` is the bytes requested; unused fields are 0.
    """

    kind: str
    key: int = 0
    size: int = 0
    stream: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The request that could not be served, and what stood at that moment; all sizes in bytes.

    `size` is the request, `segment` what the driver was asked for, `position` the event's index from 0.
    `reserved` − `allocated` are the holes that no flush could give back.
    """

    position: int
    key: int
    size: int
    segment: int
    stream: int
    phase: str
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What the counters of ``torch.cuda.memory_stats`` would read after the events; all sizes in bytes.

    `peak_allocated` counts whole blocks (``max_memory_allocated``: a block that was not split counts with its rest),
    `peak_requested` what was asked for. `phases` gives each mark's peaks (allocated, reserved) up to the next mark, the
    larger where a name comes twice; what happens before the first mark has the name "". `pools` gives each stream's
    own peak reserved. `largest_hole` is reserved − allocated when `peak_reserved` was first reached. `retries_at` gives
    each mark in order, and the retries before it. `reserved_after_flush` is the largest reserved since the last retry
    (`peak_reserved` without one). `retries` counts ``num_alloc_retries``, the last one of an out-of-memory included;
    the replay ends at the request that fails.
    """

    peak_allocated: int
    peak_requested: int
    peak_reserved: int
    allocated_end: int
    reserved_end: int
    retries: int
    out_of_memory: OutOfMemory | None
    phases: dict[str, tuple[int, int]]
    pools: dict[int, int]
    reserved_after_flush: int
    largest_hole: int
    retries_at: tuple[tuple[str, int], ...]


_Block = tuple[Pool, int, int, int]  # pool, start, end, bytes requested


class _Pools(dict[int, Pool]):
    """The pools of one class of sizes by stream, made when a stream first asks."""

    def __init__(self, device: Device, small: bool, rules: Rules) -> None:
        super().__init__()
        self._device, self._small, self._rules = device, small, rules

    def __missing__(self, stream: int) -> Pool:
        kind = ExpandablePool if self._rules.expandable else Pool
        self[stream] = pool = kind(self._device, stream, self._small, self._rules)
        return pool


class _Allocator:
    """`DeviceCachingAllocator` and its counters."""

    def __init__(self, capacity: int | None, rules: Rules) -> None:
        self.device = Device(capacity)
        self.small = _Pools(self.device, small=True, rules=rules)
        self.large = _Pools(self.device, small=False, rules=rules)
        self.live: dict[int, _Block | None] = {}
        self.users: dict[int, set[int]] = {}
        self.waiting: list[tuple[set[int], _Block]] = []
        self.allocated = self.requested = self.peak_requested = self.phase_allocated = self.retries = 0
        self.hole_at = self.largest_hole = 0
        self.phase = ""
        self.phases: dict[str, tuple[int, int]] = {}
        self.retries_at: list[tuple[str, int]] = []

    def play(self, events: Iterable[tuple[str, int, int, int, str]]) -> tuple[int, int, int, int] | None:
        """Put events through; return position, key, size and stream of a request that fails (`malloc`, `free`).

        One loop without a call for each event, since those would cost as much as the work.
        """
        small, large, live, users = self.small, self.large, self.live, self.users
        for position, (kind, key, size, stream, name) in enumerate(events):
            try:
                if kind == "alloc":
                    if key in live or size <= 0:
                        self._alloc_odd(key, size)
                        continue
                    rounded = (size + MIN_BLOCK - 1) & -MIN_BLOCK
                    pool = small[stream] if rounded <= SMALL_REQUEST else large[stream]
                    range_ = pool.take(rounded) or self._grow(pool, rounded)
                    if range_ is None:
                        return position, key, size, stream
                    start, end = range_
                    live[key] = pool, start, end, size
                    self.allocated = allocated = self.allocated + end - start
                    if allocated > self.phase_allocated:  # noqa: PLR1730  # a call of max would cost a tenth of it all
                        self.phase_allocated = allocated
                    self.requested = requested = self.requested + size
                    if requested > self.peak_requested:  # noqa: PLR1730
                        self.peak_requested = requested
                elif kind == "free":
                    block = live.pop(key)
                    if block is None:
                        continue
                    pool, start, end, request = block
                    self.allocated -= end - start
                    if users and key in users:  # another stream may still read it (`insert_events`)
                        self.waiting.append((users.pop(key), block))
                        continue
                    self.requested -= request
                    pool.give(start, end)
                else:
                    self._other(kind, key, stream, name)
            except KeyError:
                raise InputError(f"events[{position}].key", key, f"must name a live allocation for {kind}") from None
            except InputError as error:
                raise error.within(f"events[{position}]") from None
        return None

    def _other(self, kind: str, key: int, stream: int, name: str) -> None:
        if kind == "mark":
            self.begin(name)
        elif kind == "record":
            self.record(key, stream)
        elif kind == "drop":
            self.drop(key, stream)
        elif kind == "sync":
            self.sync(stream)
        elif kind == "empty":
            self.flush()
        else:
            raise InputError("kind", kind, f"must be one of {', '.join(_KINDS)}", _KINDS)

    def _alloc_odd(self, key: int, size: int) -> None:
        """An empty tensor has no block (`NativeCachingAllocator::allocate`)."""
        if size < 0:
            raise InputError("size", size, "must be 0 bytes or more")
        if key in self.live:
            raise InputError("key", key, "must not be allocated while it is live")
        self.live[key] = None

    def _grow(self, pool: Pool, size: int) -> tuple[int, int] | None:
        """Ask the driver; then with some oversize blocks given back, then with all free segments (`malloc`)."""
        block = pool.grow(size)
        if block is None and pool.release_oversize(size):
            block = pool.grow(size)
        if block is None:
            self.flush()
            self.device.flush_peak = self.device.reserved
            self.retries += 1
            block = pool.grow(size)
        if block is not None and self.device.reserved > self.hole_at:
            self.hole_at = self.device.reserved
            self.largest_hole = self.hole_at - self.allocated - (block[1] - block[0])
        return block

    def flush(self) -> None:
        """Give back all that is free as a whole, after waiting for other streams (`release_cached_blocks`)."""
        for _, block in self.waiting:
            self._return(block)
        self.waiting.clear()
        for pools in (self.large, self.small):
            for pool in pools.values():
                pool.release()

    def _return(self, block: _Block) -> None:
        pool, start, end, size = block
        self.requested -= size
        pool.give(start, end)

    def record(self, key: int, stream: int) -> None:
        """Note that another stream uses a block (`recordStream`)."""
        block = self.live[key]
        if block is not None and block[0].stream != stream:
            self.users.setdefault(key, set()).add(stream)

    def drop(self, key: int, stream: int) -> None:
        """Free a block that another stream uses: it waits until that stream is done, or the device is full."""
        block, self.live[key] = self.live[key], None
        if block is not None:
            self.allocated -= block[2] - block[1]
            self.waiting.append(({stream}, block))

    def sync(self, stream: int) -> None:
        """Return the freed blocks that waited for this stream alone (`process_events`)."""
        waiting, self.waiting = self.waiting, []
        for streams, block in waiting:
            streams.discard(stream)
            if streams:
                self.waiting.append((streams, block))
            else:
                self._return(block)

    def begin(self, name: str) -> None:
        """Close the phase, as ``reset_peak_memory_stats`` does, and begin the next."""
        self.retries_at.append((name, self.retries))
        allocated, reserved = self.phases.get(self.phase, (0, 0))
        self.phases[self.phase] = max(allocated, self.phase_allocated), max(reserved, self.device.phase_peak)
        self.phase, self.phase_allocated, self.device.phase_peak = name, self.allocated, self.device.reserved


def replay(
    events: Iterable[tuple[str, int, int, int, str]],
    *,
    capacity: int | None = None,
    expandable: bool = False,
    large_segment: int = LARGE_SEGMENT,
    max_split: int | None = None,
    watch: Callable[[tuple[str, int, int, int, str], int, int], None] | None = None,
) -> Replay:
    """Return the peaks that the caching allocator reaches over `events`, up to the first request that fails.

    `capacity` is what the driver has for the allocator (card less context and what others hold; None: no end) [bytes];
    `expandable`, `large_segment` and `max_split` (None: no limit) are ``expandable_segments``,
    ``large_segment_size_mb`` and ``max_split_size_mb`` of ``PYTORCH_CUDA_ALLOC_CONF`` [bytes].
    `watch` is told each event, and what is allocated and reserved after it.
    Raises InputError for a setting out of range, an unknown kind of event, a key that is not live or already is.

    >>> held = replay([("alloc", 1, 3 * 2**20, 0, ""), ("alloc", 2, 700, 0, ""), ("free", 1, 0, 0, "")])
    >>> held.peak_allocated, held.peak_reserved // 2**20
    (3146752, 22)
    """
    allocator = _Allocator(capacity, _checked(capacity, expandable, large_segment, max_split))
    failed = allocator.play(events if watch is None else _watched(events, allocator, watch))
    return _result(allocator, failed and _failure(allocator, *failed, large_segment))


def _watched(
    events: Iterable[tuple[str, int, int, int, str]],
    allocator: _Allocator,
    watch: Callable[[tuple[str, int, int, int, str], int, int], None],
) -> Iterator[tuple[str, int, int, int, str]]:
    """Hand the events on; the allocator asks for the next one when it is done with one."""
    for event in events:
        yield event
        watch(event, allocator.allocated, allocator.device.reserved)


def _checked(capacity: int | None, expandable: bool, large_segment: int, max_split: int | None) -> Rules:
    """Hold PyTorch's own limits (`parseLargeSegmentSize`, `parseMaxSplitSize`), and whole pages of the driver."""
    if capacity is not None and capacity < 0:
        raise InputError("capacity", capacity, "must be 0 bytes or more")
    if large_segment <= OWN_SEGMENT or large_segment % ROUND_LARGE:
        raise InputError("large_segment", large_segment, "must be a multiple of 2 MiB above 10 MiB, in bytes")
    if max_split is not None and (max_split < large_segment or max_split % MIB):
        raise InputError("max_split", max_split, "must be a multiple of 1 MiB, not below large_segment, in bytes")
    return Rules(expandable, large_segment, max_split)


def _failure(allocator: _Allocator, position: int, key: int, size: int, stream: int, large: int) -> OutOfMemory:
    segment = segment_bytes(round_up(size, MIN_BLOCK), large)
    reserved, phase = allocator.device.reserved, allocator.phase
    return OutOfMemory(position, key, size, segment, stream, phase, allocator.allocated, reserved)


def _result(allocator: _Allocator, failed: OutOfMemory | None) -> Replay:
    allocator.begin("")
    device, phases = allocator.device, allocator.phases
    return Replay(
        peak_allocated=max(allocated for allocated, _ in phases.values()),
        peak_requested=allocator.peak_requested,
        peak_reserved=device.peak,
        allocated_end=allocator.allocated,
        reserved_end=device.reserved,
        retries=allocator.retries,
        out_of_memory=failed,
        phases={name: peaks for name, peaks in phases.items() if name or any(peaks)},
        pools=device.peaks,
        reserved_after_flush=device.flush_peak,
        largest_hole=allocator.largest_hole,
        retries_at=tuple(allocator.retries_at[:-1]),
    )
