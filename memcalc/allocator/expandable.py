"""Segments that grow by pages (``expandable_segments:True``) instead of one segment for each request."""

from __future__ import annotations

from bisect import bisect_left

from memcalc.allocator.pools import ADDRESS, SHIFT, UNBOUNDED, Device, Pool, Rules, round_up


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
