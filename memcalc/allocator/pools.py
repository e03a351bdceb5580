"""Segments of the driver and the free blocks in them: rounding, best fit, splitting, merging, giving back.

Segments that grow by pages (``expandable_segments:True``) instead of one segment for each request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from memcalc.units import MIB

LARGE_SEGMENT = 20 * MIB
"""What a request above 1 and below 10 MiB asks of the driver: `large_segment_size`, once kLargeBuffer [bytes]."""

MIN_BLOCK = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_REQUEST = MIB  # kSmallSize: the largest request that the small pool serves
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: what the small pool asks of the driver
OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: from here on a request has a segment of its own …
ROUND_LARGE = 2 * MIB  # kRoundLarge: … of its size rounded up to this
UNBOUNDED = 1 << 48  # address space of a growing segment where no capacity is given

TOP = 1 << 60  # the addresses lie below it

SHIFT = 64
ADDRESS = (1 << SHIFT) - 1  # a free block is the integer size << 64 | address, so that order is BlockComparatorSize's


def segment_bytes(size: int, large_segment: int = LARGE_SEGMENT) -> int:
    """Return what the driver is asked for where no cached block fits a rounded request (`get_allocation_size`) [bytes].

    >>> segment_bytes(512) // 2**20, segment_bytes(3 * 2**20) // 2**20, segment_bytes(11 * 2**20) // 2**20
    (2, 20, 12)
    """
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return large_segment if size < OWN_SEGMENT else round_up(size, ROUND_LARGE)


def round_up(size: int, step: int) -> int:
    """Return the least multiple of `step` that holds `size` [bytes]."""
    return -(-size // step) * step


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of ``PYTORCH_CUDA_ALLOC_CONF`` that are followed."""

    expandable: bool
    large_segment: int
    max_split: int | None

    def least_rest(self, small: bool) -> int:
        """Return the smallest rest that is split off: 512 B, in the large pool above 1 MiB (`should_split`)."""
        return MIN_BLOCK if small or self.expandable else SMALL_REQUEST + MIN_BLOCK

    def split_below(self, small: bool) -> int:
        """Return the size from which a request takes a block whole (`should_split`)."""
        return UNBOUNDED if small or self.expandable or self.max_split is None else self.max_split


class Device:
    """The driver's side: physical memory up to `capacity`, addresses, and the counters of what is reserved."""

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.reserved = self.peak = self.phase_peak = self.flush_peak = 0
        self._lowest = TOP
        self.streams: dict[int, int] = {}
        self.peaks: dict[int, int] = {}

    def take(self, stream: int, size: int) -> bool:
        """Reserve memory, or say that it is not there."""
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.streams[stream] = in_use = self.streams.get(stream, 0) + size
        self.peaks[stream] = max(in_use, self.peaks.get(stream, 0))
        self.peak = max(self.peak, self.reserved)
        self.phase_peak = max(self.phase_peak, self.reserved)
        self.flush_peak = max(self.flush_peak, self.reserved)
        return True

    def give(self, stream: int, size: int) -> None:
        """Take memory back."""
        self.reserved -= size
        self.streams[stream] -= size

    def address(self, size: int, step: int) -> int:
        """Return an address below all that were given, a step away from them: segments never touch.

        The driver hands out falling addresses: of five recorded jobs on an H100 (driver 580.159) the replay reserves
        what was read, to the byte, where of two free blocks of one size that of the newer segment comes first; with
        rising addresses three of them differ, one by 15%.
        """
        self._lowest = (self._lowest - size - step) // step * step
        return self._lowest


