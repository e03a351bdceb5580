"""The best of each idea by replay: best first, and no further than what may still be better than what is known."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from memcalc.planner.finalists import SimulatedPlan, finalist, single_grid
from memcalc.planner.occasions import asked_for
from memcalc.planner.search import LEAST, SearchResult, Wanted
from memcalc.planner.stage_peaks import UnsafeError
from memcalc.terms.overhead import overhead_of

if TYPE_CHECKING:
    from memcalc.formulas.recompute import Policy
    from memcalc.planner.job import PlanJob
    from memcalc.planner.ranking import Idea
    from memcalc.planner.search import Candidate

MORE = 8
"""How many times as many strategies of each idea a search is asked for, where a replay refused all that it had."""
PATIENCE = 2
"""Strategies of an idea that may be refused before its smallest is asked for."""
CLEAR = 0.75
"""Share of what is safe up to which the closed form leaves little doubt that a replay lets a strategy run.

Were it wrong, more strategies would be replayed than have to be, and no answer would be another.
"""
Among = Callable[["Idea"], bool]
"""Which ideas are asked for."""


def any_idea(_: Idea) -> bool:
    """All of them."""
    return True


def resident(idea: Idea) -> bool:
    """Those that offload nothing."""
    return not idea.offload


@dataclass
class Shortlist:
    """What a search found for one number of GPUs, replayed as far as it is asked for."""

    job: PlanJob
    gpus: int
    wanted: Wanted
    outcome: SearchResult
    replays: int = 0
    """How many strategies were replayed."""
    _known: dict[tuple[object, ...], SimulatedPlan | None] = field(default_factory=dict)
    _refused: dict[tuple[object, ...], list[Candidate]] = field(default_factory=dict)
    _hopeless: set[Idea] = field(default_factory=set)
    """Ideas of which replays refused the smallest, and let nothing run."""

    def in_order(
        self, among: Among = any_idea, limit: float = inf, *, rank_all: bool = False
    ) -> Iterator[SimulatedPlan]:
        """The best of each idea (or all strategies) that a replay lets run, the lowest key first, none above a limit.

        No strategy is replayed before all that have a lower key were.
        """
        open_ideas = self.outcome.ideas.keys() - self._hopeless
        ideas = {
            idea: known for idea, known in self.outcome.ideas.items() if idea in open_ideas and known and among(idea)
        }
        heap = [(known[0].key, idea, 0) for idea, known in ideas.items()]
        heapq.heapify(heap)
        refused: Counter[Idea] = Counter()
        while heap and heap[0][0] <= limit:
            _, idea, index = heapq.heappop(heap)
            plan = self.replayed(self.outcome.ideas[idea][index])
            if plan is not None:
                yield plan
            refused[idea] += plan is None
            if plan is None and refused.total() == PATIENCE and not self._is_worth_more(ideas):
                return
            goes_on = rank_all if plan is not None else refused[idea] < PATIENCE or self._is_worth_more([idea])
            following = self._at(idea, index + 1) if goes_on else None
            if following is not None:
                heapq.heappush(heap, (following.key, idea, index + 1))

    def first(self, among: Among = any_idea, limit: float = inf) -> SimulatedPlan | None:
        """The best of all."""
        return next(self.in_order(among, limit), None)

    def may_run(self, ideas: Iterable[Idea]) -> bool:
        """Whether a replay lets one of the smallest run, of each kind of recomputation and offload.

        Where it refuses these, it refuses all others too.
        """
        return any(self.replayed(candidate) for candidate in self._least(ideas))

    def _is_worth_more(self, ideas: Iterable[Idea]) -> bool:
        """Whether more strategies of some ideas should be replayed; where not, none is asked for again."""
        ideas = list(ideas)
        if any(map(self._surely_runs, self._least(ideas))) or self.may_run(ideas):
            return True
        self._hopeless.update({*ideas} - {plan.candidate.idea for plan in self._known.values() if plan is not None})
        return False

    def _least(self, ideas: Iterable[Idea]) -> list[Candidate]:
        """The smallest of some ideas, of each kind of recomputation and offload."""
        kinds: dict[tuple[object, ...], list[Candidate]] = {}
        for idea in ideas:
            kinds.setdefault((idea.recompute, idea.offload), []).extend(self.outcome.least[idea])
        least = [c for known in kinds.values() for c in sorted(known, key=lambda c: c.reserved)[:LEAST]]
        return sorted(least, key=lambda c: c.reserved)

    def _surely_runs(self, candidate: Candidate) -> bool:
        """Whether the closed form leaves little doubt, and nothing beside the steps was asked for."""
        overhead = overhead_of(self.job.gpu, single_grid(candidate), candidate.layout)
        return not asked_for(candidate.grid.fixed) and candidate.reserved <= CLEAR * overhead.most_safe

    def _at(self, idea: Idea, index: int) -> Candidate | None:
        """A strategy of an idea by its place; the search is asked for more where it kept too few."""
        if index == len(self.outcome.ideas[idea]) and idea in self.outcome.cut:
            self._search_more()
        known = self.outcome.ideas[idea]
        return known[index] if index < len(known) else None

    def _search_more(self) -> None:
        self.wanted = replace(self.wanted, each=self.wanted.each * MORE)
        self.outcome = self.job.search([self.gpus], self.wanted)[self.gpus]

    def replayed(self, candidate: Candidate) -> SimulatedPlan | None:
        """A strategy with its replayed figures; None where it does not get the wanted verdict."""
        case = candidate.axes
        if case not in self._known:
            refused = self._refused.setdefault(_family(candidate), [])
            self._known[case] = (
                None if any(keeps_more(candidate, other) for other in refused) else self._replay(candidate)
            )
            if self._known[case] is None:
                refused.append(candidate)
        return self._known[case]

    def _replay(self, candidate: Candidate) -> SimulatedPlan | None:
        self.replays += 1
        try:
            plan = finalist(self.job, candidate, only_safe=not self.wanted.tight, only_whole=True)
        except UnsafeError:
            return None
        allowed = {"fits", "tight"} if self.wanted.tight else {"fits"}
        return plan if plan.peaks.verdict in allowed else None


def _family(candidate: Candidate) -> tuple[object, ...]:
    """What strategies share that :func:`keeps_more` compares."""
    grid, i = candidate.grid, candidate.index
    fixed = grid.fixed
    shared = fixed.optimizer, fixed.offload_to, fixed.global_batch, fixed.autocast, fixed.etp
    return (grid.layouts[i[0]], grid.precisions[i[2]], *shared)


def keeps_more(candidate: Candidate, other: Candidate) -> bool:
    """Whether a strategy surely needs no less memory than another of its family.

    It shards, recomputes and offloads nothing that the other does not, its micro-batch is no smaller, and its closed
    form says no less. But for FSDP's, stages are run by different optimizers, whose holes do not compare.
    """
    (g, i), (h, j) = ((c.grid, c.index) for c in (candidate, other))
    return (
        candidate.reserved >= other.reserved
        and (g.zeros[i[4]] <= h.zeros[j[4]] if g.habits.full_shard else g.zeros[i[4]] == h.zeros[j[4]])
        and set(g.offloads[i[5]]) <= set(h.offloads[j[5]])
        and g.micro_batches[i[6]] >= h.micro_batches[j[6]]
        and _recomputes_less(g.policies[i[3]], h.policies[j[3]])
    )


def _recomputes_less(policy: Policy, other: Policy) -> bool:
    """Whether whatever one policy computes again, the other one does too."""
    if policy.kind == other.kind == "every":
        return policy.count >= other.count
    if policy.kind == other.kind == "block":
        return policy.count <= other.count
    return policy.kind == "none" or policy == other


def shortlists(job: PlanJob, counts: list[int], wanted: Wanted) -> dict[int, Shortlist]:
    """A list for each number of GPUs that has any strategy."""
    return {gpus: Shortlist(job, gpus, wanted, outcome) for gpus, outcome in job.search(counts, wanted).items()}
