"""The results as they come, in a file that outlives the process: an interrupted probe goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from memcalc.errors import CombinationError
from memcalc.files import OutputError
from memcalc.probe.measure.jobs import Job
from memcalc.sweeps.journal import lock

__all__ = ["JOURNAL", "Journal"]

JOURNAL = ".partial.jsonl"
"""What the name of a journal adds to that of the runs file."""
_SCHEMA = "memcalc.probe-journal/1"


class Journal:
    """Results by job, behind a first line that says on which machine, with which software and settings.

    A job that crashed is run again; one that ran out of memory is an answer. The last line may be torn where a process
    was killed; it is cut off.
    """

    def __init__(self, path: Path, machine: Mapping[str, Any], date: str) -> None:
        self.path = path
        self.date = date
        """When the probe began."""
        self._known: dict[str, dict[str, Any]] = {}
        try:
            self._stream = path.open("a+b")
        except OSError as error:
            raise OutputError("journal", str(path), error.strerror or "must be writable") from None
        try:
            lock(self._stream, path, "probe")
            self._read(json.loads(json.dumps(dict(machine))))
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def get(self, job: Job) -> dict[str, Any] | None:
        """Return the result of a job, if it is here."""
        return self._known.get(_digest(job))

    def append(self, job: Job, result: dict[str, Any]) -> None:
        """Write a result so that it is still there after a power cut."""
        self._known[_digest(job)] = result
        self._write({"job": job.id, "digest": _digest(job), "result": result})

    def _write(self, entry: Mapping[str, Any]) -> None:
        try:
            self._stream.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise OutputError("journal", str(self.path), error.strerror or "must be on a disk with room") from None

    def _read(self, machine: dict[str, Any]) -> None:
        self._stream.seek(0)
        head, end = self._stream.readline(), 0
        if head.endswith(b"\n"):
            self._same(_object(head), machine)
            end = self._stream.tell()
            while (line := self._stream.readline()).endswith(b"\n") and (entry := _object(line)).get("digest"):
                end = self._stream.tell()
                self._take(entry)
        self._stream.truncate(end)
        if not end:
            self._write({"schema": _SCHEMA, "date": self.date, "machine": machine})

    def _take(self, entry: dict[str, Any]) -> None:
        result = entry["result"]
        if result.get("ok") or result.get("outcome") == "oom":
            self._known[entry["digest"]] = result

    def _same(self, head: dict[str, Any], machine: dict[str, Any]) -> None:
        """Refuse a journal of something else, and say what differs."""
        other = head.get("machine")
        if head.get("schema") != _SCHEMA or not isinstance(other, dict):
            allowed = "the file is no journal of a probe; move it away, or name another --output"
            raise CombinationError("journal", self.path.name, allowed)
        differ = sorted(name for name in machine.keys() | other.keys() if machine.get(name) != other.get(name))
        if differ:
            allowed = f"it was begun with another {', '.join(differ)}; give --force to begin anew, or another --output"
            raise CombinationError("journal", self.path.name, allowed)
        self.date = str(head.get("date", self.date))


def _digest(job: Job) -> str:
    """Return what tells a job from another, whatever its name."""
    told = json.dumps([job.kind, job.settings, job.ranks], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
