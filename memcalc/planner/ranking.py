"""What a search ranks by, and what it keeps: the best few of each idea, and the front of memory and time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from memcalc.frameworks.capabilities import capabilities_of
from memcalc.grid import column
from memcalc.specs.options import DEGREES

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.formulas.recompute import Policy
    from memcalc.grid import Grid, Layout


Value = TypeVar("Value")
LONG = 8192
"""Tokens a sequence from which context parallelism is usual."""
DEEP = 16
"""Pipeline stages that are usual: of the published runs with a speed one in a hundred has more, and what the model says
of them is extrapolated (presets/runs)."""
WIDE = 64
"""Ranks over which experts are shared out in the widest published layouts, such as DeepSeek-V3's (arXiv:2412.19437,
section 3.2)."""


@dataclass(frozen=True, order=True)
class Idea:
    """What strategies have in common that are told apart only by numbers."""

    parallel: tuple[str, ...]
    """Kinds of parallelism, with what each adds: ``shard``, ``whole``, ``tp``, ``pp``, ``interleaved``, ``cp``, …"""
    recompute: str
    """Recomputation by its scope: none, blocks (all of them), some (of the blocks) or parts (of each block)."""
    offload: tuple[str, ...]
    """What leaves the GPU."""
    others: tuple[str, ...] = ()
    """The optimizer and the tier, where several are searched."""
    unusual: tuple[str, ...] = ()
    """What is seldom done: cp on short sequences, pp inside a node or with more stages than :data:`DEEP`, tp without
    sequence parallelism where the framework has it (three published runs since it exists, one paper's own comparison,
    which it wins: arXiv:2205.05198, table 4), a pipeline of routed experts that no ranks share out (of 127 published
    layouts of them with one none: presets/runs/layouts), experts over more ranks than :data:`WIDE`."""

    @property
    def parts(self) -> int:
        """Moving parts: what plain data parallelism has not, and what is seldom done twice.

        Sharding counts on one data-parallel rank too: a pipeline over all GPUs is no simpler than one beside shards.
        Where a framework's own recipes always share the optimizer out, holding it whole counts instead.
        """
        return len(set(self.parallel) - {"data"}) + (self.recompute != "none") + len(self.offload) + len(self.unusual)

    @property
    def doubtful(self) -> bool:
        """Whether it has what buys less than the error of its predicted time: no measured runs, or little to gain."""
        return bool(self.offload or self.unusual)


@dataclass(frozen=True)
class Ideas:
    """The ideas of a grid, and the number of each strategy's own among them."""

    all: tuple[Idea, ...]
    layouts: Array
    """Over the layouts; the idea's number is this and the next two, added up."""
    rest: Array
    """Over recompute policies, sharding stages and offloads."""

    def numbers(self, rows: slice, shape: tuple[int, ...]) -> Array:
        """The number of each strategy's idea in a block of layouts."""
        return np.broadcast_to(self.layouts[rows] + self.rest, shape).reshape(-1)

    def at(self, index: tuple[int, ...]) -> Idea:
        """The idea of one strategy."""
        _, _, _, recompute, zero, offload, _ = index
        return self.all[int(self.layouts[index[0]].item() + self.rest[0, 0, 0, recompute, zero, offload, 0])]


