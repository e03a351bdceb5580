"""The check itself: files in, verdict, findings and the smallest edit out; and a survey of all files of a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc._version import __version__
from memcalc.convert.config import Config, Finding
from memcalc.convert.document import read_document
from memcalc.convert.formats import get_format, recognise
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
from memcalc.files import asks
from memcalc.preflight.job import MergedJob, estimate_merged, read_files
from memcalc.preflight.merge import merge
from memcalc.preflight.names import ENDINGS
from memcalc.preflight.roles import answer, check_counted
from memcalc.results.check import (
    Check,
    CheckDefault,
    CheckedFile,
    CheckFinding,
    CheckFix,
    Outcome,
    Survey,
    SurveyedFile,
)
from memcalc.results.estimates import EXPANDABLE, Estimate, flushed, mended
from memcalc.units import GIB

if TYPE_CHECKING:
    from memcalc.results.posttraining import Rl

__all__ = ["check", "check_estimate"]


def check(
    files: Iterable[str], *, settings: Mapping[str, Any] | None = None, preset_dirs: Iterable[str] = (), **options: Any
) -> Check | Rl:
    """Check a job from its own config files; options that are given override what the files state.

    Parameters
    ----------
    files
        Paths of the job's config files and scripts; they are read, never run.
    settings, preset_dirs
        As for :func:`memcalc.estimate`.
    **options
        What no file states, such as ``model`` and ``gpu``, and all others of :doc:`/python`.

    Returns
    -------
    Check or Rl
        The verdict, findings file by file, and the smallest edits that make the job fit; of post-training the answer of
        :func:`memcalc.rl`.

    Raises
    ------
    memcalc.errors.InputError
        For a file that cannot be read.
    memcalc.errors.MissingError
        Naming all that must be given.
    """
    paths, dirs = tuple(files), tuple(preset_dirs)
    if not paths:
        raise MissingError("No files. Usage: memcalc check FILE...")
    given = {**options, "settings": dict(settings or {})}
    configs = read_files(paths)
    job = merge(configs, given, dirs)
    if not job.algorithm:
        return _checked_job(job, configs, paths, given, dirs)
    check_counted(job, given)
    return answer(job, configs, dirs)


def check_estimate(files: Iterable[str], **given: Any) -> Check:
    """Check a job that is no post-training, which alone is one estimate; else as :func:`check`."""
    result = check(files, **given)
    if not isinstance(result, Check):
        raise ObjectiveError(f"the files train by {result.algorithm.upper()}: memcalc check and memcalc rl say more.")
    return result


def _checked_job(
    job: MergedJob, configs: tuple[Config, ...], paths: tuple[str, ...], given: dict[str, Any], dirs: tuple[str, ...]
) -> Check:
    from memcalc.preflight.lints import LintContext, lints

    estimate = estimate_merged(job, dirs, advice=True)
    findings = [*job.findings, *lints(LintContext(job, configs, estimate, dirs))]
    fixes: tuple[CheckFix, ...] = ()
    if estimate.verdict != "fits":
        from memcalc.preflight.fix import smallest_fixes

        fixes = smallest_fixes(paths, configs, job, estimate, given, dirs)
    fix = next(iter(fixes), None)
    return Check(
        version=__version__,
        verdict=estimate.verdict,
        files=tuple(_checked(parts, findings, job) for parts in _files(configs)),
        estimate=estimate,
        fix=fix,
        fixes=fixes,
        summary=_summary(estimate, fix),
        command=estimate.command,
    )


def _files(configs: tuple[Config, ...]) -> list[list[Config]]:
    """Return the configs file by file: a script may have several, its launcher's and its program's among them."""
    files: dict[Path, list[Config]] = {}
    for config in configs:
        files.setdefault(config.document.path, []).append(config)
    return list(files.values())


def _checked(parts: list[Config], findings: list[tuple[Config, Finding]], job: MergedJob) -> CheckedFile:
    listed = [(config, finding) for config in parts for finding in config.findings]
    listed += [(origin, finding) for origin, finding in findings if any(origin is config for config in parts)]
    order = {"error": 0, "warning": 1, "note": 2}
    titles = [get_format(config.format).title for config in parts]
    return CheckedFile(
        path=str(parts[0].document.path),
        kind=", ".join(dict.fromkeys(titles)),
        findings=tuple(
            CheckFinding(
                severity=finding.severity,
                code=finding.code,
                field=finding.field,
                line=config.document.line(finding.key_path),
                message=finding.message,
                suggestion=finding.suggestion,
            )
            for config, finding in sorted(listed, key=lambda pair: order[pair[1].severity])
        ),
        defaults=tuple(
            CheckDefault(field=setting.field, word=setting.name, value=setting.value, usual=setting.usual)
            for origin, setting in job.origins.values()
            if setting.default and any(origin is config for config in parts)
        ),
    )


def _summary(estimate: Estimate, fix: CheckFix | None) -> str:
    """One line, as a queue shows it."""
    verdict = {"fits": "fits", "tight": "is tight", "does-not-fit": "does not fit"}[estimate.verdict]
    peak, capacity = estimate.peak.device / GIB, estimate.budget.capacity / GIB
    hardware = estimate.hardware
    line = (
        f"{verdict}: {estimate.model.name} needs {peak:.1f} of {capacity:.1f} GiB per GPU "
        f"({hardware.gpus} × {hardware.gpu})"
    )
    if estimate.flushes:
        line += f", and frees its cache {flushed(estimate.flushes)}"
    if then := mended(estimate.verdict, estimate.expandable_verdict):
        line += f"; with {EXPANDABLE} it {then}"
    if estimate.reason and estimate.peak.device <= estimate.budget.capacity:
        line = f"{line}; {estimate.reason}"
    if fix is not None and estimate.verdict == "does-not-fit":
        return f"{line}. Smallest edit: {', '.join(fix.changes)}"
    return line


# ------------------------------------------------------------------------------------------------ all files of a folder


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
    if not asks(root.is_dir):
        raise FileError("folder", folder, "must be a folder")
    paths = sorted(_files_below(root))
    if len(paths) > MOST_FILES:
        raise FileError("folder", folder, f"must have at most {MOST_FILES:,} configs and scripts, not {len(paths):,}")
    given = {**options, "settings": dict(settings or {})}
    files = tuple(_surveyed(root, path, given, dirs) for path in paths)
    counts = Counter(file.outcome for file in files)
    return Survey(version=__version__, folder=folder, files=files, counts=dict(sorted(counts.items())))


def _files_below(root: Path) -> Iterator[Path]:
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
