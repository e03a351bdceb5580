"""The check itself: files in, verdict, findings and the smallest edit out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memcalc import __version__, api
from memcalc.convert.config import Config, Finding
from memcalc.convert.formats import format_named
from memcalc.errors import MissingError
from memcalc.preflight.gather import gathered
from memcalc.preflight.join import Joined, joined
from memcalc.results import Check, CheckDefault, CheckedFile, CheckFinding, CheckFix, Estimate
from memcalc.units import GIB

__all__ = ["check", "estimated"]


def check(
    files: Iterable[str],
    *,
    settings: Mapping[str, Any] | None = None,
    preset_dirs: Iterable[str] = (),
    **words: Any,
) -> Check:
    """Check a job from its own config files; words that are given have their way over what the files say.

    Parameters
    ----------
    files
        Paths of the job's config files and scripts; they are read, never run.
    settings, preset_dirs
        As for :func:`memcalc.estimate`.
    **words
        What no file says, such as ``model`` and ``gpu``, and all others of :doc:`/python`.

    Returns
    -------
    Check
        The verdict, findings file by file, and the smallest edit that makes the job fit.

    Raises
    ------
    memcalc.errors.InputError
        For a file that cannot be read.
    memcalc.errors.MissingError
        Naming all that must be told.
    """
    from memcalc.preflight.traps import Scene, traps

    paths, dirs = tuple(files), tuple(preset_dirs)
    if not paths:
        raise MissingError("check needs the job's files: give at least one FILE.")
    given = {**words, "settings": dict(settings or {})}
    configs = gathered(paths)
    job = joined(configs, given, dirs)
    estimate = estimated(job, dirs)
    found = [*job.findings, *traps(Scene(job, configs, estimate))]
    fix: CheckFix | None = None
    if estimate.verdict == "does-not-fit":
        from memcalc.preflight.fix import smallest_fix

        fix = smallest_fix(paths, configs, job, estimate, given, dirs)
    return Check(
        version=__version__,
        verdict=estimate.verdict,
        files=tuple(_checked(parts, found, job) for parts in _files(configs)),
        estimate=estimate,
        fix=fix,
        summary=_summary(estimate, fix),
        command=estimate.command,
    )


def estimated(job: Joined, dirs: tuple[str, ...]) -> Estimate:
    """The estimate that the words of a joined job come to."""
    own = {name: job.facts[name] for name in ("model", "gpu", "node") if job.facts.get(name) is not None}
    words = {name: value for name, value in job.words.items() if value not in (None, ())}
    return api.estimate(**own, **words, settings=job.settings, preset_dirs=dirs)


def _files(configs: tuple[Config, ...]) -> list[list[Config]]:
    """Return the configs file by file: a script may have several, its launcher's and its program's among them."""
    found: dict[Path, list[Config]] = {}
    for config in configs:
        found.setdefault(config.document.path, []).append(config)
    return list(found.values())


def _checked(parts: list[Config], found: list[tuple[Config, Finding]], job: Joined) -> CheckedFile:
    listed = [(config, finding) for config in parts for finding in config.findings]
    listed += [(origin, finding) for origin, finding in found if any(origin is config for config in parts)]
    order = {"error": 0, "warning": 1, "note": 2}
    titles = [format_named(config.format).title for config in parts]
    return CheckedFile(
        path=str(parts[0].document.path),
        kind=", ".join(dict.fromkeys(titles)),
        findings=tuple(
            CheckFinding(
                severity=one.severity,
                code=one.code,
                field=one.field,
                line=config.document.line(one.place),
                message=one.message,
                suggestion=one.suggestion,
            )
            for config, one in sorted(listed, key=lambda pair: order[pair[1].severity])
        ),
        defaults=tuple(
            CheckDefault(field=said.field, word=said.word, value=said.value)
            for origin, said in job.origins.values()
            if said.default and any(origin is config for config in parts)
        ),
    )


def _summary(estimate: Estimate, fix: CheckFix | None) -> str:
    """One line, as a queue shows it."""
    said = {"fits": "fits", "tight": "is tight", "does-not-fit": "does not fit"}[estimate.verdict]
    peak, whole = estimate.peak.device / GIB, estimate.budget.capacity / GIB
    hardware = estimate.hardware
    line = (
        f"{said}: {estimate.model.name} needs {peak:.1f} of {whole:.1f} GiB on each of {hardware.gpus} {hardware.gpu}"
    )
    if fix is not None:
        return f"{line}; smallest edit: {', '.join(fix.changes)}"
    return line
