"""Files: read without waiting, and whole or not there when written; and the TOML that memcalc writes itself.

What is written is checked first, written beside, and moved into place.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from memcalc.errors import FileError

_NUMBER = re.compile(r"[+-]?[0-9.,]*(e[+-]?[0-9]+)?%?", re.ASCII)


class OutputError(FileError):
    """A file cannot be written."""

    problem = "cannot be written"


def there(path: Path) -> bool:
    """Return whether a name leads to something, be it a link that leads nowhere; a name too long to be one does not."""
    try:
        path.lstat()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to be read, or raise FileError saying why it cannot be.

    It is opened without waiting, so that a pipe or a device is refused like any other thing that is no file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise FileError("file", str(path), "must be a regular file")
            yield stream
    except IsADirectoryError:
        raise FileError("file", str(path), "is a folder: give a file of it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "must be the path of a file"
        raise FileError("file", str(path), reason) from None


def output_path(name: str, force: bool, option: str = "output") -> Path:
    """Return the place that `name` leads to, links followed; an existing file only with `force`."""
    path = Path(name)
    for wrong, allowed in (
        (not name or "\0" in name or names_folder(name), "must be the path of a file"),
        (name == "-", "must be the path of a file; without it an answer goes to the screen"),
        (asks(path.exists) and not path.is_file(), "must be a regular file"),
        (not asks(path.parent.is_dir), f"the directory {path.parent} must exist"),
        (not force and asks(path.exists), "exists; use --force to overwrite"),
    ):
        if wrong:
            raise OutputError(option, name, allowed)
    try:
        path.stat()
    except OSError as error:  # of a loop of links, which Python from 3.13 on would replace
        if error.errno == errno.ELOOP:
            raise OutputError(option, name, error.strerror or "is a loop of links") from None
    return path.resolve()


def names_folder(name: str) -> bool:
    """Return whether what was typed is a folder's name by its end, which a path no longer has."""
    return name.endswith(("/", os.sep))


@contextmanager
def begun_folder(name: str) -> Iterator[Path]:
    """Make a folder that is not there, where a name asks for one; it goes again where nothing is written into it."""
    path = Path(name)
    if not names_folder(name) or there(path):
        yield path
        return
    try:
        path.mkdir()
    except OSError as error:
        raise OutputError("output", name, error.strerror or "must be a folder that can be written") from None
    try:
        yield path
    finally:
        if not any(path.iterdir()):
            path.rmdir()


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
        reason = error.strerror or "is not writable"
        raise OutputError("output", str(path), reason) from None


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder for what is written to be read back, gone at the end; where no disk has room, say so."""
    try:
        folder = tempfile.TemporaryDirectory()
    except OSError as error:
        raise OutputError("output", "temporary folder", error.strerror or "no disk takes one") from None
    with folder as name:
        yield Path(name)


def plain_cell(text: str) -> str:
    """Return a cell of CSV that no spreadsheet takes for a formula (owasp.org/www-community/attacks/CSV_Injection).

    >>> plain_cell("=1+2"), plain_cell("-3.5"), plain_cell("-1+2"), plain_cell("-")
    ("'=1+2", '-3.5', "'-1+2", '-')
    """
    if text[:1] in {"=", "@", "\t", "\r"} or (text[:1] in {"+", "-"} and not _NUMBER.fullmatch(text)):
        return f"'{text}"
    return text


def write_folder(folder: Path, texts: Mapping[str, str], *, force: bool) -> None:
    """Write files into a folder: a new one is there with all of them or not at all; in one that is there, each is."""
    if not asks(folder.exists):
        check_folder(folder)
        try:
            beside = Path(tempfile.mkdtemp(prefix=f".{folder.name[:80]}.", dir=folder.absolute().parent))
        except OSError as error:
            raise OutputError("write", str(folder), error.strerror or "must be a folder that can be written") from None
        try:
            beside.chmod(0o777 & ~_umask())
            for name, text in texts.items():
                (beside / name).write_text(text, encoding="utf-8")
            beside.rename(folder)
        except OSError as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise OutputError("write", str(folder), error.strerror or "must be a folder that can be written") from None
        return
    if not folder.is_dir():
        raise OutputError("write", str(folder), "must be a folder")
    for path, text in {output_path(str(folder / name), force): text for name, text in texts.items()}.items():
        with replacing(path) as stream:
            stream.write(text.encode())


def check_folder(folder: Path) -> None:
    """Refuse a new folder whose parent is not there."""
    if not asks(folder.absolute().parent.is_dir):
        raise OutputError("write", str(folder), f"the directory {folder.parent} must exist")


def asks(question: Callable[[], bool]) -> bool:
    """Answer no where a name is too long or no name at all, or a folder may not be entered."""
    try:
        return question()
    except (OSError, ValueError):
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def array_of_tables(name: str, tables: Iterable[Mapping[str, Any]]) -> str:
    """Return ``[[name]]`` tables, one after another.

    >>> print(array_of_tables("run", [{"id": "a", "gpus": 8, "measured": {"allocated": 2**30}}]))
    [[run]]
    id = "a"
    gpus = 8
    measured = { allocated = 1073741824 }
    <BLANKLINE>
    """
    return "\n".join(f"[[{name}]]\n{pairs(table)}" for table in tables)


def document_text(data: Mapping[str, Any]) -> str:
    """Return tables within tables, each under a heading of its own.

    >>> print(document_text({"a": {"b": 1, "c": {"d": "e"}}}))
    [a]
    b = 1
    <BLANKLINE>
    [a.c]
    d = "e"
    <BLANKLINE>
    """
    return "\n".join(_sections(data, ""))


def _sections(table: Mapping[str, Any], heading: str) -> Iterator[str]:
    plain = pairs({key: value for key, value in table.items() if not isinstance(value, Mapping)})
    if heading or plain:
        yield (f"[{heading}]\n" if heading else "") + plain
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _sections(value, f"{heading}.{_key(key)}" if heading else _key(key))


def pairs(table: Mapping[str, Any]) -> str:
    """Return the lines of one table; what is None is left out."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items() if value is not None)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(value: str) -> str:
    # A JSON string is a basic TOML string, but for the one control character that JSON leaves as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    """Return a value as it stands after an equals sign."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return f"{{ {inner} }}" if inner else "{}"
    return f"[{', '.join(map(_value, value))}]"
