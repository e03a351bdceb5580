"""A document as plain text to read aloud, in Markdown, in LaTeX and in HTML."""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate, pairwise

from memcalc.report.palette import INK, colour_of, latex_text, printable, words_on
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
    pages,
    percent,
)

# ------------------------------------------------------------------------------------------------------------- markdown


def markdown(document: Document) -> str:
    """Return `document` in Markdown."""
    return "\n\n".join(text for block in pages(document) if (text := _markdown_block(block)))


def _markdown_block(block: Block) -> str:
    if isinstance(block, Line):
        marked = {"heading": "## {}", "title": "**{}**", "verdict": "**{}**", "warning": "> {}"}.get(block.role, "{}")
        return marked.format(_markdown_text(block.text))
    if isinstance(block, Table):
        return _markdown_table(block)
    if isinstance(block, Tree):
        return "\n\n".join(map(_markdown_table, block.tables))
    if isinstance(block, Bar):
        return _markdown_text(block.rest)
    if isinstance(block, Bars):
        from memcalc.report.stacked_bar import as_text

        return _fenced("Memory of one GPU at the peak", "text", as_text(block))
    if isinstance(block, Code):
        return _fenced(block.says, "sh", _rows_of(block.command))
    return _fenced(block.says, block.language, block.text)


def _markdown_table(table: Table) -> str:
    rows = [[_markdown_text(cell) for cell in row] for row in table.rows]
    headings = [_markdown_text(heading) for heading in table.headings]
    return f"{_markdown_text(table.title)}:\n\n{tabulated(table, headings, rows, 'pipe')}"


