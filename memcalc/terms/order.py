"""Blocks of several kinds in one stack: which of them stand where on a stage, and what those around them keep.

Where all blocks of a stack are alike nothing of this is needed: they differ in their number alone, but that the first
block of a frozen model keeps less, since no gradient flows to its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import numpy as np

from memcalc.formulas.recompute import Counts, Policy, units_of_chunks
from memcalc.grid import AXES
from memcalc.terms.adapters import trained
from memcalc.trace.template import trace

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.stages import Rows
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.trace.layers import BlockConfig
    from memcalc.trace.tape import Record


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

WHOLE, INPUT, INNER = KEPT = ("whole", "input", "inner")
"""What a block keeps: everything; its input alone; or nothing, as a checkpoint before it has the unit's input."""


@lru_cache(maxsize=4096)
def kept_as(policy: Policy, chunks: tuple[int, ...]) -> tuple[str, ...]:
    """What each block of a row keeps, which is of model chunks of so many blocks."""
    states: list[str] = []
    for size in units_of_chunks(policy, chunks):
        states += [INPUT, *[INNER] * (size - 1)] if size else [WHOLE]
    return tuple(states)


def last_unit(policy: Policy, row: Row, group: int, chunks: tuple[int, ...]) -> Row:
    """The blocks that are computed again at once with a group's last one; none where that keeps everything."""
    states, start = kept_as(policy, chunks), len(row) - 1 - row[::-1].index(group) if group in row else -1
    if start < 0 or states[start] == WHOLE:
        return ()
    end = start + 1
    while states[start] == INNER:
        start -= 1
    while end < len(row) and states[end] == INNER:
        end += 1
    return row[start:end]


@lru_cache(maxsize=256)
def from_start(begin: int, end: int) -> Part:
    """Some blocks, counted from the first one."""
    return lambda _: slice(begin, end)


@lru_cache(maxsize=256)
def from_end(index: int) -> Part:
    """One block, counted from the last one, which is 1; the first one where there are not so many."""
    return lambda row: slice(max(len(row) - index, 0), max(len(row) - index, 0) + 1)


@lru_cache(maxsize=256)
def behind(group: int) -> Part:
    """The blocks behind a group's last one."""
    return lambda row: slice(len(row) - row[::-1].index(group), len(row)) if group in row else slice(0)


@lru_cache(maxsize=256)
def ahead(group: int, skipped: int) -> Part:
    """The blocks before a group's first one, without the stage's first ``skipped``."""
    return lambda row: slice(skipped, row.index(group)) if group in row else slice(0)


@lru_cache(maxsize=256)
def from_first(group: int) -> Part:
    """The blocks from a group's first one to the one before its last."""
    return lambda row: slice(row.index(group), len(row) - 1 - row[::-1].index(group)) if group in row else slice(0)


class States:
    """What the blocks of some rows keep under some policies, as running counts: a part of a row is a difference."""

    def __init__(
        self, policies: tuple[Policy, ...], rows: tuple[Row, ...], chunks: tuple[tuple[int, ...], ...]
    ) -> None:
        self.policies, self.rows, self.chunks = policies, rows, chunks
        longest = max(map(len, rows), default=0)
        self._groups = np.array([[*row, *(-1,) * (longest - len(row))] for row in rows], dtype=np.int64)
        numbers = [[[KEPT.index(state) for state in kept_as(policy, sizes)] for sizes in chunks] for policy in policies]
        padded = [[[*states, *(-1,) * (longest - len(states))] for states in each] for each in numbers]
        self._states = np.array(padded, dtype=np.int8).reshape(len(policies), len(rows), longest)
        self._before: dict[tuple[int, tuple[str, ...]], Array] = {}
        self._units: dict[int, list[list[Row]]] = {}
        self._bounds: dict[Part, tuple[Array, Array]] = {}

    def before(self, group: int, states: tuple[str, ...]) -> Array:
        """Blocks of a group that keep so much before each place of a row, by policy and row."""
        if (group, states) not in self._before:
            here = (self._groups == group) & np.isin(self._states, [KEPT.index(state) for state in states])
            count = np.zeros((*here.shape[:2], here.shape[2] + 1), dtype=np.int16)
            np.cumsum(here, axis=2, out=count[:, :, 1:])
            self._before[group, states] = count
        return self._before[group, states]

    def number(self, group: int, states: tuple[str, ...], part: Part) -> Array:
        """Blocks of a group among a part of each row that keep so much, by policy and row."""
        before, places = self.before(group, states), np.arange(len(self.rows))
        begin, end = self._bounds_of(part)
        return (before[:, places, end] - before[:, places, begin]).astype(np.int64)

    def _bounds_of(self, part: Part) -> tuple[Array, Array]:
        if part not in self._bounds:
            bounds = [part(row).indices(len(row))[:2] for row in self.rows]
            begin, end = np.array(bounds, dtype=np.int64).reshape(-1, 2).T
            self._bounds[part] = begin, np.maximum(begin, end)
        return self._bounds[part]

    def units(self, group: int) -> list[list[Row]]:
        """The last unit of a group (:func:`last_unit`), by policy and row."""
        if group not in self._units:
            rows = [*zip(self.rows, self.chunks, strict=True)]
            self._units[group] = [[last_unit(p, row, group, sizes) for row, sizes in rows] for p in self.policies]
        return self._units[group]


