"""The signs that a report is drawn with, and what stands for them where only ASCII can be shown."""

from __future__ import annotations

import unicodedata
from typing import NamedTuple

__all__ = ["ASCII", "FULL", "Glyphs", "ascii_text", "glyphs", "printable"]


class Glyphs(NamedTuple):
    """Each of one cell, but for the branches of a tree and what parts items."""

    full: str
    parts: str
    """One to seven eighths of a cell, from the left."""
    track: str
    free: str
    kept: str
    limit: str
    left: str
    right: str
    across: str
    middle: str
    fork: str
    last: str
    beside: str
    between: str


FULL = Glyphs("█", "▏▎▍▌▋▊▉", "·", "·", "╱", "┃", "├", "┤", "─", "┼", "├─ ", "└─ ", "│  ", " · ")
ASCII = Glyphs("#", "", ".", ".", "/", "|", "[", "]", "-", "+", "|- ", "`- ", "|  ", " - ")
_PLAIN = {
    "·": "*", "×": "x", "→": "->", "…": "...", "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")", "−": "-", "–": "-",
    "—": "-", "≤": "<=", "≥": ">=", "≈": "~", "≠": "!=", "√": "sqrt ", "Σ": "sum ", "∑": "sum ", "µ": "u", "μ": "u",
    "“": '"', "”": '"', "‘": "'", "’": "'", "■": "#", "┃": "|", "├": "|", "└": "`", "─": "-", "│": "|", "█": "#",
    "░": ".", "═": "=", "±": "+-", "∞": "inf", "�": "?", "╱": "/",
}  # fmt: skip
_NO_TEXT = (*range(32), *range(127, 160), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF)  # XML has none; UTF-8 no surrogates
_UNPRINTABLE = {code: "�" for code in _NO_TEXT if chr(code) != "\n"}


def glyphs(ascii_only: bool) -> Glyphs:
    """Return the signs to draw with."""
    return ASCII if ascii_only else FULL


def printable(text: str, ascii_only: bool = False) -> str:
    r"""Return `text` without what a terminal would obey, and in ASCII where nothing else can be shown.

    >>> printable("8 × a100 · \x1b[31m", True)
    '8 x a100 * ?[31m'
    """
    text = text.translate(_UNPRINTABLE)
    return ascii_text(text) if ascii_only else text


def ascii_text(text: str) -> str:
    """Return `text` in ASCII; what has no like is a question mark.

    >>> ascii_text("w · ⌈P / N⌉ é 模")
    'w * ceil(P / N) e ?'
    """
    if text.isascii():
        return text
    return "".join(_like(letter) for letter in text)


def _like(letter: str) -> str:
    if letter.isascii():
        return letter
    known = _PLAIN.get(letter)
    if known is not None:
        return known
    base = "".join(part for part in unicodedata.normalize("NFKD", letter) if part.isascii())
    return base or "?"
