"""Sums of tensors that are alive at one time in an execution, and which of them can be the largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc.trace.tape import Record, Shard, Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memcalc.formulas import Array


Key = tuple[Unit, Shard, bool]
"""What a coefficient is multiplied by; true marks the gradient of a weight, counted in elements."""
Sum = dict[Key, int]


def key_of(record: Record) -> Key:
    """What the record's coefficient is multiplied by."""
    return record.size.unit, record.size.shard, record.kind == "gradient"


def total(records: Iterable[Record]) -> Sum:
    """Coefficients of a set of tensors."""
    out: Sum = {}
    for record in records:
        key = key_of(record)
        out[key] = out.get(key, 0) + record.size.bytes
    return out


def peaks(records: tuple[Record, ...], events: tuple[int, ...], start: frozenset[int]) -> tuple[Sum, ...]:
    """The sums over time that no other sum exceeds in every coefficient."""
    keys = sorted({key_of(record) for record in records})
    places = {key: index for index, key in enumerate(keys)}
    columns = [places[key_of(record)] for record in records]
    sizes = [0 if record.kind == "observed" else record.size.bytes for record in records]
    now, moments, rising = [0] * len(keys), set(), True
    for storage in start:
        now[columns[storage]] += sizes[storage]
    # The largest moment is one after an allocation, or at the start, that a free or the end follows
    for event in events:
        if event >= 0:
            now[columns[event]] += sizes[event]
        else:
            if rising:
                moments.add(tuple(now))
            now[columns[~event]] -= sizes[~event]
        rising = event >= 0
    if rising:
        moments.add(tuple(now))
    return tuple(
        {key: value for key, value in zip(keys, row, strict=True) if value} for row in undominated(sorted(moments))
    )


def given_back(events: Sequence[int], is_gradient: Sequence[bool]) -> tuple[int, ...]:
    """Events in which the gradient of a weight is freed once the node that made it has its input's.

    The engine takes the node of the highest sequence number next, and that of the sum has the highest there is.
    """
    out, added, freed = list[int](), list[int](), False
    gone = {~event for event in events if event < 0}
    for event in events:
        freed = freed or event < 0
        if event >= 0 and freed:
            out += [~storage for storage in added]
            added.clear()
        out.append(event)
        if event >= 0 and is_gradient[event] and event not in gone:
            added.append(event)
            freed = False
    return (*out, *(~storage for storage in added))


def undominated(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Rows, of which no two are equal, that no other row reaches in every column."""
    columns: Array = np.array(rows, dtype=np.int64)
    beaten: Array = (columns[None, :, :] >= columns[:, None, :]).all(axis=2)
    np.fill_diagonal(beaten, val=False)
    return [row for row, lost in zip(rows, beaten.any(axis=1), strict=True) if not lost]


def alive(events: Sequence[int], start: frozenset[int] = frozenset()) -> frozenset[int]:
    """Storages allocated, or there at the ``start``, and not freed."""
    living = set(start)
    for event in events:
        if event >= 0:
            living.add(event)
        else:
            living.discard(~event)
    return frozenset(living)


# Where the large tensors of a template would lie in one growing segment, and the holes that dead ones leave.
#
# A loss frees 16-bit logits before it asks for fp32 tensors of twice their size: the hole is too small for any of
# them, so that more is reserved than ever lives at once. The rule is the best fit of PyTorch's
# ``c10/cuda/CUDACachingAllocator.cpp`` (get_free_block), on sizes a token.


class Segment:
    """A segment that grows at its end; sizes in any unit."""

    def __init__(self) -> None:
        self.end = self.live = self.most = 0
        self._free: list[tuple[int, int]] = []
        """(offset, size) of free blocks, by offset; none ends the segment."""

    def take(self, size: int) -> int:
        """Allocate: the smallest free block that has room, or the segment's end; the offset."""
        self.live += size
        self.most = max(self.most, self.live)
        fitting = [block for block in self._free if block[1] >= size]
        if not fitting:
            return self._grow(size)
        best = min(fitting, key=lambda block: (block[1], block[0]))
        self._free.remove(best)
        if best[1] > size:
            self._free.append((best[0] + size, best[1] - size))
        return best[0]

    def _grow(self, size: int) -> int:
        tail = next((block for block in self._free if sum(block) == self.end), None)
        if tail is not None:
            self._free.remove(tail)
        offset = self.end if tail is None else tail[0]
        self.end = offset + size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Free, and merge with free neighbours."""
        self.live -= size
        for block in [block for block in self._free if block[0] + block[1] == offset or block[0] == offset + size]:
            self._free.remove(block)
            offset, size = min(offset, block[0]), size + block[1]
        self._free.append((offset, size))


def hole(records: Sequence[Record], events: Iterable[int]) -> tuple[int, Shard]:
    """Bytes a token that large tensors reserve beyond the most that live at once, and what divides them.

    Large are those of at least a sixteenth of the largest: an eighth of 16-bit logits beside whole fp32 ones.
    """
    tokens = [record.size for record in records if record.size.unit == "token"]
    if not tokens:
        return 0, "none"
    largest = max(tokens, key=lambda size: size.bytes)
    segment, places = Segment(), dict[int, int]()
    for event in events:
        index = event if event >= 0 else ~event
        size = records[index].size
        if size.unit != "token" or size.bytes * SMALLEST_SHARE < largest.bytes:
            continue
        if event >= 0:
            places[index] = segment.take(size.bytes)
        elif index in places:
            segment.give(places.pop(index), size.bytes)
    return segment.end - segment.most, largest.shard


SMALLEST_SHARE = 16