@lru_cache(maxsize=16)
def states_of(policies: tuple[Policy, ...], rows: tuple[Row, ...], chunks: tuple[tuple[int, ...], ...]) -> States:
    """The same for searches over the same rows, of which there are many."""
    return States(policies, rows, chunks)


def _whole_row(_: Row) -> slice:
    return slice(None)


def counts_in(policies: tuple[Policy, ...], rows: Rows, group: int) -> tuple[Counts, ...]:
    """How each policy treats the blocks of one group among those of its stack."""
    states = states_of(policies, rows.distinct, rows.chunks)
    treated, alone, again = (states.number(group, these, _whole_row) for these in ((INPUT,), (WHOLE,), (INPUT, INNER)))
    units = np.array([[len(unit) for unit in each] for each in states.units(group)], dtype=np.int64)
    parts = [policy.kind in {"parts", "selective-ops"} for policy in policies]
    again = np.where(np.array(parts)[:, None], 0, again)
    return tuple(
        Counts(*(each[at][rows.index] for each in (treated, alone, units, again))) for at in range(len(policies))
    )


class Stack(Generic[Group]):
    """The groups of a stack that has several, on the stages of a grid."""

    def __init__(self, groups: Sequence[Group], census: ModelOnGrid) -> None:
        self.groups, self.census, self.policies = groups, trained(census), census.grid.policies
        self.rows = census.rows.only([group.index for group in groups])
        self.chosen: Array | None = None
        self._gradients: dict[int, Array] = {}

    @cached_property
    def _states(self) -> States:
        return states_of(self.policies, self.rows.distinct, self.rows.chunks)

    def under(self, chosen: Array) -> Self:
        """The same under some of the policies, by their places."""
        part = copy(self)
        part.chosen = chosen
        return part

    def of(self, array: Array) -> Array:
        """An array of the grid, under the policies of this stack alone."""
        shared = self.chosen is None or np.ndim(array) == 0 or array.shape[AXES.index("recompute")] == 1
        return array if shared else array[:, :, :, self.chosen]

    def _by_policy(self, counts: Array) -> Array:
        """Counts by policy and row, over the stages and along the recompute axis."""
        by_stage = np.moveaxis(counts.T[self.rows.index], -1, AXES.index("recompute"))
        return np.ascontiguousarray(by_stage.reshape(by_stage.shape[: len(AXES)]))

    def counts(self, group: Group) -> tuple[Counts, ...]:
        """How each policy treats the blocks of a group."""
        return counts_in(self.policies, self.rows, group.index)

    def number(self, group: Group, part: Part) -> Array:
        """Blocks of a group among a part of each row."""
        return self.rows.count(lambda row: row[part(row)].count(group.index))

    def unit_extra(self, group: Group) -> Array:
        """Bytes of the blocks before a group's last one that are computed again at once with it."""

        def count(unit: Row, other: int) -> int:
            last = len(unit) - 1 - unit[::-1].index(group.index) if unit else 0
            return unit[:last].count(other)

        units, total = self._states.units(group.index), np.int64(0)
        for other in self.groups:
            counts = np.array([[count(unit, other.index) for unit in each] for each in units], dtype=np.int64)
            total = total + self._by_policy(counts) * other.whole_block
        return total

    def each(self, part: Part, again: Callable[[Group], Array] | None, once: Callable[[Group], Array]) -> Array:
        """A quantity of each block among a part of each row: of those that run again, if any, and those that do not."""
        return self._total(part, *([((INPUT, INNER), again)] if again else []), ((WHOLE,), once))

    def kept(self, part: Part) -> Array:
        """Bytes that the blocks among a part of each row keep for one micro-batch."""
        return self._total(part, ((WHOLE,), lambda a: a.whole_block), ((INPUT,), lambda a: a.treated_block))

    def _total(self, part: Part, *kinds: tuple[tuple[str, ...], Callable[[Group], Array]]) -> Array:
        """The sum of quantities of the blocks among a part of each row that keep so much, along the recompute axis."""
        total = np.zeros((1,) * len(AXES), dtype=np.int64)
        for group in self.groups:
            for states, of in kinds:
                counts = self._states.number(group.index, states, part)
                counts = counts if self.chosen is None else counts[self.chosen]
                if counts.any():  # parts are short, and seldom have blocks of all kinds
                    total = total + self._by_policy(counts) * self.of(of(group))
        return total

    def left(self, part: Part, here: Array) -> Array:
        """Bytes that they keep (``here``: 0 where on the host), less those of the gradients that backward leaves."""
        return self.kept(part) * here - self.gradients(part)

    def gradients(self, part: Part) -> Array:
        """Bytes of the gradients of the blocks among a part of each row, where backward makes new ones that stay."""
        total: Array = np.int64(0)
        for group in self.groups:
            number = self.number(group, part)
            total = total + self._gradients_of(group.index) * number if number.any() else total
        return total

    def _gradients_of(self, group: int) -> Array:
        """Bytes of the gradients of one block of a group, where backward makes new ones that stay."""
        if group not in self._gradients:
            grid, census = self.census.grid, self.census
            sharded = grid.zero_from(2) & (grid.habits.full_shard or not grid.persistent_gradients)
            once = (grid.accumulation == 1) & (not grid.persistent_gradients)
            local = census.sharded(census.block_dense[group], census.block_experts[group], sharded)
            self._gradients[group] = census.width("gradient") * local * once
        return self._gradients[group]


