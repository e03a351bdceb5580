"""A stacked bar on a terminal: colours with a letter in each, or letters alone, the limit, the scale and the legend."""

from __future__ import annotations

from collections.abc import Iterator

from rich.style import Style
from rich.text import Text

from memcalc.report.glyphs import Glyphs
from memcalc.report.palette import Shade, colour_of, words_on
from memcalc.report.stack import EIGHTHS, Scale, letters, ruler, scale_of, spans
from memcalc.report.tables import Bar, gib

__all__ = ["bar_lines", "letter_on", "packed", "row_of"]

_GAP = 3


def bar_lines(bar: Bar, width: int, signs: Glyphs, *, colour: bool) -> Iterator[Text]:
    """Yield the rows of a bar: itself, what stands below it, the legend."""
    scale = scale_of(bar, width)
    styles = [colour_of(name, place) for place, (name, _) in enumerate(bar.parts)]
    marks = letters([name for name, _ in bar.parts])
    yield row_of(bar, scale, signs, colour=colour)
    below, named = ruler(bar, scale, signs)
    yield Text(below, "dim")
    limit = [] if named else [Text.assemble((signs.limit, "bold"), f" limit {gib(bar.capacity)} GiB")]
    yield from packed([*_legend(bar, signs, styles, marks, colour=colour), *limit], width, _GAP)


def row_of(bar: Bar, scale: Scale, signs: Glyphs, *, colour: bool) -> Text:
    """Return the bar itself on a scale."""
    styles = [colour_of(name, place) for place, (name, _) in enumerate(bar.parts)]
    marks = letters([name for name, _ in bar.parts])
    return _coloured(bar, scale, signs, styles, marks) if colour else _lettered(bar, scale, signs, marks)


def _lettered(bar: Bar, scale: Scale, signs: Glyphs, marks: list[str]) -> Text:
    """Return the bar in letters."""
    used = "".join(mark * wide for mark, wide in zip(marks, spans(bar, scale, 1), strict=True))
    row = used + _rest(bar, scale, signs, len(used))
    return Text(row[: scale.limit] + signs.limit + row[scale.limit :])


def _rest(bar: Bar, scale: Scale, signs: Glyphs, used: int) -> str:
    """Return the cells behind the parts: free, then what is to stay free, then nothing beyond the limit."""
    open_ = max(0, scale.limit - used)
    kept = min(open_, max(round(bar.spared / scale.whole * scale.cells), bar.spared > 0))
    return signs.free * (open_ - kept) + signs.kept * kept + " " * (scale.cells - max(used, scale.limit))


def _coloured(bar: Bar, scale: Scale, signs: Glyphs, styles: list[Shade], marks: list[str]) -> Text:
    """Return the bar in colours, exact to an eighth of a cell, with a letter in the middle of each part."""
    each = EIGHTHS if signs.parts else 1
    wide = spans(bar, scale, each)
    owners = [place for place, count in enumerate(wide) for _ in range(count)]
    rest = _rest(bar, scale, signs, -(-len(owners) // each))
    named = _middles(wide, each)
    line = Text()
    for cell in range(scale.cells):
        if cell == scale.limit:
            line.append(signs.limit, "bold")
        inside = owners[cell * each : (cell + 1) * each]
        if not inside:
            line.append(rest[cell + len(rest) - scale.cells], "dim")
            continue
        first, own = inside[0], inside.count(inside[0])
        if own == each:
            mark = marks[first] if cell in named else " "
            line.append(mark, letter_on(styles[first]))
        else:
            behind = styles[inside[-1]].light if len(inside) == each else None
            line.append(signs.parts[own - 1], Style(color=styles[first].light, bgcolor=behind))
    if scale.limit == scale.cells:
        line.append(signs.limit, "bold")
    return line


def letter_on(shade: Shade) -> Style:
    """Return the style of a letter on a part; it is read on any terminal, since both colours are given."""
    return Style(color=words_on(shade).light, bgcolor=shade.light, bold=True)


def _middles(wide: list[int], each: int) -> set[int]:
    """Return the cells that are whole parts' middles; of parts without a whole cell there are none."""
    found, begin = set(), 0
    for count in wide:
        first, behind = -(-begin // each), (begin + count) // each
        if behind > first:
            found.add((first + behind - 1) // 2)
        begin += count
    return found


def _legend(bar: Bar, signs: Glyphs, styles: list[Shade], marks: list[str], *, colour: bool) -> Iterator[Text]:
    """Yield what each letter, colour and sign stands for; parts of nothing are not drawn and not named."""
    for (name, size), style, mark in zip(bar.parts, styles, marks, strict=True):
        if size > 0:
            swatch = Text(f" {mark} ", letter_on(style)) if colour else Text(mark, "bold")
            yield Text.assemble(swatch, f" {name} {gib(size)}")
    if bar.spared:
        yield Text.assemble((signs.kept, "bold"), f" kept free {gib(bar.spared)}")
    if bar.over:
        yield Text.assemble((signs.limit, "bold"), f" {gib(bar.over)} GiB beyond the limit")
    else:
        yield Text.assemble((signs.free, "bold"), f" free {gib(bar.free)} GiB")


def packed(items: list[Text], width: int, gap: int) -> Iterator[Text]:
    """Lay `items` in lines, none broken inside."""
    line = Text()
    for item in items:
        if line and line.cell_len + gap + item.cell_len > width:
            yield line
            line = Text()
        line.append(" " * gap if line else "").append_text(item)
    yield line
