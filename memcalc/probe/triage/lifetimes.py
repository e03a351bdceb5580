"""The trace of one device as lifetimes: what each allocation's birth and death were, and what was alive when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memcalc.probe.triage.snapshot import ALLOC, FREE, OOM, Entry, Snapshot

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
