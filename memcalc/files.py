"""Files that are whole or not there: checked before anything is computed, written beside, then moved into place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from memcalc.errors import FileError

__all__ = ["OutputError", "output_path", "replacing"]


class OutputError(FileError):
    """A file cannot be written."""

    problem = "cannot be written"


def output_path(name: str, force: bool) -> Path:
    """Return the place that `name` leads to, links followed; an existing file only with `force`."""
    path = Path(name)
    for wrong, allowed in (
        (not name or "\0" in name, "must be the path of a file"),
        (_asks(path.exists) and not path.is_file(), "must be a regular file"),
        (not _asks(path.parent.is_dir), f"the directory {path.parent} must exist"),
        (not force and _asks(path.exists), "must not exist yet, or --force must be given"),
    ):
        if wrong:
            raise OutputError("output", name, allowed)
    return path.resolve()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside `path`, which takes its place at the end: a reader never sees half a file."""
    try:
        descriptor, beside = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                yield stream
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
            Path(beside).chmod(mode)
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        said = error.strerror or "must be a file that can be written"
        raise OutputError("output", str(path), said) from None


def _asks(question: Callable[[], bool]) -> bool:
    """Answer no where the name is too long, or otherwise no name at all."""
    try:
        return question()
    except (OSError, ValueError):
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
