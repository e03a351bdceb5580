"""One job in one process: ``python -m memcalc.probe.measure.worker JOB.json RESULT.json``.

With ``--ranks N`` in front it becomes torchrun, which starts N such processes. With ``--forks`` alone it imports what
jobs need, and forks one for each line of its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from memcalc.files import replacing

KINDS = {
    "look": "memcalc.probe.live.machine:run_look",
    "step": "memcalc.probe.live.steps:run_step",
    "machine": "memcalc.probe.live.machine:run_machine",
    "rates": "memcalc.probe.live.rates:run_rates",
    "collectives": "memcalc.probe.live.ranks:run_collectives",
    "sharded": "memcalc.probe.live.ranks:run_sharded",
}
"""The function that measures each kind of job; it takes the job and returns the result without `ok`."""

_LONGEST_MESSAGE = 2000
_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux's prctl: it outlives an exec."""
_NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""Messages of torch, of libraries that call the driver, and of torch's allocator of a CPU."""


def result_of(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job; out of memory and any other failure are results as well."""
    try:
        return {"ok": True, **_function(job["kind"])(job)}
    except Exception as error:  # noqa: BLE001 - one row that fails is a row, not the end of the probe
        outcome = "oom" if _out_of_memory(error) else "crash"
        message = f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
        return {"ok": False, "outcome": outcome, "message": message}


def main(arguments: list[str]) -> int:
    """Read the job, run it, and write the result: of several ranks the first, or one that failed.

    A rank that failed ends with 1, upon which torchrun ends those that wait for it.
    """
    _end_with_parent()
    if arguments[0] == "--ranks":
        _become_ranks(arguments[1], arguments[2:])
    if arguments[0] == "--forks":
        arguments = _fork_for_each(sys.stdin)
        _end_with_parent()  # a fork does not inherit it
    job_file, result_file = map(Path, arguments)
    result = result_of(json.loads(job_file.read_text(encoding="utf-8")))
    if int(os.environ.get("RANK", "0")) == 0 or not result["ok"]:
        with replacing(result_file) as stream:
            stream.write(json.dumps(result).encode())
    return int(not result["ok"])


def _function(kind: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    module, name = KINDS[kind].split(":")
    function: Callable[[dict[str, Any]], dict[str, Any]] = getattr(import_module(module), name)
    return function


def _out_of_memory(error: Exception) -> bool:
    """Whether memory was short; torch's own error is a RuntimeError with such a message."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    )


def _end_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _become_ranks(ranks: str, files: list[str]) -> None:
    """Turn into torchrun: the ranks end with it, as it ends with the driver."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "memcalc.probe.measure.worker", *files])  # noqa: S606


def _answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _fork_for_each(lines: Iterable[str]) -> list[str]:
    """Fork a process for each line with files of a job, and print its id and its exit code; return in the new ones.

    Nothing here may ask for the device: a process that did so hands no context to those that it forks.
    """
    import_module("memcalc.probe.live.step_models").load_classes()
    for line in lines:
        pid = os.fork()
        if pid == 0:
            job, result, output = json.loads(line)
            for stream, flags, numbers in ((os.devnull, os.O_RDONLY, (0,)), (output, os.O_WRONLY, (1, 2))):
                for number in numbers:
                    os.dup2(os.open(stream, flags), number)
            return [job, result]
        os.setpgid(pid, pid)  # for it to be stopped with all that it starts
        _answer(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing that it started is left
            os.killpg(pid, signal.SIGKILL)
        _answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os._exit(0)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Leaving at once: destructors of CUDA, NCCL and gloo may hang after a failure, and nothing is left to do
    os._exit(code)
