"""The search: every strategy of a grid, its peak against the budget, its time, the best ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from memcalc.terms import Census, build_ledger, host_bytes
from memcalc.terms.overhead import group_bytes
from memcalc.timing import Times, rates_for, step_times

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid, Layout
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.terms import Overhead

CHUNK = 2_000_000
"""Strategies computed at once: large enough to spend no time in Python, small enough to stay in memory."""
TIGHT_PENALTY = 1e9
"""Seconds that put every tight strategy behind every safe one; small enough that steps still differ beside it."""


@dataclass(frozen=True)
class Found:
    """One strategy of a grid by its indices, with its figures."""

    grid: Grid
    index: tuple[int, ...]
    reserved: int
    step: float
    times: dict[str, float]
    host: int

    @property
    def layout(self) -> Layout:
        """The parallel layout."""
        return self.grid.layouts[self.index[0]]

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of one GPU [tokens/s]."""
        fixed = self.grid.fixed
        return fixed.global_batch * fixed.seq_len / self.step / self.layout.gpus


@dataclass(frozen=True)
class Outcome:
    """What a search found: the fastest that fit, the smallest of all, and counts."""

    best: tuple[Found, ...]
    smallest: Found
    searched: int
    feasible: int


def evaluate(model: Model, grid: Grid, overhead: Overhead, gpu: GPU, node: Node) -> tuple[Array, Array, Times, Array]:
    """Reserved bytes (pools, holes, communicators), host bytes of a rank, times, and whether each strategy is legal.

    Bytes are the largest over the stages.
    """
    census = Census(model, grid)
    ledger = build_ledger(census, overhead.workspaces, detail=False)
    reserved = ledger.reserved(largest_stage=True) + group_bytes(grid)
    host = np.max(host_bytes(census), axis=1, keepdims=True)
    return reserved, host, step_times(census, gpu, node, rates_for(gpu, grid)), legal(grid)


def legal(grid: Grid) -> Array:
    """Strategies whose axes agree.

    The batch divides; parameters are offloaded only where they are sharded; what shards with FSDP alone has mixed
    precision only there.
    """
    params = grid.offloaded("params") == 1
    sharded = np.asarray(grid.zero == 3) | (grid.habits.full_shard & (grid.zero == 2))
    unsharded_mixed = grid.habits.full_shard & (grid.zero == 0) & (grid.is_mixed == 1)
    return np.asarray(grid.divides & (~params | sharded) & ~unsharded_mixed)


def host_limit(grid: Grid, node: Node) -> Array | None:
    """Bytes of the node's tier that one rank may use, or None where the node's memory is unknown."""
    tier = {"cpu": "host"}.get(grid.fixed.offload_to, grid.fixed.offload_to)
    capacity = next((known.capacity_bytes for known in node.tiers if known.name == tier), None)
    if tier == "host" and capacity is None:
        capacity = node.host_memory_bytes
    return None if capacity is None else capacity // np.minimum(grid.degree("gpus"), node.gpus)


def search(model: Model, grid: Grid, overhead: Overhead, gpu: GPU, node: Node, top: int) -> Outcome:
    """Evaluate the whole grid, in chunks of layouts; keep the ``top`` fastest that fit, tight ones last."""
    rows = max(CHUNK // max(grid.size // len(grid.layouts), 1), 1)
    parts = [
        _search_chunk(model, _part(grid, first, rows), overhead, gpu, node, top)
        for first in range(0, len(grid.layouts), rows)
    ]
    best = sorted((found for part in parts for found in part.best), key=lambda f: _order(f, overhead))[:top]
    smallest = min((part.smallest for part in parts), key=lambda found: found.reserved)
    return Outcome(tuple(best), smallest, grid.size, sum(part.feasible for part in parts))


def _part(grid: Grid, first: int, rows: int) -> Grid:
    values = {name: getattr(grid, name) for name in grid.__dataclass_fields__}
    return type(grid)(**{**values, "layouts": grid.layouts[first : first + rows]})


def _order(found: Found, overhead: Overhead) -> tuple[bool, float, int]:
    """Plans that fit at the upper end of their range come before tight ones, then the faster, then the smaller."""
    return found.reserved > overhead.safe, found.step, found.reserved


def _search_chunk(model: Model, grid: Grid, overhead: Overhead, gpu: GPU, node: Node, top: int) -> Outcome:
    reserved, host, times, allowed = evaluate(model, grid, overhead, gpu, node)
    shape = (grid.shape[0], 1, *grid.shape[2:])
    limit = host_limit(grid, node)
    roomy = allowed if limit is None else allowed & (host <= limit)
    fits = (reserved <= overhead.usable) & roomy
    tight = TIGHT_PENALTY * (reserved > overhead.safe)
    flat = np.broadcast_to(np.where(fits, times.step + tight, np.inf), shape).reshape(-1)
    count = int(np.isfinite(flat).sum())
    chosen: Array = np.argpartition(flat, min(top, flat.size) - 1)[:top] if count else []
    best = [_found(grid, shape, int(i), reserved, host, times) for i in chosen if np.isfinite(flat[i])]
    small = np.broadcast_to(np.where(roomy, reserved, np.iinfo(np.int64).max), shape).reshape(-1)
    return Outcome(tuple(best), _found(grid, shape, int(np.argmin(small)), reserved, host, times), grid.size, count)


def _found(grid: Grid, shape: tuple[int, ...], flat: int, reserved: Array, host: Array, times: Times) -> Found:
    index = tuple(int(i) for i in np.unravel_index(flat, shape))

    def at(array: Array) -> float:
        return float(np.broadcast_to(array, shape)[index])

    parts = {part.name: at(getattr(times, part.name)) for part in fields(times)}
    return Found(grid, index, int(np.broadcast_to(reserved, shape)[index]), sum(parts.values()), parts, int(at(host)))
