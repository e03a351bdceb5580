"""Two jobs beside one another: what changed, and what each change costs or saves."""

from __future__ import annotations

from typing import Any

from memcalc.cli.options import given
from memcalc.cli.output import destination, draw, picture_targets

__all__ = ["show"]


def show(a: str, b: str, *, terms: str | None, options: dict[str, Any]) -> int:
    """Compare, show the answer, and draw it where a file was named; the exit code is 0 whichever of them fits."""
    from memcalc.differences import diff
    from memcalc.report.diff import TERMS, report
    from memcalc.units import parse_count

    pictures = picture_targets(options, "chart")
    target = destination(options)
    most = TERMS if terms is None else None if terms == "all" else parse_count(terms, "terms")
    found = diff(a, b, **given(options))
    target.show(report(found, most))
    draw(pictures, {"chart": "diff"}, found)
    return 0
