"""A document on a terminal, or as text of a given width; in ASCII where a terminal shows nothing else."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from memcalc.report.bars import bars_lines
from memcalc.report.glyphs import Glyphs, glyphs, printable
from memcalc.report.palette import ANYWHERE, COMPONENTS, MOODS, SERIES
from memcalc.report.tables import Bar, Bars, Block, Code, Column, Document, Line, Listing, Table, Tree
from memcalc.report.terminal_bar import bar_lines, packed
from memcalc.report.terminal_tree import drawn_meter, tree_lines

__all__ = ["draw", "fitted", "paint"]

_NARROWEST = 40
_METER = 8
_PERCENT = 3
"""Characters of the number behind a meter."""
_GAP = 2
_LABEL = 9
_LONG = 160
"""Letters above which a cell's parts have a row each."""
_STYLES = {"heading": "bold", "title": "bold", "verdict": "bold", "faint": "dim"}
_DIFF = {"+": "green", "-": "red", "@": "cyan"}


@dataclass
class _Screen:
    """Where blocks are shown."""

    console: Console
    colour: bool
    ascii_only: bool
    wraps: bool
    """Whether commands are broken too, as a picture of a terminal must."""
    blank: bool = True
    """Whether nothing, or an empty line, was shown last: there are never two."""

    def show(self, part: Text | RichTable, *, whole: bool = False) -> None:
        """Print a line or a table; `whole` lines are not broken."""
        empty = isinstance(part, Text) and not part
        if not (empty and self.blank):
            self.console.print(part, soft_wrap=whole)
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
    stream = io.StringIO()
    console = _console(stream, max(width, _NARROWEST), colour)
    paint(document, console, colour=colour, ascii_only=ascii_only)
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


def paint(document: Document, console: Console, *, colour: bool, ascii_only: bool = False, wraps: bool = False) -> None:
    """Print `document` on a console."""
    screen = _Screen(console, colour, ascii_only, wraps)
    before: Block | None = None
    for block in document.blocks:
        if _begins(block) and before is not None and not (isinstance(before, Line) and before.role == "verdict"):
            screen.show(Text())
        _show(screen, block)
        before = block


def _begins(block: Block) -> bool:
    """Whether a block begins a part of its own."""
    return isinstance(block, Line) and block.role in {"title", "heading"}


def _show(screen: _Screen, block: Block) -> None:
    if isinstance(block, Line):
        for row in _line(screen, block):
            screen.show(row)
    elif isinstance(block, Code):
        _pasted(screen, block.says, [block.command])
    elif isinstance(block, Listing):
        _pasted(screen, block.says, block.text.splitlines(), block.language == "diff")
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


# ---------------------------------------------------------------------------------------------------------------- lines


def _line(screen: _Screen, line: Line) -> Iterator[Text]:
    """Yield the rows of a paragraph; a dot between its parts stands for no product, also in ASCII."""
    line = replace(line, text=line.text.replace(" · ", screen.signs.between))
    if line.role == "heading":
        yield Text()
    if line.role == "verdict" and line.mood:
        yield _verdict(screen, line)
    elif line.role == "warning":
        said, colon, rest = line.text.partition(": ")
        style = f"bold {ANYWHERE['close']}"
        if colon and said in {"Warning", "Note"}:
            yield from _labelled(screen, Line(rest, label=said), style)
        else:
            yield screen.text(line.text, style)
    elif line.label or line.items:
        yield from _labelled(screen, line)
    else:
        yield from _hanging(screen, line.text, ANYWHERE.get(line.mood) or _STYLES.get(line.role, ""))


