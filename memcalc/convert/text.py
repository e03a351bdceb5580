"""Text of other people's files: read complete and within bounds, or refused; where values stand in it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from memcalc.errors import FileError
from memcalc.files import regular

KeyPath = tuple[str | int, ...]
"""Keys and indices that lead to a value."""
DEEPEST = 64
"""Tables within tables; the deepest known config has 6."""
LARGEST_FILE = 1 << 20
"""Bytes; the configs of the frameworks themselves have a hundredth of it."""


class Span(NamedTuple):
    """Where a value stands in the text [characters]: that of its key, then its own begin and end."""

    key: int
    begin: int
    end: int


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
