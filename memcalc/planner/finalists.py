"""The best strategies of a search, replayed: what the allocator reserves decides which of them run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memcalc.errors import MissingError
from memcalc.frameworks import grows_segments
from memcalc.grid import Grid
from memcalc.planner import answer, axes
from memcalc.planner.answer import strategy_of
from memcalc.planner.budget import lacking, offload_need
from memcalc.planner.job import PlanJob
from memcalc.planner.occasions import asked_for, fails_beside, occasions_of, uncounted, with_beside, with_occasions
from memcalc.planner.stage_peaks import Peaks, UnsafeError, peaks_of
from memcalc.results.estimates import ExposedMessages, StepTime, mended
from memcalc.terms.build import build_ledger
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import overhead_of
from memcalc.timing import rates_for, step_times
from memcalc.timing.forecast import exposed_by_kind, forecast

if TYPE_CHECKING:
    from memcalc.ledger import Ledger
    from memcalc.planner.job import PlanJob
    from memcalc.planner.search import Candidate
    from memcalc.planner.varying import BatchRun, Sequence
    from memcalc.results.estimates import Estimate
    from memcalc.specs.hardware import GPU, Node
    from memcalc.specs.job import JobRecord
    from memcalc.specs.strategy import Strategy
    from memcalc.terms.overhead import Overhead


@dataclass(frozen=True)
class SimulatedPlan:
    """A strategy that the search found, with its replayed figures."""

    candidate: Candidate
    census: ModelOnGrid
    """The model on the grid of this strategy alone, with all its pipeline stages."""
    peaks: Peaks

    @property
    def single(self) -> Grid:
        """The grid of this strategy alone."""
        return self.census.grid

    @property
    def is_tight(self) -> bool:
        """Whether the upper end of its range does not fit."""
        return self.peaks.verdict == "tight"

    @property
    def strategy(self) -> Strategy:
        """The strategy, every field resolved."""
        return strategy_of(self.candidate.grid, self.candidate.index)


def finalist(job: PlanJob, candidate: Candidate, *, only_safe: bool = False, only_whole: bool = False) -> SimulatedPlan:
    """One found strategy, replayed; with ``only_safe`` UnsafeError may say that it is tight or does not fit.

    With ``only_whole`` it says so before any replay of one that allocates more than there is, or that cannot do what
    the job does beside its steps. What a job, or one that was made from it, has replayed before is not replayed again.
    """
    single = single_grid(candidate)
    census, overhead = job.on(single), overhead_of(job.gpu, single, candidate.layout)
    case = id(job.model), id(job.node), single, overhead, only_whole
    _, _, known = job.replayed.setdefault(case, (job.model, job.node, {}))
    if known.keys().isdisjoint({False, only_safe}):
        try:
            # Of a safe one all figures are known, whoever asks for them
            searched = (candidate.grid, candidate.index) if only_whole else None
            known[False] = _peaks(job, census, overhead, searched, only_safe=only_safe)
        except UnsafeError:
            known[only_safe] = None
    peaks = known.get(False)
    if peaks is None:
        raise UnsafeError
    return SimulatedPlan(candidate, census, peaks)


def _peaks(
    job: PlanJob,
    census: ModelOnGrid,
    overhead: Overhead,
    searched: tuple[Grid, tuple[int, ...]] | None,
    *,
    only_safe: bool,
) -> Peaks:
    """Figures of a strategy alone; UnsafeError as :func:`finalist` has it, ``only_whole`` if it was ``searched``."""
    if searched is not None and fails_beside(job, census, overhead, searched):
        raise UnsafeError
    ledger = build_ledger(census, overhead.workspaces, detail=False)
    peaks = peaks_of(census, ledger, overhead, only_safe=only_safe, only_running=searched is not None)
    return peaks if searched is not None else with_beside(peaks, census, job.node)


def run_of(job: PlanJob, grid: Grid) -> tuple[BatchRun | None, Grid]:
    """The micro-batches of a job whose sequences differ in length, and a grid of one strategy with the longest."""
    if job.lengths is None:
        return None, grid
    from memcalc.planner.varying import BatchRun

    lengths = job.lengths
    if not lengths.budgeted:  # a remedy may cut sequences that the job does not
        lengths = replace(lengths, cut=min(lengths.cut, grid.fixed.seq_len))
    run = BatchRun.of(lengths, grid)
    return run, run.at_longest(grid)


def _sequence(job: PlanJob, grid: Grid, overhead: Overhead, run: BatchRun) -> Sequence:
    from memcalc.planner.varying import Sequence

    return Sequence(job.on, grid, overhead, run)


def in_sequence(job: PlanJob, plan: SimulatedPlan) -> SimulatedPlan:
    """The same with the holes that micro-batches of other lengths leave before the longest, as an estimate has them.

    A search judges the longest alone: a replay of all takes ten times as long.
    """
    run, grid = run_of(job, plan.single)
    if run is None:
        return plan
    census, overhead = job.on(grid), overhead_of(job.gpu, grid, grid.layouts[0])
    ledger = build_ledger(census, overhead.workspaces, detail=False)
    peaks = peaks_of(census, ledger, overhead, also=_sequence(job, grid, overhead, run).played)
    return replace(plan, census=census, peaks=with_beside(peaks, census, job.node))


def single_ledger(job: PlanJob, candidate: Candidate) -> tuple[ModelOnGrid, Ledger, Overhead]:
    """The ledger of one found strategy alone, with all its pipeline stages."""
    grid = single_grid(candidate)
    overhead = overhead_of(job.gpu, grid, candidate.layout)
    census = job.on(grid)
    return census, build_ledger(census, overhead.workspaces, detail=False), overhead


def single_grid(candidate: Candidate) -> Grid:
    """The grid of one found strategy alone, with all its pipeline stages."""
    grid, i = candidate.grid, candidate.index
    return Grid(
        grid.fixed,
        (grid.layouts[i[0]],),
        (grid.precisions[i[2]],),
        (grid.recomputes[i[3]],),
        (grid.zeros[i[4]],),
        (grid.offloads[i[5]],),
        (grid.micro_batches[i[6]],),
        every_stage=True,
    )


def time_of(census: ModelOnGrid, gpu: GPU, node: Node) -> StepTime:
    """The predicted step of the one strategy of a census by its parts [s], with what is said of it."""
    rates = rates_for(gpu, census.grid)
    times = step_times(census, gpu, node, rates)
    parts = {name: float(np.max(part)) for name, part in times._asdict().items()}
    step, messages = sum(parts.values()), ExposedMessages(**exposed_by_kind(census, gpu, node, rates))
    return StepTime(step=step, **parts, messages=messages, **forecast(census, gpu, node, step)._asdict())


def unchecked_warnings(
    times: Mapping[str, StepTime], everyone: str = "all plans", called: Callable[[list[str]], str] = ", ".join
) -> list[str]:
    """Which times no published run validates, and why, by the names of what takes them.

    All of them together are ``everyone``; several are what ``called`` makes of their names.
    """
    by_text: dict[str, list[str]] = {}
    for name, time in times.items():
        if not time.validated:
            low, high = time.low / time.step, time.high / time.step
            text = f"{time.basis}; step times × {low:.1f} to × {high:.1f}"
            by_text.setdefault(text, []).append(name)
    total = len(times) if len(times) > 1 else 0
    return [
        f"times of {everyone if len(names) == total else called(names)} are {text}." for text, names in by_text.items()
    ]


LARGE_CACHE = 0.1
"""Share of the device figure above which the allocator's cache is worth a remedy."""


