"""How well the layouts of a sweep are put in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fits.throughput import APART

if TYPE_CHECKING:
    from memcalc.formulas import Array

LEAST = 3
"""Layouts of a sweep from which on their order says something."""
FIRST = 3
"""The best layout should stand among so many that are said to be fastest."""


@dataclass(frozen=True)
class Order:
    """How one sweep is put in order."""

    layouts: int
    right: int
    """Pairs more than 3% apart that are in the right order."""
    pairs: int
    tau: float
    """Kendall's, over all pairs."""
    regret: float
    """Speed that is lost by taking the layout that is said to be fastest [-]."""
    place: int
    """Where the fastest layout stands among what is said, from 1."""

    @classmethod
    def of(cls, measured: Array, said: Array) -> Order:
        """By measured and predicted steps of a sweep's layouts."""
        upper = np.triu_indices(len(measured), 1)
        real = np.log(measured[:, None] / measured)[upper]
        agrees = np.sign(real) == np.sign(np.log(said[:, None] / said)[upper])
        apart = np.abs(real) > APART
        best = int(np.argmin(measured))
        return cls(
            layouts=len(measured),
            right=int(agrees[apart].sum()),
            pairs=int(apart.sum()),
            tau=float(2 * agrees.mean() - 1),
            regret=float(1 - measured[best] / measured[int(np.argmin(said))]),
            place=1 + int(np.sum(said < said[best])),
        )
