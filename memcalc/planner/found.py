"""What a search found beyond the plans that it lists: a sample of the strategies that fit, and their frontier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from memcalc.results.details import SearchedStrategy
from memcalc.terms.overhead import overhead_of

if TYPE_CHECKING:
    from memcalc.planner.job import PlanJob
    from memcalc.planner.search import Candidate, SearchResult
    from memcalc.terms import Overhead

MOST = 400
"""Strategies that are kept for a number of GPUs, those of the frontier aside."""


def searched_strategies(job: PlanJob, outcomes: Mapping[int, SearchResult]) -> Iterator[SearchedStrategy]:
    """Yield the frontier of each number of GPUs, and an even sample of the best of each idea."""
    known: dict[tuple[int, object], Overhead] = {}

    def device(candidate: Candidate) -> int:
        key = (id(candidate.grid), candidate.layout)
        if key not in known:
            known[key] = overhead_of(job.gpu, candidate.grid, candidate.layout)
        return known[key].device(candidate.reserved)

    for gpus, outcome in outcomes.items():
        listed = outcome.best
        for frontier, candidates in ((True, outcome.front), (False, listed[:: len(listed) // MOST + 1])):
            for candidate in candidates:
                speed = candidate.tokens_per_second_per_gpu
                yield SearchedStrategy(
                    gpus=gpus, device=device(candidate), tokens_per_second_per_gpu=speed, frontier=frontier
                )
