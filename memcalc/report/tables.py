"""What a report consists of, before any format: lines, tables, a stacked bar, a tree, a command to paste.

Cells are text already, so that every format shows the same figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.units import GIB

if TYPE_CHECKING:
    from pydantic import BaseModel

UNMET = "if it fit: "
"""What stands before the speed of what does not fit."""


class Column(NamedTuple):
    """A heading with its unit, and how the column behaves where there is little room."""

    title: str
    unit: str = ""
    right: bool = False
    priority: int = 0
    """0 is never left out; the highest goes first."""
    meter: bool = False
    """A terminal draws a small bar before the figure: a share, or a part of `whole`."""
    full: float = 100.0
    """What fills the bar, in the column's own unit."""
    below: bool = False
    """Told below the table, row by row, where there is no room for the column."""
    obvious: str = ""
    """What is not told there, because the first lines say it."""
    short: tuple[tuple[str, str], ...] = ()
    """Parts of words, and what stands for them where there is little room."""

    @property
    def heading(self) -> str:
        """The title with its unit."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title


_HEADING = re.compile(r"(.+?)(?: \[(.+)\])?(?: ([<>])(\d*))?")


def header(headings: str) -> tuple[Column, ...]:
    """Return columns as a line lists them: title [unit], then < or > for the side of the text, then the priority.

    >>> header("step > | device [GiB] >2")[1] == Column("device", "GiB", right=True, priority=2)
    True
    """
    cells = [_HEADING.fullmatch(heading) for heading in headings.split(" | ")]
    matches = [cell.groups() for cell in cells if cell]
    return tuple(Column(title, unit or "", side == ">", int(order or 0)) for title, unit, side, order in matches)


class Table(NamedTuple):
    """Rows of text cells under columns."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    narrow: Table | None = None
    """The same in fewer columns, for a terminal that does not hold these."""
    titled: bool = True
    """Whether a terminal says the title too."""
    pasted: tuple[Block, ...] = ()
    """What a document shows instead, where the table has more columns than a page."""
    parts: tuple[str, ...] = ()
    """The component of each row, in whose colour its small bar is drawn."""
    around: int = 2
    """Empty rows of a terminal: 2 before and behind it, 1 before it, 0 none."""

    @property
    def headings(self) -> list[str]:
        """The headings from left to right."""
        return [column.heading for column in self.columns]

    def keep(self, indices: Sequence[int]) -> Table:
        """Return the table with only the columns at the places `kept`."""
        rows = tuple(tuple(row[index] for index in indices) for row in self.rows)
        return self._replace(columns=tuple(self.columns[index] for index in indices), rows=rows)

    def in_full(self, index: int, cells: Sequence[str]) -> Table:
        """Return the table with other cells in one column."""
        rows = tuple((*row[:index], cell, *row[index + 1 :]) for row, cell in zip(self.rows, cells, strict=True))
        return self._replace(rows=rows)

    def brief(self) -> Table:
        """Return the table with the words of each column shortened."""
        rows = tuple(tuple(map(_shortened, self.columns, row)) for row in self.rows)
        return self._replace(rows=rows)


def _shortened(column: Column, cell: str) -> str:
    for long, short in column.short:
        cell = cell.replace(long, short)
    return cell


class Line(NamedTuple):
    """One paragraph; `role` is heading, title, verdict, text, warning or faint, and `mood` good, close or bad.

    A terminal shows `label` and `items`, where there are any, in the place of `text`, which says the same.
    """

    text: str
    role: str = "text"
    mood: str = ""
    label: str = ""
    items: tuple[str, ...] = ()
    """What is not broken inside."""


