"""One step over time on a stage: what is alive by component and phase, from a replay of the allocator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memcalc.allocator import Replay
from memcalc.ledger import COMPONENTS, Ledger
from memcalc.planner.stage_peaks import REPLAYED_STAGES, fullest_rank, simulate
from memcalc.results.details import Timeline, TimelinePart
from memcalc.terms.model_on_grid import ModelOnGrid

if TYPE_CHECKING:
    from memcalc.terms.overhead import Overhead

RUNS = 160
"""Runs of events of which the least and the most are kept."""
GRADIENTS = {
    "gradient buffer", "gradient of the embedding", "gradient of the tied embedding", "gradients that the step reads",
    "gradients, added up", "sum of gradients", "share of the gradients", "sharded gradients",
}  # fmt: skip
OF_WEIGHTS = (" weight", " table", " adapter")
"""How the gradient of a weight is called in a block's own order; others are of what flows between operators."""
BUFFERS = {
    "all-gather output", "flat gradient", "gathered flat parameter", "gathered weights", "reduce-scatter input",
    "shard, cast",
}  # fmt: skip
"""Names that the units of sharded weights give what they allocate; other names are terms, or tensors of a block."""

_Event = tuple[str, int, int, int, str]


@dataclass
class Recorder:
    """The last step of a replay, event by event."""

    terms: dict[str, str]
    """Component of each term, by name."""
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    parts: list[TimelinePart] = field(default_factory=list)
    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COMPONENTS[:-1], 0))
    stacked: list[tuple[int, ...]] = field(default_factory=list)
    _alive: dict[int, tuple[str, int]] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)
    _phase: str = ""
    _records: bool = False

    def __call__(self, event: _Event, allocated: int, reserved: int) -> None:
        """Take note of what is held after an event."""
        kind, key, size, _, name = event
        if kind == "mark":
            self._begin(name)
            return
        if kind == "alloc":
            component = self.component(name)
            self._alive[key] = component, size
            self.live[component] += size
        elif kind == "free":
            component, size = self._alive.pop(key)
            self.live[component] -= size
        if self._records:
            self.allocated.append(allocated)
            self.reserved.append(reserved)
            self.stacked.append(tuple(self.live.values()))

    def component(self, name: str) -> str:
        """The component of what an event allocates."""
        if name in GRADIENTS or (name.startswith("gradient of ") and name.endswith(OF_WEIGHTS)):
            return "gradients"
        return "buffers" if name in BUFFERS else self.terms.get(name, "activations")

    def _begin(self, phase: str) -> None:
        """A phase begins; a step after the first begins with the first forward after an optimizer's step."""
        if phase == "forward-last" and self._phase == "step":
            self._records, self._seen = True, {}
            for record in (self.allocated, self.reserved, self.parts, self.stacked):
                record.clear()
        self._phase = phase
        index = self._seen.get(phase, 0)
        self._seen[phase] = index + 1
        if self._records:
            micro_batch = -1 if phase == "step" else index
            self.parts.append(TimelinePart(position=len(self.allocated), phase=phase, micro_batch=micro_batch))

    def kept(self) -> list[int]:
        """The events that are drawn: of each run those where least and most is allocated, and most reserved."""
        count = len(self.allocated)
        starts = sorted({count * run // RUNS for run in range(RUNS)} | {part.position for part in self.parts})
        result: set[int] = set()
        for start, end in zip(starts, [*starts[1:], count], strict=True):
            if start < end:
                run = range(start, end)
                result |= {start, end - 1, min(run, key=self.allocated.__getitem__)}
                result |= {max(run, key=figures.__getitem__) for figures in (self.allocated, self.reserved)}
        return sorted(result)

    def result(self, stage: int, replay: Replay | None, *, limited: bool) -> Timeline:
        """What is drawn of a stage."""
        remaining, reserved = self.kept(), 0
        if replay is not None:
            reserved = replay.reserved_after_flush if replay.retries else replay.peak_reserved
        return Timeline(
            stage=stage,
            events=len(self.allocated),
            micro_batches=self._seen.get("loss", 0),
            limited=limited,
            peak_allocated=max(self.allocated, default=0),
            peak_reserved=reserved,
            position=tuple(remaining),
            allocated=tuple(self.allocated[index] for index in remaining),
            reserved=tuple(self.reserved[index] for index in remaining),
            components={
                name: tuple(self.stacked[index][position] for index in remaining)
                for position, name in enumerate(self.live)
            },
            parts=tuple(self.parts),
        )


def shown_stages(count: int, top: int) -> list[int]:
    """The stages that stand for all: each of a few; else the first, the middle, the last and that of the peak.

    >>> shown_stages(4, 0), shown_stages(16, 0), shown_stages(16, 3)
    ([0, 1, 2, 3], [0, 8, 15], [0, 3, 8, 15])
    """
    return list(range(count)) if count <= REPLAYED_STAGES else sorted({0, count // 2, count - 1, top})


def timelines(census: ModelOnGrid, ledger: Ledger, overhead: Overhead, top: int) -> tuple[Timeline, ...]:
    """One step on the stages that stand for all; without figures where the era's allocator had other rules."""
    return tuple(_timeline(census, ledger, overhead, stage) for stage in shown_stages(census.grid.num_stages, top))


def _timeline(census: ModelOnGrid, ledger: Ledger, overhead: Overhead, stage: int) -> Timeline:
    terms = {term.name: term.component for term in ledger.terms}
    recorders = [Recorder(terms)]
    if census.grid.habits.allocator != "caching":
        return recorders[0].result(stage, None, limited=False)

    def watch() -> Recorder:
        recorders.append(Recorder(terms))
        return recorders[-1]

    rank = fullest_rank(census, ledger, overhead, stage)
    replay = simulate(census, ledger, overhead, stage, rank, watch=watch)
    limited = replay.out_of_memory is None
    if not limited:
        replay = simulate(census, ledger, overhead, stage, rank, watch=watch, limited=False)
    return recorders[-1].result(stage, replay, limited=limited)
