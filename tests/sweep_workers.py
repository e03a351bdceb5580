"""What workers of test_sweep.py do in place of their task; spawned processes import it by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from memcalc.sweeps.rows import Row, Task, rows_of

DEADLY = 1111
"""A sequence length that no worker survives."""
FLAG = "MEMCALC_TEST_FLAG"
"""Names a file; the first worker that makes it dies."""


def killed_by_one_job(task: Task) -> tuple[float, list[Row]]:
    """Die of one job, whenever it comes."""
    if any(job.options["seq_len"] == DEADLY for job in task.jobs):
        os.kill(os.getpid(), signal.SIGKILL)
    return rows_of(task)


def killed_once(task: Task) -> tuple[float, list[Row]]:
    """Die of the first task."""
    try:
        Path(os.environ[FLAG]).touch(exist_ok=False)
    except FileExistsError:
        return rows_of(task)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0, []


def never_starts(_: Task) -> tuple[float, list[Row]]:
    """Stand for a task that lasts until its parent is gone."""
    time.sleep(600)
    return 0.0, []


def paused() -> int:
    """Return this process's number, late enough for a second task to start a process of its own."""
    time.sleep(1)
    return os.getpid()
