"""The search: every strategy of a space, its peak against the budget, its time; the best of each number of GPUs.

The full space appears in blocks that stay in a core's cache: a few sums, the comparison with the budget, the ranking.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from memcalc.grid import column
from memcalc.ledger import Ledger
from memcalc.planner.kept import Front, Kept
from memcalc.planner.objectives import Goal, Rank
from memcalc.planner.pipelines import rounds_fit
from memcalc.planner.rooms import rooms_of
from memcalc.planner.tally import Tally
from memcalc.sums import Foremost, Tree, leaf, total
from memcalc.terms import Census, overhead_of
from memcalc.terms.block_terms import activation_terms
from memcalc.terms.build import chosen_offloads, other_terms
from memcalc.terms.overhead import libraries_of
from memcalc.timing import Times, rates_for
from memcalc.timing.times import resident_times, with_offload

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid, Layout
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

CHUNK = 1_500_000
"""Strategies, each counted for every stage that is looked at, whose terms are held at once."""
ROWS = (2, 1 << 20)
"""Numbers of stages by which layouts are told apart, and in spaces above :data:`LARGE`, where overhead counts less.

Times are along an axis as long as the most stages of a class.
"""
FINE_ROWS = (1, 2, 3, 5, 8, 1 << 20)
LARGE = 3_000_000
BLOCK = 1 << 16
"""Strategies that are added up and compared at once."""
NEAR = 8
"""Percent by which the closed form may lie above a replay; up to 7 was seen."""
BOLD = 3
"""Strategies that are replayed although the closed form does not call them safe."""
MANY = 512
"""Candidates for the front above which a sample of them is looked at first."""
FAR = 2.0**60
"""More bytes than any strategy lacks: what does not fit on the GPU comes after all that does."""
APART = 300_000
"""Strategies above which it pays to evaluate offloaded activations apart from all else."""


@dataclass(frozen=True)
class Found:
    """One strategy of a grid by its indices, with its figures."""

    grid: Grid
    index: tuple[int, ...]
    reserved: int
    step: float
    times: dict[str, float]

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
    """What a search found for one number of GPUs: the best that fit, the front, the nearest to fitting, counts."""

    best: tuple[Found, ...]
    bold: tuple[Found, ...]
    """Faster ones that only a replay can call safe, the fastest first."""
    front: tuple[Found, ...]
    """Those that no other beats in both memory and time, the fastest first."""
    smallest: Found | None
    """None where no strategy of the space can run at all, whatever the GPU's memory."""
    cramped: Found | None
    """Where nothing fits: of those for which memory off the GPU does not suffice the nearest, on the GPU if any is."""
    searched: int
    feasible: int


@dataclass(frozen=True)
class Costs:
    """Figures of every strategy of a grid, as sums that are still to be made, and which strategies can run at all."""

    grid: Grid
    reserved: Foremost
    usable: Array
    """The largest reserved figure that fits, over the layouts."""
    safe: Array
    """The same at the upper end of the range."""
    times: Times
    step: Tree
    rooms: tuple[tuple[Foremost, Array], ...]
    """Bytes that one rank keeps in each memory off the GPU whose size is known, and what it may keep there."""
    allowed: Array
    """Strategies whose axes agree."""


def costs_of(model: Model, grid: Grid, gpu: GPU, node: Node) -> Costs:
    """The figures of a grid. Bytes are the largest over the stages, seconds those of the slowest."""
    return next(costs_apart(model, grid, gpu, node, [slice(None)]))


def costs_apart(model: Model, grid: Grid, gpu: GPU, node: Node, choices: list[slice]) -> Iterator[Costs]:
    """The figures of a grid, some of its offload axis at a time; what does not depend on activations' is made once."""
    rates, (flat, owners) = rates_for(gpu, grid), grid.flat
    others = other_terms(Census(model, flat), overhead_of(gpu, grid).workspaces)
    resident = resident_times(Census(model, grid), gpu, node, rates)
    usable, safe = limits(grid, gpu)
    for chosen in choices:
        part = grid.with_offloads(grid.offloads[chosen])
        own = Census(model, flat.with_offloads(part.offloads))
        terms = [*activation_terms(own, detail=False), *chosen_offloads(others, chosen)]
        times = with_offload(resident, Census(model, part), gpu, node, rates)
        step = total([leaf(seconds) for seconds in times.parts])
        rooms = tuple((Foremost(room.held, owners), room.most) for room in rooms_of(own, node, part))
        reserved = Foremost(Ledger(terms).tree(), owners)
        yield Costs(part, reserved, usable, safe, times, step, rooms, legal(part))