class Pool:
    """The cached free blocks of one stream and one class of sizes (`BlockPool`), in segments of cudaMalloc."""

    def __init__(self, device: Device, stream: int, small: bool, rules: Rules) -> None:
        self.device = device
        self.stream = stream
        self.rules = rules
        self.least_rest = rules.least_rest(small)
        self.page = SMALL_SEGMENT if small else rules.large_segment
        self.split_below = rules.split_below(small)
        self.max_split = rules.max_split
        self.free: list[int] = []
        self.end_of: dict[int, int] = {}  # of the free blocks, by where they start; a whole segment may be left out …
        self.start_of: dict[int, int] = {}  # … and the other way round: what ends where a freed block starts
        self.segments: dict[int, int] = {}

    def take(self, size: int, at: int | None = None) -> tuple[int, int] | None:
        """Take the smallest free block that fits, at the lowest address (`get_free_block`), or the one chosen by `at`.

        Its rest is put back where that is worth it (`should_split`, `alloc_found_block`).
        """
        free, end_of = self.free, self.end_of
        if at is None:
            at = bisect_left(free, size << SHIFT)
            if at == len(free) or (self.max_split is not None and not self.may_serve(free[at] >> SHIFT, size)):
                return None
        packed = free.pop(at)
        start = packed & ADDRESS
        have = packed >> SHIFT
        end = start + have
        if start in end_of:
            del end_of[start], self.start_of[end]
        rest = have - size
        if rest < self.least_rest or size >= self.split_below:
            return start, end
        cut = start + size
        insort(free, rest << SHIFT | cut, 0, at)  # the rest is smaller: its place is not above
        end_of[cut] = end
        self.start_of[end] = cut
        return start, cut

    def may_serve(self, have: int, size: int) -> bool:
        """Keep blocks that are never split for requests near their size (`get_free_block`, max_split_size)."""
        limit = self.max_split or 0
        return have < size + self.rules.large_segment if size >= limit else have < limit

    def give(self, start: int, end: int) -> None:
        """Put a block back, as one with the free blocks at its sides (`free_block`, `try_merge_blocks`)."""
        free, end_of, start_of = self.free, self.end_of, self.start_of
        if self.segments.get(start) == end:
            insort(free, (end - start) << SHIFT | start)
            return
        if start in start_of:
            before = start_of.pop(start)
            del free[bisect_left(free, (start - before) << SHIFT | before)]
            start = before
        if end in end_of:
            after = end_of.pop(end)
            del free[bisect_left(free, (after - end) << SHIFT | end)]
            end = after
        insort(free, (end - start) << SHIFT | start)
        end_of[start] = end
        start_of[end] = start

    def grow(self, size: int) -> tuple[int, int] | None:
        """Serve a request from a new segment, or say that the driver has no memory (`alloc_block`)."""
        wanted = segment_bytes(size, self.rules.large_segment)
        if not self.device.take(self.stream, wanted):
            return None
        start = self.device.address(wanted, ROUND_LARGE)
        self.segments[start] = start + wanted
        self.put(start, start + wanted)
        return self.serve(start, start + wanted, size)

    def serve(self, start: int, end: int, size: int) -> tuple[int, int] | None:
        """Take this free block for a request, whichever fits best."""
        return self.take(size, bisect_left(self.free, (end - start) << SHIFT | start))

    def put(self, start: int, end: int) -> None:
        """Add a free block whose neighbours are known not to be free."""
        insort(self.free, (end - start) << SHIFT | start)
        self.end_of[start] = end
        self.start_of[end] = start

    def drop(self, packed: int) -> None:
        """Forget a free block."""
        start = packed & ADDRESS
        end = self.end_of.pop(start, None)
        if end is not None:
            del self.start_of[end]
        del self.free[bisect_left(self.free, packed)]

    def release(self) -> None:
        """Give every segment that is free as a whole back to the driver (`release_blocks`)."""
        for packed in self.free[:]:
            start = packed & ADDRESS
            if self.segments.get(start) == start + (packed >> SHIFT):
                self._release(packed)

    def _release(self, packed: int) -> None:
        self.drop(packed)
        self.device.give(self.stream, packed >> SHIFT)
        del self.segments[packed & ADDRESS]

    def release_oversize(self, size: int) -> bool:
        """Give back only blocks that are never split, enough for the request (`release_available_cached_blocks`)."""
        if self.max_split is None:
            return False
        at = bisect_left(self.free, size << SHIFT)  # one below max_split would have served the request
        if at < len(self.free):
            self._release(self.free[at])
            return True
        while size > 0 and self.free and self.free[-1] >> SHIFT >= self.max_split:
            size -= self.free[-1] >> SHIFT
            self._release(self.free[-1])
        return size <= 0