@dataclass(frozen=True)
class One:
    """One strategy of a job, as the grid whose axes have length one."""

    job: PlanJob
    grid: Grid
    record: JobRecord
    """What was asked."""
    run: BatchRun | None = None
    """The micro-batches of sequences that differ in length; the grid has the longest of them."""

    @classmethod
    def of(cls, job: PlanJob, record: JobRecord) -> One:
        """The one strategy of a job.

        Raises :class:`memcalc.errors.CombinationError` where it is impossible.
        """
        grid = axes.single_strategy(job.request, job.model, job.gpu, job.node)
        run, grid = run_of(job, grid)
        return cls(job, grid, record, run)

    @cached_property
    def census(self) -> ModelOnGrid:
        """The model on that grid."""
        return self.job.on(self.grid)

    def estimate(
        self, *, timeline: bool = False, advice: bool = False, budget: bool = True, remarks: bool = True
    ) -> Estimate:
        """The answer of ``memcalc estimate``; with ``timeline`` also one step, allocation by allocation.

        With ``advice`` a large cache, or one on a full card, is compared with what expandable segments leave of it;
        with ``budget`` the answer says what the states leave for activations. Without ``remarks`` no figure is another,
        but it is not said whether recomputation is worth its time, nor what happens beside the steps unasked.
        """
        job, grid = self.job, self.grid
        overhead = overhead_of(job.gpu, grid, grid.layouts[0])
        sequence = self._sequence(grid, overhead)
        result = answer.estimate_of(
            self.census, job.gpu, job.node, overhead, job.request, self.record, timeline=timeline, budget=budget,
            sequence=sequence, remarks=remarks,
        )  # fmt: skip
        if remarks or asked_for(grid.fixed):
            occasions = occasions_of(self.census, overhead, job.node)
            result = with_occasions(result, occasions, job.node, uncounted(self.census, occasions))
        result = result.model_copy(update={"time": self._time})
        able = job.gpu.vendor == "nvidia" and grows_segments(grid.fixed.framework)
        large = result.components.reserve > LARGE_CACHE * result.peak.device or result.verdict == "tight"
        # What is live at once fits, so that a request may fail only because of the holes between it
        holed = result.verdict == "does-not-fit" and overhead.beside(result.peak.allocated) <= overhead.capacity
        if not advice or not able or grid.fixed.expandable_segments or not (large or holed):
            return result
        peaks, beside = self._expandable(), any(each.certain and not each.fits for each in result.occasions)
        verdict = "does-not-fit" if beside else peaks.verdict
        if not large and not mended(result.verdict, verdict):
            return result
        return result.model_copy(update={"expandable_device": peaks.top.device, "expandable_verdict": verdict})

    def figures(self) -> Estimate:
        """The estimate without what is said beside its figures."""
        return self.estimate(budget=False, remarks=False)

    def _sequence(self, grid: Grid, overhead: Overhead) -> Sequence | None:
        return None if self.run is None else _sequence(self.job, grid, overhead, self.run)

    @property
    def _time(self) -> StepTime | None:
        try:
            return self.time()
        except MissingError:
            return None

    def _expandable(self) -> Peaks:
        """The figures with expandable segments."""
        fixed = self.grid.fixed.model_copy(update={"expandable_segments": True})
        grid = replace(self.grid, fixed=fixed)
        overhead = overhead_of(self.job.gpu, grid, grid.layouts[0])
        census, sequence = self.job.on(grid), self._sequence(grid, overhead)
        ledger = build_ledger(census, overhead.workspaces, detail=False)
        peaks = peaks_of(census, ledger, overhead, also=sequence.played if sequence else None)
        return replace(peaks, beside=lacking(offload_need(census, self.job.node), self.job.node))

    def time(self) -> StepTime:
        """The predicted step, also of a strategy that does not fit."""
        return time_of(self.census, self.job.gpu, self.job.node)
