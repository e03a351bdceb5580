"""What a search keeps of the strategies that pass by: the best few, and the front of memory and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from memcalc.formulas.types import Array

Thing = TypeVar("Thing")
MANY = 16
"""Strategies that are looked at for each that is kept."""


@dataclass(frozen=True)
class Entry(Generic[Thing]):
    """A strategy that was kept: tight or not, what it is ranked by, and its bytes beyond what fits."""

    tight: bool
    key: float
    over: int
    make: Callable[[], Thing]

    @property
    def order(self) -> tuple[bool, float, int]:
        """What fits at the upper end of its range before what is tight, then the lower key, then the smaller."""
        return self.tight, self.key, self.over

    @property
    def alike(self) -> str:
        """Equal for strategies with the same key, apart from rounding."""
        return f"{self.key:.9g}"

    def settled(self) -> Entry[Thing]:
        """The same with its figures read, so that the arrays they came from can go."""
        thing = self.make()
        return replace(self, make=lambda: thing)


class Kept(Generic[Thing]):
    """The ``count`` best of all that were offered; of those with the same key the smallest alone."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.entries: list[Entry[Thing]] = []

    @property
    def bound(self) -> float:
        """A key at which, or above, nothing can be among the best any more."""
        full = len(self.entries) == self.count and not self.entries[-1].tight
        return float(np.nextafter(self.entries[-1].key, np.inf)) if full else np.inf

    @property
    def lowest(self) -> float:
        """The lowest key of all that are not tight."""
        return self.entries[0].key if self.entries and not self.entries[0].tight else np.inf

    def offer(self, tight: Array, key: Array, over: Array, make: Callable[[int], Thing]) -> None:
        """Take in some of the offered; ``make`` reads the figures of one of them by its place."""
        best = np.concatenate([_lowest(np.flatnonzero(tight == kind), key, over, self.count) for kind in (False, True)])
        new = [Entry(bool(tight[i]), float(key[i]), int(over[i]), _at(make, int(i))) for i in best]
        ranked = sorted([*self.entries, *new], key=lambda entry: entry.order)
        self.entries = list({entry.alike: entry for entry in reversed(ranked)}.values())[::-1][: self.count]


class Front(Generic[Thing]):
    """Those of all that were offered which no other beats in both bytes and key; the smallest first."""

    BINS = 1024

    def __init__(self, capacity: int) -> None:
        self.entries: list[Entry[Thing]] = []
        self.shift = max(capacity.bit_length() - self.BINS.bit_length() + 1, 0)
        self.below = np.full(self.BINS + 1, np.inf)
        """By bytes: the lowest key of all entries that are smaller than any strategy in this bin."""

    def ahead(self, over: Array, key: Array) -> Array:
        """Places of those that may be on the front; nothing that is on it is left out."""
        return np.flatnonzero(key < self.below.take(self._bin(over), mode="clip"))

    def _bin(self, over: Array) -> Array:
        return np.asarray((over >> self.shift) + self.BINS)

    def offer(self, tight: Array, key: Array, over: Array, make: Callable[[int], Thing]) -> None:
        """Take in those of the offered that nothing beats, and let go of what they beat."""
        order = np.lexsort((key, over))
        lowest = np.minimum.accumulate(key[order])
        first = np.concatenate([[True], lowest[1:] < lowest[:-1]])
        new = [Entry(bool(tight[i]), float(key[i]), int(over[i]), _at(make, int(i))) for i in order[first]]
        entries = sorted([*self.entries, *new], key=lambda entry: (entry.over, entry.key))
        self.entries = []
        for entry in entries:
            if not self.entries or entry.key < self.entries[-1].key:
                self.entries.append(entry)
        self.below.fill(np.inf)
        for entry in self.entries:
            self.below[int(self._bin(np.int64(entry.over))) + 1 :] = entry.key


def _at(make: Callable[[int], Thing], place: int) -> Callable[[], Thing]:
    return lambda: make(place)


def _lowest(near: Array, key: Array, over: Array, count: int) -> Array:
    """Of some places those of the lowest keys, and of equal ones of the smallest; more than are kept."""
    many = MANY * count
    if near.size > many:
        near = near[key[near] <= np.partition(key[near], many - 1)[many - 1]]
    return near[np.lexsort((over[near], key[near]))[:many]]
