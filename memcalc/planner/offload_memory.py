"""What strategies keep off the GPU, against what a host has of it.

The need is that of memcalc's terms alone: the system, data loaders and the page cache take theirs beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memcalc.frameworks import habits_of
from memcalc.ledger import computed
from memcalc.terms import off_gpu_bytes
from memcalc.terms.moments import kind_of
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.ledger import Tree
    from memcalc.specs.hardware import Node
    from memcalc.specs.strategy import Strategy
    from memcalc.terms import ModelOnGrid

NO_SWAPPER = "the framework cannot swap to NVMe itself. Host buffers for it are not counted."
NAMES = {"host": "host memory", "nvme": "NVMe", "cxl": "CXL memory"}


@dataclass(frozen=True)
class MemoryPool:
    """One memory of the node off the GPU."""

    need: Tree
    """What one rank keeps there, over the grid [bytes]."""
    most: Array
    """What it may keep there, over the layouts [bytes]."""


@dataclass(frozen=True)
class OffloadNeed:
    """What one host needs off its GPUs, each with what the stage needs that keeps most [bytes]."""

    host: int
    tier: int
    tier_name: str

    def parts(self) -> Iterator[tuple[str, int]]:
        """Each memory with what is needed of it."""
        yield "host", self.host
        if self.tier_name != "host":
            yield self.tier_name, self.tier


def capacity(node: Node, tier: str) -> int | None:
    """What each host of a node has of a memory [bytes], or None where that is unknown."""
    known = node.tier(tier)
    if known is not None:
        return known.capacity_bytes // node.hosts
    return node.host_memory_bytes // node.hosts if tier == "host" and node.host_memory_bytes else None


def tier_of(grid: Grid) -> str:
    """The memory that was chosen, by the name that a node gives it."""
    return {"cpu": "host"}.get(grid.fixed.offload_to, grid.fixed.offload_to)


def pools_of(
    census: ModelOnGrid, node: Node, grid: Grid | None = None, *, trusting: bool = True, by_share: bool = False
) -> tuple[MemoryPool, ...]:
    """The memories off the GPU, where a strategy of the grid keeps something in one.

    One of unknown size holds anything where ``trusting``, else nothing. ``by_share`` a GPU has its share of them alone,
    whoever has the others of the node. ``grid`` has the layouts, where those of the
    census stand once for each stage.
    """
    grid = grid or census.grid
    if not any(grid.offloads) and not kind_of(grid).paged:
        return ()
    live, most = off_gpu_bytes(census), node.gpus_per_host
    ranks = np.asarray(most) if by_share else np.minimum(grid.degree("gpus"), most)
    trees = {"host": live.host} | ({} if tier_of(grid) == "host" else {tier_of(grid): live.tier})
    sizes = {tier: capacity(node, tier) for tier in trees}
    sizes = {tier: 0 if size is None and not trusting else size for tier, size in sizes.items()}
    return tuple(MemoryPool(trees[tier], size // ranks) for tier, size in sizes.items() if size is not None)


def unknown_to(need: OffloadNeed, node: Node) -> tuple[str, ...]:
    """The memories that are needed and whose size the node does not tell."""
    return tuple(NAMES[tier] for tier, wanted in need.parts() if wanted and capacity(node, tier) is None)


def offload_need(census: ModelOnGrid, node: Node) -> OffloadNeed:
    """What a grid of one strategy needs of a host: each of its ranks as much as the stage that keeps most."""
    grid, live = census.grid, off_gpu_bytes(census)
    ranks = min(grid.layouts[0].gpus, node.gpus_per_host)
    return OffloadNeed(int(computed(live.host).max()) * ranks, int(computed(live.tier).max()) * ranks, tier_of(grid))


def shortages(need: OffloadNeed, node: Node) -> Iterator[str]:
    """One sentence for each memory that does not suffice, or whose size is unknown."""
    for tier, wanted in need.parts():
        size, name = capacity(node, tier), NAMES[tier]
        each = "node" if node.hosts == 1 else "host"
        if wanted and size is None:
            yield f"needs {wanted / GIB:.1f} GiB of {name} per {each}; node {node.name} does not state its size."
        elif size is not None and wanted > size:
            where = f"node {node.name}" if node.hosts == 1 else f"each of the {node.hosts} hosts of {node.name}"
            yield f"needs {wanted / GIB:.1f} GiB of {name} per {each}; {where} has {size / GIB:.1f} GiB."


def lacking(need: OffloadNeed, node: Node) -> str:
    """What a host does not have of what is needed, in a few words; empty where nothing is known to be short."""
    sizes = ((NAMES[tier], wanted, capacity(node, tier)) for tier, wanted in need.parts())
    short = (f"{name} lacks {(wanted - size) / GIB:.1f} GiB" for name, wanted, size in sizes if size and wanted > size)
    return ", ".join(short)


def lacks_nvme_swap(strategy: Strategy) -> bool:
    """Whether states are told to lie in NVMe, and the framework has no way of its own to bring them there."""
    moved = {"optimizer", "params"} & set(strategy.offload)
    return bool(moved) and strategy.offload_to == "nvme" and habits_of(strategy.framework).zero_optimizer is None
