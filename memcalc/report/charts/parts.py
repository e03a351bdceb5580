"""What several charts draw: stacked bars, words that fit, lines with names, a legend with figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import cos, hypot, pi, sin
from typing import TYPE_CHECKING, Any

from memcalc.report.palette import COMPONENTS, INK, MOODS, ROLES, printable, words_on
from memcalc.report.tables import gib
from memcalc.results.names import component_name
from memcalc.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

_NARROW = 6.0
"""Inches below which a figure is one for a narrow screen."""
_SMALL = 8.5
_LEFT = 0.012
_PAD = 3.0
"""Points above the heading, as Matplotlib's constrained layout leaves them."""
_HUES = {**COMPONENTS, **ROLES, "headroom": INK["free"]}
LIMIT: dict[str, Any] = {"color": INK["limit"].light, "linestyle": (0, (5, 2)), "linewidth": 1.5}
"""How the line of a GPU's capacity is drawn everywhere."""
USABLE: dict[str, Any] = {"color": INK["text"].light, "linestyle": (0, (1, 1.5)), "linewidth": 1.5}
"""The line of what a GPU has for tensors."""


def is_narrow(figure: Figure) -> bool:
    """Return whether a figure is drawn for a narrow screen."""
    return bool(figure.get_figwidth() < _NARROW)


def heading(figure: Figure, text: str, subject: str, mood: str = "") -> None:
    """Write what a chart says, bold, and under it what it is about, both wrapped to the figure's width."""
    width, height = figure.get_figwidth() * 72, figure.get_figheight() * 72
    first = textwrap.wrap(text, int(width / (10.5 * 0.64)))
    lines = textwrap.wrap(subject, int(width / (_SMALL * 0.6)))
    top = 1 - _PAD / height
    figure.suptitle(
        "\n".join(first + [""] * len(lines)), x=_LEFT, ha="left", fontsize=10.5, fontweight="bold",
        color=(MOODS[mood] if mood else INK["text"]).light,
    )  # fmt: skip
    figure.text(
        _LEFT, top - 10.5 * 1.3 * len(first) / height, "\n".join(lines), va="top", fontsize=_SMALL,
        color=INK["muted"].light,
    )  # fmt: skip


def legible(figure: Figure) -> None:
    """Replace what is no text in a figure's words, such as control characters of a model's name."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        if (label := printable(text.get_text())) != text.get_text():
            text.set_text(label)


def stacked(
    axes: Axes, at: float, parts: Iterable[tuple[str, int]], height: float, prefix: str = ""
) -> list[tuple[str, int, Rectangle]]:
    """Draw a bar of parts [bytes] from the left; each has the id prefix + name, where there is a prefix."""
    drawn, reached = [], 0
    for name, size in parts:
        (patch,) = axes.barh(
            at, size / GIB, height, left=reached / GIB, color=_HUES[name].light, edgecolor=INK["page"].light
        )
        if prefix:
            patch.set_gid(f"{prefix}{name}")
        drawn.append((name, size, patch))
        reached += size
    return drawn


def keep_inside(axes: Axes, drawn: Sequence[tuple[str, int, Rectangle]], limit: float) -> None:
    """Write name and figure into the parts of a bar in which they have room, once the figure is laid out.

    A part that a line at ``limit`` cuts has them on its larger side.
    """
    for name, size, patch in drawn:
        left, right = patch.get_x(), patch.get_x() + patch.get_width()
        if left < limit < right:
            left, right = (left, limit) if limit - left > right - limit else (limit, right)
        space = axes.transData.transform([(left, 0), (right, 0)])
        width, height = 0.94 * (space[1][0] - space[0][0]), 0.96 * patch.get_window_extent().height
        ink = INK["text"] if name == "headroom" else words_on(_HUES[name])
        for label in (f"{component_name(name)}\n{gib(size)}", gib(size)):
            text = axes.text(
                (left + right) / 2, patch.get_y() + patch.get_height() / 2, label, ha="center", va="center",
                fontsize=_SMALL, color=ink.light, linespacing=1.25,
                bbox={"facecolor": _HUES[name].light, "edgecolor": "none", "pad": 1.2},
            )  # fmt: skip
            box = text.get_window_extent()
            if box.width < width and box.height < height:
                break
            text.remove()


def drop_overlaps(texts: Sequence[Text]) -> list[Text]:
    """Take away words that lie on earlier ones, once the figure is laid out; return those that stay."""
    visible: list[Text] = []
    for text in texts:
        box = text.get_window_extent().padded(2)
        if any(box.overlaps(other.get_window_extent()) for other in visible):
            text.remove()
        else:
            visible.append(text)
    return visible


def beyond(axes: Axes, at: float, height: float, capacity: int, reached: int) -> None:
    """Strike out the part of a bar that the GPU does not have [bytes]."""
    axes.barh(
        at, (reached - capacity) / GIB, height, left=capacity / GIB, facecolor="none", edgecolor=MOODS["bad"].light,
        hatch="////", linewidth=1.4,
    )  # fmt: skip


def line_key(label: str, **look: Any) -> Any:
    """Return a legend's entry of a line."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **look)


def patch_key(label: str, facecolor: str, **look: Any) -> Any:
    """Return a legend's entry of an area."""
    from matplotlib.patches import Patch

    return Patch(label=label, facecolor=facecolor, **look)


def legend(figure: Figure, handles: Sequence[Any]) -> None:
    """Put a legend below everything, in as many columns as there is room for; what is measured after it is laid out."""
    from matplotlib.legend_handler import HandlerLine2D

    both_ends = {handle: HandlerLine2D(numpoints=2) for handle in handles if hasattr(handle, "get_marker")}
    kinds = {handle: kind for handle, kind in both_ends.items() if handle.get_marker() == "|"}
    legible(figure)  # before anything is measured: Matplotlib refuses half a pair
    for columns in range(min(len(handles), 6), 0, -1):
        result = figure.legend(
            handles=handles, loc="outside lower left", ncols=columns, fontsize=_SMALL, handlelength=2,
            columnspacing=1.4, handler_map=kinds,
        )  # fmt: skip
        if columns == 1 or result.get_window_extent().width < figure.bbox.width * 0.985:
            break
        result.remove()
    figure.draw_without_rendering()


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
    """Write the names of points of a panel that is laid out, beside points and lines; one without room is left out."""
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
        width, height = 0.37 * _SIZE * len(point.name) + 1.5, 0.5 * _SIZE
        result = next(
            (spot for spot in _spots() if _is_free(_around(x + spot[0], y + spot[1], width, height), taken, edges)),
            None,
        )
        if result is not None:
            taken.append(_around(x + result[0], y + result[1], width, height))
            _write(point, result)


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
