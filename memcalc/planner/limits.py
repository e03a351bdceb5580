"""Each inverse question: which values are asked, and what is open beside them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from memcalc import catalog
from memcalc.errors import CombinationError, InputError, MemcalcError, UnknownNameError
from memcalc.frameworks.capability import SPLITS
from memcalc.planner import defaults
from memcalc.planner import request as rq
from memcalc.planner.axes import SHORTEST_PART
from memcalc.planner.budget import capacity, offload_need
from memcalc.planner.choice import best_plan
from memcalc.planner.job import PlanJob
from memcalc.planner.limit_answer import LimitQuery, answer_of, cache_limit, fit_of, host_limit, miss_of, point_of
from memcalc.planner.limit_grid import (
    Chunk,
    LimitCandidate,
    LimitJob,
    SimulatedLimit,
    SimulationCache,
    evaluate,
    number_of,
    ordered,
    states_fit,
)
from memcalc.planner.limit_search import LimitQuestion, LimitSearch, LimitSolution, fastest
from memcalc.planner.pipelines import divisors
from memcalc.planner.request import MICRO_BATCHES, micro_batches_of
from memcalc.planner.sentences import MOST_UNASKED
from memcalc.terms.parameters import model_count

if TYPE_CHECKING:
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.planner import Listener
    from memcalc.results.plans import CurvePoint, Inverse, Miss
    from memcalc.specs.model import Model

LISTED = 5
"""Models listed that are larger than the one that fits."""
POINTS = 16
"""Values of a curve between the first and the last."""
FURTHER = 1.25
"""How far a curve goes beyond the answer."""
COUNTS = 8
"""Numbers of GPUs whose strategies are evaluated at once, at first."""
NODES = 8
"""Nodes up to which the fewest GPUs are searched for."""


def max_seq_len(job: LimitJob, query: LimitQuery, gpus: int) -> Inverse:
    """The largest sequence length that fits."""
    if job.model.fixed_length is not None:
        raise InputError("max", "seq-len", f"{job.model.name} has a fixed number of tokens per sample")
    learned = job.model.positions == "learned"
    most = job.model.max_positions if learned else rq.LARGEST_NUMBER["seq_len"]
    longest = max(min(most, gpus * SHORTEST_PART), job.model.image_tokens)  # long enough for every number of parts
    grids = opened(job, gpus, longest)
    degrees = {layout.cp for grid in grids for layout in grid.layouts}
    step = lcm(query.step, *(2 * cp for cp in degrees if cp > 1))  # context-parallel ranks have two equal parts each
    least = max(min(degrees), job.model.image_tokens)
    first = -(-least // step) * step
    values = range(first, most + 1, step)
    if not values:
        raise InputError("step", query.step, f"must be at most the {most:,} positions of {job.model.name}")
    outside = f"{job.model.name} has learned positions for {most} tokens" if learned else f"the search ends at {most:,}"
    return _over(job, query, LimitQuestion(values, micro_batches=smallest_batches(job)), grids, gpus, outside)


def max_micro_batch(job: LimitJob, query: LimitQuery, gpus: int) -> Inverse:
    """The largest micro-batch that fits."""
    seq_len = defaults.sequence_length(job.request, job.model)
    grids = opened(job, gpus, seq_len)
    batch = job.batch[0]
    values: Sequence[int] = range(query.step, rq.LARGEST_NUMBER["micro_batch"] + 1, query.step)
    if batch:
        ranks = {layout.dp for grid in grids for layout in grid.layouts}
        values = [m for m in divisors(batch) if m % query.step == 0 and any(batch % (m * dp) == 0 for dp in ranks)]
    outside = f"a larger one does not divide the global batch of {batch}" if batch else "the search ends there"
    if not values:
        job.refuse_batch(gpus)
        allowed = "no micro-batch times the data-parallel ranks divides it"
        raise CombinationError("global-batch", batch, allowed)
    return _over(job, query, LimitQuestion(values, seq_len=seq_len), grids, gpus, outside)


def opened(job: LimitJob, gpus: int, seq_len: int) -> list[Grid]:
    """The grids of what is open, or the reason why nothing is."""
    grids = job.open([gpus], seq_len)
    if not grids:
        raise CombinationError("gpus", gpus, f"no valid layout for {job.model.name} with these options")
    return grids


def smallest_batches(job: LimitJob) -> tuple[int, ...]:
    """Micro-batches that may need least memory: one sequence, unless the batch is given, where accumulation counts."""
    pinned, batch = job.request.given.get("micro_batch"), job.batch[0]
    if pinned is not None:
        return (pinned,)
    return tuple(micro_batches_of(batch)) if batch else (1,)


def _over(
    job: LimitJob, query: LimitQuery, question: LimitQuestion, grids: list[Grid], gpus: int, outside: str
) -> Inverse:
    search = LimitSearch(job, question, grids)
    solution = search.solve()
    if solution.best is None and solution.beyond is None:
        job.refuse_batch(gpus)
        raise CombinationError("gpus", gpus, "no valid strategy with these options; leave one of them open")
    fit = None
    if solution.best is not None:
        fit = fit_of(job, solution.best, question.values[solution.index], query.base)
    beyond: tuple[Miss, ...] = ()
    instead = ""
    if solution.beyond is not None:
        beyond = (miss_of(solution.beyond, question.values[solution.index + 1]),)
        if solution.best is not None:
            instead = cache_limit(solution.best, solution.beyond, beyond[0].value)
    curve = tuple(_curve(search, solution)) if query.curve else ()
    return answer_of(
        job, query, fit, beyond, gpus=gpus, outside="" if beyond else outside, instead=instead, curve=curve,
        searched=solution.searched, replayed=solution.replayed,
    )  # fmt: skip


def _curve(search: LimitSearch, solution: LimitSolution) -> Iterator[CurvePoint]:
    """The answer's strategy at values from the first to some beyond the answer."""
    known, values, last = solution.best, search.question.values, solution.index
    if known is None:
        return
    most = FURTHER * values[last]
    spread = {bisect_left(values, round(values[0] + (most - values[0]) * k / POINTS)) for k in range(POINTS + 1)}
    for index in sorted({0, last, last + 1, last + 2} | spread):
        result = search.at(known.candidate, index) if index < len(values) else None
        if result is not None:
            yield point_of(result, values[index])


