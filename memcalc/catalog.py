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

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from memcalc import preset_names
from memcalc.errors import AbsentError, FileError, InputError, UnknownNameError
from memcalc.files import asks
from memcalc.preset_names import (
    KINDS,
    Folder,
    HubTable,
    Kind,
    Lookup,
    Shelf,
    Tables,
    by_form,
    is_hub_id,
    key,
    unknown,
    unlike,
)

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from memcalc.specs.hardware import GPU, Node, Vendor
    from memcalc.specs.model import Model
    from memcalc.specs.step_time import Reserve, StepTimeTable

Dirs = Sequence[str | os.PathLike[str]]
Spec = TypeVar("Spec", bound="BaseModel")
read_toml = preset_names.read_toml


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
    rows = [row for row in _reserves() if row.name == name]
    if not rows:
        known = list(dict.fromkeys(row.name for row in _reserves()))
        raise UnknownNameError("reserve", name, f"must be one of {', '.join(known)}", known)
    return next((row for row in rows if row.kind == kind), rows[0])


@cache
def _reserves() -> tuple[Reserve, ...]:
    from memcalc.specs.step_time import Reserve

    return tuple(validated(Reserve, row, "reserve") for row in read_toml(shipped() / "reserve.toml")["reserve"])


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

    data = json.loads((shipped() / MARK).read_text(encoding="utf-8"))  # TOML takes twenty times as long
    return validated(StepTimeTable, data, "step_time")


def names(kind: Kind, preset_dirs: Dirs = ()) -> list[str]:
    """Return the names of all presets of a kind, sorted, aliases left out; no preset is read for it."""
    return sorted({name for shelf in _shelves(preset_dirs) for name in shelf.names(kind)})


def node_for(gpu: GPU, preset_dirs: Dirs = ()) -> Node:
    """Return the node that a job naming only `gpu` is taken to run on.

    That is the preset which holds this GPU and is marked as the default, or else a host of which nothing is known
    but the number of GPUs and their own links.
    """
    from memcalc.specs.hardware import Node

    named = re.compile(re.escape(gpu.name).encode())
    for shelf in _shelves(preset_dirs):
        for name in shelf.names("node"):
            data = shelf.read("node", name) if shelf.mentions("node", name, named) else {}
            if data.get("gpu") == gpu.name and data.get("default") is True:
                return node(name, preset_dirs)
    return Node(
        name=f"{gpu.gpus_per_node}x{gpu.name}",
        gpu=gpu.name,
        gpus=gpu.gpus_per_node,
        intra_link_bytes_per_s=gpu.peer_link_bytes_per_s,
        source={"gpus": f"the GPU preset {gpu.name}; host memory and network are not known"},
        date=gpu.date,
    )


def lookup(name: str, preset_dirs: Dirs = ()) -> Lookup | None:
    """Return the preset that a model's name leads to, or what the table of the Hub says in place of one.

    >>> lookup("TheBloke/Llama-2-7B-GPTQ").preset, lookup("mistralai/Mistral-7B-v0.9")
    ('llama-2-7b', None)
    """
    return _Names("model", _shelves(preset_dirs)).lookup(name)


def _find(kind: Kind, name: str, preset_dirs: Dirs) -> tuple[dict[str, Any], str]:
    """Return what a preset says, with the aliases that lead to it, and what an error about it calls it."""
    if not isinstance(name, str):
        raise InputError(kind, name, "must be the name of a preset, or the path of a TOML file")
    listed = _Names(kind, _shelves(preset_dirs))
    path = _is_path(name) and (not is_hub_id(name) or asks(Path(name).exists))
    lead = listed.as_written(name) if path else listed.lookup(name)
    if lead is not None and lead.preset:
        other = {alias for alias, target in listed.aliases.items() if target == lead.preset}
        shelf = next(shelf for shelf in listed.shelves if lead.preset in shelf.names(kind))
        if changes := lead.entry.changes:  # by its own name, under which alone it is found again
            return _complete(_resized(shelf.read(kind, lead.preset), changes), name, set()), f"{kind} {name}"
        return _complete(shelf.read(kind, lead.preset), lead.preset, other), f"{kind} preset {lead.preset}"
    if path:
        return _complete(read_toml(Path(name)), Path(name).stem, set()), f"{kind} preset {name}"
    if lead is not None:
        raise unlike(name, lead.entry.differs)
    _refuse_other_kind(kind, name, preset_dirs)
    raise unknown(kind, name, listed.known, listed.aliases)


