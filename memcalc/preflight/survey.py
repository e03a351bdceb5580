"""What the files of a folder are read as, one by one: the examples of a framework, the configs of a team."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from memcalc._version import __version__
from memcalc.convert.config import Config
from memcalc.convert.document import read_document
from memcalc.convert.formats import recognise
from memcalc.errors import (
    FileError,
    FragmentError,
    IdleError,
    MemcalcError,
    MissingError,
    ObjectiveError,
    UnknownFormatError,
    UnmodelledError,
)
from memcalc.preflight.job import estimate_merged
from memcalc.preflight.merge import merge
from memcalc.preflight.read_files import read_files
from memcalc.preflight.roles import answer
from memcalc.results.check import Outcome, Survey, SurveyedFile

ENDINGS = frozenset({".json", ".yaml", ".yml", ".toml", ".sh", ".bash", ".sbatch", ".slurm"})
"""What configs and launch scripts end with."""
MOST_FILES = 5_000
"""Of one folder."""
_OUTCOMES: tuple[tuple[type[MemcalcError], Outcome], ...] = (
    (ObjectiveError, "declined"),
    (FragmentError, "declined"),
    (UnmodelledError, "declined"),
    (IdleError, "no-training"),
    (UnknownFormatError, "unknown-format"),
    (MissingError, "asked"),
    (MemcalcError, "refused"),
)


def survey(
    folder: str, *, settings: Mapping[str, Any] | None = None, preset_dirs: Iterable[str] = (), **options: Any
) -> Survey:
    """Read every config and launch script below a folder, each as the only file of its job.

    Parameters
    ----------
    folder
        Links are not followed; files that are hidden are left out.
    settings, preset_dirs
        As for :func:`memcalc.estimate`.
    **options
        What counts where a file does not say it, such as ``gpu`` and ``gpus``.

    Returns
    -------
    Survey
        File by file what it was read as, and the counts.

    Raises
    ------
    memcalc.errors.FileError
        Where the folder is none, or has more than 5,000 such files.
    """
    root, dirs = Path(folder), tuple(preset_dirs)
    if not root.is_dir():
        raise FileError("folder", folder, "must be a folder")
    paths = sorted(_files(root))
    if len(paths) > MOST_FILES:
        raise FileError("folder", folder, f"must have at most {MOST_FILES:,} configs and scripts, not {len(paths):,}")
    given = {**options, "settings": dict(settings or {})}
    files = tuple(_surveyed(root, path, given, dirs) for path in paths)
    counts = Counter(file.outcome for file in files)
    return Survey(version=__version__, folder=folder, files=files, counts=dict(sorted(counts.items())))


def _files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.suffix.lower() in ENDINGS and not hidden and path.is_file() and not path.is_symlink():
            yield path


def _surveyed(root: Path, path: Path, given: Mapping[str, Any], dirs: tuple[str, ...]) -> SurveyedFile:
    outcome: Outcome = "read"
    reason = kind = ""
    try:
        kind = recognise(read_document(path)).title
        above = [parent for parent in path.parents if parent.is_relative_to(root)]
        configs = read_files([str(path)], folders=above)
        job = merge(configs, _unsaid(configs, given), dirs)
        if job.algorithm:
            answer(job, configs, dirs, advice=False)
        else:
            estimate_merged(job, dirs)
    except MemcalcError as error:
        outcome = next(name for base, name in _OUTCOMES if isinstance(error, base))
        reason = str(error).replace(f"{root}/", "")
    return SurveyedFile(path=path.relative_to(root).as_posix(), kind=kind, outcome=outcome, reason=reason)


def _unsaid(configs: Iterable[Config], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given and no file of the job says: examples are read as their authors run them."""
    settings = [setting for config in configs for setting in config.settings if not setting.default]
    stated = {setting.name for setting in settings if setting.value is not None}
    counted = {"gpus"} if "gpus_per_node" in stated else set()
    return {name: value for name, value in given.items() if name not in stated | counted}