class Tried:
    """One model, or one number of GPUs: whether any open strategy fits, and which is the fastest."""

    def __init__(self, job: LimitJob, grids: Sequence[Grid], seq_len: int) -> None:
        self.job, self.grids, self.seq_len = job, grids, seq_len
        self.replays = SimulationCache(job)
        self.searched = 0

    def parts(self, micro_batches: Sequence[int], gpus: Collection[int] = ()) -> list[Chunk]:
        """All open strategies at some micro-batches, or those of some numbers of GPUs."""
        result = evaluate(self.job, self.grids, [(micro, self.seq_len) for micro in micro_batches], gpus)
        self.searched += (size := sum(part.reserved.size for part in result))
        if self.job.tally is not None:
            self.job.tally.add(size)
        return result

    def pass_over(self, micro_batches: Sequence[int], gpus: Collection[int]) -> None:
        """Count the strategies on some numbers of GPUs that need no evaluation."""
        self.searched += number_of(self.job, self.grids, [(micro, self.seq_len) for micro in micro_batches], gpus)

    def first(self, parts: Sequence[Chunk], gpus: int = 0) -> SimulatedLimit | None:
        """A strategy that fits."""
        open_ = ordered(parts, lambda part: part.fitting(safe=self.job.safe, closed=False) & _of(part, gpus))
        result = next((c for c in open_ if self.replays.fits(c)), None)
        return self.replays.of(result) if result else None

    def nearest(self, parts: Sequence[Chunk], gpus: int = 0) -> SimulatedLimit | None:
        """The strategy that needs least."""
        open_ = ordered(parts, lambda part: np.broadcast_to(part.allowed, part.shape) & _of(part, gpus))
        return next((result for c in open_ if (result := self.replays.reported(c))), None)

    def best(self, known: SimulatedLimit) -> SimulatedLimit:
        """The fastest on as many GPUs as a strategy that is known to fit, over all micro-batches."""
        gpus = known.candidate.layout.gpus
        pinned, batch = self.job.request.given.get("micro_batch"), self.job.batch[0]
        here = [
            replace(grid, layouts=tuple(layout for layout in grid.layouts if layout.gpus == gpus))
            for grid in self.grids
            if any(layout.gpus == gpus for layout in grid.layouts)
        ]
        usual = micro_batches_of(batch) if batch else MICRO_BATCHES
        parts = Tried(self.job, here, self.seq_len).parts(usual if pinned is None else [pinned])
        result = fastest(self.job, self.replays, parts) or known.candidate
        return self.replays.reported(result) or known


