"""A document on a terminal, as text of a given width (in ASCII where need be), or as one SVG in light and in dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table as RichTable
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from memcalc.report.palette import ANYWHERE, COMPONENTS, INK, MOODS, SERIES, Glyphs, glyphs, printable
from memcalc.report.stacked_bar import bar_lines, bars_lines, packed
from memcalc.report.tables import Bar, Bars, Block, Code, Column, Document, Line, Listing, Table, Tree
from memcalc.report.terminal_rows import ROWS, broken, drawn_meter, folds, rows_of, tree_lines

_NARROWEST = 40
_METER = 8
_PERCENT = 3
"""Characters of the number behind a meter."""
_GAP = 2
_LABEL = 9
_BOTH = 2
_LONG = 160
"""Letters above which a cell's parts have a row each."""
_STYLES = {"heading": "bold", "title": "bold", "verdict": "bold", "faint": "dim"}
_DIFF = {"+": "green", "-": "red", "@": "cyan"}
_SHELL = "sh"


@dataclass
class _Screen:
    """Where blocks are shown."""

    console: Console
    colour: bool
    ascii_only: bool
    blank: bool = True
    """Whether nothing, or an empty line, was shown last: there are never two."""

    def show(self, part: Text | RichTable, *, unbroken: bool = False) -> None:
        """Print a line or a table; with `unbroken` a line is not wrapped."""
        empty = isinstance(part, Text) and not part
        if not (empty and self.blank):
            self.console.print(part, soft_wrap=unbroken)
        self.blank = empty

    @property
    def width(self) -> int:
        return self.console.width

    @property
    def signs(self) -> Glyphs:
        return glyphs(self.ascii_only)

    def text(self, content: str, style: str | Style = "") -> Text:
        return Text(printable(content, self.ascii_only), style)


def draw(document: Document, width: int, colour: bool, *, ascii_only: bool = False) -> str:
    """Return `document` for `width` columns, with colour codes where `colour`."""
    return _text(_shown(document, width), width, colour, ascii_only=ascii_only)


def _shown(document: Document, width: int) -> tuple[Block, ...]:
    """Return what is drawn: a screen in as many rows as one holds, where that is possible."""
    blocks = document.screen or document.blocks
    if not document.screen:
        return blocks
    for blocks in folds(document.screen, max(width, _NARROWEST) - _LABEL - 1):
        if _text(blocks, width, colour=False, ascii_only=False).count("\n") <= ROWS:
            break
    return blocks


def _text(blocks: Iterable[Block], width: int, colour: bool, *, ascii_only: bool) -> str:
    stream = io.StringIO()
    console = _console(stream, max(width, _NARROWEST), colour)
    _paint(blocks, console, colour=colour, ascii_only=ascii_only)
    text = "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
    return text.strip("\n") + "\n"


def _console(stream: io.StringIO, width: int, colour: bool) -> Console:
    """Return a console that writes to a stream: with the colours that the terminal says it has, and 16 at least."""
    systems: tuple[Literal["auto", "standard"] | None, ...] = ("auto", "standard") if colour else (None,)
    for system in systems:
        console = Console(
            file=stream, width=width, force_terminal=colour, no_color=not colour, color_system=system,
            markup=False, highlight=False, emoji=False, legacy_windows=False,
        )  # fmt: skip
        if console.color_system:
            break
    return console


def _paint(blocks: Iterable[Block], console: Console, *, colour: bool, ascii_only: bool = False) -> None:
    """Print blocks on a console."""
    screen = _Screen(console, colour, ascii_only)
    before: Block | None = None
    for block in blocks:
        if _begins(block) and before is not None and not (isinstance(before, Line) and before.role == "verdict"):
            screen.show(Text())
        _show(screen, block)
        before = block


def _begins(block: Block) -> bool:
    return isinstance(block, Line) and block.role in {"title", "heading"}


def _show(screen: _Screen, block: Block) -> None:
    if isinstance(block, Line):
        for row in _line(screen, block):
            screen.show(row)
    elif isinstance(block, Code):
        _pasted(screen, block.says, [block.command], _SHELL)
    elif isinstance(block, Listing):
        _pasted(screen, block.says, block.text.splitlines(), block.language)
    elif isinstance(block, Table):
        _table(screen, block)
    else:
        for row in _rows(screen, block):
            screen.show(row)


