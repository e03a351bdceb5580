"""Many jobs at once: every combination of lists of options, to one table."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc._version import __version__
from memcalc.errors import InputError, MemcalcError
from memcalc.journal import SUFFIX, Journal, Listener, Progress
from memcalc.results.plans import Swept
from memcalc.specs.job import Sweep
from memcalc.sweeps.executors import Backend, backend_for
from memcalc.sweeps.rows import STATUSES, Row, Task, columns_of, error_row, rows_of, table_path, write_table
from memcalc.sweeps.space import Space, space_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


__all__ = ["sweep"]


MOST_ROWS = 10_000
"""Rows that are answered in memory; more need a file."""
_TASK_S = 1.0
"""Target length of a task [s]: long compared with its overhead, short enough for progress and interrupts."""
_MOST_JOBS = 256
_FIRST_JOBS = 4
_DEATHS = 3
"""Workers that one job may take with it before it is an error."""


def sweep(
    spec: str | os.PathLike[str] | Mapping[str, Any] | Sweep,
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    jobs: int | str | None = None,
    scheduler: str | None = None,
    preset_dirs: Iterable[str] = (),
    calibration: str | None = None,
    on_progress: Listener | None = None,
) -> Swept:
    """Answer every job of a sweep, on all cores.

    Parameters
    ----------
    spec
        A TOML file, or what it would hold.
    output
        A file for the rows (``.csv``, ``.json``, ``.jsonl``, ``.parquet``), by way of a journal beside it: the same
        call continues an interrupted sweep. Without it they are in the answer.
    force
        Whether a file that exists is replaced.
    jobs
        Processes, 1 for this one alone.
    scheduler
        The address of a Dask scheduler, or ``local``.
    preset_dirs
        Folders with presets of your own, looked up first.
    calibration
        That of every job, as if the sweep named it.
    on_progress
        Called with the rows that are there (``done``) of all (``jobs``).

    Returns
    -------
    Swept
        Counts by status, and the rows where no file was named; a job that cannot be is a row that says so.

    Raises
    ------
    memcalc.errors.InputError
        For a sweep that cannot be.
    """
    space = space_of(spec, tuple(preset_dirs), calibration)
    if output is None and space.size > MOST_ROWS:
        raise InputError(
            "output", None, f"must be given for more than {MOST_ROWS:,} jobs, and these are {space.size:,}"
        )
    path = None if output is None else table_path(os.fspath(output), force)
    columns = columns_of(space.settings)
    names = tuple(column.name for column in columns)
    with _journal_of(space, path) as journal:
        _fill(space, names, journal, jobs, scheduler, on_progress)
        head = {
            "schema": "memcalc.sweep/1",
            "version": __version__,
            "mode": space.mode,
            "jobs": space.size,
            "product": space.described(),
            "counts": _counted(journal.values()),
            "columns": names,
        }
        rows: list[dict[str, Any]] = []
        if path is None:
            rows = [dict(zip(names, row, strict=True)) for row in journal.values()]
        else:
            write_table(path, Path(os.fspath(output or "")).suffix.lower(), head, columns, journal.values())
            journal.remove()
    return Swept.model_validate({**head, "rows": rows})


def _journal_of(space: Space, path: Path | None) -> Journal:
    job = {"fingerprint": space.fingerprint, "version": __version__, "jobs": space.size}
    return Journal(None if path is None else path.with_name(path.name + SUFFIX), "sweep", job, _other_sweep)


def _other_sweep(job: Mapping[str, Any]) -> str:
    version = job.get("version")
    other = f", of memcalc {version} and not {__version__}" if version != __version__ else ""
    return f"it belongs to another sweep{other}; delete it, or name another --output"


def _counted(rows: Iterable[Row]) -> dict[str, int]:
    counts = Counter(row[1] for row in rows)
    return {status: counts[status] for status in STATUSES}


def _fill(
    space: Space,
    columns: tuple[str, ...],
    journal: Journal,
    jobs: int | str | None,
    scheduler: str | None,
    on_progress: Listener | None,
) -> None:
    resumed = journal.done

    def store(indices: Sequence[int], rows: Sequence[Row]) -> None:
        journal.append(zip(indices, rows, strict=True))
        if on_progress is not None:
            on_progress(Progress(journal.done, space.size, resumed))

    store((), ())
    waiting = _ordered(space, journal)
    if waiting.size:
        with backend_for(jobs, scheduler, waiting.size) as backend:
            _Loop(backend, space, columns, waiting, store).run()


def _ordered(space: Space, journal: Journal) -> NDArray[np.int64]:
    """Return the jobs without a row, those of one model together for the sake of its caches."""
    waiting = np.ones(space.size, dtype=bool)
    waiting[journal.keys()] = False
    order = np.argsort(space.models(), kind="stable")
    return order[waiting[order]]


class _Loop:
    """Submits tasks and stores rows; a job whose worker dies is submitted again, isolated, at most three times.

    Nobody says which of the jobs in flight has killed a worker. So each becomes a suspect: suspects run with nothing
    beside them, in halves until one job is alone. Only a job that was alone is counted for a death.
    """

    def __init__(
        self,
        backend: Backend,
        space: Space,
        columns: tuple[str, ...],
        waiting: NDArray[np.int64],
        store: Callable[[Sequence[int], Sequence[Row]], None],
    ) -> None:
        self._backend, self._space, self._columns = backend, space, columns
        self._waiting, self._models, self._sent, self._store = waiting, space.models()[waiting], 0, store
        self._flying: dict[Future[tuple[float, list[Row]]], list[int]] = {}
        self._suspects: deque[list[int]] = deque()
        self._suspect_flies = False
        self._deaths: dict[int, int] = {}
        self._seconds_a_job = 0.0

    def run(self) -> None:
        """Return when every job has its row."""
        try:
            while self._flying or self._suspects or self._sent < self._waiting.size:
                lost = self._send() or self._receive()
                if lost:
                    self._recover(lost)
        except (CancelledError, OSError) as error:  # a scheduler that is gone, a machine without room for processes
            reason = str(error) or type(error).__name__
            raise MemcalcError(f"the workers were lost ({reason}); the same call resumes from the journal.") from None

    def _send(self) -> list[list[int]]:
        """Submit tasks to every free worker; return the jobs that were lost because the executor is broken."""
        while self._more():
            suspect = bool(self._suspects)
            indices = self._suspects.popleft() if suspect else self._next()
            try:
                future = self._backend.executor.submit(rows_of, self._task(indices))
            except self._backend.deaths:
                self._suspect_flies = False
                return [indices]
            self._flying[future], self._suspect_flies = indices, suspect
        return []

    def _more(self) -> bool:
        """Whether there is a task to send, and room for it."""
        if self._suspects or self._suspect_flies:
            return bool(self._suspects or self._sent < self._waiting.size) and not self._flying
        return self._sent < self._waiting.size and len(self._flying) < 2 * self._backend.width

    def _next(self) -> list[int]:
        paced = int(_TASK_S / self._seconds_a_job) if self._seconds_a_job else _FIRST_JOBS
        stop = self._sent + max(1, min(paced, _MOST_JOBS))
        models = self._models[self._sent : stop]
        count = int(np.argmax(models != models[0])) or models.size
        indices = self._waiting[self._sent : self._sent + count]
        self._sent += count
        return [int(index) for index in indices]

    def _task(self, indices: Iterable[int]) -> Task:
        space = self._space
        return Task(space.mode, space.preset_dirs, self._columns, tuple(space.job(index) for index in indices))

    def _receive(self) -> list[list[int]]:
        done, _ = wait(self._flying, return_when=FIRST_COMPLETED)
        lost = []
        for future in done:
            indices = self._flying.pop(future)
            try:
                seconds, rows = future.result()
            except self._backend.deaths:
                lost.append(indices)
            else:
                self._seconds_a_job = seconds / len(indices)
                self._store(indices, rows)
        return lost

    def _recover(self, lost: list[list[int]]) -> None:
        if self._backend.breaks:
            while self._flying:
                lost += self._receive()
            self._backend.restart()
        if not self._suspect_flies:
            self._suspects.extend(lost)
        elif len(lost[0]) > 1:
            half = len(lost[0]) // 2
            self._suspects.extendleft([lost[0][half:], lost[0][:half]])
        else:
            self._blame(lost[0][0])

    def _blame(self, index: int) -> None:
        """Count a death for a job that ran isolated; the last one makes it an error row."""
        self._deaths[index] = self._deaths.get(index, 0) + 1
        if self._deaths[index] < _DEATHS:
            self._suspects.appendleft([index])
            return
        task = self._task([index])
        sentence = f"its worker process died {_DEATHS} times, the system may have been out of memory"
        self._store([index], [error_row(task, task.jobs[0], sentence)])
