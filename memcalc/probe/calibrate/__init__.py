"""Rows in, a calibration out: :func:`calibrate`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from memcalc.errors import InputError

if TYPE_CHECKING:
    from memcalc.probe.calibrate.fit import Progress
    from memcalc.results import Calibrated

__all__ = ["calibrate"]


def calibrate(
    runs: Iterable[str] = (),
    *,
    gpu: str | None = None,
    preset_dirs: Iterable[str] = (),
    on_progress: Callable[[Progress], None] | None = None,
) -> Calibrated:
    """Fit a calibration of one GPU to files of measured runs, or to the shipped ones.

    Parameters
    ----------
    runs
        Paths of runs files, as ``memcalc probe`` writes them; the shipped ones when left out.
    gpu
        The preset that it is for, where the runs are of several.
    preset_dirs
        Folders with presets of your own, looked up first.
    on_progress
        Called with the rows that are predicted (``done``) of all (``jobs``).

    Returns
    -------
    Calibrated
        Each figure before and after, and the calibration, which is not yet written to a file.

    Raises
    ------
    memcalc.errors.CombinationError
        For rows that contradict each other.
    memcalc.errors.MissingError
        For too few of them, saying how many each figure needs.
    """
    if importlib.util.find_spec("scipy") is None:
        raise InputError("calibrate", "SciPy", "fitting needs it: pip install 'memcalc[calibrate]'")
    from memcalc.convert.runs import read_runs
    from memcalc.probe.calibrate.fit import calibrated, refused

    found = calibrated(read_runs(runs), gpu, tuple(preset_dirs), on_progress)
    refused(found)
    return found
