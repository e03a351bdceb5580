"""Several stacked bars on one scale with the line of the GPU's capacity: on a terminal, as plain text, as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

from rich.text import Text

from memcalc.report.palette import COMPONENTS, INK
from memcalc.report.tables import Bars, BarsRow, gib

__all__ = ["as_html", "as_text", "draw"]

_PLAIN_WIDTH = 76
_LINE, _PLAIN_LINE = "┃", "|"
_CUT = "»"
_FREE = "·"
_GAP = 2
_INDENT = 3
_HTML_BAR = '<div class="bar" style="display:flex;position:relative;height:1.2em;background:#eee">'


def draw(block: Bars, width: int, moods: Mapping[str, str] | None) -> Iterator[Text]:
    """Return the lines of a block: an axis, then for each bar what it is, and the bar itself.

    ``moods`` are a terminal's styles for verdicts; without them it is plain text, in letters.
    """
    colour = moods is not None
    yield _axis(block, width, colour)
    for row in block.rows:
        yield from _label(row, width, moods or {})
        yield _bar(block, row, width, colour)
    if block.legend:
        yield from _legend(block, width, colour)


def as_text(block: Bars) -> str:
    """Return the block as lines without colour, for a format that has no bars of its own."""
    return "\n".join(line.plain.rstrip() for line in draw(block, _PLAIN_WIDTH, None))


def _label(row: BarsRow, width: int, moods: Mapping[str, str]) -> Iterator[Text]:
    """A bar's name and what is said of it, on two lines where one is too short."""
    name = Text(row.label, style="bold")
    said = Text.assemble((row.verdict, moods.get(row.mood, "")), (f"  {row.says}" if row.says else "", "dim"))
    if len(name) + _GAP + len(said) <= width:
        yield Text.assemble(name, " " * _GAP, said)
    else:
        yield name
        yield Text.assemble(" " * _INDENT, said)


def _place(block: Bars, size: int, width: int) -> int:
    """The column at which a size ends."""
    return min(width, round(size / block.end * width))


def _marker(block: Bars, width: int) -> int:
    """The column of the capacity's line: the last one of what fits."""
    return max(_place(block, block.capacity, width) - 1, 0)


def _axis(block: Bars, width: int, colour: bool) -> Text:
    """0 at the left, the capacity at its line, the end of the scale at the right, as far as there is room."""
    place = _marker(block, width)
    said = f"{block.limit} {gib(block.capacity, 1)} GiB"
    line = "0 GiB"
    room = place - len(line) - 1
    if len(said) < room:
        line = f"{line.ljust(place - len(said) - 1)}{said} {_line(colour)}"
    else:
        line = f"{line.ljust(place)}{_line(colour)} {said}"
    end = f"{gib(block.end, 1)} GiB"
    if len(line) + _GAP + len(end) <= width:
        line = f"{line.ljust(width - len(end))}{end}"
    return Text(line[:width], style="dim")


def _line(colour: bool) -> str:
    return _LINE if colour else _PLAIN_LINE


def _bar(block: Bars, row: BarsRow, width: int, colour: bool) -> Text:
    """Parts from the left; what is free up to the capacity; the capacity's line over all of it."""
    cells: list[tuple[str, str]] = []
    reached = 0
    for name, size in row.parts:
        reached += size
        shade = COMPONENTS[name].light
        cells += [("█" if colour else name[0].upper(), shade)] * (_place(block, reached, width) - len(cells))
    if reached > block.end:
        cells[-1] = (_CUT, "bold")
    marker = _marker(block, width)
    cells += [(_FREE, "dim")] * (marker + 1 - len(cells))
    under = cells[marker][1]
    over = reached > block.capacity and colour
    cells[marker] = (_line(colour), f"{INK['limit'].light} on {under}" if over else "bold")
    line = Text()
    for letter, style in cells:
        line.append(letter, style)
    return line


def _legend(block: Bars, width: int, colour: bool) -> Iterator[Text]:
    """What letters and colours stand for."""
    names = [name for name, _ in block.rows[0].parts]
    items = [
        Text.assemble(("■" if colour else name[0].upper(), COMPONENTS[name].light if colour else ""), f" {name}")
        for name in names
    ]
    items.append(Text(f"{_FREE} free"))
    items.append(Text(f"{_line(colour)} capacity"))
    if any(sum(size for _, size in row.parts) > block.end for row in block.rows):
        items.append(Text(f"{_CUT} goes on"))
    line = Text()
    for item in items:
        if line and len(line) + _GAP + len(item) > width:
            yield line
            line = Text()
        line.append(" " * _GAP if line else "").append_text(item)
    yield line


def as_html(block: Bars) -> str:
    """Return the bars as elements whose widths are shares of the scale."""
    legend = [_html_legend(block)] if block.legend else []
    rows = [_html_row(block, row) for row in block.rows]
    return "\n".join(('<div class="bars">', *rows, *legend, "</div>"))


def _html_row(block: Bars, row: BarsRow) -> str:
    parts, left = [], block.end
    for name, size in row.parts:
        shown = min(size, left)
        left -= shown
        said = html.escape(f"{name} {gib(size)} GiB")
        style = f"width:{100 * shown / block.end:.3f}%;background:{COMPONENTS[name].light}"
        parts.append(f'<span title="{said}" style="{style}"></span>')
    cut = "; the bar is cut" if sum(size for _, size in row.parts) > block.end else ""
    said = html.escape(": ".join((row.label, ", ".join(filter(None, (row.verdict, row.says))))) + cut)
    return "\n".join((f"<p>{said}</p>", _HTML_BAR, *parts, _html_line(block), "</div>"))


def _html_line(block: Bars) -> str:
    said = html.escape(f"{block.limit} {gib(block.capacity)} GiB")
    place = f"left:{100 * block.capacity / block.end:.3f}%;top:-3px;bottom:-3px"
    return f'<i title="{said}" style="position:absolute;{place};border-left:2px solid {INK["limit"].light}"></i>'


def _html_legend(block: Bars) -> str:
    names = [name for name, _ in block.rows[0].parts]
    items = [f'<span style="color:{COMPONENTS[name].light}">■</span> {html.escape(name)}' for name in names]
    said = f"the line is {html.escape(block.limit)}, {gib(block.capacity)} GiB; the scale ends at {gib(block.end)} GiB"
    return f"<p>{' '.join(items)}; {said}</p>"
