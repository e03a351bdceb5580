"""A pre-flight as a document: the verdict first, then what was found in the files, then the edit that makes it fit."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from memcalc.report import plan_words
from memcalc.report.estimate import answer_of, bar_of, cache_of, components_of, length_lines, occasion_lines, warned
from memcalc.report.plan_words import rate_range
from memcalc.report.tables import Block, Code, Column, Line, Listing, Report, Table, facts, gib, header, made, said
from memcalc.results.check import Check, CheckedFile, CheckFinding, CheckFix
from memcalc.results.names import component_name, phase_name

if TYPE_CHECKING:
    from memcalc.results.check import Survey


_MOODS = {"error": "bad", "warning": "close", "note": ""}
MOST_FINDINGS = 3
"""Findings of a file on a screen before its notes are only counted."""
_ALIKE = 3
"""Findings of one rule from which a screen has them in one line."""
_CHANGED = 5
"""Lines that a screen shows of an edit."""
_FIELDS = 4
"""Fields that such a line names after its first."""
_COLUMNS = header("file | line > | severity | code | field | message | suggestion")


def report(result: Check) -> Report:
    """Return the answer of ``memcalc check``."""
    estimate = result.estimate
    blocks = (
        *answer_of(estimate),
        *length_lines(estimate.lengths, estimate.verdict),
        bar_of(estimate),
        *_fix(result),
        components_of(estimate),
        *occasion_lines(estimate),
        *cache_of(estimate),
        *(block for file in result.files for block in _file(file)),
        *(Line(f"Warning: {warning}", "warning") for warning in estimate.warnings),
        *facts("Not in your files; assumed", estimate.assumptions),
        Code("Same job as an estimate", result.command),
    )
    return made(result, _findings(result), *blocks, screen=_screen(result))


def _screen(result: Check) -> Iterator[Block]:
    """Yield what a terminal shows: the verdict, the edits that fit, and of the first the lines that it changes."""
    estimate = result.estimate
    yield from answer_of(estimate)
    yield from length_lines(estimate.lengths, estimate.verdict)
    if result.fix is None:
        yield bar_of(estimate)
    else:
        name, size = max(estimate.components.model_dump().items(), key=lambda item: item[1])
        yield said("Largest", f"{component_name(name)}, {gib(size, 1)} GiB", f"peak: {phase_name(estimate.peak.phase)}")
    yield from _fix(result, brief=True)
    yield from occasion_lines(estimate)
    yield from cache_of(estimate)
    for file in result.files:
        title, *rest = _file(file, brief=True)
        yield title._replace(role="text")
        yield from rest
    yield from warned(estimate.warnings)
    yield from plan_words.assumed(estimate.assumptions)
    if result.fix is None and result.verdict == "does-not-fit":
        yield Code("Next, what fits instead", plan_words.search_line(estimate.job))
    defaults = sum(len(file.defaults) for file in result.files)
    counted = f"{defaults} framework default{'s' * (defaults > 1)}, " if defaults else ""
    yield Line(f"-v: {counted}components, whole diff, the same job as an estimate", "faint")


def _file(file: CheckedFile, *, brief: bool = False) -> Iterator[Line]:
    count = len(file.findings)
    text = "no issues" if not count else f"{count} finding{'s' if count > 1 else ''}"
    yield Line(f"{file.path} ({file.kind}): {text}", "title")
    if not brief:
        yield from (Line(_sentence(finding), "text", _MOODS[finding.severity]) for finding in file.findings)
    else:
        shown = foremost(file.findings)
        yield from (Line(grouped(alike), "text", _MOODS[alike[0].severity]) for alike in by_rule(shown))
        more = count - len(shown)
        if more:
            yield Line(f"  {more} more note{'s' * (more > 1)}: -v", "faint")
        return
    values = {default.field: default.usual or f"not set ({default.word} {default.value})" for default in file.defaults}
    yield from facts("  Framework defaults", values)


def foremost(findings: tuple[CheckFinding, ...]) -> tuple[CheckFinding, ...]:
    """Every error and warning, and notes as far as there is room for them; in the order of the file."""
    notes = [finding for finding in findings if finding.severity == "note"]
    most = max(MOST_FINDINGS - (len(findings) - len(notes)), 0)
    return tuple(finding for finding in findings if finding.severity != "note" or finding in notes[:most])


def by_rule(findings: tuple[CheckFinding, ...]) -> Iterator[list[CheckFinding]]:
    """Yield findings that share a line: warnings and notes of one rule from three on; an error has its own."""
    rules = Counter(finding.code for finding in findings if finding.severity != "error")
    groups: dict[tuple[str, ...], list[CheckFinding]] = {}
    for index, finding in enumerate(findings):
        alike = finding.severity != "error" and rules[finding.code] >= _ALIKE
        groups.setdefault((finding.code, *([] if alike else [str(index)])), []).append(finding)
    yield from groups.values()


def grouped(findings: list[CheckFinding]) -> str:
    """Return a finding, with how many more of its rule there are and where."""
    first, *others = findings
    if not others:
        return _sentence(first)
    named = [f"{other.field or 'the job'} (line {other.line})" for other in others[:_FIELDS]]
    more = len(others) - len(named)
    listed = ", ".join(named) + (f" and {more} more" if more else "")
    return f"{_sentence(first)}; {len(others)} more {first.code}: {listed}"


def _sentence(finding: CheckFinding) -> str:
    hint = f" → {finding.suggestion}" if finding.suggestion else ""
    return f"  line {finding.line}: {finding.severity} {finding.code}: {finding.message}{hint}"


def _fix(result: Check, *, brief: bool = False) -> Iterator[Block]:
    """Yield the edits that fit and what the first changes; `brief`: no more than its lines."""
    fix = result.fix
    if fix is not None:
        several = len(result.fixes) > 1
        if not (brief and several):
            yield Line(f"Smallest edit: {_change(fix)}: {_fits(fix)}", "verdict", "good")
        if several:
            yield _fixes(result)._replace(titled=not brief)
        for edit in fix.edits:
            shown = in_pieces(edit.diff)
            text = _changed(shown) if brief else shown
            yield Listing(f"{edit.path} (write it with --fix{', another with --edit N' * several})", "diff", text)
        if brief:
            return
        yield Listing("Each edit as an estimate", "sh", "\n".join(each.command for each in result.fixes))
    elif result.verdict == "does-not-fit":
        requested = result.estimate.reason.startswith("host memory requested")
        none = "No edit of these files makes it fit; memcalc plan searches all strategies."
        yield Line("It fits with the host memory of MC113." if requested else none, "warning")


_LONG = 160
"""Letters above which a line is no line to read: a whole JSON."""


def in_pieces(diff: str) -> str:
    r"""Return a diff whose long lines show what is changed in them, with a piece on either side.

    >>> line = '{"a": 1, ' + "0, " * 60 + '"b": 2, "c": 3}'
    >>> print(in_pieces(f"-{line}\n+{line.replace('2', '4')}"))
    … 0,
    -"b": 2,
    +"b": 4,
     "c": 3}
    """
    lines, shown = diff.splitlines(), []
    while lines:
        line = lines.pop(0)
        pair = lines and line[:1] == "-" and lines[0][:1] == "+" and max(len(line), len(lines[0])) > _LONG
        if not pair:
            shown.append(line)
            continue
        before, after = (re.split(r"(?<=,)\s*", text[1:]) for text in (line, lines.pop(0)))
        begins = False
        for piece in list(difflib.unified_diff(before, after, n=1, lineterm=""))[2:]:
            if not piece.startswith("@@"):
                shown.append(f"…{piece}" if begins and piece[0] == " " else piece)
            begins = piece.startswith("@@")
    return "\n".join(shown)


def _changed(diff: str) -> str:
    r"""Return the lines of a diff that are taken out and put in.

    >>> _changed("--- a\n+++ b\n@@ -1 +1 @@\n {\n-x\n+y")
    '-x\n+y'
    """
    lines = [line for line in diff.splitlines() if line[:1] in {"-", "+"} and line[:4] not in {"--- ", "+++ "}]
    if len(lines) > _CHANGED:
        lines[_CHANGED - 1 :] = [f"… {len(lines) - _CHANGED + 1} more lines: -v"]
    return "\n".join(lines)


def _change(fix: CheckFix) -> str:
    return ", ".join(fix.changes) + " (by hand)" * (not fix.edits)


def _fits(fix: CheckFix) -> str:
    """What an edit comes to: `fits, 63.6 GiB, 4350 (3410–5060) tok/s/GPU`."""
    rate = f", {_rate(fix)} tok/s/GPU" if fix.tokens_per_second_per_gpu else ""
    return f"{fix.verdict}, {gib(fix.peak, 1)} GiB{rate}"


def _rate(fix: CheckFix) -> str:
    return rate_range(fix.tokens_per_second_per_gpu, fix.slowest, fix.fastest) if fix.tokens_per_second_per_gpu else ""


def _fixes(result: Check) -> Table:
    rows = tuple(
        (str(number), _change(fix), gib(fix.peak, 1), fix.verdict.replace("-", " "), _rate(fix))
        for number, fix in enumerate(result.fixes, 1)
    )
    edit = Column("edit", short=(("accumulation", "accum"),))
    columns = (*header("# >"), edit, *header("GiB > | verdict | tok/s/GPU >"))
    return Table("Edits", columns, rows)


def _findings(result: Check) -> Table:
    rows = tuple(
        (
            file.path,
            str(finding.line),
            finding.severity,
            finding.code,
            finding.field,
            finding.message,
            finding.suggestion,
        )
        for file in result.files
        for finding in file.findings
    )
    return Table("Findings", _COLUMNS, rows)


PAGE = "docs/traps.md"
"""Where each code has its section, in memcalc's own documents."""
_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_VERDICT = "MC100"
"""The code of the verdict itself."""


