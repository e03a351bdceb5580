"""Sequences that differ in length: the longest micro-batch, the allocator over others, and the steps that fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.allocator import replay
from memcalc.allocator.growth import mapped_up_to, reserved_up_to
from memcalc.batches import (
    BUDGETED,
    SEED,
    Lengths,
    MicroBatches,
    Sampling,
    Shape,
    longest_of,
    make,
    order_of,
    parse_lengths,
)
from memcalc.errors import CombinationError
from memcalc.events.passing import PassingTerms
from memcalc.events.stage import Stage, passes
from memcalc.events.writer import StepWriter
from memcalc.planner.request import flag
from memcalc.planner.stage_peaks import Peaks, Replayed, at_stage, has_observed, peaks_of, replayed_from
from memcalc.results.details import LengthFacts
from memcalc.specs.options import BATCHING, BatchInputs
from memcalc.terms.build import build_ledger
from memcalc.terms.pipeline import in_flight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from collections.abc import Sequence as AbstractSequence

    from memcalc.events.log import Event
    from memcalc.grid import Grid
    from memcalc.ledger import Ledger
    from memcalc.planner.request import Request
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Overhead

    ShapedLedger = tuple[ModelOnGrid, Ledger]
    """The model on the grid of one shape, and its ledger."""


REPLAYED = 64
"""Micro-batches of one rank that the allocator is simulated over before the longest comes."""
ONE_JOB = "a search does not know the micro-batch of a budget; estimate and check do"
MARKS = 12
"""Shapes, evenly among all, that are looked at before the boundary between two of them is."""
BEYOND_FLIGHT = 3
"""Micro-batches of a step beyond those in flight: each differs, unlike in a step of equal ones."""


@dataclass(frozen=True)
class JobLengths:
    """The lengths of a job's data, and how its batches are made."""

    lengths: Lengths
    inputs: BatchInputs
    cut: int
    """Where sequences are cut, or the size of a pack [tokens]."""

    @property
    def budgeted(self) -> bool:
        """Whether a micro-batch has a budget of tokens."""
        return self.inputs.batching in BUDGETED

    def sampling(self, grid: Grid) -> Sampling:
        """How a grid of one strategy makes its micro-batches."""
        inputs = self.inputs
        return Sampling(
            rule=inputs.batching,
            micro_batch=grid.micro_batches[0],
            length=self.cut,
            multiple=inputs.pad_multiple,
            budget=inputs.token_budget,
            accumulation=int(np.ravel(grid.accumulation)[0]),
            ranks=grid.layouts[0].dp,
        )


