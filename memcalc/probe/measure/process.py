"""A job in a fresh process, which ends with this one and is stopped when its time is up."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


_ROOT = Path(__file__).resolve().parents[3]
_SHORTEST_LIMIT_S, _PATIENCE = 300.0, 5.0
"""A job may take so long, or so many times its rough need [s]."""
_SAID = 400


def time_limit(job: ProbeJob) -> float:
    """Return when a job is stopped [s]."""
    return max(_SHORTEST_LIMIT_S, _PATIENCE * job.seconds)


def run_job(job: ProbeJob, device: str, limit: float) -> dict[str, Any]:
    """Return the result of a job; a process that ends without one is a crash, with how it ended."""
    with tempfile.TemporaryDirectory(prefix="memcalc-probe-") as folder:
        job_file, result_file, output = (Path(folder) / name for name in ("job.json", "result.json", "said.txt"))
        job_file.write_text(json.dumps({**job.settings, "kind": job.kind, "id": job.id, "device": device}), "utf-8")
        command = [sys.executable, "-m", "memcalc.probe.measure.worker"]
        command += ["--ranks", str(job.ranks)] if job.ranks > 1 else []
        with output.open("wb") as log:
            child = subprocess.Popen(  # noqa: S603 - this interpreter, and files of ours
                [*command, str(job_file), str(result_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ),
                start_new_session=True,
            )
            exit_code = _wait(child, limit)
        result = _read(result_file)
        return result if result is not None else _crash(exit_code, limit, output.read_text("utf-8", errors="replace"))


def _wait(child: subprocess.Popen[bytes], limit: float) -> int | None:
    """Wait, and leave nothing behind: the exit code, or None where the time was up."""
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and its group; the ranks of torchrun end with their launcher."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended
            os.killpg(child.pid, signal.SIGKILL)
    else:  # pragma: no cover - Windows
        child.kill()
    child.wait()


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
