"""What lies free between live blocks, and what a replay of the trace with expandable segments would reserve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memcalc.allocator import replay
from memcalc.probe.triage.lifetimes import Lifetimes
from memcalc.probe.triage.snapshot import Snapshot

MOST_REPLAYED = 600_000
"""Entries up to which a trace is replayed: a few seconds."""


@dataclass(frozen=True)
class SegmentUsage:
    """The free bytes of a device's segments."""

    segments: int
    reserved: int
    allocated: int
    free: int
    """In segments that are partly used: an expandable one frees its unused pages."""
    largest: int


def segment_usage(snapshot: Snapshot, device: int) -> SegmentUsage:
    """Return the holes in a device's segments; wholly free segments go back to the driver before a request fails."""
    count = reserved = allocated = free = largest = 0
    for segment in snapshot.segments:
        if segment.device != device:
            continue
        count += 1
        reserved += segment.total
        used = [block.size for block in segment.blocks if block.active]
        allocated += sum(used)
        if used:
            unused = [block.size for block in segment.blocks if not block.active]
            free += sum(unused)
            largest = max(largest, *unused, 0)
    return SegmentUsage(count, reserved, allocated, free, largest)


@dataclass(frozen=True)
class Replayed:
    """A replay of the trace with and without expandable segments."""

    reserved: int
    expandable: int
    """Peak reserved with them."""
    repeats: bool
    """Whether the failed request fails in the replay too, with the same memory."""
    serves: bool
    """Whether it is served with expandable segments."""


def replayed(lifetimes: Lifetimes, capacity: int | None) -> Replayed | None:
    """Replay the trace with segments of the driver and with expandable ones; `room` is what the allocator had [bytes].

    What was there before the recording is put first, so that its own holes are not in it. A failed request is put at
    the end. None where the trace is empty or very long.
    """
    if not 0 < lifetimes.entries <= MOST_REPLAYED:
        return None
    events = list(_events(lifetimes))
    plain, growing = replay(events), replay(events, expandable=True)
    repeats = serves = False
    if lifetimes.tried and capacity:
        with_request = [*events, ("alloc", len(lifetimes.size), lifetimes.tried, 0, "")]
        repeats = replay(with_request, capacity=capacity).out_of_memory is not None
        serves = replay(with_request, capacity=capacity, expandable=True).out_of_memory is None
    return Replayed(plain.peak_reserved, growing.peak_reserved, repeats, serves)


def _events(lifetimes: Lifetimes) -> Iterator[tuple[str, int, int, int, str]]:
    order = np.concatenate((lifetimes.born, lifetimes.died))
    keys = np.tile(np.arange(len(lifetimes.size)), 2)
    births = np.arange(len(order)) < len(lifetimes.size)
    inside = births | (order < lifetimes.entries)
    for index in np.lexsort((births, order)):
        if not inside[index]:
            continue
        key = int(keys[index])
        if births[index]:
            yield "alloc", key, int(lifetimes.size[key]), int(lifetimes.stream[key]), ""
        else:
            yield "free", key, 0, 0, ""
