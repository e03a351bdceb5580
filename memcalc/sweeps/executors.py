"""Where tasks run: in this process, in processes of this machine, or on a Dask cluster; all by the same interface."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import wait
from typing import Any, Protocol

from memcalc.errors import InputError
from memcalc.planner.request import positive

_STARTS = 3
"""Times that a pool is started in a row without a process that answers."""
_PAYS_FROM = 8
"""Jobs for which the start of a process, half a second, is worth while."""
_MOST_PROCESSES = 1024
_CONNECT_S = 20
_OBJECTS = 1_000_000
"""New objects after which a worker looks for cycles, as the command line does."""


class Backend(Protocol):
    """An executor that can be started again, and what it raises when a worker dies."""

    deaths: tuple[type[BaseException], ...]
    """What a future raises whose worker died."""
    breaks: bool
    """Whether one death takes all that is in flight."""

    @property
    def width(self) -> int:
        """Number of tasks that run at once."""

    @property
    def executor(self) -> Executor:
        """What takes tasks now."""

    def restart(self) -> None:
        """Replace an executor that a death has broken."""


class _Inline(Executor):
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future that is done."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class _Here:
    deaths: tuple[type[BaseException], ...] = ()
    breaks = False
    width = 1

    def __init__(self) -> None:
        self.executor: Executor = _Inline()

    def restart(self) -> None:
        """Nothing can break."""


class _Processes:
    """Processes of this machine, spawned rather than forked: the same on every platform."""

    deaths: tuple[type[BaseException], ...] = (BrokenProcessPool,)
    breaks = True

    def __init__(self, processes: int) -> None:
        self.width = processes
        self.executor: ProcessPoolExecutor = self._started()

    def restart(self) -> None:
        _end(self.executor)
        self.executor = self._started()

    def _started(self) -> ProcessPoolExecutor:
        for _ in range(_STARTS):
            pool = ProcessPoolExecutor(self.width, multiprocessing.get_context("spawn"), initializer=_prepare)
            try:
                pool.submit(os.getpid).result()
            except BrokenProcessPool:
                _end(pool)
            else:
                return pool
        raise InputError(
            "jobs",
            self.width,
            "no further process could be started; a script must call memcalc.sweep below `if __name__ == '__main__':`",
        )


def _end(pool: ProcessPoolExecutor) -> None:
    """End a broken pool and all of its processes.

    The pool's own thread ends the processes that it knows when one dies, then waits for every one of them: also for
    one that a submission starts meanwhile, which it has not ended and which waits for work for ever
    (CPython 3.11, concurrent/futures/process.py, `terminate_broken` and `join_executor_internals`).
    """
    for process in list((pool._processes or {}).values()):  # noqa: SLF001 - as Python 3.14's `kill_workers` does
        process.kill()
    pool.shutdown(wait=True, cancel_futures=True)


class _Dask:
    """A cluster; the scheduler itself gives a task to another worker when one dies."""

    breaks = False

    def __init__(self, client: Any) -> None:
        from distributed import KilledWorker

        self.deaths: tuple[type[BaseException], ...] = (KilledWorker,)
        self._client = client
        self.executor: Executor = client.get_executor(pure=False, retries=_STARTS)

    @property
    def width(self) -> int:
        """Threads of the cluster now; one while it has none, so that an adaptive cluster grows."""
        threads: dict[str, int] = self._client.nthreads()
        return max(1, sum(threads.values()))

    def restart(self) -> None:
        """The cluster starts its own workers again."""


@contextmanager
def backend_for(jobs: int | str | None, scheduler: str | None, waiting: int) -> Iterator[Backend]:
    """Yield where to run: the requested processes or all cores, at most one for every few waiting jobs."""
    requested = None if jobs is None else positive(jobs, "jobs")
    if requested is not None and requested > _MOST_PROCESSES:
        raise InputError("jobs", jobs, f"must be a whole number from 1 to {_MOST_PROCESSES:,}")
    if scheduler is not None:
        with _cluster(scheduler, requested or _cores()) as client:
            yield _Dask(client)
        return
    processes = min(_cores(), math.ceil(waiting / _PAYS_FROM)) if requested is None else min(requested, waiting)
    if processes <= 1:
        yield _Here()
        return
    backend = _Processes(processes)
    try:
        yield backend
    finally:
        backend.executor.shutdown(wait=True, cancel_futures=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _cluster(scheduler: str, processes: int) -> Iterator[Any]:
    """Connect to a scheduler, or start one with processes of this machine for `local`."""
    if find_spec("distributed") is None:
        raise InputError("scheduler", scheduler, "needs Dask: pip install 'memcalc[distributed]'")
    if not scheduler.strip():  # Dask would start a cluster of its own
        raise InputError("scheduler", scheduler, "must be `local` or the address of a scheduler")
    import dask
    from distributed import Client, LocalCluster

    with contextlib.ExitStack() as stack:
        address = scheduler
        if scheduler == "local":
            # A task that kills is isolated here; given to another worker it would kill that one too, with its results
            stack.enter_context(dask.config.set({"distributed.scheduler.allowed-failures": 0}))
            address = stack.enter_context(
                LocalCluster(n_workers=processes, threads_per_worker=1, processes=True, dashboard_address=None)
            )
        try:
            client = Client(address, set_as_default=False, timeout=_CONNECT_S)
        except (OSError, ValueError, TypeError, RuntimeError, ArithmeticError) as error:
            # An address can be refused by the socket (a port beyond 65535 overflows) before or after the time is out
            reason = str(error) or type(error).__name__
            raise InputError(
                "scheduler", scheduler, f"must be `local` or the address of a scheduler: {reason}"
            ) from None
        yield stack.enter_context(client)


def _prepare() -> None:
    """Prepare a worker: it ignores interrupts, which its parent handles, and ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.set_threshold(_OBJECTS)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
