"""How far a sweep is: a bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Task as BarTask
from rich.text import Text

if TYPE_CHECKING:
    from memcalc.sweeps.run import Progress as State

__all__ = ["bar"]


class _Rate(TextColumn):
    """Jobs a second, of those that this run has computed."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: BarTask) -> Text:
        """Return the rate, once there is one."""
        return Text(f"{task.speed:.1f} jobs/s" if task.speed else "", style="cyan")


@contextmanager
def bar(console: Console | None = None) -> Iterator[Callable[[State], None]]:
    """Draw on stderr, and remove the bar at the end; the listener that is given takes each state of a sweep."""
    screen = console or Console(stderr=True)
    if not screen.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=screen, transient=True) as progress:
        task = progress.add_task("sweep", total=None)

        def listen(state: State) -> None:
            said = f"sweep ({state.resumed:,} from the journal)" if state.resumed else "sweep"
            progress.update(task, description=said, total=state.jobs, completed=state.done)

        yield listen
