"""The budget of one strategy: what is reserved, what is left for activations, and off the GPU what a host has.

The need of host memory is that of memcalc's terms alone: the system, data loaders and the page cache take theirs beside
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.frameworks import habits_of
from memcalc.ledger import ALWAYS, PHASES, Ledger, computed
from memcalc.planner.request import micro_batches_of
from memcalc.planner.stage_peaks import UnsafeError, at_stage, peaks_of
from memcalc.results.estimates import ActivationBudget, TermFacts
from memcalc.terms.build import build_ledger
from memcalc.terms.host import off_gpu_bytes
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.moments import kind_of
from memcalc.terms.overhead import group_bytes
from memcalc.timing import rates_for, step_times
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.ledger import Tree
    from memcalc.planner.stage_peaks import Peaks
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.strategy import Strategy
    from memcalc.terms.overhead import Overhead


REPLAYED = "PyTorch c10/cuda/CUDACachingAllocator.cpp, two steps replayed"
SUMMED = "the largest sum of each stream's pool, since pools give each other nothing"
GROUPS = {
    "world": "all ranks", "tp": "tensor parallelism", "pp": "pipeline stages", "cp": "context parallelism",
    "ep": "expert parallelism", "dp_replicate": "replicas", "dp": "data parallelism", "mp": "tensor and pipeline ranks",
    "dist_opt": "distributed optimizer", "tp_ep": "tensor and expert ranks", "etp": "tensor ranks of experts",
    "edp": "data-parallel ranks of experts", "tp_cp": "tensor and context ranks",
}  # fmt: skip
"""What a communicator joins."""


def reserve_terms(peaks: Peaks) -> Iterator[TermFacts]:
    """What makes up the reserve of the stage where the peak stands."""
    top = peaks.top
    predicted = min(peaks.predicted, top.reserved) if peaks.is_flushed else peaks.predicted
    played = peaks.replayed is not None and peaks.replayed.runs
    yield TermFacts(
        component="reserve",
        name="cached and unused",
        bytes=predicted - top.allocated,
        phases=(top.phase,),
        formula="R - A: reserved less allocated",
        inputs={"R": predicted, "A": top.allocated},
        source=REPLAYED if played else SUMMED,
    )
    known = peaks.overhead.unexplained
    yield TermFacts(
        component="reserve",
        name="reserved beyond what is predicted",
        bytes=top.reserved - predicted,
        phases=(top.phase,),
        formula="m · R",
        inputs={"m": known.middle, "R": predicted},
        source=known.source,
    )


def outside_terms(overhead: Overhead) -> Iterator[TermFacts]:
    """The context and each communicator of one process."""
    yield TermFacts(
        component="context",
        name="context",
        bytes=overhead.context,
        phases=ALWAYS,
        formula="context of one process",
        inputs={},
        source=overhead.context_source,
    )
    for each in overhead.communicators:
        inputs: dict[str, int | str] = {"group": each.name, "ranks": each.ranks}
        if each.peers:
            inputs = {"between": each.name, "peers": each.peers}
        what = "buffers to other ranks of" if each.peers else "communicator of"
        yield TermFacts(
            component="context",
            name=f"{what} {GROUPS[each.name]}",
            bytes=each.bytes,
            phases=ALWAYS,
            formula="12 MiB · c · p" if each.peers else "one communicator's buffers",
            inputs=inputs,
            source=each.source,
        )


# --------------------------------------------------------------------------------------------------------- what is left


SHORTEST = 1.0
"""Share of memory that recomputation saves over the share of time that it adds, below which it is not worth it."""
_HELD = ("parameters", "gradients", "optimizer", "buffers")


@dataclass(frozen=True)
class Variants:
    """A strategy beside others that differ in their micro-batch or recompute policy, by the closed form."""

    census: ModelOnGrid
    gpu: GPU
    overhead: Overhead
    fits: bool = False
    """Whether the strategy itself does."""

    def beside(self, **axes: Any) -> ModelOnGrid:
        """The model on a grid with other values of some axes."""
        grid = replace(self.census.grid, every_stage=False, **axes)
        return ModelOnGrid(self.census.model, grid, self.census.traces)

    def reserved(self, census: ModelOnGrid) -> Array:
        """Bytes reserved, with the communicators, one entry a variant."""
        reserved = build_ledger(census, self.overhead.workspaces, detail=False).reserved()
        total = reserved + group_bytes(self.gpu, census.grid)
        return np.broadcast_to(np.max(total, axis=1, keepdims=True), _one_stage(census)).reshape(-1)

    def fitting(self, census: ModelOnGrid) -> Array:
        """Which variants leave the margin that measured runs need, one entry each."""
        return np.asarray(self.reserved(census) <= self.overhead.safe)

    def largest_micro_batch(self) -> int:
        """The largest micro-batch that fits and divides the global batch; 0 where none does."""
        grid = self.census.grid
        ranks = grid.layouts[0].dp
        sizes = micro_batches_of(grid.fixed.global_batch // ranks)
        fits = self.fitting(self.beside(micro_batches=tuple(sizes)))
        counted = (size for size, fit in zip(sizes, fits, strict=True) if fit)
        return next((size for size in sorted(counted, reverse=True) if self.runs(micro_batches=(size,))), 0)

    def fewest_segments(self, layers: int) -> int | None:
        """The fewest checkpointed segments with which it fits: 1 is no checkpoint at all; None where none do."""
        counts = [n for n in range(2, layers + 1) if layers % n == 0]
        policies = ("none", *(f"segments-{count}" for count in counts))
        fits = self.fitting(self.beside(recomputes=policies))
        counted = zip((1, *counts), policies, fits, strict=True)
        return next((count for count, policy, fit in counted if fit and self.runs(recomputes=(policy,))), None)

    def runs(self, **axes: Any) -> bool:
        """Whether one variant fits by a replay too, which often reserves more: asked where a job has to change."""
        if self.fits:
            return True
        grid = replace(self.census.grid, **axes)
        census = ModelOnGrid(self.census.model, grid, self.census.traces)
        try:
            ledger = build_ledger(census, self.overhead.workspaces, detail=False)
            return peaks_of(census, ledger, self.overhead, only_safe=True).verdict == "fits"
        except UnsafeError:
            return False


def _one_stage(census: ModelOnGrid) -> tuple[int, ...]:
    shape: tuple[int, ...] = census.grid.shape
    return (shape[0], 1, *shape[2:])


def activation_budget_of(census: ModelOnGrid, gpu: GPU, ledger: Ledger, peaks: Peaks) -> ActivationBudget | None:
    """The room for activations, in the phase in which they are largest; None for a recorded module."""
    if census.model.recording is not None:
        return None
    stages, top, overhead = census.grid.num_stages, peaks.top, peaks.overhead

    def size(name: str, phase: str) -> int:
        return at_stage(ledger.component(name, phase), top.stage, stages)

    phase = max(PHASES, key=lambda phase: size("activations", phase))
    states = {name: size(name, phase) for name in _HELD}
    cache, margin = top.reserved - top.allocated, overhead.usable - overhead.safe
    variants = Variants(census, gpu, overhead, fits=peaks.verdict == "fits")
    return ActivationBudget(
        phase=phase,
        usable=overhead.usable,
        **states,
        cache=cache,
        margin=margin,
        available=overhead.usable - sum(states.values()) - cache - margin,
        activations=size("activations", phase),
        micro_batch=variants.largest_micro_batch(),
        segments=variants.fewest_segments(census.model.num_layers // census.grid.layouts[0].pp),
    )


def recompute_warnings(census: ModelOnGrid, gpu: GPU, node: Node, overhead: Overhead) -> tuple[str, ...]:
    """What to say of recomputation that saves a smaller share of memory than it adds of time, as short sequences do."""
    grid = census.grid
    policy = grid.recomputes[0]
    if policy == "none" or census.model.recording is not None:
        return ()
    variants = Variants(census, gpu, overhead)
    both = variants.beside(recomputes=("none", policy))
    without, now = variants.reserved(both).tolist()
    times = np.broadcast_to(step_times(both, gpu, node, rates_for(gpu, both.grid)).step, _one_stage(both)).reshape(-1)
    saved, slower = 1 - now / without, times[1] / times[0] - 1
    needed = now <= overhead.safe < without
    if slower <= 0 or saved / slower >= SHORTEST or needed:
        return ()
    text = f"recompute {policy} saves {max(saved, 0.0):.0%} of the memory for {slower:.0%} more time"
    fits = "; the job fits without it" if without <= overhead.safe else ""
    return (f"{text}, which is seldom worth it{fits}.",)


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
