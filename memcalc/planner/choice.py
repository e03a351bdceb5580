"""Which plans are listed: the one to run first, one of each idea that is worth a look, and other global batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from memcalc.errors import MemcalcError
from memcalc.planner import axes
from memcalc.planner.budget import capacity
from memcalc.planner.defaults import NEARLY
from memcalc.planner.ranking import Objective
from memcalc.planner.search import Wanted
from memcalc.planner.shortlist import any_idea, resident, shortlists
from memcalc.results.details import SearchedStrategy
from memcalc.terms.overhead import overhead_of

if TYPE_CHECKING:
    from memcalc.planner.finalists import SimulatedPlan
    from memcalc.planner.job import PlanJob
    from memcalc.planner.search import Candidate, SearchResult
    from memcalc.planner.shortlist import Among, Shortlist
    from memcalc.terms.overhead import Overhead


GAIN = 1.25
"""How much faster than plans without it one must be that has what buys less than the error of its predicted time.

A step of a model-parallel run took up to 1.57 times what was predicted, one with offload is not measured at all.
"""
SMALLER = 0.9
"""A plan listed for its small peak has at most this share of the memory of every other one."""
SLOW = 2.5
"""How much slower than the best the smallest may be: with fp32 and TP over slow links anything can be made small."""
FEW = 4
"""Plans up to which other ideas are listed too."""
FASTEST_ONLY = Wanted(Objective("throughput"), each=1)
"""What is kept of a search where only the fastest strategy is wanted."""
BEST, FASTEST, SIMPLEST, SMALLEST = "best", "fastest", "simplest", "smallest"


class Choice(NamedTuple):
    """A plan that is listed, and what for."""

    plan: SimulatedPlan
    roles: tuple[str, ...] = ()
    """What it has before all others, the most important first."""
    passes_over: bool = False
    """Whether plans with offload or what is seldom done are faster by more than :data:`NEARLY`, and by less than
    :data:`GAIN`."""


def simplest(short: Shortlist, among: Among = any_idea) -> SimulatedPlan | None:
    """The simplest of those nearly as fast as the fastest.

    What buys less than the error of its time counts only where nothing without it comes near.
    """
    plain = short.first(lambda idea: among(idea) and not idea.doubtful)
    limit = _times(1 / GAIN, plain) if plain else inf
    base = short.first(lambda idea: among(idea) and idea.doubtful, limit) or plain
    if base is None:
        return None
    best, limit, doubtful = base, _times(NEARLY, base), base.candidate.idea.doubtful
    while simpler := short.first(_simpler_than(best, among, doubtful=doubtful), limit):
        best = simpler
    return best


def best_plan(job: PlanJob, gpus: int, *, trusting: bool = True) -> SimulatedPlan | None:
    """What a plan of the job lists first on so many GPUs; None where nothing fits.

    What offloads into memory of unknown size comes last, and only where ``trusting``.
    """
    for trusts in (False, True)[: 1 + (trusting and capacity(job.node, "host") is None)]:
        for tight in (False, True):
            if not job.is_hopeful(gpus):
                return None
            short = shortlists(job, [gpus], Wanted(tight=tight, trusting=trusts)).get(gpus)
            plan = short and simplest(short)
            if plan:
                return plan
    return None


def _simpler_than(plan: SimulatedPlan, among: Among, *, doubtful: bool) -> Among:
    parts = plan.candidate.idea.parts
    return lambda idea: among(idea) and idea.doubtful <= doubtful and idea.parts < parts


def _times(factor: float, plan: SimulatedPlan) -> float:
    return factor * plan.candidate.key


def chosen(short: Shortlist, most: int, *, filled: int = FEW, rank_all: bool = False) -> list[Choice]:
    """The plans of one number of GPUs, the one to run first; other ideas fill the list up to ``filled``.

    They end it, unless the plans are in the order of an objective that was asked for.
    """
    goal = short.wanted.goal.name
    ordered = goal in {"throughput", "memory"}
    best = short.first() if ordered else simplest(short)
    if best is None:
        return []
    role = {"throughput": FASTEST, "memory": SMALLEST}.get(goal, BEST)
    faster = short.first(lambda idea: idea.doubtful, _times(1 / NEARLY, best)) if role is BEST else None
    rows = [Choice(best, (role,), faster is not None and not best.candidate.idea.doubtful)]
    if most == 1:
        return rows
    if rank_all:
        others = (plan for plan in short.in_order(rank_all=True) if plan.candidate.axes != best.candidate.axes)
        return rows + [Choice(plan) for plan in islice(others, most - 1)]
    for role, plan in _roles(short, best) if goal != "memory" else ():
        rows = _with(rows, role, plan, most)
    ideas = {row.plan.candidate.idea for row in rows}
    fill = short.in_order(lambda idea: idea not in ideas, inf if goal == "memory" else _times(GAIN, best))
    fill = (plan for plan in fill if goal == "memory" or _pays(plan, best))
    rows += [Choice(plan) for plan in islice(fill, max(min(filled, most) - len(rows), 0))]
    return [rows[0], *sorted(rows[1:], key=lambda row: (not (row.roles or ordered), row.plan.candidate.key))]


def _with(rows: list[Choice], role: str, plan: SimulatedPlan | None, most: int) -> list[Choice]:
    """The rows with what a plan is listed for, in a row of its own where it has none."""
    if plan is None:
        return rows
    listed = [row.plan.candidate.axes == plan.candidate.axes for row in rows]
    if not any(listed):
        return [*rows, Choice(plan, (role,))] if len(rows) < most else rows
    return [row._replace(roles=(*row.roles, role)) if same else row for row, same in zip(rows, listed, strict=True)]


def _roles(short: Shortlist, best: SimulatedPlan) -> Iterator[tuple[str, SimulatedPlan | None]]:
    """What is listed beside the best, the most important first."""
    yield FASTEST, short.first()
    usable = [candidate for candidate in short.outcome.front if candidate.key <= _times(SLOW, best)]
    yield SMALLEST, _smallest(short, usable, best.peaks.top.device)
    if short.wanted.goal.name == "throughput":
        yield SIMPLEST, simplest(short)
    limit = _times(GAIN, best)
    yield "full recompute", short.first(lambda idea: resident(idea) and idea.recompute == "blocks", limit)
    near = [candidate for candidate in short.outcome.resident if candidate.key <= limit]
    yield "more headroom", _smallest(short, near, SMALLER * best.peaks.top.device)
    offloaded = short.first(lambda idea: not resident(idea), 2 * limit)
    yield "with offload", offloaded if offloaded and _pays(offloaded, best) else None


def _pays(plan: SimulatedPlan, best: SimulatedPlan) -> bool:
    """Whether what a plan offloads makes it faster or smaller than the best."""
    if resident(plan.candidate.idea) or plan.candidate.key < best.candidate.key:
        return True
    return plan.peaks.top.device <= SMALLER * best.peaks.top.device


def _smallest(short: Shortlist, candidates: Iterable[Candidate], most: float) -> SimulatedPlan | None:
    """The smallest of some candidates that runs, and takes no more than so many bytes."""
    ordered = sorted(candidates, key=lambda candidate: (candidate.reserved, candidate.key))
    runs = (plan for candidate in ordered if (plan := short.replayed(candidate)) is not None)
    plan = next(runs, None)
    return plan if plan is not None and plan.peaks.top.device <= most else None


# ------------------------------------------------------------------------------------------------- another global batch


def with_batches(job: PlanJob, gpus: int, rows: list[Choice], goal: Objective, most: int) -> list[Choice]:
    """The rows, and the plan of each other global batch that none of them beats in all three axes."""
    if goal.critical_batch is None or "global_batch" not in job.request.choices or not rows:
        return rows
    listed = list(rows)
    for plan in _of_each_batch(job, gpus, goal):
        figures = _compared(plan)
        beaten = any(all(a <= b for a, b in zip(_compared(row.plan), figures, strict=True)) for row in listed)
        if not beaten:
            listed.append(
                Choice(plan, ("larger batch" if figures[2] > _compared(rows[0].plan)[2] else "smaller batch",))
            )
    return [*listed[:1], *listed[len(rows) :], *listed[1 : len(rows)]][:most]


def _of_each_batch(job: PlanJob, gpus: int, goal: Objective) -> Iterator[SimulatedPlan]:
    for batch in axes.batches(job.request, job.model, gpus):
        try:
            short = shortlists(job.pinned(global_batch=batch), [gpus], Wanted(goal)).get(gpus)
        except MemcalcError:
            continue  # no layout divides it
        plan = simplest(short) if short else None
        if plan is not None:
            yield plan


def _compared(plan: SimulatedPlan) -> tuple[float, float, float]:
    """Bytes, the negative throughput, and the batch, which waste grows with: less is better in each."""
    candidate = plan.candidate
    return plan.peaks.top.device, -candidate.tokens_per_second_per_gpu, candidate.grid.fixed.global_batch


# -------------------------------------------------------------------------------------------------- what else was found


MOST_SHOWN = 400
"""Strategies that are kept for a number of GPUs, those of the frontier aside."""


def searched_strategies(job: PlanJob, outcomes: Mapping[int, SearchResult]) -> Iterator[SearchedStrategy]:
    """Yield the frontier of each number of GPUs, and an even sample of the best of each idea; none above the GPU."""
    known: dict[tuple[int, object], Overhead] = {}

    def device(candidate: Candidate) -> int:
        key = (id(candidate.grid), candidate.layout)
        if key not in known:
            known[key] = overhead_of(job.gpu, candidate.grid, candidate.layout)
        return known[key].device(candidate.reserved)

    for gpus, outcome in outcomes.items():
        listed = outcome.best
        for frontier, candidates in ((True, outcome.front), (False, listed[:: len(listed) // MOST_SHOWN + 1])):
            for candidate in (each for each in candidates if device(each) <= job.gpu.memory_bytes):
                speed = candidate.tokens_per_second_per_gpu
                yield SearchedStrategy(
                    gpus=gpus, device=device(candidate), tokens_per_second_per_gpu=speed, frontier=frontier
                )
