"""The rows of a terminal's screen: fewer where it is too long, broken where it may be read on, and those of a tree."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from memcalc.report.palette import COMPONENTS, SERIES, Glyphs, printable
from memcalc.report.tables import UNMET, Block, Branch, Leaf, Line, Table, Tree

ROWS = 20
"""Rows of a screen, beyond which it is shortened."""
_BETWEEN = " · "
_MORE = "{} more: -v"
_BEFORE, _NONE = 1, 0


def folds(blocks: tuple[Block, ...], width: int) -> Iterator[tuple[Block, ...]]:
    """Yield a screen, and then in fewer rows each time, for labelled lines of `width` columns.

    What was assumed gets one row, and so does the peak; the speed of what does not fit goes; tables no empty row behind
    them; warnings but the first are counted, the last first; tables no empty row before them; at last all warnings.
    """
    yield blocks
    for label in ("Assumed", "Peak"):
        blocks = tuple(_one_row(block, width, label) if isinstance(block, Line) else block for block in blocks)
        yield blocks
    blocks = tuple(block for block in blocks if not _is_unmet(block))
    yield blocks
    blocks = _closer(blocks, _BEFORE)
    yield blocks
    warned = sum(_is_warning(block) for block in blocks)
    yield from (_counted(blocks, shown) for shown in range(warned - 1, 0, -1))
    yield _counted(_closer(blocks, _NONE), min(warned, 1))
    yield _counted(_closer(blocks, _NONE), 0)


def _closer(blocks: tuple[Block, ...], around: int) -> tuple[Block, ...]:
    return tuple(block._replace(around=around) if isinstance(block, Table) else block for block in blocks)


def _is_warning(block: Block) -> bool:
    return isinstance(block, Line) and block.text.startswith("Warning: ")


def _is_unmet(block: Block) -> bool:
    return isinstance(block, Line) and block.text.startswith(UNMET)


def _counted(blocks: tuple[Block, ...], shown: int) -> tuple[Block, ...]:
    """Return a screen with its first `shown` warnings, and how many there are besides in the place of the next."""
    warned = [index for index, block in enumerate(blocks) if _is_warning(block)]
    more = len(warned) - shown
    if not more:
        return blocks
    text = _MORE.format(more) if shown else f"{more} warning{'s' * (more > 1)}: -v"
    counted = Line(f"Warning: {text}", "warning")
    left_out = warned[shown + 1 :]
    return tuple(
        counted if index == warned[shown] else block for index, block in enumerate(blocks) if index not in left_out
    )


def _one_row(line: Line, width: int, label: str) -> Line:
    """Return the line of a label with as many items as one row holds, and how many there are besides."""
    items = line.items
    if line.label != label or cell_len(_BETWEEN.join(items)) <= width:
        return line
    for count in range(len(items) - 1, 0, -1):
        fewer = (*items[:count], _MORE.format(len(items) - count))
        if cell_len(_BETWEEN.join(fewer)) <= width:
            return line._replace(items=fewer)
    return line


# ----------------------------------------------------------------------------------------------------------------- rows


_TOGETHER = re.compile(r"(?<=\d) (?=[KMGT]iB\b|GPUs?\b|tokens?\b|tok/s|×)|(?<=×) (?=\S)|(?<=micro-batch) (?=\d)")
"""Blanks at which no row ends: a figure stays with its unit."""
_KEPT = "\ue000"
"""What stands for them while a paragraph is broken."""
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")
"""A word of a command; what is quoted is no two words."""


def rows_of(console: Console, paragraph: Text, width: int, between: str = "") -> list[Text]:
    """Return the rows of a paragraph in a width; what stands between two of `between` is in one, where one holds it."""
    text = paragraph.copy()
    facts = text.plain.split(between) if between else []
    plain = between.join(fact.replace(" ", _KEPT) if cell_len(fact) < width else fact for fact in facts) or text.plain
    text.plain = _TOGETHER.sub(_KEPT, plain)
    rows = list(text.wrap(console, width))
    for row in rows:
        row.plain = row.plain.replace(_KEPT, " ")
        row.rstrip()
    return rows


def broken(command: str, width: int) -> list[str]:
    r"""Return a command in rows that end in a backslash: an option stays with its values, and a quoted word whole.

    >>> broken("memcalc plan --model 7b --gpu h100 --gpus 8", 30)
    ['memcalc plan --model 7b \\', '  --gpu h100 --gpus 8']
    """
    if cell_len(command) <= width:
        return [command]
    parts: list[str] = []
    for word in _WORD.findall(command):
        if parts and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    rows = [parts[0]]
    for part in parts[1:]:
        if cell_len(rows[-1]) + cell_len(part) + 3 <= width:
            rows[-1] += f" {part}"
        else:
            rows.append(f"  {part}")
    return [f"{row} \\" for row in rows[:-1]] + rows[-1:]


def narrowed(natural: list[int], least: list[int], space: float) -> list[int]:
    """Return the widths of columns in a space [letters]: the widest gives way first, each to its least at most.

    >>> narrowed([30, 6, 20], [10, 6, 10], 40)
    [17, 6, 17]
    """
    widths = list(natural)
    while sum(widths) > space:
        wide = [index for index, width in enumerate(widths) if width > least[index]]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


# --------------------------------------------------------------------------------------------------------------- a tree


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
