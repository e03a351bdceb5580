"""The search: every strategy of a space, its peak against the budget, its time; the best of each number of GPUs.

The full space appears in blocks that stay in a core's cache: a few sums, the comparison with the budget, the ranking.
"""

from __future__ import annotations

import gc
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.grid import AXES, column
from memcalc.planner import Tally
from memcalc.planner.costs import NEAR, Costs, by_activations, costs_apart, layouts_at, may_count, near
from memcalc.planner.ranking import Idea, Ideas, Objective, Offered, ParetoFront, Ranked, TopByIdea, TopK, ideas_of
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.trace.template import TraceCache

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid, Layout
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

CHUNK = 600_000
"""Strategies, each counted for every stage that is looked at, whose terms are held at once."""
SMALL_CHUNK = 125_000
"""The same of the states alone, most of whose terms have all of a part's axes."""
ROWS = (2, 1 << 20)
"""Numbers of stages by which layouts are told apart, and in spaces above :data:`LARGE`, where overhead counts less.

Times are along an axis as long as the most stages of a class.
"""
FINE_ROWS = (1, 2, 3, 5, 8, 1 << 20)
LARGE = 3_000_000
BLOCK = 1 << 16
"""Strategies that are added up and compared at once."""
EACH = 24
"""Strategies of an idea that a search keeps; where a replay refuses all of them, it is asked again for more."""
LEAST = 2
"""The smallest of an idea that a search keeps: where a replay refuses these, it refuses all others."""
MANY = 512
"""Candidates for the front above which a sample of them is looked at first."""
FAR = 2.0**60
"""More bytes than any strategy lacks: what does not fit on the GPU comes after all that does."""
BOUNDED = 50_000
"""Strategies above which it pays to tell first what cannot fit."""
APART = 300_000
"""Strategies above which it pays to evaluate offloaded activations apart from all else."""


@dataclass(frozen=True)
class Candidate:
    """One strategy of a grid by its indices, with its figures."""

    grid: Grid
    index: tuple[int, ...]
    reserved: int
    step: float
    key: float
    """What it is ranked by; the lower, the better."""
    idea: Idea
    """Its kinds of parallelism, recomputation and offload."""

    @property
    def layout(self) -> Layout:
        """The parallel layout."""
        return self.grid.layouts[self.index[0]]

    @cached_property
    def axes(self) -> tuple[object, ...]:
        """What tells it from all other strategies of a job on as many GPUs; the micro-batch comes last."""
        grid, i = self.grid, self.index
        fixed = grid.fixed
        shared = fixed.optimizer, fixed.offload_to, fixed.global_batch, fixed.autocast, fixed.etp
        axes = grid.layouts[i[0]], grid.precisions[i[2]], grid.recomputes[i[3]], grid.zeros[i[4]], grid.offloads[i[5]]
        return (*shared, *axes, grid.micro_batches[i[6]])

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Throughput of one GPU [tokens/s]."""
        fixed = self.grid.fixed
        return fixed.global_batch * fixed.seq_len / self.step / self.layout.gpus


@dataclass(frozen=True)
class SearchResult:
    """What a search found for one number of GPUs: the best of each idea, the fronts, the nearest to fitting, counts."""

    ideas: Mapping[Idea, tuple[Candidate, ...]]
    """Of each idea the best that a replay may let run, the lowest key first."""
    cut: frozenset[Idea]
    """Ideas of which there are more."""
    least: Mapping[Idea, tuple[Candidate, ...]]
    """Of each idea the smallest."""
    front: tuple[Candidate, ...]
    """Those that no other beats in both memory and time, the fastest first."""
    resident: tuple[Candidate, ...]
    """The same of those that offload nothing."""
    smallest: Candidate | None
    """None where no strategy of the space can run at all, whatever the GPU's memory."""
    host_limited: Candidate | None
    """Where nothing fits: of those for which memory off the GPU does not suffice the nearest, on the GPU if any is."""
    searched: int
    bounded: int
    """Of them those that were not evaluated, since their states alone do not come near to fitting."""
    feasible: int
    hopeful: bool = True
    """Whether any strategy comes near enough to be let run if tight ones count, and memory off the GPU has no end."""
    resident_hopeful: bool = True
    """The same of those that offload nothing."""

    @property
    def best(self) -> tuple[Candidate, ...]:
        """Of all ideas the best, the lowest key first."""
        return tuple(sorted((c for known in self.ideas.values() for c in known), key=lambda c: (c.key, c.reserved)))


