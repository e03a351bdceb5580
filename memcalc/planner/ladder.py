"""A ladder: a baseline, then one remedy after another, each stage exactly what ``estimate`` says of its command."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from memcalc._version import __version__
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.planner import axes, defaults
from memcalc.planner import request as rq
from memcalc.planner.answer import estimate_of, hardware_facts, model_facts
from memcalc.planner.direct import kinds, offload_of
from memcalc.planner.finalists import time_of, unchecked_warnings
from memcalc.planner.job import chosen_options, split_options, with_query
from memcalc.planner.precision_modes import PRECISION_MODES, mode_of, precision_of, storage_of, usual_modes
from memcalc.planner.recipe import AppliedRemedy, steps_of
from memcalc.planner.sentences import split_words
from memcalc.results.changes import Ladder, LadderReading, LadderStage
from memcalc.results.estimates import Estimate, StepTime
from memcalc.specs.job import JobRecord, command_line
from memcalc.specs.options import FIELDS, FLAGS, RANK_DEGREES, WORDS
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import overhead_of

if TYPE_CHECKING:
    from memcalc.frameworks import Habits
    from memcalc.planner.job import PlanJob

SIXTEEN_BIT = "16-bit"
"""As a precision in a stage: that of the reading."""
STAGES = (f"precision={SIXTEEN_BIT}", "recompute=full")
"""The usual ladder: 16 bits, whole blocks computed again, and at last what the framework can move to host memory."""
SHARDED = 3
"""The ZeRO stage that divides all states over the ranks."""
KNOWN = (*(word for word in WORDS if word != "calibration"), *FIELDS)
"""What a stage may change."""
AS_ESTIMATED = tuple(LadderStage.model_fields.keys() & Estimate.model_fields.keys() - {"saved", "job", "time"})
"""Fields that a stage has of its estimate as they are."""
Words = Mapping[str, Any]
Resolve = Callable[[Words], tuple["PlanJob", "JobRecord"]]
"""From words and dotted fields to the job that they make, and the record of its estimate."""


@dataclass(frozen=True)
class LadderOptions:
    """What is asked of a ladder."""

    stages: tuple[str, ...] = ()
    """As typed after ``--stage``; the usual ones where empty."""
    recipe: bool = False
    mode: str | None = None


@dataclass(frozen=True)
class Change:
    """The words of one stage."""

    text: str
    options: dict[str, Any]
    usual: bool
    """Whether it is one of the usual stages, which is left out where it is not possible."""
    if_needed: bool = False
    """Whether it is left out where a stage before it fits already."""


@dataclass
class LadderRun:
    """One reading's ladder as it is built."""

    resolve: Resolve
    options: dict[str, Any]
    stages: list[LadderStage] = field(default_factory=list)
    assumed: list[dict[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    warnings: dict[str, list[int]] = field(default_factory=dict)
    """Each with the stages that it speaks of."""
    moved: set[str] = field(default_factory=set)
    """Words that change on the way."""
    refused: InputError | None = None

    def take(self, change: Change) -> None:
        """Add a stage; one that is not possible is left out where it is a usual one, and refused by name where not."""
        if change.if_needed and any(stage.verdict == "fits" for stage in self.stages):
            return
        options = {**self.options, **change.options}
        try:
            job, record = self.resolve(options)
            result = evaluated(job, record, self.stages, change)
        except InputError as error:
            if not change.usual:
                raise error.within(f"stage {change.text!r}") if change.text else error from None
            self.refused = error
            self.left_out.append(f"{change.text or 'the start, ' + options['precision']}: {error}")
            return
        stage, text = result
        also = _also(self.assumed[-1], job.request.assumptions, change.options) if self.assumed else {}
        if self.stages:
            self.moved |= {*also, *(name for name, value in options.items() if self.options.get(name) != value)}
        self.options = options
        self.stages.append(stage.model_copy(update={"also": also}))
        self.assumed.append(job.request.assumptions)
        for item in text:
            self.warnings.setdefault(item, []).append(stage.stage)

    @property
    def said(self) -> list[str]:
        """The warnings with their stages, where they are not of all."""
        total = len(self.stages)
        return [text if len(of) == total else f"{_stages(of)}: {text}" for text, of in self.warnings.items()]


def ladder_of(resolve: Resolve, options: Words, wanted: LadderOptions) -> Ladder:
    """The stages of a job under each reading."""
    job, record = resolve(options)
    sharded = {"zero": SHARDED} if _is_unsharded(job, wanted) else {}
    if sharded:
        options = {**options, **sharded}
        job, record = resolve(options)
    changes = _changes(wanted, options, job)
    record = with_query(record, "ladder", recipe=wanted.recipe, reading=wanted.mode, stages=wanted.stages or None)
    base = _assumed(job)
    readings, reasons = _readings(job, options, wanted, changes)
    step = [_climb(resolve, options, wanted, changes, precision) for precision in readings]
    climbs = [climb for climb in step if climb.stages]
    if not climbs and step[0].refused is not None:
        raise step[0].refused
    reasons += [
        f"{name}: {item.refused}".rstrip(".") for name, item in zip(readings, step, strict=True) if not item.stages
    ]
    first = climbs[0].stages[0]
    return Ladder(
        version=__version__,
        model=model_facts(job.model),
        hardware=hardware_facts(job.gpu, job.node, first.strategy.gpus),
        seq_len=defaults.sequence_length(rq.Request({**job.request.given}), job.model),
        capacity=job.gpu.memory_bytes,
        recipe=wanted.recipe,
        readings=tuple(_reading(climb) for climb in climbs),
        left_out=tuple(reasons),
        assumptions=_shared(base, climbs) | {name: str(stage) for name, stage in sharded.items()},
        job=record,
        command=command_line(record),
    )


def _is_unsharded(job: PlanJob, wanted: LadderOptions) -> bool:
    """Whether ranks share nothing by default, where nobody says so and the framework shards when it is told to."""
    if "zero" in job.request.given or any("zero=" in text for text in wanted.stages):
        return False
    stages = defaults.zero_stages(job.request, defaults.habits_for(rq.Request({**job.request.given}))[1])
    ranks = max(int(job.request.given.get("gpus", 1)), prod(job.request.given.get(name, 1) for name in RANK_DEGREES))
    return ranks > 1 and stages[:1] == (0,) and SHARDED in stages


def parse_stage(text: str) -> dict[str, Any]:
    """The words of ``recompute=full,micro-batch=2``; each is checked as on the command line when the stage is made."""
    options = split_words(text, "stage", KNOWN, FLAGS)
    checked = {name: value for name, value in options.items() if (name, value) != ("precision", SIXTEEN_BIT)}
    given = split_options(checked)
    try:
        rq.check_words(given, given.pop("settings"))
    except InputError as error:
        raise error.within(f"stage {text!r}") from None
    return options


def _changes(wanted: LadderOptions, options: Words, job: PlanJob) -> tuple[Change, ...]:
    """The stages, checked; of the usual ones those that the job's own words leave open."""
    if wanted.recipe and wanted.stages:
        raise CombinationError("recipe", True, "--recipe chooses the stages; drop --stage")
    if wanted.stages:
        return tuple(Change(text.strip(), parse_stage(text), usual=False) for text in wanted.stages)
    habits = defaults.habits_for(rq.Request({**job.request.given}))[1]
    moved = offload_of(job.request, habits, job.model)
    texts = [*STAGES, *([f"offload={moved}"] if moved else [])]
    usual = [Change(text, parse_stage(text), usual=True) for text in texts]
    usual[1:1] = _splits(job, habits)
    return tuple(item for item in usual if not set(item.options) & set(options))


def _splits(job: PlanJob, habits: Habits) -> Iterator[Change]:
    """Model parallelism, doubled until a stage fits, where a framework has no other way to divide weights over ranks.

    Within a node experts and tensors, then stages of a pipeline: the order in which Megatron-LM's guides take them.
    """
    gpus = int(job.request.given.get("gpus", 1))
    if gpus == 1 or SHARDED in defaults.zero_stages(job.request, habits):
        return
    inside, able = min(gpus, job.node.gpus_per_host), kinds(job.request, habits, job.model)
    experts = max(getattr(group.block.mlp, "experts", 1) for group in job.model.groups)
    taken = int(job.request.given.get("tp", inside if "tp" in able else 1))
    most = {"ep": min(inside, experts), "tp": inside, "pp": min(gpus // taken, job.model.num_layers)}
    for name in (name for name in most if name in able):
        for degree in (1 << power for power in range(1, most[name].bit_length())):
            split = _split_over(degree, job.model.num_layers) if name == "pp" else {}
            if split is not None:
                text = f"{name}={degree}"
                yield Change(text, {**parse_stage(text), **split}, usual=True, if_needed=True)


def _split_over(stages: int, blocks: int) -> dict[str, Any] | None:
    """How blocks come out even over stages: by themselves, or with embedding and head as one each; None where not."""
    if blocks % stages == 0:
        return {}
    ends = {f"strategy.{name}": True for name in defaults.ENDS_IN_SPLIT}
    return ends if (blocks + 2) % stages == 0 else None


def _readings(
    job: PlanJob, options: Words, wanted: LadderOptions, changes: Sequence[Change]
) -> tuple[list[str], list[str]]:
    """The 16-bit precision of each reading, or the one precision that is given; and why others are not possible."""
    _, habits = defaults.habits_for(rq.Request({**job.request.given}))
    axes.check_pinned(job.request, habits, job.node, job.model)
    zero = int(job.request.given.get("zero", defaults.zero_stages(job.request, habits)[0]))
    named = [
        change.options["precision"] for change in changes if change.options.get("precision", SIXTEEN_BIT) != SIXTEEN_BIT
    ]
    if wanted.mode is not None:
        rq.one_of(wanted.mode, "reading", PRECISION_MODES)
        if named or "precision" in options:
            text = (named or [options["precision"]])[-1]
            raise CombinationError("reading", wanted.mode, f"precision {text} is given, which says the reading")
        return [precision_of(wanted.mode, job.gpu, habits, zero)], []
    if "precision" in options or named:
        return [str(options.get("precision", "fp32"))], []
    result, reasons = usual_modes(job.gpu, habits, zero, frozen=defaults.is_frozen(job.request))
    if not result:
        raise CombinationError("reading", "16-bit", "; ".join(reasons))
    return list(result.values()), reasons


def _climb(
    resolve: Resolve, options: Words, wanted: LadderOptions, changes: Sequence[Change], precision: str
) -> LadderRun:
    if wanted.recipe:
        changes = _recipe_changes(resolve, options, precision)
        climb = LadderRun(resolve, {name: value for name, value in options.items() if name not in changes[0].options})
    else:
        climb = LadderRun(resolve, dict(options))
        climb.take(Change("", {"precision": _start(options, changes, precision)}, usual=not wanted.stages))
        changes = [_under(change, precision) for change in changes]
    for change in changes:
        climb.take(change)
        if not climb.stages and "precision" in change.options:
            break  # without its precision nothing of the reading is left
    return climb


def _start(options: Words, changes: Sequence[Change], precision: str) -> str:
    """fp32 where a stage goes to another precision, else the precision that holds throughout."""
    goes = any("precision" in change.options for change in changes)
    return str(options.get("precision", "fp32" if goes else precision))


def _under(change: Change, precision: str) -> Change:
    if change.options.get("precision") != SIXTEEN_BIT:
        return change
    text = change.text.replace(SIXTEEN_BIT, precision)
    return Change(text, {**change.options, "precision": precision}, change.usual)


def _recipe_changes(resolve: Resolve, options: Words, precision: str) -> list[Change]:
    job, _ = resolve(options)
    gpus = int(job.request.get("gpus", 1))
    gpus = max(gpus, prod(job.request.given.get(name, 1) for name in RANK_DEGREES))
    taken = steps_of(job, gpus, precision)
    if not taken:
        job.refuse([gpus])
    return [_recipe_change(applied, gpus, first=index == 0) for index, applied in enumerate(taken)]


def _recipe_change(taken: AppliedRemedy, gpus: int, *, first: bool) -> Change:
    strategy, fixed = taken.plan.strategy, taken.plan.candidate.grid.fixed
    value = getattr(strategy, taken.word)
    text = "" if first else f"{rq.flag(taken.word)}={','.join(value) if isinstance(value, tuple) else value}"
    return Change(text, dict(chosen_options(strategy, gpus, fixed.seq_len, fixed.global_batch)), usual=False)


def evaluated(
    job: PlanJob, record: JobRecord, before: Sequence[LadderStage], change: Change
) -> tuple[LadderStage, list[str]]:
    """A stage beside the one before it, and what its figures do not know."""
    request = job.request
    grid = axes.single_strategy(request, job.model, job.gpu, job.node)
    overhead = overhead_of(job.gpu, grid, grid.layouts[0])
    census = job.on(grid)
    result = estimate_of(census, job.gpu, job.node, overhead, request, record)
    time, unknown = _time(job, census)
    last = before[-1] if before else None
    stage = LadderStage(
        **{name: getattr(result, name) for name in AS_ESTIMATED},
        stage=len(before),
        change=change.text,
        also={},
        storage=storage_of(grid, result.strategy),
        accumulation_steps=result.workload.accumulation_steps,
        global_batch=result.workload.global_batch,
        context=result.peak.device - result.peak.reserved,
        saved=last.peak.device - result.peak.device if last else 0,
        time=time,
        speed=_speed(time, last),
        job=record,
    )
    return stage, [*result.warnings, *unknown]


def _time(job: PlanJob, census: ModelOnGrid) -> tuple[StepTime | None, list[str]]:
    """The predicted step; none where the GPU's preset lacks a peak."""
    try:
        return time_of(census, job.gpu, job.node), []
    except MissingError as error:
        return None, [str(error)]


def _speed(time: StepTime | None, last: LadderStage | None) -> float | None:
    if time is None or last is None or last.time is None:
        return None
    return time.tokens_per_second_per_gpu / last.time.tokens_per_second_per_gpu


def _reading(climb: LadderRun) -> LadderReading:
    last = climb.stages[-1]
    times = {str(stage.stage): stage.time for stage in climb.stages if stage.time is not None}
    return LadderReading(
        name=mode_of(last.storage),
        precision=last.strategy.precision,
        storage=last.storage,
        stages=tuple(climb.stages),
        first=next((stage.stage for stage in climb.stages if stage.verdict != "does-not-fit"), None),
        left_out=tuple(climb.left_out),
        warnings=(*climb.said, *unchecked_warnings(times, "all stages", _stages)),
    )


def _also(before: Mapping[str, str], now: Mapping[str, str], options: Words) -> dict[str, str]:
    return {name: text for name, text in now.items() if name in before and before[name] != text and name not in options}


def _assumed(job: PlanJob) -> dict[str, str]:
    """What the job's words leave to defaults; nothing where they make no strategy without a stage."""
    try:
        axes.single_strategy(job.request, job.model, job.gpu, job.node)
    except InputError:
        return {}
    return dict(job.request.assumptions)


def _stages(numbers: Sequence[int | str]) -> str:
    """Stages by their numbers.

    >>> _stages([1]), _stages([0, 2])
    ('stage 1', 'stages 0, 2')
    """
    return f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _shared(base: Mapping[str, str], climbs: Sequence[LadderRun]) -> dict[str, str]:
    moved = {"precision"}.union(*(climb.moved for climb in climbs))
    step = {**base, **climbs[0].assumed[0]}
    return {name: text for name, text in step.items() if name not in moved}