def checkpoints_need_gradients(grid: Grid, treatment: str) -> bool:
    """Whether checkpoints make the input of a frozen tower need a gradient: then its blocks keep inputs and run again.

    The Trainer's do: ``enable_input_require_grads`` walks all sub-models and their patches (Transformers 5.23
    modeling_utils.py).
    """
    return grid.fixed.framework.partition("@")[0] == "hf" and treatment == "full"


def unread(census: ModelOnGrid, index: int, policy: Policy) -> bool:
    """Whether no gradient flows to the input of a group's first block: nothing before it is trained or checkpointed.

    PEFT and Transformers call ``enable_input_require_grads`` where checkpoints are on, and only there; so does
    Megatron-Bridge (067f987d peft/recompute.py), while ms-swift does so in any case (mcore-bridge f020e479
    model/gpt_model.py, ``decoder_input.requires_grad_``).
    """
    fixed = census.grid.fixed
    if fixed.lora_classes == "swift" or policy.kind != "none" or fixed.adapters is None or index != census.sequence[0]:
        return False
    if "embedding" in (*fixed.also_train, *fixed.adapters.targets):
        return False
    # A vision tower that is not trained keeps nothing at all
    return fixed.vision == "trained" or census.model.groups[index].tower != "vision"


def spared_records(census: ModelOnGrid, index: int, setting: BlockConfig, policy: Policy) -> tuple[Record, ...]:
    """What the first block of a group does not keep: what it would keep only if a gradient flowed to its input."""
    if not unread(census, index, policy):
        return ()
    block = census.model.groups[index].block
    names = {record.name for record in census.traces.get(trace, block, setting, wanted=False).kept_records}
    return tuple(record for record in census.traces.get(trace, block, setting).kept_records if record.name not in names)
