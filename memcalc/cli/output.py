"""Where an answer goes: the screen, a pipe, or a file that is complete or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import typer

from memcalc.errors import InputError, MemcalcError, UnknownNameError
from memcalc.files import output_path, replacing

if TYPE_CHECKING:
    from memcalc.report import Report


class NoOutputError(MemcalcError):
    """The answer cannot be shown; its exit code says nothing of the job."""

    exit_code = 74  # EX_IOERR of sysexits.h

    def __init__(self, reason: str) -> None:
        super().__init__(f"the answer could not be written: {reason}.")


WORKBOOK = "xlsx"
"""The one format that is no text, and goes into a file alone."""
INTERRUPTED = 130
"""The exit code after an interrupt: 128 + SIGINT, as shells report it."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What the system says where a disk takes nothing more."""
_FORMAT = "MEMCALC_FORMAT"
"""The variable that names the format of what is shown, for who wants another than the terminal's always."""


class Destination(NamedTuple):
    """A format, and a file unless the answer is shown."""

    form: str
    path: Path | None
    details: bool = False
    """Whether a terminal shows all of the answer."""

    def show(self, report: Report) -> None:
        """Render `report` and deliver it."""
        from memcalc.report import render

        if self.path is not None and self.form == WORKBOOK:
            from memcalc.report.workbook import workbook

            with replacing(self.path) as stream:
                stream.write(workbook(report, str(self.path)))
            return
        if self.path is not None:
            deliver(render(report, self.form, width=PIPED_WIDTH, details=self.details), self.path)
            return
        text = render(
            report, self.form, width=width(), colour=coloured(), ascii_only=ascii_only(), details=self.details
        )
        deliver(text, None)


def deliver(text: str, path: Path | None) -> None:
    """Write to a file, completely or not at all, or to the screen."""
    if path is None:
        _print(text)
    else:
        _write(path, text)


def destination(options: dict[str, Any], extra: tuple[str, ...] = ()) -> Destination:
    """Take format, output and force out of `options`, and check them before anything is computed.

    `extra` are formats that this command has besides.
    """
    from memcalc.report import FORMATS, format_for

    form, path, force = options.pop("format"), options.pop("output"), options.pop("force")
    details = bool(options.pop("verbose", False))
    form = form or (format_for(path) if path else os.environ.get(_FORMAT) or "rich")
    forms = (*FORMATS, WORKBOOK, *extra)
    if form not in forms:
        raise UnknownNameError("format", form, f"must be one of {', '.join(forms)}", forms)
    if form == WORKBOOK:
        from memcalc.report.workbook import require

        require(path)
    return Destination(form, output_path(path, bool(force)) if path is not None else None, details)


def fail(sentence: str, code: int) -> int:
    """Print one line on stderr; return `code`."""
    tell(f"memcalc: {' '.join(sentence.split())}")
    return code


def unwritten(error: OSError) -> int:
    """Say that standard output takes nothing, and return the exit code; any other error is raised again.

    Help and versions are printed by typer. A file that cannot be opened or written has a name.
    """
    if error.filename is not None or error.errno not in _FULL:
        raise error
    _discard(sys.stdout)
    full = NoOutputError(os.strerror(error.errno))
    return fail(str(full), full.exit_code)


def tell(line: str) -> None:
    """Print a line on stderr, with nothing in it that a terminal obeys.

    Where nobody can read it, the exit code still says what it has to.
    """
    plain = "".join(letter if letter.isprintable() or letter == "\n" else _escaped(letter) for letter in line)
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    try:
        typer.echo(plain.encode(encoding, "backslashreplace").decode(encoding), err=True)
    except OSError:
        _discard(sys.stderr)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def picture_targets(options: dict[str, Any], *names: str) -> dict[str, Path]:
    """Take the files of pictures out of `options`, before `destination` does so, and check them: one file each."""
    written = {"output": options["output"]} if options.get("output") else {}
    paths: dict[str, Path] = {}
    for name in names:
        value = options.pop(name)
        if value is None:
            continue
        from memcalc.report.charts import target_of

        paths[name] = target_of(name, value, bool(options["force"]))
        for other, taken in written.items():
            if Path(taken).absolute() == paths[name].absolute():
                raise InputError(name, value, f"--{other} is written to that file")
        written[name] = value
    return paths


def draw(pictures: dict[str, Path], charts: dict[str, str], result: Any) -> None:
    """Draw the pictures that were asked for, each as a chart of :mod:`memcalc.report.charts`."""
    for name, path in pictures.items():
        from memcalc.report.charts import chart_of, save

        save(chart_of(charts[name], result), path)


def _write(path: Path, text: str) -> None:
    with replacing(path) as stream:
        stream.write(text.encode(errors="backslashreplace"))


def _print(text: str) -> None:
    """Write to the screen or a pipe; a reader that has seen enough is no error."""
    if not in_encoding(text):
        from memcalc.report.palette import ascii_text

        text = ascii_text(text)
    if sys.stdout is None:
        raise NoOutputError("the standard output is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
    except OSError as error:
        _discard(sys.stdout)
        raise NoOutputError(error.strerror or "the standard output takes nothing") from None


def _discard(stream: TextIO) -> None:
    """Let what is still to be written go nowhere: the interpreter would try again at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# ------------------------------------------------------------------------------------------------ what the screen shows


PIPED_WIDTH = 100
WIDEST = 1000
"""Columns that are drawn at the most; no screen has as many, and a bar takes time by its width."""
_DRAWN = "█▏├┃·×⌈→"
_DUMB = {"dumb", "unknown"}
_NO = {"", "0", "false", "no"}


def width() -> int:
    """Return the columns of the terminal, those that COLUMNS tells, or a pipe's.

    Behind a pipe on a terminal, as in ``| less``, that terminal's count; a file gets the same on every machine.
    """
    return min(shutil.get_terminal_size((_watched() or PIPED_WIDTH, 24)).columns, WIDEST)


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
    return bool(sys.stdout and sys.stdout.isatty()) and os.environ.get("TERM", "").lower() not in _DUMB


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
    locales = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    return next((value for value in locales if value), "") in {"C", "POSIX"}
