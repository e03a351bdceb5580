"""A document in each format. The terminal's is in :mod:`memcalc.report.terminal`."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from memcalc.errors import UnknownNameError
from memcalc.report.tables import Bar, Bars, Block, Code, Document, Line, Listing, Table, Tree, percent

__all__ = ["FORMATS", "Report", "format_for", "render"]

_ENDINGS = {".md": "markdown", ".csv": "csv", ".json": "json", ".tex": "latex", ".html": "html", ".htm": "html"}
_UNPRINTABLE = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\r\t\x85"}
_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")  # Paul Tol's bright scheme
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\^{}", "<": r"\ensuremath{<}", ">": r"\ensuremath{>}",
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """An answer as a document, and as the published JSON."""

    document: Document
    payload: dict[str, Any]


def render(report: Report, form: str, *, width: int = 100, colour: bool = False) -> str:
    """Return `report` in the format `form`, ending in a newline; `width` and `colour` are a terminal's."""
    if form not in FORMATS:
        raise UnknownNameError("format", form, f"must be one of {', '.join(FORMATS)}", FORMATS)
    if form == "rich":
        from memcalc.report.terminal import draw

        return draw(report.document, width, colour)
    return FORMATS[form](report).rstrip("\n").translate(_UNPRINTABLE) + "\n"


def format_for(path: str) -> str:
    """Return the format that a file's ending stands for.

    >>> format_for("plan.MD"), format_for("plan.txt")
    ('markdown', 'rich')
    """
    return _ENDINGS.get(PurePath(path).suffix.lower(), "rich")


# --------------------------------------------------------------------------------------------------------- JSON and CSV


def _json(report: Report) -> str:
    import json  # costs as much as a plan's table, and is needed for this format alone

    return json.dumps(report.payload, indent=2)


def _csv(report: Report) -> str:
    stream = io.StringIO()
    table = report.document.data
    csv.writer(stream, lineterminator="\n").writerows([table.headings, *table.rows])
    return stream.getvalue()


# ------------------------------------------------------------------------------------------------------------- markdown


def _markdown(report: Report) -> str:
    return "\n\n".join(text for block in report.document.blocks if (text := _markdown_block(block)))


def _markdown_block(block: Block) -> str:
    if isinstance(block, Line):
        marked = {"heading": "## {}", "title": "**{}**", "verdict": "**{}**", "warning": "> {}"}.get(block.role, "{}")
        return marked.format(_markdown_text(block.text))
    if isinstance(block, Table):
        return _markdown_table(block)
    if isinstance(block, Tree):
        return _markdown_table(block.table)
    if isinstance(block, Code):
        return _fenced(block.says, "sh", block.command)
    if isinstance(block, Bars):
        from memcalc.report.bars import as_text

        return _fenced("Memory of one GPU at the peak", "text", as_text(block))
    return _fenced(block.says, block.language, block.text) if isinstance(block, Listing) else ""


def _markdown_table(table: Table) -> str:
    rows = [[_markdown_text(cell) for cell in row] for row in table.rows]
    headings = [_markdown_text(heading) for heading in table.headings]
    return f"{_markdown_text(table.title)}:\n\n{_tabulated(table, headings, rows, 'pipe')}"


def _markdown_text(text: str) -> str:
    r"""Escape what Markdown would take for its own; an underscore inside a word is safe.

    >>> print(_markdown_text("a*b | core_attn"))
    a\*b \| core_attn
    """
    return re.sub(r"([\\`*|<]|(?<!\w)_|_(?!\w))", r"\\\1", " ".join(text.split()))


def _fenced(says: str, language: str, text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{says}:\n\n{fence}{language}\n{text.rstrip()}\n{fence}"


# ---------------------------------------------------------------------------------------------------------------- LaTeX


def _latex(report: Report) -> str:
    return "\n\n".join(text for block in report.document.blocks if (text := _latex_block(block)))


def _latex_block(block: Block) -> str:
    if isinstance(block, Line):
        text = _latex_text(block.text)
        return rf"\noindent\textbf{{{text}}}" if block.role in {"heading", "title", "verdict"} else rf"\noindent {text}"
    if isinstance(block, Table | Tree):
        table = block.table if isinstance(block, Tree) else block
        rows = [list(row) for row in table.rows]
        return _tabulated(table, table.headings, rows, "latex_booktabs")
    if isinstance(block, Code | Listing):
        text = block.command if isinstance(block, Code) else block.text.rstrip()
        text = text.replace(r"\end{verbatim}", r"\end{ verbatim}")
        return f"{_latex_text(block.says)}:\n\\begin{{verbatim}}\n{text}\n\\end{{verbatim}}"
    return ""


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


# ----------------------------------------------------------------------------------------------------------------- HTML


def _html(report: Report) -> str:
    return "\n".join(('<section class="memcalc">', *map(_html_block, report.document.blocks), "</section>"))


def _html_block(block: Block) -> str:
    if isinstance(block, Line):
        tag = {"heading": "h2", "title": "h3", "verdict": "h2"}.get(block.role, "p")
        return f'<{tag} class="{block.role}">{html.escape(block.text)}</{tag}>'
    if isinstance(block, Bar):
        return _html_bar(block)
    if isinstance(block, Bars):
        from memcalc.report.bars import as_html

        return as_html(block)
    if isinstance(block, Listing):
        return f"<p>{html.escape(block.says)}:</p>\n<pre><code>{html.escape(block.text.rstrip())}</code></pre>"
    if isinstance(block, Code):
        return f"<p>{html.escape(block.says)}:</p>\n<pre><code>{html.escape(block.command)}</code></pre>"
    table = block.table if isinstance(block, Tree) else block
    return f"<h4>{html.escape(table.title)}</h4>\n" + _tabulated(
        table, table.headings, [*map(list, table.rows)], "html"
    )


def _html_bar(bar: Bar) -> str:
    whole = max(bar.capacity, sum(size for _, size in bar.parts))
    return "\n".join(
        ('<div class="bar" style="display:flex;height:1.2em;background:#eee">', *_html_parts(bar, whole), "</div>")
    )


def _html_parts(bar: Bar, whole: int) -> Iterator[str]:
    for (name, size), colour in zip(bar.parts, _COLOURS, strict=True):
        said = html.escape(f"{name} {percent(size, whole)}%")
        yield f'<span title="{said}" style="width:{100 * size / whole:.3f}%;background:{colour}"></span>'


def _tabulated(table: Table, headings: list[str], rows: list[list[str]], form: str) -> str:
    from tabulate import tabulate

    sides = ["right" if column.right else "left" for column in table.columns]
    return tabulate(rows, headings, tablefmt=form, colalign=sides if rows else None, disable_numparse=True)


FORMATS: dict[str, Callable[[Report], str]] = {
    "rich": lambda report: render(report, "rich"),
    "markdown": _markdown,
    "csv": _csv,
    "json": _json,
    "latex": _latex,
    "html": _html,
}