def limits(grid: Grid, gpu: GPU) -> tuple[Array, Array]:
    """The largest predictions that fit, and that fit at the upper end of their range, over the layouts [bytes]."""
    libraries = libraries_of(gpu)
    known = {libraries.of(layout): layout for layout in grid.layouts}
    alike = {key: overhead_of(gpu, grid, layout) for key, layout in known.items()}
    found = [alike[libraries.of(layout)] for layout in grid.layouts]
    shape = (len(found), 1, 1, 1, 1, 1, 1)
    usable = np.array([one.usable for one in found], dtype=np.int64).reshape(shape)
    return usable, np.array([one.safe for one in found], dtype=np.int64).reshape(shape)


def legal(grid: Grid) -> Array:
    """Strategies whose axes agree.

    The batch divides, and is one micro-batch where the optimizer steps in backward; parameters are offloaded only where
    they are sharded, and by DeepSpeed optimizer states too, to NVMe at stage 3 alone; what shards with FSDP alone has
    mixed precision only there; a pipeline engine has stages 0 and 1; micro-batches pass model chunks in whole rounds.
    """
    params = grid.offloaded("params") == 1
    sharded = np.asarray(grid.zero == 3) | (grid.habits.full_shard & (grid.zero == 2))
    unsharded_mixed = grid.habits.full_shard & (grid.zero == 0) & (grid.is_mixed == 1)
    able = grid.divides & (~params | sharded) & ~unsharded_mixed & _as_set(grid) & rounds_fit(grid)
    if grid.habits.pipeline_engine != "none":
        able = able & ((grid.degree("pp") == 1) | (grid.zero <= 1))
    if grid.habits.zero_optimizer is not None:
        lowest = 3 if grid.fixed.offload_to == "nvme" else 1
        able = able & ((grid.offloaded("optimizer") == 0) | grid.zero_from(lowest))
    return np.asarray(able & (grid.accumulation == 1) if grid.fixed.optimizer_in_backward else able)


def _as_set(grid: Grid) -> Array:
    """Strategies that agree with the fields of FSDP that were set."""
    stage = {"never": 2, "always": 3}.get(grid.fixed.reshard)
    float8 = bool(grid.fixed.float8 or grid.fixed.float8_all_gather)
    narrow = column([name == "fp8-mixed" or not float8 for name in grid.precisions], "precision") == 1
    return narrow & (np.asarray(grid.zero == stage) if stage else True)


def search(
    model: Model,
    grids: tuple[Grid, ...],
    gpu: GPU,
    node: Node,
    top: int,
    goal: Goal | None = None,
    tally: Tally | None = None,
) -> dict[int, Outcome]:
    """Evaluate all strategies; for each number of GPUs keep the ``top`` best that fit, tight ones last, and the front.

    The simplest of the fastest are found in a second pass, once the fastest is known. ``tally`` hears how far it is.
    """
    goal, tally = goal or Goal(), tally or Tally()
    found = _pass(model, grids, gpu, node, Rank(goal), top, tally)
    if goal.name == "simplicity":
        fastest = {
            gpus: min(s.best.entries[0].key for s in states if s.best.entries)
            for gpus, states in _by_count(found).items()
            if any(s.best.entries for s in states)
        }
        simple = _pass(model, grids, gpu, node, Rank(goal, fastest), top, tally)
        for case, state in found.items():
            state.best, state.bold = simple[case].best, simple[case].bold
    return {gpus: _outcome(states, top) for gpus, states in _by_count(found).items()}


def _by_count(found: dict[tuple[int, int], _State]) -> dict[int, list[_State]]:
    by_count: dict[int, list[_State]] = {}
    for (gpus, _), state in sorted(found.items()):
        by_count.setdefault(gpus, []).append(state)
    return by_count


