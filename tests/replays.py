"""Replays and templates of a process are made once: tests ask of the same jobs again and again.

A replay is a function of the model, the grid of one strategy and the terms of its ledger, a template one of what a
:class:`memcalc.trace.template.TraceCache` knows it by; the program keeps neither beyond a job.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.frameworks import habits_of
from memcalc.planner import stage_peaks
from memcalc.trace.template import TraceCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memcalc.events.log import Event
    from memcalc.ledger import Ledger
    from memcalc.terms.model_on_grid import ModelOnGrid

APART = {"trace", "test_caches.py"}
"""Folders and files whose tests are about executions themselves: there each job makes its own."""
MOST = 2000
"""Templates that are kept, of some 50 KB each."""
CLOSED = {"test_screens.py", "test_page.py", "test_pages.py"}
"""Files whose tests are about how an answer is shown: the ledger's sum of what is reserved stands for the replay."""

_step_events, _new_cache = stage_peaks.step_events, TraceCache.__init__
_templates: dict[tuple[Any, ...], Any] = {}
_alone = _closed = False


class Events:
    """The events of a stage, written whenever they are read."""

    def __init__(
        self, census: ModelOnGrid, ledger: Ledger, stage: int, rank: Any = "middle", *, observed: bool = True
    ) -> None:
        self.asked, self.observed = (census, ledger, stage, rank), observed

    def __iter__(self) -> Iterator[Event]:
        return iter(_step_events(*self.asked, observed=self.observed))

    def key(self) -> int | None:
        """A hash of all that they follow from, None where a test gave the grid another framework's habits."""
        census, ledger, *place = self.asked
        grid = census.grid
        if grid.habits is not habits_of(grid.fixed.framework):
            return None
        terms = [
            (
                *(t.component, t.name, t.phases, t.pool, t.apart, t.until, t.grows, t.tensors, t.with_model),
                *(t.by_thread, t.in_turn, t.tier, t.bytes.shape, t.bytes.tobytes()),
            )
            for t in ledger.terms
            if not t.in_events
        ]
        return hash((census.model.model_dump_json(), grid, *place, self.observed, *terms))

    def closed(self) -> int:
        """What the ledger says that they reserve [bytes]."""
        census, ledger, stage, *_ = self.asked
        return stage_peaks.at_stage(ledger.reserved(), stage, census.grid.num_stages)


def once(play: Callable[..., int | None]) -> Callable[..., int | None]:
    """A replay with what it found before, which holds for each bound; where it ended early, for each lower one."""
    known: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def reserved(events: Events, most: int, *capacity: int) -> int | None:
        if _closed and (least := events.closed()) <= most:
            return least
        key = events.key()
        if key is None or _alone:
            return play(events, most, *capacity)
        bound, found = known.get((key, *capacity), (-1, None))
        if found is None and bound < most:
            found = play(events, most, *capacity)
            known[key, *capacity] = most, found
        return found if found is not None and found <= most else None

    return reserved


def _with_templates(cache: TraceCache) -> None:
    _new_cache(cache)
    if not _alone:
        if len(_templates) > MOST:
            _templates.clear()
        cache._templates = _templates


def remember() -> None:
    """Let the replays and templates of this process be made once."""
    stage_peaks.step_events = Events
    stage_peaks.reserved_up_to = once(stage_peaks.reserved_up_to)
    stage_peaks.mapped_up_to = once(stage_peaks.mapped_up_to)
    TraceCache.__init__ = _with_templates


def for_test_in(path: Path) -> None:
    """The next test stands in a file: in some, nothing of an earlier one is taken, in others nothing is replayed."""
    global _alone, _closed  # of the process, as what is remembered
    _alone, _closed = not APART.isdisjoint(path.parts), path.name in CLOSED
