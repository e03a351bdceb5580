"""A document as plain text that is read aloud well: sentences, and lines of a name with its value and unit.

No bars, no boxes, no columns: what a picture shows is said in words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from memcalc.report.glyphs import printable
from memcalc.report.tables import Bar, Bars, Block, Branch, Code, Column, Document, Leaf, Line, Table, Tree, gib

__all__ = ["spoken"]

_SHORT = 3
"""Cells behind a row's name that are said in one line."""
_SAID = {" · ": ", ", " → ": ", to ", "→": "to", "…": "...", " × ": " times "}
_FORMULA = {" · ": " times ", "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")"}


def spoken(document: Document, *, ascii_only: bool = False) -> str:
    """Return `document` as plain text."""
    told = {row[0] for block in document.blocks if isinstance(block, Table) for row in block.rows}
    parts = ["\n".join(_block(block, told)) for block in document.blocks]
    text = "\n\n".join(part for part in parts if part)
    text = re.sub(r"(?m)[ \t]+$", "", printable(text, ascii_only))
    return text.strip("\n") + "\n"


def _block(block: Block, told: Collection[str]) -> Iterator[str]:
    """Yield the lines of a block; `told` are rows that some table names."""
    if isinstance(block, Line):
        yield _words(block.text)
    elif isinstance(block, Bar):
        yield from _bar(block, told)
    elif isinstance(block, Bars):
        yield from (_words(f"stage {' '.join(row.label.split())}: {row.said}") for row in block.rows)
    elif isinstance(block, Tree):
        yield from _tree(block)
    elif isinstance(block, Table):
        yield from _table(block)
    else:
        yield f"{block.says}:"
        yield block.command if isinstance(block, Code) else block.text.rstrip()


def _words(text: str) -> str:
    """Return a sentence without the signs that are read aloud badly.

    >>> _words("fits · 24.4 of 39.4 GiB on 8 × a100")
    'fits, 24.4 of 39.4 GiB on 8 times a100'
    """
    for sign, said in _SAID.items():
        text = text.replace(sign, said)
    return text.strip()


def _bar(bar: Bar, told: Collection[str]) -> Iterator[str]:
    """Say each part that no table tells, what is free, and where the limit stands."""
    yield from (f"{name}: {gib(size)} GiB" for name, size in bar.parts if name not in told)
    if bar.kept:
        yield f"kept free: {gib(bar.spared)} GiB"
    yield f"beyond the limit: {gib(bar.over)} GiB" if bar.over else f"free: {gib(bar.free)} GiB"
    yield f"limit: {gib(bar.capacity)} GiB"


def _table(table: Table) -> Iterator[str]:
    """Say each row: in one line where it is short, else in a line for each cell that is not empty."""
    yield f"{_words(table.title)}, {len(table.rows)} row{'s' * (len(table.rows) != 1)}:"
    first, *others = table.columns
    short = len(others) <= _SHORT
    for row in table.rows:
        name = f"{first.title.replace('#', 'number')} {row[0]}" if first.right or not row[0] else _words(row[0])
        cells = [(column, value) for column, value in zip(others, row[1:], strict=True) if value]
        if short:
            said = "; ".join(
                _cell(column, value, " ") if len(others) > 1 else _sum(column, value) for column, value in cells
            )
            yield f"{name}: {said}" if cells else name
        else:
            yield f"\n{name}:"
            yield from (_cell(column, value, ": ") for column, value in cells)


def _cell(column: Column, value: str, between: str) -> str:
    told = f" ({_words(column.unit)})" if " " in column.unit else ""
    return f"{column.title}{told}{between}{_sum(column, value)}"


def _sum(column: Column, value: str) -> str:
    return f"{_words(value)} {column.unit}" if column.unit and " " not in column.unit else _words(value)


def _tree(tree: Tree) -> Iterator[str]:
    if tree.title:
        yield f"{_words(tree.title)}:"
    for branch in tree.branches:
        yield from _branch(branch, tree.aside)
    for number, source in enumerate(tree.sources, 1):
        yield f"{chr(10) * (number == 1)}Source {number}: {_words(source)}"


def _branch(branch: Branch, aside: str) -> Iterator[str]:
    count = f", {len(branch.leaves)} term{'s' * (len(branch.leaves) != 1)}" if branch.leaves else ""
    yield f"\n{branch.name}: {_sized(branch.figure, branch.share)}{f' {branch.says}' if branch.says else ''}{count}"
    if branch.folded:
        return
    for leaf in sorted(branch.leaves, key=lambda leaf: leaf.aside):
        yield from _leaf(leaf, aside)


def _leaf(leaf: Leaf, aside: str) -> Iterator[str]:
    if leaf.aside:
        yield f"{leaf.name}: {leaf.figure}, {aside}, {leaf.when}"
        return
    yield f"{leaf.name}: {_sized(leaf.figure, leaf.share)}"
    yield from map(_line, leaf.lines)


def _line(line: str) -> str:
    """Return a line about a term.

    >>> _line("= w · ⌈P / N⌉"), _line("8 bytes, in step [2]")
    ('formula: w times ceil(P / N)', '8 bytes, in step, source 2')
    """
    if line.startswith("= "):
        for sign, said in _FORMULA.items():
            line = line.replace(sign, said)
        return f"formula: {line[2:]}"
    return _words(re.sub(r" \[(\d+)\]$", r", source \1", line))


def _sized(figure: str, share: str) -> str:
    return f"{figure}, {share} %" if share else figure
