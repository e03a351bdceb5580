"""A plan as a framework's own config, with the lines that launch it and that check it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import memcalc
from memcalc.api import load_model
from memcalc.convert.document import parsed
from memcalc.convert.formats import Format, format_named, written
from memcalc.convert.formats.base import WRITABLE
from memcalc.convert.job import Job
from memcalc.errors import UnknownNameError
from memcalc.files import output_path, replacing
from memcalc.handoff.closing import check_command
from memcalc.handoff.launch import launch, script
from memcalc.handoff.saved import chosen, estimate_of, saved_plan
from memcalc.results import Estimate, Plan, Plans, SavedPlan
from memcalc.units import GIB

__all__ = ["Exported", "export", "exported", "write_files"]


@dataclass(frozen=True)
class Exported:
    """What was written for a plan, and what is said beside it."""

    files: dict[Path, str]
    launch: str
    """The line that starts the job."""
    check: str
    """The line that checks the file before every start."""
    notes: tuple[str, ...]


def export(
    plan: SavedPlan | Plans,
    *,
    to: str,
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
        The format, a name of ``memcalc export --help``.
    rank
        Which of several plans, from 1.
    fallback
        Which of a saved plan's fallbacks, from 1; 0 for the plan itself.
    preset_dirs
        Folders with presets of your own, looked up first.

    Returns
    -------
    dict
        The text of each file by its name.

    Raises
    ------
    memcalc.errors.CombinationError
        Naming what the format cannot say.
    """
    dirs = tuple(preset_dirs)
    saved = saved_plan(plan, rank, dirs) if isinstance(plan, Plans) else plan
    return {str(path): text for path, text in exported(saved, to, fallback=fallback, preset_dirs=dirs).files.items()}


def exported(
    saved: SavedPlan, to: str, *, fallback: int = 0, path: Path | None = None, preset_dirs: Iterable[str] = ()
) -> Exported:
    """Write a saved plan in a format, read it back, and find the lines that launch and check it."""
    if to not in WRITABLE:
        raise UnknownNameError("to", to, f"must be one of {', '.join(WRITABLE)}", WRITABLE)
    form, dirs = format_named(to), tuple(preset_dirs)
    target = path or Path(usual_name(form))
    found = estimate_of(saved, fallback, dirs)
    job = replace(Job.of(found), model=saved.job.model, spec=load_model(saved.job.model, dirs))
    line, said = check_command(form, _files(form, job, target), saved.job, found, dirs)
    files = _files(form, replace(job, check=line), target)
    notes = (*saved.notes, *_moved(chosen(saved, fallback), found), *said)
    return Exported(files, launch(to, job, target), line, notes)


def usual_name(form: Format) -> str:
    """The name that a format's file has; flags stand in a script that starts the job."""
    return f"{Path(form.filename).stem}.sh" if form.kind == "flags" else form.filename


def _files(form: Format, job: Job, target: Path) -> dict[Path, str]:
    """The file of a format, and beside it those that it names."""
    text = written(form, job)
    if form.kind == "flags":
        return {target: script(form.name, job, text)}
    files = {target: text}
    if form.kind != "shell":
        for other in form.read(parsed(target, text, form.kind)).references:
            if other.format in WRITABLE and other.path and Path(other.path).name == other.path:
                files[target.parent / other.path] = written(format_named(other.format), job)
    return files


def _moved(plan: Plan, found: Estimate) -> list[str]:
    """Say where the figures are no longer those that were saved."""
    was, now = plan.peak.device, found.peak.device
    if was == now:
        return []
    said = f"saved with {was / GIB:.2f} GiB on each GPU, now estimated at {now / GIB:.2f} GiB ({found.verdict})"
    return [f"{said} by memcalc {memcalc.__version__}."]


def target_of(name: str, to: str, *, force: bool) -> Path:
    """Return where a file goes: into a directory under its usual name, or to the path itself."""
    folder = Path(name)
    inside = folder / usual_name(format_named(to)) if folder.is_dir() else folder
    output_path(str(inside), force)
    return inside


def write_files(done: Exported, *, force: bool) -> None:
    """Write what was exported: files that are whole or not there, replaced with ``force`` alone."""
    targets = {output_path(str(path), force): text for path, text in done.files.items()}
    for path, text in targets.items():
        with replacing(path) as stream:
            stream.write(text.encode())
