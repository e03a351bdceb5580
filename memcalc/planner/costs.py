"""The figures of every strategy of a grid: bytes against the budget, seconds, and which strategies can run at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.recompute import parse_policy
from memcalc.frameworks.float8 import optimizer_alone
from memcalc.grid import AXES, column
from memcalc.ledger import Ledger, MaxOverStages, Tree, computed, leaf, total
from memcalc.planner.budget import pools_of
from memcalc.planner.direct import free_of
from memcalc.planner.optimizers import width_without_zero
from memcalc.planner.pipelines import rounds_fit
from memcalc.terms.build import activation_terms, chosen_offloads, other_terms
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import kinds_of, libraries_of, overhead_of
from memcalc.terms.states import state_terms
from memcalc.timing import Times, rates_for, step_times
from memcalc.timing.times import resident_times, with_offload

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.planner.ranking import Objective
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model
    from memcalc.terms.overhead import Overhead


NEAR = 8
"""Percent beyond the limit up to which the closed form may put a strategy that a search still lets a replay decide on.

The same for every search, so that what one finds, another one over a wider space finds too.
"""
ROUNDING = 1e-9
"""Share by which sums of the same seconds in another order, and what is computed from them, may differ."""


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


def by_activations(grid: Grid) -> list[slice]:
    """The offload axis in runs that offload activations or do not: no other term depends on both."""
    lengths = [len(list(run)) for _, run in groupby("activations" in choice for choice in grid.offloads)]
    return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]


def layouts_at(grid: Grid, places: list[int], micro_batches: int | None = None) -> Grid:
    """A grid with the layouts at some places alone, and so many of its micro-batches."""
    rows, fewer = tuple(grid.rows[at] for at in places), grid.micro_batches[:micro_batches]
    alone = grid.with_layouts(tuple(grid.layouts[at] for at in places))
    return replace(alone, stages_looked_at=rows, micro_batches=fewer)


def may_fit(census: ModelOnGrid, gpu: GPU) -> Array:
    """Strategies of a grid that are legal, and whose states alone, without communicators, come near to fitting.

    States are a part of the sum of each phase, and no term is negative: all that there is beside them only adds to it.
    """
    grid, (rows, owners) = census.grid, census.grid.flat
    flat = census if rows is grid else census.with_layouts(rows)
    least, alone = computed(MaxOverStages(Ledger(state_terms(flat)).tree(), owners)), overhead_of(gpu, grid)
    usable = np.int64(alone.usable)
    for each in (flat, census):
        each.blocks_cache.release()
    return np.asarray(legal(grid) & (least <= usable + near(usable, safe_limits(grid, gpu, [alone]))))


def may_count(census: ModelOnGrid, gpu: GPU, node: Node, goal: Objective, most: float) -> Array:
    """Of the strategies that :func:`may_fit` those that a goal ranks by no larger key than ``most``."""
    fits = may_fit(census, gpu)
    if most == np.inf or not np.any(fits):
        return fits
    rows = np.flatnonzero(np.any(fits, axis=tuple(range(1, len(AXES)))))
    able = fits[rows]  # often a few layouts, whose steps alone are of interest
    part = census if len(able) == len(fits) else census.with_layouts(layouts_at(census.grid, rows.tolist()))
    step = step_times(part, gpu, node, rates_for(gpu, part.grid)).step
    able = able & (goal.key(part.grid, 0, step) <= most * (1 + ROUNDING))
    counts = np.zeros((len(census.grid.layouts), *able.shape[1:]), dtype=bool)
    counts[rows] = able
    return counts


def near(usable: Array, safe: Array) -> Array:
    """Bytes above what is usable up to which the closed form may put a strategy that a replay still may let run."""
    return np.asarray(np.maximum(safe - usable, 0) + usable // 100 * NEAR)


def limits(grid: Grid, gpu: GPU) -> tuple[Array, Array]:
    """The largest predictions that fit, and that fit at the upper end of the range of their kind of job [bytes].

    The former over the layouts, the latter over sharding stages and offloads too.
    """
    libraries = libraries_of(gpu, grid)
    ranks = [(a.gpus, a.dp, a.tp, a.pp, a.cp, a.ep, a.dp_replicate) for a in grid.layouts]
    sizes = {key: libraries.of(layout) for key, layout in dict(zip(ranks, grid.layouts, strict=True)).items()}
    known = {sizes[key]: layout for key, layout in zip(ranks, grid.layouts, strict=True)}
    alike = {size: overhead_of(gpu, grid, layout) for size, layout in known.items()}
    overheads = [alike[sizes[key]] for key in ranks]
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
