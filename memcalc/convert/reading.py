"""Other people's text: read whole or refused, within bounds, whatever it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from memcalc.errors import FileError

__all__ = ["LARGEST_FILE", "inside", "read_text", "there"]

LARGEST_FILE = 1 << 20
"""Bytes; the configs of the frameworks themselves have a hundredth of it."""


def read_text(path: Path) -> str:
    """Return the text of a regular UTF-8 file of at most 1 MiB, or raise FileError saying why it cannot be had.

    It is opened without waiting, so that a pipe or a device is refused like any other thing that is no file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise FileError("file", str(path), "must be a regular file")
            content = stream.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or "must be the path of a file"
        raise FileError("file", str(path), said) from None
    if len(content) > LARGEST_FILE:
        raise FileError("file", str(path), "must be at most 1 MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileError("file", str(path), "must be UTF-8 text") from None
    if "\0" in text:
        raise FileError("file", str(path), "must be text, without NUL characters")
    return text


def there(path: Path) -> bool:
    """Return whether a name leads to something, be it a link that leads nowhere; a name too long to be one does not."""
    try:
        path.lstat()
    except (OSError, ValueError):
        return False
    return True


def inside(path: Path, folder: Path) -> bool:
    """Return whether `path`, links followed, lies in `folder` or below it."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links; a name that is no name
        return False
