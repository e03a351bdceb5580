"""The answer of a search: ranked plans, the front, and where nothing fits the smallest changes that would."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, cast, get_args

from memcalc._version import __version__
from memcalc.errors import InputError
from memcalc.frameworks import grows_segments, habits_of
from memcalc.frameworks.capabilities import own_code
from memcalc.planner import axes
from memcalc.planner.answer import FSDP_1, borrowed_by, hardware_facts, is_deprecated, model_facts, scalar, strategy_of
from memcalc.planner.budget import NO_SWAPPER, capacity, lacks_nvme_swap, offload_need, recompute_warnings, unknown_to
from memcalc.planner.choice import FEW, Choice, chosen, searched_strategies, simplest, with_batches
from memcalc.planner.costs import even_over_chunks
from memcalc.planner.defaults import sequence_length
from memcalc.planner.finalists import SimulatedPlan, in_sequence, time_of, unchecked_warnings
from memcalc.planner.job import strategy_record
from memcalc.planner.occasions import asked_for, occasions_of, uncounted
from memcalc.planner.ranking import Objective, ObjectiveName
from memcalc.planner.recipe import recipe, remedies
from memcalc.planner.remedies import (
    in_another_framework,
    instead_of_offload,
    instead_of_slow,
    instead_of_tight,
    nearest,
)
from memcalc.planner.request import one_of, positive
from memcalc.planner.search import Wanted
from memcalc.planner.sentences import code_warnings, fits_beyond, no_fit_gpu, no_fit_host, unopened, why, why_not
from memcalc.planner.shortlist import Shortlist, resident, shortlists
from memcalc.results.plans import UNMEASURED_OFFLOAD, Nearest, Plan, PlanPeak, Plans
from memcalc.specs.job import JobRecord, command_line

if TYPE_CHECKING:
    from memcalc.planner.job import PlanJob
    from memcalc.planner.search import Candidate, SearchResult

BILLION = 10**9
LONG_BUBBLE, SHORT_BUBBLE = 0.2, 0.1
"""Share of a step that a pipeline is empty from which on a default batch is said to be small, and below which the batch
brings it that is named: 8 sequences a GPU for DeepSeek-V3 on 256, as Megatron-Bridge's recipe has (8,192 on 1,024)."""
IMPOSSIBLE = "{} GPUs: no micro-batch divides the global batch over the data-parallel ranks."
"""Where the job's own strategy is not refused for anything else."""
UNEVEN = "{} GPUs: the blocks of --recompute block-N must come out even over the model chunks of a stage (--vpp)."


@dataclass(frozen=True)
class PlanOptions:
    """How an answer is wanted: the goal, how many plans, and for how many tokens GPU-hours are told."""

    goal: Objective = field(default_factory=Objective)
    top: int = 6
    tokens: int = BILLION
    filled: int = FEW
    """Plans up to which other ideas are listed beside those that have a place of their own."""
    rank_all: bool = False
    """Whether all strategies are ranked, not one of each idea."""
    question: str = ""
    """A strategy, as in ``tp=1,zero=3``, of which is wanted why it lost."""
    recipe: bool = False
    """Whether the usual order of tuning and what each remedy returns are wanted."""
    advice: bool = True
    """Whether the smallest changes are looked for where nothing fits."""

    @classmethod
    def of(cls, top: int | str, objective: str, critical_batch: Any, tokens: Any) -> PlanOptions:
        """As people write them; InputError or UnknownNameError says what is allowed."""
        name = one_of(objective, "objective", get_args(ObjectiveName))
        critical = None if critical_batch is None else positive(critical_batch, "critical_batch")
        budget = BILLION if tokens is None else positive(tokens, "tokens")
        return cls(Objective(cast("ObjectiveName", name), critical), positive(top, "top"), budget)


