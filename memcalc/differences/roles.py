"""Two jobs of post-training beside one another, from whatever names them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memcalc._version import __version__
from memcalc.convert.document import read_text
from memcalc.differences.changes import groups, named
from memcalc.differences.inputs import Given, file_names, is_options, schema_of, text_of
from memcalc.errors import CombinationError, InputError, MemcalcError, MissingError
from memcalc.files import there
from memcalc.handoff.saved import record_from
from memcalc.planner.job import split_options
from memcalc.planner.sentences import split_words
from memcalc.posttraining.figures import Figures
from memcalc.posttraining.steps import (
    FLAGS,
    KNOWN,
    PLACES,
    State,
    fields_between,
    job_of,
    state_of,
    step_of,
    step_samples,
)
from memcalc.preflight.job import read_files
from memcalc.preflight.merge import merge
from memcalc.preflight.roles import role_words
from memcalc.results.posttraining import Rl, RlDiff, RlPlan, RlPlans, RlStep
from memcalc.specs.job import JobRecord, render
from memcalc.specs.options import WORDS
from memcalc.specs.posttraining import LAYOUT, RL_WORDS, TRAINING
from memcalc.units import parse_count

_LAST = ("micro_batch", "micro_tokens", "logprob_batch", "logprob_tokens")
ORDER = (
    *PLACES, "framework", "algorithm", "trainer", *LAYOUT, *TRAINING,
    *(name for name in RL_WORDS if name not in _LAST), *_LAST,
)  # fmt: skip
"""Words in the order in which their changes are applied."""
Words = Mapping[str, Any]
RlGiven = Given | Rl | RlPlan
"""What may be compared: what may be of any job, or an answer about post-training."""


@dataclass(frozen=True)
class RlSide:
    """One job of a comparison, before the options that count for both."""

    name: str
    typed: Words
    """Those of the job; of a text of words those that stand on another job."""
    complete: bool
    """Whether it names a job by itself."""
    dirs: tuple[str, ...] = ()


def diff_roles(a: RlGiven, b: RlGiven, shared: Words, dirs: tuple[str, ...]) -> RlDiff | None:
    """Compare two jobs of post-training; None where neither side, nor what counts for both, is of any."""
    sides = [_side(index, given, shared, dirs) for index, given in (("A", a), ("B", b))]
    first, second = sides
    named_so = "algorithm" in shared or any(side is not None and side.complete for side in sides)
    if not named_so:
        return None
    if first is None or second is None:
        index, given = ("A", a) if first is None else ("B", b)
        text = given if isinstance(given, str) else type(given).__name__
        if is_options(text):
            split_words(text, f"word of {index}", KNOWN, FLAGS)
        raise InputError(index, text, "must be post-training as the other job is")
    dirs = dirs or tuple(dict.fromkeys((*first.dirs, *second.dirs)))
    check_shared(shared)
    before, after = (_words(side, other, shared) for side, other in ((first, second), (second, first)))
    return compared((first.name, second.name), before, after, dirs, _command(a, b, shared, dirs))


def check_shared(shared: Words) -> None:
    """Refuse what counts for both jobs and post-training has not."""
    for name, value in shared.items():
        if name not in KNOWN:
            raise CombinationError(name.replace("_", "-"), value, "post-training takes the options of memcalc rl alone")


def _words(side: RlSide, other: RlSide, shared: Words) -> dict[str, Any]:
    """The words of a side: on those of the other where it names no job and the other does."""
    typed = {**side.typed, **shared} if side.complete else {**shared, **side.typed}
    if not side.complete and other.complete:
        typed = {**other.typed, **typed}
        if "micro_tokens" in side.typed:
            typed.pop("micro_batch", None)
        elif "micro_batch" in side.typed:
            typed.pop("micro_tokens", None)
    for name in ("model", "gpu", "gpus"):
        if typed.get(name) is None:
            raise MissingError(f"{side.name} names no {name}. Pass --{name}.")
    return typed


def compared(names: tuple[str, str], before: Words, after: Words, dirs: tuple[str, ...], command: str = "") -> RlDiff:
    """The comparison of two jobs, each by the words of ``memcalc rl``."""
    jobs = []
    for index, typed in (("A", before), ("B", after)):
        try:
            jobs.append(job_of(typed, dirs, {}))
        except InputError as error:
            raise error.within(index) from None
    figures, samples = Figures(), max(map(step_samples, jobs))
    start, end = (state_of(typed, dirs, figures, samples) for typed in (before, after))
    stated = {*before, *after}
    return RlDiff(
        version=__version__,
        names=names,
        a=start.answer,
        b=end.answer,
        fields=fields_between(start.job, end.job, stated),
        samples=samples,
        start=start.figures,
        steps=RoleSteps(start, end, dirs, figures, samples).steps(),
        warnings=_warnings(start.answer, end.answer),
        command=command,
    )


def _warnings(a: Rl, b: Rl) -> tuple[str, ...]:
    both = [warning for warning in a.warnings if warning in b.warnings]
    single = [f"{index}: {text}" for index, side in (("A", a), ("B", b)) for text in side.warnings if text not in both]
    return (*both, *single)


@dataclass
class RoleSteps:
    """The steps from A to B; jobs that are met twice are computed once."""

    start: State
    end: State
    dirs: tuple[str, ...]
    figures: Figures
    samples: int
    states: dict[frozenset[str], State | MemcalcError] = field(default_factory=dict)
    """By words that have the value of B: the job, or why it is impossible."""

    def after(self, applied: Iterable[str]) -> State | MemcalcError:
        """The job of A with some words of B."""
        key = frozenset(applied)
        if key not in self.states:
            others = {name: value for name, value in self.start.typed.items() if name not in key}
            typed = others | {name: self.end.typed[name] for name in key if name in self.end.typed}
            try:
                self.states[key] = state_of(typed, self.dirs, self.figures, self.samples)
            except (MemcalcError, KeyError) as error:
                self.states[key] = error if isinstance(error, MemcalcError) else MissingError(f"no {error}")
        return self.states[key]

    def steps(self) -> tuple[RlStep, ...]:
        """Every change in its order; one that is not yet possible waits for those that make it so."""
        was, now = self.start.typed, self.end.typed
        remaining = [name for name in ORDER if str(was.get(name)) != str(now.get(name))]
        steps: list[RlStep] = []
        done: list[str] = []
        state = self.start
        while remaining:
            taken = next(group for group in groups(remaining) if isinstance(self.after((*done, *group)), State))
            done += taken
            remaining = [name for name in remaining if name not in taken]
            after = self.after(done)
            if isinstance(after, State):
                fields = fields_between(state.job, after.job, {*taken} & {*was, *now})
                steps += [self._step(taken, state, after)] if fields else []
                state = after
        return tuple(steps)

    def _step(self, taken: tuple[str, ...], before: State, after: State) -> RlStep:
        fields = fields_between(before.job, after.job, set(taken))
        isolated = self.after(taken)
        alone = isolated.figures.allocated - self.start.figures.allocated if isinstance(isolated, State) else None
        why = str(isolated) if isinstance(isolated, MemcalcError) else ""
        return step_of(named(fields), before, after, fields, alone=alone, impossible=why)


# ----------------------------------------------------------------------------------------------------- what names a job


def _side(index: str, given: RlGiven, shared: Words, dirs: tuple[str, ...]) -> RlSide | None:
    """What a side names; None for a job of no post-training."""
    if isinstance(given, Rl | RlPlan):
        return _of_record(index, given.job)
    if isinstance(given, Mapping):
        return RlSide(text_of(given) or "the job as it is", given, "algorithm" in given)
    if not isinstance(given, str):
        return None
    if is_options(given):
        return _of_text(index, given, shared)
    path, _, rank = given.rpartition("#") if "#" in given and not there(Path(given)) else (given, "", "")
    schema = schema_of(path) if path.endswith(".json") and there(Path(path)) else ""
    if schema == "memcalc.rl/1" and not rank:
        return _of_record(given, record_from(Rl, path, read_text(Path(path))).job)
    if schema == "memcalc.rl-plans/1":
        return _of_record(given, _plan(path, parse_count(rank, "number after #") if rank else 1).job)
    return None if schema else _of_files(given, file_names(given, index), shared, dirs)


def _plan(path: str, rank: int) -> RlPlan:
    plans = record_from(RlPlans, path, read_text(Path(path))).plans
    plan = next((plan for plan in plans if plan.rank == rank), None)
    if plan is None:
        raise InputError("number after #", rank, f"must be from 1 to {len(plans)}, the plans of {path}")
    return plan


def _of_record(name: str, job: JobRecord) -> RlSide:
    typed = {"model": job.model, "gpu": job.gpu, "node": job.node, **job.options}
    return RlSide(name, {name: value for name, value in typed.items() if value is not None}, True, job.preset_dirs)


def _of_text(index: str, text: str, shared: Words) -> RlSide | None:
    """Words with values; None where they may be of another kind of job."""
    try:
        typed = split_words(text, f"word of {index}", KNOWN, FLAGS) if text else {}
    except InputError:
        if "algorithm" in shared:
            raise
        return None
    return RlSide(text or "the job as it is", typed, "algorithm" in typed)


def _of_files(name: str, paths: tuple[str, ...], shared: Words, dirs: tuple[str, ...]) -> RlSide | None:
    """A job's own files, read as ``memcalc check`` does."""
    given = {word: value for word, value in shared.items() if word not in RL_WORDS or word in WORDS}
    merged = merge(read_files(paths), split_options(given), dirs)
    return RlSide(name, role_words(merged, dirs), True, dirs) if merged.algorithm else None


def _command(a: RlGiven, b: RlGiven, shared: Words, dirs: tuple[str, ...]) -> str:
    """The line that reproduces the answer; empty where a side is no text."""
    texts = [text_of(given) if isinstance(given, Mapping) else given for given in (a, b)]
    listed = [text for text in texts if isinstance(text, str)]
    return render("diff", *listed, options=shared, dirs=dirs) if len(listed) == len(texts) else ""
