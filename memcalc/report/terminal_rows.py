"""Rows of a terminal: a paragraph broken where it may be read on, and a command as a shell reads it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_TOGETHER = re.compile(r"(?<=\d) (?=[KMGT]iB\b|GPUs?\b|tokens?\b|tok/s|×)|(?<=×) (?=\S)|(?<=micro-batch) (?=\d)")
"""Blanks at which no row ends: a figure stays with its unit."""
_KEPT = "\ue000"
"""What stands for them while a paragraph is broken."""
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")
"""A word of a command; what is quoted is no two words."""


def rows_of(console: Console, paragraph: Text, width: int) -> list[Text]:
    """Return the rows of a paragraph in a width."""
    text = paragraph.copy()
    text.plain = _TOGETHER.sub(_KEPT, text.plain)
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
