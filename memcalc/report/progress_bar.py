"""The bar itself; importing what draws it takes a while, so this is read when there is something to draw."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Task as BarTask
from rich.text import Text

_SHORT_FROM = 100_000


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


class Drawn:
    """One bar on stderr; it is removed at the end."""

    def __init__(self, console: Console | None, noun: str, unit: str, since: float = 0.0) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), _Done(), _Rate(unit), TimeElapsedColumn())
        screen = console or Console(stderr=True)
        self._progress = Progress(*columns, _Left(), console=screen, transient=True)
        self._task = self._progress.add_task(noun, total=None)
        self._noun = noun
        task = self._progress.tasks[0]
        if task.start_time is not None:
            task.start_time -= since
        self._progress.start()

    def show(self, state: State) -> None:
        """Draw a state."""
        text = f"{self._noun} ({state.resumed:,} from the journal)" if state.resumed else self._noun
        text = " ".join(part for part in (text, getattr(state, "now", "")) if part)
        self._progress.update(self._task, description=text, total=state.jobs or None, completed=state.done)

    def end(self) -> None:
        """Remove the bar."""
        self._progress.stop()


class _Done(TextColumn):
    """What is done, and of how many where that is known."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: BarTask) -> Text:
        """Return the count."""
        return Text(_counted(task.completed) + (f"/{_counted(task.total)}" if task.total else ""), "green")


class _Left(TimeRemainingColumn):
    """What is left, where the end is known."""

    def render(self, task: BarTask) -> Text:
        """Return the time."""
        return Text("left ").append_text(super().render(task)) if task.total else Text()


class _Rate(TextColumn):
    """Units a second, or a minute, of those that this run has computed."""

    def __init__(self, unit: str) -> None:
        super().__init__("")
        self._unit = unit

    def render(self, task: BarTask) -> Text:
        """Return the rate, once there is one."""
        speed = task.speed or (task.completed / task.elapsed if task.elapsed and not task.total else 0.0)
        return Text(rate(speed, self._unit), style="cyan")


def rate(speed: float, unit: str) -> str:
    """Return units a second, or a minute where they are few.

    >>> rate(2.5, "jobs"), rate(0.05, "runs"), rate(1_234_567, "strategies"), rate(0, "jobs")
    ('2.5 jobs/s', '3.0 runs/min', '1.2M strategies/s', '')
    """
    if not speed:
        return ""
    if speed < 1:
        return f"{60 * speed:.1f} {unit}/min"
    return f"{_counted(speed) if speed >= 100 else f'{speed:.1f}'} {unit}/s"


def _counted(number: float) -> str:
    """Return a number in few letters.

    >>> _counted(950), _counted(99_999), _counted(12_345_678)
    ('950', '99,999', '12.3M')
    """
    if number < _SHORT_FROM:
        return f"{number:,.0f}"
    if number < 1e6:
        return f"{number / 1e3:.0f}k"
    return f"{number / 1e6:.1f}M" if number < 1e9 else f"{number / 1e9:.1f}G"
