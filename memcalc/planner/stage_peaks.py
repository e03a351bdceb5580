"""The three figures of a strategy, and one step over time: the ledger, and what a replay of the allocator holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from memcalc.allocator import Replay, mapped_up_to, replay, reserved_up_to
from memcalc.events import step_events, telling_ranks
from memcalc.ledger import PHASES, Ledger, add_up
from memcalc.results.estimates import Interval, Peak, StagePeak, Verdict, flushed
from memcalc.terms.head import OBSERVED
from memcalc.terms.model_on_grid import ModelOnGrid
from memcalc.terms.overhead import SHARDED
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.events import Rank
    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.overhead import Overhead


# How often a full card makes the allocator give its cache back, step after step.


def flushes_of(replay: Replay, accumulation: int) -> int:
    """How often the cache is given back in a step after the first, in which the optimizer's states appear.

    A replay has a few micro-batches of a step with many: those that it leaves out flush as its last whole one does.
    """
    marks = replay.retries_at
    updates = [index for index, (name, _) in enumerate(marks) if name == "step"]
    begin = updates[-2] if len(updates) > 1 else updates[0] if updates else len(marks)
    forwards = [index for index in range(begin, len(marks)) if marks[index][0] == "forward-last"]
    if not forwards:
        return replay.retries
    last, passed = forwards[-1], 0
    end = last
    while end < len(marks) - 1 and passed <= 1 and marks[end][0] != "step":
        end += 1
        passed += marks[end][0] == "loss"
    repeated = max(accumulation - len(forwards), 0)
    return replay.retries - marks[forwards[0]][1] + repeated * (marks[end][1] - marks[last][1])


P = TypeVar("P", bound=Peak)


def at_stage(array: Array, stage: int, stages: int) -> int:
    """A grid array of one strategy, on a stage [bytes]."""
    return int(np.broadcast_to(array, (1, stages, 1, 1, 1, 1, 1))[0, stage].item())


@dataclass(frozen=True)
class Peaks:
    """The figures of a grid of one strategy, by stage and on the stage that reserves most."""

    stages: tuple[StagePeak, ...]
    top: StagePeak
    replayed: Replayed | None
    predicted: int
    """Reserved bytes of the top stage that mechanisms predict; on a full card more than it can reserve."""
    overhead: Overhead
    replays: tuple[Replayed, ...] = ()
    """Of all stages that were replayed."""
    beside: str = ""
    """What host memory lacks, or what the job is told to do beside its steps and cannot, in a few words."""

    @property
    def allocated(self) -> int:
        """The largest allocated peak of all stages [bytes]."""
        return max(stage.allocated for stage in self.stages)

    def at(self, kind: type[P]) -> P:
        """The three figures of the stage that reserves most, and where its peak stands, as a record."""
        return kind(**{name: getattr(self.top, name) for name in Peak.model_fields})

    def on_card(self) -> Peaks:
        """The same with no stage above what the card has: the allocator gives its cache back before it asks again."""
        most, capacity = self.overhead.room, self.overhead.capacity
        stages = tuple(
            stage.model_copy(update={"reserved": min(stage.reserved, most), "device": min(stage.device, capacity)})
            for stage in self.stages
        )
        return replace(self, stages=stages, top=stages[self.top.stage])

    @property
    def interval(self) -> Interval:
        """The range of the device figure that measured runs support, and all that was seen where there were retries.

        So it is too where each new shape adds to the cache: a job meets more shapes than are replayed.
        """
        low, high = self.overhead.range(self.predicted)
        live = self.overhead.beside(self.top.allocated)
        if self.is_flushed or self.grows:  # what a sampler reads lies between what is live and the whole card
            low, high = min(low, live), self.overhead.capacity
        elif not self.runs and self._holds_live:  # in another order of requests the holes may be smaller
            low = min(low, live)
        known = self.overhead.unexplained
        return Interval(low=low, high=high, coverage=known.coverage, allocator=known.name, kind=known.kind)

    @property
    def runs(self) -> bool:
        """Whether every request is met: what is live fits, and where it is replayed the holes between it do too."""
        return self._holds_live and all(stage.runs for stage in self.replays)

    @property
    def _holds_live(self) -> bool:
        """Whether what is live at once fits, so that only the holes between it can make a request fail."""
        return self.overhead.beside(self.allocated) <= self.overhead.capacity

    @property
    def is_flushed(self) -> bool:
        """Whether it runs only because the allocator gives its cache back."""
        retried = any(stage.retries for stage in self.replays)
        return self.runs and (retried or self.overhead.device(self.predicted) > self.overhead.capacity)

    @property
    def grows(self) -> bool:
        """Whether what is reserved grows with each new shape of a micro-batch."""
        return self.runs and any(stage.grows for stage in self.replays)

    @property
    def often(self) -> str:
        """When the cache is given back, where it is."""
        return flushed(self.flushes) if self.flushes else "now and then" if self.grows else "in the first step"

    @property
    def flushes(self) -> int:
        """How often a step gives the cache back; where that is not replayed at least once, on a card that is full."""
        return 0 if not self.is_flushed else max((stage.flushes for stage in self.replays), default=1)

    @property
    def verdict(self) -> Verdict:
        """Fits; tight where one run of twenty would not, or the cache has to be given back; or does not."""
        if not self.runs or self.beside:
            return "does-not-fit"
        return "tight" if self.is_flushed or self.overhead.limit(self.predicted) > self.overhead.capacity else "fits"

    @property
    def reason(self) -> str:
        """Why it does not fit; empty where it does."""
        if self.runs:
            return self.beside
        over = self.overhead.device(self.predicted) - self.overhead.capacity
        if over > 0 and not self._holds_live:
            return f"the GPU lacks {over / GIB:.1f} GiB"
        played = max(self.replays, key=lambda stage: stage.short)
        size, short, cached = (part / GIB for part in (played.request, played.short, played.cached))
        unusable = f"the allocator has {cached:.2f} GiB free, in pieces that are too small"
        return f"a request of {size:.2f} GiB fails: {unusable}, and the GPU lacks {short:.2f} GiB"


REPLAYED_STAGES = 4
"""Stages of a pipeline up to which each is replayed on its own; of deeper ones only that which reserves most."""


def peaks_of(
    census: ModelOnGrid,
    ledger: Ledger,
    overhead: Overhead,
    *,
    only_safe: bool = False,
    only_running: bool = False,
    also: Callable[[int], Replayed | None] | None = None,
) -> Peaks:
    """The figures of a grid of one strategy, replayed on each stage of a short pipeline.

    With ``only_running`` it ends with UnsafeError where more is allocated than the card has, which no replay mends;
    with ``only_safe`` it may end so where the strategy is tight or does not fit. ``also`` is another replay of a stage:
    what is reserved is the larger of both.
    """
    stages = stage_peaks(census, ledger, overhead)
    if only_running and overhead.beside(max(stage.allocated for stage in stages)) > overhead.capacity:
        raise UnsafeError
    closed = ledger.reserved()
    wanted = range(len(stages)) if len(stages) <= REPLAYED_STAGES else [_largest(stages)]
    # Where more than is safe is allocated, nothing that a replay shows makes it so: what is reserved is never less
    if only_safe and _is_replayed(census) and max(stages[stage].allocated for stage in wanted) > overhead.most_safe:
        raise UnsafeError
    # The stage that reserves most comes first: where it is not safe, no other one has to be replayed
    ahead = sorted(wanted, key=lambda stage: -stages[stage].reserved) if only_safe else wanted
    played_stages = {stage: replayed(census, ledger, overhead, stage, only_safe=only_safe) for stage in ahead}
    by_stage = {stage: played_stages[stage] for stage in wanted}
    if also is not None:
        by_stage = {stage: larger(one_shape, also(stage)) for stage, one_shape in by_stage.items()}
    predicted = {stage: at_stage(closed, stage, len(stages)) for stage in range(len(stages))}
    for stage, played in by_stage.items():
        if played is not None:
            # Where a request fails nothing was measured beyond it, and the closed form says how much is wanted
            least = played.reserved if played.runs else predicted[stage]
            predicted[stage] = max(least, stages[stage].allocated)
            stages[stage] = _with_reserved(stages[stage], predicted[stage], overhead)
    replays = {stage: played for stage, played in by_stage.items() if played is not None}
    failing = [stage for stage, played in replays.items() if not played.runs]
    top = max(failing or by_stage, key=lambda stage: predicted[stage])
    peaks = Peaks(tuple(stages), stages[top], by_stage[top], predicted[top], overhead, tuple(replays.values()))
    return peaks.on_card() if peaks.runs else peaks


def _is_replayed(census: ModelOnGrid) -> bool:
    return census.grid.habits.allocator == "caching"


def _largest(stages: list[StagePeak]) -> int:
    return max(range(len(stages)), key=lambda stage: stages[stage].reserved)


def _with_reserved(peak: StagePeak, predicted: int, overhead: Overhead) -> StagePeak:
    return peak.model_copy(update={"reserved": overhead.reserved(predicted), "device": overhead.device(predicted)})


def stage_peaks(census: ModelOnGrid, ledger: Ledger, overhead: Overhead) -> list[StagePeak]:
    """Every stage's own peak, with the closed form of what is reserved."""
    grid = census.grid
    layers, pools = add_up(list(census.layers)), ledger.reserved()
    phases = {phase: ledger.phase(phase) for phase in PHASES}
    return [_stage_peak(phases, pools, layers, grid, overhead, stage) for stage in range(grid.num_stages)]


