"""A tree on a terminal: branches and leaves with their figures in one column, and what is folded in one line."""

from __future__ import annotations

from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from memcalc.report.palette import COMPONENTS, SERIES, Glyphs, printable
from memcalc.report.tables import Branch, Leaf, Tree

_METER = 8
_SHARE = _METER + 6
"""Blanks, a small bar, a blank, three digits and a percent sign, in cells."""
_FIGURE = 10
_INDENT = 3


def meter(share: float, signs: Glyphs, cells: int = _METER) -> str:
    """Return a small bar for a share between 0 and 1.

    >>> from memcalc.report.palette import ASCII
    >>> meter(0.5, ASCII), meter(0.001, ASCII), meter(7, ASCII)
    ('####....', '........', '########')
    """
    each = len(signs.parts) + 1
    units = round(min(max(share, 0.0), 1.0) * cells * each)
    total, part = divmod(units, each)
    bar = signs.full * total + (signs.parts[part - 1] if part else "")
    return bar + signs.track * (cells - len(bar))


def drawn_meter(share: float, signs: Glyphs, style: str, cells: int = _METER) -> Text:
    """Return a small bar in a colour, what is left of it dim."""
    bar = meter(share, signs, cells)
    filled = bar.rstrip(signs.track)
    return Text.assemble((filled, style), (bar[len(filled) :], "dim"))


def tree_lines(tree: Tree, width: int, console: Console, *, ascii_only: bool, signs: Glyphs) -> Iterator[Text]:
    """Yield the rows of a tree, then its sources."""
    drawn = _Drawn(width, console, ascii_only, signs)
    if tree.title:
        yield Text(printable(tree.title, ascii_only), "bold")
    for branch in tree.branches:
        yield from drawn.branch(branch, tree.aside)
    if tree.sources:
        yield Text()
        yield Text("Sources", "bold")
    for number, source in enumerate(tree.sources, 1):
        mark = f"[{number}]".rjust(4)
        yield from drawn.wrapped(printable(source, ascii_only), f"{mark} ", " " * 5, "dim")


class _Drawn:
    """How rows are made at a width."""

    def __init__(self, width: int, console: Console, ascii_only: bool, signs: Glyphs) -> None:
        self.width, self.console, self.ascii_only, self.signs = width, console, ascii_only, signs
        self.shade = ""

    def branch(self, branch: Branch, aside: str) -> Iterator[Text]:
        """Yield a group: its own row, its leaves, and those that stand aside."""
        folded = branch.folded and branch.leaves
        count = f"{len(branch.leaves)} term{'s' * (len(branch.leaves) != 1)}" if folded else ""
        text = ", ".join(part for part in (branch.says, count) if part)
        self.shade = (COMPONENTS.get(branch.part) or SERIES[0]).light
        yield from self.row("", "", branch.name, text, branch.figure, branch.share, "bold")
        if branch.folded:
            return
        leaves = [leaf for leaf in branch.leaves if not leaf.aside]
        others = [leaf for leaf in branch.leaves if leaf.aside]
        for index, leaf in enumerate(leaves, 1):
            yield from self.leaf(leaf, *self.limbs(index == len(leaves) and not others))
        if others:
            first, rest = self.limbs(True)
            yield Text(f"{first}{aside}", "dim")
            for leaf in others:
                yield from self.row(rest, rest, leaf.name, leaf.when, leaf.figure, "", "dim")

    def limbs(self, last: bool) -> tuple[str, str]:
        """Return what stands before a leaf's first row, and before the others."""
        return (self.signs.last, " " * _INDENT) if last else (self.signs.fork, self.signs.beside)

    def leaf(self, leaf: Leaf, first: str, rest: str) -> Iterator[Text]:
        """Yield a term: its name and size, then what explains it."""
        yield from self.row(first, rest, leaf.name, "", leaf.figure, leaf.share, "")
        for line in self.joined(leaf.lines, cell_len(rest) + 2):
            yield from self.wrapped(line, f"{rest}  ", f"{rest}  ", "dim")

    def joined(self, lines: tuple[str, ...], indent: int) -> Iterator[str]:
        """Yield lines, the first two as one where both have room."""
        known = [printable(line, self.ascii_only) for line in lines]
        if len(known) > 2 and indent + cell_len(known[0]) + 3 + cell_len(known[1]) <= self.width:
            known[:2] = ["   ".join(known[:2])]
        yield from known

    def row(self, first: str, rest: str, name: str, text: str, figure: str, share: str, style: str) -> Iterator[Text]:
        """Yield a name with its figure and its share in columns; a long name takes several rows."""
        right = Text(printable(figure, self.ascii_only).rjust(_FIGURE), style)
        if share:
            right = Text.assemble(right, "  ", drawn_meter(float(share) / 100, self.signs, self.shade), f" {share:>3}%")
        space = max(self.width - _FIGURE - _SHARE - 3, self.width // 3)
        label = Text(first + printable(name, self.ascii_only), style)
        if text:
            label.append(f"  {printable(text, self.ascii_only)}", "dim")
        wrapped = self.lines(label, space, rest + "  ")
        head = wrapped[0]
        index = self.width - _SHARE - 1 - max(_FIGURE, cell_len(figure))
        if head.cell_len + 2 > index:
            yield head
            head = Text(rest)
        head.append(" " * (index - head.cell_len))
        yield head.append_text(right)
        yield from wrapped[1:]

    def wrapped(self, text: str, first: str, rest: str, style: str) -> Iterator[Text]:
        """Yield a paragraph whose rows begin with `first` and `rest`."""
        yield from self.lines(Text(first + text, style), self.width, rest)

    def lines(self, text: Text, width: int, rest: str) -> list[Text]:
        """Return a text in rows, those after the first with `rest` before them."""
        first, *more = text.wrap(self.console, width) or [Text()]
        result = [first]
        left = Text(" ").join(part for part in more) if more else None
        while left is not None and left.cell_len:
            head, *others = left.wrap(self.console, max(width - cell_len(rest), 8)) or [Text()]
            result.append(Text(rest).append_text(head))
            left = Text(" ").join(others) if others else None
        for row in result:
            row.rstrip()
        return result
