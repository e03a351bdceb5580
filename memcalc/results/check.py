"""The answer of ``memcalc check``: verdict, findings file by file, and the smallest edit that makes the job fit."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from memcalc.results.estimates import Estimate, Verdict
from memcalc.specs.model import Frozen

Severity = Literal["error", "warning", "note"]


class CheckFinding(Frozen):
    """One remark on a job's configuration."""

    severity: Severity
    code: str
    """Stable: MC001 and on are about reading, MC101 and on are traps; each has its section in docs/traps.md."""
    field: str
    """As the file calls it; empty where it is about the job as a whole."""
    line: int
    message: str
    suggestion: str


class CheckDefault(Frozen):
    """A setting that no file says, and the framework's default that was taken."""

    field: str
    word: str
    value: Any


class CheckedFile(Frozen):
    """One file of the job."""

    path: str
    kind: str
    """The format, such as DeepSpeed JSON."""
    findings: tuple[CheckFinding, ...]
    defaults: tuple[CheckDefault, ...]


class CheckEdit(Frozen):
    """A file's smallest edit."""

    path: str
    diff: str
    """Unified."""
    text: str
    """The whole file as edited."""


class CheckFix(Frozen):
    """The smallest change that makes the job fit."""

    changes: tuple[str, ...]
    """Each as field, old value and new value."""
    edits: tuple[CheckEdit, ...]
    peak: int
    """Bytes of device memory after the edit."""
    verdict: Verdict


class Check(Frozen):
    """The answer of ``memcalc check``."""

    schema_: Literal["memcalc.check/1"] = Field(default="memcalc.check/1", alias="schema", serialization_alias="schema")
    version: str
    verdict: Verdict
    files: tuple[CheckedFile, ...]
    estimate: Estimate
    fix: CheckFix | None
    """None where the job fits, or where no edit of its files alone makes it fit."""
    summary: str
    """One line: verdict, size and budget, and the edit."""
    command: str
    """The estimate that the files come to, as a command."""