def _hanging(screen: _Screen, text: str, style: str) -> Iterator[Text]:
    """Yield a paragraph; what is set in, or numbered, keeps its place in every row."""
    begin = re.match(r" *(?:\d+\. |→ )?", text)
    first = screen.text(begin[0]) if begin else Text()
    body = screen.text(text[len(begin[0]) if begin else 0 :])
    rows = body.wrap(screen.console, max(screen.width - first.cell_len, _NARROWEST // 2)) or [Text()]
    for place, row in enumerate(rows):
        row.rstrip()
        start = Text(" " * first.cell_len) if place else first
        yield Text.assemble(start, row, style=style)


def _verdict(screen: _Screen, line: Line) -> Text:
    """Return the verdict, its first words on a ground of their colour, which is read on any terminal."""
    said, dot, rest = line.text.partition(screen.signs.between)
    if not dot:
        return screen.text(line.text, f"bold {ANYWHERE[line.mood]}")
    if not screen.colour:
        return screen.text(line.text, "bold")
    badge = Style(color="#ffffff", bgcolor=MOODS[line.mood].light, bold=True)
    return Text.assemble(screen.text(f" {said} ", badge), screen.text(f"  {rest}", "bold"))


def _labelled(screen: _Screen, line: Line, accent: str = "dim") -> Iterator[Text]:
    """Yield a label and what it says beside it; items are not broken inside."""
    label = screen.text(f"{line.label:<{_LABEL}}" if line.label else "", accent)
    indent = _LABEL + 1 if line.label else 0
    if label.cell_len > _LABEL:
        yield label.append(":")
        label = Text(" " * _LABEL)
    style = _STYLES.get(line.role, "") if line.role != "faint" else ""
    room = max(screen.width - indent, _NARROWEST // 2)
    items = [screen.text(item) for item in line.items] or [screen.text(line.text)]
    items[0].stylize(style)
    between = screen.signs.between
    for place, item in enumerate(items[:-1]):
        if item.cell_len + len(between) <= room:
            items[place] = item + Text(between.rstrip(), "dim")
    rows = [row for one in packed(items, room, 1) for row in one.wrap(screen.console, room)]
    for place, row in enumerate(rows):
        row.rstrip()
        if place or not line.label:
            yield Text(" " * indent).append_text(row)
        else:
            yield Text.assemble(label, " ", row)


def _pasted(screen: _Screen, says: str, lines: Iterable[str], diff: bool = False) -> None:
    """Print what is there to be pasted: it is not cut, save in a picture."""
    screen.show(screen.text(f"{says}:", "dim"))
    for line in lines:
        style = _DIFF.get(line[:1], "") if diff else ""
        if not screen.wraps or diff:
            screen.show(screen.text(f"  {line}", style), whole=True)
            continue
        rows = screen.text(line).wrap(screen.console, screen.width - 6)
        for place, row in enumerate(rows):
            row.rstrip()
            more = " \\" if place < len(rows) - 1 else ""
            screen.show(Text("    " if place else "  ").append_text(row).append(more))


# --------------------------------------------------------------------------------------------------------------- tables


def fitted(table: Table, width: int) -> tuple[Table, Table]:
    """Return `table` as `width` holds it, and its columns that are left out.

    First the narrow form is taken or words are shortened; then columns go, those that say the same in every row before
    the others.
    """
    if _total(table) > width and table.narrow is not None:
        table = table.narrow
    whole = table
    if _total(table) > width:
        table = table.brief()
    kept = list(range(len(table.columns)))
    while _total(table.keep(kept)) > width:
        removable = [place for place in kept if table.columns[place].priority]
        if not removable:
            break
        kept.remove(max(removable, key=lambda place: (_same(table, place), table.columns[place].priority, place)))
    return table.keep(kept), whole.keep([place for place in range(len(table.columns)) if place not in kept])


def _same(table: Table, place: int) -> bool:
    """Whether a column says the same in each of several rows."""
    return len(table.rows) > 1 and len({row[place] for row in table.rows}) == 1


def _total(table: Table) -> int:
    return sum(_width(table, place) + _GAP for place in range(len(table.columns))) - _GAP


def _cells(table: Table, place: int) -> int:
    """Return the width of a column's figures."""
    return max([cell_len(row[place]) for row in table.rows], default=0)


def _width(table: Table, place: int) -> int:
    column = table.columns[place]
    cells = max(_cells(table, place), cell_len(column.unit))
    return max(cell_len(column.title), _METER + 1 + max(cells, _PERCENT) if column.meter else cells)


def _table(screen: _Screen, table: Table) -> None:
    shown, left_out = fitted(table, screen.width)
    grid = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for column in shown.columns:
        grid.add_column(
            _heading(screen, column), justify="right" if column.right else "left", no_wrap=column.right, overflow="fold"
        )
    wide = [max(_cells(shown, place), _PERCENT) for place in range(len(shown.columns))]
    for row in shown.rows:
        style = (COMPONENTS.get(row[0]) or SERIES[0]).light
        grid.add_row(*(_cell(screen, *one, style) for one in zip(shown.columns, row, wide, strict=True)))
    for part in (Text(), screen.text(table.title, "bold"), grid):
        screen.show(part)
    for line in _left_out(shown, left_out):
        for part in _line(screen, line):
            screen.show(part)
    screen.show(Text())


def _left_out(shown: Table, left: Table) -> Iterator[Line]:
    """Yield what columns without room say: in every row, in some, or only that they are left out."""
    places = range(len(left.columns))
    same = {place for place in places if _same(left, place)}
    alike = tuple(f"{left.columns[place].heading} {left.rows[0][place] or 'none'}" for place in sorted(same))
    if alike:
        yield Line("", "faint", label="In all", items=alike)
    below = [place for place in places if left.columns[place].below and place not in same]
    for place in below:
        told = [
            (kept[0].strip(" *"), row[place]) for kept, row in zip(shown.rows, left.rows, strict=True) if row[place]
        ]
        mark = "#" if shown.columns[0].title == "#" else ""
        items = tuple(f"{mark}{name} {said}" for name, said in told)
        yield Line("", label=left.columns[place].title.capitalize(), items=items)
    others = [left.columns[place].title for place in places if place not in same and place not in below]
    if others:
        yield Line(f"Left out at this width: {', '.join(others)}; --format csv has every column.", "faint")


def _heading(screen: _Screen, column: Column) -> Text:
    return screen.text(f"{column.title}\n{column.unit}" if column.unit else column.title, "dim")


def _cell(screen: _Screen, column: Column, value: str, wide: int, style: str) -> Text:
    """Return a figure, with a small bar in the colour of the row's component where the column has one."""
    if not (column.meter and value):
        parted = len(value) > _LONG and not column.right
        return screen.text(value.replace("; ", ";\n") if parted else value)
    return Text.assemble(drawn_meter(float(value) / column.whole, screen.signs, style), f" {value:>{wide}}")
