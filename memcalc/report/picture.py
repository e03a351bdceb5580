"""What a terminal shows, as a picture: one SVG without fonts or files beside it, in light and in dark."""

from __future__ import annotations

import io
import re
from xml.sax.saxutils import escape

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from memcalc.report.glyphs import printable
from memcalc.report.palette import INK, MOODS
from memcalc.report.tables import Document, Line
from memcalc.report.terminal import paint

__all__ = ["picture"]

_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"
_FORMAT = """\
<svg class="memcalc-terminal" role="img" @SIZE@ xmlns="http://www.w3.org/2000/svg">
<title>@TITLE@</title>
<style>
.{unique_id}-matrix {{ font-family: @FONT@; font-size: {char_height}px; white-space: pre }}
.{unique_id}-page {{ fill: @PAGE@; stroke: @RULE@ }}
{styles}
@DARK@</style>
<rect class="{unique_id}-page" x="0.5" y="0.5" @FRAME@ rx="6"/>
<g transform="translate(@EDGE@, @EDGE@)" data-size="{terminal_width} {terminal_height}">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
_UNIQUE = "memcalc"
_SCALE = 0.65
_EDGE = 12


def picture(document: Document, width: int) -> str:
    """Return the SVG of `document` on a terminal of `width` columns."""
    light, dark = (_drawn(document, width, theme) for theme in (_theme("light"), _theme("dark")))
    rules = "\n".join((_page("dark"), _styles(dark)))
    svg = light.replace("@DARK@", f"@media screen and (prefers-color-scheme: dark) {{\n{rules}\n}}\n")
    svg = svg.replace("@PAGE@", INK["page"].light).replace("@RULE@", INK["rule"].light).replace("@FONT@", _FONT)
    return _sized(svg).replace("@TITLE@", escape(printable(_title(document))))


def _sized(svg: str) -> str:
    """Return the picture with an edge around what rich has drawn, its letters as large as a page's."""
    found = re.search(r' data-size="([\d.]+) ([\d.]+)"', svg)
    sides = [float(side) + 2 * _EDGE for side in found.groups()] if found else [0.0, 0.0]
    svg = re.sub(r' data-size="[^"]*"', "", svg).replace("@EDGE@", str(_EDGE))
    svg = svg.replace("@FRAME@", 'width="{:g}" height="{:g}"'.format(*sides))
    wide, high = (side + 1 for side in sides)
    size = f'width="{_SCALE * wide:.0f}" height="{_SCALE * high:.0f}" viewBox="0 0 {wide:g} {high:g}"'
    return svg.replace("@SIZE@", size)


def _drawn(document: Document, width: int, theme: TerminalTheme) -> str:
    """Return the picture in one theme, with what both share still to be filled in."""
    console = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="truecolor", markup=False,
        highlight=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    paint(document, console, colour=True, wraps=True)
    return console.export_svg(title="", theme=theme, code_format=_FORMAT, unique_id=_UNIQUE)


def _styles(svg: str) -> str:
    return "\n".join(re.findall(rf"^\s*\.{_UNIQUE}-r\d+ {{.*$", svg, re.MULTILINE))


def _page(mode: str) -> str:
    page, rule = (getattr(INK[name], mode) for name in ("page", "rule"))
    return f".{_UNIQUE}-page {{ fill: {page}; stroke: {rule} }}"


def _title(document: Document) -> str:
    """Return the first sentence, for who hears the picture."""
    return next((block.text for block in document.blocks if isinstance(block, Line)), "memcalc")


def _theme(mode: str) -> TerminalTheme:
    """Return the palette as a terminal's: page, text, and eight colours of which the hues of moods are used."""
    page, text, muted = (_rgb(getattr(INK[name], mode)) for name in ("page", "text", "muted"))
    good, close, bad = (_rgb(getattr(MOODS[name], mode)) for name in ("good", "close", "bad"))
    colours = [page, bad, good, close, muted, muted, muted, text]
    return TerminalTheme(page, text, colours, colours)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
