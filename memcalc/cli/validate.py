"""Measured runs, compared and shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memcalc.cli.output import destination
from memcalc.errors import InputError, UnknownNameError
from memcalc.units import parse_count

__all__ = ["show"]


def show(
    paths: Sequence[str],
    *,
    strict: bool,
    group: str | None,
    grade: str | None,
    figure: str | None,
    worst: str,
    options: dict[str, Any],
) -> int:
    """Compare the runs of the files, or the shipped ones, and show the answer; return the exit code."""
    from memcalc import validation
    from memcalc.convert.runs import read_runs
    from memcalc.report.progress import waiting
    from memcalc.report.validate import report
    from memcalc.specs.runs import FIGURES

    target, most = destination(options), parse_count(worst, "worst")
    known = next((name for name in FIGURES if name == figure), None)
    if figure is not None and known is None:
        raise UnknownNameError("figure", figure, f"must be one of {', '.join(FIGURES)}", FIGURES)
    runs = validation.chosen(read_runs(paths), strict=strict, group=group, grade=grade, figure=known)
    if not runs.run:
        raise InputError("runs", ", ".join(paths) or "shipped", "no run is left to compare")
    dirs = tuple(options["preset_dir"] or ())
    with waiting("validate", "runs") as listen:
        found = validation.validate(runs, dirs, calibration=options["calibration"], on_progress=listen)
    target.show(report(found, most, full=target.form != "rich"))
    return 0