def _of(part: Chunk, gpus: int) -> Array:
    return np.asarray(part.grid.degree("gpus") == gpus) if gpus else np.ones((1,) * 7, dtype=bool)


def min_gpus(job: LimitJob, query: LimitQuery, counts: Sequence[int]) -> Inverse:
    """The smallest number of GPUs on which a strategy fits: one grid over all of them."""
    seq_len = defaults.sequence_length(job.request, job.model)
    grids = job.open(counts, seq_len)
    tried = Tried(job, grids, seq_len)
    parts, known = _up_to_first(tried, smallest_batches(job), counts)
    fewer = [gpus for gpus in counts if known is None or gpus < known.candidate.layout.gpus]
    near = next((result for gpus in reversed(fewer) if (result := tried.nearest(parts, gpus))), None)
    if known is None and near is None:
        job.refuse_batch(counts[0])
        raise CombinationError("gpus", counts[-1], f"no valid strategy for {job.model.name} with these options")
    beyond = (miss_of(near, near.candidate.layout.gpus),) if near else ()
    planned = _as_planned(job, tried, known) if known else None
    best = planned or (tried.best(known) if known else None)
    fit = fit_of(job, best, best.candidate.layout.gpus, query.base) if best else None
    needs = [pair for part in parts if near and (pair := part.host_short(job, near.candidate.layout.gpus))]
    instead = host_limit(job, near.candidate.layout.gpus, min(needs)) if near and fit and needs else ""
    answer = answer_of(
        job, query, fit, beyond, gpus=int(fit.value) if fit else counts[-1], instead=instead,
        outside="no smaller count is possible" if fit else f"no plan fits on up to {counts[-1]} GPUs",
        searched=tried.searched, replayed=len(tried.replays.known),
    )  # fmt: skip
    if planned is None or job.batch != (0, 0):
        return answer
    fed = planned.candidate.global_batch
    noted = {**answer.assumptions, "global_batch": f"{fed} sequences ({fed * seq_len:,} tokens)"}
    return answer.model_copy(update={"assumptions": noted})


def _as_planned(job: LimitJob, tried: Tried, known: SimulatedLimit) -> SimulatedLimit | None:
    """What a plan lists first on as many GPUs as a strategy that fits, with the batch of a plan.

    Not where that would offload what need not be, or more than the GPUs' share, nor where its search is long.
    """
    gpus, offloaded = known.candidate.layout.gpus, bool(known.candidate.offload)
    request = replace(job.request, given={**job.request.given, "gpus": gpus}, assumptions={})
    alone = PlanJob(request, job.model, job.gpu, job.node, traces=job.traces)
    try:
        plan = best_plan(alone, gpus, trusting=offloaded) if alone.size(gpus) <= MOST_UNASKED else None
    except MemcalcError:
        return None
    if plan is None or (job.safe and plan.is_tight) or (plan.strategy.offload and not offloaded):
        return None
    host = capacity(job.node, "host")
    share = None if host is None else host * min(gpus, job.node.gpus) // job.node.gpus
    if job.by_share and share is not None and offload_need(plan.census, job.node).host > share:
        return None
    grid, layout = plan.single, plan.candidate.layout
    fixed, uneven = grid.fixed, tuple((name, value) for name in SPLITS if (value := getattr(grid.fixed, name)))
    candidate = LimitCandidate(
        fixed.framework, layout, grid.precisions[0], grid.recomputes[0], grid.zeros[0], grid.offloads[0],
        grid.micro_batches[0], fixed.seq_len, fixed.global_batch, uneven,
    )  # fmt: skip
    return tried.replays.reported(candidate) if tried.replays.fits(candidate) else None


def _up_to_first(
    tried: Tried, micro_batches: Sequence[int], counts: Sequence[int]
) -> tuple[list[Chunk], SimulatedLimit | None]:
    """A strategy on the fewest GPUs, and what was evaluated for it: some numbers at a time, each time twice as many.

    On more GPUs than that nothing is asked for, so that strategies on them are only counted.
    """
    parts: list[Chunk] = []
    done, known = 0, None
    while known is None and done < len(counts):
        some = counts[done : done + max(done, COUNTS)]
        here = tried.parts(micro_batches, some)
        parts, done = [*parts, *here], done + len(some)
        known = next((result for gpus in some if (result := tried.first(here, gpus))), None)
    tried.pass_over(micro_batches, set(counts[done:]))
    return parts, known


