"""A document in Markdown and in LaTeX."""

from __future__ import annotations

import re

from memcalc.report.tables import Bar, Bars, Block, Code, Document, Line, Table, Tree

__all__ = ["latex", "markdown", "tabulated"]

_SIGNS = str.maketrans({"−": r"\ensuremath{-}", "→": r"\ensuremath{\rightarrow}"})
"""Signs that pdfLaTeX does not know by itself."""
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\^{}", "<": r"\ensuremath{<}", ">": r"\ensuremath{>}",
}  # fmt: skip
_SIGNS = str.maketrans({"−": r"\ensuremath{-}", "→": r"\ensuremath{\rightarrow}"})
"""Signs that pdfLaTeX does not know by itself."""


# ------------------------------------------------------------------------------------------------------------- markdown


def markdown(document: Document) -> str:
    """Return `document` in Markdown."""
    return "\n\n".join(text for block in document.blocks if (text := _markdown_block(block)))


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
        from memcalc.report.bars import as_text

        return _fenced("Memory of one GPU at the peak", "text", as_text(block))
    if isinstance(block, Code):
        return _fenced(block.says, "sh", block.command)
    return _fenced(block.says, block.language, block.text)


def _markdown_table(table: Table) -> str:
    rows = [[_markdown_text(cell) for cell in row] for row in table.rows]
    headings = [_markdown_text(heading) for heading in table.headings]
    return f"{_markdown_text(table.title)}:\n\n{tabulated(table, headings, rows, 'pipe')}"


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


def latex(document: Document) -> str:
    """Return `document` in LaTeX, for the packages inputenc and booktabs."""
    return "\n\n".join(text for block in document.blocks if (text := _latex_block(block)))


def _latex_block(block: Block) -> str:
    if isinstance(block, Line):
        text = _latex_text(block.text)
        return rf"\noindent\textbf{{{text}}}" if block.role in {"heading", "title", "verdict"} else rf"\noindent {text}"
    if isinstance(block, Table | Tree):
        return "\n\n".join(map(_latex_table, block.tables if isinstance(block, Tree) else (block,)))
    if isinstance(block, Bar):
        return rf"\noindent {_latex_text(block.rest)}"
    if isinstance(block, Bars):
        return ""
    text = block.command if isinstance(block, Code) else block.text.rstrip()
    text = text.replace(r"\end{verbatim}", r"\end{ verbatim}")
    return f"{_latex_text(block.says)}:\n\\begin{{verbatim}}\n{text}\n\\end{{verbatim}}"


def _latex_table(table: Table) -> str:
    return tabulated(table, table.headings, [list(row) for row in table.rows], "latex_booktabs").translate(_SIGNS)


def _latex_text(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text).translate(_SIGNS)


def tabulated(table: Table, headings: list[str], rows: list[list[str]], form: str) -> str:
    """Return rows under headings, in a form of tabulate's."""
    from tabulate import tabulate

    sides = ["right" if column.right else "left" for column in table.columns]
    return tabulate(rows, headings, tablefmt=form, colalign=sides if rows else None, disable_numparse=True)
