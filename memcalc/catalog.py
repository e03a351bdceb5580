"""The one reader of presets: models, GPUs and nodes by name, shipped or the user's own.

A name is looked up, in this order, in

1. the directories given as `preset_dirs` (`--preset-dir`), each with `models/`, `gpus/`, `nodes/`,
2. `memcalc.toml` in the working directory, with tables `[model.NAME]`, `[gpu.NAME]`, `[node.NAME]`,
3. the user's configuration directory (`~/.config/memcalc/presets` on Linux),
4. the presets that come with the package.

One preset is one TOML file, called NAME.toml; other names for it stand in `aliases.toml` beside it, as alias = "name".
A name that ends in .toml, or has a path separator, is the path of the user's own file. Case does not matter, and a
space or an underscore is a hyphen.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from memcalc.errors import AbsentError, FileError, InputError, UnknownNameError
from memcalc.preset_names import is_hub_id, key, shortened, unknown

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from memcalc.specs.hardware import GPU, Node, Vendor
    from memcalc.specs.model import Model
    from memcalc.specs.reserve import Reserve
    from memcalc.specs.step_time import StepTimeTable

Kind = Literal["model", "gpu", "node"]
Dirs = Sequence[str | os.PathLike[str]]
Spec = TypeVar("Spec", bound="BaseModel")

_KINDS: tuple[Kind, ...] = ("model", "gpu", "node")
_LARGEST_FILE = 1 << 20
_MOST_DOTS = 500
"""In one line: the standard library's parser needs the square of the parts of a dotted key, hours for a megabyte."""
_ALIASES = "aliases"


def gpu(name: str, preset_dirs: Dirs = ()) -> GPU:
    """Return the GPU called `name`.

    >>> gpu("RTX 4090").memory_bytes
    25386024960
    """
    from memcalc.specs.hardware import GPU

    return validated(GPU, *_find("gpu", name, preset_dirs))


def node(name: str, preset_dirs: Dirs = ()) -> Node:
    """Return the node called `name`.

    >>> node("hgx-h100").gpus
    8
    """
    from memcalc.specs.hardware import Node

    return validated(Node, *_find("node", name, preset_dirs))


def model(name: str, preset_dirs: Dirs = ()) -> Model:
    """Return the model called `name`: written out in block groups, or as the flat table of a stack of equal blocks.

    >>> model("llama-2-7b").groups[0].count
    32
    """
    from memcalc.specs.flat import from_flat
    from memcalc.specs.model import Model

    data, what = _find("model", name, preset_dirs)
    if "groups" in data:
        return validated(Model, data, what)
    try:
        return from_flat(data)
    except InputError as error:
        raise error.within(what) from None


def gpus(preset_dirs: Dirs = ()) -> list[GPU]:
    """Return every GPU, by name."""
    return [gpu(name, preset_dirs) for name in names("gpu", preset_dirs)]


def nodes(preset_dirs: Dirs = ()) -> list[Node]:
    """Return every node, by name."""
    return [node(name, preset_dirs) for name in names("node", preset_dirs)]


def models(preset_dirs: Dirs = ()) -> list[Model]:
    """Return every model, by name."""
    return [model(name, preset_dirs) for name in names("model", preset_dirs)]


def models_of(layers: int, hidden: int, preset_dirs: Dirs = ()) -> list[str]:
    """Return the names of the models whose flat table has a number of blocks and a width.

    >>> "llama-2-7b" in models_of(32, 4096)
    True
    """
    tables: dict[str, tuple[Any, Any]] = {}
    pattern = re.compile(rf"(?m)^\s*n_layers\s*=\s*{layers}\b".encode())
    for shelf in _shelves(preset_dirs):
        for name in shelf.names("model"):
            if name not in tables and shelf.mentions("model", name, pattern):
                table = shelf.read("model", name)
                tables[name] = table.get("n_layers"), table.get("hidden")
    return [name for name, sizes in tables.items() if sizes == (layers, hidden)]


@cache
def reserve(name: str, kind: str = "") -> Reserve:
    """Return the range of measured over predicted memory for a class of allocator, or for one kind of job on it.

    A kind of which nothing is known has the range of its class.
    """
    from memcalc.specs.reserve import Reserve

    table = read_toml(shipped() / "reserve.toml")
    rows = [validated(Reserve, row, "reserve") for row in table["reserve"] if row["name"] == name]
    if not rows:
        known = list(dict.fromkeys(row["name"] for row in table["reserve"]))
        raise UnknownNameError("reserve", name, f"must be one of {', '.join(known)}", known)
    return next((row for row in rows if row.kind == kind), rows[0])


@cache
def vendor(name: str) -> Vendor:
    """Return what a vendor's software takes beside the tensors of a process.

    >>> vendor("nvidia").world.bytes
    858783744
    """
    from memcalc.specs.hardware import Vendor

    return validated(Vendor, read_toml(shipped() / "vendors.toml")[name], f"vendor {name}")


@cache
def step_time() -> StepTimeTable:
    """Return the constants of the step-time model."""
    from memcalc.specs.step_time import StepTimeTable

    return validated(StepTimeTable, read_toml(shipped() / "step_time.toml"), "step_time")


