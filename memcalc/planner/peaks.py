"""The three figures of a strategy: allocated from the ledger, reserved from a replay, device with all else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memcalc import results
from memcalc.ledger import PHASES, Ledger
from memcalc.planner.replayed import Replayed, replayed
from memcalc.sums import add_up
from memcalc.terms.census import Census

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.grid import Grid
    from memcalc.terms import Overhead


def at_stage(array: Array, stage: int, stages: int) -> int:
    """A grid array of one strategy, on a stage [bytes]."""
    return int(np.broadcast_to(array, (1, stages, 1, 1, 1, 1, 1))[0, stage].item())


@dataclass(frozen=True)
class Peaks:
    """The figures of a grid of one strategy, by stage and on the stage that reserves most."""

    stages: tuple[results.StagePeak, ...]
    top: results.StagePeak
    replayed: Replayed | None
    predicted: int
    """Reserved bytes of the top stage that mechanisms predict."""
    overhead: Overhead

    @property
    def allocated(self) -> int:
        """The largest allocated peak of all stages [bytes]."""
        return max(stage.allocated for stage in self.stages)

    @property
    def interval(self) -> results.Interval:
        """The range of the device figure that measured runs support, and all that was seen where there were retries."""
        low, high = self.overhead.range(self.predicted)
        if self.replayed and self.replayed.retries:
            low = min(low, self.allocated + self.overhead.context)
            high = max(high, self.overhead.device(self.replayed.most))
        known = self.overhead.unexplained
        return results.Interval(low=low, high=high, coverage=known.coverage, allocator=known.name)

    @property
    def verdict(self) -> results.Verdict:
        """Fits; tight where one run of twenty would not, or the allocator had to retry; or does not."""
        if self.overhead.device(self.predicted) > self.overhead.capacity or (self.replayed and not self.replayed.runs):
            return "does-not-fit"
        retried = self.replayed is not None and self.replayed.retries > 0
        return "tight" if retried or self.overhead.limit(self.predicted) > self.overhead.capacity else "fits"


REPLAYED_STAGES = 4
"""Stages of a pipeline up to which each is replayed on its own; of deeper ones only that which reserves most."""


def peaks_of(census: Census, ledger: Ledger, overhead: Overhead, *, only_safe: bool = False) -> Peaks:
    """The figures of a grid of one strategy, replayed on each stage of a short pipeline.

    With ``only_safe`` it may end with UnsafeError where the strategy is tight or does not fit.
    """
    stages = stage_peaks(census, ledger, overhead)
    closed = ledger.reserved()
    wanted = range(len(stages)) if len(stages) <= REPLAYED_STAGES else [_largest(stages)]
    by_stage = {stage: replayed(census, ledger, overhead, stage, only_safe=only_safe) for stage in wanted}
    predicted = {stage: at_stage(closed, stage, len(stages)) for stage in range(len(stages))}
    for stage, played in by_stage.items():
        if played is not None:
            # Where a request fails nothing was measured beyond it, and the closed form says how much is wanted
            least = played.reserved if played.runs else predicted[stage]
            predicted[stage] = max(least, stages[stage].allocated)
            stages[stage] = _with_reserved(stages[stage], predicted[stage], overhead)
    top = max(by_stage, key=lambda stage: predicted[stage])
    return Peaks(tuple(stages), stages[top], by_stage[top], predicted[top], overhead)


def _largest(stages: list[results.StagePeak]) -> int:
    return max(range(len(stages)), key=lambda stage: stages[stage].reserved)


def _with_reserved(peak: results.StagePeak, predicted: int, overhead: Overhead) -> results.StagePeak:
    return peak.model_copy(update={"reserved": overhead.reserved(predicted), "device": overhead.device(predicted)})


def stage_peaks(census: Census, ledger: Ledger, overhead: Overhead) -> list[results.StagePeak]:
    """Every stage's own peak, with the closed form of what is reserved."""
    grid = census.grid
    layers, pools = add_up(list(census.layers)), ledger.reserved()
    phases = {phase: ledger.phase(phase) for phase in PHASES}
    return [_stage_peak(phases, pools, layers, grid, overhead, stage) for stage in range(grid.num_stages)]


def _stage_peak(
    phases: dict[str, Array], pools: Array, layers: Array, grid: Grid, overhead: Overhead, stage: int
) -> results.StagePeak:
    """One stage's three figures and the phase of its peak."""
    count = grid.num_stages
    by_phase = {phase: at_stage(bytes_, stage, count) for phase, bytes_ in phases.items()}
    phase = max(by_phase, key=lambda name: by_phase[name])
    reserved = at_stage(pools, stage, count)
    return results.StagePeak(
        stage=stage,
        allocated=by_phase[phase],
        reserved=overhead.reserved(reserved),
        device=overhead.device(reserved),
        phase=phase,
        layers=at_stage(layers, stage, count),
    )
