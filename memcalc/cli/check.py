"""A job's own files, checked and shown; the edited files, written beside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.cli.options import given
from memcalc.cli.output import Destination, deliver, destination, tell
from memcalc.errors import CombinationError, InputError
from memcalc.files import output_path, replacing

if TYPE_CHECKING:
    from memcalc.results.check import Check
    from memcalc.results.posttraining import Rl

_EXTRA = ("github", "sarif")
_DATA = frozenset({"json", "csv", *_EXTRA})
"""Formats that programs read, which --brief does not shorten."""


def show(files: Sequence[str], *, fix: int, brief: bool, options: dict[str, Any]) -> int:
    """Check the files, show the answer, write the edit of a number where one was asked for; return the exit code."""
    from memcalc.preflight import check
    from memcalc.results.posttraining import Rl

    force = bool(options.get("force"))
    brief = brief or (options.get("format") is None and options.get("output") is None and _in_prolog())
    target = destination(options, _EXTRA)
    answer = check(files, **given(options))
    if isinstance(answer, Rl):
        return _show_roles(answer, target, fix=fix, brief=brief)
    written = _write(answer, fix, force) if fix else []
    if brief and target.form not in _DATA:
        deliver(f"memcalc: {answer.summary}\n", target.path)
    else:
        _show(answer, target)
    for path in written:
        tell(f"memcalc: wrote {path}")
    return int(answer.verdict == "does-not-fit")


def _show_roles(answer: Rl, target: Destination, *, fix: int, brief: bool) -> int:
    """Show the answer for a job of post-training; return the exit code."""
    from memcalc.report import posttraining

    if fix:
        raise CombinationError("fix", answer.algorithm, "files of post-training are not edited: the change is shown")
    if target.form in _EXTRA:
        raise CombinationError("format", target.form, f"{answer.algorithm} is shown in the formats of memcalc rl")
    if brief and target.form not in _DATA:
        deliver(f"memcalc: {posttraining.summary(answer)}\n", target.path)
    else:
        target.show(posttraining.report(answer))
    return int(answer.verdict == "does-not-fit")


def show_survey(folder: str, files: Sequence[str], *, options: dict[str, Any]) -> int:
    """Show what the files below a folder are read as; return the exit code."""
    from memcalc.preflight.answer import survey
    from memcalc.report.check import survey_report

    if files:
        raise CombinationError("survey", folder, "it takes a folder or FILEs, not both")
    target = destination(options)
    target.show(survey_report(survey(folder, **given(options))))
    return 0


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


def _write(answer: Check, number: int, force: bool) -> list[Path]:
    """Write each edited file beside its original, all of them or none."""
    if not answer.fixes:
        return []
    if not 1 <= number <= len(answer.fixes):
        raise InputError("edit", number, f"must be a listed edit, from 1 to {len(answer.fixes)}")
    edits = answer.fixes[number - 1].edits
    paths = [output_path(str(_beside(Path(edit.path))), force) for edit in edits]
    for path, edit in zip(paths, edits, strict=True):
        with replacing(path) as stream:
            stream.write(edit.text.encode())
    return paths


def _beside(path: Path) -> Path:
    """Where an edited file goes.

    >>> _beside(Path("conf/ds.json")).as_posix()
    'conf/ds.fits.json'
    """
    return path.with_name(f"{path.stem}.fits{path.suffix}")
