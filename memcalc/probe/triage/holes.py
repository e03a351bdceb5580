"""What lies free between live blocks, and what a replay of the trace with expandable segments would reserve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memcalc.allocator import replay
from memcalc.probe.triage.lives import Lives
from memcalc.probe.triage.snapshot import Snapshot

__all__ = ["Holes", "Replayed", "holes_of", "replayed"]

MOST_REPLAYED = 600_000
"""Entries up to which a trace is replayed: a few seconds."""


@dataclass(frozen=True)
class Holes:
    """The free bytes of a device's segments."""

    segments: int
    reserved: int
    allocated: int
    free: int
    """In segments that are partly used: an expandable one gives its whole pages back."""
    largest: int


def holes_of(snapshot: Snapshot, device: int) -> Holes:
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
            left = [block.size for block in segment.blocks if not block.active]
            free += sum(left)
            largest = max(largest, *left, 0)
    return Holes(count, reserved, allocated, free, largest)


@dataclass(frozen=True)
class Replayed:
    """What a replay of the trace says of expandable segments."""

    reserved: int
    expandable: int
    """Peak reserved with them."""
    repeats: bool
    """Whether the failed request fails in the replay too, with the same memory."""
    serves: bool
    """Whether it is served with expandable segments."""


def replayed(lives: Lives, room: int | None) -> Replayed | None:
    """Replay the trace with segments of the driver and with expandable ones; `room` is what the allocator had [bytes].

    What was there before the recording is put first, so that its own holes are not in it. A failed request is put at
    the end. None where the trace is empty or very long.
    """
    if not 0 < lives.entries <= MOST_REPLAYED:
        return None
    events = list(_events(lives))
    plain, growing = replay(events), replay(events, expandable=True)
    repeats = serves = False
    if lives.tried and room:
        asked = [*events, ("alloc", len(lives.size), lives.tried, 0, "")]
        repeats = replay(asked, capacity=room).out_of_memory is not None
        serves = replay(asked, capacity=room, expandable=True).out_of_memory is None
    return Replayed(plain.peak_reserved, growing.peak_reserved, repeats, serves)


def _events(lives: Lives) -> Iterator[tuple[str, int, int, int, str]]:
    order = np.concatenate((lives.born, lives.died))
    keys = np.tile(np.arange(len(lives.size)), 2)
    births = np.arange(len(order)) < len(lives.size)
    inside = births | (order < lives.entries)
    for at in np.lexsort((births, order)):
        if not inside[at]:
            continue
        key = int(keys[at])
        if births[at]:
            yield "alloc", key, int(lives.size[key]), int(lives.stream[key]), ""
        else:
            yield "free", key, 0, 0, ""
