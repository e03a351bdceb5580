"""Reserved memory of one strategy, from a replay of the caching allocator over two steps' events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.allocator import Replay, replay
from memcalc.events import step_events
from memcalc.terms.head import OBSERVED

if TYPE_CHECKING:
    from memcalc.ledger import Ledger
    from memcalc.terms import Census, Overhead

Watch = Callable[[tuple[str, int, int, int, str], int, int], None]
"""What is told each event, and the bytes that are allocated and reserved after it."""


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

    until = is_unsafe if only_safe and not has_observed(ledger) else None
    two_steps = played(census, ledger, overhead, stage, until=until)
    if until and (two_steps.retries or until(two_steps.peak_reserved)):
        raise UnsafeError
    reserved = two_steps.reserved_after_flush if two_steps.retries else two_steps.peak_reserved
    failed = two_steps.out_of_memory
    short = max(failed.reserved + failed.segment - overhead.room, 0) if failed else 0
    return Replayed(reserved, two_steps.peak_reserved, two_steps.retries, failed is None, short)


def played(
    census: Census,
    ledger: Ledger,
    overhead: Overhead,
    stage: int,
    *,
    until: Callable[[int], bool] | None = None,
    watch: Callable[[], Watch] | None = None,
    limited: bool = True,
) -> Replay:
    """Two steps through the allocator, on the card that the overhead leaves or (not ``limited``) without an end.

    ``watch`` makes what each replay tells its events to; the last one counts.
    """
    room, expandable = overhead.room if limited else None, bool(census.grid.fixed.expandable_segments)
    found = replay(
        step_events(census, ledger, stage), capacity=room, expandable=expandable, until=until, watch=watch and watch()
    )
    if found.out_of_memory and has_observed(ledger):
        # What was only ever seen as reserved can be given back, so that it never stops a run
        events = step_events(census, ledger, stage, observed=False)
        found = replay(events, capacity=room, expandable=expandable, watch=watch and watch())
    return found


def has_observed(ledger: Ledger) -> bool:
    """Whether there is memory that measured runs reserve although no tensor was found for it."""
    return any(term.source == OBSERVED for term in ledger.holes)
