"""A model as it is named: a file, a preset, or a repository of the Hub that a preset or the local cache has.

What decides about OWNER/NAME, the first that has it:

1. a folder of that path with a config.json, as Transformers takes it;
2. a preset's own name or alias, and the table presets/hub.toml: the same answer on every machine;
3. the config.json in the local cache of the Hub, of the revision that is asked for;
4. a preset's name once the forms of training and storage are taken off.

A repository that the table knows to be unlike every preset is looked for in the cache alone. A model
that was recorded with torch is a file of its own kind, read and written here.

In the cache `models--OWNER--NAME/refs/REVISION` leads to `snapshots/COMMIT/config.json`: the layout of huggingface_hub
2.4.0 (file_download.py, ``try_to_load_from_cache``; constants.py). Only the one repository is looked at, no folder is
listed, and nothing is downloaded or written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from memcalc import catalog
from memcalc.errors import FileError, InputError
from memcalc.files import asks, regular
from memcalc.preset_names import HubEntry, is_hub_id, key, stored_as

if TYPE_CHECKING:
    from memcalc.specs.model import Model


EXPANDED = ("fp8", "mxfp4")
"""Forms of storage that are expanded to the job's precision when they are loaded."""


class NamedModel(NamedTuple):
    """A model, and what to know of how its name was understood."""

    model: Model
    origin: str = ""
    """Whose sizes they are, where the name is not that of a file or a preset."""
    missing: str = ""
    """What the repository has beside what is counted."""
    stored: str = ""
    """The form in which its weights stay quantized; empty where the job says how they are kept."""

    def warnings(self, name: str, quantize: object) -> tuple[str, ...]:
        """What an answer about the model has to say; ``quantize`` is what the job says of its base's weights."""
        text = []
        if self.missing:
            text.append(f"{name} is counted as its text model, {self.model.name}: {self.missing} is left out.")
        if self.stored and quantize in (None, "none"):
            text.append(
                f"{name} is stored quantized ({self.stored}) and counted in the job's precision; "
                "--lora with --quantize counts a base that stays quantized."
            )
        return tuple(text)


def named_model(name: str, preset_dirs: Sequence[str] = ()) -> NamedModel:
    """Return the model of a name, with what is to be said of it.

    Raises :class:`memcalc.errors.InputError` where nothing has it, in one sentence that says what to give instead.
    """
    if not name:
        raise InputError("model", name, "must be a preset's name, a config.json, a directory with one, or a .toml file")
    path, is_json = Path(name), name.endswith(".json")
    if is_json or (not name.endswith(".toml") and _is_directory(path)):
        from memcalc.convert.huggingface import read_model

        return NamedModel(read_recorded(path) if is_json and is_recorded(path) else read_model(name))
    if not is_hub_id(name) or asks(path.exists):
        return _preset(name, HubEntry(), preset_dirs)
    return _of_hub(name, preset_dirs)


def _of_hub(name: str, preset_dirs: Sequence[str]) -> NamedModel:

    hub_id, _, revision = name.partition("@")
    pinned = revision not in ("", MAIN)
    lead = None if pinned else catalog.lookup(hub_id, preset_dirs)
    if lead is not None and lead.preset and lead.exact:
        return _preset(hub_id, lead.entry, preset_dirs)
    try:
        snapshot = snapshot_of(name)
    except FileError:
        if lead is None or not lead.preset:
            raise
        snapshot = None
    if snapshot is not None:
        return _cached(hub_id, snapshot)
    if pinned:
        allowed = "the local Hub cache does not hold this revision: leave it out, or give the path of its config.json"
        raise InputError("model", name, allowed)
    return _preset(hub_id, HubEntry() if lead is None else lead.entry, preset_dirs)


def _preset(name: str, entry: HubEntry, preset_dirs: Sequence[str]) -> NamedModel:
    model = catalog.model(name, preset_dirs)
    _, stored = stored_as(key(name.rpartition("/")[2]))
    if entry.apart:
        return NamedModel(model, f"{entry.preset}'s with {entry.apart}, for {name}", entry.missing, stored)
    if key(name) in {key(known) for known in (model.name, *model.aliases)} or not is_hub_id(name):
        return NamedModel(model)
    return NamedModel(model, f"{model.name}'s, for {name}", entry.missing, stored)


def _cached(hub_id: str, snapshot: Snapshot) -> NamedModel:
    from memcalc.convert.huggingface import from_huggingface, read_config

    config = read_config(snapshot.config)
    where = f"{hub_id} in the Hub cache, commit {snapshot.commit[:7]}"
    quantized = config.get("quantization_config")
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    stored = method if isinstance(method, str) and method not in EXPANDED else ""
    if stored:
        config = {name: value for name, value in config.items() if name != "quantization_config"}
    try:
        model = from_huggingface(config, name=hub_id, source=where)
    except InputError as error:
        raise error.within(f"{where}: {snapshot.config.name}") from None
    return NamedModel(model, f"config.json of {where}", stored=stored[:20])


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir() and ("/" in str(path) or (path / "config.json").exists() or str(path) == ".")
    except (OSError, ValueError):
        return False


