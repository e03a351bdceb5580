"""What a replay reserves on a device that never runs full, and nothing else: the same rules in half the time.

Most strategies that are replayed do not fill the card, and all that is asked of them is how much they reserve. Without
a flush nothing is given back, so that what is reserved only grows, and no counter but this one is kept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from memcalc.allocator.pools import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    OWN_SEGMENT,
    ROUND_LARGE,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    Rules,
    round_up,
)

_UNIT = MIN_BLOCK.bit_length() - 1  # addresses and sizes are counted in blocks of 512 B, which keeps integers short
_SMALL, _OWN, _PAGE = SMALL_REQUEST >> _UNIT, OWN_SEGMENT >> _UNIT, ROUND_LARGE >> _UNIT
_SMALL_SEGMENT, _LARGE_SEGMENT = SMALL_SEGMENT >> _UNIT, LARGE_SEGMENT >> _UNIT
_RULES = Rules(expandable=False, large_segment=LARGE_SEGMENT, max_split=None)
_SMALL_REST, _LARGE_REST = _RULES.least_rest(small=True) >> _UNIT, _RULES.least_rest(small=False) >> _UNIT


def reserved_up_to(events: Iterable[tuple[str, int, int, int, str]], most: int) -> int | None:
    """What :func:`memcalc.allocator.replay` reserves over ``events``; None as soon as that is above ``most`` [bytes].

    The events are ``alloc`` of more than nothing, ``free``, ``mark``, and ``drop`` and ``sync``, before whose ``free``
    no other has a block's memory in any case. Segments are of the usual sizes and do not grow. ``most`` is at most what
    the device has, so that the allocator never gives back what it caches.

    >>> events = [("alloc", 1, 3 * 2**20, 0, ""), ("alloc", 2, 700, 0, ""), ("free", 1, 0, 0, "")]
    >>> reserved_up_to(events, 2**30) // 2**20, reserved_up_to(events, 2**20)
    (22, None)
    """
    return _reserved(events, most >> _UNIT)


def _reserved(events: Iterable[tuple[str, int, int, int, str]], most: int) -> int | None:
    """One loop without a call for each event, which would cost a tenth of it all; ``most`` in blocks of 512 B.

    ``other_end`` has both ends of every free block: no two have one in common, since neighbours are merged and segments
    do not touch, so that a block that is freed between two free ones finds each by the end that it shares.
    """
    shift = _shift(most)
    mask = (1 << shift) - 1
    requests: _Requests[list[int]] = _Requests(shift, lambda _: [])
    live: dict[int, tuple[list[int], int, int]] = {}
    other_end: dict[int, int] = {}
    reserved, address, taken, freed = 0, mask, other_end.pop, live.pop
    for kind, key, wanted, stream, _ in events:
        if kind == "free":
            free, start, end = freed(key)
            if start in other_end:
                before = taken(start)
                del free[bisect_left(free, (start - before) << shift | before)]
                start = before
            if end in other_end:
                after = taken(end)
                del free[bisect_left(free, (after - end) << shift | end)]
                end = after
            insort(free, (end - start) << shift | start)
            other_end[start], other_end[end] = end, start
        elif kind == "alloc":
            size, least, free, least_rest = requests[wanted, stream]
            at = bisect_left(free, least)
            try:
                packed = free.pop(at)
            except IndexError:  # none fits
                rest = _segment(size)
                reserved += rest
                if reserved > most:
                    return None
                start, end = address - rest, address
                address = start - 1  # a newer segment lies lower (`Device.address`), and none touch
            else:
                start, rest = packed & mask, packed >> shift
                end = taken(start)
            cut, rest = start + size, rest - size
            if rest >= least_rest:
                insort(free, rest << shift | cut, 0, at)  # the rest is smaller: its place is not above
                other_end[cut], other_end[end] = end, cut
                live[key] = free, start, cut
            else:
                taken(end, None)
                live[key] = free, start, end
    return reserved << _UNIT


def mapped_up_to(events: Iterable[tuple[str, int, int, int, str]], most: int, capacity: int) -> int | None:
    """The same with ``expandable_segments:True``, on a device of ``capacity``, which is not below ``most`` [bytes].

    >>> events = [("alloc", 1, 30 * 2**20, 0, ""), ("free", 1, 0, 0, ""), ("alloc", 2, 50 * 2**20, 0, "")]
    >>> mapped_up_to(events, 2**30, 2**30) // 2**20, mapped_up_to(events, 2**25, 2**30)
    (60, None)
    """
    return _mapped(events, most >> _UNIT, capacity)


def _mapped(events: Iterable[tuple[str, int, int, int, str]], most: int, capacity: int) -> int | None:
    """A pool is one segment, whose pages end at ``top`` as long as none is given back; addresses begin at 0 in each.

    What is freed goes the way of :func:`_reserved`, written out for the same reason: a call would cost a tenth.
    """
    shift = _shift(most)
    mask = (1 << shift) - 1
    requests = _Requests(shift, lambda small: _Segment(capacity, shift, small=small))
    live: dict[int, tuple[_Segment, int, int]] = {}
    reserved = 0
    for kind, key, wanted, stream, _ in events:
        if kind == "free":
            pool, start, end = live.pop(key)
            free, end_of, start_of = pool.free, pool.end_of, pool.start_of
            if start in start_of:
                before = start_of.pop(start)
                del free[bisect_left(free, (start - before) << shift | before)]
                start = before
            if end in end_of:
                after = end_of.pop(end)
                del free[bisect_left(free, (after - end) << shift | end)]
                end = after
            insort(free, (end - start) << shift | start)
            end_of[start], start_of[end] = end, start
        elif kind == "alloc":
            size, least, pool, _ = requests[wanted, stream]
            free, end_of, start_of = pool.free, pool.end_of, pool.start_of
            at = bisect_left(free, least)
            if at < len(free):
                packed = free[at]
                start, have = packed & mask, packed >> shift
                # The last block counts with the addresses behind it (`ExpandablePool.take`)
                if start + have == pool.top and at + 1 < len(free) and free[at + 1] >> shift < pool.limit - start:
                    at += 1
                    packed = free[at]
                    start, have = packed & mask, packed >> shift
                del free[at]
                end = end_of.pop(start)
                del start_of[end]
            else:
                start, end = pool.grown(size)
                at = len(free)
                reserved += end - pool.top
                pool.top = end
                if reserved > most:
                    return None
            cut = start + size
            if cut < end:
                insort(free, (end - cut) << shift | cut, 0, at)  # the rest is smaller: its place is not above
                end_of[cut], start_of[end] = end, cut
                end = cut
            live[key] = pool, start, end
    return reserved << _UNIT


_Memory = TypeVar("_Memory")


class _Requests(dict[tuple[int, int], tuple[int, int, _Memory, int]], Generic[_Memory]):
    """What comes of a request of so many bytes in a stream, of which a step makes few kinds again and again.

    Its blocks of 512 B, the least free block that serves it, its pool, and the smallest rest that is split off there.
    """

    def __init__(self, shift: int, new_pool: Callable[[bool], _Memory]) -> None:
        super().__init__()
        self._shift, self._new_pool = shift, new_pool
        self._pools: dict[tuple[int, bool], _Memory] = {}

    def __missing__(self, request: tuple[int, int]) -> tuple[int, int, _Memory, int]:
        wanted, stream = request
        size = (wanted + MIN_BLOCK - 1) >> _UNIT
        small = size <= _SMALL
        if (stream, small) not in self._pools:
            self._pools[stream, small] = self._new_pool(small)
        least_rest = _SMALL_REST if small else _LARGE_REST
        self[request] = entry = size, size << self._shift, self._pools[stream, small], least_rest
        return entry


def _shift(most: int) -> int:
    """A free block is the integer size << shift | address, whose order is that of best fit.

    Addresses lie below twice what is reserved at most, and an integer of two digits is faster than one of three.
    """
    return most.bit_length() + 1


class _Segment:
    """The pool of one stream and one class of sizes, as one segment that grows by pages."""

    __slots__ = ("end_of", "free", "limit", "page", "shift", "start_of", "top")

    def __init__(self, capacity: int, shift: int, *, small: bool) -> None:
        self.shift = shift
        self.free: list[int] = []
        self.end_of: dict[int, int] = {}
        self.start_of: dict[int, int] = {}
        self.page = (SMALL_SEGMENT if small else LARGE_SEGMENT) >> _UNIT
        self.limit = round_up(capacity + capacity // 8, self.page << _UNIT) >> _UNIT
        """The addresses that it has, 1 1/8 of the device (`find_expandable_block`): more than can be mapped."""
        self.top = 0

    def grown(self, size: int) -> tuple[int, int]:
        """The last free block, taken out, with whole pages behind it until a request fits."""
        start = self.start_of.pop(self.top, self.top)
        if start < self.top:
            del self.free[bisect_left(self.free, (self.top - start) << self.shift | start)], self.end_of[start]
        return start, self.top + round_up(start + size - self.top, self.page)


def _segment(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN else -(-size // _PAGE) * _PAGE