class Bar(NamedTuple):
    """A stacked bar of named sizes [bytes] that fill a capacity; what is left is free."""

    parts: tuple[tuple[str, int], ...]
    capacity: int
    margin: int = 0
    """Of the capacity, what is to stay free."""
    low: int = 0
    high: int = 0
    """The range in which the end of the parts may lie; none where both are 0."""

    @property
    def used(self) -> int:
        """All parts [bytes]."""
        return sum(size for _, size in self.parts)

    @property
    def over(self) -> int:
        """What lies beyond the capacity [bytes]."""
        return max(0, self.used - self.capacity)

    @property
    def spared(self) -> int:
        """What is to stay free and does [bytes]."""
        return min(self.margin, max(0, self.capacity - self.used))

    @property
    def free(self) -> int:
        """What is neither used nor to stay free [bytes]."""
        return max(0, self.capacity - self.used - self.margin)

    @property
    def rest(self) -> str:
        """A sentence on what is not among the parts."""
        margin = f"{gib(self.spared)} GiB kept free. " if self.margin else ""
        if self.over:
            return f"{margin}Over by {gib(self.over)} GiB: the GPU has {gib(self.capacity)} GiB."
        return f"{margin}Headroom: {gib(self.free)} of {gib(self.capacity)} GiB."


class BarsRow(NamedTuple):
    """One stacked bar of several: its name, its parts [bytes], and what is said of it."""

    label: str
    parts: tuple[tuple[str, int], ...]
    verdict: str
    mood: str = ""
    says: str = ""

    @property
    def size(self) -> int:
        """All parts [bytes]."""
        return sum(size for _, size in self.parts)

    @property
    def said(self) -> str:
        """All that is said of it."""
        return ", ".join(filter(None, (self.verdict, self.says)))


class Bars(NamedTuple):
    """Stacked bars on one scale that ends at `end`, with a line at the capacity [bytes] of what `limit` names.

    A bar that goes beyond the end is cut there, and says so.
    """

    rows: tuple[BarsRow, ...]
    capacity: int
    end: int
    limit: str
    legend: bool = True
    """Whether what colours and letters stand for is told; of several blocks one tells it."""
    compact: bool = False
    """Whether a terminal draws each bar in one row, its name to the left and its size to the right."""


class Leaf(NamedTuple):
    """A named figure and the lines that explain it."""

    name: str
    figure: str
    lines: tuple[str, ...]
    share: str = ""
    """Of the whole [%]; drawn as a small bar."""
    when: str = ""
    """In which phases."""
    aside: bool = False
    """Told in one line, after those that are not."""


class Branch(NamedTuple):
    """A group of leaves and its total."""

    name: str
    figure: str
    leaves: tuple[Leaf, ...]
    share: str = ""
    """Of the whole [%]; drawn as a small bar."""
    folded: bool = False
    """Told in one line; HTML and JSON have all of it."""
    says: str = ""
    """What stands beside the figure."""
    part: str = ""
    """The component whose colour it has."""


class Tree(NamedTuple):
    """Branches for a terminal, the same content as a table for every other format."""

    branches: tuple[Branch, ...]
    table: Table
    sources: tuple[str, ...] = ()
    """What ``[1]``, ``[2]``, … in the leaves stand for."""
    title: str = ""
    aside: str = ""
    """What is said of leaves that stand aside."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The branches' figures, where the tree has a title for them, and all leaves."""
        columns = header("branch | size > | share [%] >")
        rows = tuple((branch.name, f"{branch.figure} {branch.says}".strip(), branch.share) for branch in self.branches)
        return (*([Table(self.title, columns, rows)] if self.title else []), self.table)

    @property
    def paper(self) -> tuple[Table, ...]:
        """The same for a page of paper: the leaves of each branch in a table, sources by number and once."""
        if not self.sources:
            return self.tables
        *totals, leaves = self.tables
        sources = list(dict.fromkeys(row[-1] for row in leaves.rows))
        numbers = [f"[{sources.index(row[-1]) + 1}]" for row in leaves.rows]
        numbered = leaves.in_full(len(leaves.columns) - 1, numbers)
        by_branch = []
        for name in dict.fromkeys(row[0] for row in leaves.rows):
            rows = tuple(row for row in numbered.rows if row[0] == name)
            for start in range(0, len(rows), _ROWS):
                title = f"{name}, continued" if start else name
                by_branch.append(numbered._replace(title=title, rows=rows[start : start + _ROWS]))
        listed = Table("Sources", header("# | source"), tuple((f"[{at}]", text) for at, text in enumerate(sources, 1)))
        return (*totals, *(table.keep(range(1, len(table.columns))) for table in by_branch), listed)


class Code(NamedTuple):
    """A command line to paste; `says` introduces it."""

    says: str
    command: str


class Listing(NamedTuple):
    """Lines to read as they stand, such as a diff; `says` introduces them."""

    says: str
    language: str
    text: str


