"""A failure explained and shown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from memcalc.cli.options import given
from memcalc.cli.output import destination
from memcalc.errors import FileError

__all__ = ["show"]


def show(file: str, *, config: Sequence[str], plan: str | None, options: dict[str, Any]) -> int:
    """Explain a failure, and show the answer; return 3 where something must be recorded or told."""
    from memcalc import report, triage

    target = destination(options)
    found = triage(_standard_input() if file == "-" else file, config=config, plan=plan, **given(options))
    if file == "-":
        found = found.model_copy(update={"source": "standard input"})
    target.show(report.of_triage(found))
    return 0 if found.answered else 3


def _standard_input() -> bytes:
    from memcalc.probe.triage.source import LARGEST_LOG

    content = sys.stdin.buffer.read(LARGEST_LOG + 1)
    if len(content) > LARGEST_LOG:
        raise FileError("file", "-", f"must be at most {LARGEST_LOG >> 20} MiB on standard input")
    return content
