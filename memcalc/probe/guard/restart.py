"""Going on with a safer plan in a new start: its config, the saved plan that is then in force, and what happened."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcalc.errors import InputError, MemcalcError
from memcalc.files import replacing
from memcalc.probe.guard.ladder import Ladder
from memcalc.probe.guard.record import Value
from memcalc.results import Plan, SavedPlan

__all__ = ["MARKER", "PLAN", "Restarts", "Way", "restarts_of"]

MARKER, PLAN = "restart.json", "plan.json"
_FORMATS = {
    "fsdp2": "fsdp2",
    "fsdp1": "accelerate",
    "ddp": "trainer",
    "hf": "trainer",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "megatron": "megatron",
}
"""In which format a framework's plan is written, unless one is named."""


@dataclass(frozen=True)
class Way:
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
    ways: tuple[Way, ...]
    none: str
    """Why there is no way; empty where there is one."""

    def next(self, now: Plan) -> Way | None:
        """The first way that is clearly smaller than the plan in force."""
        smaller = {number for number, _ in self.ladder.restarts(now)}
        return next((way for way in self.ways if way.number in smaller), None)

    def write(self, way: Way, facts: dict[str, Value]) -> None:
        """Write a way's files where that was asked for; each is whole or not there, so that any rank may do it."""
        if self.folder is None:
            return
        marker: dict[str, Any] = {
            "schema": "memcalc.restart/1",
            "launch": way.command,
            "check": way.check,
            "fallback": way.number,
            "why": way.plan.why,
            "micro_batch": way.plan.strategy.micro_batch,
            "accumulation_steps": way.plan.accumulation_steps,
            "global_batch": way.plan.global_batch,
            "files": sorted(str(path) for path in way.files),
            "then": facts,
        }
        plan = _after(self.ladder.saved, way.number).model_dump(mode="json", by_alias=True)
        texts = {**way.files, self.folder / PLAN: json.dumps(plan, indent=2) + "\n"}
        for path, text in {**texts, self.folder / MARKER: json.dumps(marker, indent=2) + "\n"}.items():
            with replacing(path) as stream:
                stream.write(text.encode())


def _after(saved: SavedPlan, number: int) -> SavedPlan:
    """The saved plan of a job that was started with a fallback: those after it are what is left."""
    left = tuple(one.model_copy(update={"rank": place}) for place, one in enumerate(saved.fallback[number:], 1))
    none = "" if left else "this is the last of the plans that were saved"
    return saved.model_copy(update={"plan": saved.fallback[number - 1], "fallback": left, "no_fallback": none})


def restarts_of(ladder: Ladder, folder: str | None, to: str | None, dirs: tuple[str, ...] = ()) -> Restarts:
    """Make ready what a restart may need; a fallback that the format cannot say is no way."""
    form = to or _FORMATS.get(ladder.saved.plan.strategy.framework.partition("@")[0])
    place = None if folder is None else Path(folder)
    if place is not None:
        if form is None:
            named = ladder.saved.plan.strategy.framework
            raise InputError("to", to, f"must name the format of the restart's config for framework {named}")
        place.mkdir(parents=True, exist_ok=True)
    told: list[str] = []
    ways = tuple(_ways(ladder, place, form, dirs, told))
    none = ladder.saved.no_fallback or f"no fallback can be written as {form}: {'; '.join(dict.fromkeys(told))}"
    return Restarts(ladder, place, ways, "" if ways else none)


def _ways(
    ladder: Ladder, folder: Path | None, form: str | None, dirs: tuple[str, ...], told: list[str]
) -> Iterator[Way]:
    """Yield the fallbacks that can be started; ``told`` takes why the others cannot."""
    from memcalc.handoff.exporting import exported, target_of

    for number, one in enumerate(ladder.saved.fallback, 1):
        if folder is None or form is None:
            yield Way(number, one, _export(ladder.path, form, number), {}, "")
            continue
        try:
            path = target_of(str(folder), form, force=True)
            done = exported(ladder.saved, form, fallback=number, path=path, preset_dirs=dirs)
        except MemcalcError as error:
            told.append(str(error).rstrip("."))
        else:
            yield Way(number, one, done.launch, done.files, done.check)


def _export(path: str, form: str | None, number: int) -> str:
    """The line that writes a fallback's config."""
    file, name = shlex.quote(path or PLAN), form or "FORMAT"
    return f"memcalc export {file} --to {name} --fallback {number} --output . --force"
