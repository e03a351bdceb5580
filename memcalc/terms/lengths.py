"""Sequence lengths of one grid: a column, as long as what is run does not depend on the length.

Formulas take any column of lengths. What is traced, though, branches on the length: a window masks longer sequences,
and a loss cuts a sequence into parts of so many positions. :func:`runs` splits lengths where a branch changes, and each
run is a grid of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.frameworks.losses import Loss
    from memcalc.grid import Grid
    from memcalc.specs.model import Model

MIXED = "the sequence lengths of a grid must be one run of memcalc.terms.lengths.runs"


def runs(model: Model, loss: Loss, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    """Ascending lengths, split where a window or the number of a loss's parts changes.

    >>> from memcalc import catalog
    >>> from memcalc.frameworks.losses import HF_NEW
    >>> runs(catalog.model("mistral-7b-v0.1"), HF_NEW, [1024, 4095, 4096, 8192])
    [(1024, 4095), (4096, 8192)]
    """
    windows = {group.block.attention.window for group in model.groups if group.block.attention.window is not None}
    rows = rows_of(loss)

    def branch(length: int) -> tuple[object, ...]:
        return (*(length >= window for window in windows), *(-(-length // part) for part in rows))

    return [tuple(run) for _, run in groupby(lengths, key=branch)]


def rows_of(loss: Loss) -> tuple[int, ...]:
    """Positions of a loss's parts, with a trained base and with a frozen one, where they are fixed."""
    kinds = (loss, loss.frozen) if loss.frozen is not None else (loss,)
    return tuple(sorted({item.rows for item in kinds if item.rows}))


def alike(branch: Array) -> bool:
    """The one side of a branch that all lengths of a grid take."""
    taken = bool(np.all(branch))
    if taken != bool(np.any(branch)):
        raise ValueError(MIXED)
    return taken


def one_length(loss: Loss, grid: Grid) -> None:
    """Hold that a loss has the same number of parts at all lengths of a grid."""
    for rows in rows_of(loss):
        if len({-(-length // rows) for length in grid.lengths}) > 1:
            raise ValueError(MIXED)
