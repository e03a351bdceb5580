"""What triage is given: a file, standard input or text, read within bounds and told apart."""

from __future__ import annotations

import os
from pathlib import Path

from memcalc.errors import FileError
from memcalc.files import regular, there
from memcalc.probe.triage.logs import read_log
from memcalc.probe.triage.plain_pickle import looks_like_pickle
from memcalc.probe.triage.snapshot import LARGEST_SNAPSHOT

__all__ = ["LARGEST_LOG", "content_of", "is_snapshot", "log_text"]

LARGEST_LOG = 256 << 20
"""Bytes of a log."""
_LONGEST_NAME = 4096


def content_of(source: str | bytes | Path) -> tuple[bytes, str]:
    """Return the bytes of a source, and what it is called; a str that is no file's name but a message is itself.

    Raises :class:`memcalc.errors.FileError` for a file that cannot be read.
    """
    if isinstance(source, bytes):
        return source, "data"
    if isinstance(source, str) and ("\n" in source or len(source) > _LONGEST_NAME or _is_message(source)):
        return source.encode("utf-8", "replace"), "text"
    return _read(Path(source)), Path(source).name


def _is_message(text: str) -> bool:
    """Whether a line is a message rather than a name: names of files that exist are names."""
    return " " in text and not there(Path(text)) and bool(read_log(text).incidents)


def _read(path: Path) -> bytes:
    """Read a regular file; its size is looked at first."""
    with regular(path) as stream:
        head = stream.read(2)
        most = LARGEST_SNAPSHOT if head[:1] in {b"\x80", b"{", b"["} else LARGEST_LOG
        if os.fstat(stream.fileno()).st_size > most:
            raise FileError("file", str(path), f"must be at most {most >> 20} MiB; of a log, give its end")
        return head + stream.read(most)


def is_snapshot(content: bytes) -> bool:
    """Return whether content is a memory snapshot: a pickle, or JSON with segments.

    >>> is_snapshot(b'{"segments": []}'), is_snapshot(b"{} CUDA out of memory")
    (True, False)
    """
    return looks_like_pickle(content) or ((content[:1] in {b"{", b"["} and b'"segments"' in content) or _bare(content))


def _bare(content: bytes) -> bool:
    """A list of segments alone, in JSON."""
    return content[:1] == b"[" and b'"total_size"' in content[:4096]


def log_text(content: bytes, name: str) -> str:
    """Return a log as text; what is no UTF-8 in it is replaced, since logs hold all kinds of bytes."""
    if b"\0" in content[:65536]:
        raise FileError("file", name, "must be a log or a memory snapshot, not another binary file")
    return content.decode("utf-8", "replace")
