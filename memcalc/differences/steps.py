"""From one job to the other, one change after another: each step is a job of its own, estimated like any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

from memcalc.differences.changes import Change, Pair, changes, fields_between, one_of
from memcalc.differences.costs import cost_between, figures_of
from memcalc.errors import MemcalcError
from memcalc.planner.one import One
from memcalc.results import Estimate, StepTime
from memcalc.results.diff import DiffField, DiffFigures, DiffStep

__all__ = ["Walk", "named"]

LARGEST_GROUP = 3
"""Changes of which every combination is tried where none is possible alone; beyond, all that are left go together."""


@dataclass(frozen=True)
class Point:
    """A job on the way."""

    one: One

    @cached_property
    def estimate(self) -> Estimate:
        """Its answer, computed when it is asked for."""
        return self.one.estimate()

    @cached_property
    def time(self) -> StepTime:
        """Its predicted step."""
        return self.one.time()

    @cached_property
    def figures(self) -> DiffFigures:
        """What is compared."""
        return figures_of(self.estimate, self.time)


@dataclass
class Walk:
    """The way from A to B; jobs that it meets twice are computed once."""

    pair: Pair
    known: dict[frozenset[Change], Point | MemcalcError] = field(default_factory=dict)

    def at(self, changed: Iterable[Change]) -> Point | MemcalcError:
        """The job of A with some changes, or why it is impossible."""
        place = frozenset(changed)
        if place not in self.known:
            try:
                self.known[place] = Point(one_of(self.pair.after(place), self.pair.dirs))
            except MemcalcError as error:
                self.known[place] = error
        return self.known[place]

    def steps(self) -> tuple[DiffStep, ...]:
        """Every change in its order; one that is not yet possible waits for those that make it so."""
        found: list[DiffStep] = []
        done: list[Change] = []
        left = list(changes(self.pair))
        now = self._must(())
        while left:
            taken = next(group for group in _groups(left) if isinstance(self.at((*done, *group)), Point))
            done += taken
            left = [change for change in left if change not in taken]
            after = self._must(done)
            if fields_between(now.one, after.one, ()) or now.figures != after.figures:
                found.append(self._step(taken, now, after))
            now = after
        return tuple(found)

    def _must(self, changed: Iterable[Change]) -> Point:
        """A job that is known to be possible."""
        point = self.at(changed)
        if isinstance(point, MemcalcError):
            raise point
        return point

    def _step(self, taken: tuple[Change, ...], before: Point, after: Point) -> DiffStep:
        told = {name for change in taken for name in change.words} - self.pair.defaults
        fields = fields_between(before.one, after.one, told)
        alone = self.at(taken)
        start = self._must(()).figures
        return DiffStep(
            name=named(fields),
            fields=fields,
            together=len(taken) > 1,
            cost=cost_between(before.figures, after.figures),
            after=after.figures,
            alone=cost_between(start, alone.figures) if isinstance(alone, Point) else None,
            impossible="" if isinstance(alone, Point) else str(alone),
            command=after.one.command,
        )


def _groups(left: list[Change]) -> Iterator[tuple[Change, ...]]:
    """Yield what may be applied at once: single changes first, small groups, at last all that is left."""
    for size in range(1, min(LARGEST_GROUP, len(left)) + 1):
        yield from combinations(left, size)
    yield tuple(left)


def named(fields: Iterable[DiffField]) -> str:
    """Return what was said to change, in a few words; what follows where nothing was said.

    >>> named([DiffField(field="micro_batch", before=1, after=2, follows=False)])
    'micro-batch 1 → 2'
    """
    listed = list(fields)
    own = [one for one in listed if not one.follows] or listed
    return ", ".join(f"{one.option} {one.was} → {one.now}" for one in own)
