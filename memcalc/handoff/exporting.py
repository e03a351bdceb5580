"""A saved plan written as a framework's own config, or refused with what can be written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from memcalc.errors import CombinationError, InputError, MemcalcError
from memcalc.files import output_path, replacing, write_folder
from memcalc.handoff.planning import way_out
from memcalc.handoff.saved import chosen, dirs_of, saved_plan
from memcalc.handoff.written import Exported, anchored, first_written, formats_of, known_format, written
from memcalc.results.plans import Plan, Plans, SavedPlan


def export(
    plan: SavedPlan | Plans,
    *,
    to: str | None = None,
    rank: int | str = 1,
    fallback: int = 0,
    preset_dirs: Iterable[str] = (),
) -> dict[str, str]:
    """Return the files, by name, that run a plan under a framework: the plan of a rank, or what it can go back to.

    Parameters
    ----------
    plan
        A saved plan, or what :func:`memcalc.plan` returned.
    to
        The format, a name of ``memcalc export --help``; that of the plan's own framework when left out.
    rank
        Which of several plans, from 1.
    fallback
        Which of a saved plan's fallbacks, from 1; 0 for the plan itself.
    preset_dirs
        Folders with presets of your own, looked up first; those of the search when left out.

    Returns
    -------
    dict
        The text of each file by its name.

    Raises
    ------
    memcalc.errors.CombinationError
        Naming what the format cannot say, and the nearest plan that it can.
    """
    dirs = tuple(preset_dirs)
    saved = saved_plan(plan, rank, dirs) if isinstance(plan, Plans) else plan
    return {str(path): text for path, text in exported(saved, to, fallback=fallback, preset_dirs=dirs).files.items()}


def exported(
    saved: SavedPlan,
    to: str | None = None,
    *,
    fallback: int = 0,
    path: Path | None = None,
    preset_dirs: Iterable[str] = (),
) -> Exported:
    """Write a saved plan in a format, read it back, and find the lines that launch and check it.

    ``path`` is a file, or a folder, in which files have their usual names. Without a format those of the plan's
    framework are tried, the usual one first.
    """
    plan = chosen(saved, fallback)
    if path is not None:
        plan = anchored(plan)
    dirs = dirs_of(plan.job, preset_dirs)
    names = formats_of(plan.strategy.framework) if to is None else (known_format(to),)
    try:
        result = first_written(plan, names, path, dirs)
    except CombinationError as error:
        allowed = error.allowed + _way_out(saved, fallback, names[0], dirs, error.field)
        raise CombinationError(error.field, error.value, allowed) from None
    return replace(result, notes=(*saved.notes, *result.notes))


def started(plans: Plans, plan: Plan, to: str | None, preset_dirs: Iterable[str] = ()) -> Exported:
    """Write one of the plans of a search, to be started from its folder, or refuse it with what can be written."""
    names = formats_of(plan.strategy.framework) if to is None else (known_format(to),)
    try:
        return first_written(anchored(plan), names, None, dirs_of(plan.job, preset_dirs))
    except CombinationError as error:
        allowed = error.allowed + way_out(plans.job, names[0], error.field)
        raise CombinationError(error.field, error.value, allowed) from None


def _way_out(saved: SavedPlan, fallback: int, to: str, dirs: tuple[str, ...], field: str) -> str:
    """The end of a refusal: a plan to go back to that the format can say, or the line that searches one."""
    for number, plan in enumerate(saved.fallback, 1):
        if number != fallback and _takes(plan, to, dirs):
            return f"; its fallback {number} can be written: --fallback {number}"
    return way_out(saved.job, to, field)


def _takes(plan: Plan, to: str, dirs: tuple[str, ...]) -> bool:
    try:
        written(plan, to, None, dirs)
    except CombinationError:
        return False
    return True


def refused_export(plan: Plan, preset_dirs: Iterable[str] = ()) -> str:
    """Why ``memcalc export`` does not write a plan where no format is named; empty if it does."""
    try:
        first_written(anchored(plan), formats_of(plan.strategy.framework), None, dirs_of(plan.job, preset_dirs))
    except InputError as error:
        return error.allowed or str(error)
    except MemcalcError as error:
        return str(error)
    return ""


def write_files(result: Exported, *, force: bool) -> None:
    """Write what was exported: files that are complete or not there, replaced with ``force`` alone."""
    targets = {output_path(str(path), force): text for path, text in result.files.items()}
    for path, text in targets.items():
        with replacing(path) as stream:
            stream.write(text.encode())


def write_job(result: Exported, folder: Path, *, force: bool) -> None:
    """Write what was exported into a folder, with a script that starts it from there and says how to check it."""
    texts = {path.name: text for path, text in result.files.items()}
    head = "#!/bin/bash", "# Written by memcalc; check it before every start with:", f"# {result.check}"
    texts["launch.sh"] = "\n".join([*head, 'cd "$(dirname "$0")" || exit 1', result.launch, ""])
    write_folder(folder, texts, force=force)
