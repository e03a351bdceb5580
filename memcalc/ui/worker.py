"""The process behind the page: reads requests from its standard input, and writes answers to its standard output."""

from __future__ import annotations

import contextlib
import gc
import signal
import struct
import sys
from typing import BinaryIO

from memcalc.ui.answers import reply

_HEAD = struct.Struct(">II")
_OBJECTS = 200_000
"""New objects after which cycles are looked for: a replay makes many tuples and no cycle."""


def main() -> None:
    """Answer until there is nothing more to read."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever prints must not stand between answers
    gc.set_threshold(_OBJECTS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which ends this one
    with contextlib.suppress(BrokenPipeError):  # the server is gone
        _answer_all(source, target)


def _answer_all(source: BinaryIO, target: BinaryIO) -> None:
    while (request := _read(source)) is not None:
        answer = reply(request, _read(source) or "")
        media = answer.kind.encode()
        target.write(_HEAD.pack(answer.status, len(answer.body)) + _HEAD.pack(len(media), 0) + media + answer.body)
        target.flush()


def _read(source: BinaryIO) -> str | None:
    """Return the next text; None at the end."""
    head = source.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, _ = _HEAD.unpack(head)
    return source.read(length).decode()


if __name__ == "__main__":
    main()
