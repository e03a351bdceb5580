"""From a snapshot to shares, call sites and causes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from memcalc.allocator import replay
from memcalc.probe.triage.categories import CATEGORIES, KNOWN_BY, category_codes, growth_of, stack_contexts, steps_of
from memcalc.probe.triage.frames import StackContext, site_of
from memcalc.probe.triage.logs import Figures
from memcalc.probe.triage.message_causes import cause, holes_cause, shown, stack_causes
from memcalc.probe.triage.snapshot import Bools, Ints, Lifetimes, Snapshot, lifetimes_of
from memcalc.results.triage import Confidence, TriageCause, TriageGrowth, TriageMemory, TriageShare, TriageSite

if TYPE_CHECKING:
    from collections.abc import Iterator

# What lies free between live blocks, and what a replay of the trace with expandable segments would reserve.

MOST_REPLAYED = 600_000
"""Entries up to which a trace is replayed: a few seconds."""


@dataclass(frozen=True)
class SegmentUsage:
    """The free bytes of a device's segments."""

    segments: int
    reserved: int
    allocated: int
    free: int
    """In segments that are partly used: an expandable one frees its unused pages."""
    largest: int


def segment_usage(snapshot: Snapshot, device: int) -> SegmentUsage:
    """Return the holes in a device's segments; wholly free segments go back to the driver before a request fails."""
    count = reserved = allocated = free = largest = 0
    for segment in snapshot.segments:
        if segment.device != device:
            continue
        count += 1
        reserved += segment.total
        used = [block.size for block in segment.blocks if block.active]
        allocated += sum(used)
        if used:
            unused = [block.size for block in segment.blocks if not block.active]
            free += sum(unused)
            largest = max(largest, *unused, 0)
    return SegmentUsage(count, reserved, allocated, free, largest)


@dataclass(frozen=True)
class Replayed:
    """A replay of the trace with and without expandable segments."""

    reserved: int
    expandable: int
    """Peak reserved with them."""
    repeats: bool
    """Whether the failed request fails in the replay too, with the same memory."""
    serves: bool
    """Whether it is served with expandable segments."""


def replayed(lifetimes: Lifetimes, capacity: int | None) -> Replayed | None:
    """Replay the trace with segments of the driver and with expandable ones; `room` is what the allocator had [bytes].

    What was there before the recording is put first, so that its own holes are not in it. A failed request is put at
    the end. None where the trace is empty or very long.
    """
    if not 0 < lifetimes.entries <= MOST_REPLAYED:
        return None
    events = list(_events(lifetimes))
    plain, growing = replay(events), replay(events, expandable=True)
    repeats = serves = False
    if lifetimes.tried and capacity:
        with_request = [*events, ("alloc", len(lifetimes.size), lifetimes.tried, 0, "")]
        repeats = replay(with_request, capacity=capacity).out_of_memory is not None
        serves = replay(with_request, capacity=capacity, expandable=True).out_of_memory is None
    return Replayed(plain.peak_reserved, growing.peak_reserved, repeats, serves)


def _events(lifetimes: Lifetimes) -> Iterator[tuple[str, int, int, int, str]]:
    order = np.concatenate((lifetimes.born, lifetimes.died))
    keys = np.tile(np.arange(len(lifetimes.size)), 2)
    births = np.arange(len(order)) < len(lifetimes.size)
    inside = births | (order < lifetimes.entries)
    for index in np.lexsort((births, order)):
        if not inside[index]:
            continue
        key = int(keys[index])
        if births[index]:
            yield "alloc", key, int(lifetimes.size[key]), int(lifetimes.stream[key]), ""
        else:
            yield "free", key, 0, 0, ""


_MOST_SITES = 12
_MUCH, _SOME = 0.25, 0.10
"""Shares of what is alive from which a category is the matter, and from which it may be."""
_AT_ONCE = 4
"""Live blocks of one line and one size in an evaluation: without gradients a layer's are gone before the next one's."""
_LEAST_GROWTH = 1024


@dataclass(frozen=True)
class SnapshotEvidence:
    """What a snapshot shows, and the causes that it speaks for."""

    figures: Figures
    context: StackContext
    site: str
    memory: TriageMemory
    shares: tuple[TriageShare, ...]
    sites: tuple[TriageSite, ...]
    growth: tuple[TriageGrowth, ...]
    causes: list[TriageCause]


