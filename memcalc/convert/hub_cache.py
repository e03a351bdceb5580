"""Models in the local cache of the Hub: `models--OWNER--NAME/refs/REVISION` leads to `snapshots/COMMIT/config.json`.

Only the one repository is looked at, no folder is listed, and nothing is downloaded or written.

The layout is that of huggingface_hub 2.4.0 (file_download.py, ``try_to_load_from_cache``; constants.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from memcalc.errors import FileError
from memcalc.files import asks, regular

MAIN = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]{0,199}", re.ASCII)
_LONGEST_REF = 100


@dataclass(frozen=True)
class Snapshot:
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
