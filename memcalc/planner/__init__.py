"""The planner: a checked request, its grid, the search over it, how far that is, and the answer."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[int, int], None]
"""Takes what is done, and of how many: 0 where nobody knows."""


class Tally:
    """Counts what is evaluated, over all searches of one question."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._done = self._total = 0

    def expect(self, more: int) -> None:
        """Say how many are to come."""
        self._total += more

    def add(self, count: int) -> None:
        """Say how many are done."""
        self._done += count
        if self._listener is not None:
            self._listener(self._done, max(self._total, self._done) if self._total else 0)
