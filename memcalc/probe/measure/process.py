"""A job in a process of its own, which ends with this one and is stopped when its time is up: both ends of it.

The other end is ``python -m memcalc.probe.measure.process JOB.json RESULT.json``. With ``--ranks N`` in front it
becomes torchrun, which starts N such processes. With ``--forks`` alone it imports what jobs need, and forks one for
each line of its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self, cast

from memcalc.files import replacing


@dataclass(frozen=True)
class ProbeJob:
    """One measurement, for one fresh process or for one of torchrun's groups of them."""

    kind: str
    """Which measurement, and so which function of the live side."""
    id: str
    """Its unique name in the output."""
    settings: dict[str, Any]
    """What the function is given, as JSON."""
    ranks: int = 1
    """Processes; more than one are started by torchrun."""
    seconds: float = 0.0
    """Rough need of time [s]."""
    memory: int = 0
    """Rough need of device memory [bytes]."""

    @property
    def digest(self) -> str:
        """Hash of what is measured, whatever its name."""
        content = json.dumps([self.kind, self.settings, self.ranks], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


START_S = 3.0
"""A job's process and context, its random weights and kernels [s]: 65 jobs of the suite took 2.9 s each on an H100."""
_ROOT = Path(__file__).resolve().parents[3]
_WORKER = (sys.executable, "-m", "memcalc.probe.measure.process")
_SHORTEST_LIMIT_S, _PATIENCE = 300.0, 5.0
"""A job may take so long, or so many times its rough need [s]."""
_SAID = 400


def time_limit(job: ProbeJob) -> float:
    """Return when a job is stopped [s]."""
    return max(_SHORTEST_LIMIT_S, _PATIENCE * job.seconds)


@dataclass(frozen=True)
class Files:
    """What a process of a job reads and writes."""

    job: Path
    result: Path
    output: Path
    """What it prints."""


class Starter(Protocol):
    """Starts a job's process, waits for it, and leaves nothing of it behind."""

    def __call__(self, files: Files, ranks: int, limit: float) -> int | None:
        """Return the exit code, or None where the time [s] was up."""


def fresh(files: Files, ranks: int, limit: float) -> int | None:
    """Start an interpreter of its own, or torchrun with one for each of several ranks."""
    command = [*_WORKER, *(["--ranks", str(ranks)] if ranks > 1 else []), str(files.job), str(files.result)]
    with files.output.open("wb") as log:
        child = subprocess.Popen(  # noqa: S603 - this interpreter, and files of ours
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(os.environ),
            start_new_session=True,
        )
        try:
            return child.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill(child.pid)
            child.wait()


class Forks:
    """Starts jobs from one process that has imported what they need: imports take longer than most jobs.

    That process makes no CUDA context, so that each job has one of its own. Jobs of several ranks, and all jobs where a
    process cannot fork safely, are started afresh.
    """

    def __init__(self) -> None:
        self._parent: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self._parent is not None:
            self._parent.kill()
            self._parent.communicate()

    def __call__(self, files: Files, ranks: int, limit: float) -> int | None:
        """Return the exit code, or None where the time [s] was up."""
        if ranks > 1 or sys.platform != "linux":
            return fresh(files, ranks, limit)
        if self._parent is None or self._parent.poll() is not None:
            self._end()
            self._parent = subprocess.Popen(  # noqa: S603 - this interpreter
                [*_WORKER, "--forks"],
                bufsize=0,  # what is read ahead is not seen by select
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(os.environ),
                start_new_session=True,
            )
        stdin, stdout = cast("IO[bytes]", self._parent.stdin), cast("IO[bytes]", self._parent.stdout)
        stdin.write(json.dumps([str(files.job), str(files.result), str(files.output)]).encode() + b"\n")
        stdin.flush()
        pid = int(stdout.readline() or 0)
        ended = False
        try:
            ended = bool(select.select([stdout], [], [], limit)[0])
        finally:
            if pid and not ended:
                _kill(pid)
        code = stdout.readline()  # of a job that was stopped as well, for the next answer to be the next job's
        return int(code or 1) if ended else None


def run_job(job: ProbeJob, device: str, limit: float, start: Starter = fresh) -> dict[str, Any]:
    """Return the result of a job; a process that ends without one is a crash, with how it ended."""
    with tempfile.TemporaryDirectory(prefix="memcalc-probe-") as folder:
        files = Files(*(Path(folder) / name for name in ("job.json", "result.json", "output.txt")))
        files.job.write_text(json.dumps({**job.settings, "kind": job.kind, "id": job.id, "device": device}), "utf-8")
        files.output.touch()
        exit_code = start(files, job.ranks, limit)
        result = _read(files.result)
        return result if result is not None else _crash(exit_code, limit, files.output.read_text(errors="replace"))


def _kill(pid: int) -> None:
    """Kill what is left of a process and its group; the ranks of torchrun end with their launcher."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
        if hasattr(os, "killpg"):
            os.killpg(pid, signal.SIGKILL)
        else:  # pragma: no cover - Windows
            os.kill(pid, signal.SIGTERM)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job: this memcalc is imported, no package is shadowed, no network is used."""
    paths = [str(_ROOT), *filter(None, [environ.get("PYTHONPATH", "")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


def _read(result_file: Path) -> dict[str, Any] | None:
    try:
        result: dict[str, Any] = json.loads(result_file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return result


def _crash(exit_code: int | None, limit: float, output: str) -> dict[str, Any]:
    """Return the result of a process that gave none."""
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "")[-_SAID:]
    if exit_code is None:
        how = f"stopped after {limit:.0f} s"
    elif exit_code < 0:
        how = f"ended by {signal.Signals(-exit_code).name}"
    else:
        how = f"ended with exit code {exit_code}"
    return {"ok": False, "outcome": "crash", "message": f"{how}: {last}" if last else how}


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
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "memcalc.probe.measure.process", *files])  # noqa: S606


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
