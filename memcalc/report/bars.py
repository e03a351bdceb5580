"""Several stacked bars on one scale with the line of the GPU's capacity: on a terminal, as plain text, as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterator

from rich.text import Text

from memcalc.report.glyphs import ASCII, FULL, Glyphs, printable
from memcalc.report.palette import ANYWHERE, INK, colour_of, words_on
from memcalc.report.stack import Scale, letters
from memcalc.report.tables import Bar, Bars, BarsRow, gib
from memcalc.report.terminal_bar import letter_on, packed, row_of

__all__ = ["as_html", "as_text", "bars_lines"]

_PLAIN_WIDTH = 76
_CUT = {FULL: "»", ASCII: ">"}
_GAP = 2
_INDENT = 3


def bars_lines(block: Bars, width: int, signs: Glyphs, *, colour: bool) -> Iterator[Text]:
    """Yield the rows of a block: an axis, then for each bar what it is and the bar itself, and the legend."""
    scale = Scale(width - 1, round(block.capacity / block.end * (width - 1)), block.end)
    yield _axis(block, scale, signs)
    for row in block.rows:
        yield from _label(row, width, signs, colour=colour)
        yield _bar(block, row, scale, signs, colour=colour)
    if block.legend:
        yield from packed(list(_legend(block, signs, colour=colour)), width, _GAP)


def as_text(block: Bars) -> str:
    """Return the block as lines without colour, for a format that has no bars of its own."""
    return "\n".join(line.plain.rstrip() for line in bars_lines(block, _PLAIN_WIDTH, FULL, colour=False))


def _axis(block: Bars, scale: Scale, signs: Glyphs) -> Text:
    """0 at the left, the capacity at its line, the end of the scale at the right, as far as there is room."""
    said = f"{printable(block.limit, signs is ASCII)} {gib(block.capacity, 1)} GiB"
    line = "0 GiB"
    if len(line) + len(said) + _GAP < scale.limit:
        line = f"{line.ljust(scale.limit - len(said) - 1)}{said} {signs.limit}"
    else:
        line = f"{line.ljust(scale.limit)}{signs.limit} {said}"
    end = f"{gib(block.end, 1)} GiB"
    if len(line) + _GAP + len(end) <= scale.cells + 1:
        line = f"{line.ljust(scale.cells + 1 - len(end))}{end}"
    return Text(line[: scale.cells + 1], "dim")


def _label(row: BarsRow, width: int, signs: Glyphs, *, colour: bool) -> Iterator[Text]:
    """Yield a bar's name and what is said of it, on two lines where one is too short."""
    only = signs is ASCII
    name = Text(printable(row.label, only), "bold")
    mood = f"bold {ANYWHERE[row.mood]}" if row.mood and colour else "bold"
    says = f"  {printable(row.says, only)}" if row.says else ""
    said = Text.assemble((printable(row.verdict, only), mood), (says, "dim"))
    if name.cell_len + _GAP + said.cell_len <= width:
        yield Text.assemble(name, " " * _GAP, said)
    else:
        yield name
        yield Text.assemble(" " * _INDENT, said)


def _bar(block: Bars, row: BarsRow, scale: Scale, signs: Glyphs, *, colour: bool) -> Text:
    """Return a bar; one that goes beyond the end of the scale ends with a sign that says so."""
    left, parts = block.end, []
    for name, size in row.parts:
        parts.append((name, min(size, left)))
        left -= parts[-1][1]
    line = row_of(Bar(tuple(parts), block.capacity), scale, signs, colour=colour)
    return Text.assemble(line[:-1], (_CUT[signs], "bold")) if row.size > block.end else line


def _legend(block: Bars, signs: Glyphs, *, colour: bool) -> Iterator[Text]:
    """Yield what letters, colours and signs stand for; a component that no bar has is not named."""
    names = [name for name, _ in block.rows[0].parts]
    seen = {name for row in block.rows for name, size in row.parts if size}
    for place, (name, mark) in enumerate(zip(names, letters(names), strict=True)):
        swatch = Text(f" {mark} ", letter_on(colour_of(name, place))) if colour else Text(mark, "bold")
        if name in seen:
            yield Text.assemble(swatch, f" {name}")
    yield Text(f"{signs.free} free")
    yield Text(f"{signs.limit} capacity")
    if any(row.size > block.end for row in block.rows):
        yield Text(f"{_CUT[signs]} goes on")


# ----------------------------------------------------------------------------------------------------------------- HTML


def as_html(block: Bars) -> str:
    """Return the bars as elements whose widths are shares of the scale."""
    rows = [part for row in block.rows for part in _html_row(block, row)]
    legend = [_html_legend(block)] if block.legend else []
    return "\n".join(('<div class="bars">', *rows, *legend, "</div>"))


def _html_row(block: Bars, row: BarsRow) -> Iterator[str]:
    cut = "; the bar is cut" if row.size > block.end else ""
    yield f"<p>{html.escape(f'{row.label}: {row.said}{cut}')}</p>"
    ground = f"background:{INK['free'].light}"
    yield f'<div class="bar" style="position:relative;display:flex;height:1.4em;{ground}">'
    left = block.end
    for place, (name, size) in enumerate(row.parts):
        shown = min(size, left)
        left -= shown
        style = f"width:{100 * shown / block.end:.3f}%;background:{colour_of(name, place).light}"
        yield f'<span title="{html.escape(name)} {gib(size)} GiB" style="{style}"></span>'
    edge = f"position:absolute;top:-2px;bottom:-2px;border-right:2px solid {INK['limit'].light}"
    said = html.escape(f"{block.limit} {gib(block.capacity)} GiB")
    yield f'<span class="limit" title="{said}" style="{edge};width:{100 * block.capacity / block.end:.3f}%"></span>'
    yield "</div>"


def _html_legend(block: Bars) -> str:
    names = [name for name, _ in block.rows[0].parts]
    shades = [colour_of(name, place) for place, name in enumerate(names)]
    items = [
        '<span style="display:inline-block;padding:0 .3em;border-radius:2px;'
        f'background:{shade.light};color:{words_on(shade).light}">{html.escape(name)}</span>'
        for name, shade in zip(names, shades, strict=True)
    ]
    said = f"The line is {html.escape(block.limit)}, {gib(block.capacity)} GiB; the scale ends at {gib(block.end)} GiB."
    return f'<p class="legend">{" ".join(items)} {said}</p>'
