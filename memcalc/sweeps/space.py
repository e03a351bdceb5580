"""The jobs of a sweep: a file read and checked, its combinations counted, excluded and numbered."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc import api, calibrations, catalog
from memcalc._version import __version__
from memcalc.errors import AbsentError, InputError, UnknownNameError
from memcalc.planner.job import value_text
from memcalc.planner.request import check_words
from memcalc.specs.job import SETTING, Mode, Sweep, SweepSettings, Value
from memcalc.specs.options import WORDS
from memcalc.units import parse_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memcalc.specs.calibration import Calibration
    from memcalc.specs.hardware import GPU

MOST_JOBS = 1_000_000
"""Combinations of one sweep, those that are left out included."""
PRESETS = ("model", "gpu", "node")
"""Options that name a preset or a file."""
NAMES = (*PRESETS, *WORDS)
"""Options of a job."""


@dataclass(frozen=True)
class SweepJob:
    """One call: its number among the jobs, counted from 0, and its options."""

    index: int
    options: dict[str, Value]
    """Options of the call: a file by its full path."""
    presets: dict[str, Value]
    """Model, GPU and node as they were written."""
    settings: dict[str, Value]
    """Fields without an option, by their dotted names."""
    varied: str
    """The options that differ between the jobs, as they are typed."""


@dataclass(frozen=True)
class Space:
    """All jobs of a sweep, none of them written out."""

    mode: Mode
    axes: dict[str, tuple[Value, ...]]
    """Each option with its values; the first varies slowest."""
    combinations: NDArray[np.int64]
    """The combinations that are jobs, by their index in the product."""
    preset_dirs: tuple[str, ...]
    fingerprint: str
    """Hash of the jobs, of what their presets hold, and of the version."""

    @property
    def size(self) -> int:
        """Number of jobs."""
        return int(self.combinations.size)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of values of each option."""
        return tuple(len(values) for values in self.axes.values())

    @property
    def settings(self) -> tuple[str, ...]:
        """The fields without an option that the sweep names."""
        return tuple(name for name in self.axes if name.startswith(SETTING))

    def described(self) -> str:
        """Return the lists that are multiplied, and what is left out.

        >>> space_of({"jobs": {"model": "gpt2", "gpu": "a100-40g", "gpus": [1, 2]}}).described()
        '2 gpus'
        """
        lists = " × ".join(f"{len(values)} {name}" for name, values in self.axes.items() if len(values) > 1)
        left_out = int(np.prod(self.shape, dtype=np.int64)) - self.size
        return (lists or "one of each word") + (f", {left_out} excluded" if left_out else "")

    def models(self) -> NDArray[np.int64]:
        """Return for each job which of the models is its own."""
        names = list(self.axes)
        below = int(np.prod(self.shape[names.index("model") + 1 :], dtype=np.int64))
        return np.asarray(self.combinations // below % len(self.axes["model"]), dtype=np.int64)

    def job(self, index: int) -> SweepJob:
        """Return the job of a number, from 0."""
        remainder, picked = int(self.combinations[index]), []
        for name, values in reversed(self.axes.items()):
            remainder, position = divmod(remainder, len(values))
            picked.append((name, values[position]))
        picked.reverse()
        swept = [(name, value) for name, value in picked if len(self.axes[name]) > 1]
        return SweepJob(
            index,
            {name: _for_process(name, value) for name, value in picked if not name.startswith(SETTING)},
            {name: value for name, value in picked if name in PRESETS},
            {name.removeprefix(SETTING): value for name, value in picked if name.startswith(SETTING)},
            " ".join(f"{name}={shlex.quote(value_text(value))}" for name, value in swept),
        )


def space_of(
    source: str | os.PathLike[str] | Mapping[str, Any] | Sweep,
    preset_dirs: tuple[str, ...] = (),
    calibration: str | None = None,
) -> Space:
    """Return the jobs of a file, or of a file's content; each value has been checked by itself.

    A ``calibration`` that is given is that of every job.

    Raises :class:`memcalc.errors.InputError` for what no job could run with; what is impossible only in a combination
    is the answer of that job.
    """
    source_name = str(source) if isinstance(source, str | os.PathLike) else "sweep"
    sweep = source if isinstance(source, Sweep) else _checked(source, source_name)
    dirs = tuple(str(Path(folder).absolute()) for folder in preset_dirs)
    try:
        _check_names(sweep)
        if calibration is not None:
            sweep = sweep.model_copy(update={"jobs": {**sweep.jobs, "calibration": (calibration,)}})
        combinations = _included(sweep)
        presets = _check_values(sweep, dirs)
    except InputError as error:
        raise error.within(source_name) from None
    mode = sweep.sweep.mode
    identity = json.dumps(
        [__version__, mode, [*sweep.jobs.items()], combinations.tobytes().hex() if sweep.exclude else "", presets]
    )
    return Space(mode, dict(sweep.jobs), combinations, dirs, hashlib.sha256(identity.encode()).hexdigest())


def _checked(source: str | os.PathLike[str] | Mapping[str, Any], source_name: str) -> Sweep:
    """Return the checked content; a key below `[sweep]` is compared with the keys of that table."""
    data = dict(source) if isinstance(source, Mapping) else catalog.read_toml(Path(source))
    settings = data.get("sweep")
    below = settings if isinstance(settings, Mapping) else {}
    misplaced = next((key for key in (*data, *below) if key in NAMES), None)
    if misplaced is not None:
        allowed = "belongs below [jobs], as every option of memcalc plan does"
        raise InputError(f"{source_name}: key", misplaced, allowed)
    unknown = next((key for key in data if key not in Sweep.model_fields), None)
    if unknown is not None:  # before what is absent, since it may be meant for it
        keys = tuple(Sweep.model_fields)
        raise UnknownNameError(f"{source_name}: key", str(unknown), f"must be one of {', '.join(keys)}", keys)
    if isinstance(settings, Mapping):
        catalog.validated(SweepSettings, settings, f"{source_name} [sweep]")
    try:
        return catalog.validated(Sweep, data, source_name)
    except InputError as error:
        raise error if error.field.startswith(source_name) else error.within(source_name) from None


def _check_names(sweep: Sweep) -> None:
    for name in sweep.jobs:
        # a field below `set` is checked with its values, by the words' own sentence
        if name not in NAMES and not name.startswith(SETTING):
            raise UnknownNameError("jobs key", name, f"must be one of {', '.join(NAMES)}", NAMES)
    needed = ("model", "gpu", "gpus") if sweep.sweep.mode == "plan" else ("model", "gpu")
    for name in needed:
        if name not in sweep.jobs:
            raise AbsentError("jobs key", name, "must be given, as a value or a list of values")


def _included(sweep: Sweep) -> NDArray[np.int64]:
    size = 1
    for values in sweep.jobs.values():
        size *= len(values)
    if size > MOST_JOBS:
        counts = " × ".join(f"{len(values)} {name}" for name, values in sweep.jobs.items() if len(values) > 1)
        raise InputError("jobs", size, f"{counts} must give at most {MOST_JOBS:,} jobs")
    varied = [name for name, values in sweep.jobs.items() if len(values) > 1]
    included = np.ones([len(sweep.jobs[name]) for name in varied], dtype=bool)
    for table in sweep.exclude:
        positions = _excluded(sweep, table)
        selected = [positions.get(name, range(len(sweep.jobs[name]))) for name in varied]
        included[np.ix_(*selected)] = False
    if not included.any():
        raise InputError("exclude", f"{len(sweep.exclude)} tables", "must leave at least one job")
    return np.flatnonzero(included.reshape(-1)).astype(np.int64)


def _excluded(sweep: Sweep, table: Mapping[str, tuple[Value, ...]]) -> dict[str, list[int]]:
    """Return which values of each word a table names; a value that no job has would exclude nothing."""
    if not table:
        raise AbsentError("exclude key", "model", "a table must name the words of the jobs that it leaves out")
    positions: dict[str, list[int]] = {}
    for name, values in table.items():
        if name not in sweep.jobs:
            raise UnknownNameError(
                "exclude key", name, f"must be a word of [jobs]: {', '.join(sweep.jobs)}", sweep.jobs
            )
        values_of_jobs = [_with_type(value) for value in sweep.jobs[name]]
        for value in values:
            if _with_type(value) not in values_of_jobs:
                written = [value_text(other) for other in sweep.jobs[name]]
                raise InputError(f"exclude {name}", value, f"must be one of {', '.join(written)}", written)
        positions[name] = [values_of_jobs.index(_with_type(value)) for value in values]
    return positions


def _check_values(sweep: Sweep, preset_dirs: tuple[str, ...]) -> list[Any]:
    """Check each value by itself; return the content of the presets."""
    presets: list[Any] = []
    for name, values in sweep.jobs.items():
        seen: set[tuple[type, Value]] = set()
        for value in values:
            if _with_type(value) in seen:
                raise InputError(name, value, "each value may occur once")
            seen.add(_with_type(value))
            if name in PRESETS:
                presets.append(_preset_content(name, value, preset_dirs))
            elif name == "calibration":
                presets.append(_calibration_content(value))
            elif name == "global_batch":
                parse_count(value, name)
            elif name.startswith(SETTING):
                check_words({}, {name.removeprefix(SETTING): value})
            else:
                check_words({name: value}, None)
    return presets


def _preset_content(name: str, value: Value, preset_dirs: tuple[str, ...]) -> list[Any]:
    if not isinstance(value, str):
        raise InputError(name, value, "must be the name of a preset, or the path of a file")
    if name == "model":
        presets: list[Any] = [api.load_model(value, preset_dirs)]
    elif name == "gpu":
        gpu = catalog.gpu(value, preset_dirs)
        presets = [gpu, catalog.node_for(gpu, preset_dirs), *_installed_calibration(gpu)]
    else:
        presets = [catalog.node(value, preset_dirs)]
    return [preset.model_dump(mode="json") for preset in presets]


def _calibration_content(value: Value) -> Any:
    name = check_words({"calibration": value}, None).given["calibration"]
    return None if name == calibrations.NONE else calibrations.read(name).model_dump(mode="json")


def _installed_calibration(gpu: GPU) -> list[Calibration]:
    calibration = calibrations.applied(gpu, None)[0].calibration
    return [] if calibration is None else [calibration]


def _with_type(value: Value) -> tuple[type, Value]:
    """Return a value that differs between 1, 1.0 and true."""
    return type(value), value


def _for_process(name: str, value: Value) -> Value:
    """Return a value for a process in another folder: a file by its absolute path."""
    if name not in {*PRESETS, "calibration"} or not isinstance(value, str):
        return value
    path = Path(value)
    is_file = path.suffix.lower() in {".toml", ".json"} or path.name != value or (path / "config.json").is_file()
    return str(path.absolute()) if is_file and path.exists() else value
