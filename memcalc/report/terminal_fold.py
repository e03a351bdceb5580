"""A screen that would be too long, shortened step by step: what is left out of it is counted, and `-v` has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.cells import cell_len

from memcalc.report.step_time import UNMET
from memcalc.report.tables import Block, Line, Table

ROWS = 20
"""Rows of a screen, beyond which it is shortened."""
_BETWEEN = " · "
_MORE = "{} more: -v"
_BEFORE, _NONE = 1, 0


def folds(blocks: tuple[Block, ...], width: int) -> Iterator[tuple[Block, ...]]:
    """Yield a screen, and then in fewer rows each time, for labelled lines of `width` columns.

    What was assumed gets one row, and so does the peak; the speed of what does not fit goes; tables no empty row behind
    them; warnings but the first are counted, the last first; tables no empty row before them; at last all warnings.
    """
    yield blocks
    for label in ("Assumed", "Peak"):
        blocks = tuple(_one_row(block, width, label) if isinstance(block, Line) else block for block in blocks)
        yield blocks
    blocks = tuple(block for block in blocks if not _is_unmet(block))
    yield blocks
    blocks = _closer(blocks, _BEFORE)
    yield blocks
    warned = sum(_is_warning(block) for block in blocks)
    yield from (_counted(blocks, shown) for shown in range(warned - 1, 0, -1))
    yield _counted(_closer(blocks, _NONE), min(warned, 1))
    yield _counted(_closer(blocks, _NONE), 0)


def _closer(blocks: tuple[Block, ...], around: int) -> tuple[Block, ...]:
    return tuple(replace(block, around=around) if isinstance(block, Table) else block for block in blocks)


def _is_warning(block: Block) -> bool:
    return isinstance(block, Line) and block.text.startswith("Warning: ")


def _is_unmet(block: Block) -> bool:
    return isinstance(block, Line) and block.text.startswith(UNMET)


def _counted(blocks: tuple[Block, ...], shown: int) -> tuple[Block, ...]:
    """Return a screen with its first `shown` warnings, and how many there are besides in the place of the next."""
    warned = [index for index, block in enumerate(blocks) if _is_warning(block)]
    more = len(warned) - shown
    if not more:
        return blocks
    text = _MORE.format(more) if shown else f"{more}: -v"
    counted = Line(f"Warning: {text}", "warning")
    left_out = warned[shown + 1 :]
    return tuple(
        counted if index == warned[shown] else block for index, block in enumerate(blocks) if index not in left_out
    )


def _one_row(line: Line, width: int, label: str) -> Line:
    """Return the line of a label with as many items as one row holds, and how many there are besides."""
    items = line.items
    if line.label != label or cell_len(_BETWEEN.join(items)) <= width:
        return line
    for count in range(len(items) - 1, 0, -1):
        fewer = (*items[:count], _MORE.format(len(items) - count))
        if cell_len(_BETWEEN.join(fewer)) <= width:
            return replace(line, items=fewer)
    return line