def evidence_of(snapshot: Snapshot) -> SnapshotEvidence:
    """Explain the device of a snapshot that ran out of memory, or that holds most."""
    device = snapshot.device
    lifetimes = lifetimes_of(snapshot, device)
    contexts = stack_contexts(snapshot, lifetimes)
    steps, by = steps_of(snapshot, lifetimes, contexts)
    category_of = category_codes(lifetimes, contexts, steps)
    moment, name = lifetimes.moment()
    alive = lifetimes.alive_at(moment)
    usage = segment_usage(snapshot, device)
    growth = growth_of(snapshot, lifetimes, steps)
    stack = int(lifetimes.stacks[moment]) if lifetimes.entries else 0
    context = contexts.context_of(stack) if lifetimes.entries else StackContext()
    allocated = int(lifetimes.size[alive].sum())
    figures = Figures(
        form="snapshot", device=device, tried=lifetimes.tried, free=lifetimes.free, allocated=allocated,
        reserved=usage.reserved, unallocated=usage.free if lifetimes.failed is not None else None,
    )  # fmt: skip
    capacity = None if lifetimes.free is None else usage.reserved + lifetimes.free
    replay = replayed(lifetimes, capacity)
    memory = TriageMemory(
        device=device, moment=name, allocated=allocated, end_allocated=usage.allocated,
        end_reserved=usage.reserved, holes=usage.free, largest_hole=usage.largest, segments=usage.segments,
        entries=lifetimes.entries, steps=len(steps), steps_by=by, step_peaks=_peaks(lifetimes, steps),
        replay_reserved=replay and replay.reserved, replay_expandable=replay and replay.expandable,
        replay_repeats=replay is not None and replay.repeats, replay_serves=replay is not None and replay.serves,
        settings=snapshot.settings,
    )  # fmt: skip
    shares = _shares(lifetimes, category_of, alive)
    in_context = SnapshotContext(
        snapshot, lifetimes, category_of, steps, alive, memory, shares, growth, figures, context, usage
    )
    return SnapshotEvidence(
        figures=figures,
        context=context,
        site=site_of(snapshot.stacks[stack].frames) if stack else "",
        memory=memory,
        shares=shares,
        sites=_sites(snapshot, lifetimes, category_of, alive),
        growth=growth,
        causes=list(in_context.causes()),
    )


def _peaks(lifetimes: Lifetimes, steps: Ints) -> tuple[int, ...]:
    """The peak of each step, of the last 64."""
    running = lifetimes.running()
    edges = [0, *(int(step) + 1 for step in steps)]
    pairs = list(pairwise(edges))[-64:]
    return tuple(int(running[first : last + 1].max()) for first, last in pairs)


def _shares(lifetimes: Lifetimes, category_of: Ints, alive: Bools) -> tuple[TriageShare, ...]:
    size = np.bincount(category_of[alive], weights=lifetimes.size[alive], minlength=len(CATEGORIES))
    count = np.bincount(category_of[alive], minlength=len(CATEGORIES))
    return tuple(
        TriageShare(
            category=CATEGORIES[index],
            bytes=int(size[index]),
            blocks=int(count[index]),
            known_by=KNOWN_BY[CATEGORIES[index]],
        )
        for index in np.argsort(-size, kind="stable")
        if count[index]
    )


def _sites(snapshot: Snapshot, lifetimes: Lifetimes, category_of: Ints, alive: Bools) -> tuple[TriageSite, ...]:
    """The call sites that hold most, each with the category of most of its bytes."""
    by_site: dict[tuple[str, int], list[int]] = {}
    key = lifetimes.stack[alive] * len(CATEGORIES) + category_of[alive]
    keys, position = np.unique(key, return_inverse=True)
    size, count = np.bincount(position, weights=lifetimes.size[alive]), np.bincount(position)
    for index, combined in enumerate(keys):
        stack, category = divmod(int(combined), len(CATEGORIES))
        entry = by_site.setdefault((site_of(snapshot.stacks[stack].frames), category), [0, 0, stack])
        entry[0] += int(size[index])
        entry[1] += int(count[index])
    best = sorted(by_site.items(), key=lambda item: -item[1][0])[:_MOST_SITES]
    return tuple(
        TriageSite(
            site=site, category=CATEGORIES[category], bytes=size, blocks=count,
            stack=tuple(frame.short for frame in snapshot.stacks[stack].frames[:12]),
        )
        for (site, category), (size, count, stack) in best
    )  # fmt: skip


