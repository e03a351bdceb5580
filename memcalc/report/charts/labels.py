"""Names of points that lie close together: each beside its point, none on another, with a line where it is far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import cos, hypot, pi, sin
from typing import TYPE_CHECKING

from memcalc.report.palette import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["Placed", "place"]

_SIZE = 8.5
_MARK = 5.0
"""Half the side of a point's box [points of 1/72 inch], as all lengths here."""
_TURNS = 16
_REACHES = (10, 14, 19, 25, 32, 40, 50, 62, 76, 92)
_LINE = 13
"""Distance from which a line joins a name to its point."""

_Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Placed:
    """A point with a name; without ``named`` it only takes room."""

    axes: Axes
    name: str
    x: float
    y: float
    named: bool = True


def place(figure: Figure, points: Sequence[Placed], lines: Sequence[Line2D] = ()) -> None:
    """Write the names of points of one panel beside points and lines; one that has no room near is left out."""
    figure.draw_without_rendering()
    scale = 72 / figure.dpi
    shown = [
        (point, *(scale * part for part in point.axes.transData.transform((point.x, point.y)))) for point in points
    ]
    taken = [_around(x, y, _MARK, _MARK) for _, x, y in shown]
    taken += [_around(scale * x, scale * y, 1, 1) for line in lines for x, y in _along(line)]
    for point, x, y in shown:
        if not point.named:
            continue
        frame = point.axes.get_window_extent()
        edges = (scale * frame.x0, scale * frame.y0, scale * frame.x1, scale * frame.y1)
        width, height = 0.33 * _SIZE * len(point.name) + 1.5, 0.5 * _SIZE
        found = next(
            (spot for spot in _spots() if _is_free(_around(x + spot[0], y + spot[1], width, height), taken, edges)),
            None,
        )
        if found is not None:
            taken.append(_around(x + found[0], y + found[1], width, height))
            _write(point, found)


def _along(line: Line2D) -> Iterator[tuple[float, float]]:
    """Points of a line on the screen, a few units apart."""
    corners = line.get_transform().transform(line.get_xydata())
    for (x, y), (to_x, to_y) in pairwise(corners):
        steps = max(int(hypot(to_x - x, to_y - y) / 5), 1)
        yield from ((x + (to_x - x) * step / steps, y + (to_y - y) * step / steps) for step in range(steps + 1))


def _write(point: Placed, spot: tuple[float, float]) -> None:
    joined = hypot(*spot) >= _LINE
    arrow = {"arrowstyle": "-", "color": INK["muted"].light, "linewidth": 0.6, "shrinkA": 4, "shrinkB": 3}
    point.axes.annotate(
        point.name, (point.x, point.y), spot, textcoords="offset points", ha="center", va="center", fontsize=_SIZE,
        fontweight="bold", arrowprops=arrow if joined else None,
    )  # fmt: skip


def _spots() -> Iterator[tuple[float, float]]:
    """Offsets from a point, near ones first, from the right upwards."""
    for reach in _REACHES:
        for turn in range(_TURNS):
            angle = 2 * pi * turn / _TURNS
            yield reach * cos(angle), reach * sin(angle)


def _around(x: float, y: float, width: float, height: float) -> _Box:
    return x - width, y - height, x + width, y + height


def _is_free(wanted: _Box, taken: Sequence[_Box], edges: _Box) -> bool:
    left, low, right, high = wanted
    if left < edges[0] + 1 or low < edges[1] + 1 or right > edges[2] - 1 or high > edges[3] - 1:
        return False
    return not any(left < box[2] and box[0] < right and low < box[3] and box[1] < high for box in taken)
