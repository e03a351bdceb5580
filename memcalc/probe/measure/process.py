"""A job in a fresh process, which ends with this one and is stopped when its time is up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memcalc.probe.measure.jobs import Job

__all__ = ["limit_of", "run_job"]

_ROOT = Path(__file__).resolve().parents[3]
_SHORTEST_LIMIT_S, _PATIENCE = 300.0, 5.0
"""A job may take so long, or so many times its rough need [s]."""
_SAID = 400


def limit_of(job: Job) -> float:
    """Return when a job is stopped [s]."""
    return max(_SHORTEST_LIMIT_S, _PATIENCE * job.seconds)


def run_job(job: Job, device: str, limit: float) -> dict[str, Any]:
    """Return the result of a job; a process that ends without one is a crash, and says how it ended."""
    with tempfile.TemporaryDirectory(prefix="memcalc-probe-") as place:
        asked, answer, said = (Path(place) / name for name in ("job.json", "result.json", "said.txt"))
        asked.write_text(json.dumps({**job.settings, "kind": job.kind, "id": job.id, "device": device}), "utf-8")
        command = [sys.executable, "-m", "memcalc.probe.measure.worker"]
        command += ["--ranks", str(job.ranks)] if job.ranks > 1 else []
        with said.open("wb") as log:
            child = subprocess.Popen(  # noqa: S603 - this interpreter, and files of ours
                [*command, str(asked), str(answer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ),
                start_new_session=True,
            )
            ended = _ended(child, limit)
        found = _read(answer)
        return found if found is not None else _crash(ended, limit, said.read_text("utf-8", errors="replace"))


def _ended(child: subprocess.Popen[bytes], limit: float) -> int | None:
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


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a job: this memcalc is found, a folder's files shadow no package, no network is asked."""
    paths = [str(_ROOT), *filter(None, [own.get("PYTHONPATH", "")])]
    return {**own, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1"}


def _read(answer: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _crash(ended: int | None, limit: float, said: str) -> dict[str, Any]:
    """Return the result of a process that gave none."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")[-_SAID:]
    if ended is None:
        how = f"stopped after {limit:.0f} s"
    elif ended < 0:
        how = f"ended by {signal.Signals(-ended).name}"
    else:
        how = f"ended with exit code {ended}"
    return {"ok": False, "outcome": "crash", "message": f"{how}: {last}" if last else how}
