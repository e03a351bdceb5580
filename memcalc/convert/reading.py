"""Other people's text: read whole or refused, within bounds, whatever it is."""

from __future__ import annotations

from pathlib import Path

from memcalc.errors import FileError
from memcalc.files import regular

__all__ = ["LARGEST_FILE", "inside", "read_text"]

LARGEST_FILE = 1 << 20
"""Bytes; the configs of the frameworks themselves have a hundredth of it."""


def read_text(path: Path) -> str:
    """Return the text of a regular UTF-8 file of at most 1 MiB, or raise FileError saying why it cannot be had."""
    with regular(path) as stream:
        content = stream.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise FileError("file", str(path), "must be at most 1 MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileError("file", str(path), "must be UTF-8 text") from None
    if "\0" in text:
        raise FileError("file", str(path), "must be text, without NUL characters")
    return text


def inside(path: Path, folder: Path) -> bool:
    """Return whether `path`, links followed, lies in `folder` or below it."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links; a name that is no name
        return False