def ideas_of(grid: Grid, node_gpus: int, *, routed: bool = False) -> Ideas:
    """The ideas of a grid on nodes of so many GPUs; ``routed`` says whether the model has routed experts."""
    able = {*capabilities_of(grid.fixed.framework).parallel.direct}
    choices = able & ({"tp+sp", "ep"} if routed else {"tp+sp"})
    kinds = [_kinds(layout, grid, node_gpus, choices) for layout in grid.layouts]
    scopes, shards = [scope(policy) for policy in grid.policies], [stage > 0 for stage in grid.zeros]
    all_kinds, all_scopes, all_shards = _distinct(kinds), _distinct(scopes), _distinct(shards)
    others = grid.fixed.optimizer, grid.fixed.offload_to
    usual = grid.habits.shares_optimizer and grid.fixed.adapters is None
    ideas = tuple(
        Idea((*_data(shard, usual, several), *names), recompute, offload, others, unusual)
        for names, unusual, several in all_kinds
        for recompute in all_scopes
        for shard in all_shards
        for offload in grid.offloads
    )
    each = len(grid.offloads)
    rest = column([all_scopes.index(name) for name in scopes], "recompute") * len(all_shards) * each
    rest = rest + column([all_shards.index(shard) for shard in shards], "zero") * each + column(range(each), "offload")
    number = {kind: index * len(ideas) // len(all_kinds) for index, kind in enumerate(all_kinds)}
    return Ideas(ideas, column([number[kind] for kind in kinds], "layout"), rest)


def _distinct(values: Iterable[Value]) -> list[Value]:
    return list(dict.fromkeys(values))


def _data(shard: bool, usual: bool, several: bool) -> tuple[str, ...]:
    """The kinds of data parallelism, with what of it is not as usual."""
    return ("data",) * several + ("shard" if shard else "whole",) * (shard != usual)


def _kinds(
    layout: Layout, grid: Grid, node_gpus: int, choices: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Kinds of parallelism but that of data; what of them is unusual; whether there are data-parallel ranks.

    Of sequence and expert parallelism ``choices`` has what the framework can be told and the model has a use for.
    """
    text = [name for name in DEGREES if getattr(layout, name) > 1]
    text += [layout.schedule] * (layout.pp > 1 and layout.schedule != "1f1b")
    unusual = ["pp"] * (layout.pp > DEEP or (layout.pp > 1 and layout.gpus <= node_gpus))
    unusual += ["cp"] * (layout.cp > 1 and grid.fixed.seq_len < LONG)
    unusual += ["tp"] * (layout.tp > 1 and "tp+sp" in choices and not layout.sp)
    unusual += ["ep"] * (layout.ep > WIDE or (layout.pp > 1 and "ep" in choices and layout.ep == 1))
    return tuple(text), tuple(unusual), layout.dp * layout.cp > 1


def scope(policy: Policy) -> str:
    """What a policy computes again: nothing, all blocks, some of them, or parts of each."""
    return {"none": "none", "parts": "parts", "selective-ops": "parts", "every": "some", "block": "some"}.get(
        policy.kind, "blocks"
    )


# ----------------------------------------------------------------------------------------------------- the best of each


Thing = TypeVar("Thing")
ArrayOrFloat = TypeVar("ArrayOrFloat", "Array", float)


class Ranked(NamedTuple, Generic[Thing]):
    """A strategy that was kept: what it is ranked by, its bytes beyond what fits, and what the rest follows from.

    Most are beaten later: what is not needed to rank them is made of the few that are left in the end.
    """

    key: float
    over: int
    seconds: float
    position: int
    make: Callable[[int, int, float], Thing]

    def made(self) -> Thing:
        """The strategy."""
        return self.make(self.position, self.over, self.seconds)


class Offered(NamedTuple, Generic[Thing]):
    """Some strategies of a block, by their places in it."""

    places: Array
    over: Array
    """Of each of them [bytes]."""
    seconds: Array
    """Of all of the block [s]."""
    make: Callable[[int, int, float], Thing]
    """What a strategy is, of its place, bytes and seconds; it is kept, and holds no large array."""

    def ranked(self, best: Array, key: Array) -> list[Ranked[Thing]]:
        """The best of them, with the keys of all that are offered."""
        places = self.places[best]
        figures = key[best], self.over[best], self.seconds[places], places
        return list(map(Ranked, *(figure.tolist() for figure in figures), repeat(self.make)))


_first = operator.itemgetter(0, 1)
"""Entries in the order of their keys, of equal ones the smaller first."""
_smaller = operator.itemgetter(1, 0)


class TopK(Generic[Thing]):
    """The ``count`` best of all that were offered."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.entries: list[Ranked[Thing]] = []

    @property
    def bound(self) -> float:
        """A key at which, or above, nothing can be among the best any more."""
        return self.entries[-1].key if len(self.entries) == self.count else np.inf

    def offer(self, key: Array, offered: Offered[Thing]) -> None:
        """Take in some of the offered, with the key of each."""
        best = np.lexsort((offered.over, key))[: self.count]
        self.entries = sorted([*self.entries, *offered.ranked(best, key)], key=_first)[: self.count]


class TopByIdea(Generic[Thing]):
    """Of each idea the ``count`` strategies with the lowest keys of all that were offered."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.entries: dict[Idea, list[Ranked[Thing]]] = {}
        self._ideas: Sequence[Idea] | None = None
        self._bounds: Array = np.zeros(0)
        """Of the ideas that were asked for last, which a grid has for all its blocks."""

    def bounds(self, ideas: Sequence[Idea]) -> Array:
        """A key for each idea, at which or above nothing can be among its best any more."""
        if self._ideas is not ideas:
            self._ideas, self._bounds = ideas, np.array([self._bound(idea) for idea in ideas])
        return self._bounds

    def _bound(self, idea: Idea) -> float:
        known = self.entries.get(idea, [])
        return known[-1].key if len(known) == self.count else np.inf

    def offer(self, ideas: Sequence[Idea], numbers: Array, key: Array, offered: Offered[Thing]) -> None:
        """Take in some of the offered; ``numbers`` say which idea each has."""
        for number, best in _lowest_of_each(numbers, key, offered.over, self.count):
            known = self.entries.get(ideas[number], [])
            merged = sorted([*known, *offered.ranked(best, key)], key=_first)
            self.entries[ideas[number]] = merged[: self.count]
            if self._ideas is ideas:
                self._bounds[number] = self._bound(ideas[number])
        if self._ideas is not ideas:
            self._ideas = None


def _lowest_of_each(numbers: Array, key: Array, over: Array, count: int) -> Iterator[tuple[int, Array]]:
    """The places of the lowest keys of each number, and of equal ones of the smallest."""
    order = np.lexsort((over, key, numbers))
    starts = np.flatnonzero(np.concatenate([[True], np.diff(numbers[order]) != 0]))
    for start, end in pairwise((*starts.tolist(), len(order))):
        yield int(numbers[order[start]]), order[start : min(start + count, end)]


class ParetoFront(Generic[Thing]):
    """Those of all that were offered which no other beats in both bytes and key; the smallest first."""

    BINS = 1024

    def __init__(self, capacity: int) -> None:
        self.entries: list[Ranked[Thing]] = []
        self.shift = max(capacity.bit_length() - self.BINS.bit_length() + 1, 0)
        self.below = np.full(self.BINS + 1, np.inf)
        """By bytes: the lowest key of all entries that are smaller than any strategy in this bin."""

    def ahead(self, over: Array, key: Array) -> Array:
        """Places of those that may be on the front; nothing that is on it is left out."""
        return np.flatnonzero(key < self.below.take(self._bin(over), mode="clip"))

    def _bin(self, over: Array) -> Array:
        return np.asarray((over >> self.shift) + self.BINS)

    def offer(self, key: Array, offered: Offered[Thing]) -> None:
        """Take in those of the offered that nothing beats, and let go of what they beat."""
        order = np.lexsort((key, offered.over))
        lowest = np.minimum.accumulate(key[order])
        first = np.concatenate([[True], lowest[1:] < lowest[:-1]])
        entries = sorted([*self.entries, *offered.ranked(order[first], key)], key=_smaller)
        self.entries = []
        for entry in entries:
            if not self.entries or entry.key < self.entries[-1].key:
                self.entries.append(entry)
        self.below.fill(np.inf)
        for entry in self.entries:
            self.below[int(self._bin(np.int64(entry.over))) + 1 :] = entry.key


ObjectiveName = Literal["simplicity", "throughput", "memory", "gpus", "cost"]


@dataclass(frozen=True)
class Objective:
    """An objective, and the critical batch size [tokens] where statistical efficiency counts too."""

    name: ObjectiveName = "simplicity"
    critical_batch: float | None = None

    def waste(self, global_batch: int, seq_len: int) -> float:
        """Tokens needed for the same loss, over those at a small batch: 1 + B / B_crit (arXiv:1812.06162, eq. 2.11)."""
        return 1.0 + (global_batch * seq_len / self.critical_batch if self.critical_batch else 0.0)

    def key(self, grid: Grid, reserved: ArrayOrFloat, time: ArrayOrFloat) -> ArrayOrFloat:
        """What strategies are ranked by, the lower, the better, from their bytes and seconds.

        Bytes where memory is what counts, else GPU-seconds for one useful token and GPU.
        """
        if self.name == "memory":
            return reserved
        fixed = grid.fixed
        return time * (self.waste(fixed.global_batch, fixed.seq_len) / (fixed.global_batch * fixed.seq_len))
