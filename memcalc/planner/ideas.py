"""Ideas: strategies with the same kinds of parallelism, recomputation and offload, which differ in numbers alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from memcalc.grid import column
from memcalc.specs.options import DEGREES

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.formulas.recompute import Policy
    from memcalc.grid import Grid, Layout

Value = TypeVar("Value")
LONG = 8192
"""Tokens a sequence from which context parallelism is usual."""


@dataclass(frozen=True, order=True)
class Idea:
    """What strategies have in common that are told apart only by numbers."""

    parallel: tuple[str, ...]
    """Kinds of parallelism, with what each adds: ``shard``, ``tp``, ``sp``, ``pp``, ``interleaved``, ``cp``, …"""
    recompute: str
    """Recomputation by its scope: none, blocks (all of them), some (of the blocks) or parts (of each block)."""
    offload: tuple[str, ...]
    """What leaves the GPU."""
    others: tuple[str, ...] = ()
    """The optimizer and the tier, where several are searched."""
    unusual: tuple[str, ...] = ()
    """What is seldom done: cp on short sequences, pp inside a node."""

    @property
    def parts(self) -> int:
        """Moving parts: what plain data parallelism has not, and what is seldom done twice.

        Sharding counts on one data-parallel rank too: a pipeline over all GPUs is no simpler than one beside shards.
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


def ideas_of(grid: Grid, node_gpus: int) -> Ideas:
    """The ideas of a grid on nodes of so many GPUs."""
    kinds = [_kinds(layout, grid, node_gpus) for layout in grid.layouts]
    scopes, shards = [scope(policy) for policy in grid.policies], [stage > 0 for stage in grid.zeros]
    all_kinds, all_scopes, all_shards = _distinct(kinds), _distinct(scopes), _distinct(shards)
    others = grid.fixed.optimizer, grid.fixed.offload_to
    ideas = tuple(
        Idea((*_data(shard, several), *names), recompute, offload, others, unusual)
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


def _data(shard: bool, several: bool) -> tuple[str, ...]:
    """The kinds of data parallelism."""
    return ("data",) * several + ("shard",) * shard


def _kinds(layout: Layout, grid: Grid, node_gpus: int) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Kinds of parallelism but that of data; what of them is unusual; whether there are data-parallel ranks."""
    text = [name for name in DEGREES if getattr(layout, name) > 1]
    text += [layout.schedule] * (layout.pp > 1 and layout.schedule != "1f1b")
    unusual = ["pp"] * (layout.pp > 1 and layout.gpus <= node_gpus)
    unusual += ["cp"] * (layout.cp > 1 and grid.fixed.seq_len < LONG)
    return tuple(text), tuple(unusual), layout.dp * layout.cp > 1


def scope(policy: Policy) -> str:
    """What a policy computes again: nothing, all blocks, some of them, or parts of each."""
    return {"none": "none", "parts": "parts", "selective-ops": "parts", "every": "some", "block": "some"}.get(
        policy.kind, "blocks"
    )
