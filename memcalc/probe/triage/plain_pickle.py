"""Pickles of plain data alone: what a memory snapshot is written as, and nothing that could run or grow.

Two locks. Every opcode is looked at before anything is loaded: only those that build dicts, lists, tuples, strings,
numbers, booleans and None pass, which is all that a snapshot holds (``torch/csrc/cuda/memory_snapshot.cpp`` and
``_dump_snapshot``), so that a class, a call, a persistent id or an extension code is never reached. Then the standard
unpickler loads what passed, with every lookup of a name refused. Lengths and memo places are bounded by the file's own
size, since a few bytes could otherwise ask for gigabytes.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
import re
from typing import Any, NoReturn


class PlainPickleError(Exception):
    """A pickle that is no plain data; the message is what the file must be."""


def looks_like_pickle(content: bytes) -> bool:
    r"""Return whether a file begins as a pickle of protocol 2 or later does.

    >>> looks_like_pickle(b"\x80\x04."), looks_like_pickle(b"{}")
    (True, False)
    """
    return len(content) > 2 and content[0] == 0x80 and content[1] <= 5


_BUILDS = b"}])(tuse.N\x85\x86\x87\x88\x89\x94a"
"""Opcodes without an argument: containers and what fills them, None, booleans, a place in the memo, the end."""
_PROTO, _FRAME = 0x80, 0x95
_STOP = 0x2E
_SHORT_TEXT, _TEXT = 0x8C, 0x58  # one byte of length, four bytes of length


def load_plain(content: bytes) -> Any:
    """Return the data of a pickle, or raise PlainPickleError saying why it is refused; nothing of it is ever run."""
    _inspect(content)
    collecting = gc.isenabled()
    gc.disable()  # plain data has no cycles, and looking for them would take most of the time
    try:
        return _Plain(io.BytesIO(content)).load()
    except PlainPickleError:
        raise
    except MemoryError:
        raise PlainPickleError("needs more memory than there is") from None
    except Exception as error:  # noqa: BLE001  # the unpickler raises what a broken stream leads it to
        raise PlainPickleError(f"is no whole pickle ({type(error).__name__})") from None
    finally:
        if collecting:
            gc.enable()


class _Plain(pickle.Unpickler):
    """The standard unpickler, without names."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every class and function; extension codes come here too."""
        raise PlainPickleError(f"must hold plain data only, not {module[:40]}.{name[:40]}")

    def persistent_load(self, _pid: object) -> NoReturn:
        """Refuse what lies outside the file."""
        raise PlainPickleError("must hold plain data only, without persistent ids")


def _inspect(content: bytes) -> None:
    """Look at every opcode, in runs of those whose length is fixed."""
    if not looks_like_pickle(content):
        raise PlainPickleError("must be a pickle of protocol 2 to 5, as torch writes it")
    run = _run_of_fixed(len(content))
    index, size = 2, len(content)
    while index < size:
        match = run.match(content, index)
        index = match.end() if match else index
        if index >= size:
            break
        code = content[index]
        if code == _STOP:
            if index + 1 != size:
                raise PlainPickleError("must be one pickle, with nothing after it")
            return
        index = _past_text(content, index, code)
    raise PlainPickleError("is cut off")


def _run_of_fixed(size: int) -> re.Pattern[bytes]:
    """A pattern of one or more allowed opcodes of fixed length; places in the memo stay below the file's size."""
    builds = re.escape(_BUILDS.replace(b".", b""))
    memo_index = rb"[\x00-\xff]%b" % _up_to(size >> 24) if size >> 24 else rb"%b\x00" % _up_to(size >> 16)
    longs = b"|".join(rb"\x8a\x%02x[\x00-\xff]{%d}" % (length, length) for length in (6, 8, 5, 7, 4, 3, 2, 1, 9, 0))
    parts = (
        rb"[%b]" % builds,
        rb"[hqK][\x00-\xff]",  # from and to the memo, and a number of one byte
        rb"j[\x00-\xff]{2}(?:%b)" % memo_index,
        rb"r[\x00-\xff]{2}(?:%b)" % memo_index,
        rb"M[\x00-\xff]{2}",
        rb"J[\x00-\xff]{4}",
        rb"G[\x00-\xff]{8}",
        rb"\x95[\x00-\xff]{8}",
        longs,
    )
    return re.compile(rb"(?:%b)++" % b"|".join(parts))


def _up_to(most: int) -> bytes:
    """A byte of at most this value, as a pattern."""
    return rb"[\x00-\x%02x]" % min(most, 255)


def _past_text(content: bytes, index: int, code: int) -> int:
    """Return where the opcode after a string begins, or refuse any other opcode."""
    if code == _SHORT_TEXT and index + 1 < len(content):
        after = index + 2 + content[index + 1]
    elif code == _TEXT:
        after = index + 5 + int.from_bytes(content[index + 1 : index + 5], "little")
    else:
        raise PlainPickleError(_refusal(content[index : index + 1]))
    if after > len(content):
        raise PlainPickleError("is cut off")
    return after


def _refusal(code: bytes) -> str:
    names = {opcode.code.encode("latin-1"): opcode.name for opcode in pickletools.opcodes}
    name = names.get(code)
    if name is None:
        return "is no pickle"
    if name in {
        "LONG1",
        "LONG_BINPUT",
        "LONG_BINGET",
        "BINGET",
        "BINPUT",
        "BININT",
        "BININT1",
        "BININT2",
        "BINFLOAT",
        "FRAME",
    }:
        return f"must be a whole pickle with numbers that a snapshot can hold ({name})"
    return f"must hold plain data only, as torch writes it, without the opcode {name}"
