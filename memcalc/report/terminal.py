"""A document on a terminal, or as plain text of a given width."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text
from rich.tree import Tree as RichTree

from memcalc.report import bars
from memcalc.report.tables import (
    Bar,
    Bars,
    Block,
    Branch,
    Code,
    Column,
    Document,
    Leaf,
    Line,
    Listing,
    Table,
    Tree,
    gib,
)

__all__ = ["draw", "fitted"]

_NARROWEST = 40
_METER = 8
_PERCENT = 3
"""Characters of the number behind a meter."""
_GAP = 2
_STYLES = {"heading": "bold", "title": "bold", "verdict": "bold", "warning": "yellow", "faint": "dim", "text": ""}
_MOODS = {"good": "bold green", "close": "bold yellow", "bad": "bold red"}
_DIFF = {"+": "green", "-": "red", "@": "cyan"}
_COLOURS = ("blue", "cyan", "green", "yellow", "red", "magenta", "white")
_UNPRINTABLE = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) != "\n"}


def draw(document: Document, width: int, colour: bool) -> str:
    """Return `document` for `width` columns, with colour codes where `colour`."""
    stream = io.StringIO()
    system: Literal["auto"] | None = "auto" if colour else None
    width = max(width, _NARROWEST)
    console = Console(
        file=stream, width=width, force_terminal=colour, no_color=not colour, color_system=system,
        markup=False, highlight=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    for block in document.blocks:
        _show(console, block, colour)
    text = "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _show(console: Console, block: Block, colour: bool) -> None:
    if isinstance(block, Line):
        console.print(_text(block.text, _MOODS.get(block.mood) or _STYLES[block.role]))
    elif isinstance(block, Code):
        console.print(_text(f"{block.says}:", "dim"))
        console.print(_text(f"  {block.command}"), soft_wrap=True)  # never cut: it is there to be pasted
    elif isinstance(block, Listing):
        console.print(_text(f"{block.says}:", "dim"))
        for line in block.text.splitlines():
            console.print(_text(f"  {line}", _DIFF.get(line[:1], "")), soft_wrap=True)
    else:
        for part in _drawn(block, console.width, colour):
            console.print(part)


def _drawn(block: Table | Bar | Bars | Tree, width: int, colour: bool) -> Iterator[RenderableType]:
    if isinstance(block, Table):
        yield from _table(block, width)
    elif isinstance(block, Bar):
        yield from _bar(block, width, colour)
    elif isinstance(block, Bars):
        yield from bars.draw(block, width, _MOODS if colour else None)
    else:
        yield from (_branch(branch) for branch in block.branches)


def _text(content: str, style: str = "") -> Text:
    return Text(content.translate(_UNPRINTABLE), style=style)


# --------------------------------------------------------------------------------------------------------------- tables


def fitted(table: Table, width: int) -> tuple[Table, list[str]]:
    """Return `table` as `width` holds it, and what is left out.

    First words are shortened; then columns go, those that say the same in every row before the others.
    """
    if _total(table) > width:
        table = table.brief()
    kept = list(range(len(table.columns)))
    while _total(table.keep(kept)) > width:
        removable = [place for place in kept if table.columns[place].priority]
        if not removable:
            break
        kept.remove(max(removable, key=lambda place: (_same(table, place), table.columns[place].priority, place)))
    return table.keep(kept), [_named(table, place) for place in range(len(table.columns)) if place not in kept]


def _same(table: Table, place: int) -> bool:
    """Whether a column says the same in each of several rows."""
    return len(table.rows) > 1 and len({row[place] for row in table.rows}) == 1


def _named(table: Table, place: int) -> str:
    title = table.columns[place].title
    return f"{title} ({table.rows[0][place]} in all)" if _same(table, place) else title


def _total(table: Table) -> int:
    return sum(_width(table, place) + _GAP for place in range(len(table.columns))) - _GAP


def _width(table: Table, place: int) -> int:
    column = table.columns[place]
    cells = max([cell_len(row[place]) for row in table.rows] + [len(column.unit)])
    return max(cell_len(column.title), _METER + 1 + max(cells, _PERCENT) if column.meter else cells)


def _table(table: Table, width: int) -> Iterator[RenderableType]:
    shown, left_out = fitted(table, width)
    grid = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for column in shown.columns:
        grid.add_column(
            _heading(column), justify="right" if column.right else "left", no_wrap=column.right, overflow="fold"
        )
    for row in shown.rows:
        grid.add_row(*(_cell(column, value) for column, value in zip(shown.columns, row, strict=True)))
    yield from ("", _text(table.title, "bold"), grid)
    if left_out:
        yield _text(f"Left out at this width: {', '.join(left_out)}; --format csv has every column.", "dim")
    yield ""


def _heading(column: Column) -> Text:
    return _text(f"{column.title}\n{column.unit}" if column.unit else column.title, "dim")


def _cell(column: Column, value: str) -> Text:
    return _text(f"{_meter(value)} {value:>{_PERCENT}}" if column.meter and value else value)


def _meter(value: str) -> str:
    filled = min(_METER, round(float(value) / 100 * _METER))
    return "█" * filled + "░" * (_METER - filled)


# ------------------------------------------------------------------------------------------------------ bar and tree


def _bar(bar: Bar, width: int, colour: bool) -> Iterator[Text]:
    whole = max(bar.capacity, sum(size for _, size in bar.parts))
    line, legend = Text(), []
    reached = drawn = 0
    for (name, size), shade in zip(bar.parts, _COLOURS, strict=True):
        reached += size
        cells = round(reached / whole * width) - drawn
        drawn += cells
        line.append(("█" if colour else name[0].upper()) * cells, shade)
        legend.append(Text.assemble(("■" if colour else name[0].upper(), shade), f" {name} {gib(size)}"))
    line.append("·" * (width - drawn), "dim")
    yield line
    yield from _packed([*legend, Text(f"· free {gib(max(0, bar.capacity - reached))} GiB")], width)


def _packed(items: list[Text], width: int) -> Iterator[Text]:
    """Lay `items` in lines, none broken inside."""
    line = Text()
    for item in items:
        if line and len(line) + _GAP + len(item) > width:
            yield line
            line = Text()
        line.append(" " * _GAP if line else "").append_text(item)
    yield line


def _branch(branch: Branch) -> RichTree:
    tree = RichTree(_text(f"{branch.name}  {branch.figure}", "bold"))
    for leaf in branch.leaves:
        _add(tree, leaf)
    return tree


def _add(tree: RichTree, leaf: Leaf) -> None:
    label = _text(f"{leaf.name}  {leaf.figure}")
    for line in leaf.lines:
        label.append("\n" + line.translate(_UNPRINTABLE), "dim")
    tree.add(label)
