"""Going on with a safer plan in a new start: its config, the saved plan that is then in force, and what happened."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memcalc.convert.formats import FORMATS_OF
from memcalc.errors import InputError, MemcalcError
from memcalc.files import replacing
from memcalc.probe.guard.ladder import Ladder
from memcalc.probe.guard.reporter import Value
from memcalc.results.plans import Plan
from memcalc.results.saved import SavedPlan

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
    from memcalc.handoff.exporting import exported

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
