"""What several charts draw: stacked bars, words that fit, lines with names, a legend with figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from memcalc.report.glyphs import printable
from memcalc.report.palette import COMPONENTS, INK, MOODS, words_on
from memcalc.report.tables import gib
from memcalc.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

__all__ = [
    "LIMIT",
    "USABLE",
    "beyond",
    "drop_overlaps",
    "heading",
    "is_narrow",
    "keep_inside",
    "legend",
    "legible",
    "line_key",
    "patch_key",
    "stacked",
]

_NARROW = 6.0
"""Inches below which a figure is one for a narrow screen."""
_SMALL = 8.5
_LEFT = 0.012
_PAD = 3.0
"""Points above the heading, as Matplotlib's constrained layout leaves them."""
_HUES = {**COMPONENTS, "free": INK["free"]}
LIMIT: dict[str, Any] = {"color": INK["limit"].light, "linestyle": (0, (5, 2)), "linewidth": 1.5}
"""How the line of a GPU's capacity is drawn everywhere."""
USABLE: dict[str, Any] = {"color": INK["text"].light, "linestyle": (0, (1, 1.5)), "linewidth": 1.5}
"""The line of what a GPU has for tensors."""


def is_narrow(figure: Figure) -> bool:
    """Return whether a figure is drawn for a narrow screen."""
    return bool(figure.get_figwidth() < _NARROW)


def heading(figure: Figure, said: str, subject: str, mood: str = "") -> None:
    """Write what a chart says, bold, and under it what it is about, both wrapped to the figure's width."""
    width, height = figure.get_figwidth() * 72, figure.get_figheight() * 72
    first = textwrap.wrap(said, int(width / (10.5 * 0.64)))
    lines = textwrap.wrap(subject, int(width / (_SMALL * 0.56)))
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
        if (said := printable(text.get_text())) != text.get_text():
            text.set_text(said)


def stacked(
    axes: Axes, at: float, parts: Iterable[tuple[str, int]], height: float, prefix: str = ""
) -> list[tuple[str, int, Rectangle]]:
    """Draw a bar of parts [bytes] from the left; each has the id prefix + name, where there is a prefix."""
    drawn, reached = [], 0
    for name, size in parts:
        (patch,) = axes.barh(
            at, size / GIB, height, left=reached / GIB, color=COMPONENTS[name].light, edgecolor=INK["page"].light
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
        room = axes.transData.transform([(left, 0), (right, 0)])
        width, height = 0.94 * (room[1][0] - room[0][0]), 0.96 * patch.get_window_extent().height
        ink = words_on(COMPONENTS[name]) if name in COMPONENTS else INK["text"]
        for words in (f"{name}\n{gib(size)}", gib(size)):
            text = axes.text(
                (left + right) / 2, patch.get_y() + patch.get_height() / 2, words, ha="center", va="center",
                fontsize=_SMALL, color=ink.light, linespacing=1.25,
                bbox={"facecolor": _HUES[name].light, "edgecolor": "none", "pad": 1.2},
            )  # fmt: skip
            box = text.get_window_extent()
            if box.width < width and box.height < height:
                break
            text.remove()


def drop_overlaps(texts: Sequence[Text]) -> list[Text]:
    """Take away words that lie on earlier ones, once the figure is laid out; return those that stay."""
    kept: list[Text] = []
    for text in texts:
        box = text.get_window_extent().padded(2)
        if any(box.overlaps(other.get_window_extent()) for other in kept):
            text.remove()
        else:
            kept.append(text)
    return kept


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
        found = figure.legend(
            handles=handles, loc="outside lower left", ncols=columns, fontsize=_SMALL, handlelength=2,
            columnspacing=1.4, handler_map=kinds,
        )  # fmt: skip
        if columns == 1 or found.get_window_extent().width < figure.bbox.width * 0.985:
            break
        found.remove()
    figure.draw_without_rendering()