def _rows(screen: _Screen, block: Bar | Bars | Tree) -> Iterator[Text]:
    if isinstance(block, Bar):
        yield from bar_lines(block, screen.width, screen.signs, colour=screen.colour)
    elif isinstance(block, Bars):
        yield from bars_lines(block, screen.width, screen.signs, colour=screen.colour)
    else:
        yield Text()
        yield from tree_lines(
            block, screen.width, screen.console, ascii_only=screen.ascii_only, signs=screen.signs
        )  # fmt: skip
        yield Text()


def _line(screen: _Screen, line: Line) -> Iterator[Text]:
    """Yield the rows of a paragraph; a dot between its parts stands for no product, also in ASCII."""
    line = line._replace(text=line.text.replace(" · ", screen.signs.between))
    if line.role == "heading":
        yield Text()
    if line.role == "verdict" and line.mood:
        yield from rows_of(screen.console, _verdict(screen, line), screen.width, screen.signs.between)
    elif line.role == "warning":
        text, colon, rest = line.text.partition(": ")
        style = f"bold {ANYWHERE['close']}"
        if colon and text in {"Warning", "Note"}:
            yield from _labelled(screen, Line(rest, label=text), style)
        else:
            yield from rows_of(screen.console, screen.text(line.text, style), screen.width)
    elif line.label or line.items:
        yield from _labelled(screen, line)
    else:
        between = screen.signs.between * (line.role == "verdict")
        yield from _hanging(screen, line.text, ANYWHERE.get(line.mood) or _STYLES.get(line.role, ""), between)


