"""The jobs of a sweep: a file read and checked, and the combinations counted, left out and numbered."""

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

from memcalc import __version__, api, calibrations, catalog
from memcalc.errors import AbsentError, InputError, UnknownNameError
from memcalc.planner.request import WORDS, check_words
from memcalc.specs.sweep import SETTING, Mode, Sweep, SweepSettings, Value
from memcalc.units import parse_count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memcalc.specs.calibration import Calibration
    from memcalc.specs.hardware import GPU

__all__ = ["MOST_JOBS", "PRESETS", "Job", "Space", "space_of"]

MOST_JOBS = 1_000_000
"""Combinations of one sweep, those that are left out included."""
PRESETS = ("model", "gpu", "node")
"""Words that name a preset or a file."""
NAMES = (*PRESETS, *WORDS)
"""Words of a job."""


@dataclass(frozen=True)
class Job:
    """One call: its number among the jobs, counted from 0, and its words."""

    place: int
    words: dict[str, Value]
    """Those of the call: a file by its full path."""
    presets: dict[str, Value]
    """Model, GPU and node as they were written."""
    settings: dict[str, Value]
    asked: str
    """The words that differ between the jobs."""


@dataclass(frozen=True)
class Space:
    """All jobs of a sweep, none of them written out."""

    mode: Mode
    axes: dict[str, tuple[Value, ...]]
    """Each word with its values; the first varies slowest."""
    kept: NDArray[np.int64]
    """The combinations that are jobs, by their number in the product."""
    preset_dirs: tuple[str, ...]
    fingerprint: str
    """Of the jobs, of what their presets say, and of the version."""

    @property
    def size(self) -> int:
        """Number of jobs."""
        return int(self.kept.size)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of values of each word."""
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
        said = " × ".join(f"{len(values)} {name}" for name, values in self.axes.items() if len(values) > 1)
        left_out = int(np.prod(self.shape, dtype=np.int64)) - self.size
        return (said or "one of each word") + (f", {left_out} excluded" if left_out else "")

    def models(self) -> NDArray[np.int64]:
        """Return for each job which of the models is its own."""
        names = list(self.axes)
        below = int(np.prod(self.shape[names.index("model") + 1 :], dtype=np.int64))
        return np.asarray(self.kept // below % len(self.axes["model"]), dtype=np.int64)

    def job(self, place: int) -> Job:
        """Return the job of a number, from 0."""
        rest, picked = int(self.kept[place]), []
        for name, values in reversed(self.axes.items()):
            rest, position = divmod(rest, len(values))
            picked.append((name, values[position]))
        picked.reverse()
        swept = [(name, value) for name, value in picked if len(self.axes[name]) > 1]
        return Job(
            place,
            {name: _located(name, value) for name, value in picked if not name.startswith(SETTING)},
            {name: value for name, value in picked if name in PRESETS},
            {name.removeprefix(SETTING): value for name, value in picked if name.startswith(SETTING)},
            " ".join(f"{name}={shlex.quote(_written(value))}" for name, value in swept),
        )


def space_of(
    source: str | os.PathLike[str] | Mapping[str, Any] | Sweep,
    preset_dirs: tuple[str, ...] = (),
    calibration: str | None = None,
) -> Space:
    """Return the jobs of a file, or of what a file would say; each value has been checked by itself.

    A ``calibration`` that is given is that of every job.

    Raises :class:`memcalc.errors.InputError` for what no job could run with; what is impossible only in a combination
    is the answer of that job.
    """
    what = str(source) if isinstance(source, str | os.PathLike) else "sweep"
    sweep = source if isinstance(source, Sweep) else _checked(source, what)
    dirs = tuple(str(Path(place).absolute()) for place in preset_dirs)
    try:
        _check_names(sweep)
        if calibration is not None:
            sweep = sweep.model_copy(update={"jobs": {**sweep.jobs, "calibration": (calibration,)}})
        kept = _kept(sweep)
        presets = _check_values(sweep, dirs)
    except InputError as error:
        raise error.within(what) from None
    mode = sweep.sweep.mode
    said = json.dumps(
        [__version__, mode, [*sweep.jobs.items()], kept.tobytes().hex() if sweep.exclude else "", presets]
    )
    return Space(mode, dict(sweep.jobs), kept, dirs, hashlib.sha256(said.encode()).hexdigest())


def _checked(source: str | os.PathLike[str] | Mapping[str, Any], what: str) -> Sweep:
    """Return the checked content; a key below `[sweep]` is compared with the keys that stand there."""
    data = dict(source) if isinstance(source, Mapping) else catalog.read_toml(Path(source))
    unknown = next((key for key in data if key not in Sweep.model_fields), None)
    if unknown is not None:  # before what is absent, since it may be meant for it
        known = tuple(Sweep.model_fields)
        raise UnknownNameError(f"{what}: key", str(unknown), f"must be one of {', '.join(known)}", known)
    if isinstance(data.get("sweep"), Mapping):
        catalog.validated(SweepSettings, data["sweep"], f"{what} [sweep]")
    try:
        return catalog.validated(Sweep, data, what)
    except InputError as error:
        raise error if error.field.startswith(what) else error.within(what) from None


def _check_names(sweep: Sweep) -> None:
    """Refuse words that no job has, and a sweep without those that it needs."""
    for name in sweep.jobs:
        # a field below `set` is checked with its values, by the words' own sentence
        if name not in NAMES and not name.startswith(SETTING):
            raise UnknownNameError("jobs key", name, f"must be one of {', '.join(NAMES)}", NAMES)
    needed = ("model", "gpu", "gpus") if sweep.sweep.mode == "plan" else ("model", "gpu")
    for name in needed:
        if name not in sweep.jobs:
            raise AbsentError("jobs key", name, "must be given, as a value or a list of values")


def _kept(sweep: Sweep) -> NDArray[np.int64]:
    """Return the numbers of the combinations that are not excluded."""
    size = 1
    for values in sweep.jobs.values():
        size *= len(values)
    if size > MOST_JOBS:
        counts = " × ".join(f"{len(values)} {name}" for name, values in sweep.jobs.items() if len(values) > 1)
        raise InputError("jobs", size, f"{counts} must give at most {MOST_JOBS:,} jobs")
    several = [name for name, values in sweep.jobs.items() if len(values) > 1]
    kept = np.ones([len(sweep.jobs[name]) for name in several], dtype=bool)
    for table in sweep.exclude:
        places = _excluded(sweep, table)
        everywhere = [places.get(name, range(len(sweep.jobs[name]))) for name in several]
        kept[np.ix_(*everywhere)] = False
    if not kept.any():
        raise InputError("exclude", f"{len(sweep.exclude)} tables", "must leave at least one job")
    return np.flatnonzero(kept.reshape(-1)).astype(np.int64)


def _excluded(sweep: Sweep, table: Mapping[str, tuple[Value, ...]]) -> dict[str, list[int]]:
    """Return which values of each word a table names; a value that no job has would exclude nothing."""
    if not table:
        raise AbsentError("exclude key", "model", "a table must name the words of the jobs that it leaves out")
    places: dict[str, list[int]] = {}
    for name, values in table.items():
        if name not in sweep.jobs:
            raise UnknownNameError(
                "exclude key", name, f"must be a word of [jobs]: {', '.join(sweep.jobs)}", sweep.jobs
            )
        known = [_typed(value) for value in sweep.jobs[name]]
        for value in values:
            if _typed(value) not in known:
                written = [_written(one) for one in sweep.jobs[name]]
                raise InputError(f"exclude {name}", value, f"must be one of {', '.join(written)}", written)
        places[name] = [known.index(_typed(value)) for value in values]
    return places


def _check_values(sweep: Sweep, dirs: tuple[str, ...]) -> list[Any]:
    """Check each value by itself; return what the presets say."""
    presets: list[Any] = []
    for name, values in sweep.jobs.items():
        if len({_typed(value) for value in values}) < len(values):
            twice = next(value for place, value in enumerate(values) if _typed(value) in map(_typed, values[:place]))
            raise InputError(name, twice, "each value may stand once")
        for value in values:
            if name in PRESETS:
                presets.append(_preset(name, value, dirs))
            elif name == "calibration":
                presets.append(_calibration(value))
            elif name == "global_batch":
                parse_count(value, name)
            elif name.startswith(SETTING):
                check_words({}, {name.removeprefix(SETTING): value})
            else:
                check_words({name: value}, None)
    return presets


def _preset(name: str, value: Value, dirs: tuple[str, ...]) -> list[Any]:
    """Return all that a model, a GPU with its usual node, or a node is said to be."""
    if not isinstance(value, str):
        raise InputError(name, value, "must be the name of a preset, or the path of a file")
    if name == "model":
        found: list[Any] = [api.load_model(value, dirs)]
    elif name == "gpu":
        chip = catalog.gpu(value, dirs)
        found = [chip, catalog.node_for(chip, dirs), *_own_calibration(chip)]
    else:
        found = [catalog.node(value, dirs)]
    return [preset.model_dump(mode="json") for preset in found]


def _calibration(value: Value) -> Any:
    """Return all that a calibration says."""
    word = check_words({"calibration": value}, None).given["calibration"]
    return None if word == calibrations.NONE else calibrations.read(word).model_dump(mode="json")


def _own_calibration(chip: GPU) -> list[Calibration]:
    """The calibration that is found for a GPU, where there is one."""
    found = calibrations.applied(chip, None)[0].calibration
    return [] if found is None else [found]


def _typed(value: Value) -> tuple[type, Value]:
    """Return a value that differs between 1, 1.0 and true."""
    return type(value), value


def _written(value: Value) -> str:
    """Return a value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _located(name: str, value: Value) -> Value:
    """Return a word for a process that may stand in another folder: a file by its full path."""
    if name not in {*PRESETS, "calibration"} or not isinstance(value, str):
        return value
    path = Path(value)
    meant = path.suffix.lower() in {".toml", ".json"} or path.name != value or (path / "config.json").is_file()
    return str(path.absolute()) if meant and path.exists() else value
