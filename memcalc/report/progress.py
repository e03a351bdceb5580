"""How far a sweep, a probe or a calibration is: a bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Task as BarTask
from rich.text import Text

__all__ = ["State", "bar"]


class State(Protocol):
    """How many jobs there are, are done, and were in the journal at the start."""

    @property
    def done(self) -> int:
        """Those of the journal included."""

    @property
    def jobs(self) -> int:
        """In all."""

    @property
    def resumed(self) -> int:
        """From the journal."""


class _Rate(TextColumn):
    """Jobs a second, or a minute, of those that this run has computed."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: BarTask) -> Text:
        """Return the rate, once there is one."""
        speed = task.speed or 0.0
        said = f"{speed:.1f} jobs/s" if speed >= 1 else f"{60 * speed:.1f} jobs/min"
        return Text(said if speed else "", style="cyan")


@contextmanager
def bar(console: Console | None = None, noun: str = "sweep") -> Iterator[Callable[[State], None]]:
    """Draw on stderr, and remove the bar at the end; the listener that is given takes each state of what is called so.

    A state that names the job which runs (``now``) has it beside the bar.
    """
    screen = console or Console(stderr=True)
    if not screen.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=screen, transient=True) as progress:
        task = progress.add_task(noun, total=None)

        def listen(state: State) -> None:
            said = f"{noun} ({state.resumed:,} from the journal)" if state.resumed else noun
            said = " ".join(part for part in (said, getattr(state, "now", "")) if part)
            progress.update(task, description=said, total=state.jobs, completed=state.done)

        yield listen
