"""The files of one job: those that are given, and those that they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from memcalc.convert.config import Config, Finding, Reference
from memcalc.convert.document import Document, inside, overlay, parse_document, read_document
from memcalc.convert.formats import get_format, recognise
from memcalc.convert.formats.base import COMMITS, shipped
from memcalc.errors import FileError, MemcalcError, MissingError, shown
from memcalc.files import there

MOST_FILES = 16
"""Of one job; the most that a known launch names is four."""
MOST_LOOKED_AT = 256
"""Entries of a folder that is given in place of a file."""
MOST_NAMED = 4
"""Files of a folder that a sentence names."""
ENDINGS = frozenset({".json", ".yaml", ".yml", ".toml", ".sh", ".bash", ".sbatch", ".slurm"})
"""What configs and launch scripts end with."""


def read_files(
    paths: Iterable[str], texts: Mapping[Path, str] | None = None, folders: Iterable[Path] = ()
) -> tuple[Config, ...]:
    """Return the configs of the files and of all that they name, each once, in the order in which they are met.

    ``texts`` stands in for files: that is how an edit is checked before it is written. A file that is named by another
    one must lie in the folder of that file, in the working directory, in one of ``folders``, or below: what leads
    elsewhere must be given.
    """
    paths = tuple(paths)
    for folder in filter(Path.is_dir, map(Path, paths)):
        raise FileError("file", str(folder), _of_folder(folder))
    reader = _References(dict(texts or {}), tuple(folders), {_real(Path(path)) for path in paths})
    for path in paths:
        reader.read(Path(path), None)
    return tuple(reader.configs)


class _References:
    """Follows references, each file once: a loop ends where it began."""

    def __init__(self, texts: dict[Path, str], folders: tuple[Path, ...], given: set[Path]) -> None:
        self.texts = texts
        self.folders = folders
        self.given = given
        self.configs: list[Config] = []
        self.seen: set[Path] = set()

    def read(self, path: Path, reference: Reference | None) -> None:
        """Read a file, then what it names."""
        real = _real(path)
        over = reference.over if reference else None
        if real in self.seen and over is None:
            return
        self.seen.add(real)
        if len(self.seen) > MOST_FILES:
            raise FileError("file", str(path), f"a job may have at most {MOST_FILES} files")
        text = self.loaded(path)
        if over is not None:
            self.configs = [config for config in self.configs if _real(config.document.path) != real]
            text = overlay(text, over)
        self.take(text, reference.format if reference else "")

    def loaded(self, path: Path) -> Document:
        """The document of a file, as on disk or as it would be after an edit."""
        if path in self.texts:
            kind = read_document(path).kind
            return parse_document(path, self.texts[path], kind)
        return read_document(path)

    def take(self, text: Document, name: str) -> None:
        """Keep the config of a document, and go on to its references."""
        form = get_format(name) if name else recognise(text)
        config = form.read(text)
        self.configs.append(config)
        for reference in config.references:
            if reference.document is not None:
                self.take(reference.document, reference.format)
            else:
                self.follow(config, reference)

    def follow(self, config: Config, reference: Reference) -> None:
        """Read a file that another one names; of those that its framework ships the one that it ships."""
        origin = config.document.path
        folder = origin.parent
        named = Path(reference.path)
        starts = (folder, Path(), *self.folders)
        candidates = [named] if named.is_absolute() else [start / named for start in starts]
        path = next((candidate for candidate in candidates if there(candidate)), candidates[0])
        message = f"{origin.name} names {shown(reference.path)}"
        if not there(path) and (known := shipped(config.format, reference.path)) is not None:
            says = f"{reference.path} is not there: counted as {COMMITS[config.format]} ships it, which no edit changes"
            note = Finding("note", "MC004", reference.field, says)
            self.configs[-1] = replace(self.configs[-1], findings=(*self.configs[-1].findings, note))
            self.take(known, "deepspeed")
            return
        if _real(path) not in self.given and not any(inside(path, root) for root in starts):
            if there(path) and path.is_symlink():
                raise FileError("file", str(path), f"it leads out of {folder}")
            raise MissingError(f"{message} outside its folder. Pass it as a FILE to read it.")
        if not there(path):
            recipe = reference.format == "torchtune" and not path.suffix
            hint = f" (tune cp {reference.path} FILE.yaml writes torchtune's own)" if recipe else ""
            raise MissingError(f"{message}, which does not exist. Pass it as a FILE{hint}.")
        self.read(path, reference)


def _of_folder(folder: Path) -> str:
    """What to give instead of a folder: the line of a job that was exported into it, or the files that are known.

    A config that another file names is read with that one.
    """
    try:
        inside_it = sorted(islice(folder.iterdir(), MOST_LOOKED_AT))
    except OSError:
        return "is a folder; give a file of the job"
    known = {path: text for path in inside_it if (text := _known_text(path)) is not None}
    for text in known.values():
        if line := re.search(r"^# (memcalc check .+)$", text, re.MULTILINE):
            return f"is a folder; check its job with: cd {shlex.quote(str(folder))} && {line[1]}"
    first = [
        str(path)
        for path in known
        if path.suffix == ".py" or not any(path.name in text for other, text in known.items() if other != path)
    ]
    each = f"--survey {shlex.quote(str(folder))}"
    if not first:
        return f"is a folder without a config or launch script that is known; {each} says why, file by file"
    if len(first) == 1:
        return f"is a folder; give the file that starts its job: {first[0]}"
    more = f" and {len(first) - MOST_NAMED} more" if len(first) > MOST_NAMED else ""
    return (
        f"is a folder; give the files of one job: of {', '.join(first[:MOST_NAMED])}{more}; {each} reads each of them"
    )


def _known_text(path: Path) -> str | None:
    """The text of a file that is some job's; None of another."""
    if path.suffix.lower() not in {*ENDINGS, ".py"} or path.name.startswith(".") or not path.is_file():
        return None
    try:
        document = read_document(path)
        return None if recognise(document).name == "unread" else document.text
    except MemcalcError:
        return None


def _real(path: Path) -> Path:
    """Where a path leads; itself where it leads nowhere, for reading it says why."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links; a name that is no name
        return path
