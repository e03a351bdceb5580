"""Plans that are kept: ``plan --save`` writes one, and ``export`` gives it to a framework."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from memcalc.cli.errors import fail
from memcalc.cli.output import deliver
from memcalc.errors import InputError
from memcalc.files import output_path

if TYPE_CHECKING:
    from memcalc.results import Plans

__all__ = ["check_target", "keep", "show"]


def check_target(save: str | None, rank: str | None, options: Mapping[str, Any]) -> None:
    """Refuse a file that could not be written before anything is computed."""
    if save is None:
        if rank is not None:
            raise InputError("rank", rank, "says which plan --save writes, so --save FILE must be given")
        return
    target = output_path(save, bool(options["force"]))
    if options.get("module") is not None or _is_recorded(str(options["model"])):
        raise InputError("save", save, "a recorded module is trained by code of its own, to which nothing is exported")
    if options["output"] is not None and target == Path(options["output"]).resolve():
        raise InputError("save", save, "must be another file than --output")


def _is_recorded(model: str) -> bool:
    from memcalc.convert.recorded import is_recorded

    return model.endswith(".json") and is_recorded(Path(model))


def keep(plans: Plans, save: str, rank: str | None, *, force: bool, dirs: tuple[str, ...]) -> int:
    """Save a plan, and say on stderr what was saved, so that any format can be piped; return the exit code."""
    import memcalc

    if not plans.plans:
        return fail(f"nothing fits, so nothing was saved in {save}.", 1)
    found = memcalc.save(plans, save, 1 if rank is None else rank, preset_dirs=dirs, force=force)
    typer.echo(f"Saved plan {found.plan.rank} in {save}.", err=True)
    for one in found.fallback:
        typer.echo(f"Fallback {one.rank}: {one.why}", err=True)
    for said in (*([f"No fallback: {found.no_fallback}."] if found.no_fallback else []), *found.notes):
        typer.echo(said, err=True)
    return 0


def show(plan: str, *, to: str, rank: str | None, fallback: str | None, options: Mapping[str, Any]) -> int:
    """Write a plan for a framework, and say how to launch and to check it; return the exit code."""
    from memcalc.handoff.exporting import exported, target_of, write_files
    from memcalc.handoff.saved import load
    from memcalc.units import parse_count

    dirs, output = tuple(options["preset_dir"] or ()), options["output"]
    path = None if output is None else target_of(output, to, force=bool(options["force"]))
    saved = load(plan, rank=rank, preset_dirs=dirs, calibration=options["calibration"])
    number = 0 if fallback is None else parse_count(fallback, "fallback")
    done = exported(saved, to, fallback=number, path=path, preset_dirs=dirs)
    if path is None:
        several = len(done.files) > 1
        parts = (f"==> {name} <==\n{text}" if several else text for name, text in done.files.items())
        deliver("\n".join(parts), None)
    else:
        write_files(done, force=bool(options["force"]))
    for said in (*(f"Note: {note}" for note in done.notes), f"Launch: {done.launch}", f"Check:  {done.check}"):
        if path is None:
            typer.echo(said, err=True)
        else:
            deliver(f"{said}\n", None)
    return 0
