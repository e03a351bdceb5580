"""From a snapshot to shares, call sites and causes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memcalc.probe.triage.causes import cause, said
from memcalc.probe.triage.frames import Reading, site_of
from memcalc.probe.triage.holes import Holes, holes_of, replayed
from memcalc.probe.triage.lives import Ints, Lives, lives_of
from memcalc.probe.triage.message_causes import holes_cause, stack_causes
from memcalc.probe.triage.messages import Figures
from memcalc.probe.triage.snapshot import Snapshot
from memcalc.probe.triage.sorts import CATEGORIES, KNOWN_BY, categories, readings
from memcalc.probe.triage.steps import growth_of, steps_of
from memcalc.results.triage import Confidence, TriageCause, TriageGrowth, TriageMemory, TriageShare, TriageSite

__all__ = ["Explained", "explained"]

_MOST_SITES = 12
_MUCH, _SOME = 0.25, 0.10
"""Shares of what is alive from which a category is the matter, and from which it may be."""
_AT_ONCE = 4
"""Live blocks of one line and one size in an evaluation: without gradients a layer's are gone before the next one's."""
_LEAST_GROWTH = 1024


@dataclass(frozen=True)
class Explained:
    """What a snapshot says."""

    figures: Figures
    reading: Reading
    site: str
    memory: TriageMemory
    shares: tuple[TriageShare, ...]
    sites: tuple[TriageSite, ...]
    growth: tuple[TriageGrowth, ...]
    causes: list[TriageCause]


def explained(snapshot: Snapshot) -> Explained:
    """Explain the device of a snapshot that ran out of memory, or that holds most."""
    device = snapshot.device
    lives = lives_of(snapshot, device)
    read = readings(snapshot, lives)
    steps, by = steps_of(snapshot, lives, read)
    sorts = categories(lives, read, steps)
    moment, name = lives.moment()
    alive = lives.alive_at(moment)
    holes = holes_of(snapshot, device)
    growth = growth_of(snapshot, lives, steps)
    stack = int(lives.stacks[moment]) if lives.entries else 0
    reading = read.reading(stack) if lives.entries else Reading()
    figures = Figures(
        form="snapshot", device=device, tried=lives.tried, free=lives.free, allocated=int(lives.size[alive].sum()),
        reserved=holes.reserved, unallocated=holes.free if lives.failed is not None else None,
    )  # fmt: skip
    room = None if lives.free is None else holes.reserved + lives.free
    played = replayed(lives, room)
    memory = TriageMemory(
        device=device, moment=name, allocated=int(lives.size[alive].sum()), end_allocated=holes.allocated,
        end_reserved=holes.reserved, holes=holes.free, largest_hole=holes.largest, segments=holes.segments,
        entries=lives.entries, steps=len(steps), steps_by=by, step_peaks=_peaks(lives, steps),
        replay_reserved=played and played.reserved, replay_expandable=played and played.expandable,
        replay_repeats=played is not None and played.repeats, replay_serves=played is not None and played.serves,
        settings=snapshot.settings,
    )  # fmt: skip
    shares = _shares(lives, sorts, alive)
    case = _Case(snapshot, lives, sorts, steps, alive, moment, memory, shares, growth, figures, reading, holes)
    return Explained(
        figures=figures,
        reading=reading,
        site=site_of(snapshot.stacks[stack].frames) if stack else "",
        memory=memory,
        shares=shares,
        sites=_sites(snapshot, lives, sorts, alive),
        growth=growth,
        causes=list(case.causes()),
    )


def _peaks(lives: Lives, steps: Ints) -> tuple[int, ...]:
    """The peak of each step, of the last 64."""
    running = lives.running()
    edges = [0, *(int(step) + 1 for step in steps)]
    pairs = list(pairwise(edges))[-64:]
    return tuple(int(running[first : last + 1].max()) for first, last in pairs)


def _shares(lives: Lives, sorts: Ints, alive: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[TriageShare, ...]:
    size = np.bincount(sorts[alive], weights=lives.size[alive], minlength=len(CATEGORIES))
    count = np.bincount(sorts[alive], minlength=len(CATEGORIES))
    return tuple(
        TriageShare(
            category=CATEGORIES[at], bytes=int(size[at]), blocks=int(count[at]), known_by=KNOWN_BY[CATEGORIES[at]]
        )
        for at in np.argsort(-size, kind="stable")
        if count[at]
    )


def _sites(
    snapshot: Snapshot, lives: Lives, sorts: Ints, alive: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> tuple[TriageSite, ...]:
    """The call sites that hold most, each with the category of most of its bytes."""
    held: dict[tuple[str, int], list[int]] = {}
    key = lives.stack[alive] * len(CATEGORIES) + sorts[alive]
    kinds, place = np.unique(key, return_inverse=True)
    size, count = np.bincount(place, weights=lives.size[alive]), np.bincount(place)
    for at, kind in enumerate(kinds):
        stack, category = divmod(int(kind), len(CATEGORIES))
        entry = held.setdefault((site_of(snapshot.stacks[stack].frames), category), [0, 0, stack])
        entry[0] += int(size[at])
        entry[1] += int(count[at])
    best = sorted(held.items(), key=lambda item: -item[1][0])[:_MOST_SITES]
    return tuple(
        TriageSite(
            site=site, category=CATEGORIES[category], bytes=size, blocks=count,
            stack=tuple(frame.short for frame in snapshot.stacks[stack].frames[:12]),
        )
        for (site, category), (size, count, stack) in best
    )  # fmt: skip


@dataclass(frozen=True)
class _Case:
    """What the causes are looked for in."""

    snapshot: Snapshot
    lives: Lives
    sorts: Ints
    steps: Ints
    alive: np.ndarray[tuple[int], np.dtype[np.bool_]]
    moment: int
    memory: TriageMemory
    shares: tuple[TriageShare, ...]
    growth: tuple[TriageGrowth, ...]
    figures: Figures
    reading: Reading
    holes: Holes

    def share(self, *names: str) -> tuple[int, float]:
        """Bytes of some categories, and their share."""
        size = sum(one.bytes for one in self.shares if one.category in names)
        return size, size / max(self.memory.allocated, 1)

    def causes(self) -> Iterator[TriageCause]:
        """Everything that speaks for itself; what fills the card where nothing else does."""
        found = [*self._grown(), *self._evaluated(), *self._optimized(), *self._pieces(), *self._categories()]
        if self.lives.failed is not None and self.reading.evidence is not None:
            known = {one.code for one in found}
            found += [
                one for one in stack_causes(self.figures, self.reading) if one.code not in known | {"evaluation-graph"}
            ]
        yield from found
        if self.lives.failed is not None and self.shares:
            first = self.shares[0]
            whole = max(self.memory.allocated, 1)
            listed = ", ".join(f"{one.category} {said(one.bytes)} ({one.bytes / whole:.0%})" for one in self.shares[:4])
            sure: Confidence = "possible" if any(one.confidence != "possible" for one in found) else "likely"
            yield cause("too-large", sure, f"alive at {self.memory.moment}: {listed}", size=first.bytes)

    def _grown(self) -> Iterator[TriageCause]:
        rate = sum(one.bytes_per_step for one in self.growth)
        if rate < _LEAST_GROWTH:
            return
        intervals = self.growth[0].steps
        grown = rate * intervals
        share = grown / max(self.memory.allocated, 1)
        listed = [
            f"{one.site}: {said(one.bytes_per_step)} and {one.blocks_per_step:.3g} blocks a step"
            for one in self.growth[:3]
        ]
        total = (
            f"{said(rate)} a step over {intervals} steps, {said(grown)} ({share:.0%}) of what is alive at "
            f"{self.memory.moment}"
        )
        failed = self.lives.failed is not None
        sure = share >= _SOME if failed else intervals >= 4
        yield cause("growth", "likely" if sure else "possible", total, *listed, size=round(grown))

    def _evaluated(self) -> Iterator[TriageCause]:
        if not self.reading.evaluating and self.lives.failed is not None:
            return
        size, _ = self.share("evaluation")
        mine = self.alive & (self.sorts == CATEGORIES.index("evaluation")) & (self.lives.born >= 0)
        kinds, counts = np.unique(np.stack((self.lives.stack[mine], self.lives.size[mine])), axis=1, return_counts=True)
        lines = int((counts >= _AT_ONCE).sum())
        if not lines:
            return
        most = int(kinds[0, np.argmax(counts)])
        evidence = (
            f"{said(size)} made by evaluation are alive at once, {int(counts.max())} blocks of one line "
            f"({site_of(self.snapshot.stacks[most].frames)}): layers that are done keep their outputs"
        )
        yield cause("evaluation-graph", "likely" if lines > 1 else "possible", evidence, size=size)

    def _optimized(self) -> Iterator[TriageCause]:
        size, share = self.share("optimizer temporaries")
        if share >= _SOME and self.reading.phase == "optimizer":
            evidence = f"{said(size)} ({share:.0%}) are freed by the optimizer itself"
            yield cause("optimizer-temporaries", "likely" if share >= _MUCH else "possible", evidence, size=size)
        if self.reading.phase == "optimizer" and self.lives.failed is not None and len(self.steps) <= 1:
            size, _ = self.share("optimizer states")
            evidence = f"no step had ended before it; {said(size)} of states were there when it failed"
            yield cause("first-step", "likely", evidence, size=size)

    def _pieces(self) -> Iterator[TriageCause]:
        before, after = self.memory.replay_reserved, self.memory.replay_expandable
        if self.lives.failed is not None:
            for one in holes_cause(self.figures):
                yield self._replayed(one)
        elif before is not None and after is not None and after < (1 - _SOME) * before:
            evidence = (
                f"a replay of the trace reserves {said(before)} at its peak, with expandable segments {said(after)}"
            )
            yield cause("fragmentation", "possible", evidence, size=before - after)

    def _replayed(self, one: TriageCause) -> TriageCause:
        """Fragmentation as the replay sees it: what expandable segments would not have served is not cured by them."""
        memory = self.memory
        evidence = (*one.evidence, f"the largest hole has {said(self.holes.largest)}")
        if memory.replay_reserved is None:
            return one.model_copy(update={"evidence": evidence})
        if memory.replay_serves:
            says = "replayed with expandable segments, the trace and the failed request fit"
            return one.model_copy(update={"evidence": (*evidence, says)})
        says = "replayed with expandable segments, the request fails too"
        remedy = "not expandable segments; make what stays before what goes, or ask for less at once"
        sure = (
            one.confidence
            if self.holes.largest and one.bytes and one.bytes > _MUCH * self.holes.reserved
            else "possible"
        )
        return one.model_copy(update={"evidence": (*evidence, says), "remedy": remedy, "confidence": sure})

    def _categories(self) -> Iterator[TriageCause]:
        for code, name in (
            ("logits", "logits"),
            ("attention-scores", "attention scores"),
            ("gather", "gathered weights"),
        ):
            size, share = self.share(name)
            if share >= _SOME:
                evidence = f"{said(size)} ({share:.0%}) of what is alive at {self.memory.moment}"
                sure = share >= _MUCH and self.lives.failed is not None
                yield cause(code, "likely" if sure else "possible", evidence, size=size)
