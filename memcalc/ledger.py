"""The ledger: named, explained bytes, and the peak over the phases in which they are alive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from memcalc.sums import add_up, alike, computed, largest, total

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memcalc.formulas import Array
    from memcalc.sums import Tree

PHASES = ("forward-last", "forward", "loss", "backward-last", "backward-first", "backward-end", "step")
"""Forward of the last block; of head and loss; backward of the loss and head; of the last block; of the first block;
its end, where the embedding's gradient is made; the optimizer step."""
ALWAYS = PHASES
COMPUTING = PHASES[:-1]
KEPT = ("forward-last", "forward", "loss", "backward-last")
BACKWARD = ("backward-last", "backward-first")
COMPONENTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "reserve")


@dataclass(frozen=True)
class Term:
    """One named number of bytes (an integer array over the strategy grid) and the phases in which it is alive."""

    component: str
    """One of :data:`COMPONENTS`."""
    name: str
    """What a reader is told."""
    bytes: Array
    """Over the grid [bytes]."""
    phases: tuple[str, ...]
    """The phases in which it is alive."""
    formula: str
    """The closed form, in the names of ``inputs``."""
    source: str
    """Where the formula, or the mechanism, was read."""
    inputs: Mapping[str, object] = field(default_factory=dict)
    """The values put in, over the grid."""
    pool: str = "compute"
    """The stream whose allocator pool holds it: compute, all-gather or reduce-scatter."""
    hole: bool = False
    """Memory of dead tensors that the allocator cannot give to anything else: reserved, not allocated."""
    in_events: bool = False
    """The writer of a step's events writes it itself, block by block or unit by unit."""
    apart: bool = False
    """Gradients as one piece in a step's events; others come and go there with their weights."""
    until: int = -1
    """In a step's events, the block of a stage, counted from 0, whose backward is the last to need it; -1 for none."""
    grows: bool = False
    """In a step's events it comes with the forward of the checkpointed blocks, a tensor for each of their weights."""
    tensors: int = 1
    """Of each weight, by which it is made in a step's events."""
    with_model: bool = False
    """In a step's events it is there before the first step: weights, and main weights that a library makes at once."""
    by_thread: bool = False
    """In a step's events a half comes with forward's first product, and one with backward's, of another thread."""
    in_turn: tuple[int, int] = (0, 0)
    """Of the step, in a step's events: the tensors that one weight's update takes, and those of them that live until
    the next one's are there. (0, 0): all weights' at once."""
    tier: str = "gpu"
    """Where it lies: gpu; off it host, nvme or cxl (:mod:`memcalc.terms.host`)."""

    @property
    def with_weights(self) -> bool:
        """Whether it is gradients that come and go with their weights."""
        return self.component == "gradients" and not self.apart


class Ledger:
    """All terms of one grid of strategies. Sums are of integers, so they do not depend on the grid's shape or order."""

    def __init__(self, terms: Iterable[Term]) -> None:
        there = [term for term in terms if np.any(term.bytes)]
        self.terms = tuple(term for term in there if not term.hole)
        self.holes = tuple(term for term in there if term.hole)

    def phase(self, phase: str) -> Array:
        """Bytes alive in a phase, over the grid."""
        return add_up([term.bytes for term in self.terms if phase in term.phases])

    def component(self, component: str, phase: str) -> Array:
        """Bytes of a component alive in a phase, over the grid."""
        return add_up([t.bytes for t in self.terms if t.component == component and phase in t.phases])

    def peak(self) -> Array:
        """The largest phase sum, over the grid [bytes]."""
        return computed(_largest(self.terms))

    def reserved(self) -> Array:
        """The largest reserved bytes, over the grid."""
        return computed(self.tree())

    def tree(self) -> Tree:
        """The sums that give them: the pools of the streams peak at different moments, and their peaks add."""
        terms = (*self.terms, *self.holes)
        pools = sorted({term.pool for term in terms})
        return total([_largest([term for term in terms if term.pool == pool]) for pool in pools])


def _largest(terms: Iterable[Term]) -> Tree:
    return largest(alike((term.phases, term.bytes) for term in terms), frozenset(PHASES))