def plan_for(job: PlanJob, wish: PlanOptions, record: JobRecord) -> Plans:
    """Search everything that a job leaves open; ``record`` is what was asked."""
    started = time.perf_counter()
    counts = job.counts()
    lists = shortlists(job, counts, Wanted(wish.goal))
    if not lists:
        job.refuse(counts)
    outcomes = {gpus: short.outcome for gpus, short in lists.items()}
    ready = _chosen(job, lists, wish)
    several = Several.of(job, lists) if len(counts) > 1 and ready else None
    plans = _ranked(job, ready, wish, record, several)
    last = max(outcomes)
    if not any(outcome.smallest or outcome.host_limited for outcome in outcomes.values()):
        job.refuse_batch(min(outcomes))
    smallest = outcomes[last].smallest or outcomes[last].host_limited
    closest = None if plans or smallest is None else _closest(record, smallest)
    spared = unopened(job, last) if wish.advice and not plans else 0
    share = outcomes[last].feasible / max(1, outcomes[last].searched)
    return Plans(
        version=__version__,
        model=model_facts(job.model),
        hardware=hardware_facts(job.gpu, job.node, last),
        objective=wish.goal.name,
        token_budget=wish.tokens,
        seq_len=smallest.grid.fixed.seq_len if smallest else sequence_length(job.request, job.model),
        searched=sum(outcome.searched for outcome in outcomes.values()),
        bounded=sum(outcome.bounded for outcome in outcomes.values()),
        feasible=sum(outcome.feasible for outcome in outcomes.values()),
        elapsed=round(time.perf_counter() - started, 4),
        plans=plans,
        cloud=tuple(searched_strategies(job, outcomes)) if plans else (),
        pareto=pareto_ranks(plans),
        without_offload=several.without_offload if several else None,
        tight_without_offload=several.tight_without_offload if several else (),
        nearest=tuple(_advice(job, plans, last, record, several, spared, share)) if wish.advice else (),
        too_large="" if plans else _nothing(job, outcomes[last], last, wish, spared),
        closest="" if closest is None else command_line(closest),
        closest_job=closest,
        recipe=recipe(job, last) if wish.recipe else (),
        remedies=remedies(job, last) if wish.recipe else (),
        asked=why_not(job, wish.question, counts, plans) if wish.question else "",
        capacity=job.gpu.memory_bytes,
        warnings=(
            *job.request.warnings,
            *_warnings(job, plans, outcomes),
            *_recompute_warnings(job, ready),
            *_uncounted(job, ready),
        ),
        assumptions=job.request.assumptions,
        job=record,
        command=command_line(record),
    )


def _advice(
    job: PlanJob,
    plans: tuple[Plan, ...],
    gpus: int,
    record: JobRecord,
    several: Several | None,
    spared: int,
    share: float,
) -> Iterator[Nearest]:
    """What else can be done: where nothing fits, or hardly anything, nothing without offload, or nothing safely.

    Other frameworks are looked at where none is named, or a search beyond this one's is ``spared``.
    """
    if not plans:
        return nearest(job, gpus, record, elsewhere=spared > 0 or "framework" not in job.request.given)
    if several and several.resident:
        return instead_of_tight(job, record, plans)
    slow = [] if several else [instead_of_slow(job, record, plans, share), in_another_framework(job, record, plans)]
    return chain(*slow, instead_of_offload(job, record, plans), instead_of_tight(job, record, plans))


def _nothing(job: PlanJob, outcome: SearchResult, gpus: int, wish: PlanOptions, spared: int) -> str:
    """Why there is no plan, and what would be one with code that the framework leaves to its user."""
    text = _too_large(job, outcome) or _impossible(job, gpus)
    return " ".join(filter(None, (text, fits_beyond(job, gpus, spared) if wish.advice else "")))


def _impossible(job: PlanJob, gpus: int) -> str:
    """Why no strategy of the space can run at all: what an estimate of the job says, with its defaults."""
    try:
        grid = axes.single_strategy(job.pinned(gpus=gpus).request, job.model, job.gpu, job.node)
    except InputError as error:
        return str(error)
    return (IMPOSSIBLE if even_over_chunks(grid).all() else UNEVEN).format(gpus)


