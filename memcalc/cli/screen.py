"""What the screen, or the pipe in its place, can show: columns, colours, characters."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys

__all__ = ["PIPED_WIDTH", "ascii_only", "coloured", "in_encoding", "width"]

PIPED_WIDTH = 100
_DRAWN = "█▏├┃·×⌈→"
_DUMB = {"dumb", "unknown"}
_NO = {"", "0", "false", "no"}


def width() -> int:
    """Return the columns of the terminal, those that COLUMNS tells, or a pipe's.

    Behind a pipe on a terminal, as in ``| less``, that terminal's count; a file gets the same on every machine.
    """
    return shutil.get_terminal_size((_watched() or PIPED_WIDTH, 24)).columns


def _watched() -> int:
    """Return the columns of the terminal on which a pipe is likely to be read, 0 for none."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if stat.S_ISFIFO(os.fstat(sys.stdout.fileno()).st_mode) and sys.stderr.isatty():
            return os.get_terminal_size(sys.stderr.fileno()).columns
    return 0


def coloured() -> bool:
    """Whether to write colours: NO_COLOR (no-color.org) wins, then FORCE_COLOR (force-color.org), then the terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    forced = os.environ.get("FORCE_COLOR", "")
    if forced:
        return forced.lower() not in _NO
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in _DUMB


def ascii_only() -> bool:
    """Whether nothing but ASCII can be shown: by the stream's encoding, or since the locale is C by name."""
    return _is_c_locale() or not in_encoding(_DRAWN)


def in_encoding(text: str) -> bool:
    """Whether the screen's encoding has every character of `text`."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _is_c_locale() -> bool:
    """Whether a locale was chosen and is C: Python writes UTF-8 there all the same (PEP 538), and terminals may not."""
    if os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8") == "1":
        return False
    said = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return next((value for value in said if value), "") in {"C", "POSIX"}
