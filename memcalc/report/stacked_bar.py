"""A stacked bar on a terminal: colours with a letter in each, or letters alone, the limit, the scale and the legend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from rich.style import Style
from rich.text import Text

from memcalc.report.palette import ANYWHERE, ASCII, FULL, Glyphs, Shade, colour_of, printable, words_on
from memcalc.report.tables import Bar, Bars, BarsRow, gib
from memcalc.results.names import LETTERS, component_name

_GAP = 3


def bar_lines(bar: Bar, width: int, signs: Glyphs, *, colour: bool) -> Iterator[Text]:
    """Yield the rows of a bar: itself, what stands below it, the legend."""
    scale = scale_of(bar, width)
    styles = [colour_of(name, index) for index, (name, _) in enumerate(bar.parts)]
    marks = letters([name for name, _ in bar.parts])
    yield row_of(bar, scale, signs, colour=colour)
    below, named = ruler(bar, scale, signs)
    yield Text(below, "dim")
    limit = [] if named else [Text.assemble((signs.limit, "bold"), f" limit {gib(bar.capacity)} GiB")]
    yield from packed([*_legend(bar, signs, styles, marks, colour=colour), *limit], width, _GAP)


def row_of(bar: Bar, scale: Scale, signs: Glyphs, *, colour: bool) -> Text:
    """Return the bar itself on a scale."""
    styles = [colour_of(name, index) for index, (name, _) in enumerate(bar.parts)]
    marks = letters([name for name, _ in bar.parts])
    return _coloured(bar, scale, signs, styles, marks) if colour else _lettered(bar, scale, signs, marks)


def _lettered(bar: Bar, scale: Scale, signs: Glyphs, marks: list[str]) -> Text:
    used = "".join(mark * wide for mark, wide in zip(marks, spans(bar, scale, 1), strict=True))
    row = used + _rest(bar, scale, signs, len(used))
    return Text(row[: scale.limit] + signs.limit + row[scale.limit :])


def _rest(bar: Bar, scale: Scale, signs: Glyphs, used: int) -> str:
    """Return the cells behind the parts: free, then what is to stay free, then nothing beyond the limit."""
    open_ = max(0, scale.limit - used)
    margin = min(open_, max(round(bar.spared / scale.total * scale.cells), bar.spared > 0))
    return signs.free * (open_ - margin) + signs.margin * margin + " " * (scale.cells - max(used, scale.limit))


def _coloured(bar: Bar, scale: Scale, signs: Glyphs, styles: list[Shade], marks: list[str]) -> Text:
    """Return the bar in colours, exact to an eighth of a cell, with a letter in the middle of each part."""
    each = EIGHTHS if signs.parts else 1
    wide = spans(bar, scale, each)
    owners = [index for index, count in enumerate(wide) for _ in range(count)]
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
        first, share = inside[0], inside.count(inside[0])
        if share == each:
            mark = marks[first] if cell in named else " "
            line.append(mark, letter_on(styles[first]))
        else:
            behind = styles[inside[-1]].light if len(inside) == each else None
            line.append(signs.parts[share - 1], Style(color=styles[first].light, bgcolor=behind))
    if scale.limit == scale.cells:
        line.append(signs.limit, "bold")
    return line


def letter_on(shade: Shade) -> Style:
    """Return the style of a letter on a part; it is read on any terminal, since both colours are given."""
    return Style(color=words_on(shade).light, bgcolor=shade.light, bold=True)


def _middles(wide: list[int], each: int) -> set[int]:
    """Return the cells that are whole parts' middles; of parts without a whole cell there are none."""
    result, begin = set(), 0
    for count in wide:
        first, behind = -(-begin // each), (begin + count) // each
        if behind > first:
            result.add((first + behind - 1) // 2)
        begin += count
    return result


def _legend(bar: Bar, signs: Glyphs, styles: list[Shade], marks: list[str], *, colour: bool) -> Iterator[Text]:
    """Yield what each letter, colour and sign stands for; parts of nothing are not drawn and not named."""
    for (name, size), style, mark in zip(bar.parts, styles, marks, strict=True):
        if size > 0:
            swatch = Text(f" {mark} ", letter_on(style)) if colour else Text(mark, "bold")
            yield Text.assemble(swatch, f" {component_name(name)} {gib(size)}")
    if bar.spared:
        yield Text.assemble((signs.margin, "bold"), f" kept free {gib(bar.spared)}")
    if bar.over:
        yield Text.assemble((signs.limit, "bold"), f" over by {gib(bar.over)} GiB")
    else:
        yield Text.assemble((signs.free, "bold"), f" headroom {gib(bar.free)} GiB")


def packed(items: list[Text], width: int, gap: int) -> Iterator[Text]:
    """Lay `items` in lines, none broken inside."""
    line = Text()
    for item in items:
        if line and line.cell_len + gap + item.cell_len > width:
            yield line
            line = Text()
        line.append(" " * gap if line else "").append_text(item)
    yield line


EIGHTHS = 8


class Scale(NamedTuple):
    """How a bar lies in a row: cells before the limit, the limit's own, and cells beyond it."""

    cells: int
    """Without the limit's own."""
    limit: int
    total: int
    """Bytes that all cells stand for."""

    def at(self, size: float) -> int:
        """Return the cell of the row in which `size` bytes end; the limit's own cell stands between the others."""
        index = round(size / self.total * self.cells)
        return index + (index >= self.limit and self.limit < self.cells and size > self.total * self.limit / self.cells)


def scale_of(bar: Bar, width: int) -> Scale:
    """Return the scale on which everything that a bar tells of has room."""
    cells = width - 1
    total = max(bar.capacity, bar.used, bar.high, 1)
    limit = round(bar.capacity / total * cells)
    return Scale(cells, min(limit, cells - 1) if total > bar.capacity else limit, total)


def spans(bar: Bar, scale: Scale, each: int) -> list[int]:
    """Return the width of each part in units, of which a cell has `each`; no part is thinner than a cell.

    What a thin part lacks is taken from the widest, and the end of all parts keeps its side of the limit.
    """
    total = scale.cells * each
    ends = [round(end / scale.total * total) for end in accumulate(size for _, size in bar.parts)]
    if ends:
        side = scale.limit * each
        ends[-1] = max(ends[-1], min(total, side + each)) if bar.over else min(ends[-1], side)
    wide = [max(0, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
    present = [index for index, (_, size) in enumerate(bar.parts) if size > 0]
    for index in present:
        while wide[index] < each and (widest := max(present, key=lambda other: wide[other])) != index:
            if wide[widest] <= each:
                break
            moved = min(each - wide[index], wide[widest] - each)
            wide[widest] -= moved
            wide[index] += moved
    return wide


def letters(names: Sequence[str]) -> list[str]:
    """Return a letter for each name, no two alike: that of the table of all commands, else one that it has no use for.

    >>> letters(["parameters", "gradients", "page cache", "reserve"])
    ['P', 'G', 'D', 'C']
    """
    spare = (letter for letter in "DFIJNQTZ0123456789" if letter not in LETTERS.values())
    return [LETTERS.get(name) or next(spare, "?") for name in names]


def ruler(bar: Bar, scale: Scale, signs: Glyphs) -> tuple[str, bool]:
    """Return the row below a bar, the range of its end and the limit, and whether the limit has its name there."""
    row = [" "] * (scale.cells + 1)
    for index, text in _range(bar, scale, signs, len(row)):
        row[index : index + len(text)] = text
    row[scale.limit] = signs.limit
    for label in (f"limit {gib(bar.capacity)} GiB", f"{gib(bar.capacity)} GiB"):
        for index in (scale.limit - len(label) - 1, scale.limit + 2):
            around = row[max(index - 2, 0) : max(index, 0)] + row[index + 1 : index + len(label) + 2]
            if index >= 0 and index + len(label) <= len(row) and set(around) <= {" ", signs.limit}:
                row[index : index + len(label)] = label
                return "".join(row).rstrip(), label.startswith("limit")
    return "".join(row).rstrip(), False


def _range(bar: Bar, scale: Scale, signs: Glyphs, width: int) -> Iterator[tuple[int, str]]:
    """Yield the bracket from the low end to the high one, and its figures where there is room for both."""
    if not 0 < bar.low < bar.high:
        return
    low, high = scale.at(bar.low), min(scale.at(bar.high), width - 1)
    if high - low < 2:
        return
    end = min(max(scale.at(bar.used), low + 1), high - 1)
    row = [signs.left, *signs.across * (high - low - 1), signs.right]
    row[end - low] = signs.middle
    yield low, "".join(row)
    left, right = gib(bar.low, 1), gib(bar.high, 1)
    figures = (low - len(left) - 1, left), (high + 2, right)
    if all(at >= 0 and at + len(text) <= width and not at <= scale.limit < at + len(text) for at, text in figures):
        yield from figures


_PLAIN_WIDTH = 76
_CUT = {FULL: "»", ASCII: ">"}
_BARS_GAP = 2
_INDENT = 3


def bars_lines(block: Bars, width: int, signs: Glyphs, *, colour: bool) -> Iterator[Text]:
    """Yield the rows of a block: an axis, then for each bar what it is and the bar itself, and the legend."""
    if block.compact:
        yield from _compact(block, width, signs, colour=colour)
        return
    scale = Scale(width - 1, round(block.capacity / block.end * (width - 1)), block.end)
    yield _axis(block, scale, signs)
    for row in block.rows:
        yield from _label(row, width, signs, colour=colour)
        yield _bar(block, row, scale, signs, colour=colour)
    if block.legend:
        yield from packed(list(_bars_legend(block, signs, colour=colour)), width, _BARS_GAP)


def _compact(block: Bars, width: int, signs: Glyphs, *, colour: bool) -> Iterator[Text]:
    """Yield a row for each bar: name, bar, size [GiB]; then the legend."""
    labels = [Text(printable(row.label, signs is ASCII), "bold") for row in block.rows]
    sizes = [
        Text(gib(row.size, 1), f"bold {ANYWHERE[row.mood]}" if row.mood and colour else "bold") for row in block.rows
    ]
    names, figures = (max(text.cell_len for text in texts) + _BARS_GAP for texts in (labels, sizes))
    cells = max(width - names - figures - 1, _INDENT)
    scale = Scale(cells, round(block.capacity / block.end * cells), block.end)
    for row, label, size in zip(block.rows, labels, sizes, strict=True):
        bar = _bar(block, row, scale, signs, colour=colour)
        label.append(" " * (names - label.cell_len))
        yield Text.assemble(label, bar, " " * (cells + 1 - bar.cell_len + figures - size.cell_len), size)
    limit = Text(f"{signs.limit} {printable(block.limit, signs is ASCII)} {gib(block.capacity, 1)} GiB")
    yield from packed([*_bars_legend(block, signs, colour=colour), limit], width, _BARS_GAP)


def as_text(block: Bars) -> str:
    """Return the block as lines without colour, for a format that has no bars of its own."""
    return "\n".join(line.plain.rstrip() for line in bars_lines(block, _PLAIN_WIDTH, FULL, colour=False))


def _axis(block: Bars, scale: Scale, signs: Glyphs) -> Text:
    """0 at the left, the capacity at its line, the end of the scale at the right, as far as there is room."""
    text = f"{printable(block.limit, signs is ASCII)} {gib(block.capacity, 1)} GiB"
    line = "0 GiB"
    if len(line) + len(text) + _BARS_GAP < scale.limit:
        line = f"{line.ljust(scale.limit - len(text) - 1)}{text} {signs.limit}"
    else:
        line = f"{line.ljust(scale.limit)}{signs.limit} {text}"
    end = f"{gib(block.end, 1)} GiB"
    if len(line) + _BARS_GAP + len(end) <= scale.cells + 1:
        line = f"{line.ljust(scale.cells + 1 - len(end))}{end}"
    return Text(line[: scale.cells + 1], "dim")


def _label(row: BarsRow, width: int, signs: Glyphs, *, colour: bool) -> Iterator[Text]:
    only = signs is ASCII
    name = Text(printable(row.label, only), "bold")
    mood = f"bold {ANYWHERE[row.mood]}" if row.mood and colour else "bold"
    says = f"  {printable(row.says, only)}" if row.says else ""
    text = Text.assemble((printable(row.verdict, only), mood), (says, "dim"))
    if name.cell_len + _BARS_GAP + text.cell_len <= width:
        yield Text.assemble(name, " " * _BARS_GAP, text)
    else:
        yield name
        yield Text.assemble(" " * _INDENT, text)


def _bar(block: Bars, row: BarsRow, scale: Scale, signs: Glyphs, *, colour: bool) -> Text:
    """Return a bar; one that goes beyond the end of the scale ends with a sign that says so."""
    left, parts = block.end, []
    for name, size in row.parts:
        parts.append((name, min(size, left)))
        left -= parts[-1][1]
    line = row_of(Bar(tuple(parts), block.capacity), scale, signs, colour=colour)
    return Text.assemble(line[:-1], (_CUT[signs], "bold")) if row.size > block.end else line


def _bars_legend(block: Bars, signs: Glyphs, *, colour: bool) -> Iterator[Text]:
    """Yield what letters, colours and signs stand for; a component that no bar has is not named."""
    names = [name for name, _ in block.rows[0].parts]
    seen = {name for row in block.rows for name, size in row.parts if size}
    for index, (name, mark) in enumerate(zip(names, letters(names), strict=True)):
        swatch = Text(f" {mark} ", letter_on(colour_of(name, index))) if colour else Text(mark, "bold")
        if name in seen:
            yield Text.assemble(swatch, f" {component_name(name)}")
    yield Text(f"{signs.free} headroom")
    if not block.compact:
        yield Text(f"{signs.limit} capacity")
    if any(row.size > block.end for row in block.rows):
        yield Text(f"{_CUT[signs]} bar truncated")
