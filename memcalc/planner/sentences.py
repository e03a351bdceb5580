"""Sentences: a strategy in a few words, why a plan is listed, why a strategy lost, what is too large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memcalc.errors import CombinationError, InputError
from memcalc.frameworks.capabilities import own_code
from memcalc.planner.answer import components_of, strategy_of
from memcalc.planner.budget import offload_need, shortages
from memcalc.planner.choice import best_plan
from memcalc.planner.direct import OWN_CODE
from memcalc.planner.finalists import SimulatedPlan, single_grid, single_ledger, time_of
from memcalc.planner.occasions import failing_beside
from memcalc.planner.request import check_words, flag
from memcalc.planner.stage_peaks import stage_peaks
from memcalc.results.names import component_name, phase_name
from memcalc.specs.options import DEGREES, SEARCHED
from memcalc.units import GIB, signed

if TYPE_CHECKING:
    from memcalc.planner.choice import Choice
    from memcalc.planner.job import PlanJob
    from memcalc.planner.ranking import Objective
    from memcalc.planner.search import Candidate
    from memcalc.results.estimates import StepTime
    from memcalc.results.plans import Plan
    from memcalc.specs.strategy import Strategy


def describe_parts(strategy: Strategy) -> list[str]:
    """What a search decides of a strategy, in a few words."""
    degrees = [f"{flag(name)} {n}" for name in DEGREES if (n := getattr(strategy, name)) > 1]
    if strategy.pp > 1 and strategy.pp_schedule != "1f1b":
        degrees.append(strategy.pp_schedule + (f" with {strategy.vpp} chunks" if strategy.vpp > 1 else ""))
    if strategy.tp > 1 and not strategy.sp:
        degrees.append("no sp")
    return [
        strategy.precision,
        *([f"zero {strategy.zero}"] if strategy.dp * strategy.cp > 1 else []),
        *degrees,
        f"recompute {strategy.recompute}",
        *([f"offload {'+'.join(strategy.offload)}{_tier(strategy)}"] if strategy.offload else []),
        f"micro-batch {strategy.micro_batch}",
    ]


def _tier(strategy: Strategy) -> str:
    return "" if strategy.offload_to == "cpu" else f" to {strategy.offload_to}"


def describe(candidate: Candidate) -> str:
    """A found strategy in a few words."""
    return ", ".join(describe_parts(strategy_of(candidate.grid, candidate.index)))


def why(plan: SimulatedPlan, first: Choice, goal: Objective, seconds: StepTime) -> str:
    """Why a plan is listed, what its time is spent on, where its peak stands."""
    top, overhead = plan.peaks.top, plan.peaks.overhead
    free = f"Peak: {phase_name(top.phase)}, {gib(overhead.capacity - top.device)} GiB headroom."
    caution = f" Tight: {_tight(plan)}." if plan.is_tight else ""
    return f"{_role(plan, first, goal)}. {largest_cost(seconds)}. {free}{caution}"


def _tight(plan: SimulatedPlan) -> str:
    if plan.peaks.is_flushed:
        return f"cached memory fills the rest of the GPU, and PyTorch frees it {plan.peaks.often}"
    return "fits as predicted, not with the 95% margin"


def _role(plan: SimulatedPlan, best: Choice, goal: Objective) -> str:
    gpus = plan.candidate.layout.gpus
    where = f"on {gpus} GPU{'s' * (gpus > 1)}"
    first = best.plan
    if plan is first:
        known = {"memory": f"Smallest plan {where}", "throughput": f"Fastest plan {where}"}
        usual = ", offload and rarely used layouts aside" * best.passes_over
        return known.get(goal.name, f"Simplest plan within 5% of the fastest{usual}")
    speed = plan.candidate.tokens_per_second_per_gpu / first.candidate.tokens_per_second_per_gpu - 1
    less = (plan.peaks.top.device - first.peaks.top.device) / GIB
    return f"{signed(less, 1)} GiB, {signed(100 * speed, 1)}% speed vs #1"


def largest_cost(time: StepTime) -> str:
    """What takes most of the step beside computing."""
    others = ("host", "recompute", "communication", "offload", "optimizer", "bubble")
    largest = max(others, key=lambda name: float(getattr(time, name)))
    name = largest if getattr(time, largest) >= 0.01 * time.step else "compute"
    return f"{name.capitalize()}: {getattr(time, name) / time.step:.0%} of the step"


def gib(size: int) -> str:
    """A size in GiB with one decimal."""
    return f"{size / GIB:.1f}"


def no_fit_gpu(job: PlanJob, smallest: Candidate) -> str:
    """Which component is too large even in the smallest strategy."""
    name, size, device, capacity = largest_component(job, smallest)
    if device <= capacity and (sentence := _no_fit_beside(job, smallest)):
        return sentence
    return (
        f"{smallest.layout.gpus} × {job.gpu.name} needs at least {gib(device)} of {gib(capacity)} GiB per GPU. "
        f"Largest part: {component_name(name)}, {gib(size)} GiB, with {describe(smallest)}."
    )


def _no_fit_beside(job: PlanJob, smallest: Candidate) -> str:
    """What the job is told to do beside its steps and cannot, although the steps of its smallest strategy fit."""
    census, _, overhead = single_ledger(job, smallest)
    failing = failing_beside(census, overhead, job.node)
    needs = ", ".join(f"{each.name} ({each.when}) needs {gib(each.allocated)}" for each in failing)
    between = f"{smallest.layout.gpus} × {job.gpu.name} does not hold what the job does between steps: "
    usable = f"of {gib(overhead.usable)} GiB"
    return f"{between}{needs} {usable}, with {describe(smallest)}." if failing else ""


def no_fit_host(job: PlanJob, candidate: Candidate) -> str:
    """Which memory off the GPU keeps a strategy from running, and whether the GPU does too."""
    need = offload_need(job.on(single_grid(candidate)), job.node)
    lacking = " ".join(shortages(need, job.node))
    _, _, device, capacity = largest_component(job, candidate)
    beside = f" It also needs {gib(device)} of {gib(capacity)} GiB of GPU memory." if device > capacity else ""
    return f"Not enough memory off the GPU for {describe(candidate)}: {lacking}{beside}"


def largest_component(job: PlanJob, candidate: Candidate) -> tuple[str, int, int, int]:
    """The largest component of a strategy's peak, its bytes, and the bytes on the device and of its capacity."""
    census, ledger, overhead = single_ledger(job, candidate)
    top = max(stage_peaks(census, ledger, overhead), key=lambda stage: stage.reserved)
    parts = components_of(ledger, census.grid, top).model_dump()
    name = max(parts, key=lambda key: parts[key])
    return name, parts[name], top.device, overhead.capacity