def names(kind: Kind, preset_dirs: Dirs = ()) -> list[str]:
    """Return the names of all presets of a kind, sorted, aliases left out; no preset is read for it."""
    return sorted({name for shelf in _shelves(preset_dirs) for name in shelf.names(kind)})


def node_for(gpu: GPU, preset_dirs: Dirs = ()) -> Node:
    """Return the node that a job naming only `gpu` is taken to run on.

    That is the preset which holds this GPU and is marked as the default, or else a host of which nothing is known
    but the number of GPUs and their own links.
    """
    from memcalc.specs.hardware import Node

    for shelf in _shelves(preset_dirs):
        for name in shelf.names("node"):
            data = shelf.read("node", name)
            if data.get("gpu") == gpu.name and data.get("default") is True:
                return node(name, preset_dirs)
    return Node(
        name=f"{gpu.gpus_per_node}x {gpu.name}",
        gpu=gpu.name,
        gpus=gpu.gpus_per_node,
        intra_link_bytes_per_s=gpu.peer_link_bytes_per_s,
        source={"gpus": f"the GPU preset {gpu.name}; host memory and network are not known"},
        date=gpu.date,
    )


def _find(kind: Kind, name: str, preset_dirs: Dirs) -> tuple[dict[str, Any], str]:
    """Return what a preset says, with the aliases that lead to it, and what an error about it calls it."""
    if not isinstance(name, str):
        raise InputError(kind, name, "must be the name of a preset, or the path of a TOML file")
    shelves = _shelves(preset_dirs)
    aliases = {alias: target for shelf in reversed(shelves) for alias, target in shelf.aliases(kind).items()}
    path = _is_path(name) and (not is_hub_id(name) or Path(name).exists())
    typed = [name, *(shortened(name) if kind == "model" and not path else ())]
    for wanted in [form for text in typed for form in (key(text), aliases.get(key(text), key(text)))]:
        for shelf in shelves:
            if wanted in shelf.names(kind):
                other = {alias for alias, target in aliases.items() if target == wanted}
                return _complete(shelf.read(kind, wanted), wanted, other), f"{kind} preset {wanted}"
    if path:
        return _complete(read_toml(Path(name)), Path(name).stem, set()), f"{kind} preset {name}"
    raise unknown(kind, name, {known for shelf in shelves for known in shelf.names(kind)}, aliases)


def _complete(data: Mapping[str, Any], name: str, aliases: set[str]) -> dict[str, Any]:
    """Fill in what the place of a preset says: its name, unless it gives one, and the aliases that lead to it."""
    named = data.get("aliases", [])
    return {"name": name, **data, "aliases": sorted({*named, *aliases}) if isinstance(named, list) else named}


def _is_path(name: str) -> bool:
    return name.lower().endswith(".toml") or os.sep in name or "/" in name


@dataclass(frozen=True)
class _Folder:
    """Presets as files. Only names that the folder itself lists are ever opened, so none can lead out of it."""

    root: Traversable

    def names(self, kind: Kind) -> Mapping[str, Traversable]:
        return self._listed[kind]

    @cached_property
    def _listed(self) -> dict[Kind, dict[str, Traversable]]:
        return {kind: dict(self._scan(kind)) for kind in _KINDS}

    def _scan(self, kind: Kind) -> Iterator[tuple[str, Traversable]]:
        folder = self.root / f"{kind}s"
        if folder.is_dir():
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
                stem, dot, suffix = entry.name.rpartition(".")
                if dot and suffix == "toml" and stem != _ALIASES:
                    yield key(stem), entry

    def read(self, kind: Kind, name: str) -> dict[str, Any]:
        if (kind, name) not in self._parsed:
            self._parsed[kind, name] = read_toml(self._listed[kind][name])
        return self._parsed[kind, name]

    @cached_property
    def _parsed(self) -> dict[tuple[Kind, str], dict[str, Any]]:
        return {}

    def mentions(self, kind: Kind, name: str, pattern: re.Pattern[bytes]) -> bool:
        """Whether the text of a preset has something in it: parsing all of them takes a third of a second."""
        return pattern.search(_read(self._listed[kind][name])) is not None

    def aliases(self, kind: Kind) -> dict[str, str]:
        if (kind, _ALIASES) not in self._parsed:
            path = self.root / f"{kind}s" / f"{_ALIASES}.toml"
            self._parsed[kind, _ALIASES] = self._read_aliases(path) if path.is_file() else {}
        return self._parsed[kind, _ALIASES]

    @staticmethod
    def _read_aliases(path: Traversable) -> dict[str, str]:
        data = read_toml(path)
        wrong = next((alias for alias, target in data.items() if not isinstance(target, str)), None)
        if wrong is not None:
            raise InputError(str(path), wrong, 'must stand as alias = "name"')
        return {key(alias): key(target) for alias, target in data.items()}


