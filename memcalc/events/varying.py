"""Steps whose micro-batches differ in shape: the same writer, which turns to the shape of each pass."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from memcalc.events.passing import PassingTerms
from memcalc.events.stage import Stage, passes
from memcalc.events.writer import StepWriter
from memcalc.terms.pipeline import in_flight

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memcalc.batches import Shape
    from memcalc.events.log import Event
    from memcalc.ledger import Ledger
    from memcalc.terms.model_on_grid import ModelOnGrid

    ShapedLedger = tuple[ModelOnGrid, Ledger]
    """The model on the grid of one shape, and its ledger."""


def varying_events(
    ledgers: Mapping[Shape, ShapedLedger],
    steps: Sequence[Sequence[Shape]],
    longest: Shape,
    stage: int,
    *,
    observed: bool = True,
) -> Iterator[Event]:
    """Allocations and frees of optimizer steps on a stage, each a list of the shapes of its micro-batches.

    ``ledgers`` has each shape's, by what names it. What lives throughout is as large as the ``longest`` needs it.
    """
    return chain.from_iterable(_VaryingWriter(ledgers, steps, longest, stage, observed=observed).parts())


class _VaryingWriter(StepWriter):
    """Its weights, units and optimizer are those of one job; blocks and head belong to the shape at hand."""

    def __init__(
        self,
        ledgers: Mapping[Shape, ShapedLedger],
        steps: Sequence[Sequence[Shape]],
        longest: Shape,
        stage: int,
        *,
        observed: bool,
    ) -> None:
        self.ledgers, self.steps = ledgers, steps
        self.shape = longest
        self.computed: dict[Shape, dict[str, Any]] = {}
        self.passing: list[Shape] = []
        super().__init__(*ledgers[longest], stage, observed=observed)

    def _step(self, *, first: bool) -> Iterator[list[Event]]:
        """The first step; then all others in the place of the second."""
        for step in self.steps[:1] if first else self.steps[1:]:
            self.passing = list(step)
            self.units.begin()
            for forward, index in passes(self.scalar(in_flight(self.grid)), len(step)):
                self._turn(self.passing[index])
                self._forward(index) if forward else self._backward(index)
                yield self.log.taken()
            self.units.end()
            self._update(first=first)
            yield self.log.taken()

    def _turn(self, shape: Shape) -> None:
        """Put the model on a shape's grid in the place of the last one's, with what was computed of it before."""
        if shape == self.shape:
            return
        state = vars(self)
        self.computed[self.shape] = {name: state.pop(name) for name in OF_A_SHAPE if name in state}
        self.shape = shape
        self.census, self.ledger = self.ledgers[shape]
        self.grid = self.census.grid
        state.update(self.computed.get(shape, {}))


OF_A_SHAPE = tuple(
    name
    for kind in (Stage, PassingTerms, StepWriter)
    for name, value in vars(kind).items()
    if isinstance(value, cached_property)
)
"""What the writer computes once and keeps, of the model on one grid."""