def why_not(job: PlanJob, question: str, counts: list[int], plans: tuple[Plan, ...]) -> str:
    """One sentence about the best strategy with the words of ``question``, beside the first plan."""
    options = parse_question(question)
    gpus = options.pop("gpus", plans[0].gpus if plans else counts[-1])
    pinned = job.pinned(**options)
    try:
        outcome = pinned.search([gpus]).get(gpus)
    except CombinationError as error:
        return f"{question}: not possible: {error}"
    if outcome is None or outcome.smallest is None:
        return f"{question}: no valid layout and micro-batch on {gpus} GPUs."
    best = best_plan(pinned, gpus)
    if best is None:
        return _too_large(pinned, question, outcome.smallest)
    same = [plan for plan in plans if plan.gpus == gpus]
    time = time_of(best.census, job.gpu, job.node)
    return _slower(question, best, time, same[0]) if same else f"{question} fits: {describe(best.candidate)}."


def parse_question(question: str) -> dict[str, Any]:
    """The words of ``tp=1,zero=3``, each checked as on the command line."""
    raw = split_words(question, "why", SEARCHED)
    return {key: value for key, value in check_words(raw, None).given.items() if key != "fields"}


def split_words(text: str, field: str, known: tuple[str, ...], flags: tuple[str, ...] = ()) -> dict[str, str]:
    """Words with values as typed after an option ``field``; a value may have commas, and a flag needs no value.

    >>> split_words("tp=1,offload=optimizer,params", "why", ("tp", "offload"))
    {'tp': '1', 'offload': 'optimizer,params'}
    """
    raw: dict[str, str] = {}
    name = ""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        word = key.strip().removeprefix("--")
        word = word if "." in word else word.replace("-", "_")
        if equals or word in flags:
            name = word
            if name not in known:
                raise InputError(field, key.strip(), *_allowed(known))
            if name in raw:
                raise InputError(field, key.strip(), "given twice; write several values as tp=1/2")
            raw[name] = value.strip() if equals else "true"
        elif name:
            raw[name] += f",{part.strip()}"
        else:
            raise InputError(field, text, "must be words with values, such as tp=1,zero=3")
    return raw


