"""A plan as a framework's own config, with the lines that launch it and that check it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import memcalc
from memcalc.api import load_model
from memcalc.convert.formats import format_named, written
from memcalc.convert.formats.base import WRITABLE
from memcalc.convert.job import Job
from memcalc.errors import UnknownNameError
from memcalc.files import output_path, replacing
from memcalc.handoff.closing import check_command
from memcalc.handoff.launch import launch
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

    ``to`` is the format. Raises :class:`memcalc.errors.CombinationError` naming what the format cannot say.
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
    target = path or Path(form.filename)
    found = estimate_of(saved, fallback, dirs)
    job = replace(Job.of(found), model=saved.job.model, spec=load_model(saved.job.model, dirs))
    line = check_command(form, written(form, job), target, saved.job, found, dirs)
    text = written(form, replace(job, check=line))
    notes = (*saved.notes, *_moved(chosen(saved, fallback), found))
    return Exported({target: text}, launch(to, job, target), line, notes)


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
    inside = folder / format_named(to).filename if folder.is_dir() else folder
    output_path(str(inside), force)
    return inside


def write_files(done: Exported) -> None:
    """Write what was exported; each file is whole or not there."""
    for path, text in done.files.items():
        with replacing(path.resolve()) as stream:
            stream.write(text.encode())