def _stage_peak(
    phases: dict[str, Array], pools: Array, layers: Array, grid: Grid, overhead: Overhead, stage: int
) -> StagePeak:
    count = grid.num_stages
    by_phase = {phase: at_stage(bytes_, stage, count) for phase, bytes_ in phases.items()}
    phase = max(by_phase, key=lambda name: by_phase[name])
    reserved = at_stage(pools, stage, count)
    return StagePeak(
        stage=stage,
        allocated=by_phase[phase],
        reserved=overhead.reserved(reserved),
        device=overhead.device(reserved),
        phase=phase,
        layers=at_stage(layers, stage, count),
    )


Watch = Callable[[tuple[str, int, int, int, str], int, int], None]
"""What is told each event, and the bytes that are allocated and reserved after it."""


class UnsafeError(Exception):
    """A strategy is tight or does not fit; only safe ones were wanted, so that nothing more is known of it.

    ``stage`` is that on which a replay reserves more than is safe; None where it was not replayed.
    """

    def __init__(self, stage: int | None = None) -> None:
        super().__init__(stage)
        self.stage = stage


@dataclass(frozen=True)
class Replayed:
    """What a replay on one pipeline stage shows."""

    reserved: int
    """The peak; after the last time that the allocator gave its cache back, where it had to [bytes]."""
    most: int
    """The largest figure at any time [bytes]."""
    retries: int
    """Requests of two steps for which cached segments were given back to the driver."""
    flushes: int
    """Of them those of the second step, with the micro-batches that it stands for."""
    runs: bool
    """Whether every request was met."""
    short: int
    """What the driver lacked for the request that was not met [bytes]."""
    request: int = 0
    """The request that was not met [bytes]."""
    cached: int = 0
    """Free parts of segments in use at that moment, which no flush gives back [bytes]."""
    grows: bool = False
    """Whether each new shape of a micro-batch adds to what the cache keeps, for as long as the card has room."""


