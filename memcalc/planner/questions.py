"""Each inverse question: which values are asked, and what is open beside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memcalc.errors import CombinationError, InputError
from memcalc.formulas.census import model_count
from memcalc.planner import request as rq
from memcalc.planner.axes import MICRO_BATCHES, SHORTEST_PART
from memcalc.planner.columns import Confirmed, Inquiry, Part, Replays, evaluate, ordered, states_fit
from memcalc.planner.inverse import Question, Search, Solution, fastest
from memcalc.planner.inverse_answer import Asked, answer_of, fit_of, miss_of, point_of

if TYPE_CHECKING:
    from memcalc import results
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.planner.tally import Listener

LISTED = 5
"""Models listed that are larger than the one that fits."""
POINTS = 16
"""Values of a curve between the first and the last."""
FURTHER = 1.25
"""How far a curve goes beyond the answer."""
NODES = 8
"""Nodes up to which the fewest GPUs are searched for."""


def longest(job: Inquiry, asked: Asked, gpus: int) -> results.Inverse:
    """The largest sequence length that fits."""
    if job.model.fixed_tokens.get(job.model.main.tower) is not None:
        raise InputError("max", "seq-len", f"{job.model.name} sees the same number of tokens of every sample")
    learned = job.model.positions == "learned"
    most = job.model.max_positions if learned else rq.LARGEST_NUMBER["seq_len"]
    grids = opened(job, gpus, min(most, gpus * SHORTEST_PART))  # long enough for every number of parts
    least = min(layout.cp for grid in grids for layout in grid.layouts)
    first = -(-least // asked.step) * asked.step
    values = range(first, most + 1, asked.step)
    if not values:
        raise InputError("step", asked.step, f"must be at most the {most:,} positions of {job.model.name}")
    outside = (
        f"{job.model.name} has learned positions for {most} tokens" if learned else f"no more than {most:,} are asked"
    )
    return _over(job, asked, Question(values, micro_batches=smallest_batches(job)), grids, gpus, outside)


def widest(job: Inquiry, asked: Asked, gpus: int) -> results.Inverse:
    """The largest micro-batch that fits."""
    seq_len = rq.sequence_length(job.request, job.model)
    grids = opened(job, gpus, seq_len)
    batch = job.batch[0]
    values: Sequence[int] = range(asked.step, rq.LARGEST_NUMBER["micro_batch"] + 1, asked.step)
    if batch:
        ranks = {layout.dp for grid in grids for layout in grid.layouts}
        values = [m for m in divisors(batch) if m % asked.step == 0 and any(batch % (m * dp) == 0 for dp in ranks)]
    outside = f"a larger one does not divide the global batch of {batch}" if batch else "no more are asked"
    if not values:
        allowed = "no micro-batch times the data-parallel ranks divides it"
        raise CombinationError("global-batch", batch, allowed)
    return _over(job, asked, Question(values, seq_len=seq_len), grids, gpus, outside)


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def opened(job: Inquiry, gpus: int, seq_len: int) -> list[Grid]:
    """The grids of what is open, or the reason why nothing is."""
    grids = job.open([gpus], seq_len)
    if not grids:
        raise CombinationError(
            "gpus", gpus, f"no parallel layout of them with these words is legal for {job.model.name}"
        )
    return grids


def smallest_batches(job: Inquiry) -> tuple[int, ...]:
    """Micro-batches that may need least memory: one sequence, unless the batch is given, where accumulation counts."""
    pinned, batch = job.request.given.get("micro_batch"), job.batch[0]
    if pinned is not None:
        return (pinned,)
    return tuple(m for m in MICRO_BATCHES if batch % m == 0) if batch else (1,)


def _over(
    job: Inquiry, asked: Asked, question: Question, grids: list[Grid], gpus: int, outside: str
) -> results.Inverse:
    search = Search(job, question, grids)
    solution = search.solve()
    if solution.best is None and solution.beyond is None:
        raise CombinationError("gpus", gpus, "no strategy of these words is legal on them; leave one of them open")
    fit = None
    if solution.best is not None:
        fit = fit_of(job, solution.best, question.values[solution.place], asked.base)
    beyond: tuple[results.Miss, ...] = ()
    if solution.beyond is not None:
        beyond = (miss_of(solution.beyond, question.values[solution.place + 1], safe=job.safe),)
    curve = tuple(_curve(search, solution)) if asked.curve else ()
    return answer_of(
        job, asked, fit, beyond, gpus=gpus, outside="" if beyond else outside, curve=curve,
        searched=solution.searched, replayed=solution.replayed,
    )  # fmt: skip


def _curve(search: Search, solution: Solution) -> Iterator[results.CurvePoint]:
    """The answer's strategy (or that nearest to one) at values from the first to some beyond the answer."""
    known, values = solution.best or solution.beyond, search.question.values
    if known is None:
        return
    last = max(solution.place, 0)
    most = FURTHER * values[last]
    spread = {bisect_left(values, round(values[0] + (most - values[0]) * k / POINTS)) for k in range(POINTS + 1)}
    for place in sorted({0, last, last + 1, last + 2} | spread):
        found = search.at(known.candidate, place) if place < len(values) else None
        if found is not None:
            yield point_of(found, values[place])


