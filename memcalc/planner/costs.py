"""The figures of every strategy of a grid: bytes against the budget, seconds, and which strategies can run at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.recompute import parse_policy
from memcalc.frameworks.float8 import optimizer_alone
from memcalc.grid import AXES, column
from memcalc.ledger import Ledger, MaxOverStages, Tree, leaf, total
from memcalc.planner.budget import pools_of
from memcalc.planner.direct import free_of
from memcalc.planner.optimizers import width_without_zero
from memcalc.planner.pipelines import rounds_fit
from memcalc.terms.build import activation_terms, chosen_offloads, other_terms
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import kinds_of, libraries_of, overhead_of
from memcalc.timing import Times, rates_for
from memcalc.timing.times import resident_times, with_offload

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.terms.overhead import Overhead


@dataclass(frozen=True)
class Costs:
    """Figures of every strategy of a grid, as sums that are still to be made, and which strategies can run at all."""

    grid: Grid
    reserved: MaxOverStages
    usable: Array
    """The largest reserved figure that fits, over the layouts."""
    safe: Array
    """The same at the upper end of the range, over layouts, sharding stages and offloads."""
    times: Times
    step: Tree
    rooms: tuple[tuple[MaxOverStages, Array], ...]
    """Bytes that one rank keeps in each memory off the GPU whose size is known, and what it may keep there."""
    allowed: Array
    """Strategies whose axes agree."""


def costs_of(model: Model, grid: Grid, gpu: GPU, node: Node) -> Costs:
    """The figures of a grid. Bytes are the largest over the stages, seconds those of the slowest."""
    return next(costs_apart(ModelOnGrid(model, grid), gpu, node, [slice(None)]))


def costs_apart(
    census: ModelOnGrid, gpu: GPU, node: Node, choices: list[slice], *, trusting: bool = True
) -> Iterator[Costs]:
    """The figures of a grid, some of its offload axis at a time; what does not depend on activations' is made once."""
    grid = census.grid
    rates, (rows, owners) = rates_for(gpu, grid), grid.flat
    flat = census if rows is grid else census.with_layouts(rows)
    others = other_terms(flat, overhead_of(gpu, grid).workspaces)
    resident = resident_times(census, gpu, node, rates)
    usable, safe = limits(grid, gpu)
    for chosen in choices:
        offloads = grid.offloads[chosen]
        by_stage, by_layout = flat.with_offloads(offloads), census.with_offloads(offloads)
        part = by_layout.grid
        terms = [*activation_terms(by_stage, detail=False), *chosen_offloads(others, chosen)]
        times = with_offload(resident, by_layout, gpu, node)
        step = total([leaf(seconds) for seconds in times.parts])
        pools = pools_of(by_stage, node, part, trusting=trusting)
        rooms = tuple((MaxOverStages(pool.need, owners), pool.most) for pool in pools)
        reserved = MaxOverStages(Ledger(terms).tree(), owners)
        here = np.take(safe, range(len(grid.offloads))[chosen], axis=AXES.index("offload"))
        yield Costs(part, reserved, usable, here, times, step, rooms, legal(part))
    for each in (flat, census):
        each.blocks_cache.release()


def limits(grid: Grid, gpu: GPU) -> tuple[Array, Array]:
    """The largest predictions that fit, and that fit at the upper end of the range of their kind of job [bytes].

    The former over the layouts, the latter over sharding stages and offloads too.
    """
    libraries = libraries_of(gpu, grid)
    known = {libraries.of(layout): layout for layout in grid.layouts}
    alike = {key: overhead_of(gpu, grid, layout) for key, layout in known.items()}
    overheads = [alike[libraries.of(layout)] for layout in grid.layouts]
    return column([overhead.usable for overhead in overheads], "layout"), safe_limits(grid, gpu, overheads)


