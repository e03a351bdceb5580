"""What makes a job fit that does not: changes in the order of what they cost, each answered by the search itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import accumulate, combinations
from operator import itemgetter
from typing import TYPE_CHECKING, cast

from memcalc import catalog
from memcalc.errors import MemcalcError
from memcalc.frameworks.capabilities import own_code
from memcalc.planner import defaults, sentences
from memcalc.planner.answer import scalar
from memcalc.planner.changes import Change, Search
from memcalc.planner.choice import GAIN, best_plan
from memcalc.planner.finalists import SimulatedPlan
from memcalc.planner.job import value_text
from memcalc.results.plans import Nearest, Plan, RemedyGroup
from memcalc.specs.job import JobRecord
from memcalc.specs.options import REMEDIES

if TYPE_CHECKING:
    from memcalc.planner.job import PlanJob

FACTORS = (2, 4, 8, 16, 32, 64)
"""How many times as many GPUs are tried, until one fits."""
OTHERS = ("fsdp2", "torchtitan", "deepspeed", "megatron")
OF_TRAINER = ("fsdp2", "deepspeed", "torchtitan", "megatron")
"""Frameworks that are looked at in place of another one, the smallest change first: of a loop of one's own, and of the
Trainer, which has the first two as settings. torchtitan has FSDP 2, Megatron-LM modules of its own."""
OF_EXPERTS = "--framework megatron"
"""What is looked at first for experts on several nodes."""
HALVINGS = 3
"""How often the sequence is halved, until it fits."""
SHORTEST = 512
"""Tokens below which no sequence is proposed."""
MOST, HARDWARE = 3, 2
"""Changes that are listed of each kind, and other GPUs."""
FASTER, SCARCE = 1.5, 0.02
"""How many times as fast a change has to make the first plan that fits, and the share of strategies that fit up to
which such changes are looked for: each is a search of its own."""
SPENT = 1 / 3
"""Share of a step in messages, recomputation and an empty pipeline from which other frameworks are looked at."""


def instead_of_offload(job: PlanJob, record: JobRecord, plans: tuple[Plan, ...]) -> Iterator[Nearest]:
    """Where the fewest GPUs have plans with offload alone, what makes the job fit there without it."""
    fewest = min((plan.gpus for plan in plans), default=0)
    if "offload" in job.request.given or not all(plan.strategy.offload for plan in plans if plan.gpus == fewest):
        return
    without = record.with_options(gpus=fewest, offload="none")
    spread = "framework" not in job.request.given and (fewest > job.node.gpus or (fewest > 1 and job.model.is_moe))
    search = Search(job.pinned(offload=(), gpus=fewest), fewest, without, opened=False, elsewhere=spread)
    yield from (answer for answer in _remedies(search) if answer.group != "not enough")


def instead_of_tight(job: PlanJob, record: JobRecord, plans: tuple[Plan, ...]) -> Iterator[Nearest]:
    """Where the plans on the fewest GPUs are all tight, what leaves training as it is and makes the job fit there."""
    fewest = min((plan.gpus for plan in plans), default=0)
    here = [plan for plan in plans if plan.gpus == fewest]
    if all(plan.verdict == "tight" for plan in here):
        pinned, request = job.pinned(gpus=fewest), record.with_options(gpus=fewest)
        if here and not here[0].strategy.offload and "offload" not in job.request.given:
            pinned, request = pinned.pinned(offload=()), request.with_options(offload="none")
        search = Search(pinned, fewest, request)
        yield from (answer for answer in _of_group(search, search.free) if answer.verdict == "fits")


def instead_of_slow(job: PlanJob, record: JobRecord, plans: tuple[Plan, ...], share: float) -> Iterator[Nearest]:
    """Where hardly a strategy fits, as this ``share`` of them, what leaves training as it is and is much faster."""
    first = plans[0]
    if share > SCARCE or first.verdict != "fits" or first.strategy.offload:
        return
    search, least = Search(job, first.gpus, record), FASTER * first.time.tokens_per_second_per_gpu
    reached = (each for change in _reaching(search, least) for each in search.plans(change))
    fitting = ((made, plan) for made, plan in reached if plan.peaks.verdict == "fits")
    yield from (search.answer(*each) for each in fitting if each[1].candidate.tokens_per_second_per_gpu >= least)


def _reaching(search: Search, least: float) -> list[Change]:
    """What is free, and all of it together, where a plan that is as fast may run with it [tokens/s per GPU].

    Expandable segments take no time: what is too slow with them is so without.
    """
    free = search.free
    changes = [*free, *([_together(free)] if len(free) > 1 else [])]
    if len(free) == 2 and free[0] == search.expandable and not search.may_reach(changes[-1], least):
        changes = free[:1]
    return [change for change in changes if search.may_reach(change, least)]


def in_another_framework(job: PlanJob, record: JobRecord, plans: tuple[Plan, ...]) -> Iterator[Nearest]:
    """Where the first plan spends much of a step on what pays for its memory, frameworks that are much faster."""
    first, time = plans[0], plans[0].time
    spends = time.communication + time.recompute + time.bubble >= SPENT * time.step and first.gpus > job.node.gpus
    if not spends or "framework" in job.request.given or first.verdict != "fits" or first.strategy.offload:
        return
    least = FASTER * time.tokens_per_second_per_gpu
    others = _other_frameworks(Search(job, first.gpus, record), least)
    answers = [answer for answer in others if not answer.host_memory]
    yield from (answer for answer in answers if answer.verdict == "fits" and answer.tokens_per_second_per_gpu >= least)


def nearest(job: PlanJob, gpus: int, record: JobRecord, *, elsewhere: bool = False) -> Iterator[Nearest]:
    """What makes a job fit, in the order of what it costs; then what comes near, and does not."""
    search = Search(job, gpus, record, elsewhere=elsewhere)
    remedies = list(_remedies(search))
    yield from remedies
    yield from _larger_gpu(search)
    paged = {change.text for change in search.paged} & {answer.change for answer in remedies}
    yield from _short(search, [change for change in _all_tried(search) if not (paged and change.group == "numerics")])


def _short(search: Search, tried: list[Change]) -> list[Nearest]:
    """Of what does not suffice what comes nearest; none is replayed that allocates more than these show."""
    least = {index: size for index, change in enumerate(tried) if (size := search.least(change)) is not None}
    answers: dict[str, tuple[int, int, Nearest]] = {}
    for index in sorted(least, key=lambda index: least[index]):
        nearer = sorted(device for device, _, _ in answers.values())[:MOST]
        if len(nearer) == MOST and least[index] > nearer[-1]:
            break
        answers |= {answer.change: (answer.device, index, answer) for answer in search.short(tried[index])}
    return [answer for _, _, answer in sorted(answers.values(), key=itemgetter(0, 1))][:MOST]


def _remedies(search: Search) -> Iterator[Nearest]:
    """What fits on the same GPUs, or on more of them."""
    yield from _of_group(search, search.free)
    yield from _unpinned(search) if search.opened else ()
    yield from _more_gpus(search)
    yield from _other_frameworks(search) if search.elsewhere else ()
    yield from _of_group(search, search.numerics) or _first(search, search.paged)
    yield from _with_adapters(search)
    yield from _shorter(search)


def _of_group(search: Search, changes: list[Change]) -> list[Nearest]:
    """Each change alone; where none is enough all of them together."""
    alone = [answer for change in changes for answer in search.fitting(change)]
    return alone or (list(search.fitting(_together(changes))) if len(changes) > 1 else [])


def _first(search: Search, changes: list[Change]) -> list[Nearest]:
    """The first change with which the job fits; a tight one where none does."""
    tight: list[Nearest] = []
    for change in changes:
        answers = list(search.fitting(change))
        if any(answer.verdict == "fits" for answer in answers):
            return answers
        tight = tight or answers
    return tight


def _with_adapters(search: Search) -> list[Nearest]:
    """Adapters; where they are not enough with what is free, and then with offload."""
    answers = [answer for change in search.adapters for answer in search.fitting(change)]
    if answers or not search.adapters:
        return answers
    last = search.adapters[-1]
    answers = list(search.fitting(_together([*search.free, last])))
    return answers or ([] if search.opened else list(_offloaded_safely(search, last)))


def _offloaded_safely(search: Search, change: Change) -> Iterator[Nearest]:
    """The change with offload; where that is tight, beside each of what is free with which it fits."""
    answers = list(search.offloaded(change))
    yield from answers
    if any(answer.verdict == "tight" for answer in answers):
        relaxed = [answer for free in search.free for answer in search.offloaded(free.beside(change))]
        yield from (answer for answer in relaxed if answer.verdict == "fits")


def _together(changes: list[Change]) -> Change:
    return reduce(lambda first, second: first.beside(second), changes)


def _all_tried(search: Search) -> Iterator[Change]:
    """The changes of each group, and all of it together, the groups of which nothing fits among them."""
    for changes in (search.free, search.numerics, search.adapters):
        yield from changes
        if len(changes) > 1:
            yield _together(changes)


def _unpinned(search: Search) -> Iterator[Nearest]:
    """Each option that is given left to the search; two of them where one is not enough."""
    job = search.job
    given = [name for name in REMEDIES if name in job.request.given or name in job.request.choices]
    singles = [answer for name in given for answer in _freed(search, (name,))]
    yield from singles or [answer for names in combinations(given, 2) for answer in _freed(search, names)][:MOST]


def _freed(search: Search, names: tuple[str, ...]) -> Iterator[Nearest]:
    try:
        plan = best_plan(search.job.freed(*names), search.gpus, trusting=True)
    except MemcalcError:
        return
    if plan is not None:
        group = "numerics" if "precision" in names else "same training"
        options = {name: getattr(plan.strategy, name) for name in names}
        typed = {name: value_text(value) if isinstance(value, tuple) else value for name, value in options.items()}
        yield search.answer(Change(cast("RemedyGroup", group), typed), plan)


def _more_gpus(search: Search) -> Iterator[Nearest]:
    for factor in FACTORS if search.opened else FACTORS[:3]:
        answers = list(search.fitting(Change("same training", {"gpus": search.gpus * factor})))
        if answers:
            yield from answers
            return


def _other_frameworks(search: Search, least: float = 0) -> list[Nearest]:
    """Frameworks with a plan that needs no code; those that offload where no other fits.

    The small spaces are searched first, until all together are too large for a sentence that nobody asked for; for
    experts on several nodes Megatron-LM's, whose bounds leave little of it to evaluate. Those that are much slower than
    the fastest come last, and those of which no configuration can be written not at all.
    What does not reach ``least`` [tokens/s per GPU] is left out where it keeps no other from being named.
    """
    name, habits = defaults.habits_for(search.job.request)
    if habits.own_code is not None:  # the model is already that framework's own
        return []
    stem = name.partition("@")[0]
    order = [other for other in (OF_TRAINER if stem in {"hf", "ddp", "deepspeed"} else OTHERS) if other != stem]
    changes = [Change("another framework", {"framework": other}) for other in order]
    sizes = {change.text: _size(search, change) for change in changes}
    spread = search.job.model.is_moe and search.gpus > search.job.node.gpus
    leads = spread and sizes.get(OF_EXPERTS, 0) <= sentences.MOST_UNASKED
    by_size = sorted(changes, key=lambda change: (not (leads and change.text == OF_EXPERTS), sizes[change.text]))
    together = accumulate(sizes[change.text] for change in by_size)
    tried = [c for c, most in zip(by_size, together, strict=True) if sizes[c.text] and most <= sentences.MOST_UNASKED]
    fast = [change for change in tried if not least or search.may_reach(change, least)]
    fitting = _fitting(search, fast)
    if fast != tried and fitting and not any(_is_preferred(search, plan) for plan in fitting.values()):
        fitting |= _fitting(search, [change for change in tried if change not in fast])
    written = {text: plan for text, plan in fitting.items() if _is_written(search, plan)} or fitting
    resident = {text: plan for text, plan in written.items() if not plan.strategy.offload} or written
    fastest = min((plan.candidate.key for plan in resident.values()), default=0.0)
    known = [change for change in changes if change.text in resident]
    known.sort(key=lambda change: resident[change.text].candidate.key > GAIN * fastest)
    return [search.answer(change, resident[change.text]) for change in known][:MOST]


def _fitting(search: Search, changes: Iterable[Change]) -> dict[str, SimulatedPlan]:
    """The plans of some changes that need no code, by what is typed."""
    plans = ((change, search.plan(change)) for change in changes)
    return {
        change.text: plan
        for change, plan in plans
        if plan is not None and not own_code(plan.strategy, search.changed(change).model)
    }


def _is_preferred(search: Search, plan: SimulatedPlan) -> bool:
    """Whether what others offer, being slower, keeps no plan from being named."""
    return not plan.strategy.offload and _is_written(search, plan)


def _is_written(search: Search, plan: SimulatedPlan) -> bool:
    """Whether memcalc writes a configuration of a plan, which a framework may not have for the model."""
    from memcalc.convert.formats.base import ConfigJob, is_written

    layout, fixed = plan.candidate.layout, plan.candidate.grid.fixed
    config = ConfigJob(
        model=str(search.record.model),
        gpu=search.job.gpu.name,
        gpus=layout.gpus,
        nodes=-(-layout.gpus // search.job.node.gpus),
        seq_len=fixed.seq_len,
        global_batch=fixed.global_batch,
        accumulation=scalar(plan.single.accumulation),
        strategy=plan.strategy,
        spec=plan.census.model,
    )
    return is_written(config)


def _size(search: Search, change: Change) -> int:
    """Strategies of the space with a change; 0 where it is not possible."""
    try:
        return search.changed(change).size(search.gpus)
    except MemcalcError:
        return 0


def _shorter(search: Search) -> Iterator[Nearest]:
    if search.job.model.fixed_length is not None:
        return
    length = defaults.sequence_length(search.job.pinned().request, search.job.model)
    for halvings in range(1, HALVINGS + 1):
        shorter = length >> halvings
        answers = list(search.fitting(Change("shorter sequences", {"seq_len": shorter}))) if shorter >= SHORTEST else []
        if answers:
            yield from answers
            return


def _larger_gpu(search: Search) -> Iterator[Nearest]:
    job_gpu = search.job.gpu
    larger = [gpu for gpu in map(catalog.gpu, catalog.names("gpu")) if gpu.memory_bytes > job_gpu.memory_bytes]
    listed = 0
    for gpu in sorted(larger, key=lambda gpu: (gpu.vendor != job_gpu.vendor, gpu.memory_bytes)):
        answers = list(search.fitting(Change("other hardware", {"gpu": gpu.name})))
        yield from answers
        listed += bool(answers)
        if listed == HARDWARE:
            return
