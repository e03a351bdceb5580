"""Rows in, a calibration out: :func:`calibrate`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TYPE_CHECKING

from memcalc.errors import InputError

if TYPE_CHECKING:
    from memcalc.journal import Listener
    from memcalc.results.probe import Calibrated


def calibrate(
    runs: Iterable[str] = (),
    *,
    gpu: str | None = None,
    preset_dirs: Iterable[str] = (),
    on_progress: Listener | None = None,
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
    from memcalc.probe.calibrate.fit import calibrated, check_fitted
    from memcalc.runs import read_runs

    result = calibrated(read_runs(runs), gpu, tuple(preset_dirs), on_progress)
    check_fitted(result)
    return result