def _outcome(states: list[_State], top: int) -> Outcome:
    """The states of one number of GPUs, which differ in the global batch, as one."""
    best = sorted((entry for state in states for entry in state.best.entries), key=lambda entry: entry.order)
    bold = sorted((entry for state in states for entry in state.bold.entries), key=lambda entry: entry.order)
    lowest = min(state.best.lowest for state in states)
    front = [entry.make() for state in states for entry in reversed(state.front.entries)]
    nearest = [entry for state in states for entry in (state.front.entries[:1] or state.nearest.entries)]
    cramped = [] if best else [entry for state in states for entry in state.cramped.entries]
    return Outcome(
        tuple(entry.make() for entry in best[:top]),
        tuple(entry.make() for entry in bold[:BOLD] if entry.key < lowest),
        tuple(front),
        min(nearest, key=lambda entry: entry.over).make() if nearest else None,
        min(cramped, key=lambda entry: entry.key).make() if cramped else None,
        sum(state.searched for state in states),
        sum(state.feasible for state in states),
    )


class _State:
    """What is kept of the strategies of one number of GPUs and one global batch."""

    def __init__(self, top: int, capacity: int) -> None:
        self.best: Kept[Found] = Kept(top)
        self.front: Front[Found] = Front(capacity)
        self.bold: Kept[Found] = Kept(BOLD)
        self.nearest: Kept[Found] = Kept(1)
        self.cramped: Kept[Found] = Kept(1)
        self.searched = self.feasible = 0

    def settle(self) -> None:
        """Read the figures of what was kept, so that the arrays of the part can go."""
        self.best.entries = [entry.settled() for entry in self.best.entries]
        self.bold.entries = [entry.settled() for entry in self.bold.entries]
        self.front.entries = [entry.settled() for entry in self.front.entries]
        self.nearest.entries = [entry.settled() for entry in self.nearest.entries]
        self.cramped.entries = [entry.settled() for entry in self.cramped.entries]


def _pass(
    model: Model, grids: tuple[Grid, ...], gpu: GPU, node: Node, rank: Rank, top: int, tally: Tally
) -> dict[tuple[int, int], _State]:
    """Every strategy once."""
    states: dict[tuple[int, int], _State] = {}
    tally.expect(sum(grid.size for grid in grids))
    for grid in grids:
        for part in parts_of(grid):
            choices = by_activations(part) if grid.size > APART else [slice(None)]
            for costs in costs_apart(model, part, gpu, node, choices):
                for rows in blocks(costs.grid):
                    case = part.layouts[rows.start].gpus, part.fixed.global_batch
                    state = states.setdefault(case, _State(top, gpu.memory_bytes))
                    _look(costs, rows, rank, state)
                for state in states.values():
                    state.settle()
                tally.add(costs.grid.size)
    return states


def parts_of(grid: Grid) -> Iterator[Grid]:
    """A grid in parts whose terms fit in memory.

    Of a large one layouts with few stages to look at stand apart from those with many.
    """
    for alike in _alike(grid) if grid.size > APART else (grid,):
        looked_at = sum(map(len, alike.rows)) * prod(alike.shape[2:])
        rows = -(-len(alike.layouts) // -(-looked_at // CHUNK))
        for first in range(0, len(alike.layouts), rows):
            yield alike.with_layouts(alike.layouts[first : first + rows])


def _alike(grid: Grid) -> Iterator[Grid]:
    classes = FINE_ROWS if grid.size > LARGE else ROWS
    by_rows: dict[int, list[Layout]] = {}
    for layout, stages in zip(grid.layouts, grid.rows, strict=True):
        by_rows.setdefault(next(most for most in classes if len(stages) <= most), []).append(layout)
    for layouts in by_rows.values():
        yield grid.with_layouts(tuple(layouts))


def by_activations(grid: Grid) -> list[slice]:
    """The offload axis in runs that offload activations or do not: no other term depends on both."""
    lengths = [len(list(run)) for _, run in groupby("activations" in choice for choice in grid.offloads)]
    return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]


