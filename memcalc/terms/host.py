"""What a rank keeps off the GPU, by the memory that it lies in: host memory, and the tier that was chosen.

A CXL expander is memory of the host, so that what the path to the CPU keeps lies there as it stands. NVMe holds what a
framework swaps; DeepSpeed's swapper has its own rules (:mod:`memcalc.terms.host_zero`). Elsewhere states lie in the
tier, without the buffers in host memory through which they would pass. Offloaded activations do not leave host memory
for NVMe.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.ledger import ALWAYS, Term, alike, total
from memcalc.terms.activations import add_all, groups_of
from memcalc.terms.adapters import trained_parts
from memcalc.terms.every_k_blocks import INVENTORY
from memcalc.terms.host_zero import rounding, zero_states
from memcalc.terms.moments import kind_of, optimizer_moments, sharded_from, updated_elements
from memcalc.terms.states import gradient_elements, offloaded_gradients, offloaded_states, shards, weight_terms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.ledger import Tree
    from memcalc.terms.model_on_grid import ModelOnGrid

ON_HOST = "torchao optim/cpu_offload.py, CPUOffloadOptimizer; Megatron-LM cpu_offloading/hybrid_optimizer.py"
FSDP = "torch 2.13 distributed/fsdp: _fully_shard/_fsdp_param.py, _fsdp_collectives.py foreach_reduce; _flat_param.py"
PINNED = "torch 2.13 ATen/core/CachingHostAllocator.h: allocate"


class OffloadedBytes(NamedTuple):
    """Sums of what one rank keeps off the GPU, still to be made [bytes]."""

    host: Tree
    tier: Tree
    """What lies in NVMe or CXL, where that is the tier."""


def off_gpu_terms(census: ModelOnGrid) -> list[Term]:
    """Every term off the GPU, each with the memory that it lies in."""
    states = _states if census.grid.habits.zero_optimizer is None else zero_states
    terms = (*states(census), *_paged(census), *_activations(census))
    return [term for term in terms if np.any(term.bytes)]


def off_gpu_bytes(census: ModelOnGrid) -> OffloadedBytes:
    """The sums of what one rank keeps off the GPU, over the grid."""
    terms = off_gpu_terms(census)
    return OffloadedBytes(
        _sum([term for term in terms if term.tier == "host"]), _sum([term for term in terms if term.tier != "host"])
    )


def _sum(terms: list[Term]) -> Tree:
    return total([tree for _, tree in alike(((), term.bytes) for term in terms)])


def near(grid: Grid) -> str:
    """The memory of what stays close to the CPU."""
    return "cxl" if grid.fixed.offload_to == "cxl" else "host"


def _states(census: ModelOnGrid) -> Iterator[Term]:
    """States of frameworks without a swapper of their own."""
    grid = census.grid
    tier = "nvme" if grid.fixed.offload_to == "nvme" else near(grid)
    for term in weight_terms(census, grid.offloaded("params")):
        yield replace(term, tier=tier, source=FSDP)
    for updated in trained_parts(census):
        for term in (*_optimizer(updated), *_gradients(updated)):
            yield replace(term, name=f"{term.name}{updated.suffix}", tier=tier)
    if tier != "nvme":
        title, formula = "pinned tensors rounded up", "2^⌈log₂ S⌉ - S of each"
        yield Term("buffers", title, _rounded(census), ALWAYS, formula, PINNED, {}, tier=tier)


def _optimizer(census: ModelOnGrid) -> Iterator[Term]:
    """What the optimizer on the host updates, and its moments."""
    grid, kind = census.grid, kind_of(census.grid)
    away, inputs = offloaded_states(grid), {"P": census.parameters, "N": shards(grid, 1)}
    width = census.width("master")
    bytes_, formula = width * updated_elements(census) * away, "w · ⌈P / N⌉"
    yield Term("optimizer", "fp32 master weights", bytes_, ALWAYS, formula, ON_HOST, {"w": width, **inputs})
    bytes_ = census.width("parameter") * updated_elements(census) * _copied(census)
    title = "copy of the weights, for the step"
    yield Term("optimizer", title, bytes_, ALWAYS, formula, ON_HOST, {"w": census.width("parameter"), **inputs})
    if not kind.paged:
        bytes_, inputs = optimizer_moments(census) * away, {"n": kind.moments, "w": census.width("moment"), **inputs}
        yield Term("optimizer", f"{kind.name} moments", bytes_, ALWAYS, f"n · {formula}", kind.source, inputs)


def _copied(census: ModelOnGrid) -> Array:
    """1 where the optimizer on the host has a copy of weights that stand on the GPU."""
    grid = census.grid
    return grid.offloaded("optimizer") * (1 - grid.offloaded("params")) * (census.width("master") == 0)


def _gradients(census: ModelOnGrid) -> Iterator[Term]:
    """Gradients that the optimizer on the host reads: FSDP's shards, else a copy in the width of what it updates."""
    grid = census.grid
    if grid.fixed.optimizer_in_backward:
        return
    moved, width = offloaded_gradients(grid), census.width("gradient")
    inputs = {"w": width, "P": census.parameters, "N": shards(grid, 2)}
    bytes_, formula = width * gradient_elements(census) * moved, "w · ⌈P / N⌉"
    yield Term("gradients", "gradients", bytes_, ALWAYS, formula, FSDP, inputs)
    width = _step_width(census)
    bytes_ = width * updated_elements(census) * grid.offloaded("optimizer") * (1 - moved)
    title, inputs = "copy of the gradients, for the step", {**inputs, "w": width, "N": shards(grid, 1)}
    yield Term("gradients", title, bytes_, ALWAYS, formula, ON_HOST, inputs)