def _hanging(screen: _Screen, text: str, style: str, between: str) -> Iterator[Text]:
    """Yield a paragraph; what is set in, or numbered, keeps its place in every row."""
    begin = re.match(r" *(?:\d+\. |→ )?", text)
    first = screen.text(begin[0]) if begin else Text()
    deeper = 2 * bool(re.match(r" +line \d+: ", text))  # so that each finding of a file begins where none goes on
    body = screen.text(text[len(begin[0]) if begin else 0 :])
    space = max(screen.width - first.cell_len - deeper, _NARROWEST // 2)
    rows = rows_of(screen.console, body, space, between) or [Text()]
    for index, row in enumerate(rows):
        start = Text(" " * (first.cell_len + deeper)) if index else first
        yield Text.assemble(start, row, style=style)


def _verdict(screen: _Screen, line: Line) -> Text:
    """Return the verdict, its first words on a ground of their colour, which is read on any terminal."""
    text, dot, rest = line.text.partition(screen.signs.between)
    if not dot:
        return screen.text(line.text, f"bold {ANYWHERE[line.mood]}")
    if not screen.colour:
        return screen.text(line.text, "bold")
    badge = Style(color="#ffffff", bgcolor=MOODS[line.mood].light, bold=True)
    return Text.assemble(screen.text(f" {text} ", badge), screen.text(f"  {rest}", "bold"))


def _labelled(screen: _Screen, line: Line, accent: str = "dim") -> Iterator[Text]:
    """Yield a label and what it says beside it; items are not broken inside."""
    label = screen.text(f"{line.label:<{_LABEL}}" if line.label else "", accent)
    indent = _LABEL + 1 if line.label else 0
    if label.cell_len > _LABEL:
        yield label.append(":")
        label = Text(" " * _LABEL)
    style = _STYLES.get(line.role, "") if line.role != "faint" else ""
    space = max(screen.width - indent, _NARROWEST // 2)
    items = [screen.text(item) for item in line.items] or [screen.text(line.text)]
    items[0].stylize(style)
    between = screen.signs.between
    for index, item in enumerate(items[:-1]):
        if item.cell_len + len(between) <= space:
            items[index] = item + Text(between.rstrip(), "dim")
    rows = [row for entry in packed(items, space, 1) for row in rows_of(screen.console, entry, space)]
    for index, row in enumerate(rows):
        if index or not line.label:
            yield Text(" " * indent).append_text(row)
        else:
            yield Text.assemble(label, " ", row)


def _pasted(screen: _Screen, says: str, lines: Iterable[str], language: str) -> None:
    """Print what is there to be pasted: a command is broken as a shell reads it, and nothing is cut."""
    screen.show(screen.text(f"{says}:", "dim"))
    for line in lines:
        style = _DIFF.get(line[:1], "") if language == "diff" else ""
        rows = broken(line, screen.width - 2) if language == _SHELL else [line]
        for row in rows:
            screen.show(screen.text(f"  {row}", style), unbroken=True)


def fitted(table: Table, width: int) -> tuple[Table, Table]:
    """Return `table` as `width` holds it, and its columns that are left out.

    First the narrow form is taken or words are shortened; then columns go, those that say the same in every row before
    the others; words that there is room for then are whole again.
    """
    if _total(table) > width and table.narrow is not None:
        table = table.narrow
    full = table
    if _total(table) > width:
        table = table.brief()
    columns = list(range(len(table.columns)))
    while _total(table.keep(columns)) > width:
        removable = [index for index in columns if table.columns[index].priority]
        if not removable:
            break
        columns.remove(max(removable, key=lambda index: (_same(table, index), table.columns[index].priority, index)))
    shown = table.keep(columns)
    for index, column in enumerate(columns):
        longer = shown.in_full(index, [row[column] for row in full.rows])
        shown = longer if _total(longer) <= width else shown
    return shown, full.keep([index for index in range(len(table.columns)) if index not in columns])


def _same(table: Table, index: int) -> bool:
    return len(table.rows) > 1 and len({row[index] for row in table.rows}) == 1


def _total(table: Table) -> int:
    return sum(_width(table, index) + _GAP for index in range(len(table.columns))) - _GAP


def _cells(table: Table, index: int) -> int:
    return max([cell_len(row[index]) for row in table.rows], default=0)


def _width(table: Table, index: int) -> int:
    column = table.columns[index]
    cells = max(_cells(table, index), cell_len(column.unit))
    return max(cell_len(column.title), _METER + 1 + max(cells, _PERCENT) if column.meter else cells)


def _table(screen: _Screen, table: Table) -> None:
    shown, left_out = fitted(table, screen.width)
    grid = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for column in shown.columns:
        grid.add_column(
            _heading(screen, column), justify="right" if column.right else "left", no_wrap=column.right, overflow="fold"
        )
    wide = [max(_cells(shown, index), _PERCENT) for index in range(len(shown.columns))]
    for index, row in enumerate(shown.rows):
        component = shown.parts[index] if shown.parts else row[0]
        style = (COMPONENTS.get(component) or SERIES[0]).light
        grid.add_row(*(_cell(screen, *item, style) for item in zip(shown.columns, row, wide, strict=True)))
    title = screen.text(table.title if table.titled else "", "bold")
    for line in (Text(), title) if table.around else (title,) if title else ():
        screen.show(line)
    screen.show(grid)
    for note in _left_out(shown, left_out):
        for drawn in _line(screen, note):
            screen.show(drawn)
    if table.around == _BOTH:
        screen.show(Text())


def _left_out(shown: Table, left: Table) -> Iterator[Line]:
    """Yield what columns without room say: in every row, in some, or only that they are left out."""
    places = range(len(left.columns))
    same = {index for index in places if _same(left, index)}
    alike = tuple(f"{left.columns[index].heading} {left.rows[0][index] or 'none'}" for index in sorted(same))
    if alike:
        yield Line("", "faint", label="All rows", items=alike)
    below = [index for index in places if left.columns[index].below and index not in same]
    for index in below:
        values = [
            (names[0].strip(" *"), row[index])
            for names, row in zip(shown.rows, left.brief().rows, strict=True)
            if row[index] not in {"", "-", left.columns[index].obvious}
        ]
        mark = "#" if shown.columns[0].title == "#" else ""
        items = tuple(f"{mark}{name} {value}" for name, value in values)
        yield Line("", label=left.columns[index].title.capitalize(), items=items)
    others = [left.columns[index].title for index in places if index not in same and index not in below]
    if others:
        yield Line(f"Hidden at this width: {', '.join(others)} (all columns: --format csv)", "faint")


def _heading(screen: _Screen, column: Column) -> Text:
    return screen.text(f"{column.title}\n{column.unit}" if column.unit else column.title, "dim")


def _cell(screen: _Screen, column: Column, value: str, wide: int, style: str) -> Text:
    """Return a figure, with a small bar in the colour of the row's component where the column has one."""
    if not (column.meter and value):
        parted = len(value) > _LONG and not column.right
        return screen.text(value.replace("; ", ";\n") if parted else value)
    return Text.assemble(drawn_meter(float(value) / column.full, screen.signs, style), f" {value:>{wide}}")


_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
_FORMAT = """\
<svg class="memcalc-terminal" role="img" @SIZE@ xmlns="http://www.w3.org/2000/svg">
<title>@TITLE@</title>
<style>
.{unique_id}-matrix {{ font-family: @FONT@; font-size: {char_height}px; white-space: pre }}
.{unique_id}-page {{ fill: @PAGE@; stroke: @RULE@ }}
{styles}
@DARK@</style>
<rect class="{unique_id}-page" x="0.5" y="0.5" @FRAME@ rx="6"/>
<g transform="translate(@EDGE@, @EDGE@)" data-size="{terminal_width} {terminal_height}">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
_UNIQUE = "memcalc"
_SCALE = 0.65
_EDGE = 12


def picture(document: Document, width: int) -> str:
    """Return the SVG of `document` on a terminal of `width` columns."""
    light, dark = (_drawn(document, width, theme) for theme in (_theme("light"), _theme("dark")))
    rules = "\n".join((_page("dark"), _styles(dark)))
    svg = light.replace("@DARK@", f"@media screen and (prefers-color-scheme: dark) {{\n{rules}\n}}\n")
    svg = svg.replace("@PAGE@", INK["page"].light).replace("@RULE@", INK["rule"].light).replace("@FONT@", _FONT)
    return _sized(svg).replace("@TITLE@", escape(printable(_title(document)), quote=False))


def _sized(svg: str) -> str:
    """Return the picture with an edge around what rich has drawn, its letters as large as a page's."""
    result = re.search(r' data-size="([\d.]+) ([\d.]+)"', svg)
    sides = [float(side) + 2 * _EDGE for side in result.groups()] if result else [0.0, 0.0]
    svg = re.sub(r' data-size="[^"]*"', "", svg).replace("@EDGE@", str(_EDGE))
    svg = svg.replace("@FRAME@", 'width="{:g}" height="{:g}"'.format(*sides))
    wide, high = (side + 1 for side in sides)
    size = f'width="{_SCALE * wide:.0f}" height="{_SCALE * high:.0f}" viewBox="0 0 {wide:g} {high:g}"'
    return svg.replace("@SIZE@", size)


def _drawn(document: Document, width: int, theme: TerminalTheme) -> str:
    """Return the picture in one theme, with what both share still to be filled in."""
    console = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor", markup=False,
        highlight=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    _paint(_shown(document, width), console, colour=True)
    return console.export_svg(title="", theme=theme, code_format=_FORMAT, unique_id=_UNIQUE)


def _styles(svg: str) -> str:
    return "\n".join(re.findall(rf"^\s*\.{_UNIQUE}-r\d+ {{.*$", svg, re.MULTILINE))


def _page(mode: str) -> str:
    page, rule = (getattr(INK[name], mode) for name in ("page", "rule"))
    return f".{_UNIQUE}-page {{ fill: {page}; stroke: {rule} }}"


def _title(document: Document) -> str:
    """Return the first sentence, for who hears the picture."""
    return next((block.text for block in document.blocks if isinstance(block, Line)), "memcalc")


def _theme(mode: str) -> TerminalTheme:
    """Return the palette as a terminal's: page, text, and eight colours of which the hues of moods are used."""
    page, text, muted = (_rgb(getattr(INK[name], mode)) for name in ("page", "text", "muted"))
    good, close, bad = (_rgb(getattr(MOODS[name], mode)) for name in ("good", "close", "bad"))
    colours = [page, bad, good, close, muted, muted, muted, text]
    return TerminalTheme(page, text, colours, colours)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
