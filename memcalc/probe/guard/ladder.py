"""The safer plans that a run can go over to, all of them known before it starts, each with the same global batch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from memcalc.errors import CombinationError, InputError, MemcalcError
from memcalc.files import replacing
from memcalc.formulas.recompute import parse_policy
from memcalc.frameworks.capabilities import FORMATS_OF
from memcalc.probe.guard.reporter import Value
from memcalc.results.plans import Plan, Plans, SavedPlan

Given = SavedPlan | Plans | Plan | str | Path
"""What a run can be guarded by."""


@dataclass(frozen=True)
class AllowedActions:
    """What can be changed while the job runs."""

    micro_batch: bool
    """Whether the loop takes its micro-batch from the guard."""
    recompute: Callable[[str], bool]
    """Whether a recompute policy can be switched to."""
    accumulation: int | None = None
    """The most micro-batches that an optimizer step may have."""


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
    preset_dirs: tuple[str, ...] = ()

    def live(self, now: Plan, allowed: AllowedActions) -> Plan | None:
        """The fastest plan that is clearly smaller than the one in force and needs no restart, else any smaller one.

        Each can be exported, where the plan that was saved can.
        """
        from memcalc.handoff.saved import is_smaller

        smaller = [
            plan for plan in self.steps if plan.peak.device < now.peak.device and _is_reachable(now, plan, allowed)
        ]
        ordered = sorted(smaller, key=lambda plan: not is_smaller(plan, now))
        return next((plan for plan in ordered if not self._exportable or self.can_export(plan)), None)

    @cached_property
    def _exportable(self) -> bool:
        """Whether a format of the framework can say the plan that was saved."""
        return self.can_export(self.saved.plan)

    def can_export(self, plan: Plan) -> bool:
        """Whether a format of the framework can say a plan."""
        from memcalc.handoff import export

        formats = FORMATS_OF.get(plan.strategy.framework.partition("@")[0], ())
        if not formats:
            return False
        with suppress(MemcalcError):
            return bool(export(self.as_saved(plan), to=formats[0], preset_dirs=self.preset_dirs))
        return False

    def as_saved(self, plan: Plan) -> SavedPlan:
        """A plan of the ladder as one that can be saved and exported."""
        from memcalc.handoff.saved import saved_alone

        return self.saved if plan == self.saved.plan else saved_alone(plan, self.preset_dirs)

    def restarts(self, now: Plan) -> Iterator[tuple[int, Plan]]:
        """The fallbacks that are clearly smaller than the plan in force, with their numbers."""
        from memcalc.handoff.saved import is_smaller

        for number, plan in enumerate(self.saved.fallback, 1):
            if is_smaller(plan, now):
                yield number, plan


def _is_reachable(now: Plan, plan: Plan, allowed: AllowedActions) -> bool:
    """Whether a running job can go from one plan to another, which keeps no more than it in either respect."""
    before, after = now.strategy, plan.strategy
    smaller = after.micro_batch < before.micro_batch and allowed.micro_batch
    more = _share(after.recompute) > _share(before.recompute) and allowed.recompute(after.recompute)
    same_size, same_policy = after.micro_batch == before.micro_batch, after.recompute == before.recompute
    few = allowed.accumulation is None or plan.accumulation_steps <= allowed.accumulation
    return (smaller or same_size) and (more or same_policy) and few


def _share(recompute: str) -> float:
    """Share of the blocks that a policy recomputes; 0 for one that is not made of full blocks."""
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
    from memcalc.handoff.saved import dirs_of, estimate_of, steps

    folders = tuple(preset_dirs)
    saved = opened(plan, folders)
    others = steps(saved.plan, saved.job.options, dirs_of(saved.job, folders)) if live else ()
    for name, other in _all_plans(saved, others):
        _check_batch(name, other, saved.plan)
    usable = estimate_of(saved, preset_dirs=folders).budget.usable
    return Ladder(saved, others, usable, str(plan) if isinstance(plan, str | Path) else "", folders)


def _all_plans(saved: SavedPlan, others: tuple[Plan, ...]) -> Iterator[tuple[str, Plan]]:
    yield "plan", saved.plan
    yield from ((f"fallback {number}", fallback) for number, fallback in enumerate(saved.fallback, 1))
    yield from (("step", fallback) for fallback in others)


def _check_batch(name: str, plan: Plan, first: Plan) -> None:
    """Refuse a plan that would train on another global batch."""
    size = plan.strategy.micro_batch * plan.accumulation_steps * plan.data_parallel
    if size != first.global_batch or plan.data_parallel != first.data_parallel:
        message = f"its micro-batches make {size} sequences per step on {plan.data_parallel} data-parallel ranks"
        raise CombinationError(f"global_batch of {name}", first.global_batch, message)


# Going on with a safer plan in a new start: its config, the saved plan that is then in force, and what happened.

MARKER, PLAN = "restart.json", "plan.json"


@dataclass(frozen=True)
class RestartOption:
    """A fallback that a new start can take."""

    number: int
    plan: Plan
    command: str
    files: dict[Path, str]
    check: str


@dataclass(frozen=True)
class Restarts:
    """All that a restart may need, made ready before the run."""

    ladder: Ladder
    folder: Path | None
    options: tuple[RestartOption, ...]
    refusal: str
    """Why there is no option; empty where there is one."""

    def next(self, now: Plan, accumulation: int | None = None) -> RestartOption | None:
        """The first option that is clearly smaller than the plan in force, with no more accumulation than that."""
        smaller = {
            number
            for number, plan in self.ladder.restarts(now)
            if accumulation is None or plan.accumulation_steps <= accumulation
        }
        return next((option for option in self.options if option.number in smaller), None)

    def write(self, option: RestartOption, facts: dict[str, Value]) -> None:
        """Write an option's files to the restart folder, if there is one; each is replaced atomically."""
        if self.folder is None:
            return
        marker: dict[str, Any] = {
            "schema": "memcalc.restart/1",
            "launch": option.command,
            "check": option.check,
            "fallback": option.number,
            "why": option.plan.why,
            "micro_batch": option.plan.strategy.micro_batch,
            "accumulation_steps": option.plan.accumulation_steps,
            "global_batch": option.plan.global_batch,
            "files": sorted(str(path) for path in option.files),
            "then": facts,
        }
        plan = _after(self.ladder.saved, option.number).model_dump(mode="json", by_alias=True)
        texts = {**option.files, self.folder / PLAN: json.dumps(plan, indent=2) + "\n"}
        for path, text in {**texts, self.folder / MARKER: json.dumps(marker, indent=2) + "\n"}.items():
            with replacing(path) as stream:
                stream.write(text.encode())