def _allowed(known: tuple[str, ...]) -> tuple[str, list[str]]:
    """What a word may be, and all its names; fields with a dot are too many to list."""
    names = [flag(name) for name in known]
    plain = ", ".join(name for name in names if "." not in name)
    return f"a word is one of {plain}{', or a field of --set' if len(plain) < len(', '.join(names)) else ''}", names


def _too_large(job: PlanJob, question: str, candidate: Candidate) -> str:
    name, size, device, capacity = largest_component(job, candidate)
    return (
        f"{question} does not fit: it needs at least {gib(device)} of {gib(capacity)} GiB "
        f"({component_name(name)} {gib(size)} GiB), with {describe(candidate)}."
    )


def _slower(question: str, plan: SimulatedPlan, time: StepTime, first: Plan) -> str:
    batch, text = plan.candidate.grid.fixed.global_batch, describe(plan.candidate)
    lost = time.step / batch - first.time.step / first.global_batch
    if lost <= 0:
        return f"{question} is as fast as #1: {text}."
    parts = ("compute", "host", "recompute", "communication", "offload", "optimizer", "bubble")
    each = {name: getattr(time, name) / batch - getattr(first.time, name) / first.global_batch for name in parts}
    worst = max(each, key=lambda name: each[name])
    share = time.step * first.global_batch / (first.time.step * batch) - 1
    return (
        f"{question} fits, {share:.1%} slower than #1. Best such plan: {text}, "
        f"{time.step:.3g} s per step ({worst} +{each[worst] * batch:.3g} s)."
    )


# ---------------------------------------------------------------------------------------------------- code of one's own


MOST_UNASKED = 3_500_000
"""Strategies above which no space is searched for one more sentence: a few seconds."""


def code_warnings(needed: Mapping[str, tuple[str, ...]]) -> list[str]:
    """What code plans need, by the names of the plans; without the names where all of them need it.

    >>> code_warnings({"#1": ("recompute sqrt: wrap runs of blocks",), "#2": ()})
    ['#1 needs code of your own: recompute sqrt: wrap runs of blocks.']
    """
    names: dict[str, list[str]] = {}
    for name, sentences in needed.items():
        for sentence in sentences:
            names.setdefault(sentence, []).append(name)
    return [_code_warning(sentence, listed, len(listed) == len(needed)) for sentence, listed in names.items()]


def _code_warning(sentence: str, names: list[str], is_common: bool) -> str:
    if is_common and len(names) > 1:
        return f"all plans need {OWN_CODE}: {sentence}."
    return f"{', '.join(names)} need{'s' * (len(names) == 1)} {OWN_CODE}: {sentence}."


def is_soon_searched(job: PlanJob, gpus: int) -> bool:
    """Whether the space of a job is small enough to be searched for a sentence that nobody asked for."""
    return job.size(gpus) <= MOST_UNASKED


def unopened(job: PlanJob, gpus: int) -> int:
    """Strategies of the space with code of one's own, where it is too large to be searched unasked; else 0."""
    if job.request.beyond:
        return 0
    wider = _wider(job)
    try:
        return 0 if is_soon_searched(wider, gpus) else wider.size(gpus)
    except InputError:
        return 0


def fits_beyond(job: PlanJob, gpus: int, unopened: int) -> str:
    """Where nothing fits that the framework can be told: what does with which code, or that it was not searched.

    Empty where nothing does. ``unopened`` is as the function of that name gives it.
    """
    if job.request.beyond:
        return ""
    if unopened:
        return f"What fits with {OWN_CODE} was not searched: --beyond searches it too ({unopened:,} strategies)."
    try:
        plan = best_plan(_wider(job), gpus)
    except InputError:
        return ""
    code = own_code(plan.strategy, job.model) if plan else ()
    return f"With code of your own it fits, see --beyond: {'; '.join(code)}." if code else ""


def _wider(job: PlanJob) -> PlanJob:
    return replace(job, request=replace(job.request, assumptions={}, beyond=True), tally=None)
