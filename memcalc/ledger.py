"""The ledger: named, explained bytes, and the peak over the phases in which they are alive.

Sums and maxima of arrays that broadcast are made in the order that touches large ones least, a few layouts at a time.
All is integers, so that neither the order nor the blocks change a figure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memcalc.formulas import Array


AXES = 7
BLOCK = 1 << 17
"""Elements computed at once, so that what lies between stays in a core's cache."""
ZERO = np.zeros((1,) * AXES, dtype=np.int64)

Shape = tuple[int, ...]
Chosen: TypeAlias = "slice | Array"
"""Layouts, by their places."""
ValueAndPhases = tuple[frozenset[str], "Tree"]
"""An array and the phases in which it counts."""


@dataclass(frozen=True, eq=False)
class Operand:
    """An array over the axes of a grid."""

    array: Array
    """Its values, of which each axis has all or one."""

    @property
    def shape(self) -> Shape:
        """Length of each axis."""
        return tuple(self.array.shape)

    def rows(self, chosen: Chosen) -> Array:
        """The array for some layouts."""
        return self.array if len(self.array) == 1 else self.array[chosen]

    def at(self, index: Sequence[int]) -> Array:
        """One entry."""
        return self.array[tuple(min(i, n - 1) for i, n in zip(index, self.shape, strict=True))]


@dataclass(frozen=True, eq=False)
class Operation:
    """What an operation makes of two arrays."""

    operation: Callable[[Array, Array], Array]
    """What is done, element by element."""
    left: Tree
    """The first array, or what makes it."""
    right: Tree
    """The second, alike."""
    shape: Shape
    """Length of each axis of the result."""

    def rows(self, chosen: Chosen) -> Array:
        """The result for some layouts."""
        return self.operation(self.left.rows(chosen), self.right.rows(chosen))

    def at(self, index: Sequence[int]) -> Array:
        """One entry of the result."""
        return self.operation(self.left.at(index), self.right.at(index))


Tree = Operand | Operation


def leaf(array: Array) -> Operand:
    """An array, or a number, with all axes."""
    full = np.asarray(array)
    return Operand(full.reshape(*(1,) * (AXES - full.ndim), *full.shape))


def joint(left: Tree, right: Tree) -> Shape:
    """The shape of what two arrays give."""
    return tuple(map(max, left.shape, right.shape))


def total(trees: Sequence[Tree]) -> Tree:
    """The sum of several: always the two next whose sum is smallest."""
    left = list(trees) or [Operand(ZERO)]
    while len(left) > 1:
        first, second = min(combinations(left, 2), key=lambda two: prod(joint(*two)))
        left = [tree for tree in left if tree is not first and tree is not second]
        left.append(Operation(np.add, first, second, joint(first, second)))
    return left[0]


def largest(parts: Sequence[ValueAndPhases], phases: frozenset[str]) -> Tree:
    """The largest sum of some phases; what counts in all of them is added once: max(a + c, b + c) = max(a, b) + c."""
    common = [tree for alive, tree in parts if alive >= phases]
    rest = [(alive, tree) for alive, tree in parts if alive & phases and not alive >= phases]
    if not rest:
        return total(common)
    apart = max(rest, key=lambda part: prod(part[1].shape))[0] & phases
    left, right = largest(rest, apart), largest(rest, phases - apart)
    return total([*common, Operation(np.maximum, left, right, joint(left, right))])


def leaves(tree: Tree) -> Iterator[Operand]:
    """The arrays of a tree."""
    if isinstance(tree, Operand):
        yield tree
    else:
        yield from leaves(tree.left)
        yield from leaves(tree.right)


class MaxOverStages:
    """The largest over the stages of each layout, where each stage is a row of its own along the tree's first axis.

    Sums and maxima never fall where their parts rise: a stage whose arrays are nowhere larger than those of the stage
    before it cannot have more, and is not computed.
    """

    def __init__(self, tree: Tree, owners: Array) -> None:
        """``owners`` is the layout of each row, in order."""
        self.tree = tree
        no_more = owners[1:] == owners[:-1]
        for array in (leaf.array for leaf in leaves(tree) if len(leaf.array) > 1):
            no_more &= np.all(array[1:] <= array[:-1], axis=(1, 2, 3, 4, 5, 6))
        self.kept = np.flatnonzero(np.concatenate([[True], ~no_more]))
        self.bounds = np.searchsorted(owners[self.kept], np.arange(owners[-1] + 2))
        self.shape = (int(owners[-1]) + 1, 1, *tree.shape[2:])

    def rows(self, chosen: slice) -> Array:
        """The largest for some layouts."""
        bounds = self.bounds[chosen.start : chosen.stop + 1]
        rows = self.tree.rows(self.kept[bounds[0] : bounds[-1]])
        first, counts = bounds[:-1] - bounds[0], np.diff(bounds)
        if len(rows) in {1, len(counts)}:
            return rows
        top = rows[first]
        for index in range(1, int(counts.max())):
            more = np.flatnonzero(counts > index)
            top[more] = np.maximum(top[more], rows[first[more] + index])
        return top

    def at(self, index: Sequence[int]) -> Array:
        """The largest for one strategy."""
        rows = self.kept[self.bounds[index[0]] : self.bounds[index[0] + 1]]
        return np.max([self.tree.at((row, 0, *index[2:])) for row in rows])


def alike(arrays: Iterable[tuple[tuple[str, ...], Array]]) -> list[ValueAndPhases]:
    """Arrays with their phases, those of one shape and the same phases added up."""
    known: dict[tuple[frozenset[str], Shape], Array] = {}
    for phases, array in arrays:
        key = frozenset(phases), np.shape(array)
        known[key] = known[key] + array if key in known else array
    return [(phases, leaf(array)) for (phases, _), array in known.items()]


def computed(tree: Tree | MaxOverStages) -> Array:
    """The array, block by block along the layouts."""
    rows = max(BLOCK // prod(tree.shape[1:]), 1)
    blocks = [tree.rows(slice(first, first + rows)) for first in range(0, tree.shape[0], rows)]
    return np.concatenate(blocks) if len(blocks) > 1 else blocks[0]


def add_up(arrays: Iterable[Array]) -> Array:
    """Sum of broadcastable integer arrays."""
    return computed(total([tree for _, tree in alike(((), array) for array in arrays)]))


# ----------------------------------------------------------------------------------------------------------- the ledger


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

    @cached_property
    def written_apart(self) -> tuple[Term, ...]:
        """Terms of which nothing else writes the events of a step."""
        return tuple(term for term in self.terms if not (term.with_weights or term.in_events))

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
