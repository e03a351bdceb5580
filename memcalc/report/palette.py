"""One palette for the terminal, charts and HTML: a component has the same colour wherever it is drawn.

Paul Tol's *bright* scheme (SRON/EPS/TN/09-002, issue 3.2): seven hues that stay apart for every kind of colour
blindness. Neighbours in a stack alternate between dark and light, so that they also stay apart in print without colour.
"""

from __future__ import annotations

import unicodedata
from typing import NamedTuple


class Shade(NamedTuple):
    """A colour on white paper, and the same hue on a dark page."""

    light: str
    dark: str


BLUE, CYAN, GREEN = Shade("#4477aa", "#6f9fd0"), Shade("#66ccee", "#66ccef"), Shade("#228833", "#4bb35c")
YELLOW, RED, PURPLE = Shade("#ccbb44", "#d6c655"), Shade("#ee6677", "#f07f8e"), Shade("#aa3377", "#cf6aa3")
GREY = Shade("#bbbbbb", "#8d949e")
BROWN = Shade("#663333", "#b88a8a")
"""An eighth, of the same author's *dark* scheme."""

COMPONENTS = {
    "parameters": BLUE,
    "gradients": CYAN,
    "optimizer": GREEN,
    "activations": YELLOW,
    "buffers": RED,
    "reserve": PURPLE,
    "context": GREY,
}
"""In the order in which they are stacked; context is what the process holds outside the allocator."""
ROLES = {
    "policy": BLUE,
    "engine": RED,
    "logits": YELLOW,
    "critic": CYAN,
    "reference": GREEN,
    "reward model": PURPLE,
    "weights under way": BROWN,
    "contexts": GREY,
}
"""Of post-training, in the order in which they are stacked."""
SERIES = (BLUE, RED, GREEN, YELLOW, PURPLE, CYAN)
"""Lines and points that are no components."""
INK = {
    "page": Shade("#ffffff", "#16181d"),
    "text": Shade("#222222", "#e8eaed"),
    "muted": Shade("#5f6368", "#a8afb8"),
    "rule": Shade("#dddddd", "#363b44"),
    "limit": Shade("#111111", "#f5f5f5"),
    "free": Shade("#f1f1f1", "#23272e"),
    "on": Shade("#1f1f1f", "#16181e"),
}
"""What is not data: page, words, grid lines, the line of a GPU's capacity, free memory, words on a light hue."""
MOODS = {"good": Shade("#1b7034", "#5cc878"), "close": Shade("#8a6d00", "#e0c040"), "bad": Shade("#b3261e", "#ff8a80")}
"""Verdicts: fits, tight, does not fit. Words say them too."""
ANYWHERE = {"good": "#2e8b45", "close": "#9a7400", "bad": "#d0453b"}
"""The same hues where nobody knows whether the page is light or dark: a terminal."""


def colour_of(name: str, index: int) -> Shade:
    """Return the colour of a component or a role, or of the series at a place of a stack."""
    return COMPONENTS.get(name) or ROLES.get(name) or SERIES[index % len(SERIES)]


def words_on(hue: Shade) -> Shade:
    """Return the colour of words on a part of a chart: light on the dark hues of paper, dark on the light ones.

    >>> words_on(BLUE).light, words_on(YELLOW).light
    ('#ffffff', '#1f1f1f')
    """
    red, green, blue = (int(hue.light[index : index + 2], 16) for index in (1, 3, 5))
    return INK["on"] if 0.299 * red + 0.587 * green + 0.114 * blue > _MIDDLE else INK["page"]


_MIDDLE = 125
"""Of 255, in the weights of ITU-R BT.601: dark words are clearer above it."""


class Glyphs(NamedTuple):
    """Each of one cell, but for the branches of a tree and what parts items."""

    full: str
    parts: str
    """One to seven eighths of a cell, from the left."""
    track: str
    free: str
    margin: str
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
# they turn the text around them, so that it reads as what it is not (Unicode Technical Report 36, 2.5)
BIDIRECTIONAL = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_UNPRINTABLE = {code: "�" for code in (*_NO_TEXT, *BIDIRECTIONAL) if chr(code) != "\n"}


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


_SIGNS = {
    "−": "-", "→": r"\rightarrow", "⌈": r"\lceil", "⌉": r"\rceil", "⌊": r"\lfloor", "⌋": r"\rfloor", "√": r"\surd",
    "≤": r"\leq", "≥": r"\geq", "≈": r"\approx", "≠": r"\neq", "┃": "|",
}  # fmt: skip
"""Signs that pdfLaTeX does not know by itself."""
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\^{}", "<": r"\ensuremath{<}", ">": r"\ensuremath{>}",
    **{sign: rf"\ensuremath{{{command}}}" for sign, command in _SIGNS.items()},
    "₂": r"\textsubscript{2}", "⁹": r"\textsuperscript{9}",
}  # fmt: skip


def latex_text(text: str) -> str:
    r"""Return a text as LaTeX reads it.

    >>> print(latex_text("100% of core_attn: ⌈P / N⌉"))
    100\% of core\_attn: \ensuremath{\lceil}P / N\ensuremath{\rceil}
    >>> print(latex_text("--fix"))
    -{}-fix
    """
    return "".join(_LATEX.get(letter, letter) for letter in text).replace("--", "-{}-")  # which becomes a dash