def _chosen(job: PlanJob, lists: dict[int, Shortlist], wish: PlanOptions) -> dict[int, list[Choice]]:
    """What is listed for each number of GPUs: what fits, else what is tight, else what needs memory of unknown size."""
    listed = partial(chosen, most=wish.top if len(lists) == 1 else 1, filled=wish.filled, rank_all=wish.rank_all)
    ready = {gpus: listed(short) for gpus, short in lists.items()}
    unknown = (False, True) if capacity(job.node, "host") is None else (False,)
    for trusting, tight in ((trusting, tight) for trusting in unknown for tight in (False, True)):
        empty = [gpus for gpus, rows in ready.items() if not rows and job.is_hopeful(gpus)]
        if empty and (trusting or tight):
            more = shortlists(job, empty, Wanted(wish.goal, tight=tight, trusting=trusting))
            ready |= {gpus: listed(short) for gpus, short in more.items()}
    if len(lists) == 1:
        ready = {gpus: with_batches(job, gpus, rows, wish.goal, wish.top) for gpus, rows in ready.items()}
    return {gpus: rows for gpus, rows in ready.items() if rows}


@dataclass(frozen=True)
class Several:
    """What is said of several numbers of GPUs together."""

    without_offload: int | None
    """The fewest on which a plan fits that offloads nothing."""
    resident: SimulatedPlan | None
    """That plan."""
    tight_without_offload: tuple[int, ...]
    """The next fewer on which such a plan is tight."""

    @classmethod
    def of(cls, job: PlanJob, lists: dict[int, Shortlist]) -> Several:
        """Those of the lists of a job."""
        fewer: list[int] = []
        for gpus, short in sorted(lists.items()):
            plan = simplest(short, resident)
            if plan is not None:
                return cls(gpus, plan, cls._tight(job, short.wanted, fewer))
            fewer.append(gpus)
        return cls(None, None, cls._tight(job, next(iter(lists.values())).wanted, fewer))

    @staticmethod
    def _tight(job: PlanJob, wanted: Wanted, counts: list[int]) -> tuple[int, ...]:
        def runs(gpus: int) -> bool:
            if not job.is_hopeful(gpus, resident=True):
                return False
            lists = shortlists(job, [gpus], replace(wanted, tight=True)).values()
            return any(short.may_run(filter(resident, short.outcome.ideas)) for short in lists)

        return tuple(reversed(list(takewhile(runs, reversed(counts)))))


def _too_large(job: PlanJob, outcome: SearchResult) -> str:
    """What is too large: on the GPU, and off it where that alone keeps a strategy from running."""
    text = [no_fit_gpu(job, outcome.smallest)] if outcome.smallest else []
    if outcome.host_limited:
        text.append(no_fit_host(job, outcome.host_limited))
    return " ".join(text)


def _closest(record: JobRecord, candidate: Candidate) -> JobRecord:
    fixed = candidate.grid.fixed
    strategy = strategy_of(candidate.grid, candidate.index)
    return strategy_record(record, strategy, candidate.layout.gpus, fixed.seq_len, fixed.global_batch)


def _ranked(
    job: PlanJob, ready: Mapping[int, list[Choice]], wish: PlanOptions, record: JobRecord, several: Several | None
) -> tuple[Plan, ...]:
    if several and several.resident:
        ready = {**ready, several.without_offload or 0: [Choice(several.resident, ("without offload",))]}
    plans = [_plan(job, row, rows[0], wish, record) for _, rows in sorted(ready.items()) for row in rows]
    if wish.goal.name == "cost":
        plans.sort(key=lambda plan: (plan.verdict == "tight", plan.gpu_hours))
    elif several:
        plans.sort(key=lambda plan: (bool(plan.unknown), plan.verdict == "tight", plan.gpus != several.without_offload))
    return tuple(replace_rank(plan, rank) for rank, plan in enumerate(plans, 1))


