"""Where an answer goes: the screen, a pipe, or a file that is whole or not there."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.cli import screen
from memcalc.errors import InputError, UnknownNameError
from memcalc.files import output_path, replacing

if TYPE_CHECKING:
    from memcalc.report import Report

__all__ = ["Destination", "deliver", "destination", "draw", "picture_targets"]

_FORMAT = "MEMCALC_FORMAT"
"""The variable that names the format of what is shown, for who wants another than the terminal's always."""


@dataclass(frozen=True)
class Destination:
    """A format, and a file unless the answer is shown."""

    form: str
    path: Path | None

    def show(self, report: Report) -> None:
        """Render `report` and deliver it."""
        from memcalc.report import render

        if self.path is not None:
            deliver(render(report, self.form, width=screen.PIPED_WIDTH), self.path)
            return
        text = render(report, self.form, width=screen.width(), colour=screen.coloured(), ascii_only=screen.ascii_only())
        deliver(text, None)


def deliver(text: str, path: Path | None) -> None:
    """Write to a file, whole or not at all, or to the screen."""
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
    form = form or (format_for(path) if path else os.environ.get(_FORMAT) or "rich")
    forms = (*FORMATS, *extra)
    if form not in forms:
        raise UnknownNameError("format", form, f"must be one of {', '.join(forms)}", forms)
    return Destination(form, output_path(path, bool(force)) if path is not None else None)


def picture_targets(options: dict[str, Any], *names: str) -> dict[str, Path]:
    """Take the files of pictures out of `options`, before `destination` does so, and check them: one file each."""
    written = {"output": options["output"]} if options.get("output") else {}
    found: dict[str, Path] = {}
    for name in names:
        value = options.pop(name)
        if value is None:
            continue
        from memcalc.report.charts.picture import target_of

        found[name] = target_of(name, value, bool(options["force"]))
        for other, taken in written.items():
            if Path(taken).absolute() == found[name].absolute():
                raise InputError(name, value, f"--{other} is written to that file")
        written[name] = value
    return found


def draw(pictures: dict[str, Path], modules: dict[str, str], result: Any) -> None:
    """Draw the pictures that were asked for, each by its module of :mod:`memcalc.report.charts`."""
    from importlib import import_module

    for name, path in pictures.items():
        from memcalc.report.charts.picture import save

        save(import_module(f"memcalc.report.charts.{modules[name]}").chart(result), path)


def _write(path: Path, text: str) -> None:
    with replacing(path) as stream:
        stream.write(text.encode(errors="backslashreplace"))


def _print(text: str) -> None:
    """Write to the screen or a pipe; a reader that has seen enough is no error."""
    if not screen.in_encoding(text):
        from memcalc.report.glyphs import ascii_text

        text = ascii_text(text)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
