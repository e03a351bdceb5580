"""A stacked bar in cells of a terminal: how wide each part is, which letter stands for it, and the scale below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from memcalc.report.glyphs import Glyphs
from memcalc.report.tables import Bar, gib

__all__ = ["EIGHTHS", "Scale", "letters", "ruler", "scale_of", "spans"]

EIGHTHS = 8


@dataclass(frozen=True)
class Scale:
    """How a bar lies in a row: cells before the limit, the limit's own, and cells beyond it."""

    cells: int
    """Without the limit's own."""
    limit: int
    whole: int
    """Bytes that all cells stand for."""

    def at(self, size: float) -> int:
        """Return the cell of the row in which `size` bytes end; the limit's own cell stands between the others."""
        place = round(size / self.whole * self.cells)
        return place + (place >= self.limit and self.limit < self.cells and size > self.whole * self.limit / self.cells)


def scale_of(bar: Bar, width: int) -> Scale:
    """Return the scale on which everything that a bar tells of has room."""
    cells = width - 1
    whole = max(bar.capacity, bar.used, bar.high, 1)
    limit = round(bar.capacity / whole * cells)
    return Scale(cells, min(limit, cells - 1) if whole > bar.capacity else limit, whole)


def spans(bar: Bar, scale: Scale, each: int) -> list[int]:
    """Return the width of each part in units, of which a cell has `each`; no part is thinner than a cell.

    What a thin part lacks is taken from the widest, and the end of all parts keeps its side of the limit.
    """
    total = scale.cells * each
    ends = [round(end / scale.whole * total) for end in accumulate(size for _, size in bar.parts)]
    if ends:
        side = scale.limit * each
        ends[-1] = max(ends[-1], min(total, side + each)) if bar.over else min(ends[-1], side)
    wide = [max(0, end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
    present = [place for place, (_, size) in enumerate(bar.parts) if size > 0]
    for place in present:
        while wide[place] < each and (widest := max(present, key=lambda other: wide[other])) != place:
            if wide[widest] <= each:
                break
            moved = min(each - wide[place], wide[widest] - each)
            wide[widest] -= moved
            wide[place] += moved
    return wide


def letters(names: Sequence[str]) -> list[str]:
    """Return a letter for each name, no two alike: its first where that is free.

    >>> letters(["parameters", "gradients", "page cache"])
    ['P', 'G', 'A']
    """
    taken: list[str] = []
    for name in names:
        wanted = [letter for letter in name.upper() if letter.isalnum()]
        spare = [*wanted, *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
        taken.append(next((letter for letter in spare if letter not in taken), "?"))
    return taken


def ruler(bar: Bar, scale: Scale, signs: Glyphs) -> tuple[str, bool]:
    """Return the row below a bar, the range of its end and the limit, and whether the limit has its name there."""
    row = [" "] * (scale.cells + 1)
    for place, text in _range(bar, scale, signs, len(row)):
        row[place : place + len(text)] = text
    row[scale.limit] = signs.limit
    for said in (f"limit {gib(bar.capacity)} GiB", f"{gib(bar.capacity)} GiB"):
        for place in (scale.limit - len(said) - 1, scale.limit + 2):
            around = row[max(place - 2, 0) : max(place, 0)] + row[place + 1 : place + len(said) + 2]
            if place >= 0 and place + len(said) <= len(row) and set(around) <= {" ", signs.limit}:
                row[place : place + len(said)] = said
                return "".join(row).rstrip(), said.startswith("limit")
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