def _markdown_text(text: str) -> str:
    r"""Escape what Markdown would take for its own, links among it; an underscore inside a word is safe.

    >>> print(_markdown_text("a*b | core_attn"))
    a\*b \| core_attn
    >>> print(_markdown_text("[a](b)"))
    [a]\(b)
    """
    return re.sub(r"([\\`*|<]|(?<=\])\(|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def _rows_of(commands: str, width: int = 80) -> str:
    """Return commands in rows that a shell reads as they stand."""
    from memcalc.report.terminal_rows import broken

    return "\n".join(row for command in commands.splitlines() for row in broken(command, width))


def _fenced(says: str, language: str, text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{says}:\n\n{fence}{language}\n{text.rstrip()}\n{fence}"


# ---------------------------------------------------------------------------------------------------------------- LaTeX


def latex(document: Document) -> str:
    """Return `document` in LaTeX, for the packages booktabs and array."""
    return "\n\n".join(text for block in pages(document) if (text := _latex_block(block)))


_LINE = 64
"""Columns of a command on a page: a line of article's 345 pt."""
_SIZES = ((r"\footnotesize", 77), (r"\scriptsize", 82))
"""Letters that such a line holds of a table, by the size of its type."""
_GAP, _EM = 1.6, 0.52
"""A gap between two columns [letters], and the width of a letter [em]: a digit of Computer Modern has 0.5."""
_BREAKS, _BREAK = re.compile(r"(?<=[\w}])([/+=:]|[.,](?!\d)|\\_)(?=\w)"), r"\1\\allowbreak{}"
"""Where a long word may be broken, and how LaTeX is told so."""
_WORDS = re.compile(r"[\n /+=.,:_]")
_TIMES = re.compile(r"(?<=\d) × (?=\d)")
"""What stays in one line."""


def _latex_block(block: Block) -> str:
    if isinstance(block, Line):
        text = _BREAKS.sub(_BREAK, latex_text(block.text))
        text = rf"\textbf{{{text}}}" if block.role in {"heading", "title", "verdict"} else text
        return rf"\noindent{{\sloppy {text}\par}}"
    if isinstance(block, Table | Tree):
        return "\n\n".join(map(_latex_table, block.paper if isinstance(block, Tree) else (block,)))
    if isinstance(block, Bar):
        return rf"\noindent {latex_text(block.rest)}"
    if isinstance(block, Bars):
        return ""
    text = block.command if isinstance(block, Code) else block.text.rstrip()
    text = _rows_of(text, _LINE) if isinstance(block, Code) or block.language == "sh" else text
    text = text.replace(r"\end{verbatim}", r"\end{ verbatim}")
    return f"{latex_text(block.says)}:\n\\begin{{verbatim}}\n{text}\n\\end{{verbatim}}"


def _latex_table(table: Table) -> str:
    """Return a table within the width of a page: small type, units below titles, long texts in several lines."""
    from memcalc.report.terminal_rows import narrowed

    heads = [[column.title for column in table.columns], [column.unit for column in table.columns]]
    heads = heads if any(heads[1]) else heads[:1]
    natural = [max(map(len, cells)) for cells in zip(*heads, *table.rows, strict=True)]
    gaps = _GAP * (len(natural) - 1)
    size, space = next((each for each in _SIZES if sum(natural) + gaps <= each[1]), _SIZES[-1])
    pieces = [_WORDS.split(_TIMES.sub("×", "\n".join(cells))) for cells in zip(*heads, *table.rows, strict=True)]
    longest = [max(map(len, each)) for each in pieces]
    least = [most if column.right else word for column, most, word in zip(table.columns, natural, longest, strict=True)]
    widths = narrowed(natural, least, space - gaps)
    narrow = [width < most for width, most in zip(widths, natural, strict=True)]
    spec = (
        f">{{\\raggedright\\arraybackslash}}p{{{_EM * width:.1f}em}}" if broken_ else "r" if column.right else "l"
        for column, width, broken_ in zip(table.columns, widths, narrow, strict=True)
    )
    lines = [" " + " & ".join(map(_latex_cell, row, narrow)) + r" \\" for row in (*heads, *table.rows)]
    lines = [r"\toprule", *lines[: len(heads)], r"\midrule", *lines[len(heads) :], r"\bottomrule"]
    begin = f"\\noindent{{{size}\\setlength{{\\tabcolsep}}{{3pt}}\\begin{{tabular}}{{@{{}}{''.join(spec)}@{{}}}}"
    return "\n".join((rf"\noindent {latex_text(table.title)}:", "", begin, *lines, r"\end{tabular}\par}\smallskip"))


def _latex_cell(cell: str, narrow: bool) -> str:
    text = re.sub(r"^\[", "{[}", _TIMES.sub(r"\,×\,", latex_text(cell)))  # else it is the argument of a row's end
    return _BREAKS.sub(_BREAK, text) if narrow else text


def tabulated(table: Table, headings: list[str], rows: list[list[str]], form: str) -> str:
    """Return rows under headings, in a form of tabulate's."""
    from tabulate import tabulate

    sides = ["right" if column.right else "left" for column in table.columns]
    return tabulate(rows, headings, tablefmt=form, colalign=sides if rows else None, disable_numparse=True)


# ----------------------------------------------------------------------------------------------------------------- HTML


_TAGS = {"heading": "h2", "title": "h3", "verdict": "h2"}


_STYLE = f"""<style>
.memcalc{{font:1rem/1.5 system-ui,sans-serif;font-variant-numeric:tabular-nums;max-width:68rem}}
.memcalc h2{{font-size:1.2rem;margin:.3rem 0}}
.memcalc h3{{font-size:1rem;font-weight:500;margin:.3rem 0 1rem}}
.memcalc h4{{font-size:.9rem;margin:1.2rem 0 .3rem}}
.memcalc p{{margin:.4rem 0}}
.memcalc table{{display:block;overflow-x:auto;border-collapse:collapse;font-size:.9rem}}
.memcalc td[style*=right]{{white-space:nowrap}}
.memcalc th,.memcalc td{{padding:.35rem .6rem;border-bottom:1px solid {INK["rule"].light}}}
.memcalc th{{font-size:.8rem;text-align:left;vertical-align:bottom}}
.memcalc pre{{white-space:pre-wrap;overflow-wrap:anywhere}}
</style>"""
"""What a section brings along to look like a report, in whatever page it is put."""


def fragment(document: Document) -> str:
    """Return `document` as one section."""
    return "\n".join(('<section class="memcalc">', *map(_block, pages(document)), _STYLE, "</section>"))


def _block(block: Block) -> str:
    if isinstance(block, Line):
        tag = _TAGS.get(block.role, "p")
        return f'<{tag} class="{block.role}">{html.escape(block.text)}</{tag}>'
    if isinstance(block, Bar):
        return "\n".join(_bar(block))
    if isinstance(block, Bars):
        return "\n".join(('<div class="bars">', *_bars(block), "</div>"))
    if isinstance(block, Code | Listing):
        text = _rows_of(block.command) if isinstance(block, Code) else block.text.rstrip()
        return f"<p>{html.escape(block.says)}:</p>\n<pre><code>{html.escape(text)}</code></pre>"
    return "\n".join(_tree(block)) if isinstance(block, Tree) else _table(block)


def _table(table: Table) -> str:
    rows = [list(row) for row in table.rows]
    return f"<h4>{html.escape(table.title)}</h4>\n" + tabulated(table, table.headings, rows, "html")


def _bar(bar: Bar) -> Iterator[str]:
    total = max(bar.capacity, bar.used, 1)
    parts = [(name, size, f"{name} {gib(size)} GiB, {percent(size, total)}%") for name, size in bar.parts]
    yield from _stack(parts, total, bar.capacity, f"limit {gib(bar.capacity)} GiB")
    items = [_named(name, index, f" {gib(size)}") for index, (name, size) in enumerate(bar.parts) if size]
    yield f'<p class="legend">{" ".join(items)} {html.escape(bar.rest)}</p>'


def _stack(parts: Iterable[tuple[str, int, str]], total: int, capacity: int, limit: str) -> Iterator[str]:
    """Yield parts [bytes] with their titles in a row of `total`, with a line where the capacity ends."""
    yield f'<div class="bar" style="position:relative;display:flex;height:1.4em;background:{INK["free"].light}">'
    for index, (name, size, title) in enumerate(parts):
        style = f"width:{100 * size / total:.3f}%;background:{colour_of(name, index).light}"
        yield f'<span title="{html.escape(title)}" style="{style}"></span>'
    edge = f"position:absolute;top:-2px;bottom:-2px;border-right:2px solid {INK['limit'].light}"
    style = f"{edge};width:{100 * capacity / total:.3f}%"
    yield f'<span class="limit" title="{html.escape(limit)}" style="{style}"></span>'
    yield "</div>"


def _named(name: str, index: int, figure: str = "") -> str:
    shade = colour_of(name, index)
    style = f"display:inline-block;padding:0 .3em;border-radius:2px;background:{shade.light}"
    return f'<span style="{style};color:{words_on(shade).light}">{html.escape(name)}{figure}</span>'


def _bars(block: Bars) -> Iterator[str]:
    limit = f"{block.limit} {gib(block.capacity)} GiB"
    for row in block.rows:
        cut = "; bar truncated" if row.size > block.end else ""
        yield f"<p>{html.escape(f'{row.label}: {row.said}{cut}')}</p>"
        ends = [0, *(min(end, block.end) for end in accumulate(size for _, size in row.parts))]
        titled = zip(row.parts, pairwise(ends), strict=True)
        parts = [(name, end - begin, f"{name} {gib(size)} GiB") for (name, size), (begin, end) in titled]
        yield from _stack(parts, block.end, block.capacity, limit)
    if block.legend:
        items = " ".join(_named(name, index) for index, (name, _) in enumerate(block.rows[0].parts))
        text = html.escape(f"The line is {block.limit}, {gib(block.capacity)} GiB")
        yield f'<p class="legend">{items} {text}; the scale ends at {gib(block.end)} GiB.</p>'


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
    text = html.escape(", ".join(part for part in (figure, share, count) if part))
    if not branch.leaves:
        yield f'<p class="component"><b>{html.escape(branch.name)}</b> {text}</p>'
        return
    yield f'<details class="component"{"" if branch.folded else " open"}>'
    yield f"<summary><b>{html.escape(branch.name)}</b> {text}</summary>"
    part = Table("", tree.table.columns[1:], ())
    yield tabulated(part, part.headings, _rows(tree, branch), "html")
    yield "</details>"


def _rows(tree: Tree, branch: Branch) -> list[list[str]]:
    return [list(row[1:]) for row in tree.table.rows if row[0] == branch.name]


# ----------------------------------------------------------------------------------------------------------- plain text


_SHORT = 3
"""Cells behind a row's name that are said in one line."""
_SAID = {" · ": ", ", " → ": ", to ", "→": "to", "…": "...", " × ": " times "}
_FORMULA = {" · ": " times ", "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")"}


def spoken(document: Document, *, ascii_only: bool = False) -> str:
    """Return `document` as plain text."""
    named = {row[0] for block in document.blocks if isinstance(block, Table) for row in block.rows}
    parts = ["\n".join(_spoken_block(block, named)) for block in document.blocks]
    text = "\n\n".join(part for part in parts if part)
    text = re.sub(r"(?m)[ \t]+$", "", printable(text, ascii_only))
    return text.strip("\n") + "\n"


def _spoken_block(block: Block, named: Collection[str]) -> Iterator[str]:
    if isinstance(block, Line):
        yield _spoken_words(block.text)
    elif isinstance(block, Bar):
        yield from _spoken_bar(block, named)
    elif isinstance(block, Bars):
        yield from (_spoken_words(f"stage {' '.join(row.label.split())}: {row.said}") for row in block.rows)
    elif isinstance(block, Tree):
        yield from _spoken_tree(block)
    elif isinstance(block, Table):
        yield from _spoken_table(block)
    else:
        yield f"{block.says}:"
        yield block.command if isinstance(block, Code) else block.text.rstrip()


def _spoken_words(text: str) -> str:
    """Return a sentence without the signs that are read aloud badly.

    >>> _spoken_words("fits · 24.4 of 39.4 GiB on 8 × a100")
    'fits, 24.4 of 39.4 GiB on 8 times a100'
    """
    for sign, label in _SAID.items():
        text = text.replace(sign, label)
    return text.strip()


def _spoken_bar(bar: Bar, named: Collection[str]) -> Iterator[str]:
    """Say each part that no table tells, what is free, and where the limit stands."""
    yield from (f"{name}: {gib(size)} GiB" for name, size in bar.parts if name not in named)
    if bar.margin:
        yield f"kept free: {gib(bar.spared)} GiB"
    yield f"beyond the limit: {gib(bar.over)} GiB" if bar.over else f"free: {gib(bar.free)} GiB"
    yield f"limit: {gib(bar.capacity)} GiB"


def _spoken_table(table: Table) -> Iterator[str]:
    """Say each row: in one line where it is short, else in a line for each cell that is not empty."""
    yield f"{_spoken_words(table.title)}, {len(table.rows)} row{'s' * (len(table.rows) != 1)}:"
    first, *others = table.columns
    short = len(others) <= _SHORT
    for row in table.rows:
        name = f"{first.title.replace('#', 'number')} {row[0]}" if first.right or not row[0] else _spoken_words(row[0])
        cells = [(column, value) for column, value in zip(others, row[1:], strict=True) if value]
        if short:
            text = "; ".join(
                _spoken_cell(column, value, " ") if len(others) > 1 else _spoken_sum(column, value)
                for column, value in cells
            )
            yield f"{name}: {text}" if cells else name
        else:
            yield f"\n{name}:"
            yield from (_spoken_cell(column, value, ": ") for column, value in cells)


def _spoken_cell(column: Column, value: str, between: str) -> str:
    unit = f" ({_spoken_words(column.unit)})" if " " in column.unit else ""
    return f"{column.title}{unit}{between}{_spoken_sum(column, value)}"


def _spoken_sum(column: Column, value: str) -> str:
    return f"{_spoken_words(value)} {column.unit}" if column.unit and " " not in column.unit else _spoken_words(value)


def _spoken_tree(tree: Tree) -> Iterator[str]:
    if tree.title:
        yield f"{_spoken_words(tree.title)}:"
    for branch in tree.branches:
        yield from _spoken_branch(branch, tree.aside)
    for number, source in enumerate(tree.sources, 1):
        yield f"{chr(10) * (number == 1)}Source {number}: {_spoken_words(source)}"


def _spoken_branch(branch: Branch, aside: str) -> Iterator[str]:
    count = f", {len(branch.leaves)} term{'s' * (len(branch.leaves) != 1)}" if branch.leaves else ""
    yield f"\n{branch.name}: {_sized(branch.figure, branch.share)}{f' {branch.says}' if branch.says else ''}{count}"
    if branch.folded:
        return
    for leaf in sorted(branch.leaves, key=lambda leaf: leaf.aside):
        yield from _spoken_leaf(leaf, aside)


def _spoken_leaf(leaf: Leaf, aside: str) -> Iterator[str]:
    if leaf.aside:
        yield f"{leaf.name}: {leaf.figure}, {aside}, {leaf.when}"
        return
    yield f"{leaf.name}: {_sized(leaf.figure, leaf.share)}"
    yield from map(_spoken_line, leaf.lines)


def _spoken_line(line: str) -> str:
    """Return a line about a term.

    >>> _spoken_line("= w · ⌈P / N⌉"), _spoken_line("8 bytes, in step [2]")
    ('formula: w times ceil(P / N)', '8 bytes, in step, source 2')
    """
    if line.startswith("= "):
        for sign, text in _FORMULA.items():
            line = line.replace(sign, text)
        return f"formula: {line[2:]}"
    return _spoken_words(re.sub(r" \[(\d+)\]$", r", source \1", line))


def _sized(figure: str, share: str) -> str:
    return f"{figure}, {share} %" if share else figure
