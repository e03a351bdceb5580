"""Where records go: the log, a file of JSON lines, Prometheus."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.files import output_path
from memcalc.probe.guard.gauges import Gauges
from memcalc.probe.guard.record import Value, as_json, as_line

if TYPE_CHECKING:
    from memcalc.probe.guard.options import Options

__all__ = ["LOG", "Reporter", "of_rank"]

LOG = logging.getLogger("memcalc.guard")


def of_rank(path: str, rank: int, world: int) -> str:
    """Return a rank's own file.

    >>> of_rank("runs/guard.jsonl", 3, 8), of_rank("guard.jsonl", 0, 1)
    ('runs/guard.rank3.jsonl', 'guard.jsonl')
    """
    place = Path(path)
    return path if world == 1 else str(place.with_name(f"{place.stem}.rank{rank}{place.suffix}"))


class Reporter:
    """One rank's records."""

    def __init__(self, options: Options, rank: int, local_rank: int, world: int) -> None:
        self._lines = None
        if options.jsonl is not None:
            self._lines = output_path(of_rank(options.jsonl, rank, world), force=True)
        self._gauges = None
        if options.publishes:
            named = options.textfile and of_rank(options.textfile, rank, world)
            self._gauges = Gauges(options.renamed(named), local_rank)

    def report(self, values: dict[str, Value]) -> None:
        """Tell a record to all of them; a file that can no longer be written does not end a run."""
        if LOG.isEnabledFor(logging.INFO):
            LOG.info("%s", as_line(values))
        try:
            if self._lines is not None:
                with self._lines.open("a", encoding="utf-8") as stream:
                    stream.write(as_json(values))
            if self._gauges is not None:
                self._gauges.show(values)
        except OSError as error:
            LOG.warning("step %s: the report was not written: %s.", values["step"], error)

    def close(self) -> None:
        """Stop listening."""
        if self._gauges is not None:
            self._gauges.close()
            self._gauges = None