def replace_rank(plan: Plan, rank: int) -> Plan:
    """The same plan at another place."""
    return plan.model_copy(update={"rank": rank})


def _plan(job: PlanJob, row: Choice, first: Choice, wish: PlanOptions, record: JobRecord) -> Plan:
    simulated = in_sequence(job, row.plan)
    candidate, peaks, strategy = simulated.candidate, simulated.peaks, simulated.strategy
    fixed = candidate.grid.fixed
    waste = wish.goal.waste(fixed.global_batch, fixed.seq_len)
    need, seconds = offload_need(simulated.census, job.node), time_of(simulated.census, job.gpu, job.node)
    estimate = strategy_record(record, strategy, candidate.layout.gpus, fixed.seq_len, fixed.global_batch)
    return Plan(
        rank=1,
        gpus=candidate.layout.gpus,
        strategy=strategy,
        accumulation_steps=scalar(simulated.single.accumulation),
        global_batch=fixed.global_batch,
        data_parallel=candidate.layout.dp,
        peak=peaks.at(PlanPeak),
        verdict=peaks.verdict,
        flushes=peaks.flushes,
        time=seconds,
        host_memory=need.host,
        tier_memory=need.tier,
        unknown=unknown_to(need, job.node),
        gpu_hours=wish.tokens * waste / candidate.tokens_per_second_per_gpu / 3600,
        statistical_efficiency=1 / waste,
        why=why(simulated, first, wish.goal, seconds),
        parts=candidate.idea.parts,
        special=row.roles,
        own_code=own_code(strategy, job.model),
        job=estimate,
        command=command_line(estimate),
    )


def pareto_ranks(plans: tuple[Plan, ...]) -> tuple[int, ...]:
    """Ranks that no other plan beats in device memory, throughput, GPU count and statistical efficiency at once."""

    def figures(plan: Plan) -> tuple[float, ...]:
        speed = plan.time.tokens_per_second_per_gpu
        return plan.peak.device, -speed, plan.gpus, -plan.statistical_efficiency

    def beats(a: Plan, b: Plan) -> bool:
        ours, theirs = figures(a), figures(b)
        return ours != theirs and all(x <= y for x, y in zip(ours, theirs, strict=True))

    return tuple(p.rank for p in plans if not any(beats(other, p) for other in plans))


def _small_batch(plan: Plan) -> str:
    """Which global batch, in powers of two, makes the bubble short; it and the optimizer's step stay as long."""
    time, batch, steps = plan.time, plan.global_batch, 2
    fixed = time.bubble + time.optimizer
    while time.bubble > SHORT_BUBBLE * (fixed + steps * (time.step - fixed)):
        steps *= 2
    return (
        f"global batch {batch} is a default, and too few micro-batches for its pipeline: "
        f"--global-batch {steps * batch} brings the bubble below {SHORT_BUBBLE:.0%} of the step."
    )


def _waits_for_experts(job: PlanJob, plan: Plan) -> str:
    """What could hide the exchanges of a job's experts, where there are any and none of it was said; else nothing.

    A search takes them as Megatron-LM does by default: a copy for each expert, which its computation waits for. Within
    a node one copy for each rank is faster too: by 22% for Qwen3 235B on B300 (Megatron-Bridge #3490, 26.04.01).
    """
    given = {"moe_dispatcher", "ep_overlap"} & (job.request.given.keys() | job.request.given["fields"].keys())
    able = "true" in habits_of(plan.strategy.framework).capabilities.ep_overlap.values
    far = plan.gpus > job.node.gpus
    if given or not (able and job.model.is_moe and (far or plan.strategy.ep > 1)):
        return ""
    faster = "over several nodes --moe-dispatcher deepep --ep-overlap can be much faster"
    near = "--moe-dispatcher deepep (DeepEP, HybridEP) sends fewer copies"
    return (
        f"tokens travel to experts as Megatron-LM sends them by default; {faster if far else near}, and "
        f"{'' if far else 'can '}put layouts with more of --ep first."
    )