SCHEMA = "memcalc.module/1"
LARGEST = 64 << 20
"""Bytes; a model of a hundred different blocks has a tenth of it."""
BEGINNING = 64
"""Characters within which the schema stands."""


def is_recorded(path: Path) -> bool:
    """Whether a file begins as a recorded model does."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            return SCHEMA.encode() in stream.read(BEGINNING)
    except (OSError, ValueError):
        return False


def read_recorded(path: Path) -> Model:
    """Return the model in a file, checked."""
    from pydantic import ValidationError

    from memcalc.specs.model import Model

    with path.open("rb") as stream:
        content = stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise FileError("file", str(path), f"a recorded model has at most {LARGEST >> 20} MiB")
    try:
        data = json.loads(content)
        model = Model.model_validate(data["model"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path.name}: {where}", first.get("input"), str(first["msg"])) from None
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise FileError("file", str(path), f"it is no recorded model: {type(error).__name__}") from None
    if model.recording is None or any(group.block.recorded is None for group in model.groups):
        raise FileError("file", str(path), "it is no recorded model: a part has no recording")
    return model


def recorded_text(model: Model) -> str:
    """The text of the file."""
    data = model.model_dump(mode="json", exclude_defaults=True)
    return json.dumps({"schema": SCHEMA, "model": data}, separators=(",", ":")) + "\n"


MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]{0,199}", re.ASCII)
_LONGEST_REF = 100


class Snapshot(NamedTuple):
    """One commit of a repository, as it was downloaded."""

    config: Path
    """Its config.json."""
    commit: str
    """Which commit."""


def cache_folders(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """The folders that hold downloaded repositories, each once.

    That of ``TRANSFORMERS_CACHE`` is read by Transformers before version 5 (utils/hub.py), after the Hub's own.

    >>> [str(folder) for folder in cache_folders({"HF_HOME": "/hf", "TRANSFORMERS_CACHE": "/tf"})]
    ['/hf/hub', '/tf']
    """
    base = environ.get("XDG_CACHE_HOME", "~/.cache")
    home = _expanded(environ.get("HF_HOME", f"{base}/huggingface"), environ)
    older = environ.get("HUGGINGFACE_HUB_CACHE", str(home / "hub"))
    folders = [_expanded(environ.get("HF_HUB_CACHE", older), environ)]
    if environ.get("TRANSFORMERS_CACHE"):
        folders.append(_expanded(environ["TRANSFORMERS_CACHE"], environ))
    yield from dict.fromkeys(folders)


def snapshot_of(hub_id: str, environ: Mapping[str, str] = os.environ) -> Snapshot | None:
    """The snapshot that a cache has of OWNER/NAME or OWNER/NAME@REVISION; None where no cache knows the repository.

    Raises :class:`memcalc.errors.FileError` where a repository is there, and no config.json of the revision.
    """
    name, _, revision = hub_id.partition("@")
    torn = None
    for folder in cache_folders(environ):
        repository = folder / "--".join(("models", *name.split("/")))
        try:
            if asks(repository.is_dir):
                return _snapshot(repository, revision or MAIN)
        except FileError as error:
            torn = torn or error
    if torn is not None:
        raise torn
    return None


def _snapshot(repository: Path, revision: str) -> Snapshot:
    if not _REVISION.fullmatch(revision):
        raise FileError("Hub cache", str(repository), "a revision is a branch, a tag or a commit")
    commit = revision
    ref = repository / "refs" / revision
    if asks(ref.is_file):
        with regular(ref) as stream:
            commit = stream.read(_LONGEST_REF).decode("ascii", "replace").strip()
        if not _COMMIT.fullmatch(commit):
            raise FileError("Hub cache", str(ref), "it holds no commit: download the model again")
    elif not _COMMIT.fullmatch(commit):
        allowed = f"it has no revision {revision}: download that, or give one as OWNER/NAME@COMMIT"
        raise FileError("Hub cache", str(repository), allowed)
    config = repository / "snapshots" / commit / "config.json"
    if not asks(config.is_file):
        allowed = f"its revision {revision} has no config.json: download the model again, or give the path of one"
        raise FileError("Hub cache", str(repository), allowed)
    return Snapshot(config, commit)


def _expanded(name: str, environ: Mapping[str, str]) -> Path:
    """A path with variables filled in, and a leading ~ as the home of these variables."""
    text = re.sub(r"\$\{?(\w+)\}?", lambda variable: environ.get(variable[1], variable[0]), name)
    home = environ.get("HOME")
    return Path(home + text[1:]) if home and (text == "~" or text.startswith("~/")) else Path(text).expanduser()
