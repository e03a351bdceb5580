"""Blocks of several kinds in one stack: which of them stand where on a stage, and what those around them keep.

Where all blocks of a stack are alike nothing of this is needed: they differ in their number alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from memcalc.formulas.recompute import Counts, Policy, unit_sizes
from memcalc.grid import AXES
from memcalc.terms.adapters import trained

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.stages import Rows
    from memcalc.terms.model_on_grid import ModelOnGrid

Row = tuple[int, ...]
"""The group of each block of a stage, in the order in which they run."""
Part = Callable[[Row], slice]
"""Some of a row's blocks."""


class Blocks(Protocol):
    """The equal blocks of one group, of which two numbers are needed here."""

    @property
    def index(self) -> int:
        """Place of the group among the model's."""

    @property
    def whole_block(self) -> Array:
        """Bytes that one block keeps without recomputation, for one micro-batch."""

    @property
    def treated_block(self) -> Array:
        """Bytes that one block keeps where the policy treats it."""


Group = TypeVar("Group", bound=Blocks)

WHOLE, INPUT, INNER = "whole", "input", "inner"
"""What a block keeps: everything; its input alone; or nothing, as a checkpoint before it has the unit's input."""


@lru_cache(maxsize=4096)
def kept_as(policy: Policy, row: Row) -> tuple[str, ...]:
    """What each block of a row keeps."""
    states: list[str] = []
    for size in unit_sizes(policy, len(row)):
        states += [INPUT, *[INNER] * (size - 1)] if size else [WHOLE]
    return tuple(states)


def last_unit(policy: Policy, row: Row, group: int) -> Row:
    """The blocks that are computed again at once with a group's last one; none where that keeps everything."""
    states, start = kept_as(policy, row), len(row) - 1 - row[::-1].index(group) if group in row else -1
    if start < 0 or states[start] == WHOLE:
        return ()
    end = start + 1
    while states[start] == INNER:
        start -= 1
    while end < len(row) and states[end] == INNER:
        end += 1
    return row[start:end]


def from_start(begin: int, end: int) -> Part:
    """Some blocks, counted from the first one."""
    return lambda _: slice(begin, end)


def from_end(index: int) -> Part:
    """One block, counted from the last one, which is 1; the first one where there are not so many."""
    return lambda row: slice(max(len(row) - index, 0), max(len(row) - index, 0) + 1)


def behind(group: int) -> Part:
    """The blocks behind a group's last one."""
    return lambda row: slice(len(row) - row[::-1].index(group), len(row)) if group in row else slice(0)


def ahead(group: int, skipped: int) -> Part:
    """The blocks before a group's first one, without the stage's first ``skipped``."""
    return lambda row: slice(skipped, row.index(group)) if group in row else slice(0)


def from_first(group: int) -> Part:
    """The blocks from a group's first one to the one before its last."""
    return lambda row: slice(row.index(group), len(row) - 1 - row[::-1].index(group)) if group in row else slice(0)


def counts_in(policy: Policy, rows: Rows, group: int) -> Counts:
    """How a policy treats the blocks of one group among those of its stack."""

    def number(row: Row, *states: str) -> int:
        return sum(i == group and state in states for i, state in zip(row, kept_as(policy, row), strict=True))

    again = () if policy.kind in {"parts", "selective-ops"} else (INPUT, INNER)
    return Counts(
        treated=rows.count(lambda row: number(row, INPUT)),
        whole=rows.count(lambda row: number(row, WHOLE)),
        unit=rows.count(lambda row: len(last_unit(policy, row, group))),
        recomputed=rows.count(lambda row: number(row, *again)),
    )


class Stack(Generic[Group]):
    """The groups of a stack that has several, on the stages of a grid."""

    def __init__(self, groups: Sequence[Group], census: ModelOnGrid) -> None:
        self.groups, self.census, self.policies = groups, trained(census), census.grid.policies
        self.rows = census.rows.only([group.index for group in groups])

    def _by_policy(self, of: Callable[[Policy, Row], int]) -> Array:
        def count(policy: Policy) -> Array:
            return self.rows.count(lambda row: of(policy, row))

        return np.concatenate([count(policy) for policy in self.policies], axis=AXES.index("recompute"))

    def counts(self, group: Group) -> tuple[Counts, ...]:
        """How each policy treats the blocks of a group."""
        return tuple(counts_in(policy, self.rows, group.index) for policy in self.policies)

    def number(self, group: Group, part: Part) -> Array:
        """Blocks of a group among a part of each row."""
        return self.rows.count(lambda row: row[part(row)].count(group.index))

    def places(self, group: Group, part: Part, *states: str) -> Array:
        """Those of them that keep so much, along the recompute axis."""

        def count(policy: Policy, row: Row) -> int:
            pairs = zip(row[part(row)], kept_as(policy, row)[part(row)], strict=True)
            return sum(index == group.index and state in states for index, state in pairs)

        return self._by_policy(count)

    def unit_extra(self, group: Group) -> Array:
        """Bytes of the blocks before a group's last one that are computed again at once with it."""

        def count(other: int, policy: Policy, row: Row) -> int:
            unit = last_unit(policy, row, group.index)
            last = len(unit) - 1 - unit[::-1].index(group.index) if unit else 0
            return unit[:last].count(other)

        return sum(
            (self._by_policy(partial(count, other.index)) * other.whole_block for other in self.groups), np.int64(0)
        )

    def each(self, part: Part, again: Callable[[Group], Array], once: Callable[[Group], Array]) -> Array:
        """A quantity of each block among a part of each row: of those that run again, and of those that do not."""
        total: Array = np.int64(0)
        for group in self.groups:
            total = total + self.places(group, part, INPUT, INNER) * again(group)
            total = total + self.places(group, part, WHOLE) * once(group)
        return total

    def kept(self, part: Part) -> Array:
        """Bytes that the blocks among a part of each row keep for one micro-batch."""
        total = self.each(part, lambda _: np.int64(0), lambda group: group.whole_block)
        return total + sum(
            (self.places(group, part, INPUT) * group.treated_block for group in self.groups), np.int64(0)
        )

    def left(self, part: Part) -> Array:
        """Bytes that they keep, less those of the gradients that their backward leaves."""
        return self.kept(part) - self.gradients(part)

    def gradients(self, part: Part) -> Array:
        """Bytes of the gradients of the blocks among a part of each row, where backward makes new ones that stay."""
        grid, census = self.census.grid, self.census
        sharded = grid.zero_from(2) & (grid.habits.full_shard or not grid.persistent_gradients)
        once = (grid.accumulation == 1) & (not grid.persistent_gradients)
        total: Array = np.int64(0)
        for group in self.groups:
            local = census.sharded(census.block_dense[group.index], census.block_experts[group.index], sharded)
            total = total + census.width("gradient") * local * once * self.number(group, part)
        return total
