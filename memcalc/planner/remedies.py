"""What makes a job fit that does not: changes in the order of what they cost, each answered by the search itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import combinations
from typing import TYPE_CHECKING, Any, cast

from memcalc import catalog
from memcalc.errors import MemcalcError
from memcalc.frameworks import grows_segments, habits_of
from memcalc.frameworks.capabilities import own_code
from memcalc.frameworks.habits import rewritten
from memcalc.planner import defaults
from memcalc.planner.as_is import check_mixers, check_recorded
from memcalc.planner.budget import offload_need, unknown_to
from memcalc.planner.choice import FASTEST_ONLY, best_plan
from memcalc.planner.direct import smaller_losses
from memcalc.planner.finalists import SimulatedPlan, finalist, time_of
from memcalc.planner.job import strategy_record, value_text
from memcalc.planner.request import check_words, flag
from memcalc.planner.sentences import is_soon_searched
from memcalc.results.plans import Nearest, Plan, RemedyGroup
from memcalc.specs.job import JobRecord, command_line
from memcalc.specs.options import REMEDIES

if TYPE_CHECKING:
    from memcalc.planner.job import PlanJob

FACTORS = (2, 4, 8, 16, 32, 64)
"""How many times as many GPUs are tried, until one fits."""
OTHERS = ("megatron", "torchtitan", "deepspeed")
"""Frameworks that are looked at in place of another one, the one that cuts models in most ways first."""
HALVINGS = 3
"""How often the sequence is halved, until it fits."""
SHORTEST = 512
"""Tokens below which no sequence is proposed."""
MOST, HARDWARE = 3, 2
"""Changes that are listed of each kind, and other GPUs."""
FASTER, SCARCE = 1.5, 0.02
"""How many times as fast a change has to make the first plan that fits, and the share of strategies that fit up to
which such changes are looked for: each is a search of its own."""
NEARLY = 2.0
"""Times the capacity up to which a change that does not suffice is named."""
EXPANDABLE = {"strategy.expandable_segments": True}
"""The environment variable ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""


