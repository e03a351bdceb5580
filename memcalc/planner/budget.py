"""The budget of one strategy: what is reserved beside tensors and held outside, and what is left for activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.ledger import ALWAYS, PHASES, Ledger
from memcalc.planner.request import MICRO_BATCHES
from memcalc.planner.stage_peaks import at_stage
from memcalc.results.estimates import ActivationBudget, TermFacts
from memcalc.terms import ModelOnGrid, build_ledger
from memcalc.terms.overhead import group_bytes
from memcalc.timing import rates_for, step_times

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.planner.stage_peaks import Peaks
    from memcalc.results.estimates import StagePeak
    from memcalc.specs.hardware import GPU, Node
    from memcalc.terms import Overhead


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
        sizes = sorted({m for m in MICRO_BATCHES if grid.fixed.global_batch % (m * ranks) == 0} | {1})
        fits = self.fitting(self.beside(micro_batches=tuple(sizes)))
        return max((size for size, fit in zip(sizes, fits, strict=True) if fit), default=0)

    def fewest_segments(self, layers: int) -> int | None:
        """The fewest checkpointed segments with which it fits: 1 is no checkpoint at all; None where none do."""
        counts = [n for n in range(2, layers + 1) if layers % n == 0]
        policies = ("none", *(f"segments-{count}" for count in counts))
        fits = self.fitting(self.beside(recomputes=policies))
        return next((count for count, fit in zip((1, *counts), fits, strict=True) if fit), None)


def _one_stage(census: ModelOnGrid) -> tuple[int, ...]:
    shape: tuple[int, ...] = census.grid.shape
    return (shape[0], 1, *shape[2:])


def activation_budget_of(
    census: ModelOnGrid, gpu: GPU, ledger: Ledger, overhead: Overhead, top: StagePeak
) -> ActivationBudget | None:
    """The room for activations, in the phase in which they are largest; None for a recorded module."""
    if census.model.recording is not None:
        return None
    stages = census.grid.num_stages

    def size(name: str, phase: str) -> int:
        return at_stage(ledger.component(name, phase), top.stage, stages)

    phase = max(PHASES, key=lambda phase: size("activations", phase))
    states = {name: size(name, phase) for name in _HELD}
    cache, margin = top.reserved - top.allocated, overhead.usable - overhead.safe
    variants = Variants(census, gpu, overhead)
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
    if slower <= 0 or saved / slower >= SHORTEST:
        return ()
    text = f"recompute {policy} saves {max(saved, 0.0):.0%} of the memory for {slower:.0%} more time"
    fits = "; the job fits without it" if without <= overhead.safe else ""
    return (f"{text}, which is seldom worth it{fits}.",)