def _step_width(census: ModelOnGrid) -> Array:
    """Bytes an element of what an optimizer on the host updates."""
    return np.where(census.width("master") > 0, census.width("master"), census.width("parameter"))


def _rounded(census: ModelOnGrid) -> Array:
    """What pinned shards and gradients take beyond their bytes, and the copies for a step where these are tensors.

    Megatron-LM's distributed optimizer cuts its buffer wherever a rank's part ends: its copies are not counted.
    """
    grid = census.grid
    params, moved = grid.offloaded("params"), offloaded_gradients(grid)
    bytes_: Array = np.int64(0)
    if np.any(params):
        bytes_ = bytes_ + params * rounding(census, census.width("parameter"), sharded_from(grid, 3))
    if np.any(moved):
        bytes_ = bytes_ + moved * rounding(census, census.width("gradient"), sharded_from(grid, 2))
    copied = _copied(census)
    if np.any(copied):
        copies = 2 - moved - grid.fixed.optimizer_in_backward
        bytes_ = bytes_ + copied * copies * rounding(census, census.width("parameter"), sharded_from(grid, 1))
    return bytes_


def _paged(census: ModelOnGrid) -> Iterator[Term]:
    """Moments in unified memory, which leave the GPU for host memory under pressure, offloaded or not."""
    kind = kind_of(census.grid)
    for updated in trained_parts(census) if kind.paged else ():
        inputs = {"n": kind.moments, "P": updated.parameters, "N": shards(updated.grid, 1)}
        title, formula = f"{kind.name} moments{updated.suffix}", "n · w · ⌈P / N⌉, with the scales of 8-bit states"
        yield Term("optimizer", title, optimizer_moments(updated), ALWAYS, formula, kind.source, inputs, tier="host")


def _activations(census: ModelOnGrid) -> Iterator[Term]:
    """Offloaded activations of all micro-batches in flight, each tensor once, unpinned."""
    grid = census.grid
    if any("activations" in choice for choice in grid.offloads):
        saved = add_all([group.kept_in_flight for group in groups_of(census)]) * grid.offloaded("activations")
        yield Term("activations", "kept by blocks", saved, ALWAYS, "kept · n", INVENTORY, {}, tier=near(grid))