@dataclass(frozen=True)
class Change:
    """What is typed besides, or in the place of something."""

    group: RemedyGroup
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields by dotted name."""

    @property
    def text(self) -> str:
        """As it is typed.

        >>> Change("numerics", {"optimizer": "adamw-8bit"}, {"strategy.reshard": "never"}).text
        '--optimizer adamw-8bit --set strategy.reshard=never'
        """
        flags = [f"--{flag(name)} {value_text(value)}" for name, value in self.options.items()]
        return " ".join([*flags, *(f"--set {name}={value_text(value)}" for name, value in self.settings.items())])

    def beside(self, other: Change) -> Change:
        """Both, in the group of the other."""
        return Change(other.group, {**self.options, **other.options}, {**self.settings, **other.settings})

    def applied(self, job: PlanJob) -> PlanJob:
        """The job with the change; an error where an option is not possible."""
        options = {name: value for name, value in self.options.items() if name != "gpu"}
        given = check_words(options, self.settings).given
        fields = {**job.request.given["fields"], **given.pop("fields")}
        changed = job.pinned(**given, fields=fields)
        check_recorded(changed.request, job.model)
        check_mixers(changed.request, job.model)
        if "framework" in options:
            changed = replace(changed, model=rewritten(job.model, habits_of(options["framework"]).own_code))
        if "gpu" not in self.options:
            return changed
        gpu = catalog.gpu(self.options["gpu"])
        return type(job)(changed.request, job.model, gpu, catalog.node_for(gpu))

    def recorded(self, record: JobRecord) -> JobRecord:
        """What is asked then."""
        options = {name: value for name, value in self.options.items() if name != "gpu"}
        settings = {**record.settings, **self.settings}
        moved = {"gpu": self.options["gpu"], "node": None} if "gpu" in self.options else {}
        return record.with_options(**options).model_copy(update={"settings": settings, **moved})


WHOLE = Change("another framework", {"framework": "ddp"})
"""A frozen base on each GPU, which FSDP would gather."""


@dataclass(frozen=True)
class Search:
    """A job that does not fit, and the searches for what does."""

    job: PlanJob
    gpus: int
    record: JobRecord
    """What was asked."""
    opened: bool = True
    """Whether what is given may be left to the search."""
    elsewhere: bool = False
    """Whether other frameworks are looked at."""
    _changed: dict[str, PlanJob] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def baseline(self) -> float | None:
        """Throughput of the job as asked for [tokens/s per GPU], whatever its memory."""
        outcome = self.job.unlimited().search([self.gpus], FASTEST_ONLY).get(self.gpus)
        return outcome.best[0].tokens_per_second_per_gpu if outcome and outcome.best else None

    @property
    def given(self) -> Mapping[str, Any]:
        """What the user says."""
        return self.job.request.given

    def changed(self, change: Change) -> PlanJob:
        """The job with a change, which keeps what was found for it."""
        if change.text not in self._changed:
            self._changed[change.text] = change.applied(self.job)
        return self._changed[change.text]

    def fitting(self, change: Change) -> Iterator[Nearest]:
        """The change, where the job fits with it; a tight one with expandable segments too, where it then fits."""
        plan = self.plan(change)
        if plan is None:
            return
        yield self.answer(change, plan)
        if plan.is_tight and self.expandable is not None and not set(EXPANDABLE) & set(change.settings):
            both = self.expandable.beside(change)
            relaxed = self.plan(both)
            if relaxed is not None and not relaxed.is_tight:
                yield self.answer(both, relaxed)

    def plan(self, change: Change) -> SimulatedPlan | None:
        """The plan that the search lists first with a change; None where nothing fits or it is not possible."""
        gpus, same_gpu = int(change.options.get("gpus", self.gpus)), "gpu" not in change.options
        try:
            return best_plan(self.changed(change), gpus, trusting=same_gpu)
        except MemcalcError:
            return None

    def answer(self, change: Change, plan: SimulatedPlan) -> Nearest:
        """What is told of it, with what leaves the GPU."""
        if plan.strategy.offload and "offload" not in change.options and not self.given.get("offload"):
            change = change.beside(Change(change.group, {"offload": value_text(plan.strategy.offload)}))
        record = change.recorded(self.record)
        job, speed = change.applied(self.job), plan.candidate.tokens_per_second_per_gpu
        time, need = time_of(plan.census, job.gpu, job.node), offload_need(plan.census, job.node)
        layout, fixed = plan.candidate.layout, plan.candidate.grid.fixed
        return Nearest(
            change=change.text,
            device=plan.peaks.top.device,
            tokens_per_second_per_gpu=speed,
            slowest=speed * time.step / time.high,
            fastest=speed * time.step / time.low,
            throughput=speed / self.baseline if self.baseline else None,
            verdict=plan.peaks.verdict,
            group=change.group,
            host_memory=need.host,
            unknown=unknown_to(need, job.node),
            job=record,
            command=command_line(record),
            estimate=strategy_record(record, plan.strategy, layout.gpus, fixed.seq_len, fixed.global_batch),
        )

    def offloaded(self, change: Change) -> Iterator[Nearest]:
        """The change with whatever offload the search finds best."""
        try:
            plan = best_plan(change.applied(self.job).freed("offload"), self.gpus, trusting=True)
        except MemcalcError:
            return
        if plan is not None:
            offload = Change(change.group, {"offload": value_text(plan.strategy.offload)})
            yield self.answer(change.beside(offload), plan)

    def short(self, change: Change) -> Iterator[Nearest]:
        """The change, where the job comes near to fitting with it."""
        try:
            job = self.changed(change)
            outcome = job.known(self.gpus)
        except MemcalcError:
            return
        if outcome is None or outcome.smallest is None or outcome.feasible:
            return
        answer = self.answer(replace(change, group="not enough"), finalist(job.unlimited(), outcome.smallest))
        if answer.device <= NEARLY * self.job.gpu.memory_bytes:
            yield answer.model_copy(update={"verdict": "does-not-fit"})

    # ------------------------------------------------------------------------------------------ what may be changed

    @cached_property
    def expandable(self) -> Change | None:
        """Expandable segments, where they are not on."""
        name, habits = defaults.habits_for(self.job.request)
        known = "expandable_segments" in self.given["fields"] or habits.expandable_segments
        able = self.job.gpu.vendor == "nvidia" and grows_segments(name)
        return Change("same training", {}, EXPANDABLE) if able and not known else None

    @cached_property
    def free(self) -> list[Change]:
        """What changes neither the update nor the hardware, and what the framework can be told."""
        _, habits = defaults.habits_for(self.job.request)
        changes = [self.expandable] if self.expandable else []
        if "optimizer_impl" not in self.given and habits.optimizer_impl != "fused" and self._is_adamw:
            changes.append(Change("same training", {"optimizer_impl": "fused"}))
        known = smaller_losses(self.job.request, habits, self.job.model)
        losses = [loss for loss, code in known.items() if not code]
        return changes + [Change("same training", {"loss": loss}) for loss in losses[:1]]

    @property
    def _is_adamw(self) -> bool:
        return "optimizer" not in self.job.request.choices and self.given.get("optimizer", "adamw") == "adamw"

    @cached_property
    def numerics(self) -> list[Change]:
        """Another update of the weights."""
        frozen = defaults.is_frozen(self.job.request)
        narrow = [Change("numerics", {"precision": "bf16"})] if self.given.get("precision") != "bf16" else []
        eight = [Change("numerics", {"optimizer": "adamw-8bit"})] if self._is_adamw else []
        return [] if frozen else narrow + eight

    @cached_property
    def adapters(self) -> list[Change]:
        """Fewer trained parameters."""
        _, habits = defaults.habits_for(self.job.request)
        frozen = {} if defaults.is_frozen(self.job.request) else {"lora": str(habits.lora_rank)}
        group: RemedyGroup = "fewer trained parameters"
        quantised = self.given.get("quantize", "none") != "none"
        return [Change(group, frozen)] * bool(frozen) + [Change(group, {**frozen, "quantize": "nf4"})] * (not quantised)


def instead_of_offload(job: PlanJob, record: JobRecord, plans: tuple[Plan, ...]) -> Iterator[Nearest]:
    """Where the fewest GPUs have plans with offload alone, what makes the job fit there without it."""
    fewest = min((plan.gpus for plan in plans), default=0)
    if "offload" in job.request.given or not all(plan.strategy.offload for plan in plans if plan.gpus == fewest):
        return
    without = record.with_options(gpus=fewest, offload="none")
    spread = "framework" not in job.request.given and fewest > job.node.gpus
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
        copied = fewest > 1 and defaults.is_frozen(job.request) and "framework" not in search.given
        changes = [*search.free, *([WHOLE] if copied else [])]
        yield from (answer for answer in _of_group(search, changes) if answer.verdict == "fits")


def instead_of_slow(job: PlanJob, record: JobRecord, plans: tuple[Plan, ...], share: float) -> Iterator[Nearest]:
    """Where hardly a strategy fits, as this ``share`` of them, what leaves training as it is and is much faster."""
    first = plans[0]
    if share > SCARCE or first.verdict != "fits" or first.strategy.offload:
        return
    search, least = Search(job, first.gpus, record), FASTER * first.time.tokens_per_second_per_gpu
    changes = [*search.free, *([_together(search.free)] if len(search.free) > 1 else [])]
    answers = (answer for change in changes for answer in search.fitting(change) if answer.verdict == "fits")
    yield from (answer for answer in answers if answer.tokens_per_second_per_gpu >= least)


def nearest(job: PlanJob, gpus: int, record: JobRecord, *, elsewhere: bool = False) -> Iterator[Nearest]:
    """What makes a job fit, in the order of what it costs; then what comes near, and does not."""
    search = Search(job, gpus, record, elsewhere=elsewhere)
    yield from _remedies(search)
    yield from _larger_gpu(search)
    short = {answer.change: answer for change in _all_tried(search) for answer in search.short(change)}
    yield from sorted(short.values(), key=lambda answer: answer.device)[:MOST]


def _remedies(search: Search) -> Iterator[Nearest]:
    """What fits on the same GPUs, or on more of them."""
    yield from _of_group(search, search.free)
    yield from _unpinned(search) if search.opened else ()
    yield from _more_gpus(search)
    yield from _other_framework(search) if search.elsewhere else ()
    yield from _of_group(search, search.numerics)
    yield from _with_adapters(search)
    yield from _shorter(search)


def _of_group(search: Search, changes: list[Change]) -> list[Nearest]:
    """Each change alone; where none is enough all of them together."""
    alone = [answer for change in changes for answer in search.fitting(change)]
    return alone or (list(search.fitting(_together(changes))) if len(changes) > 1 else [])


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


def _other_framework(search: Search) -> Iterator[Nearest]:
    """The first of some frameworks with a plan that needs no code, of those whose space is soon searched."""
    name, habits = defaults.habits_for(search.job.request)
    if habits.own_code is not None:  # the model is already that framework's own
        return
    for other in (other for other in OTHERS if other != name.partition("@")[0]):
        change = Change("another framework", {"framework": other})
        try:
            job = search.changed(change)
            plan = search.plan(change) if is_soon_searched(job, search.gpus) else None
        except MemcalcError:
            continue
        if plan is not None and not own_code(plan.strategy, job.model):
            yield search.answer(change, plan)
            return


def _shorter(search: Search) -> Iterator[Nearest]:
    if search.job.model.fixed_tokens.get(search.job.model.main.tower) is not None:
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