class Tried:
    """One model, or one number of GPUs: whether any open strategy fits, and which is the fastest."""

    def __init__(self, job: Inquiry, grids: Sequence[Grid], seq_len: int) -> None:
        self.job, self.grids, self.seq_len = job, grids, seq_len
        self.replays = Replays(job)
        self.searched = 0

    def parts(self, micro_batches: Sequence[int]) -> list[Part]:
        """All open strategies at some micro-batches."""
        found = evaluate(self.job, self.grids, [(micro, self.seq_len) for micro in micro_batches])
        self.searched += (size := sum(part.reserved.size for part in found))
        if self.job.tally is not None:
            self.job.tally.add(size)
        return found

    def first(self, parts: Sequence[Part], gpus: int = 0) -> Confirmed | None:
        """A strategy that fits."""
        open_ = ordered(parts, lambda part: part.fitting(safe=self.job.safe, closed=False) & _of(part, gpus))
        found = next((c for c in open_ if self.replays.fits(c)), None)
        return self.replays.of(found) if found else None

    def nearest(self, parts: Sequence[Part], gpus: int = 0) -> Confirmed | None:
        """The strategy that needs least."""
        open_ = ordered(parts, lambda part: np.broadcast_to(part.allowed, part.shape) & _of(part, gpus))
        return next((found for c in open_ if (found := self.replays.reported(c))), None)

    def best(self, known: Confirmed) -> Confirmed:
        """The fastest on as many GPUs as a strategy that is known to fit, over all micro-batches."""
        gpus = known.candidate.layout.gpus
        pinned = self.job.request.given.get("micro_batch")
        here = [
            replace(grid, layouts=tuple(layout for layout in grid.layouts if layout.gpus == gpus))
            for grid in self.grids
            if any(layout.gpus == gpus for layout in grid.layouts)
        ]
        parts = Tried(self.job, here, self.seq_len).parts(MICRO_BATCHES if pinned is None else [pinned])
        found = fastest(self.job, self.replays, parts) or known.candidate
        return self.replays.reported(found) or known


def _of(part: Part, gpus: int) -> Array:
    """Layouts of a number of GPUs, or all."""
    return np.asarray(part.grid.degree("gpus") == gpus) if gpus else np.ones((1,) * 7, dtype=bool)


def fewest(job: Inquiry, asked: Asked, counts: Sequence[int]) -> results.Inverse:
    """The smallest number of GPUs on which a strategy fits: one grid over all of them."""
    seq_len = rq.sequence_length(job.request, job.model)
    grids = job.open(counts, seq_len)
    tried = Tried(job, grids, seq_len)
    parts = tried.parts(smallest_batches(job))
    known = next((found for gpus in counts if (found := tried.first(parts, gpus))), None)
    fewer = [gpus for gpus in counts if known is None or gpus < known.candidate.layout.gpus]
    near = next((found for gpus in reversed(fewer) if (found := tried.nearest(parts, gpus))), None)
    if known is None and near is None:
        raise CombinationError("gpus", counts[-1], f"no strategy of these words is legal for {job.model.name}")
    beyond = (miss_of(near, near.candidate.layout.gpus, safe=job.safe),) if near else ()
    best = tried.best(known) if known else None
    fit = fit_of(job, best, best.candidate.layout.gpus, asked.base) if best else None
    return answer_of(
        job, asked, fit, beyond, gpus=int(fit.value) if fit else counts[-1],
        outside="fewer GPUs are not asked" if fit else f"nothing fits on up to {counts[-1]} GPUs",
        searched=tried.searched, replayed=len(tried.replays.known),
    )  # fmt: skip


def counts_up_to(most: int, node_gpus: int, *, every: bool) -> list[int]:
    """Numbers of GPUs that are asked: powers of two within a node, then whole nodes, or all.

    >>> counts_up_to(32, 8, every=False), counts_up_to(3, 8, every=True)
    ([1, 2, 4, 8, 16, 24, 32], [1, 2, 3])
    """
    if every:
        return list(range(1, most + 1))
    within = [1 << k for k in range(node_gpus.bit_length()) if 1 << k < node_gpus]
    return [n for n in [*within, *range(node_gpus, most + 1, node_gpus)] if n <= most]


def biggest(jobs: Sequence[tuple[Inquiry, Asked]], gpus: int, listener: Listener | None = None) -> results.Inverse:
    """The model with most parameters that fits; ``jobs`` come with the largest first.

    ``listener`` is told of each model that is begun.
    """
    missed: list[tuple[Inquiry, Tried, list[Grid]]] = []
    searched = replayed = 0
    found: tuple[Inquiry, Asked, Confirmed] | None = None
    for place, (job, asked) in enumerate(jobs):
        if listener is not None:
            listener(place, len(jobs))
        try:
            seq_len = rq.sequence_length(job.request, job.model)
            grids = job.open([gpus], seq_len)
        except CombinationError:
            continue
        tried = Tried(job, grids, seq_len)
        if grids and states_fit(job, grids, smallest_batches(job)[0], seq_len):
            known = tried.first(tried.parts(smallest_batches(job)))
            searched, replayed = searched + tried.searched, replayed + len(tried.replays.known)
            if known is not None:
                found = job, asked, tried.best(known)
                break
        if grids:
            missed.append((job, tried, grids))
    if found is None and not missed:
        raise CombinationError("max", "model", "no model is possible with these words")
    beyond = tuple(miss for job, tried, _ in missed[-LISTED:][::-1] if (miss := _missed(job, tried)))
    job, asked = found[:2] if found else (missed[-1][0], jobs[-1][1])
    asked = replace(asked, started=jobs[0][1].started)
    fit = fit_of(job, found[2], job.model.name, asked.base) if found else None
    return answer_of(
        job, asked, fit, beyond, gpus=gpus, outside="" if beyond else "no larger model is among those asked",
        searched=searched, replayed=replayed,
    )  # fmt: skip


def _missed(job: Inquiry, tried: Tried) -> results.Miss | None:
    near = tried.nearest(tried.parts(smallest_batches(job)))
    count = model_count(job.model).total
    return miss_of(near, job.model.name, safe=job.safe, parameters=count) if near else None


__all__ = ["Asked", "biggest", "counts_up_to", "divisors", "fewest", "longest", "widest"]
