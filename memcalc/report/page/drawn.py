"""Charts on a page: drawn where Matplotlib is there, and written with no more digits than a screen has dots."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from memcalc.report.page.markup import Html, el

if TYPE_CHECKING:
    from memcalc.results import Estimate, Plans

__all__ = ["UNDRAWN", "chart", "draws", "rules", "shortened"]

UNDRAWN = "Charts are left out: pip install 'memcalc[charts]' draws them. The bars and tables have the same figures."
_PATH = re.compile(r'(?<= d=")[^"]*(?=")')
_STRAIGHT = re.compile(r"(?:[ML] [-\d.]+ [-\d.]+\s*|z\s*)+")


def draws() -> bool:
    """Return whether there is something to draw with."""
    return find_spec("matplotlib") is not None


def rules() -> str:
    """Return the style rules of charts; none without something to draw with."""
    if not draws():
        return ""
    from memcalc.report.charts import picture

    return picture.rules()


def chart(name: str, answer: Estimate | Plans) -> Html:
    """Return the chart of a kind of answer in a frame; nothing without something to draw with."""
    if not draws():
        return Html("")
    from memcalc.report.charts.picture import responsive

    drawn = import_module(f"memcalc.report.charts.{name}").chart(answer)
    return el("figure", Html(_PATH.sub(lambda path: shortened(path[0]), responsive(drawn))), class_="chart")


def shortened(path: str) -> str:
    """Return a path of straight lines in steps of a tenth of a point; any other as it is.

    >>> shortened("M 0 12.34 L 10.26 12.34 L 10.26 7.1 z")
    'm0 12.3h10.3v-5.2z'
    """
    if not _STRAIGHT.fullmatch(path):
        return path
    parts, at = [], (0, 0)
    for command, x, y in re.findall(r"([MLz])(?: ([-\d.]+) ([-\d.]+))?", path):
        if command == "z":
            parts.append("z")
            continue
        to = (round(10 * float(x)), round(10 * float(y)))
        parts.append(_step(command, to[0] - at[0], to[1] - at[1]))
        at = to
    return "".join(parts)


def _step(command: str, right: int, down: int) -> str:
    """Return one line, tenths of a point from where the last one ended."""
    if command == "M":
        return f"m{right / 10:g} {down / 10:g}"
    if not down:
        return f"h{right / 10:g}" if right else ""
    return f"l{right / 10:g} {down / 10:g}" if right else f"v{down / 10:g}"
