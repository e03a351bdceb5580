"""A job's own files, checked and shown; the edited files, written beside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from memcalc.cli.options import given
from memcalc.cli.output import Destination, deliver, destination
from memcalc.files import output_path, replacing

if TYPE_CHECKING:
    from memcalc.results.check import Check

_EXTRA = ("github", "sarif")


def show(files: Sequence[str], *, fix: bool, brief: bool, options: dict[str, Any]) -> int:
    """Check the files, show the answer, and write the edits where they were asked for; return the exit code."""
    from memcalc.preflight import check

    force = bool(options.get("force"))
    brief = brief or (options.get("format") is None and options.get("output") is None and _in_prolog())
    target = destination(options, _EXTRA)
    answer = check(files, **given(options))
    written = _write(answer, force) if fix else []
    if brief:
        deliver(f"memcalc: {answer.summary}\n", None)
    else:
        _show(answer, target)
    for path in written:
        typer.echo(f"memcalc: wrote {path}", err=True)
    return int(answer.verdict == "does-not-fit")


def _in_prolog() -> bool:
    """Whether Slurm runs this in a prolog (SLURM_SCRIPT_CONTEXT, slurm.schedmd.com/prolog_epilog.html)."""
    return os.environ.get("SLURM_SCRIPT_CONTEXT", "").startswith("prolog")


def _show(answer: Check, target: Destination) -> None:
    if target.form in _EXTRA:
        from memcalc.report.check import MACHINES

        deliver(MACHINES[target.form](answer), target.path)
    else:
        from memcalc.report import of_check

        target.show(of_check(answer))


def _write(answer: Check, force: bool) -> list[Path]:
    """Write each edited file beside its original, all of them or none."""
    if answer.fix is None:
        return []
    paths = [output_path(str(_beside(Path(edit.path))), force) for edit in answer.fix.edits]
    for path, edit in zip(paths, answer.fix.edits, strict=True):
        with replacing(path) as stream:
            stream.write(edit.text.encode())
    return paths


def _beside(path: Path) -> Path:
    """Where an edited file goes.

    >>> _beside(Path("conf/ds.json")).as_posix()
    'conf/ds.fits.json'
    """
    return path.with_name(f"{path.stem}.fits{path.suffix}")
