"""The ledger: named, explained bytes, and the peak over the phases in which they are alive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from memcalc.formulas.types import Array

PHASES = ("forward", "loss", "backward-last", "backward-first", "step")
"""End of the forward pass; backward of the loss; backward of the last block; of the first block; optimizer step."""
ALWAYS = PHASES
COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "reserve")


@dataclass(frozen=True)
class Term:
    """One named number of bytes (an integer array over the strategy grid) and the phases in which it is alive."""

    component: str
    name: str
    bytes: Array
    phases: tuple[str, ...]
    formula: str
    source: str
    inputs: Mapping[str, object] = field(default_factory=dict)


class Ledger:
    """All terms of one grid of strategies. Sums are of integers, so they do not depend on the grid's shape or order."""

    def __init__(self, terms: Iterable[Term]) -> None:
        self.terms = tuple(term for term in terms if np.any(term.bytes))

    def phase(self, phase: str) -> Array:
        """Bytes alive in a phase, over the grid."""
        return add_up([term.bytes for term in self.terms if phase in term.phases])

    def component(self, component: str, phase: str) -> Array:
        """Bytes of a component alive in a phase, over the grid."""
        return add_up([t.bytes for t in self.terms if t.component == component and phase in t.phases])

    def peak(self) -> Array:
        """The largest phase sum, over the grid [bytes]."""
        always = [term for term in self.terms if len(term.phases) == len(PHASES)]
        sums = [add_up([t.bytes for t in self.terms if phase in t.phases and t not in always]) for phase in PHASES]
        return _largest(sums) + add_up([term.bytes for term in always])


def add_up(arrays: list[Array]) -> Array:
    """Sum of broadcastable integer arrays: equal shapes first, small before large, so big ones are touched least."""
    by_shape: dict[tuple[int, ...], Array] = {}
    for array in arrays:
        known = by_shape.get(array.shape)
        by_shape[array.shape] = array if known is None else known + array
    total: Array = np.zeros((1,) * 7, dtype=np.int64)
    for array in sorted(by_shape.values(), key=lambda a: a.size):
        total = total + array
    return total


def _largest(arrays: list[Array]) -> Array:
    """Element by element maximum of broadcastable arrays, small shapes first."""
    ordered = sorted(arrays, key=lambda a: a.size)
    largest = ordered[0]
    for array in ordered[1:]:
        largest = np.maximum(largest, array)
    return largest
