"""Framework traps."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.convert.config import Config, Finding
from memcalc.preflight.join import Joined
from memcalc.results import Estimate


def traps(job: Joined, configs: tuple[Config, ...], estimate: Estimate) -> Iterator[tuple[Config, Finding]]:
    """Yield the traps."""
    return iter(())
