"""How far long work is: a bar with a rate on a terminal, and nothing anywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from memcalc.report.progress_bar import Drawn, State

PATIENCE = 0.7
"""Seconds that work may take before a bar is worth its import."""
_DUMB = {"dumb", "unknown"}


@dataclass(frozen=True)
class _Counted:
    """What is done of what is known to be there."""

    done: int
    jobs: int
    resumed: int = 0


@contextmanager
def bar(
    console: Console | None = None, noun: str = "sweep", unit: str = "jobs", patience: float = 0.0
) -> Iterator[Callable[[State], None]]:
    """Draw on stderr, and remove the bar at the end; the listener that is given takes each state of what is called so.

    A state that names the job which runs (``now``) has it beside the bar. No bar is begun before `patience` seconds.
    """
    if not (console.is_terminal if console else _on_a_terminal()):
        yield lambda _: None
        return
    began = time.monotonic()
    drawn: Drawn | None = None

    def listen(state: State) -> None:
        nonlocal drawn
        if drawn is None and time.monotonic() - began >= patience:
            from memcalc.report.progress_bar import Drawn

            drawn = Drawn(console, noun, unit, time.monotonic() - began)
        if drawn is not None:
            drawn.show(state)

    try:
        yield listen
    finally:
        if drawn is not None:
            drawn.end()


@contextmanager
def waiting(noun: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Draw a bar for work that may be done at once; the listener takes what is done, and of how many, 0 if unknown."""
    with bar(noun=noun, unit=unit, patience=PATIENCE) as listen:
        yield lambda done, jobs: listen(_Counted(done, jobs))


def _on_a_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in _DUMB
