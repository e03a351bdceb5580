"""A calibration: fitted, shown, written where it was asked for, and installed for the GPU's own commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from memcalc.cli.errors import fail
from memcalc.cli.output import Destination, deliver, destination
from memcalc.errors import InputError
from memcalc.files import OutputError, output_path, replacing

if TYPE_CHECKING:
    from memcalc.results import Calibrated

__all__ = ["show"]

_FILE = "toml"


def show(paths: Sequence[str], *, gpu: str | None, install: bool, options: dict[str, Any]) -> int:
    """Fit, show the figures, and write the file; return the exit code."""
    import memcalc
    from memcalc import catalog
    from memcalc.report.progress import bar

    force, name = bool(options["force"]), options["output"]
    if options["format"] is None and str(options["output"] or "").lower().endswith(f".{_FILE}"):
        options["format"] = _FILE
    target = destination(options, (_FILE,))
    dirs = tuple(options["preset_dir"] or ())
    if install and gpu is not None:
        _home(catalog.gpu(gpu, dirs).name, force=force)  # before a fit that takes its time
    with bar(noun="calibrate") as listen:
        found = memcalc.calibrate(paths, gpu=gpu, preset_dirs=dirs, on_progress=listen)
    _show(found, target)
    if found.calibration.empty:
        return fail("nothing predicts held-back rows better, so no calibration was written.", 1)
    for path in _write(found, target, install=install, force=force):
        shown = name if path == target.path else path
        typer.echo(f"memcalc: wrote {shown}", err=True)
    return 0


def _show(found: Calibrated, target: Destination) -> None:
    """Show the figures; the text of the file alone where that was asked for on the screen."""
    from memcalc.probe.calibrate.written import text
    from memcalc.report.calibrate import report

    if target.form != _FILE:
        target.show(report(found))
    elif target.path is None:
        deliver(text(found.calibration), None)
    else:
        Destination("rich", None).show(report(found))


def _write(found: Calibrated, target: Destination, *, install: bool, force: bool) -> list[Path]:
    """Write the file where it was asked for."""
    from memcalc.probe.calibrate.written import text

    written = [target.path] if target.form == _FILE and target.path is not None else []
    if install:
        written.append(_home(found.gpu, force=force))
    for path in written:
        with replacing(path) as stream:
            stream.write(text(found.calibration).encode())
    return written


def _home(gpu: str, *, force: bool) -> Path:
    """Return where an installed calibration goes, if it can."""
    from memcalc.calibrations import home_of

    home = home_of(gpu)
    if home is None:
        raise InputError("install", gpu, "the platform tells of no place for it: give --output FILE.toml")
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("install", str(home), error.strerror or "its folder must be writable") from None
    return output_path(str(home), force)
