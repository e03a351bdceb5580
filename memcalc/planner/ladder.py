"""A ladder: a baseline, then one remedy after another, each stage exactly what ``estimate`` says of its command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memcalc import __version__, results
from memcalc.errors import CombinationError, InputError, MissingError
from memcalc.frameworks import habits_of
from memcalc.planner import axes
from memcalc.planner import request as rq
from memcalc.planner.answer import estimate_of, hardware_facts, model_facts
from memcalc.planner.plans import chosen_words
from memcalc.planner.question import split_words
from memcalc.planner.readings import READINGS, precision_of, reading_of, storage_of, usual_readings
from memcalc.planner.recipe import Taken, steps_of
from memcalc.planner.settings import FIELDS
from memcalc.planner.timed import time_of, unvalidated
from memcalc.specs.strategy import FRAMEWORKS
from memcalc.terms import Census, overhead_of

if TYPE_CHECKING:
    from memcalc.planner.job import Job

SIXTEEN_BIT = "16-bit"
"""As a precision in a stage: that of the reading."""
STAGES = (f"precision={SIXTEEN_BIT}", "recompute=full", "offload=optimizer")
"""The usual ladder: 16 bits, whole blocks computed again, optimizer states in host memory."""
KNOWN = (*(word for word in rq.WORDS if word != "calibration"), *FIELDS)
"""What a stage may change."""
Words = Mapping[str, Any]
Resolve = Callable[[Words], tuple["Job", str]]
"""From words and dotted fields to the job that they make, and its ``memcalc estimate`` line."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of a ladder."""

    stages: tuple[str, ...] = ()
    """As typed after ``--stage``; the usual ones where empty."""
    recipe: bool = False
    reading: str | None = None


@dataclass(frozen=True)
class Change:
    """The words of one stage."""

    text: str
    words: dict[str, Any]
    usual: bool
    """Whether it is one of the usual stages, which is left out where it is not possible."""