def lengths_of(request: Request, *, searched: bool) -> JobLengths | None:
    """Take the lengths out of a request, which is then about the longest sequence; None where there are none.

    Raises :class:`memcalc.errors.CombinationError` for what says nothing without lengths, or not with them.
    """
    options = {name: request.given.pop(name) for name in BATCHING if name in request.given}
    if "lengths" not in options:
        for name, value in options.items():
            raise CombinationError(flag(name), value, "needs --lengths")
        return None
    lengths = parse_lengths(options["lengths"])
    inputs = BatchInputs.model_validate({**options, "lengths": lengths.text})
    cut = request.given.get("seq_len", lengths.most)
    job = JobLengths(lengths, inputs, int(cut))
    _check(request, job, searched=searched)
    if job.budgeted:
        request.given |= {"seq_len": inputs.token_budget, "micro_batch": 1}
        return job
    longest = min(lengths.most, cut) if inputs.batching in {"pad", "grouped", "flatten"} else cut
    if "seq_len" not in request.given:
        request.assumptions["seq_len"] = f"{longest} (the longest of {lengths.text})"
    request.given["seq_len"] = -(-longest // inputs.pad_multiple) * inputs.pad_multiple
    return job


def _check(request: Request, job: JobLengths, *, searched: bool) -> None:
    inputs = job.inputs
    if not job.budgeted:
        if inputs.token_budget:
            allowed = f"needs --batching {' or '.join(BUDGETED)}"
            raise CombinationError("token-budget", inputs.token_budget, allowed)
        return
    if searched:
        raise CombinationError("batching", inputs.batching, ONE_JOB)
    if not inputs.token_budget:
        raise CombinationError("batching", inputs.batching, "needs --token-budget")
    if "micro_batch" in request.given:
        allowed = f"--batching {inputs.batching} takes as many sequences as its budget holds"
        raise CombinationError("micro-batch", request.given["micro_batch"], allowed)


def refuse_lengths(job: JobLengths, command: str, what: str) -> None:
    """Refuse lengths where a command answers the length itself, or does not know the micro-batch of a budget."""
    if what == "seq-len":
        raise CombinationError("lengths", job.lengths.text, f"{command} seq-len answers the longest: leave them out")
    if job.budgeted:
        raise CombinationError("batching", job.inputs.batching, ONE_JOB)


@dataclass(frozen=True)
class BatchRun:
    """A seeded run of a job's micro-batches, and the longest there can be."""

    job: JobLengths
    sampling: Sampling
    longest: Shape

    @classmethod
    def of(cls, job: JobLengths, grid: Grid) -> BatchRun:
        """The run of a grid of one strategy."""
        sampling = job.sampling(grid)
        return cls(job, sampling, longest_of(job.lengths, sampling))

    @cached_property
    def batches(self) -> MicroBatches:
        """The micro-batches, in order."""
        return make(self.job.lengths, self.sampling)

    def at_longest(self, grid: Grid) -> Grid:
        """The grid of one strategy, its micro-batch the longest there can be."""
        return on_shape(grid, self.longest)


def on_shape(grid: Grid, shape: Shape) -> Grid:
    """A grid of one strategy with another shape of its micro-batches, as many of them a step."""
    rows, tokens = shape
    if (rows, tokens) == (grid.micro_batches[0], grid.fixed.seq_len):
        return grid
    count = int(np.ravel(grid.accumulation)[0])
    update = {"seq_len": tokens, "global_batch": count * grid.layouts[0].dp * rows}
    return replace(grid, fixed=grid.fixed.model_copy(update=update), micro_batches=(rows,))


@dataclass(frozen=True)
class Sequence:
    """A run of micro-batches on a card."""

    model_on: Callable[[Grid], ModelOnGrid]
    """The job's model on a grid."""
    grid: Grid
    """Of one strategy, its micro-batch the longest."""
    overhead: Overhead
    run: BatchRun
    ledgers: dict[Shape, tuple[ModelOnGrid, Ledger]] = field(default_factory=dict)
    verdicts: dict[Shape, str] = field(default_factory=dict)

    def ledger(self, shape: Shape) -> tuple[ModelOnGrid, Ledger]:
        """The model on the grid of a shape, and its ledger."""
        if shape not in self.ledgers:
            census = self.model_on(on_shape(self.grid, shape))
            self.ledgers[shape] = census, build_ledger(census, self.overhead.workspaces, detail=False)
        return self.ledgers[shape]

    def steps(self, stage: int) -> list[list[Shape]]:
        """Steps of one rank, cut to what a stage holds and a few; the last is of the longest alone."""
        flight = at_stage(in_flight(self.grid), stage, self.grid.num_stages)
        steps: list[list[Shape]] = []
        for step in self.run.batches.of_rank():
            if sum(map(len, steps)) >= REPLAYED and len(steps) > 1:
                break
            steps.append(step[: flight + BEYOND_FLIGHT])
        count = min(int(np.ravel(self.grid.accumulation)[0]), flight + 1)
        return [*steps, [self.run.longest] * count]

    def played(self, stage: int) -> Replayed | None:
        """What the allocator shows over the steps; None where the era's allocator had other rules."""
        if self.grid.habits.allocator != "caching":
            return None
        steps = self.steps(stage)
        ledgers = {shape: self.ledger(shape) for shape in {*chain.from_iterable(steps), self.run.longest}}
        space, expandable = self.overhead.room, bool(self.grid.fixed.expandable_segments)
        several = len({*chain.from_iterable(steps)}) > 1

        def events(*, observed: bool = True) -> Iterator[Event]:
            return varying_events(ledgers, steps, self.run.longest, stage, observed=observed)

        reserved = mapped_up_to(events(), space, space) if expandable else reserved_up_to(events(), space)
        if reserved is not None:
            played = Replayed(reserved, reserved, retries=0, flushes=0, runs=True, short=0)
        else:
            result = replay(events(), capacity=space, expandable=expandable)
            if result.out_of_memory and has_observed(ledgers[self.run.longest][1]):
                result = replay(events(observed=False), capacity=space, expandable=expandable)
            # What a sampler reads is seldom what the last flush has left
            flushed = replayed_from(result, self.overhead, result.retries // len(steps))
            played = replace(flushed, reserved=result.peak_reserved)
        return replace(played, grows=several and not expandable)

    def verdict(self, shape: Shape) -> str:
        """Whether steps of nothing but this micro-batch fit."""
        if shape not in self.verdicts:
            census, ledger = self.ledger(shape)
            self.verdicts[shape] = peaks_of(census, ledger, self.overhead).verdict
        return self.verdicts[shape]

    def facts(self, alone: Peaks, peaks: Peaks) -> LengthFacts:
        """What an estimate says of it; ``alone`` are the peaks where every micro-batch is the longest."""
        lengths, batches = self.run.job.lengths, self.run.batches
        ran = alone.replayed is not None and alone.verdict != "does-not-fit"
        shapes = list(chain.from_iterable(self.steps(peaks.top.stage))) if ran else []
        fitting, limit = self.share({"fits"}, alone)
        running, _ = self.share({"fits", "tight"}, alone)
        return LengthFacts(
            lengths=lengths.text,
            batching=self.run.sampling.rule,
            sequences=len(lengths.tokens),
            median=lengths.quantile(0.5),
            p99=lengths.quantile(0.99),
            longest=lengths.most,
            rows=self.run.longest[0],
            tokens=self.run.longest[1],
            mean_tokens=round(float((batches.rows * batches.tokens).mean()), 1),
            replayed=len(shapes),
            shapes=len(set(shapes)),
            alone=alone.top.reserved,
            in_sequence=peaks.top.reserved,
            grows=peaks.grows,
            steps=batches.steps,
            fitting=fitting,
            running=running,
            fitting_tokens=limit,
            seed=SEED,
        )

    def share(self, verdicts: set[str], alone: Peaks) -> tuple[float, int]:
        """Share of the steps whose largest micro-batch has such a verdict, and the tokens of the largest that has."""
        rows, tokens = self.run.longest
        if alone.verdict in verdicts:
            return 1.0, rows * tokens
        batches = self.run.batches
        shapes = sorted(set(zip(batches.rows.tolist(), batches.tokens.tolist(), strict=True)), key=order_of)
        low = self._first_that_fails(shapes, verdicts)
        if not low:
            return 0.0, 0
        limit = order_of(shapes[low - 1])
        size = batches.rows * batches.tokens
        fits = (size < limit[0]) | ((size == limit[0]) & (batches.tokens <= limit[1]))
        if not batches.steps or batches.step[-1] == 0:
            return float(fits.mean()) ** int(np.count_nonzero(batches.step == 0)), limit[0]
        failing = np.unique(batches.step[~fits]).size
        return 1 - failing / batches.steps, limit[0]

    def _first_that_fails(self, shapes: list[Shape], verdicts: set[str]) -> int:
        """The place of the smallest shape without such a verdict, among ascending ones.

        A larger one may fit again, as where a request fails and the cache is given back; it counts as one that fails.
        """
        marks = sorted({len(shapes) * mark // MARKS for mark in range(MARKS)} | {len(shapes) - 1})
        high = next((mark for mark in marks if self.verdict(shapes[mark]) not in verdicts), len(shapes))
        low = max((mark + 1 for mark in marks if mark < high), default=0)
        while low < high:
            middle = (low + high) // 2
            if self.verdict(shapes[middle]) in verdicts:
                low = middle + 1
            else:
                high = middle
        return low


def varying_events(
    ledgers: Mapping[Shape, ShapedLedger],
    steps: AbstractSequence[AbstractSequence[Shape]],
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
        steps: AbstractSequence[AbstractSequence[Shape]],
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
