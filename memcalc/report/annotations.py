"""A pre-flight for machines that show findings beside the lines of a file: GitHub's workflow commands, and SARIF."""

from __future__ import annotations

import json
from typing import Any

from memcalc.results import Check, CheckedFile, CheckFinding

__all__ = ["MACHINES", "github", "sarif"]

PAGE = "docs/traps.md"
"""Where each code has its section, in memcalc's own documents."""
_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
_VERDICT = "MC100"
"""The code of the verdict itself."""


def github(result: Check) -> str:
    """Return workflow commands, one a line (docs.github.com, Workflow commands for GitHub Actions)."""
    lines = [
        _command(_LEVELS[finding.severity], file, finding.line, finding.code, _said(finding))
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


def _said(finding: CheckFinding) -> str:
    return f"{finding.message} → {finding.suggestion}" if finding.suggestion else finding.message


def sarif(result: Check) -> str:
    """Return a SARIF 2.1.0 log (OASIS, sarif-v2.1.0-os)."""
    found = [(file, finding) for file in result.files for finding in file.findings]
    codes = sorted({_VERDICT, *(finding.code for _, finding in found)})
    results = [_result(file, one.code, one.severity, one.line, _said(one)) for file, one in found]
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
    place = {"artifactLocation": {"uri": file.path}, "region": {"startLine": line}}
    return {
        "ruleId": code,
        "level": level,
        "message": {"text": message},
        "locations": [{"physicalLocation": place}],
    }


MACHINES = {"github": github, "sarif": sarif}
"""Formats that only a check has."""
