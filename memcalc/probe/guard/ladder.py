"""The safer plans that a run can go over to, all of them known before it starts, each with the same global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memcalc.errors import CombinationError, InputError
from memcalc.formulas.recompute import parse_policy
from memcalc.results import Plan, Plans, SavedPlan

__all__ = ["Ladder", "May", "ladder_of", "opened"]

Given = SavedPlan | Plans | Plan | str | Path
"""What a run can be guarded by."""


@dataclass(frozen=True)
class May:
    """What can be changed while the job runs."""

    micro_batch: bool
    """Whether the loop takes its micro-batch from the guard."""
    recompute: Callable[[str], bool]
    """Whether a recompute policy can be switched to."""


@dataclass(frozen=True)
class Ladder:
    """A saved plan, and what it can be left for."""

    saved: SavedPlan
    steps: tuple[Plan, ...]
    """What a running job can go over to, the fastest first."""
    usable: int
    """Bytes that the allocator can reserve."""
    path: str = ""
    """The file that the plan was read from."""

    def live(self, now: Plan, may: May) -> Plan | None:
        """The fastest plan that is clearly smaller than the one in force and needs no restart, else any smaller one."""
        from memcalc.handoff.fallback import is_smaller

        found = [one for one in self.steps if one.peak.device < now.peak.device and _is_open(now, one, may)]
        return next((one for one in found if is_smaller(one, now)), next(iter(found), None))

    def restarts(self, now: Plan) -> Iterator[tuple[int, Plan]]:
        """The fallbacks that are clearly smaller than the plan in force, with their numbers."""
        from memcalc.handoff.fallback import is_smaller

        for number, one in enumerate(self.saved.fallback, 1):
            if is_smaller(one, now):
                yield number, one


def _is_open(now: Plan, one: Plan, may: May) -> bool:
    """Whether a running job can go from one plan to another, which keeps no more than it in either respect."""
    before, after = now.strategy, one.strategy
    smaller = after.micro_batch < before.micro_batch and may.micro_batch
    more = _share(after.recompute) > _share(before.recompute) and may.recompute(after.recompute)
    same_size, same_policy = after.micro_batch == before.micro_batch, after.recompute == before.recompute
    return (smaller or same_size) and (more or same_policy)


def _share(recompute: str) -> float:
    """Share of the blocks that a policy computes again, where it is one of whole blocks; 0 for any other."""
    policy = parse_policy(recompute)
    return {"full": 1.0, "every": 1 / policy.count}.get(policy.kind, 0.0)


def opened(plan: Given, dirs: tuple[str, ...]) -> SavedPlan:
    """Return what was given as a saved plan."""
    from memcalc.handoff.saved import load, saved_alone, saved_plan

    if isinstance(plan, SavedPlan):
        return plan
    if isinstance(plan, Plans):
        return saved_plan(plan, 1, dirs)
    if isinstance(plan, Plan):
        return saved_alone(plan, dirs)
    if isinstance(plan, str | Path):
        return load(str(plan), preset_dirs=dirs)
    raise InputError("plan", type(plan).__name__, "must be a saved plan, its path, or what memcalc.plan returned")


def ladder_of(plan: Given, preset_dirs: Iterable[str] = (), *, live: bool = True) -> Ladder:
    """Return the ladder of a plan; without ``live``, only what a restart can go over to.

    Raises :class:`memcalc.errors.CombinationError` for a plan whose micro-batches do not make up its global batch.
    """
    from memcalc.handoff.fallback import steps
    from memcalc.handoff.saved import estimate_of
    from memcalc.handoff.words import typed

    dirs = tuple(preset_dirs)
    saved = opened(plan, dirs)
    others = steps(saved.job, saved.plan, typed(saved.asked).words, dirs) if live else ()
    for name, one in _named(saved, others):
        _check_batch(name, one, saved.plan)
    usable = estimate_of(saved, preset_dirs=dirs).budget.usable
    return Ladder(saved, others, usable, str(plan) if isinstance(plan, str | Path) else "")


def _named(saved: SavedPlan, others: tuple[Plan, ...]) -> Iterator[tuple[str, Plan]]:
    yield "plan", saved.plan
    yield from ((f"fallback {number}", one) for number, one in enumerate(saved.fallback, 1))
    yield from (("step", one) for one in others)


def _check_batch(name: str, one: Plan, first: Plan) -> None:
    """Refuse a plan that would train on another global batch."""
    size = one.strategy.micro_batch * one.accumulation_steps * one.data_parallel
    if size != first.global_batch or one.data_parallel != first.data_parallel:
        said = f"its micro-batches make {size} sequences a step on {one.data_parallel} data-parallel ranks"
        raise CombinationError(f"global_batch of {name}", first.global_batch, said)