@dataclass(frozen=True)
class Wanted:
    """What is kept of a search: the goal, how many of each idea, and which limit they may come near to."""

    goal: Objective = field(default_factory=Objective)
    each: int = EACH
    tight: bool = False
    """Whether those count too that fit as predicted only."""
    trusting: bool = False
    """Whether a memory off the GPU of unknown size is taken to be large enough."""
    most: float = np.inf
    """The largest key that is of any use; of a large space what has a larger one is not evaluated."""


def search(
    model: Model,
    grids: tuple[Grid, ...],
    gpu: GPU,
    node: Node,
    wanted: Wanted | None = None,
    tally: Tally | None = None,
    traces: TraceCache | None = None,
) -> dict[int, SearchResult]:
    """Evaluate all strategies; for each number of GPUs keep the best of each idea that a replay may let run.

    ``tally`` hears how far it is; ``traces`` are the blocks that the job has traced before.
    """
    wanted, tally, traces = wanted or Wanted(), tally or Tally(), traces or TraceCache()
    spaces = [ModelOnGrid(model, grid, traces) for grid in grids]
    many = sum(space.grid.size for space in spaces) > BOUNDED
    by_count = _states_of(spaces, gpu, node, wanted, tally, bounded=many)
    empty = {gpus for gpus, states in by_count.items() if many and not any(state.feasible for state in states)}
    if many:
        gc.collect(0)  # arrays of the parts lie in circles, which the command line seldom looks for
    if empty and wanted.most == np.inf:  # what comes nearest to fitting may be anything
        left = [space.with_layouts(part) for space in spaces for part in _on(space.grid, empty)]
        by_count |= _states_of(left, gpu, node, wanted, tally, bounded=False)
    return {gpus: _outcome(states, wanted.each) for gpus, states in sorted(by_count.items())}


def _states_of(
    spaces: list[ModelOnGrid], gpu: GPU, node: Node, wanted: Wanted, tally: Tally, *, bounded: bool
) -> dict[int, list[_State]]:
    """What is kept of some spaces, by the number of GPUs; ``bounded``: what surely fits nowhere near is left out."""
    states: dict[tuple[int, int], _State] = {}
    tally.expect(sum(space.grid.size for space in spaces))
    for space in spaces:
        grid, left = space.grid, space.grid.size
        for gpus, layouts in Counter(layout.gpus for layout in grid.layouts).items():
            state = states.setdefault((gpus, grid.fixed.global_batch), _State(wanted.each, gpu.memory_bytes))
            state.searched += layouts * prod(grid.shape[2:])
        for open_ in _bounded(space, gpu, node, wanted) if bounded else [space]:
            left -= open_.grid.size
            for part in parts_of(open_.grid):
                _search_part(open_.with_layouts(part), gpu, node, wanted, states, tally)
        tally.add(left)
    by_count: dict[int, list[_State]] = {}
    for (gpus, _), state in sorted(states.items(), key=operator.itemgetter(0)):
        by_count.setdefault(gpus, []).append(state)
    return by_count


