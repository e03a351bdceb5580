"""A job: what was asked for, on which model and hardware; and the searches over what it leaves open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from memcalc.errors import MissingError
from memcalc.planner import Tally, axes
from memcalc.planner.defaults import habits_for
from memcalc.planner.pipelines import check_layout
from memcalc.planner.request import Request
from memcalc.specs.options import RANK_DEGREES
from memcalc.terms import ModelOnGrid
from memcalc.trace.template import TraceCache

if TYPE_CHECKING:
    from memcalc.grid import Grid, Layout
    from memcalc.planner.search import SearchResult, Wanted
    from memcalc.planner.varying import JobLengths
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.model import Model

MOST_COUNTS = 64
"""Numbers of GPUs that one search tries."""
UNLIMITED = 2**50
"""Memory of a GPU on which everything fits [bytes]."""


@dataclass(frozen=True)
class PlanJob:
    """A checked request with its model, GPU and node."""

    request: Request
    model: Model
    gpu: GPU
    node: Node
    lengths: JobLengths | None = field(default=None, kw_only=True)
    """Where sequences differ in length: the request is about the longest."""
    tally: Tally | None = field(default=None, kw_only=True, compare=False)
    """What is told of how far a search is."""
    traces: TraceCache = field(default_factory=TraceCache, kw_only=True, compare=False, repr=False)
    """Blocks that were traced before; jobs that are made from this one share them."""
    _found: dict[int, SearchResult] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What the search that wants most has found, by the number of GPUs."""
    _spaces: dict[int, tuple[Grid, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What is searched, by the number of GPUs."""

    def on(self, grid: Grid) -> ModelOnGrid:
        """The model on a grid."""
        return ModelOnGrid(self.model, grid, self.traces)

    def counts(self) -> list[int]:
        """The numbers of GPUs that are wanted; by default 1, 2, 4, … of one node, as many as pinned degrees need."""
        given, choice = self.request.given, self.request.choices.get("gpus")
        if "gpus" in given:
            return [given["gpus"]]
        if choice is not None and choice.listed:
            return list(choice.listed)[:MOST_COUNTS]
        least = prod(given.get(name, 1) for name in RANK_DEGREES)
        most = max(self.node.gpus, least) if choice is None or choice.most is None else choice.most
        counts = [least << k for k in range(20) if least << k <= most]
        counts = [count for count in counts if choice is None or choice.takes(count)] or [max(most, 1)]
        self.request.assumptions["gpus"] = f"each of {', '.join(map(str, counts))}"
        return counts

    def size(self, gpus: int) -> int:
        """How many strategies a search on so many GPUs evaluates."""
        return sum(grid.size for grid in self._space(gpus))

    def search(self, counts: Iterable[int], wanted: Wanted | None = None) -> dict[int, SearchResult]:
        """The best strategies of each number of GPUs."""
        from memcalc.planner.search import search

        spaces = [self._space(gpus) for gpus in counts]
        grids = joined([grid for space in spaces for grid in space])
        outcomes = search(self.model, grids, self.gpu, self.node, wanted, self.tally, self.traces)
        if wanted is None or not (wanted.tight or wanted.trusting):
            self._found.update(outcomes)
        return outcomes

    def _space(self, gpus: int) -> tuple[Grid, ...]:
        if gpus not in self._spaces:
            self._spaces[gpus] = axes.space(self.request, self.model, self.gpu, self.node, gpus)
        return self._spaces[gpus]

    def known(self, gpus: int) -> SearchResult | None:
        """Counts, and what is nearest to fitting, of a search that wants a plan to fit; None where nothing is legal."""
        if gpus not in self._found:
            self.search([gpus])
        return self._found.get(gpus)

    def is_hopeful(self, gpus: int, *, resident: bool = False) -> bool:
        """Whether a search that wants less may find more than one that was made before found, on so many GPUs.

        ``resident``: more that offloads nothing.
        """
        known = self._found.get(gpus)
        return known is None or (known.resident_hopeful if resident else known.hopeful)

    def pinned(self, **options: Any) -> PlanJob:
        """The same job with some words pinned; its assumptions are its own."""
        choices = {name: choice for name, choice in self.request.choices.items() if name not in options}
        given = {**self.request.given, **options}
        return replace(self, request=replace(self.request, given=given, assumptions={}, choices=choices))

    def freed(self, *names: str) -> PlanJob:
        """The same job with some words left open."""
        given = {name: value for name, value in self.request.given.items() if name not in names}
        choices = {name: choice for name, choice in self.request.choices.items() if name not in names}
        return replace(self, request=replace(self.request, given=given, assumptions={}, choices=choices))

    def unlimited(self) -> PlanJob:
        """The same job on a GPU with memory for everything."""
        return replace(self, gpu=self.gpu.model_copy(update={"memory_bytes": UNLIMITED}))

    def refuse(self, counts: list[int]) -> None:
        """Say why no layout is legal: the error of the first pinned degree that cannot be."""
        pinned = Request({**self.request.given, "gpus": counts[-1]})
        longest = self.request.given.get("seq_len", self.model.max_positions)
        habits = habits_for(pinned)[1]
        layout, split = axes.one_layout(pinned, habits, self.model), self.request.given.get("fields", {}).get("etp", 0)
        check_layout(self.model, layout, longest, split, alone=habits.flat_units)
        raise MissingError(f"no valid layout for {self.model.name} on {counts[-1]} GPUs: give --gpus.")


def joined(grids: Iterable[Grid]) -> tuple[Grid, ...]:
    """Grids that differ in their layouts alone as one: what they share is computed once."""
    alike: dict[Grid, list[Layout]] = {}
    for grid in grids:
        alike.setdefault(replace(grid, layouts=()), []).extend(grid.layouts)
    return tuple(replace(grid, layouts=tuple(layouts)) for grid, layouts in alike.items())
