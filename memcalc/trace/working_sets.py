"""Sums of tensors that are alive at one time in an execution, and which of them can be the largest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memcalc.trace.tape import Record, Shard, Unit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memcalc.formulas.types import Array

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