def github(result: Check) -> str:
    """Return workflow commands, one a line (docs.github.com, Workflow commands for GitHub Actions)."""
    lines = [
        _command(_LEVELS[finding.severity], file, finding.line, finding.code, _remark(finding))
        for file in result.files
        for finding in file.findings
    ]
    level = {"does-not-fit": "error", "tight": "warning", "fits": "notice"}[result.verdict]
    lines.append(_command(level, result.files[0], 1, _VERDICT, result.summary))
    return "\n".join(lines) + "\n"


def _command(level: str, file: CheckedFile, line: int, title: str, message: str) -> str:
    return f"::{level} file={_property(file.path)},line={line},title={title}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _remark(finding: CheckFinding) -> str:
    return f"{finding.message} → {finding.suggestion}" if finding.suggestion else finding.message


def sarif(result: Check) -> str:
    """Return a SARIF 2.1.0 log (OASIS, sarif-v2.1.0-os)."""
    match = [(file, finding) for file in result.files for finding in file.findings]
    codes = sorted({_VERDICT, *(finding.code for _, finding in match)})
    results = [_result(file, item.code, item.severity, item.line, _remark(item)) for file, item in match]
    level = {"does-not-fit": "error", "tight": "warning", "fits": "note"}[result.verdict]
    results.append(_result(result.files[0], _VERDICT, level, 1, result.summary))
    driver = {
        "name": "memcalc",
        "version": result.version,
        "rules": [{"id": code, "help": {"text": f"memcalc, {PAGE}#{code.lower()}"}} for code in codes],
    }
    log = {
        "$schema": "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }
    return json.dumps(log, indent=2) + "\n"


def _result(file: CheckedFile, code: str, level: str, line: int, message: str) -> dict[str, Any]:
    index = {"artifactLocation": {"uri": file.path}, "region": {"startLine": line}}
    return {"ruleId": code, "level": level, "message": {"text": message}, "locations": [{"physicalLocation": index}]}


MACHINES = {"github": github, "sarif": sarif}
"""Formats that only a check has."""


# ---------------------------------------------------------------------------------------------------- a folder of files


_OUTCOMES = ("read", "asked", "declined", "no-training", "unknown-format", "refused")
_BY_FOLDER = header("folder | files > | " + " | ".join(f"{name} >" for name in _OUTCOMES))
_BY_FILE = header("file | kind | outcome | reason")


def survey_report(result: Survey) -> Report:
    """Return the answer of ``memcalc check --survey``."""
    total = len(result.files)
    counted = ", ".join(f"{result.counts[name]} {name}" for name in _OUTCOMES if name in result.counts)
    data = Table("Files", _BY_FILE, tuple((f.path, f.kind, f.outcome, f.reason) for f in result.files))
    others = tuple((f.path, f.outcome, f.reason) for f in result.files if f.outcome not in {"read", "no-training"})
    return made(
        result,
        data,
        Line(f"{total} files below {result.folder}: {counted or 'none'}", "verdict"),
        Table("By folder", _BY_FOLDER, tuple(_by_folder(result))),
        Table("Not read", header("file | outcome | reason"), others),
    )


def _by_folder(result: Survey) -> list[tuple[str, ...]]:
    folders: dict[str, Counter[str]] = {}
    for file in result.files:
        folders.setdefault(PurePosixPath(file.path).parts[0] if "/" in file.path else ".", Counter())[file.outcome] += 1
    return [
        (folder, str(counts.total()), *(str(counts[name] or "") for name in _OUTCOMES))
        for folder, counts in sorted(folders.items())
    ]