@dataclass(frozen=True)
class SnapshotContext:
    """A snapshot with its categories, steps and figures, in which causes are looked for."""

    snapshot: Snapshot
    lifetimes: Lifetimes
    category_of: Ints
    steps: Ints
    alive: Bools
    memory: TriageMemory
    shares: tuple[TriageShare, ...]
    growth: tuple[TriageGrowth, ...]
    figures: Figures
    context: StackContext
    usage: SegmentUsage

    def share(self, *names: str) -> tuple[int, float]:
        """Bytes of some categories, and their share."""
        size = sum(item.bytes for item in self.shares if item.category in names)
        return size, size / max(self.memory.allocated, 1)

    def causes(self) -> Iterator[TriageCause]:
        """Everything that speaks for itself; what fills the card where nothing else does."""
        causes = [*self._grown(), *self._evaluated(), *self._optimized(), *self._pieces(), *self._categories()]
        if self.lifetimes.failed is not None and self.context.evidence is not None:
            codes = {item.code for item in causes} | {"evaluation-graph"}
            causes += [item for item in stack_causes(self.figures, self.context) if item.code not in codes]
        yield from causes
        if self.lifetimes.failed is not None and self.shares:
            first = self.shares[0]
            total = max(self.memory.allocated, 1)
            listed = ", ".join(f"{s.category} {shown(s.bytes)} ({s.bytes / total:.0%})" for s in self.shares[:4])
            sure: Confidence = "possible" if any(item.confidence != "possible" for item in causes) else "likely"
            yield cause("too-large", sure, f"alive at {self.memory.moment}: {listed}", size=first.bytes)

    def _grown(self) -> Iterator[TriageCause]:
        rate = sum(site.bytes_per_step for site in self.growth)
        if rate < _LEAST_GROWTH:
            return
        intervals = self.growth[0].steps
        grown = rate * intervals
        share = grown / max(self.memory.allocated, 1)
        listed = [
            f"{site.site}: {shown(site.bytes_per_step)} and {site.blocks_per_step:.3g} blocks per step"
            for site in self.growth[:3]
        ]
        total = (
            f"{shown(rate)} per step over {intervals} steps, {shown(grown)} ({share:.0%}) of what is alive at "
            f"{self.memory.moment}"
        )
        failed = self.lifetimes.failed is not None
        sure = share >= _SOME if failed else intervals >= 4
        yield cause("growth", "likely" if sure else "possible", total, *listed, size=round(grown))

    def _evaluated(self) -> Iterator[TriageCause]:
        if not self.context.evaluating and self.lifetimes.failed is not None:
            return
        size, _ = self.share("evaluation")
        mine = self.alive & (self.category_of == CATEGORIES.index("evaluation")) & (self.lifetimes.born >= 0)
        kinds, counts = np.unique(
            np.stack((self.lifetimes.stack[mine], self.lifetimes.size[mine])), axis=1, return_counts=True
        )
        lines = int((counts >= _AT_ONCE).sum())
        if not lines:
            return
        most = int(kinds[0, np.argmax(counts)])
        evidence = (
            f"{shown(size)} made by evaluation are alive at once, {int(counts.max())} blocks of one line "
            f"({site_of(self.snapshot.stacks[most].frames)}): layers that are done keep their outputs"
        )
        yield cause("evaluation-graph", "likely" if lines > 1 else "possible", evidence, size=size)

    def _optimized(self) -> Iterator[TriageCause]:
        size, share = self.share("optimizer temporaries")
        if share >= _SOME and self.context.phase == "optimizer":
            evidence = f"{shown(size)} ({share:.0%}) are freed by the optimizer itself"
            yield cause("optimizer-temporaries", "likely" if share >= _MUCH else "possible", evidence, size=size)
        if self.context.phase == "optimizer" and self.lifetimes.failed is not None and len(self.steps) <= 1:
            size, _ = self.share("optimizer states")
            evidence = f"no step had ended before it; {shown(size)} of states were there when it failed"
            yield cause("first-step", "likely", evidence, size=size)

    def _pieces(self) -> Iterator[TriageCause]:
        before, after = self.memory.replay_reserved, self.memory.replay_expandable
        if self.lifetimes.failed is not None:
            for fragmentation in holes_cause(self.figures):
                yield self._replayed(fragmentation)
        elif before is not None and after is not None and after < (1 - _SOME) * before:
            evidence = (
                f"a replay of the trace reserves {shown(before)} at its peak, with expandable segments {shown(after)}"
            )
            yield cause("fragmentation", "possible", evidence, size=before - after)

    def _replayed(self, fragmentation: TriageCause) -> TriageCause:
        """Fragmentation as the replay sees it: what expandable segments would not have served is not cured by them."""
        memory = self.memory
        evidence = (*fragmentation.evidence, f"the largest hole has {shown(self.usage.largest)}")
        if memory.replay_reserved is None:
            return fragmentation.model_copy(update={"evidence": evidence})
        if memory.replay_serves:
            says = "replayed with expandable segments, the trace and the failed request fit"
            return fragmentation.model_copy(update={"evidence": (*evidence, says)})
        says = "replayed with expandable segments, the request fails too"
        remedy = "not expandable segments; make what stays before what goes, or ask for less at once"
        sure = (
            fragmentation.confidence
            if self.usage.largest and fragmentation.bytes and fragmentation.bytes > _MUCH * self.usage.reserved
            else "possible"
        )
        return fragmentation.model_copy(update={"evidence": (*evidence, says), "remedy": remedy, "confidence": sure})

    def _categories(self) -> Iterator[TriageCause]:
        for code, name in (
            ("logits", "logits"),
            ("attention-scores", "attention scores"),
            ("gather", "gathered weights"),
        ):
            size, share = self.share(name)
            if share >= _SOME:
                evidence = f"{shown(size)} ({share:.0%}) of what is alive at {self.memory.moment}"
                sure = share >= _MUCH and self.lifetimes.failed is not None
                yield cause(code, "likely" if sure else "possible", evidence, size=size)
