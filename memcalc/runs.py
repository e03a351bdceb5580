"""Runs files: the shipped ones, a user's own, or a folder of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc import catalog
from memcalc.errors import AbsentError, CombinationError, FileError, InputError, UnknownNameError
from memcalc.files import array_of_tables
from memcalc.specs import runs as specs
from memcalc.specs.flat import flat_of
from memcalc.specs.runs import RunsFile

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

_TABLES: dict[str, type[BaseModel]] = {
    "run": specs.Run,
    "publication": specs.Publication,
    "left_out": specs.LeftOut,
    "explained": specs.Explained,
    "target": specs.Target,
    "probe": specs.Probe,
    "rate": specs.Rate,
    "communicator": specs.Communicator,
}
_SWEEP = "sweep"
"""The table whose rows are runs."""


def read_runs(paths: Iterable[str] = ()) -> RunsFile:
    """Return what the files say, taken together; of a folder every .toml in it; without any, the shipped runs.

    Raises :class:`memcalc.errors.InputError` for a file that cannot be read, an unknown key, or an id used twice.
    """
    given = tuple(paths)
    return _joined(_parsed(file) for file in ([f for path in given for f in _files(path)] if given else shipped()))


def read_layouts() -> RunsFile:
    """Return the published sweeps over layouts that are shipped: throughput, and what ran out of memory.

    They stand apart from the other shipped runs, since none has a figure of memory.
    """
    return _joined(_parsed(file) for file in _toml(catalog.shipped() / "runs" / "layouts"))


def read_unfitted() -> RunsFile:
    """Return published speeds that are shipped and that no constant of the step time is fitted on.

    They make its ranges: how far measured steps of a source that nobody had looked at lie from the predicted ones.
    """
    return _joined(_parsed(file) for file in _toml(catalog.shipped() / "runs" / "unfitted"))


def runs_text(runs: RunsFile) -> str:
    """Return a runs file that reads back as the same."""
    dumped = runs.model_dump(mode="json", exclude_defaults=True)
    return "\n".join(array_of_tables(name, dumped[name]) for name in _TABLES if dumped.get(name))


def shipped() -> list[Traversable]:
    """Return the runs files that come with the package."""
    return _toml(catalog.shipped() / "runs")


def _toml(folder: Traversable) -> list[Traversable]:
    listed = folder.iterdir() if folder.is_dir() else ()
    return sorted((entry for entry in listed if entry.name.endswith(".toml")), key=lambda entry: entry.name)


def _files(path: str) -> list[Traversable]:
    try:
        files: list[Traversable] = _toml(Path(path)) if Path(path).is_dir() else [Path(path)]
    except (OSError, ValueError):
        raise FileError("runs", path, "must be a runs file, or a folder of them") from None
    if not files:
        raise FileError("runs", path, "must hold at least one .toml file")
    return files


def _parsed(file: Traversable) -> RunsFile:
    data = catalog.read_toml(file)
    tables = (*_TABLES, _SWEEP)
    unknown = next((name for name in data if name not in tables), None)
    if unknown is not None:
        raise UnknownNameError(f"{file.name} table", unknown, f"must be one of {', '.join(tables)}", tables)
    entries = {name: list(_entries(name, data)) for name in data}
    rows = [row for index, table in entries.pop(_SWEEP, []) for row in _rows(index, table, file.name)]
    if rows:
        entries["run"] = [*entries.get("run", []), *enumerate(rows, 1)]
    return RunsFile.model_validate(
        {name: [_entry(name, index, table, file.name) for index, table in listed] for name, listed in entries.items()}
    )


def _rows(index: int, table: dict[str, Any], file: str) -> Iterator[dict[str, Any]]:
    """Return each row of a sweep as the table of a run."""
    from pydantic import ValidationError

    fields = specs.Sweep.model_fields
    try:
        sweep = specs.Sweep.model_validate({key: value for key, value in table.items() if key in fields})
    except ValidationError as error:
        raise _sentence(specs.Sweep, error).within(f"{file} {_SWEEP} {index}") from None
    return sweep.tables({key: value for key, value in table.items() if key not in fields})


def _entries(name: str, data: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    listed = data[name]
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise InputError(name, listed, f"must be [[{name}]] tables")
    yield from enumerate(listed, 1)


def _entry(name: str, index: int, table: dict[str, Any], file: str) -> BaseModel:
    """Return one checked table; an error names the file, the table and its id."""
    from pydantic import ValidationError

    spec = _TABLES[name]
    try:
        entry = spec.model_validate(table)
        if isinstance(entry, specs.Run) and isinstance(entry.model, dict):
            flat_of(entry.model)
    except ValidationError as error:
        raise _sentence(spec, error).within(_called(name, index, table, file)) from None
    except InputError as error:
        raise error.within(_called(name, index, table, file)) from None
    return entry


def _called(name: str, index: int, table: dict[str, Any], file: str) -> str:
    id_ = table.get("id")
    return f"{file} {name} {id_ if isinstance(id_, str) and len(id_) <= 60 else index}"


def _sentence(spec: type[BaseModel], error: ValidationError) -> InputError:
    """Return the first thing wrong with a table; an unknown key comes first, since it may explain the rest."""
    listed = error.errors(include_url=False)
    first = next((problem for problem in listed if problem["type"] == "extra_forbidden"), listed[0])
    *path, last = (str(part) for part in first["loc"] or ("table",))
    if first["type"] == "extra_forbidden":
        known = sorted((specs.Measured if path == ["measured"] else spec).model_fields)
        return UnknownNameError("key", last, f"must be one of {', '.join(known)}", known)
    if first["type"] == "missing":
        return AbsentError("key", ".".join([*path, last]), "must be given")
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be").rstrip(".")
    return InputError(".".join([*path, last]), first["input"], message)


def _joined(parts: Iterable[RunsFile]) -> RunsFile:
    """Return several files as one; each run may occur once."""
    listed = list(parts)
    seen: set[str] = set()
    for run in (run for part in listed for run in part.run):
        if run.id in seen:
            raise CombinationError("run id", run.id, "each run may occur once")
        seen.add(run.id)
    return RunsFile(**{name: tuple(entry for part in listed for entry in getattr(part, name)) for name in _TABLES})