def _unchecked(plans: tuple[Plan, ...]) -> list[str]:
    """Which speeds no published run supports."""
    offloaded = [plan for plan in plans if plan.strategy.offload and not plan.time.validated]
    names = _names(plans)
    listed = "all plans" if len(offloaded) == len(plans) else ", ".join(names[plan.rank] for plan in offloaded)
    text = [f"{listed}: {UNMEASURED_OFFLOAD}."] if offloaded else []
    return text + unchecked_warnings({names[plan.rank]: plan.time for plan in plans if plan not in offloaded})


def _names(plans: tuple[Plan, ...]) -> dict[int, str]:
    """What sentences call the plans, by their ranks: by their GPUs where each has a count of its own."""
    if len(plans) > 1 and len({plan.gpus for plan in plans}) == len(plans):
        return {plan.rank: f"the {plan.gpus}-GPU plan" for plan in plans}
    return {plan.rank: f"#{plan.rank}" for plan in plans}


HOLES = (
    "each new length adds to what the allocator's cache keeps, up to the full card: "
    "--set strategy.expandable_segments=true lets it shrink again"
)


def _may_grow(job: PlanJob, plan: Plan) -> bool:
    """Whether segments could grow, and do not."""
    strategy = plan.strategy
    return job.gpu.vendor == "nvidia" and grows_segments(strategy.framework) and not strategy.expandable_segments


def _uncounted(job: PlanJob, ready: Mapping[int, list[Choice]]) -> tuple[str, ...]:
    """What the job is told to do beside its steps and what nobody here knows, of the first plan."""
    if not ready:
        return ()
    plan = ready[max(ready)][0].plan
    if not asked_for(plan.single.fixed):
        return ()
    return uncounted(plan.census, occasions_of(plan.census, plan.peaks.overhead, job.node))


def _recompute_warnings(job: PlanJob, ready: Mapping[int, list[Choice]]) -> tuple[str, ...]:
    """Of recomputation that was asked for, where the first plan gains little by it."""
    if "recompute" not in job.request.given or not ready:
        return ()
    plan = ready[max(ready)][0].plan
    return recompute_warnings(plan.census, job.gpu, job.node, plan.peaks.overhead)


def _warnings(job: PlanJob, plans: tuple[Plan, ...], outcomes: Mapping[int, SearchResult]) -> list[str]:
    text = code_warnings({_names(plans)[plan.rank]: plan.own_code for plan in plans})
    text += _unchecked(plans)
    text += borrowed_by(job.gpu, (plan.strategy for plan in plans))
    text += [
        f"{name.capitalize()} of {job.node.name} is unknown; offload needs enough of it."
        for name in sorted({name for plan in plans for name in plan.unknown})
    ]
    if plans and is_deprecated(plans[0].strategy):
        text.append(FSDP_1)
    if any(lacks_nvme_swap(plan.strategy) for plan in plans):
        text.append(NO_SWAPPER)
    chosen_batch = "global_batch" in job.request.given or "global_batch" in job.request.choices
    text += {_waits_for_experts(job, plan) for plan in plans[:1]} - {""}
    text += [f"{HOLES}." for plan in plans[:1] if job.lengths and plan.verdict == "tight" and _may_grow(job, plan)]
    empty = [plan for plan in plans[:1] if plan.time.bubble > LONG_BUBBLE * plan.time.step]
    text += [] if chosen_batch else map(_small_batch, empty)
    missing = [gpus for gpus in outcomes if not any(plan.gpus == gpus for plan in plans)]
    if missing and plans:
        text.append(f"no plan fits {', '.join(map(str, missing))} GPU{'s' * (len(missing) > 1 or missing[0] > 1)}.")
    return text
