"""Reserved memory of one strategy, from a replay of the caching allocator over two steps' events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.allocator import replay
from memcalc.events import step_events
from memcalc.terms.head import OBSERVED

if TYPE_CHECKING:
    from memcalc.ledger import Ledger
    from memcalc.terms import Census, Overhead


@dataclass(frozen=True)
class Replayed:
    """What a replay on one pipeline stage shows."""

    reserved: int
    """The peak; after the last time that the allocator gave its cache back, where it had to [bytes]."""
    most: int
    """The largest figure at any time [bytes]."""
    retries: int
    """Requests for which cached segments were given back to the driver."""
    runs: bool
    """Whether every request was met."""
    short: int
    """What the driver lacked for the request that was not met [bytes]."""


def replayed(census: Census, ledger: Ledger, overhead: Overhead, stage: int) -> Replayed | None:
    """Replay two steps on the card that the overhead leaves; None where the era's allocator had other rules."""
    if census.grid.habits.allocator != "caching":
        return None
    expandable = bool(census.grid.fixed.expandable_segments)
    played = replay(step_events(census, ledger, stage), capacity=overhead.room, expandable=expandable)
    if played.out_of_memory and any(term.source == OBSERVED for term in ledger.holes):
        # What was only ever seen as reserved can be given back, so that it never stops a run
        events = step_events(census, ledger, stage, observed=False)
        played = replay(events, capacity=overhead.room, expandable=expandable)
    reserved = played.reserved_after_flush if played.retries else played.peak_reserved
    failed = played.out_of_memory
    short = max(failed.reserved + failed.segment - overhead.room, 0) if failed else 0
    return Replayed(reserved, played.peak_reserved, played.retries, failed is None, short)