@dataclass(frozen=True)
class _Tables:
    """Presets as tables of one file, `memcalc.toml`."""

    data: Mapping[str, Any] = field(repr=False)

    def names(self, kind: Kind) -> Mapping[str, Any]:
        return {key(name): table for name, table in self.data.get(kind, {}).items()}

    def read(self, kind: Kind, name: str) -> dict[str, Any]:
        return dict(self.names(kind)[name])

    def mentions(self, kind: Kind, name: str, pattern: re.Pattern[bytes]) -> bool:  # noqa: ARG002
        """Whether a preset may have something in it; tables are parsed already."""
        return name in self.names(kind)

    def aliases(self, kind: Kind) -> dict[str, str]:
        listed = {name: table.get("aliases") for name, table in self.names(kind).items()}
        return {key(str(alias)): name for name, aliases in listed.items() for alias in aliases or ()}


_Shelf = _Folder | _Tables


def _shelves(preset_dirs: Dirs) -> list[_Shelf]:
    given: list[_Shelf] = [_given(path) for path in preset_dirs]
    project = Path("memcalc.toml")
    if project.is_file():
        given.append(_project(project))
    folder = config_dir()
    if folder is not None and folder.is_dir():
        given.append(_Folder(folder))
    return [*given, _shipped()]


MARK = "step_time.toml"
"""A file that tells the folder of presets from others of its name."""


@cache
def shipped() -> Traversable:
    """Return the presets that come with the package: beside it in a clone, a part of it where it is installed.

    Those beside it come first, so that a clone on the path never reads the presets of another that is installed.
    """
    clone: Traversable = files("memcalc").parent / "presets"  # type: ignore[attr-defined]  # a path, or one in a zip file
    return clone if (clone / MARK).is_file() else files("memcalc.presets")


@cache
def _shipped() -> _Folder:
    return _Folder(shipped())


def _given(path: str | os.PathLike[str]) -> _Folder:
    if not Path(path).is_dir():
        raise FileError("preset-dir", os.fspath(path), "must be a directory with models/, gpus/ or nodes/ in it")
    return _Folder(Path(path))


def _project(path: Path) -> _Tables:
    data = read_toml(path)
    for kind, tables in data.items():
        if kind not in _KINDS:
            raise UnknownNameError(f"{path} table", kind, "must be one of model, gpu, node", _KINDS)
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise InputError(f"{path} table", kind, f"must hold one table a preset, such as [{kind}.mine]")
    return _Tables(data)


def config_dir(platform: str = sys.platform, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where a user keeps presets of their own, or None where the platform tells of no such place.

    >>> config_dir("linux", {"XDG_CONFIG_HOME": "/etc/xdg"}).as_posix()
    '/etc/xdg/memcalc/presets'
    """
    base = environ.get("APPDATA") if platform == "win32" else environ.get("XDG_CONFIG_HOME")
    home = environ.get("HOME")
    if platform == "darwin" and home:
        base = f"{home}/Library/Application Support"
    elif platform != "win32" and home and not (base and Path(base).is_absolute()):
        base = f"{home}/.config"
    return Path(base) / "memcalc" / "presets" if base and Path(base).is_absolute() else None


def read_toml(path: Traversable) -> dict[str, Any]:
    """Return the content of a TOML file of at most 1 MiB, or raise FileError saying why it cannot be had."""
    import tomllib

    try:
        return tomllib.loads(_read(path).decode())
    except UnicodeDecodeError:
        raise FileError("file", str(path), "must be UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise FileError("file", str(path), f"must be TOML: {error}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits; brackets nested by the thousand
        raise FileError("file", str(path), "must be TOML with numbers and nesting of a usual size") from None


def _read(path: Traversable) -> bytes:
    if not path.is_file():
        raise FileError("file", str(path), "must be an existing regular file")
    try:
        with path.open("rb") as stream:
            content = bytes(stream.read(_LARGEST_FILE + 1))
    except OSError as error:
        raise FileError("file", str(path), error.strerror or "it must be readable") from None
    if len(content) > _LARGEST_FILE:
        raise FileError("file", str(path), "must be at most 1 MiB")
    if any(line.count(b".") > _MOST_DOTS for line in content.split(b"\n")):
        raise FileError("file", str(path), f"must have at most {_MOST_DOTS} dots in a line")
    return content


def validated(spec: type[Spec], data: Mapping[str, Any], what: str) -> Spec:
    """Return `data` as a checked `spec`; the first thing wrong with it becomes one sentence.

    Parameters
    ----------
    spec : pydantic model class [-]
    data : what a file or a caller gave [-]
    what : how the sentence calls it, as in "gpu preset h100" [-]
    """
    from pydantic import ValidationError

    try:
        return spec.model_validate(data)
    except ValidationError as error:
        raise _sentence(spec, error).within(what) from None


def _sentence(spec: type[BaseModel], error: ValidationError) -> InputError:
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return AbsentError("key", key, "must be given")
    if first["type"] == "extra_forbidden":
        return UnknownNameError("key", key, f"must be one of {', '.join(sorted(spec.model_fields))}", spec.model_fields)
    message = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return InputError(key, first["input"], message.rstrip("."))
