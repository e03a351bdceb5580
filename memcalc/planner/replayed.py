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


class UnsafeError(Exception):
    """A strategy is tight or does not fit; only safe ones were wanted, so that nothing more is known of it."""


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


def replayed(
    census: Census, ledger: Ledger, overhead: Overhead, stage: int, *, only_safe: bool = False
) -> Replayed | None:
    """Replay two steps on the card that the overhead leaves; None where the era's allocator had other rules.

    With ``only_safe`` it may end with UnsafeError, as soon as more is reserved than is safe or the cache is given back.
    """
    if census.grid.habits.allocator != "caching":
        return None

    def is_unsafe(reserved: int) -> bool:
        return overhead.limit(reserved) > overhead.capacity

    expandable, seen = bool(census.grid.fixed.expandable_segments), any(t.source == OBSERVED for t in ledger.holes)
    until = is_unsafe if only_safe and not seen else None
    played = replay(step_events(census, ledger, stage), capacity=overhead.room, expandable=expandable, until=until)
    if until and (played.retries or until(played.peak_reserved)):
        raise UnsafeError
    if played.out_of_memory and seen:
        # What was only ever seen as reserved can be given back, so that it never stops a run
        events = step_events(census, ledger, stage, observed=False)
        played = replay(events, capacity=overhead.room, expandable=expandable)
    reserved = played.reserved_after_flush if played.retries else played.peak_reserved
    failed = played.out_of_memory
    short = max(failed.reserved + failed.segment - overhead.room, 0) if failed else 0
    return Replayed(reserved, played.peak_reserved, played.retries, failed is None, short)