class ExpandablePool(Pool):
    """The same with ``expandable_segments:True``: one segment that pages are mapped into (`ExpandableSegment`).

    A page is 2 MiB in the small pool and `large_segment` in the large one. `unmapped` are the addresses without memory,
    start to end, in whole pages. A segment without any memory stays, because it is as good as the new one that PyTorch
    would make in its place.
    """

    def __init__(self, device: Device, stream: int, small: bool, rules: Rules) -> None:
        super().__init__(device, stream, small, rules)
        self.unmapped: dict[int, int] = {}

    def take(self, size: int, at: int | None = None) -> tuple[int, int] | None:
        """Take the best fit; a block that can grow counts with the addresses behind it (`get_free_block`)."""
        if at is not None:
            return super().take(size, at)
        free = self.free
        at = bisect_left(free, size << SHIFT)
        if at == len(free):
            return None
        while at + 1 < len(free) and self._reach(free[at + 1]) < self._reach(free[at]):
            at += 1
        if self.max_split is not None and not self.may_serve(free[at] >> SHIFT, size):
            return None
        return super().take(size, at)

    def _reach(self, packed: int) -> int:
        end = (packed >> SHIFT) + (packed & ADDRESS)
        return self.unmapped.get(end, end) - (packed & ADDRESS)

    def grow(self, size: int) -> tuple[int, int] | None:
        """Map pages behind the lowest free block that has room (`try_allocate_expandable_block`)."""
        start = self._find(size)
        end = self.end_of.get(start, start)
        while end - start < size:
            if not self._map(end, min(start + size, self.unmapped[end])):
                return None
            end = self.end_of[start]
        return self.serve(start, end, size)

    def _find(self, size: int) -> int:
        """Return the lowest address with room in free and unmapped blocks, or a new one (`find_expandable_block`)."""
        starts = (self.start_of.get(gap, gap) for gap in sorted(self.unmapped))
        return next((start for start in starts if self._has_room(start, size)), None) or self._reserve_addresses(size)

    def _has_room(self, start: int, size: int) -> bool:
        end = start
        while end - start < size:
            following = self.end_of.get(end) or self.unmapped.get(end)
            if following is None:
                return False
            end = following
        return True

    def _reserve_addresses(self, size: int) -> int:
        """Begin a segment with room for 1 1/8 of the device's memory (`find_expandable_block`)."""
        capacity = self.device.capacity
        addresses = UNBOUNDED if capacity is None else capacity + capacity // 8
        addresses = round_up(max(addresses, size), self.page)
        start = self.device.address(addresses, self.page)
        self.unmapped[start] = start + addresses
        return start

    def _map(self, start: int, end: int) -> bool:
        """Put whole pages of memory behind the addresses, all of them or none (`map_block`)."""
        mapped = start + round_up(end - start, self.page)
        if not self.device.take(self.stream, mapped - start):
            return False
        limit = self.unmapped.pop(start)
        if mapped < limit:
            self.unmapped[mapped] = limit
        self.give(start, mapped)
        return True

    def release(self) -> None:
        """Unmap every page that is free as a whole, in the middle of the segment too (`release_blocks`)."""
        for start, end in list(self.end_of.items()):
            low, high = round_up(start, self.page), end // self.page * self.page
            if low < high:
                self._unmap(start, low, high)

    def _unmap(self, start: int, low: int, high: int) -> None:
        """Keep the free block's parts outside the pages `low` to `high`, give those back (`unmap_block`)."""
        end = self.end_of[start]
        self.drop((end - start) << SHIFT | start)
        for left, right in ((start, low), (high, end)):
            if left < right:
                self.put(left, right)
        self.device.give(self.stream, high - low)
        begin = next((gap for gap, limit in self.unmapped.items() if limit == low), low)
        self.unmapped[begin] = self.unmapped.pop(high, high)

    def release_oversize(self, size: int) -> bool:  # noqa: ARG002
        """Give nothing back: growing segments have no oversize blocks of their own."""
        return False