def _refuse_other_kind(kind: Kind, name: str, preset_dirs: Dirs) -> None:
    """Refuse the name of a node for a GPU's and the reverse, with what to give."""
    if kind == "gpu" and _Names("node", _shelves(preset_dirs)).lookup(name) is not None:
        host = node(name, preset_dirs)
        raise UnknownNameError(kind, name, f"it is a node: give --gpu {host.gpu} --node {host.name}")
    if kind == "node" and _Names("gpu", _shelves(preset_dirs)).lookup(name) is not None:
        host = node_for(gpu(name, preset_dirs), preset_dirs)
        raise UnknownNameError(kind, name, f"it is a GPU: give --node {host.name}, or leave --node out")


@dataclass(frozen=True)
class _Names:
    """The names of a kind on some shelves, the first shelf that has one before the others."""

    kind: Kind
    shelves: Sequence[Shelf]

    @cached_property
    def aliases(self) -> dict[str, str]:
        return {alias: name for shelf in reversed(self.shelves) for alias, name in shelf.aliases(self.kind).items()}

    @cached_property
    def known(self) -> set[str]:
        return {name for shelf in self.shelves for name in shelf.names(self.kind)}

    def as_written(self, name: str) -> Lookup | None:
        leads = next((form for form in (key(name), self.aliases.get(key(name))) if form in self.known), None)
        return None if leads is None else Lookup(leads, exact=True)

    def lookup(self, name: str) -> Lookup | None:
        lead = self.as_written(name)
        return by_form(name, self.known, self.aliases, hub_table()) if lead is None and self.kind == "model" else lead


@cache
def hub_table() -> HubTable:
    """Return the table of the Hub's repositories that are presets by another name."""
    return HubTable.of(read_toml(shipped() / "hub.toml"), "presets/hub.toml")


def _resized(table: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change a flat table's keys, add to its lists, and leave out what then speaks of another model."""
    stale = ("hf_class", "hf_config", "published_parameters", "aliases")
    added = {key: [*table.get(key, ()), *value] if isinstance(value, list) else value for key, value in changes.items()}
    return {key: value for key, value in {**table, **added}.items() if key not in stale}


def _complete(data: Mapping[str, Any], name: str, aliases: set[str]) -> dict[str, Any]:
    """Fill in what the place of a preset says: its name, unless it gives one, and the aliases that lead to it."""
    named = data.get("aliases", [])
    return {"name": name, **data, "aliases": sorted({*named, *aliases}) if isinstance(named, list) else named}


def _is_path(name: str) -> bool:
    return name.lower().endswith(".toml") or os.sep in name or "/" in name


def _shelves(preset_dirs: Dirs) -> list[Shelf]:
    given: list[Shelf] = [_given(path) for path in preset_dirs]
    project = Path("memcalc.toml")
    if project.is_file():
        given.append(_project(project))
    folder = config_dir()
    if folder is not None and asks(folder.is_dir):
        given.append(Folder(folder))
    return [*given, _shipped()]


MARK = "step_time.json"
"""A file that tells the folder of presets from others of its name."""


@cache
def shipped() -> Traversable:
    """Return the presets that come with the package: beside it in a clone, a part of it where it is installed.

    Those beside it come first, so that a clone on the path never reads the presets of another that is installed.
    """
    clone: Traversable = files("memcalc").parent / "presets"  # type: ignore[attr-defined]  # a path, or one in a zip file
    return clone if (clone / MARK).is_file() else files("memcalc.presets")


@cache
def _shipped() -> Folder:
    return Folder(shipped())


def _given(path: str | os.PathLike[str]) -> Folder:
    if not any(asks((Path(path) / f"{kind}s").is_dir) for kind in KINDS):
        raise FileError("preset-dir", os.fspath(path), "must be a directory with models/, gpus/ or nodes/ in it")
    return Folder(Path(path))


def _project(path: Path) -> Tables:
    data = read_toml(path)
    for kind, tables in data.items():
        if kind not in KINDS:
            raise UnknownNameError(f"{path} table", kind, "must be one of model, gpu, node", KINDS)
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            raise InputError(f"{path} table", kind, f"must hold one table a preset, such as [{kind}.mine]")
    return Tables(data)


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