@dataclass
class Climb:
    """One reading's ladder as it is built."""

    resolve: Resolve
    words: dict[str, Any]
    stages: list[results.LadderStage] = field(default_factory=list)
    assumed: list[dict[str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    warnings: dict[str, list[int]] = field(default_factory=dict)
    """Each with the stages that it speaks of."""
    moved: set[str] = field(default_factory=set)
    """Words that change on the way."""
    refused: InputError | None = None

    def take(self, change: Change) -> None:
        """Add a stage; one that is not possible is left out where it is a usual one, and refused by name where not."""
        words = {**self.words, **change.words}
        try:
            job, command = self.resolve(words)
            found = evaluated(job, command, self.stages, change)
        except InputError as error:
            if not change.usual:
                raise error.within(f"stage {change.text!r}") if change.text else error from None
            self.refused = error
            self.left_out.append(f"{change.text or 'the start, ' + words['precision']}: {error}")
            return
        stage, said = found
        also = _also(self.assumed[-1], job.request.assumptions, change.words) if self.assumed else {}
        if self.stages:
            self.moved |= {*also, *(name for name, value in words.items() if self.words.get(name) != value)}
        self.words = words
        self.stages.append(stage.model_copy(update={"also": also}))
        self.assumed.append(job.request.assumptions)
        for one in said:
            self.warnings.setdefault(one, []).append(stage.stage)

    @property
    def said(self) -> list[str]:
        """The warnings with their stages, where they are not of all."""
        every = len(self.stages)
        return [text if len(of) == every else f"{_stages(of)}: {text}" for text, of in self.warnings.items()]


def ladder_of(resolve: Resolve, own: Words, wanted: Wanted, command: str) -> results.Ladder:
    """The stages of a job under each reading."""
    changes = _changes(wanted, own)
    job, _ = resolve(own)
    base = _assumed(job)
    readings, reasons = _readings(job, own, wanted, changes)
    every = [_climb(resolve, own, wanted, changes, precision) for precision in readings]
    climbs = [climb for climb in every if climb.stages]
    if not climbs and every[0].refused is not None:
        raise every[0].refused
    reasons += [
        f"{name}: {one.refused}".rstrip(".") for name, one in zip(readings, every, strict=True) if not one.stages
    ]
    first = climbs[0].stages[0]
    return results.Ladder(
        version=__version__,
        model=model_facts(job.model),
        hardware=hardware_facts(job.gpu, job.node, first.strategy.gpus),
        seq_len=rq.sequence_length(rq.Request({**job.request.given}), job.model),
        capacity=job.gpu.memory_bytes,
        recipe=wanted.recipe,
        readings=tuple(_reading(climb) for climb in climbs),
        left_out=tuple(reasons),
        assumptions=_shared(base, climbs),
        command=command,
    )


# ----------------------------------------------------------------------------------------------------- what is asked


def parse_stage(text: str) -> dict[str, Any]:
    """The words of ``recompute=full,micro-batch=2``; each is checked as on the command line when the stage is made."""
    words = split_words(text, "stage", KNOWN, rq.FLAGS)
    if words.get("precision") != SIXTEEN_BIT:
        _check(text, words)
    else:
        _check(text, {name: value for name, value in words.items() if name != "precision"})
    return words


def _check(text: str, words: dict[str, str]) -> None:
    """Refuse a value that a word cannot have, before anything is computed."""
    plain, fields = apart(words)
    try:
        rq.check_words(plain, fields)
    except InputError as error:
        raise error.within(f"stage {text!r}") from None


def apart(words: Words) -> tuple[dict[str, Any], dict[str, Any]]:
    """Words with an option of their own, and fields that ``--set`` names."""
    fields = {name: value for name, value in words.items() if "." in name}
    return {name: value for name, value in words.items() if name not in fields}, fields


def together(words: Words, settings: Words | None) -> dict[str, Any]:
    """Words and fields as one, a field that is a word under that word's name."""
    given = {name: value for name, value in words.items() if value is not None}
    return {**given, **{rq.SETTINGS.get(key, key): value for key, value in (settings or {}).items()}}


def typed(stages: Sequence[str]) -> list[str]:
    """Stages as they are typed.

    >>> typed(["recompute=full"])
    ['--stage recompute=full']
    """
    return [f"--stage {shlex.quote(text)}" for text in stages]


def _changes(wanted: Wanted, own: Words) -> tuple[Change, ...]:
    """The stages, checked; of the usual ones those that the job's own words leave open."""
    if wanted.recipe and wanted.stages:
        raise CombinationError("recipe", True, "it chooses the stages itself, so --stage must be left out")
    if wanted.stages:
        return tuple(Change(text.strip(), parse_stage(text), usual=False) for text in wanted.stages)
    usual = [Change(text, parse_stage(text), usual=True) for text in STAGES]
    return tuple(one for one in usual if not set(one.words) & set(own))


def _readings(job: Job, own: Words, wanted: Wanted, changes: Sequence[Change]) -> tuple[list[str], list[str]]:
    """The 16-bit precision of each reading, or the one precision that is given; and why others are not possible."""
    habits = habits_of(str(job.request.given.get("framework", FRAMEWORKS[0])))
    zero = int(job.request.given.get("zero", rq.zero_stages(job.request, habits)[0]))
    named = [
        change.words["precision"] for change in changes if change.words.get("precision", SIXTEEN_BIT) != SIXTEEN_BIT
    ]
    if wanted.reading is not None:
        rq.one_of(wanted.reading, "reading", READINGS)
        if named or "precision" in own:
            said = (named or [own["precision"]])[-1]
            raise CombinationError("reading", wanted.reading, f"precision {said} is given, which says the reading")
        return [precision_of(wanted.reading, job.gpu, habits, zero)], []
    if "precision" in own or named:
        return [str(own.get("precision", "fp32"))], []
    found, reasons = usual_readings(job.gpu, habits, zero)
    if not found:
        raise CombinationError("reading", "16-bit", "; ".join(reasons))
    return list(found.values()), reasons


# ------------------------------------------------------------------------------------------------------- the stages


def _climb(resolve: Resolve, own: Words, wanted: Wanted, changes: Sequence[Change], precision: str) -> Climb:
    """One reading's stages."""
    if wanted.recipe:
        changes = _recipe_changes(resolve, own, precision)
        climb = Climb(resolve, {name: value for name, value in own.items() if name not in changes[0].words})
    else:
        climb = Climb(resolve, dict(own))
        climb.take(Change("", {"precision": _start(own, changes, precision)}, usual=not wanted.stages))
        changes = [_under(change, precision) for change in changes]
    for change in changes:
        climb.take(change)
        if not climb.stages and "precision" in change.words:
            break  # without its precision nothing of the reading is left
    return climb


def _start(own: Words, changes: Sequence[Change], precision: str) -> str:
    """fp32 where a stage goes to another precision, else the precision that holds throughout."""
    goes = any("precision" in change.words for change in changes)
    return str(own.get("precision", "fp32" if goes else precision))


def _under(change: Change, precision: str) -> Change:
    """A stage with the precision of a reading in the place of ``16-bit``."""
    if change.words.get("precision") != SIXTEEN_BIT:
        return change
    text = change.text.replace(SIXTEEN_BIT, precision)
    return Change(text, {**change.words, "precision": precision}, change.usual)


def _recipe_changes(resolve: Resolve, own: Words, precision: str) -> list[Change]:
    """The usual order of tuning, each step with all that the search chose there."""
    job, _ = resolve(own)
    gpus = int(job.request.get("gpus", 1))
    degrees = {name: job.request.given.get(name, 1) for name in ("tp", "pp", "cp")}
    gpus = max(gpus, degrees["tp"] * degrees["pp"] * degrees["cp"])
    taken = steps_of(job, gpus, precision)
    if not taken:
        job.refuse([gpus])
    return [_recipe_change(one, gpus, first=place == 0) for place, one in enumerate(taken)]


def _recipe_change(taken: Taken, gpus: int, *, first: bool) -> Change:
    strategy, fixed = taken.one.strategy, taken.one.found.grid.fixed
    value = getattr(strategy, taken.word)
    text = "" if first else f"{rq.flag(taken.word)}={','.join(value) if isinstance(value, tuple) else value}"
    return Change(text, dict(chosen_words(strategy, gpus, fixed.seq_len, fixed.global_batch)), usual=False)


def evaluated(
    job: Job, command: str, before: Sequence[results.LadderStage], change: Change
) -> tuple[results.LadderStage, list[str]]:
    """A stage beside the one before it, and what its figures do not know."""
    request = job.request
    grid = axes.one_strategy(request, job.model, job.gpu, job.node)
    overhead = overhead_of(job.gpu, grid, grid.layouts[0])
    found = estimate_of(job.model, grid, job.gpu, job.node, overhead, request, command)
    time, unknown = _time(job, Census(job.model, grid))
    last = before[-1] if before else None
    stage = results.LadderStage(
        stage=len(before),
        change=change.text,
        also={},
        storage=storage_of(habits_of(found.strategy.framework), found.strategy),
        strategy=found.strategy,
        accumulation_steps=found.workload.accumulation_steps,
        global_batch=found.workload.global_batch,
        peak=found.peak,
        interval=found.interval,
        verdict=found.verdict,
        components=found.components,
        context=found.peak.device - found.peak.reserved,
        phases=found.phases,
        saved=last.peak.device - found.peak.device if last else 0,
        time=time,
        speed=_speed(time, last),
        host_memory=found.host_memory,
        tier_memory=found.tier_memory,
        command=command,
    )
    return stage, [*found.warnings, *unknown]


def _time(job: Job, census: Census) -> tuple[results.StepTime | None, list[str]]:
    """The predicted step; none where the GPU's preset lacks a peak."""
    try:
        return time_of(census, job.gpu, job.node), []
    except MissingError as error:
        return None, [str(error)]


def _speed(time: results.StepTime | None, last: results.LadderStage | None) -> float | None:
    if time is None or last is None or last.time is None:
        return None
    return time.tokens_per_second_per_gpu / last.time.tokens_per_second_per_gpu


# ------------------------------------------------------------------------------------------------- what is said of them


def _reading(climb: Climb) -> results.LadderReading:
    last = climb.stages[-1]
    times = {f"stage {stage.stage}": stage.time for stage in climb.stages if stage.time is not None}
    return results.LadderReading(
        name=reading_of(last.storage),
        precision=last.strategy.precision,
        storage=last.storage,
        stages=tuple(climb.stages),
        first=next((stage.stage for stage in climb.stages if stage.verdict != "does-not-fit"), None),
        left_out=tuple(climb.left_out),
        warnings=(*climb.said, *unvalidated(times)),
    )


def _also(before: Mapping[str, str], now: Mapping[str, str], words: Words) -> dict[str, str]:
    """Defaults that a stage changes besides its own words."""
    return {name: said for name, said in now.items() if name in before and before[name] != said and name not in words}


def _assumed(job: Job) -> dict[str, str]:
    """What the job's words leave to defaults; nothing where they make no strategy without a stage."""
    try:
        axes.one_strategy(job.request, job.model, job.gpu, job.node)
    except InputError:
        return {}
    return dict(job.request.assumptions)


def _stages(numbers: Sequence[int]) -> str:
    """Stages by their numbers.

    >>> _stages([1]), _stages([0, 2])
    ('stage 1', 'stages 0, 2')
    """
    return f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _shared(base: Mapping[str, str], climbs: Sequence[Climb]) -> dict[str, str]:
    """Defaults that hold at every stage of every reading."""
    moved = {"precision"}.union(*(climb.moved for climb in climbs))
    every = {**base, **climbs[0].assumed[0]}
    return {name: said for name, said in every.items() if name not in moved}
