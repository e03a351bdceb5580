"""Two jobs beside one another: what is different, and what each change costs or saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from memcalc._version import __version__
from memcalc.differences.changes import Change, JobPair, align, changes_of, fields_between, groups, named, resolve
from memcalc.differences.inputs import DiffInput, Given, read_inputs, text_of
from memcalc.differences.roles import RlGiven, diff_roles
from memcalc.errors import InputError, MemcalcError
from memcalc.planner.finalists import One, unchecked_warnings
from memcalc.planner.job import flat_options, split_options
from memcalc.results.changes import Diff, DiffComponents, DiffCost, DiffFigures, DiffSide, DiffStep, DiffTerm
from memcalc.results.estimates import Estimate, StepTime
from memcalc.results.posttraining import RlDiff
from memcalc.specs.job import command_line, render

__all__ = ["diff"]


# From one job to the other, one change after another: each step is a job of its own, estimated like any other.

_PLAIN = ("allocated", "reserved", "device", "host_memory", "tier_memory", "step", "tokens_per_second_per_gpu")


@dataclass(frozen=True)
class DiffState:
    """A job on the way from one to the other."""

    job: One

    @cached_property
    def estimate(self) -> Estimate:
        """Its answer, computed when it is asked for."""
        return self.job.estimate()

    @cached_property
    def time(self) -> StepTime:
        """Its predicted step."""
        return self.job.time()

    @cached_property
    def figures(self) -> DiffFigures:
        """What is compared."""
        return figures_of(self.estimate, self.time)


@dataclass
class StepBuilder:
    """The steps from A to B; jobs that are met twice are computed once."""

    pair: JobPair
    states: dict[frozenset[Change], DiffState | MemcalcError] = field(default_factory=dict)
    """By changes that are applied to A: the job, or why it is impossible."""

    def after(self, applied: Iterable[Change]) -> DiffState | MemcalcError:
        """The job of A with some changes, or why it is impossible."""
        key = frozenset(applied)
        if key not in self.states:
            try:
                self.states[key] = DiffState(resolve(self.pair.after(key), self.pair.dirs))
            except MemcalcError as error:
                self.states[key] = error
        return self.states[key]

    def steps(self) -> tuple[DiffStep, ...]:
        """Every change in its order; one that is not yet possible waits for those that make it so."""
        steps: list[DiffStep] = []
        done: list[Change] = []
        remaining = list(changes_of(self.pair))
        now = self._possible(())
        while remaining:
            taken = next(group for group in groups(remaining) if isinstance(self.after((*done, *group)), DiffState))
            done += taken
            remaining = [change for change in remaining if change not in taken]
            after = self._possible(done)
            if fields_between(now.job, after.job, ()) or now.figures != after.figures:
                steps.append(self._step(taken, now, after))
            now = after
        return tuple(steps)

    def _possible(self, applied: Iterable[Change]) -> DiffState:
        """A job that is known to be possible."""
        state = self.after(applied)
        if isinstance(state, MemcalcError):
            raise state
        return state

    def _step(self, taken: tuple[Change, ...], before: DiffState, after: DiffState) -> DiffStep:
        stated = {name for change in taken for name in change} - self.pair.defaults
        fields = fields_between(before.job, after.job, stated)
        isolated = self.after(taken)
        alone = cost_between(self._possible(()).figures, isolated.figures) if isinstance(isolated, DiffState) else None
        return DiffStep(
            name=named(fields),
            fields=fields,
            together=len(taken) > 1,
            cost=cost_between(before.figures, after.figures),
            after=after.figures,
            alone=alone,
            impossible=str(isolated) if isinstance(isolated, MemcalcError) else "",
            job=after.job.record,
            command=command_line(after.job.record),
        )


def figures_of(estimate: Estimate, time: StepTime) -> DiffFigures:
    """The figures that are compared."""
    peak = estimate.peak
    return DiffFigures(
        verdict=estimate.verdict,
        allocated=peak.allocated,
        reserved=peak.reserved,
        device=peak.device,
        phase=peak.phase,
        capacity=estimate.budget.capacity,
        components=DiffComponents(**estimate.components.model_dump(), context=peak.device - peak.reserved),
        host_memory=estimate.host_memory,
        tier_memory=estimate.tier_memory,
        step=time.step,
        tokens_per_second_per_gpu=time.tokens_per_second_per_gpu,
        parts=time.parts,
    )


def cost_between(before: DiffFigures, after: DiffFigures) -> DiffCost:
    """What is more after than before."""
    was, now = before.components.model_dump(), after.components.model_dump()
    return DiffCost(
        **{name: getattr(after, name) - getattr(before, name) for name in _PLAIN},
        components=DiffComponents(**{name: now[name] - was[name] for name in was}),
        parts={name: after.parts[name] - seconds for name, seconds in before.parts.items()},
        throughput=after.tokens_per_second_per_gpu / before.tokens_per_second_per_gpu - 1,
    )


def terms_between(before: Estimate, after: Estimate) -> tuple[DiffTerm, ...]:
    """The terms whose bytes at the peak differ, the largest change first."""
    was, now = _at_peak(before), _at_peak(after)
    return tuple(sorted(_terms(was, now), key=lambda term: (-abs(term.change), term.component, term.name)))


def _terms(was: dict[tuple[str, str], int], now: dict[tuple[str, str], int]) -> Iterator[DiffTerm]:
    for key in dict.fromkeys((*was, *now)):
        old, new = was.get(key, 0), now.get(key, 0)
        if old != new:
            yield DiffTerm(
                component=key[0],
                name=key[1],
                before=old,
                after=new,
                change=new - old,
                kind="appears" if not old else "vanishes" if not new else "grows" if new > old else "shrinks",
            )


def _at_peak(estimate: Estimate) -> dict[tuple[str, str], int]:
    """The bytes of tensors at the peak by component and name, which several terms may share."""
    sizes: dict[tuple[str, str], int] = {}
    for term in estimate.terms:
        if estimate.peak.phase in term.phases and term.component != "reserve":
            key = term.component, term.name
            sizes[key] = sizes.get(key, 0) + term.bytes
    return sizes


def diff(
    a: RlGiven,
    b: RlGiven,
    *,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    **options: Any,
) -> Diff | RlDiff:
    """Compare two jobs: what is different, and what each change costs or saves.

    ``a`` and ``b`` are each a text as on the command line (a saved plan, an answer in JSON, a job's own files joined by
    commas, or words such as ``zero=3,recompute=full``), a mapping of words, or an answer of this library. The other
    words count for both. Jobs of post-training are compared phase by phase. Raises
    :class:`memcalc.errors.InputError` for a side that cannot be read and :class:`memcalc.errors.MissingError` for what
    must be told.
    """
    shared = flat_options({**options, "settings": settings})
    roles = diff_roles(a, b, shared, tuple(preset_dirs))
    return roles or _diff(*cast("tuple[Given, Given]", (a, b)), shared, tuple(preset_dirs))


def _diff(a: Given, b: Given, shared: Mapping[str, Any], preset_dirs: tuple[str, ...]) -> Diff:
    """The comparison of two jobs of training."""
    first, second, dirs = read_inputs(a, b, shared, preset_dirs)
    start, end = _state("A", first, dirs), _state("B", second, dirs)
    return Diff(
        version=__version__,
        a=_side(first, start),
        b=_side(second, end),
        fields=fields_between(start.job, end.job, first.stated | second.stated),
        total=cost_between(start.figures, end.figures),
        steps=StepBuilder(align(first, second, dirs)).steps(),
        terms=terms_between(start.estimate, end.estimate),
        warnings=tuple(_warnings(start, end)),
        command=_command(a, b, shared, dirs),
    )


def _state(side: str, job: DiffInput, dirs: tuple[str, ...]) -> DiffState:
    """A job with its figures; an impossible one is refused by its side."""
    try:
        return DiffState(resolve(job.options, dirs))
    except InputError as error:
        raise error.within(side) from None


def _side(job: DiffInput, state: DiffState) -> DiffSide:
    return DiffSide(
        name=job.name,
        kind=job.kind,
        estimate=state.estimate,
        time=state.time,
        figures=state.figures,
        remarks=job.remarks,
    )


def _warnings(start: DiffState, end: DiffState) -> Iterator[str]:
    """What the figures do not know, each once, and which times no run validates."""
    both = [warning for warning in start.estimate.warnings if warning in end.estimate.warnings]
    yield from both
    for name, state in (("A", start), ("B", end)):
        yield from (f"{name}: {warning}" for warning in state.estimate.warnings if warning not in both)
    yield from unchecked_warnings({"A": start.time, "B": end.time}, "both")


def _command(a: Given, b: Given, options: Mapping[str, Any], dirs: tuple[str, ...]) -> str:
    """The line that reproduces the answer; empty where a job or an option is no text."""
    names = [text_of(flat_options(given)) if isinstance(given, Mapping) else given for given in (a, b)]
    texts = [name for name in names if isinstance(name, str)]
    if len(texts) < 2 or not all(isinstance(value, str | int | bool) for value in options.values()):
        return ""
    parts = split_options(options)
    settings = parts.pop("settings")
    return render("diff", *texts, options=parts, settings=settings, dirs=dirs)