Block = Line | Table | Bar | Bars | Tree | Code | Listing


class Document(NamedTuple):
    """What is shown from top to bottom, and the one table that stands for it as CSV."""

    blocks: tuple[Block, ...]
    data: Table
    screen: tuple[Block, ...] = ()
    """What a terminal shows instead, unless all of it is asked for."""


class Report(NamedTuple):
    """An answer as a document, and as the published JSON."""

    document: Document
    payload: dict[str, Any]


_ROWS = 8
"""Rows of a table that a page of paper holds, where a cell of each has up to seven lines."""
MOST = 8
"""Columns of a table that is pasted into a document: what a page holds in a readable size."""


def pages(document: Document) -> Iterator[Block]:
    """Yield the blocks of a document for a page: no table has more than :data:`MOST` columns, and nothing is lost."""
    for block in document.blocks:
        yield from _on_a_page(block) if isinstance(block, Table) else (block,)


def _on_a_page(table: Table) -> Iterator[Block]:
    """Yield what stands for a table on a page, else the table in parts that all begin with its first column."""
    if table.pasted or len(table.columns) <= MOST:
        yield from table.pasted or (table,)
        return
    others = range(1, len(table.columns))
    for start in range(0, len(others), MOST - 1):
        part = table.keep((0, *others[start : start + MOST - 1]))
        yield part._replace(title=f"{table.title}, continued") if start else part


def trimmed(table: Table, columns: int, names: Sequence[str]) -> tuple[Block, ...]:
    """Return a table's first `columns`, and a line for each other that says its values with the names of their rows.

    >>> table = Table("", header("a | b [GiB] >"), (("x", "3"), ("y", ""), ("z", "3")))
    >>> trimmed(table, 1, ("#1", "#2", "#3"))[1].text
    'b: 3 GiB (#1, #3)'
    """
    blocks: list[Block] = [table.keep(range(columns))]
    for index, column in enumerate(table.columns[columns:], columns):
        rows: dict[str, list[str]] = {}
        for name, row in zip(names, table.rows, strict=True):
            rows.setdefault(row[index], []).append(name)
        items = [f"{value} {column.unit}".strip() + f" ({', '.join(of)})" for value, of in rows.items() if value]
        if items:
            blocks.append(Line(f"{column.title}: {' · '.join(items)}"))
    return tuple(blocks)


def made(result: BaseModel, data: Table, *blocks: Block, screen: Iterable[Block] = ()) -> Report:
    """Return what a typed result is shown as, with the table that stands for it as CSV."""
    return Report(Document(blocks, data, tuple(screen)), result.model_dump(mode="json", by_alias=True))


def gib(size: float, digits: int = 2) -> str:
    """Return `size` [bytes] in GiB, without the unit.

    >>> gib(85899345920)
    '80.00'
    """
    return f"{size / GIB:.{digits}f}"


def percent(part: float, total: float) -> str:
    """Return the share of `part` in `whole` [%], and nothing for a share of nothing.

    >>> percent(1, 3), percent(1, 0)
    ('33', '')
    """
    return f"{100 * part / total:.0f}" if total else ""


def in_one_row(table: Table, **titles: str) -> Table:
    """Return a table without a title, its headings in one row: some in other words, and none with its unit.

    >>> in_one_row(Table("Sizes", header("name | total [GiB] >"), ()), total="GiB").headings
    ['name', 'GiB']
    """
    columns = (column._replace(title=titles.get(column.title, column.title), unit="") for column in table.columns)
    return table._replace(columns=tuple(columns), titled=False)


def said(label: str, *items: str, role: str = "text") -> Line:
    """Return a line that a terminal shows as a label and items, which are not broken inside."""
    return Line(f"{label}: {' · '.join(items)}", role, label=label, items=items)


def facts(text: str, values: dict[str, str]) -> tuple[Line, ...]:
    """Return a line that lists names with values, or no line for none.

    >>> facts("Assumed", {"framework": "fsdp2", "tp": "1"})[0].text
    'Assumed: framework fsdp2, tp 1.'
    """
    items = tuple(f"{name} {value}" for name, value in values.items())
    return (Line(f"{text}: {', '.join(items)}.", "faint", label=text, items=items),) if items else ()
