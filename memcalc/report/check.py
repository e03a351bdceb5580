"""A pre-flight as a document: the verdict first, then what was found in the files, then the edit that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.estimate import bar_of, components_of, head_of
from memcalc.report.render import Report
from memcalc.report.tables import Block, Code, Column, Document, Line, Listing, Table, facts, gib
from memcalc.results import Check, CheckedFile, CheckFinding, CheckFix

__all__ = ["report"]

_MOODS = {"error": "bad", "warning": "close", "note": ""}
_COLUMNS = (
    Column("file"),
    Column("line", right=True),
    Column("severity"),
    Column("code"),
    Column("field"),
    Column("message"),
    Column("suggestion"),
)


def report(result: Check) -> Report:
    """Return the answer of ``memcalc check``."""
    estimate = result.estimate
    blocks = (
        *head_of(estimate),
        bar_of(estimate),
        components_of(estimate),
        *(block for file in result.files for block in _file(file)),
        *(Line(f"Warning: {warning}", "warning") for warning in estimate.warnings),
        *facts("Assumed, since no file says it", estimate.assumptions),
        *_fix(result),
        Code("The job as one estimate, byte by byte", result.command),
    )
    return Report(Document(blocks, _findings(result)), result.model_dump(mode="json", by_alias=True))


def _file(file: CheckedFile) -> Iterator[Block]:
    count = len(file.findings)
    said = "nothing to remark" if not count else f"{count} finding{'s' if count > 1 else ''}"
    yield Line(f"{file.path} ({file.kind}): {said}", "title")
    for finding in file.findings:
        yield Line(_sentence(finding), "text", _MOODS[finding.severity])
    values = {default.field: str(default.value) for default in file.defaults}
    yield from facts("  Its framework's defaults", values)


def _sentence(finding: CheckFinding) -> str:
    hint = f" → {finding.suggestion}" if finding.suggestion else ""
    return f"  line {finding.line}: {finding.severity} {finding.code}: {finding.message}{hint}"


def _fix(result: Check) -> Iterator[Block]:
    fix = result.fix
    if fix is not None:
        yield Line(f"Smallest edit with which it {_fits(fix)}: {', '.join(fix.changes)}", "verdict", "good")
        for edit in fix.edits:
            yield Listing(f"{edit.path} (--fix writes the edited file beside it)", "diff", edit.diff)
    elif result.verdict == "does-not-fit":
        yield Line("No edit of these files alone makes it fit; memcalc plan searches all strategies.", "warning")


def _fits(fix: CheckFix) -> str:
    return f"{'fits' if fix.verdict == 'fits' else 'is tight'} ({gib(fix.peak, 1)} GiB)"


def _findings(result: Check) -> Table:
    rows = tuple(
        (file.path, str(one.line), one.severity, one.code, one.field, one.message, one.suggestion)
        for file in result.files
        for one in file.findings
    )
    return Table("Findings", _COLUMNS, rows)
