"""Results of a long run as they come, in a SQLite file, and its progress: an interrupted run goes on with these.

One process at a time writes a journal: SQLite's lock ends with the process that has it. A transaction that a kill or a
power cut interrupts is rolled back when the journal is opened again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from memcalc.errors import CombinationError, InputError
from memcalc.files import OutputError

if TYPE_CHECKING:
    import sqlite3

SUFFIX = ".partial.jsonl"
"""What the name of a journal adds to that of its output."""
_ROLLBACK = "-journal"
"""What SQLite adds to the name of a database for its rollback journal."""
_LONGEST_LINE = 1 << 20
_NO_JOURNAL = "the file is not a journal; move it away, or name another --output"
_TABLES = (
    "CREATE TABLE head (schema TEXT NOT NULL, job TEXT NOT NULL, begun TEXT NOT NULL)",
    "CREATE TABLE entry (key UNIQUE NOT NULL, value TEXT NOT NULL)",
)


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    done: int
    """Results that there are, with those of the journal."""
    jobs: int
    resumed: int = 0
    """Results that the journal had at the start."""
    now: str = ""
    """What runs."""


Listener = Callable[[Progress], None]


class Journal:
    """Values as JSON by key, an int or a str, behind a head that says which job they are of."""

    def __init__(
        self,
        path: Path | None,
        kind: str,
        job: Mapping[str, Any],
        refusal: Callable[[dict[str, Any]], str],
        begun: str = "",
    ) -> None:
        """Open the journal of a job, or begin it; without a path it is in memory.

        ``kind`` is the command, ``refusal`` says of another job why its journal cannot be continued, and ``begun`` is
        the date of a new journal. Raises :class:`memcalc.errors.InputError` for a file that is no journal of this kind
        and job, and for one that another process is writing.
        """
        self.path = path
        self.begun = begun
        """When the job was begun: the date that the file has."""
        self._kind, self._schema = kind, f"memcalc.{kind}-journal/2"
        text = json.dumps(dict(job), sort_keys=True)
        self._database = self._connect()
        try:
            with self._transaction():
                self._compare(text, refusal)
                self.done: int = self._database.execute("SELECT COUNT(*) FROM entry").fetchone()[0]
                """Number of entries."""
        except BaseException:
            self._database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._database.close()

    def append(self, entries: Iterable[tuple[int | str, Any]]) -> None:
        """Write entries so that they are still there after a power cut; the first entry of a key stays."""
        rows = [(key, json.dumps(value, separators=(",", ":"))) for key, value in entries]
        with self._transaction():
            self.done += self._database.executemany("INSERT OR IGNORE INTO entry VALUES (?, ?)", rows).rowcount

    def get(self, key: int | str) -> Any | None:
        """Return the value of a key, or None."""
        with self._errors():
            row = self._database.execute("SELECT value FROM entry WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def keys(self) -> list[Any]:
        """Return all keys in their order."""
        with self._errors():
            return [key for (key,) in self._database.execute("SELECT key FROM entry ORDER BY key")]

    def values(self) -> Iterator[Any]:
        """Yield all values in the order of their keys."""
        with self._errors():
            for (text,) in self._database.execute("SELECT value FROM entry ORDER BY key"):
                yield json.loads(text)

    def remove(self) -> None:
        """Close the journal, and delete its files."""
        self._database.close()
        if self.path is not None:
            remove(self.path)

    def _connect(self) -> sqlite3.Connection:
        import sqlite3

        path = self.path
        if path is not None and (path.exists() or path.is_symlink()) and not path.is_file():
            raise OutputError("journal", str(path), "must be a regular file")
        with self._errors():
            database = sqlite3.connect(path or ":memory:", timeout=0, isolation_level=None)
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA synchronous = EXTRA")
        return database

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors(), self._database:
            self._database.execute("BEGIN EXCLUSIVE")
            yield

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Put SQLite's errors in the user's words."""
        import sqlite3

        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
                raise InputError("journal", self._name, f"another {self._kind} is writing it") from None
            if code == sqlite3.SQLITE_NOTADB:
                raise self._refused(self._foreign()) from None
            if code == sqlite3.SQLITE_CORRUPT:
                raise self._refused("it is damaged; delete it, or name another --output") from None
            raise OutputError("journal", str(self.path), str(error)) from None

    def _compare(self, job: str, refusal: Callable[[dict[str, Any]], str]) -> None:
        """Refuse the journal of another job; an empty file becomes the journal of this one."""
        names = {name for (name,) in self._database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not names:
            for table in _TABLES:
                self._database.execute(table)
            self._database.execute("INSERT INTO head VALUES (?, ?, ?)", (self._schema, job, self.begun))
        elif names != {"head", "entry"}:
            raise self._refused(_NO_JOURNAL)
        schema, stored, self.begun = self._database.execute("SELECT schema, job, begun FROM head").fetchone()
        if schema != self._schema:
            raise self._refused(f"it is a {schema}, not a {self._schema}; move it away, or name another --output")
        if stored != job:
            raise self._refused(refusal(json.loads(stored)))

    def _foreign(self) -> str:
        """Say what a file that is no database is: a journal of an older release, or anything else."""
        try:
            with Path(self.path or "").open("rb") as stream:
                schema = json.loads(stream.readline(_LONGEST_LINE))["schema"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            schema = ""
        if schema == f"memcalc.{self._kind}-journal/1":
            return f"an older memcalc wrote it ({schema}); delete it, or name another --output"
        return _NO_JOURNAL

    def _refused(self, allowed: str) -> CombinationError:
        return CombinationError("journal", self._name, allowed)

    @property
    def _name(self) -> str:
        return "" if self.path is None else self.path.name


def remove(path: Path) -> None:
    """Delete a journal that nobody has open, if it is there."""
    path.unlink(missing_ok=True)
    path.with_name(path.name + _ROLLBACK).unlink(missing_ok=True)
