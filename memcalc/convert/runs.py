"""Runs files: the shipped ones, a user's own, or a folder of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.catalog import read_toml
from memcalc.errors import AbsentError, CombinationError, FileError, InputError, UnknownNameError
from memcalc.specs import probes
from memcalc.specs import runs as specs
from memcalc.specs.flat import flat_of
from memcalc.specs.runs import RunsFile
from memcalc.toml_text import array_of_tables

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

__all__ = ["read_runs", "runs_text", "shipped"]

_TABLES: dict[str, type[BaseModel]] = {
    "run": specs.Run,
    "left_out": specs.LeftOut,
    "explained": specs.Explained,
    "target": specs.Target,
    "probe": probes.Probe,
    "rate": probes.Rate,
    "communicator": probes.Communicator,
}


def read_runs(paths: Iterable[str] = ()) -> RunsFile:
    """Return what the files say, taken together; of a folder every .toml in it; without any, the shipped runs.

    Raises :class:`memcalc.errors.InputError` for a file that cannot be read, an unknown key, or an id used twice.
    """
    given = tuple(paths)
    return _joined(_parsed(file) for file in ([f for path in given for f in _files(path)] if given else shipped()))


def runs_text(runs: RunsFile) -> str:
    """Return a runs file that reads back as the same."""
    dumped = runs.model_dump(mode="json", exclude_defaults=True)
    return "\n".join(array_of_tables(name, dumped[name]) for name in _TABLES if dumped.get(name))


def shipped() -> list[Traversable]:
    """Return the runs files that come with the package."""
    return _toml(files("memcalc.presets") / "runs")


def _toml(folder: Traversable) -> list[Traversable]:
    listed = folder.iterdir() if folder.is_dir() else ()
    return sorted((entry for entry in listed if entry.name.endswith(".toml")), key=lambda entry: entry.name)


def _files(path: str) -> list[Traversable]:
    """Return the files that a path given by the user stands for."""
    try:
        found: list[Traversable] = _toml(Path(path)) if Path(path).is_dir() else [Path(path)]
    except (OSError, ValueError):
        raise FileError("runs", path, "must be a runs file, or a folder of them") from None
    if not found:
        raise FileError("runs", path, "must hold at least one .toml file")
    return found


def _parsed(file: Traversable) -> RunsFile:
    data = read_toml(file)
    unknown = next((name for name in data if name not in _TABLES), None)
    if unknown is not None:
        raise UnknownNameError(f"{file.name} table", unknown, f"must be one of {', '.join(_TABLES)}", _TABLES)
    return RunsFile.model_validate(
        {name: [_entry(name, place, table, file.name) for place, table in _entries(name, data)] for name in data}
    )


def _entries(name: str, data: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the tables called `name`, counted from 1."""
    listed = data[name]
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise InputError(name, listed, f"must stand as [[{name}]] tables")
    yield from enumerate(listed, 1)


def _entry(name: str, place: int, table: dict[str, Any], file: str) -> BaseModel:
    """Return one checked table; an error names the file, the table and its id."""
    from pydantic import ValidationError

    spec = _TABLES[name]
    try:
        entry = spec.model_validate(table)
        if isinstance(entry, specs.Run) and isinstance(entry.model, dict):
            flat_of(entry.model)
    except ValidationError as error:
        raise _sentence(spec, error).within(_called(name, place, table, file)) from None
    except InputError as error:
        raise error.within(_called(name, place, table, file)) from None
    return entry


def _called(name: str, place: int, table: dict[str, Any], file: str) -> str:
    own = table.get("id")
    return f"{file} {name} {own if isinstance(own, str) and len(own) <= 60 else place}"


def _sentence(spec: type[BaseModel], error: ValidationError) -> InputError:
    """Return the first thing wrong with a table; an unknown key comes first, since it may explain the rest."""
    listed = error.errors(include_url=False)
    first = next((one for one in listed if one["type"] == "extra_forbidden"), listed[0])
    *path, last = (str(part) for part in first["loc"] or ("table",))
    if first["type"] == "extra_forbidden":
        known = sorted((specs.Measured if path == ["measured"] else spec).model_fields)
        return UnknownNameError("key", last, f"must be one of {', '.join(known)}", known)
    if first["type"] == "missing":
        return AbsentError("key", ".".join([*path, last]), "must be given")
    said = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be").rstrip(".")
    return InputError(".".join([*path, last]), first["input"], said)


def _joined(parts: Iterable[RunsFile]) -> RunsFile:
    """Return several files as one; each run may stand once."""
    listed = list(parts)
    runs = [run for part in listed for run in part.run]
    seen: set[str] = set()
    for run in runs:
        if run.id in seen:
            raise CombinationError("run id", run.id, "each run may stand once")
        seen.add(run.id)
    return RunsFile(
        run=tuple(runs),
        left_out=tuple(entry for part in listed for entry in part.left_out),
        explained=tuple(entry for part in listed for entry in part.explained),
        target=tuple(entry for part in listed for entry in part.target),
        probe=tuple(entry for part in listed for entry in part.probe),
        rate=tuple(entry for part in listed for entry in part.rate),
        communicator=tuple(entry for part in listed for entry in part.communicator),
    )
