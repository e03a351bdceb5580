"""What a report consists of, before any format: lines, tables, a stacked bar, a tree, a command to paste.

Cells are text already, so that every format shows the same figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memcalc.units import GIB

__all__ = [
    "Bar",
    "Bars",
    "BarsRow",
    "Block",
    "Branch",
    "Code",
    "Column",
    "Document",
    "Leaf",
    "Line",
    "Listing",
    "Table",
    "Tree",
    "facts",
    "gib",
    "percent",
]


@dataclass(frozen=True)
class Column:
    """A heading with its unit, and how the column behaves where there is little room."""

    title: str
    unit: str = ""
    right: bool = False
    priority: int = 0
    """0 is never left out; the highest goes first."""
    meter: bool = False
    """A terminal draws a small bar before the figure: a share, or a part of `whole`."""
    whole: float = 100.0
    """What fills the bar, in the column's own unit."""
    below: bool = False
    """Told below the table, row by row, where there is no room for the column."""
    short: tuple[tuple[str, str], ...] = ()
    """Parts of words, and what stands for them where there is little room."""

    @property
    def heading(self) -> str:
        """The title with its unit."""
        return f"{self.title} [{self.unit}]" if self.unit else self.title


@dataclass(frozen=True)
class Table:
    """Rows of text cells under columns."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    narrow: Table | None = None
    """The same in fewer columns, for a terminal that does not hold these."""

    @property
    def headings(self) -> list[str]:
        """The headings from left to right."""
        return [column.heading for column in self.columns]

    def keep(self, kept: Sequence[int]) -> Table:
        """Return the table with only the columns at the places `kept`."""
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return Table(self.title, tuple(self.columns[place] for place in kept), rows)

    def brief(self) -> Table:
        """Return the table with the words of each column shortened."""
        rows = tuple(tuple(map(_shortened, self.columns, row)) for row in self.rows)
        return Table(self.title, self.columns, rows)


def _shortened(column: Column, cell: str) -> str:
    for long, short in column.short:
        cell = cell.replace(long, short)
    return cell


@dataclass(frozen=True)
class Line:
    """One paragraph; `role` is heading, title, verdict, text, warning or faint, and `mood` good, close or bad.

    A terminal shows `label` and `items`, where there are any, in the place of `text`, which says the same.
    """

    text: str
    role: str = "text"
    mood: str = ""
    label: str = ""
    items: tuple[str, ...] = ()
    """What is not broken inside."""


@dataclass(frozen=True)
class Bar:
    """A stacked bar of named sizes [bytes] that fill a capacity; what is left is free."""

    parts: tuple[tuple[str, int], ...]
    capacity: int
    kept: int = 0
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
        return min(self.kept, max(0, self.capacity - self.used))

    @property
    def free(self) -> int:
        """What is neither used nor to stay free [bytes]."""
        return max(0, self.capacity - self.used - self.kept)

    @property
    def rest(self) -> str:
        """A sentence on what is not among the parts."""
        kept = f"{gib(self.spared)} GiB are kept free; " if self.kept else ""
        if self.over:
            return f"{kept}{gib(self.over)} GiB lie beyond the limit of {gib(self.capacity)} GiB."
        return f"{kept}{gib(self.free)} GiB are free below the limit of {gib(self.capacity)} GiB."


@dataclass(frozen=True)
class BarsRow:
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


@dataclass(frozen=True)
class Bars:
    """Stacked bars on one scale that ends at `end`, with a line at the capacity [bytes] of what `limit` names.

    A bar that goes beyond the end is cut there, and says so.
    """

    rows: tuple[BarsRow, ...]
    capacity: int
    end: int
    limit: str
    legend: bool = True
    """Whether what colours and letters stand for is told; of several blocks one tells it."""


@dataclass(frozen=True)
class Leaf:
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


@dataclass(frozen=True)
class Branch:
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


@dataclass(frozen=True)
class Tree:
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
        columns = (Column("branch"), Column("size", right=True), Column("share", "%", right=True))
        rows = tuple((one.name, f"{one.figure} {one.says}".strip(), one.share) for one in self.branches)
        return (*([Table(self.title, columns, rows)] if self.title else []), self.table)


@dataclass(frozen=True)
class Code:
    """A command line to paste; `says` introduces it."""

    says: str
    command: str


@dataclass(frozen=True)
class Listing:
    """Lines to read as they stand, such as a diff; `says` introduces them."""

    says: str
    language: str
    text: str


Block = Line | Table | Bar | Bars | Tree | Code | Listing


@dataclass(frozen=True)
class Document:
    """What is shown from top to bottom, and the one table that stands for it as CSV."""

    blocks: tuple[Block, ...]
    data: Table


def gib(size: float, digits: int = 2) -> str:
    """Return `size` [bytes] in GiB, without the unit.

    >>> gib(85899345920)
    '80.00'
    """
    return f"{size / GIB:.{digits}f}"


def percent(part: float, whole: float) -> str:
    """Return the share of `part` in `whole` [%], and nothing for a share of nothing.

    >>> percent(1, 3), percent(1, 0)
    ('33', '')
    """
    return f"{100 * part / whole:.0f}" if whole else ""


def facts(said: str, values: dict[str, str]) -> tuple[Line, ...]:
    """Return a line that lists names with values, or no line for none.

    >>> facts("Assumed", {"framework": "fsdp2", "tp": "1"})[0].text
    'Assumed: framework fsdp2, tp 1.'
    """
    items = tuple(f"{name} {value}" for name, value in values.items())
    return (Line(f"{said}: {', '.join(items)}.", "faint", label=said, items=items),) if items else ()
