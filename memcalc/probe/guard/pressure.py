"""Whether memory is short, and whether there is room again."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.probe.guard.meter import Reading
from memcalc.units import GIB

__all__ = ["Judge", "Judgement"]


@dataclass(frozen=True)
class Judgement:
    """What a window says."""

    short: str = ""
    """Why memory is short; empty where it is not."""
    level: int = 0
    """Bytes that were reserved in the window."""
    retries: int = 0


class Judge:
    """Compares each window's readings with the limit, and with those of the window before."""

    def __init__(self, limit: int, *, peaks: bool = True) -> None:
        self.limit = limit
        self._peaks = peaks
        self._last: Reading | None = None

    def of(self, reading: Reading | None) -> Judgement:
        """Judge a window: short where more is reserved than the limit, or where the allocator ran out on the way.

        Peaks that are never reset say nothing about one window; then what is reserved at its end counts.
        """
        if reading is None:
            return Judgement()
        last, self._last = self._last, reading
        level = reading.reserved_peak if self._peaks else reading.reserved
        retries = reading.retries - last.retries if last else 0
        failed = reading.ooms - last.ooms if last else 0
        said = []
        if level > self.limit:
            said.append(f"reserved {level / GIB:.2f} GiB, above {self.limit / GIB:.2f} GiB")
        if retries > 0 or failed > 0:
            said.append(f"the allocator gave its cache back {retries} times to find room, and failed {failed} times")
        return Judgement("; ".join(said), level, retries)

    def has_room(self, level: int, more: int) -> bool:
        """Whether a plan that needs so much more than the one in force would stay below the limit."""
        return level > 0 and level + more <= self.limit
