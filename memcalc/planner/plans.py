"""The answer of a search: ranked plans, the front, and where nothing fits the smallest changes that would."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memcalc import __version__, results
from memcalc.planner.answer import hardware_facts, model_facts, scalar
from memcalc.planner.axes import DEGREES
from memcalc.planner.finalists import Finalist, finalists, safe_ones
from memcalc.planner.nearest import nearest
from memcalc.planner.objectives import Goal, moving_parts
from memcalc.planner.question import asked
from memcalc.planner.reasons import too_cramped, too_large, why
from memcalc.planner.recipe import recipe, remedies
from memcalc.planner.rooms import NAMES, NO_SWAPPER, capacity, has_no_swapper, need_of
from memcalc.planner.special import special
from memcalc.planner.timed import step_time, unvalidated
from memcalc.terms import Census

if TYPE_CHECKING:
    from memcalc.planner.job import Job
    from memcalc.planner.search import Outcome
    from memcalc.specs.strategy import Strategy

SPARE = 8
"""Strategies that a search keeps beyond those wanted, since a replay may find that one does not run, or is tight."""
SHARE = 3
"""One in so many listed plans may be of the front rather than among the best."""
SMALLER = 0.9
"""Each of them has at most this share of the memory of the one before."""
BILLION = 10**9


@dataclass(frozen=True)
class Wish:
    """How an answer is wanted: the goal, how many plans, and for how many tokens GPU-hours are told."""

    goal: Goal = field(default_factory=Goal)
    top: int = 10
    tokens: int = BILLION
    question: str = ""
    """A strategy, as in ``tp=1,zero=3``, of which is wanted why it lost."""
    recipe: bool = False
    """Whether the usual order of tuning and what each remedy returns are wanted."""
    advice: bool = True
    """Whether the smallest changes are looked for where nothing fits."""


def plan_for(job: Job, wish: Wish, command: str, base: str) -> results.Plans:
    """Search everything that a job leaves open.

    ``command`` reproduces the answer, and ``base`` with a strategy's words explains one plan.
    """
    started = time.perf_counter()
    counts = job.counts()
    wanted = wish.top if len(counts) == 1 else 1
    outcomes = job.search(counts, wanted + SPARE, wish.goal)
    if not outcomes:
        job.refuse(counts)
    ready = {gpus: _listed(job, outcome, wanted, several=len(counts) > 1) for gpus, outcome in outcomes.items()}
    plans = _ranked(job, ready, wish, base)
    last = max(outcomes)
    smallest = outcomes[last].smallest or outcomes[last].cramped
    return results.Plans(
        version=__version__,
        model=model_facts(job.model),
        hardware=hardware_facts(job.gpu, job.node, last),
        objective=wish.goal.name,
        token_budget=wish.tokens,
        seq_len=smallest.grid.fixed.seq_len if smallest else job.request.given.get("seq_len", 0),
        searched=sum(outcome.searched for outcome in outcomes.values()),
        feasible=sum(outcome.feasible for outcome in outcomes.values()),
        elapsed=round(time.perf_counter() - started, 4),
        plans=plans,
        pareto=pareto_ranks(plans),
        nearest=() if plans or not wish.advice else tuple(nearest(job, last)),
        too_large="" if plans else (_too_large(job, outcomes[last]) or _impossible(last)),
        recipe=recipe(job, last) if wish.recipe else (),
        remedies=remedies(job, last) if wish.recipe else (),
        asked=asked(job, wish.question, counts, plans) if wish.question else "",
        capacity=job.gpu.memory_bytes,
        warnings=tuple(_warnings(job, plans, outcomes)),
        assumptions=job.request.assumptions,
        command=command,
    )


def _too_large(job: Job, outcome: Outcome) -> str:
    """What is too large: on the GPU, and off it where that alone keeps a strategy from running."""
    said = [too_large(job, outcome.smallest)] if outcome.smallest else []
    if outcome.cramped:
        said.append(too_cramped(job, outcome.cramped))
    return " ".join(said)


def _impossible(gpus: int) -> str:
    return f"no strategy is possible on {gpus} GPUs: global batch, data-parallel ranks and micro-batch do not agree."


def _listed(job: Job, outcome: Outcome, wanted: int, *, several: bool) -> list[Finalist]:
    """The best plans of one number of GPUs, and some of the front that are smaller still."""
    candidates = iter(outcome.best)
    share = 0 if several else wanted // SHARE
    bold = safe_ones(job, outcome.bold)[:wanted]
    best = bold + finalists(job, candidates, max(wanted - share - len(bold), 0))
    more = _smaller(job, outcome, best, share)
    more = finalists(job, candidates, max(wanted - len(best) - len(more), 0)) + more
    return sorted([*best, *more], key=lambda one: one.is_tight)[:wanted]


def _smaller(job: Job, outcome: Outcome, best: list[Finalist], most: int) -> list[Finalist]:
    """Plans of the front, each clearly smaller than all before it, by the closed form and by the replay."""
    least = min((one.found.reserved for one in best), default=0)
    more: list[Finalist] = []
    for found in outcome.front:
        if found.reserved < SMALLER * least and len(more) < most:
            least = found.reserved
            known = [one.peaks.top.device for one in (*best, *more)]
            more += [one for one in finalists(job, [found], 1) if one.peaks.top.device < SMALLER * min(known)]
    return more


def _ranked(job: Job, ready: Mapping[int, list[Finalist]], wish: Wish, base: str) -> tuple[results.Plan, ...]:
    """All plans in order: by number of GPUs, or by cost."""
    found = [(some[0], one) for some in ready.values() for one in some]
    plans = [_plan(job, one, wish, base) for _, one in found]
    front = pareto_ranks(tuple(replace_rank(plan, rank) for rank, plan in enumerate(plans)))
    said = [
        plan.model_copy(update={"why": why(one, first, wish.goal, on_front=place in front)})
        for place, (plan, (first, one)) in enumerate(zip(plans, found, strict=True))
    ]
    if wish.goal.name == "cost":
        said.sort(key=lambda plan: (plan.verdict == "tight", plan.gpu_hours))
    ranked = tuple(replace_rank(plan, rank) for rank, plan in enumerate(said, 1))
    return special(ranked, pareto_ranks(ranked))


def replace_rank(plan: results.Plan, rank: int) -> results.Plan:
    """The same plan at another place."""
    return plan.model_copy(update={"rank": rank})


def _plan(job: Job, one: Finalist, wish: Wish, base: str) -> results.Plan:
    """One plan, with the same figures that ``estimate`` gives for it."""
    found, peaks, strategy = one.found, one.peaks, one.strategy
    top, fixed = peaks.top, found.grid.fixed
    waste = wish.goal.waste(fixed.global_batch, fixed.seq_len)
    need = need_of(Census(job.model, one.single), job.node)
    return results.Plan(
        rank=1,
        gpus=found.layout.gpus,
        strategy=strategy,
        accumulation_steps=scalar(one.single.accumulation),
        global_batch=fixed.global_batch,
        data_parallel=found.layout.dp,
        peak=results.PlanPeak(
            allocated=peaks.allocated, reserved=top.reserved, device=top.device, phase=top.phase, stage=top.stage
        ),
        verdict=peaks.verdict,
        time=step_time(job, one.single, found.times),
        host_memory=need.host,
        tier_memory=need.tier,
        gpu_hours=wish.tokens * waste / found.tokens_per_second_per_gpu / 3600,
        statistical_efficiency=1 / waste,
        why="",
        parts=scalar(moving_parts(one.single)),
        command=command_of(base, strategy, found.layout.gpus, fixed.seq_len, fixed.global_batch),
    )


def command_of(base: str, s: Strategy, gpus: int, seq_len: int, global_batch: int) -> str:
    """The ``memcalc estimate`` line of a strategy: ``base`` with what a search chose."""
    chosen = chosen_words(s, gpus, seq_len, global_batch)
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in chosen.items() if name != "sp"]
    return " ".join([base, *flags, *(["--no-sp"] if "sp" in chosen else [])])


def chosen_words(s: Strategy, gpus: int, seq_len: int, global_batch: int) -> dict[str, str | int | bool]:
    """What a search chose of a strategy, as words of :func:`memcalc.estimate`: those that its defaults do not give."""
    return {
        "gpus": gpus,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "micro_batch": s.micro_batch,
        "framework": s.framework,
        "precision": s.precision,
        **({"optimizer": s.optimizer} if s.optimizer != "adamw" else {}),
        "zero": s.zero,
        "recompute": s.recompute,
        **{name: getattr(s, name) for name in DEGREES if getattr(s, name) > 1},
        **({"pp_schedule": s.pp_schedule} if s.pp > 1 and s.pp_schedule != "1f1b" else {}),
        **({"vpp": s.vpp} if s.vpp > 1 else {}),
        **({"offload": ",".join(s.offload)} if s.offload else {}),
        **({"offload_to": s.offload_to} if s.offload and s.offload_to != "cpu" else {}),
        **({"sp": False} if s.tp > 1 and not s.sp else {}),
    }


def pareto_ranks(plans: tuple[results.Plan, ...]) -> tuple[int, ...]:
    """Ranks that no other plan beats in device memory, throughput, GPU count and statistical efficiency at once."""

    def figures(plan: results.Plan) -> tuple[float, ...]:
        speed = plan.time.tokens_per_second_per_gpu
        return plan.peak.device, -speed, plan.gpus, -plan.statistical_efficiency

    def beats(a: results.Plan, b: results.Plan) -> bool:
        ours, theirs = figures(a), figures(b)
        return ours != theirs and all(x <= y for x, y in zip(ours, theirs, strict=True))

    return tuple(p.rank for p in plans if not any(beats(other, p) for other in plans))


def _warnings(job: Job, plans: tuple[results.Plan, ...], outcomes: Mapping[int, Outcome]) -> list[str]:
    """What the ranking does not know."""
    said = unvalidated({f"#{plan.rank}": plan.time for plan in plans})
    if any(plan.host_memory for plan in plans) and capacity(job.node, "host") is None:
        said.append(f"{NAMES['host']} of node {job.node.name} is unknown: offloaded plans assume that it suffices.")
    if any(has_no_swapper(plan.strategy) for plan in plans):
        said.append(NO_SWAPPER)
    missing = [gpus for gpus in outcomes if not any(plan.gpus == gpus for plan in plans)]
    if missing and plans:
        said.append(f"nothing fits on {', '.join(map(str, missing))} GPU{'s' * (len(missing) > 1 or missing[0] > 1)}.")
    return said