def _after(saved: SavedPlan, number: int) -> SavedPlan:
    """The saved plan of a job that was started with a fallback: those after it are what is left."""
    remaining = tuple(plan.model_copy(update={"rank": rank}) for rank, plan in enumerate(saved.fallback[number:], 1))
    none = "" if remaining else "this is the last of the plans that were saved"
    return saved.model_copy(update={"plan": saved.fallback[number - 1], "fallback": remaining, "no_fallback": none})


def restarts_of(ladder: Ladder, folder: str | None, to: str | None, preset_dirs: tuple[str, ...] = ()) -> Restarts:
    """Make ready what a restart may need; a fallback that the format cannot express is no option."""
    framework = ladder.saved.plan.strategy.framework
    format_name = to or next(iter(FORMATS_OF.get(framework.partition("@")[0], ())), None)
    directory = None if folder is None else Path(folder)
    if directory is not None:
        if format_name is None:
            raise InputError("to", to, f"must name the format of the restart's config for framework {framework}")
        directory.mkdir(parents=True, exist_ok=True)
    reasons: list[str] = []
    options = tuple(_restart_options(ladder, directory, format_name, preset_dirs, reasons))
    why = "; ".join(dict.fromkeys(reasons))
    refusal = ladder.saved.no_fallback or f"no fallback can be written as {format_name}: {why}"
    return Restarts(ladder, directory, options, "" if options else refusal)


def _restart_options(
    ladder: Ladder, folder: Path | None, format_name: str | None, preset_dirs: tuple[str, ...], reasons: list[str]
) -> Iterator[RestartOption]:
    """Yield the fallbacks that can be started; ``reasons`` takes why the others cannot."""
    from memcalc.handoff import exported

    for number, plan in enumerate(ladder.saved.fallback, 1):
        if folder is None or format_name is None:
            yield RestartOption(number, plan, _export(ladder.path, format_name, number), {}, "")
            continue
        try:
            done = exported(ladder.saved, format_name, fallback=number, path=folder, preset_dirs=preset_dirs)
        except MemcalcError as error:
            reasons.append(str(error).rstrip("."))
        else:
            yield RestartOption(number, plan, done.launch, done.files, done.check)


def _export(path: str, form: str | None, number: int) -> str:
    """The line that writes a fallback's config."""
    file, name = shlex.quote(path or PLAN), form or "FORMAT"
    return f"memcalc export {file} --to {name} --fallback {number} --output . --force"