def replayed(
    census: ModelOnGrid, ledger: Ledger, overhead: Overhead, stage: int, *, only_safe: bool = False
) -> Replayed | None:
    """Replay two steps on the card that the overhead leaves; None where the era's allocator had other rules.

    With ``only_safe`` it may end with UnsafeError, as soon as more is reserved than is safe or the cache is given back.
    """
    if not _is_replayed(census):
        return None
    by_rank = [
        _replayed(census, ledger, overhead, stage, rank, only_safe=only_safe) for rank in telling_ranks(census, stage)
    ]
    return reduce(larger_of, by_rank)


def fullest_rank(census: ModelOnGrid, ledger: Ledger, overhead: Overhead, stage: int) -> Rank:
    """The rank of a stage that reserves most."""
    ranks = telling_ranks(census, stage)
    if len(ranks) == 1:
        return ranks[0]
    return max(ranks, key=lambda rank: _replayed(census, ledger, overhead, stage, rank, only_safe=False).reserved)


def _replayed(
    census: ModelOnGrid, ledger: Ledger, overhead: Overhead, stage: int, rank: Rank, *, only_safe: bool
) -> Replayed:
    ends = only_safe and not has_observed(ledger)
    most = min(overhead.room, overhead.most_safe) if ends else overhead.room
    events = step_events(census, ledger, stage, rank)
    grows = census.grid.fixed.expandable_segments
    reserved = mapped_up_to(events, most, overhead.room) if grows else reserved_up_to(events, most)
    if reserved is not None:
        return Replayed(reserved, reserved, retries=0, flushes=0, runs=True, short=0)
    if ends:
        raise UnsafeError(stage)
    two_steps = simulate(census, ledger, overhead, stage, rank)
    flushes = flushes_of(two_steps, at_stage(census.grid.accumulation, stage, census.grid.num_stages))
    return replayed_from(two_steps, overhead, flushes)