def counts_up_to(most: int, node_gpus: int, *, any_count: bool) -> list[int]:
    """Numbers of GPUs that are asked: powers of two within a node, then whole nodes, or all.

    >>> counts_up_to(32, 8, any_count=False), counts_up_to(3, 8, any_count=True)
    ([1, 2, 4, 8, 16, 24, 32], [1, 2, 3])
    """
    if any_count:
        return list(range(1, most + 1))
    within = [1 << k for k in range(node_gpus.bit_length()) if 1 << k < node_gpus]
    return [n for n in [*within, *range(node_gpus, most + 1, node_gpus)] if n <= most]


def max_model(
    questions: Sequence[Callable[[], tuple[LimitJob, LimitQuery]]],
    gpus_of: Callable[[LimitJob], int],
    listener: Listener | None = None,
) -> Inverse:
    """The model with most parameters that fits; ``questions`` has the job of each, with the largest first.

    ``listener`` is told of each model that is begun. Models for which the options are refused are left out and counted.
    """
    started = time.perf_counter()
    missed: list[tuple[LimitJob, LimitQuery, Tried]] = []
    refused: list[InputError] = []
    searched = replayed = 0
    result: tuple[LimitJob, LimitQuery, SimulatedLimit] | None = None
    for index, ask in enumerate(questions):
        if listener is not None:
            listener(index, len(questions))
        try:
            job, query = ask()
            tried = _tried(job, gpus_of(job))
        except InputError as error:
            refused.append(error)
            continue
        known = None if tried is None else _first(tried)
        if tried is not None:
            searched, replayed = searched + tried.searched, replayed + len(tried.replays.known)
        if tried is not None and known is not None:
            result = job, query, tried.best(known)
            break
        if tried is not None:
            missed.append((job, query, tried))
    if result is None and not missed:
        raise refused[0] if refused else CombinationError("max", "model", "no model is possible with these options")
    beyond = tuple(miss for job, _, tried in missed[-LISTED:][::-1] if (miss := _missed(job, tried)))
    job, query = result[:2] if result else missed[-1][:2]
    query = replace(query, started=started)
    fit = fit_of(job, result[2], job.model.name, query.base) if result else None
    return answer_of(
        job, query, fit, beyond, gpus=gpus_of(job), outside="" if beyond else "no larger preset matches",
        searched=searched, replayed=replayed, warnings=_left_out(refused),
    )  # fmt: skip


def _tried(job: LimitJob, gpus: int) -> Tried | None:
    """What is open for one model; None where no layout is possible."""
    seq_len = defaults.sequence_length(job.request, job.model)
    grids = job.open([gpus], seq_len)
    return Tried(job, grids, seq_len) if grids else None


def _first(tried: Tried) -> SimulatedLimit | None:
    """A strategy of one model that fits, at the micro-batches that need least."""
    batches = smallest_batches(tried.job)
    fits = states_fit(tried.job, list(tried.grids), batches[0], tried.seq_len)
    return tried.first(tried.parts(batches)) if fits else None


def _left_out(refused: Sequence[InputError]) -> tuple[str, ...]:
    """The sentence on models for which the options are refused."""
    few = len(refused)
    return (f"{few} larger model{'s' * (few > 1)} left out, for which this is refused: {refused[0]}",) if few else ()


def _missed(job: LimitJob, tried: Tried) -> Miss | None:
    near = tried.nearest(tried.parts(smallest_batches(job)))
    count = model_count(job.model).total
    return miss_of(near, job.model.name, parameters=count) if near else None


def candidates(search: str | None, family: str | None, dirs: tuple[str, ...]) -> list[Model]:
    """Shipped and own models of which bytes are known, the largest first, narrowed by a text in a name and a family."""
    result = [model for model in catalog.models(dirs) if not model.counted_parts]
    if family is not None:
        families = sorted({model.family for model in result})
        if family not in families:
            raise UnknownNameError("family", family, f"must be one of {', '.join(families)}", families)
        result = [model for model in result if model.family == family]
    if search is not None:
        text = search.casefold()
        remaining = [m for m in result if any(text in name.casefold() for name in (m.name, *m.aliases))]
        if not remaining:
            names = [model.name for model in result]
            raise UnknownNameError("search", search, "must be part of a name that `memcalc models` lists", names)
        result = remaining
    return sorted(result, key=lambda model: -model_count(model).total)