def blocks(grid: Grid) -> Iterator[slice]:
    """Rows of layouts with one number of GPUs each, that stay in the cache."""
    counts = [layout.gpus for layout in grid.layouts]
    ends = [i for i, (a, b) in enumerate(pairwise(counts), 1) if a != b]
    rows = max(BLOCK // prod(grid.shape[1:]), 1)
    for start, end in pairwise((0, *ends, len(counts))):
        for first in range(start, end, rows):
            yield slice(first, min(first + rows, end))


def _look(costs: Costs, rows: slice, rank: Rank, state: _State) -> None:
    """One block of strategies: what fits, and what is better than all that is known."""
    shape = (rows.stop - rows.start, 1, *costs.grid.shape[2:])
    over = costs.reserved.rows(rows) - costs.usable[rows]
    allowed = costs.allowed if len(costs.allowed) == 1 else costs.allowed[rows]
    lacking = [held.rows(rows) - most[rows] for held, most in costs.rooms]
    roomy = allowed
    for short in lacking:
        roomy = roomy & (short <= 0)
    _look_beyond(costs, rows, rank, state, over, roomy)
    time = np.where((over <= 0) & roomy, costs.step.rows(rows), np.inf)
    over, time = (np.broadcast_to(array, shape).reshape(-1) for array in (over, time))
    state.searched += time.size
    fitting = int(np.count_nonzero(time < np.inf))
    state.feasible += fitting
    if fitting:
        key = rank.keys(costs.grid, rows, over, time)
        block = _Block(costs, rows, over, time)
        block.offer(state.best, np.flatnonzero(key < state.best.bound), key)
        ahead = state.front.ahead(over, time)
        if ahead.size > MANY:  # a few of them first leave few of the others
            block.offer(state.front, ahead[:: ahead.size // MANY + 1], time)
            ahead = ahead[state.front.ahead(over[ahead], time[ahead])]
        block.offer(state.front, ahead, time)
    elif not state.feasible:
        short = np.where(np.broadcast_to(roomy, shape).reshape(-1), over.astype(float), np.inf)
        block = _Block(costs, rows, over, np.broadcast_to(costs.step.rows(rows), shape).reshape(-1))
        block.offer(state.nearest, np.flatnonzero(short < state.nearest.bound), short)
        if lacking:
            missing = sum(np.maximum(short, 0) for short in lacking)
            missing = np.broadcast_to(np.where(allowed & ~roomy, missing, np.inf), shape).reshape(-1) + FAR * (over > 0)
            block.offer(state.cramped, np.flatnonzero(missing < state.cramped.bound), missing)


def _look_beyond(costs: Costs, rows: slice, rank: Rank, state: _State, over: Array, roomy: Array) -> None:
    """Faster strategies that the closed form does not call safe, but so nearly that a replay may."""
    edge, usable = (costs.safe - costs.usable)[rows], costs.usable[rows]
    near = (over > edge) & (over <= edge + usable // 100 * NEAR) & roomy
    if not near.any():
        return
    shape = (rows.stop - rows.start, 1, *costs.grid.shape[2:])
    time = np.broadcast_to(np.where(near, costs.step.rows(rows), np.inf), shape).reshape(-1)
    block = _Block(costs, rows, np.broadcast_to(over, shape).reshape(-1), time)
    key = rank.keys(costs.grid, rows, block.over, time)
    block.offer(state.bold, np.flatnonzero(key < min(state.bold.bound, state.best.lowest)), key, flagged=False)


@dataclass(frozen=True)
class _Block:
    """Figures of some rows of layouts, one entry a strategy."""

    costs: Costs
    rows: slice
    over: Array
    time: Array

    def offer(self, kept: Kept[Found] | Front[Found], chosen: Array, key: Array, *, flagged: bool = True) -> None:
        """Show what was chosen to what keeps some of it; where ``flagged`` those that are tight come last."""
        if not chosen.size:
            return
        costs, each = self.costs, self.over.size // (self.rows.stop - self.rows.start)
        room = (costs.safe - costs.usable)[self.rows].reshape(-1)[chosen // each]
        over = self.over[chosen]
        kept.offer((over > room) & flagged, key[chosen], over, lambda i: self.found(int(chosen[i])))

    def found(self, place: int) -> Found:
        """One strategy with its figures."""
        grid, (row, *index) = self.costs.grid, self._index(place)
        layout = self.rows.start + row

        whole = (layout, *index)
        parts = {name: float(leaf(getattr(self.costs.times, name)).at(whole)) for name in Times.PARTS}
        reserved = int(self.over[place] + self.costs.usable[layout].item())
        return Found(grid, whole, reserved, sum(parts.values()), parts)

    def _index(self, place: int) -> tuple[int, ...]:
        shape = (self.rows.stop - self.rows.start, 1, *self.costs.grid.shape[2:])
        return tuple(int(i) for i in np.unravel_index(place, shape))