def replayed_from(result: Replay, overhead: Overhead, flushes: int) -> Replayed:
    """What a replay on a card shows, in which the cache is given back ``flushes`` times a step."""
    reserved, failed = result.reserved_after_flush if result.retries else result.peak_reserved, result.out_of_memory
    short = max(failed.reserved + failed.segment - overhead.room, 0) if failed else 0
    request, cached = (failed.size, failed.reserved - failed.allocated) if failed else (0, 0)
    return Replayed(
        reserved, result.peak_reserved, result.retries, flushes, failed is None, short, request=request, cached=cached
    )


def larger(a: Replayed | None, b: Replayed | None) -> Replayed | None:
    """The worse of two replays, figure by figure."""
    return a if a is None or b is None else larger_of(a, b)


def larger_of(a: Replayed, b: Replayed) -> Replayed:
    """The worse of two, where both were replayed."""
    sizes = max(a.reserved, b.reserved), max(a.most, b.most), max(a.retries, b.retries), max(a.flushes, b.flushes)
    failed = a if a.short >= b.short else b
    return Replayed(
        *sizes, a.runs and b.runs, failed.short, request=failed.request, cached=failed.cached, grows=a.grows or b.grows
    )


def simulate(
    census: ModelOnGrid,
    ledger: Ledger,
    overhead: Overhead,
    stage: int,
    rank: Rank = "middle",
    *,
    watch: Callable[[], Watch] | None = None,
    limited: bool = True,
) -> Replay:
    """Two steps through the allocator, on the card that the overhead leaves or (not ``limited``) without an end.

    ``watch`` makes what each replay tells its events to; the last one counts.
    """
    space, expandable = overhead.room if limited else None, bool(census.grid.fixed.expandable_segments)
    events = step_events(census, ledger, stage, rank)
    result = replay(events, capacity=space, expandable=expandable, watch=watch and watch())
    if result.out_of_memory and (has_observed(ledger) or leaves_units(census)):
        # What was only ever seen as reserved, or is left by wrapping, can be given back, so that it never stops a run
        events = step_events(census, ledger, stage, rank, observed=False)
        result = replay(events, capacity=space, expandable=expandable, watch=watch and watch())
    return result


def leaves_units(census: ModelOnGrid) -> bool:
    """Whether FSDP 1's wrapping leaves free blocks, of which later requests may take other parts than in the replay."""
    habits = census.grid.habits
    return habits.flat_units and habits.gather == "blocks" and max(census.grid.zeros) >= SHARDED


def has_observed(ledger: Ledger) -> bool:
    """Whether there is memory that measured runs reserve although no tensor was found for it."""
    return any(term.source == OBSERVED for term in ledger.holes)