def safe_limits(grid: Grid, gpu: GPU, overheads: Sequence[Overhead]) -> Array:
    """The largest predictions that fit at the upper end of the range of their kind of job [bytes].

    Over layouts, sharding stages and offloads; ``overheads`` are those of the layouts, or one for all of them.
    """
    kinds = kinds_of(grid)
    by_layout = overheads if len(overheads) > 1 else [*overheads] * len(grid.layouts)
    known: dict[tuple[int, bool], list[list[int]]] = {}
    rows = []
    for overhead, layout in zip(by_layout, grid.layouts, strict=True):
        alone = layout.gpus == 1
        if (id(overhead), alone) not in known:
            safe = {kind: overhead.of_kind(gpu, kind).safe for kind in set(kinds.values())}
            known[id(overhead), alone] = [[safe[kinds[alone, z, o]] for o in grid.offloads] for z in grid.zeros]
        rows.append(known[id(overhead), alone])
    return np.array(rows, dtype=np.int64)[:, None, None, None, :, :, None]


def legal(grid: Grid) -> Array:
    """Strategies whose axes agree.

    The batch divides, and is one micro-batch where the optimizer steps in backward; parameters are offloaded only where
    they are sharded, and by DeepSpeed optimizer states too, to NVMe at stage 3 alone, and gradients are added up as its
    engine does without ZeRO; what shards with FSDP alone has mixed precision only there; replicas are of what is
    sharded; a pipeline engine has stages 0 and 1; micro-batches pass model chunks in whole rounds, and each of these
    computes as many blocks again as the others.
    """
    params = grid.offloaded("params") == 1
    sharded = np.asarray(grid.zero == 3) | (grid.habits.full_shard & (grid.zero == 2))
    shards = grid.habits.full_shard and grid.fixed.adapters is None
    unsharded_mixed = shards & (grid.zero == 0) & (grid.is_mixed == 1)
    able = grid.divides & (~params | sharded) & ~unsharded_mixed & _as_set(grid) & rounds_fit(grid) & free_of(grid)
    able = able & even_over_chunks(grid)
    if any(layout.dp_replicate > 1 for layout in grid.layouts):
        able = able & ((grid.degree("dp_replicate") == 1) | grid.zero_from(2 if grid.habits.full_shard else 1))
    if (
        0 in grid.zeros or grid.habits.unsharded_alone
    ):  # one rank has nothing to shard, unless what is offloaded needs a stage
        moved = (params | (grid.offloaded("optimizer") == 1)) & (not grid.habits.unsharded_alone)
        able = able & ((grid.degree("dp") * grid.degree("cp") > 1) | ~grid.zero_from(1) | moved)
    if grid.habits.pipeline_engine != "none":
        able = able & ((grid.degree("pp") == 1) | (grid.zero <= 1))
    if grid.habits.zero_optimizer is not None:
        lowest = 3 if grid.fixed.offload_to == "nvme" else 1
        able = able & ((grid.offloaded("optimizer") == 0) | grid.zero_from(lowest))
        if width := grid.fixed.grad_accum_dtype:
            widths = [width_without_zero(grid.habits, name) for name in grid.precisions]
            same = column([fixed in ("", width) for fixed in widths], "precision") == 1
            able = able & (grid.zero_from(1) | same)
    return np.asarray(able & (grid.accumulation == 1) if grid.fixed.optimizer_in_backward else able)


def even_over_chunks(grid: Grid) -> Array:
    """Whether blocks of ``block-N`` come out even over the model chunks of a stage.

    Megatron-LM is told how many of each chunk (core/recompute.py), which N over the chunks has to be.
    """
    if not grid.habits.engine:
        return np.ones((1,) * len(AXES), dtype=bool)
    policies = [parse_policy(name) for name in grid.recomputes]
    blocks = column([policy.count if policy.kind == "block" else 0 for policy in policies], "recompute")
    return np.asarray(blocks % grid.degree("vpp") == 0)


def _as_set(grid: Grid) -> Array:
    stage = {"never": 2, "always": 3}.get(grid.fixed.reshard)
    float8 = bool(grid.fixed.float8 or grid.fixed.float8_all_gather) and not optimizer_alone(grid.fixed)
    narrow = column([name == "fp8-mixed" or not float8 for name in grid.precisions], "precision") == 1
    return narrow & (np.asarray(grid.zero == stage) if stage else True)
