"""The rows as they come, in a file that outlives the process: what is in it is never computed again."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Self

import numpy as np

from memcalc import __version__
from memcalc.errors import CombinationError, InputError
from memcalc.files import OutputError
from memcalc.sweeps.rows import Row

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Journal", "lock"]

_SCHEMA = "memcalc.sweep-journal/1"
_LONGEST_LINE = 1 << 20
_ABSENT = -1


class Journal:
    """Rows in the order in which they came, behind a first line that says whose they are.

    A line is `[place, row]`. The last one may be torn where a process was killed; it is cut off, and computed again.
    In memory stands only where each row begins.
    """

    def __init__(self, path: Path, fingerprint: str, jobs: int) -> None:
        self.path = path
        self._head = {"schema": _SCHEMA, "fingerprint": fingerprint, "version": __version__, "jobs": jobs}
        self._starts = array("q", [_ABSENT]) * jobs
        self.done = 0
        self._stream = self._opened()
        try:
            lock(self._stream, path)
            self._end = self._read()
            self._stream.truncate(self._end)
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def held(self) -> NDArray[np.bool_]:
        """Return for each job whether its row is here."""
        held: NDArray[np.bool_] = np.array(self._starts, dtype=np.int64) != _ABSENT
        return held

    def append(self, rows: Sequence[tuple[int, Row]]) -> None:
        """Write rows so that they are still there after a power cut."""
        try:
            self._stream.seek(self._end)
            for place, row in rows:
                line = json.dumps([place, row], separators=(",", ":"), ensure_ascii=False).encode(
                    errors="backslashreplace"
                )
                self._stream.write(line + b"\n")
                self._note(place, self._end)
                self._end += len(line) + 1
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise OutputError("journal", str(self.path), error.strerror or "must be on a disk with room") from None

    def rows(self) -> Iterator[Row]:
        """Return the rows in the order of the jobs."""
        for start in self._starts:
            self._stream.seek(start)
            yield json.loads(self._stream.readline())[1]

    def _opened(self) -> BinaryIO:
        if (self.path.exists() or self.path.is_symlink()) and not self.path.is_file():
            raise OutputError("journal", str(self.path), "must be a regular file")
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as error:
            raise OutputError("journal", str(self.path), error.strerror or "must be writable") from None
        return os.fdopen(descriptor, "r+b")

    def _read(self) -> int:
        """Note where each row stands; return the end of the last whole line."""
        head = json.dumps(self._head).encode() + b"\n"
        first = self._stream.readline(_LONGEST_LINE)
        if not first.endswith(b"\n") and head.startswith(first):
            self._stream.seek(0)
            self._stream.write(head)
            return len(head)
        if first != head:
            raise CombinationError("journal", self.path.name, self._whose(first))
        end = len(head)
        while (line := self._stream.readline(_LONGEST_LINE)).endswith(b"\n"):
            place = _place(line, len(self._starts))
            if place is None:
                break
            self._note(place, end)
            end += len(line)
        return end

    def _note(self, place: int, start: int) -> None:
        self.done += self._starts[place] == _ABSENT
        self._starts[place] = start

    def _whose(self, first: bytes) -> str:
        """Say why a journal cannot be continued."""
        try:
            other = json.loads(first)
        except (ValueError, RecursionError):
            other = None
        if not isinstance(other, dict) or other.get("schema") != _SCHEMA:
            return "the file is not a journal; move it away, or name another --output"
        by = f"of memcalc {other.get('version')} and not {__version__}" if other.get("version") != __version__ else ""
        return f"it belongs to another sweep{', ' * bool(by)}{by}; delete it, or name another --output"


def _place(line: bytes, jobs: int) -> int | None:
    """Return whose row a line is, or None for what cannot be read."""
    try:
        place, row = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    usable = isinstance(place, int) and not isinstance(place, bool) and 0 <= place < jobs and isinstance(row, list)
    return place if usable else None


def lock(stream: BinaryIO, path: Path, whose: str = "sweep") -> None:
    """Refuse a journal that another process is writing; where there are no such locks, trust."""
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows
        return
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise InputError("journal", path.name, f"another {whose} is writing it") from None
