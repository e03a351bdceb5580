"""Calibrations: read and checked, found for a GPU in the user's own configuration, and put in place of its figures."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc import catalog
from memcalc.errors import CombinationError, FileError, InputError, UnknownNameError
from memcalc.files import asks

if TYPE_CHECKING:
    from memcalc.specs.calibration import Calibration
    from memcalc.specs.hardware import GPU

OF_GPU = ("matmul", "attention")
"""Constants that each GPU has its own of; the others are of kinds of kernels, optimizers and links."""
NONE = "none"
"""The word that switches a calibration off."""


def applied(chip: GPU, named: str | None, *, look: bool = True) -> tuple[GPU, str]:
    """Return a GPU with the figures of a calibration, and the word that names it again: a path, `none`, or nothing.

    Parameters
    ----------
    chip : the GPU [-]
    named : a file, `none`, or None where the user said nothing [-]
    look : whether the user's configuration is looked into where nothing was said [-]

    Raises :class:`memcalc.errors.CombinationError` for a calibration of another GPU.
    """
    if named is None:
        home = home_of(chip.name) if look else None
        if home is None or not asks(home.is_file):
            return chip, ""
        named = str(home)
    if named == NONE:
        return chip, NONE
    calibration = read(named)
    if calibration.gpu != chip.name:
        raise CombinationError(
            "calibration", named, f"it was measured on {calibration.gpu}, and the job's GPU is {chip.name}"
        )
    return chip.calibrated(calibration), named


def word(value: object) -> str:
    """The path of a file, or none."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise InputError("calibration", value, "must be a file that memcalc calibrate wrote, or none")
    return str(os.fspath(value))


def home_of(gpu: str) -> Path | None:
    """Return where the user's own calibration of a GPU lies, or would lie: beside the folder of own presets."""
    folder = catalog.config_dir()
    return None if folder is None else folder.parent / "calibrations" / f"{Path(gpu).name}.toml"


def read(path: str) -> Calibration:
    """Return the calibration in a file.

    Raises :class:`memcalc.errors.InputError` for a file that is none, or holds a constant that no formula asks for.
    """
    from memcalc.specs.calibration import Calibration

    if not path or "\0" in path:
        raise InputError("calibration", path, "must be a file that memcalc calibrate wrote, or none")
    what = f"calibration {path}"
    try:
        data = catalog.read_toml(Path(path))
    except (OSError, ValueError):  # no name that a file could have
        raise FileError("calibration", path, "must be an existing regular file") from None
    except InputError as error:
        raise error.within("calibration") from None
    calibration = catalog.validated(Calibration, data, what)
    try:
        _check(calibration)
    except InputError as error:
        raise error.within(what) from None
    return calibration


def _check(calibration: Calibration) -> None:
    for row in calibration.reserve:
        catalog.reserve(row.name)
    known = _constants()
    for constant in calibration.constant:
        if constant.name not in known:
            raise UnknownNameError("constant", constant.name, f"must be one of {', '.join(known)}", known)
        things = (calibration.gpu,) if constant.name in OF_GPU else known[constant.name]
        if constant.of not in things:
            allowed = f"{constant.name} must be of {' or '.join(things)}"
            raise InputError("constant of", constant.of, allowed, things)


@cache
def _constants() -> dict[str, tuple[str, ...]]:
    """The constants of the step-time model that a measurement can replace, with what each is of."""
    things: dict[str, list[str]] = {}
    for row in catalog.step_time().constant:
        if row.low < row.high:  # what was read in a source and not fitted stays
            things.setdefault(row.name, []).append(row.of)
    return {name: tuple(of) for name, of in things.items()}
