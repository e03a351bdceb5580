"""Where an answer goes: the screen, a pipe, or a file that is whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.errors import FileError, UnknownNameError

if TYPE_CHECKING:
    from memcalc.report import Report

__all__ = ["Destination", "destination"]

_PIPED_WIDTH = 100


class _OutputError(FileError):
    problem = "cannot be written"


@dataclass(frozen=True)
class Destination:
    """A format, and a file unless the answer is shown."""

    form: str
    path: Path | None

    def show(self, report: Report) -> None:
        """Render `report` and deliver it."""
        from memcalc.report import render

        if self.path is None:
            _print(render(report, self.form, width=_width(), colour=_coloured()))
        else:
            _write(self.path, render(report, self.form, width=_PIPED_WIDTH))


def destination(options: dict[str, Any]) -> Destination:
    """Take format, output and force out of `options`, and check them before anything is computed."""
    from memcalc.report import FORMATS, format_for

    form, path, force = options.pop("format"), options.pop("output"), options.pop("force")
    form = form or (format_for(path) if path else "rich")
    if form not in FORMATS:
        raise UnknownNameError("format", form, f"must be one of {', '.join(FORMATS)}", FORMATS)
    return Destination(form, _checked(path, bool(force)) if path is not None else None)


def _checked(name: str, force: bool) -> Path:
    path = Path(name)
    for wrong, allowed in (
        (not name or "\0" in name, "must be the path of a file"),
        (_asks(path.exists) and not path.is_file(), "must be a regular file"),
        (not _asks(path.parent.is_dir), f"the directory {path.parent} must exist"),
        (not force and _asks(path.exists), "must not exist yet, or --force must be given"),
    ):
        if wrong:
            raise _OutputError("output", name, allowed)
    return path.resolve()


def _asks(question: Callable[[], bool]) -> bool:
    """Answer no where the name is too long, or otherwise no name at all."""
    try:
        return question()
    except (OSError, ValueError):
        return False


def _write(path: Path, text: str) -> None:
    """Write beside `path`, then move into place: a reader never sees half a file."""
    try:
        descriptor, beside = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n", errors="backslashreplace") as stream:
                stream.write(text)
            mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
            Path(beside).chmod(mode)
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
    except OSError as error:
        said = error.strerror or "must be a file that can be written"
        raise _OutputError("output", str(path), said) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _print(text: str) -> None:
    """Write to the screen or a pipe; a reader that has seen enough is no error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _width() -> int:
    return shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns


def _coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
