"""The figures of a job, and the difference of two: bytes as integers, so that sums are exact."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.results import Estimate, StepTime
from memcalc.results.diff import DiffComponents, DiffCost, DiffFigures, DiffTerm

__all__ = ["cost_between", "figures_of", "terms_between"]

_PLAIN = ("allocated", "reserved", "device", "host_memory", "tier_memory", "step", "tokens_per_second_per_gpu")


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
    )


def cost_between(before: DiffFigures, after: DiffFigures) -> DiffCost:
    """What is more after than before."""
    was, now = before.components.model_dump(), after.components.model_dump()
    return DiffCost(
        **{name: getattr(after, name) - getattr(before, name) for name in _PLAIN},
        components=DiffComponents(**{name: now[name] - was[name] for name in was}),
        throughput=after.tokens_per_second_per_gpu / before.tokens_per_second_per_gpu - 1,
    )


def terms_between(before: Estimate, after: Estimate) -> tuple[DiffTerm, ...]:
    """The terms whose bytes at the peak differ, the largest change first."""
    was, now = _at_peak(before), _at_peak(after)
    found = list(_terms(was, now))
    return tuple(sorted(found, key=lambda one: (-abs(one.change), one.component, one.name)))


def _terms(was: dict[tuple[str, str], int], now: dict[tuple[str, str], int]) -> Iterator[DiffTerm]:
    for place in dict.fromkeys((*was, *now)):
        old, new = was.get(place, 0), now.get(place, 0)
        if old != new:
            yield DiffTerm(
                component=place[0],
                name=place[1],
                before=old,
                after=new,
                change=new - old,
                kind="appears" if not old else "vanishes" if not new else "grows" if new > old else "shrinks",
            )


def _at_peak(estimate: Estimate) -> dict[tuple[str, str], int]:
    """The bytes that are alive at the peak by component and name, which several terms may share."""
    found: dict[tuple[str, str], int] = {}
    for term in estimate.terms:
        if estimate.peak.phase in term.phases:
            place = term.component, term.name
            found[place] = found.get(place, 0) + term.bytes
    return found