def _bounded(space: ModelOnGrid, gpu: GPU, node: Node, wanted: Wanted) -> Iterator[ModelOnGrid]:
    """The layouts of a space, and their micro-batches, with which anything may come near to fitting, fast enough."""
    grid, others = space.grid, tuple(range(1, len(AXES) - 1))
    rows = max(SMALL_CHUNK * len(grid.recomputes) // prod(grid.shape[1:]), 1)  # states are alike for all policies
    places = [list(range(len(grid.layouts))[first : first + rows]) for first in range(0, len(grid.layouts), rows)]
    parts = (space.with_layouts(layouts_at(grid, part)) for part in places)
    able = np.concatenate([np.any(may_count(part, gpu, node, wanted.goal, wanted.most), axis=others) for part in parts])
    if np.any(able):
        near, largest = np.flatnonzero(np.any(able, axis=1)).tolist(), int(np.flatnonzero(np.any(able, axis=0))[-1])
        yield ModelOnGrid(space.model, layouts_at(grid, near, largest + 1), space.traces)


def _on(grid: Grid, counts: set[int]) -> Iterator[Grid]:
    """A grid with its layouts of some numbers of GPUs alone."""
    places = [at for at, layout in enumerate(grid.layouts) if layout.gpus in counts]
    if places:
        yield layouts_at(grid, places)


def _search_part(
    space: ModelOnGrid, gpu: GPU, node: Node, wanted: Wanted, states: dict[tuple[int, int], _State], tally: Tally
) -> None:
    part = space.grid
    choices = by_activations(part) if part.size > APART else [slice(None)]
    for costs in costs_apart(space, gpu, node, choices, trusting=wanted.trusting):
        ideas = ideas_of(costs.grid, node.gpus, routed=space.model.is_moe)
        for rows in blocks(costs.grid):
            case = part.layouts[rows.start].gpus, part.fixed.global_batch
            _scan(costs, rows, wanted, ideas, states[case])
        tally.add(costs.grid.size)


def _outcome(states: list[_State], each: int) -> SearchResult:
    """The states of one number of GPUs, which differ in the global batch, as one."""
    ideas = _merged([state.ideas for state in states])
    least = _merged([state.least for state in states])
    feasible = sum(state.feasible for state in states)
    nearest = [entry for state in states for entry in (state.front.entries[:1] or state.nearest.entries)]
    host_limited = [] if feasible else [entry for state in states for entry in state.host_limited.entries]
    return SearchResult(
        ideas,
        frozenset(idea for idea, known in ideas.items() if len(known) == each),
        least,
        tuple(entry.made() for state in states for entry in reversed(state.front.entries)),
        tuple(entry.made() for state in states for entry in reversed(state.resident.entries)),
        min(nearest, key=lambda entry: entry.over).made() if nearest else None,
        min(host_limited, key=lambda entry: entry.key).made() if host_limited else None,
        sum(state.searched for state in states),
        sum(state.searched - state.evaluated for state in states),
        feasible,
        any(state.hopeful for state in states),
        any(state.resident_hopeful for state in states),
    )


def _merged(tops: list[TopByIdea[Candidate]]) -> dict[Idea, tuple[Candidate, ...]]:
    """The best of each idea over the states."""
    lists: dict[Idea, list[Ranked[Candidate]]] = {}
    for top in tops:
        for idea, entries in top.entries.items():
            lists.setdefault(idea, []).extend(entries)
    most, first = tops[0].count, operator.attrgetter("key", "over")
    return {idea: tuple(e.made() for e in sorted(lists[idea], key=first)[:most]) for idea in sorted(lists)}


class _State:
    """What is kept of the strategies of one number of GPUs and one global batch."""

    def __init__(self, each: int, capacity: int) -> None:
        self.ideas: TopByIdea[Candidate] = TopByIdea(each)
        self.least: TopByIdea[Candidate] = TopByIdea(LEAST)
        self.front: ParetoFront[Candidate] = ParetoFront(capacity)
        self.resident: ParetoFront[Candidate] = ParetoFront(capacity)
        self.nearest: TopK[Candidate] = TopK(1)
        self.host_limited: TopK[Candidate] = TopK(1)
        self.searched = self.evaluated = self.feasible = 0
        self.hopeful = self.resident_hopeful = False


def parts_of(grid: Grid) -> Iterator[Grid]:
    """A grid in parts whose terms fit in memory.

    Of a large one layouts with few stages to look at stand apart from those with many.
    """
    for alike in _alike(grid) if grid.size > APART else (grid,):
        looked_at = sum(map(len, alike.rows)) * prod(alike.shape[2:])
        rows = -(-len(alike.layouts) // -(-looked_at // CHUNK))
        for first in range(0, len(alike.layouts), rows):
            yield layouts_at(alike, list(range(first, min(first + rows, len(alike.layouts)))))


def _alike(grid: Grid) -> Iterator[Grid]:
    classes = FINE_ROWS if grid.size > LARGE else ROWS
    by_rows: dict[int, list[int]] = {}
    for at, stages in enumerate(grid.rows):
        by_rows.setdefault(next(most for most in classes if len(stages) <= most), []).append(at)
    for places in by_rows.values():
        yield layouts_at(grid, places)


def blocks(grid: Grid) -> Iterator[slice]:
    """Rows of layouts with one number of GPUs each, that stay in the cache."""
    counts = [layout.gpus for layout in grid.layouts]
    ends = [i for i, (a, b) in enumerate(pairwise(counts), 1) if a != b]
    rows = max(BLOCK // prod(grid.shape[1:]), 1)
    for start, end in pairwise((0, *ends, len(counts))):
        for first in range(start, end, rows):
            yield slice(first, min(first + rows, end))


def _scan(costs: Costs, rows: slice, wanted: Wanted, ideas: Ideas, state: _State) -> None:
    """One block of strategies: what fits or may, and what is better than all that is known."""
    shape = (rows.stop - rows.start, 1, *costs.grid.shape[2:])
    over = costs.reserved.rows(rows) - costs.usable[rows]
    allowed = costs.allowed if len(costs.allowed) == 1 else costs.allowed[rows]
    lacking = [need.rows(rows) - most[rows] for need, most in costs.rooms]
    roomy = allowed
    for short in lacking:
        roomy = roomy & (short <= 0)
    usable = costs.usable[rows]
    edge = (usable if wanted.tight else costs.safe[rows]) - usable + usable // 100 * NEAR
    step = costs.step.rows(rows)
    time, able = np.where((over <= 0) & roomy, step, np.inf), np.where((over <= edge) & roomy, step, np.inf)
    hopeful = (over <= near(usable, costs.safe[rows])) & allowed
    resident = column([not choice for choice in costs.grid.offloads], "offload") == 1
    state.hopeful = state.hopeful or bool(np.any(hopeful))
    state.resident_hopeful = state.resident_hopeful or bool(np.any(hopeful & resident))
    over, time, able = (np.broadcast_to(array, shape).reshape(-1) for array in (over, time, able))
    block = _Block(costs, rows, over, np.broadcast_to(step, shape).reshape(-1), ideas, wanted.goal)
    block.offer_ideas(state, able)
    state.evaluated += time.size
    fitting = int(np.count_nonzero(time < np.inf))
    state.feasible += fitting
    if fitting:
        block.offer_front(state.front, time)
        block.offer_front(state.resident, np.where(np.broadcast_to(resident, shape).reshape(-1), time, np.inf))
    elif not state.feasible:
        short = np.where(np.broadcast_to(roomy, shape).reshape(-1), over.astype(float), np.inf)
        block.offer(state.nearest, np.flatnonzero(short < state.nearest.bound), short)
        if lacking:
            missing = sum(np.maximum(short, 0) for short in lacking)
            missing = np.broadcast_to(np.where(allowed & ~roomy, missing, np.inf), shape).reshape(-1) + FAR * (over > 0)
            block.offer(state.host_limited, np.flatnonzero(missing < state.host_limited.bound), missing)


@dataclass(frozen=True)
class _Block:
    costs: Costs
    rows: slice
    over: Array
    time: Array
    ideas: Ideas
    goal: Objective

    def offer(self, top: TopK[Candidate] | ParetoFront[Candidate], chosen: Array, key: Array) -> None:
        """Show what was chosen to what keeps some of it."""
        if chosen.size:
            top.offer(key[chosen], self._offered(chosen))

    def offer_front(self, front: ParetoFront[Candidate], time: Array) -> None:
        """Show all to a front."""
        ahead = front.ahead(self.over, time)
        if ahead.size > MANY:  # a few of them first leave few of the others
            self.offer(front, ahead[:: ahead.size // MANY + 1], time)
            ahead = ahead[front.ahead(self.over[ahead], time[ahead])]
        self.offer(front, ahead, time)

    def offer_ideas(self, state: _State, time: Array) -> None:
        """Show to the best of each idea, and to the smallest, those that may be among them."""
        usable = np.broadcast_to(self.costs.usable[self.rows], self._shape).reshape(-1)
        numbers, able, reserved = self.ideas.numbers(self.rows, self._shape), time < np.inf, self.over + usable
        for top, wanted in ((state.ideas, self.goal.key(self.costs.grid, reserved, time)), (state.least, reserved)):
            key = np.where(able, wanted, np.inf)
            chosen = np.flatnonzero(key < top.bounds(self.ideas.all)[numbers])
            if chosen.size:
                top.offer(self.ideas.all, numbers[chosen], key[chosen], self._offered(chosen))

    def _offered(self, chosen: Array) -> Offered[Candidate]:
        return Offered(chosen, self.over[chosen], self.time, self._finder.candidate)

    @cached_property
    def _finder(self) -> _Finder:
        return _Finder(self.costs.grid, self.rows.start, self._shape, self.costs.usable, self.ideas, self.goal)

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        return (self.rows.stop - self.rows.start, 1, *self.costs.grid.shape[2:])


class _Finder(NamedTuple):
    """What tells a strategy by its place in a block, without the arrays of the part, which can go."""

    grid: Grid
    first: int
    """The block's first layout."""
    shape: tuple[int, ...]
    usable: Array
    ideas: Ideas
    goal: Objective

    def candidate(self, position: int, over: int, step: float) -> Candidate:
        """One strategy with its figures."""
        grid, rest, places = self.grid, position, [0] * len(self.shape)
        for axis in range(len(places) - 1, 0, -1):
            rest, places[axis] = divmod(rest, self.shape[axis])
        indices = (self.first + rest, *places[1:])
        reserved = over + int(self.usable[indices[0]].item())
        return Candidate(grid, indices, reserved, step, self.goal.key(grid, reserved, step), self.ideas.at(indices))
