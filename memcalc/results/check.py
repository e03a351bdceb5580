"""The answer of ``memcalc check``: verdict, findings file by file, and the smallest edits that make the job fit."""

from typing import Any, Literal

from memcalc.results.estimates import Answer, Estimate, Verdict, schema
from memcalc.specs.strict import Frozen

Severity = Literal["error", "warning", "note"]


class CheckFinding(Frozen):
    """One remark on a job's configuration."""

    severity: Severity
    """An ``error`` is listed before a ``warning``, and that before a ``note``."""
    code: str
    """Stable: MC001 and on are about reading, MC101 and on are traps; each has its section in docs/traps.md."""
    field: str
    """As the file calls it; empty where it is about the job as a whole."""
    line: int
    """In the file, from 1; of the nearest table where the setting has no line, and 1 for the whole file."""
    message: str
    """What was found."""
    suggestion: str
    """What to do about it; empty where nothing is proposed."""


class CheckDefault(Frozen):
    """A setting that no file says, and the framework's default that was taken."""

    field: str
    """As the file's format calls it."""
    word: str
    """A word of :func:`memcalc.estimate`, a field of ``--set`` by its dotted name, or a fact of the job."""
    value: Any
    """The default that was taken."""
    usual: str
    """The default as the file would say it; empty where the framework's own value is not known."""


class CheckedFile(Frozen):
    """One file of the job."""

    path: str
    """As it was read."""
    kind: str
    """The format, such as DeepSpeed JSON."""
    findings: tuple[CheckFinding, ...]
    """Errors first, then warnings and notes."""
    defaults: tuple[CheckDefault, ...]
    """Settings that this file leaves to its framework's defaults."""


class CheckEdit(Frozen):
    """A file's smallest edit."""

    path: str
    """Of the file that is edited."""
    diff: str
    """Unified."""
    text: str
    """The whole file as edited."""


class CheckFix(Frozen):
    """A change of the job that makes it fit."""

    changes: tuple[str, ...]
    """Each as field, old value and new value."""
    edits: tuple[CheckEdit, ...]
    """One for each file that changes; none where the user makes the change."""
    peak: int
    """Bytes of device memory after the edit."""
    verdict: Verdict
    """Of the job as edited."""
    tokens_per_second_per_gpu: float = 0.0
    """Throughput of the job as edited [tokens/s]; 0 where no time is known."""
    slowest: float = 0.0
    """At the long end of the range of its step [tokens/s]."""
    fastest: float = 0.0
    """At the short end [tokens/s]."""
    command: str = ""
    """The job as edited, as a ``memcalc estimate`` line."""


class Check(Answer):
    """The answer of ``memcalc check``."""

    schema_: Literal["memcalc.check/1"] = schema("memcalc.check/1")
    verdict: Verdict
    """Of the job as its files have it."""
    files: tuple[CheckedFile, ...]
    """In the order in which they were read."""
    estimate: Estimate
    """Of the job as its files have it."""
    fix: CheckFix | None
    """The smallest edit, the first of ``fixes``; None where the job fits, or no edit of its files makes it fit."""
    fixes: tuple[CheckFix, ...] = ()
    """Up to three edits with which a job fits that does not, or is tight: fewest settings first, then the fastest."""
    summary: str
    """One line: verdict, size and budget, and the edit."""
    command: str
    """The estimate that the files come to, as a command."""


# The answer of ``memcalc check --survey``: what a folder's files are read as.

Outcome = Literal["read", "asked", "declined", "no-training", "unknown-format", "refused"]


class SurveyedFile(Frozen):
    """One file of a folder."""

    path: str
    """Below the folder."""
    kind: str
    """The format, such as axolotl YAML; empty where none is known."""
    outcome: Outcome
    """`read`: it comes to an estimate. `asked`: something must be told first. `declined`: it trains what memcalc gives
    no figures for, by name. `no-training`: it starts none. `unknown-format`: none that is read. `refused`: a value that
    cannot be used."""
    reason: str
    """The sentence with which it was not read; empty where it was."""


class Survey(Answer):
    """The answer of ``memcalc check --survey``."""

    schema_: Literal["memcalc.survey/1"] = schema("memcalc.survey/1")
    folder: str
    """As it was named."""
    files: tuple[SurveyedFile, ...]
    """In the order of their paths."""
    counts: dict[str, int]
    """Files by outcome."""
