"""The journal of sweep and probe: what is committed outlives a kill, and whose file it is."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import CombinationError, InputError
from memcalc.files import OutputError
from memcalc.journal import Journal, remove


def other(job: dict[str, Any]) -> str:
    return f"it is of job {job['name']}"


def opened(path: Path | None, name: str = "a", kind: str = "sweep", begun: str = "") -> Journal:
    return Journal(path, kind, {"name": name}, other, begun)


def test_entries_are_there_again_in_the_order_of_their_keys(tmp_path: Path) -> None:
    """Any text is, be it half a surrogate pair; the first entry of a key stays."""
    path = tmp_path / "j"
    with opened(path, begun="2026-01-01") as journal:
        journal.append([(10, ["ten", "\udc80 é \0"]), (2, None)])
        journal.append([(2, "second")])
        assert journal.done == 2
    with opened(path, begun="2026-02-02") as journal:
        assert (journal.done, journal.keys(), journal.begun) == (2, [2, 10], "2026-01-01")
        assert list(journal.values()) == [None, ["ten", "\udc80 é \0"]]
        assert (journal.get(10), journal.get(11)) == (["ten", "\udc80 é \0"], None)
        journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_memory_is_a_journal_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(None) as journal:
        journal.append([("x", 1)])
        assert journal.keys() == ["x"]
        journal.remove()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys
from pathlib import Path
from memcalc.journal import Journal
journal = Journal(Path(sys.argv[1]), "sweep", {"name": "a"}, lambda job: "")
journal.append([(number, "x" * 3000) for number in range(5)])
def entries():
    for number in range(5, 3000):
        yield number, "y" * 3000
database = journal._database
database.execute("PRAGMA cache_size = 4")  # pages of the open transaction are in the file when it is killed
with journal._transaction():
    database.executemany("INSERT INTO entry VALUES (?, ?)", entries())
    print("now", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_kill_amid_a_transaction_loses_that_transaction_alone(tmp_path: Path) -> None:
    path = tmp_path / "j"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    assert path.stat().st_size > 1_000_000, "half a transaction is in the file"
    with pytest.raises(InputError, match="another sweep is writing it"):
        opened(path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with opened(path) as journal:
        assert journal.keys() == [0, 1, 2, 3, 4]
        journal.append([(5, "z")])
    with opened(path) as journal:
        assert (journal.done, journal.get(4), journal.get(5)) == (6, "x" * 3000, "z")
        journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path / "j"), pytest.raises(InputError, match="another sweep is writing it"):
        opened(tmp_path / "j")
    opened(tmp_path / "j").remove()


def foreign_database(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE mine (note TEXT)")
    database.close()


def sixteen_pages_cut(path: Path) -> None:
    with opened(path) as journal:
        journal.append((number, "x" * 3000) for number in range(100))
    os.truncate(path, 16 * 4096)


def written(path: Path, name: str = "a", kind: str = "sweep") -> None:
    with opened(path, name, kind) as journal:
        journal.append([(1, 2)])


REFUSED: list[tuple[Any, str]] = [
    (lambda path: path.write_text("my own notes\n"), "the file is not a journal; move it away"),
    (lambda path: path.write_bytes(b"\x00\xff" * 4096), "the file is not a journal; move it away"),
    (lambda path: path.write_text("[" * 99999), "the file is not a journal; move it away"),
    (foreign_database, "the file is not a journal; move it away"),
    (lambda path: written(path, "b"), "it is of job b"),
    (lambda path: written(path, kind="probe"), "it is a memcalc.probe-journal/2, not a"),
    (
        lambda path: path.write_text(json.dumps({"schema": "memcalc.sweep-journal/1", "jobs": 8}) + "\n[0,[1]]\n"),
        r"an older memcalc wrote it \(memcalc.sweep-journal/1\); delete it",
    ),
    (sixteen_pages_cut, "it is damaged; delete it"),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED, ids=[sentence[:30] for _, sentence in REFUSED])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, make: Any, sentence: str) -> None:
    path = tmp_path / "j"
    make(path)
    before = path.read_bytes()
    allowed = f"^journal 'j': {sentence}"
    with pytest.raises(CombinationError, match=allowed) as caught, opened(path) as journal:
        list(journal.values())
    assert str(caught.value).count("\n") == 0
    assert path.read_bytes() == before
    remove(path)
    with opened(path) as journal:
        assert journal.done == 0


def test_where_nothing_can_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="must be a regular file"):
        opened(tmp_path / "folder")
    with pytest.raises(OutputError, match="unable to open database file"):
        opened(tmp_path / "absent" / "j")
