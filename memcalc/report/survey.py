"""A survey of a folder as a document: how many files are read, and what the others are."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from memcalc.report.tables import Line, Report, Table, header, made

if TYPE_CHECKING:
    from memcalc.results.check import Survey

_OUTCOMES = ("read", "asked", "declined", "no-training", "unknown-format", "refused")
_BY_FOLDER = header("folder | files > | " + " | ".join(f"{name} >" for name in _OUTCOMES))
_BY_FILE = header("file | kind | outcome | reason")


def report(result: Survey) -> Report:
    """Return the answer of ``memcalc check --survey``."""
    total = len(result.files)
    counted = ", ".join(f"{result.counts[name]} {name}" for name in _OUTCOMES if name in result.counts)
    data = Table("Files", _BY_FILE, tuple((f.path, f.kind, f.outcome, f.reason) for f in result.files))
    others = tuple((f.path, f.outcome, f.reason) for f in result.files if f.outcome not in {"read", "no-training"})
    return made(
        result,
        data,
        Line(f"{total} files below {result.folder}: {counted or 'none'}", "verdict"),
        Table("By folder", _BY_FOLDER, tuple(_rows(result))),
        Table("Not read", header("file | outcome | reason"), others),
    )


def _rows(result: Survey) -> list[tuple[str, ...]]:
    folders: dict[str, Counter[str]] = {}
    for file in result.files:
        folders.setdefault(PurePosixPath(file.path).parts[0] if "/" in file.path else ".", Counter())[file.outcome] += 1
    return [
        (folder, str(counts.total()), *(str(counts[name] or "") for name in _OUTCOMES))
        for folder, counts in sorted(folders.items())
    ]
