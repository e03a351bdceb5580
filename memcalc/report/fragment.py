"""A document as a fragment of HTML: no scripts, no files beside it; colours are the palette's."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.report.palette import INK, colour_of, words_on
from memcalc.report.tables import Bar, Bars, Block, Branch, Code, Document, Line, Listing, Table, Tree, gib, percent
from memcalc.report.text import tabulated

if TYPE_CHECKING:
    from memcalc.report.palette import Shade

__all__ = ["fragment"]

_TAGS = {"heading": "h2", "title": "h3", "verdict": "h2"}
_WORD = "display:inline-block;padding:0 .3em;border-radius:2px"


def fragment(document: Document) -> str:
    """Return `document` as one section."""
    return "\n".join(('<section class="memcalc">', *map(_block, document.blocks), "</section>"))


def _block(block: Block) -> str:
    if isinstance(block, Line):
        tag = _TAGS.get(block.role, "p")
        return f'<{tag} class="{block.role}">{html.escape(block.text)}</{tag}>'
    if isinstance(block, Bar):
        return "\n".join(_bar(block))
    if isinstance(block, Bars):
        from memcalc.report.bars import as_html

        return as_html(block)
    if isinstance(block, Code | Listing):
        text = block.command if isinstance(block, Code) else block.text.rstrip()
        return f"<p>{html.escape(block.says)}:</p>\n<pre><code>{html.escape(text)}</code></pre>"
    return "\n".join(_tree(block)) if isinstance(block, Tree) else _table(block)


def _table(table: Table) -> str:
    rows = [list(row) for row in table.rows]
    return f"<h4>{html.escape(table.title)}</h4>\n" + tabulated(table, table.headings, rows, "html")


def _bar(bar: Bar) -> Iterator[str]:
    """Yield the parts in a row with a line where the capacity ends, then the legend."""
    whole = max(bar.capacity, bar.used, 1)
    ground = f"background:{INK['free'].light}"
    yield f'<div class="bar" style="position:relative;display:flex;height:1.4em;{ground}">'
    shades = [colour_of(name, place) for place, (name, _) in enumerate(bar.parts)]
    for (name, size), shade in zip(bar.parts, shades, strict=True):
        said = html.escape(f"{name} {gib(size)} GiB, {percent(size, whole)}%")
        yield f'<span title="{said}" style="width:{100 * size / whole:.3f}%;background:{shade.light}"></span>'
    edge = f"position:absolute;top:-2px;bottom:-2px;border-right:2px solid {INK['limit'].light}"
    yield f'<span class="limit" title="limit {gib(bar.capacity)} GiB" style="{edge};width:{_share(bar, whole)}"></span>'
    yield "</div>"
    items = [_named(name, size, shade) for (name, size), shade in zip(bar.parts, shades, strict=True) if size]
    yield f'<p class="legend">{" ".join(items)} {html.escape(bar.rest)}</p>'


def _share(bar: Bar, whole: int) -> str:
    return f"{100 * bar.capacity / whole:.3f}%"


def _named(name: str, size: int, shade: Shade) -> str:
    style = f"{_WORD};background:{shade.light};color:{words_on(shade).light}"
    return f'<span style="{style}">{html.escape(name)} {gib(size)}</span>'


def _tree(tree: Tree) -> Iterator[str]:
    """Yield each branch as a part that opens and closes, with its terms as a table."""
    if not all(_rows(tree, branch) for branch in tree.branches if branch.leaves):
        yield _table(tree.table)
        return
    if tree.title:
        yield f"<h4>{html.escape(tree.title)}</h4>"
    for branch in tree.branches:
        yield from _branch(tree, branch)


def _branch(tree: Tree, branch: Branch) -> Iterator[str]:
    count = f"{len(branch.leaves)} term{'s' * (len(branch.leaves) != 1)}" if branch.leaves else ""
    share = f"{branch.share}%" if branch.share else ""
    figure = f"{branch.figure} {branch.says}".strip()
    said = html.escape(", ".join(part for part in (figure, share, count) if part))
    if not branch.leaves:
        yield f'<p class="component"><b>{html.escape(branch.name)}</b> {said}</p>'
        return
    yield f'<details class="component"{"" if branch.folded else " open"}>'
    yield f"<summary><b>{html.escape(branch.name)}</b> {said}</summary>"
    part = Table("", tree.table.columns[1:], ())
    yield tabulated(part, part.headings, _rows(tree, branch), "html")
    yield "</details>"


def _rows(tree: Tree, branch: Branch) -> list[list[str]]:
    """Return the table's rows of a branch."""
    return [list(row[1:]) for row in tree.table.rows if row[0] == branch.name]
