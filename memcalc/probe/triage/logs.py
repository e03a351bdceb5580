"""A log as the failures in it: messages with their figures, the rank that wrote them, and the stack above them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memcalc.probe.triage.frames import Frame
from memcalc.probe.triage.messages import HOST_FORMS, Figures, figures_of

__all__ = ["Incident", "Log", "read_log"]

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RANK = re.compile(
    r"^\s*(?:\d{4}-\d\d-\d\d[T ][\d:.,]+Z?\s+)?(?:\[(?:rank|default)?(\d+)\]:\s?"
    r"|\(\w*?(?:[Rr]ank|TP|DP|PP)[ _=]?(\d+)[^)]*\)\s|(\d+):\s)"
)
"""Prefixes of torchrun, of workers that name their rank, and of srun --label, behind a time."""
_BOX = "│| \t\v\f\xa0"
_PYTHON = re.compile(r'File "([^"]{1,400})", line (\d{1,9}), in (\S{1,200})')
_NOTEBOOK = re.compile(r"^(?:File )?(\S{1,400}\.py)(?::(\d{1,9}))?,? in (\w{1,100})\(")
_BOXED = re.compile(r"^[│|]?\s*(\S{1,400}\.py):(\d{1,9}) in (\w{1,100})")
_ARROW = re.compile(r"^\s*(?:-+>|❱)\s*(\d{1,9})\s?(.*)$")
_MARKS = re.compile(r"^[\s^~]*$")
_START = re.compile(r"Traceback \(most recent call last\)|^-{40,}$")
_STEP = re.compile(
    r"(\d{1,9})/(\d{1,9}) \[(?:\d+:)?\d+:\d+<|\b(?:step|iter|iteration|global_step)[ =:\]'\"]{1,3}(\d{1,9})\b",
    re.IGNORECASE,
)
_NEXT = re.compile(r"Traceback \(most|\b[A-Z]{3,5} out of memory|During handling of the above")
_WORDS = (
    "emory", "ALLOC_FAILED", "kill", "Kill", "KILL", "signal", "exitcode", "137", "EXHAUSTED", "Cuda fail", "OUT_OF",
    "Failed to CUDA", "ried to alloc", "shm", "exited unexpectedly",
)  # fmt: skip
_REACH = 12
"""Lines after the first that may belong to a message: terminals and mail wrap it."""
_LOOK_BACK = 600
"""Lines above a message in which its traceback stands."""
_NEAR = 40
"""Lines above a message among which its innermost frame stands: else the stack is another error's."""
_LONGEST_LINE = 8000
_MOST_READ = 5000
"""Different lines that are looked at in full."""
MOST_FAILURES = 64


@dataclass(frozen=True, slots=True)
class Incident:
    """One out of memory in a log."""

    figures: Figures
    rank: str
    line: int
    stack: tuple[Frame, ...]
    """The innermost frame first."""
    steps_before: int | None
    """The last number of a step that the log shows above it."""
    after: str = ""
    """The text of the message, for what its figures do not say."""


@dataclass(frozen=True, slots=True)
class Log:
    """What a log says of memory."""

    incidents: tuple[Incident, ...]
    expandable: bool
    """Whether it shows that ``expandable_segments:True`` was set, apart from PyTorch's own advice."""


def read_log(text: str) -> Log:
    """Return the failures of a log, each rank's first; host-memory ones only where no device ran out.

    A launcher kills the other ranks after one has failed, so that their signals say nothing while a device's message
    stands in the log.
    """
    lines = [_ANSI.sub("", line[:_LONGEST_LINE]) for line in text.replace("\r", "\n").split("\n")]
    ranks = [_rank(line) for line in lines]
    found = list(_incidents(lines, ranks))
    device = [one for one in found if one.figures.form not in HOST_FORMS]
    kept = {_key(one.rank, one.figures): one for one in device or found}
    whole = {rank for rank, _, detailed in kept if detailed}
    best = [one for (rank, _, detailed), one in kept.items() if detailed or (rank not in whole and (rank or not whole))]
    advice = re.sub(r"(?:try setting|by setting)\s+PYTORCH_\w+=expandable_segments:True", "", " ".join(text.split()))
    return Log(tuple(best[:MOST_FAILURES]), "expandable_segments:True" in advice)


def _rank(line: str) -> str:
    found = _RANK.match(line)
    return next((part for part in found.groups() if part), "") if found else ""


def _key(rank: str, figures: Figures) -> tuple[str, int | None, bool]:
    """What makes two messages the same failure: a program may go on, and report the next one."""
    return rank, figures.device, figures.tried is not None


def _incidents(lines: list[str], ranks: list[str]) -> Iterator[Incident]:
    """The first message of each failure; a stack is looked for above these alone."""
    seen = set()
    read: set[tuple[str, str]] = set()
    for at, line in enumerate(lines):
        if not _suspect(line) or (ranks[at], _plain(line)) in read:
            continue
        if len(read) > _MOST_READ:
            return
        read.add((ranks[at], _plain(line)))
        own = [_plain(one) for one in _same_rank(lines, ranks, at, at + _REACH)]
        told = _alone(" ".join(" ".join(own).split()), len(own[0]))
        figures = figures_of(told, own[0])
        if figures is None or (_key(ranks[at], figures), figures.form in HOST_FORMS) in seen:
            continue
        seen.add((_key(ranks[at], figures), figures.form in HOST_FORMS))
        yield Incident(figures, ranks[at], at + 1, _stack(lines, ranks, at), _steps(lines, at), told[:1200])


def _alone(told: str, least: int) -> str:
    """A message without the next one, or what else begins below it."""
    found = _NEXT.search(told, min(least, len(told)))
    return told[: found.start()] if found else told


def _suspect(line: str) -> bool:
    """Whether a line may begin a message: most lines are told apart without a pattern."""
    return any(word in line for word in _WORDS)


def _plain(line: str) -> str:
    return _RANK.sub("", line).strip(_BOX)


def _same_rank(lines: list[str], ranks: list[str], start: int, stop: int) -> list[str]:
    return [
        lines[at]
        for at in range(max(start, 0), min(stop, len(lines)))
        if ranks[at] == ranks[min(max(start, 0), len(lines) - 1)]
    ]


def _stack(lines: list[str], ranks: list[str], at: int) -> tuple[Frame, ...]:
    """The frames above a message, the innermost first; those below it where none is above, as some editors show it."""
    first = at
    while first > max(at - _LOOK_BACK, 0) and not (
        ranks[first] == ranks[at] and first < at and _START.search(lines[first])
    ):
        first -= 1
    above = [_RANK.sub("", lines[row]) for row in range(first, at) if ranks[row] == ranks[at]]
    frames = list(_frames(above))
    if frames and any(True for _ in _frames(above[-_NEAR:])):
        return tuple(reversed(frames))
    below = [_RANK.sub("", line) for line in _same_rank(lines, ranks, at, at + 4 * _REACH)]
    return tuple(_frames(below))


def _frames(lines: list[str]) -> Iterator[Frame]:
    for at, line in enumerate(lines):
        found = _PYTHON.search(line)
        if found is not None:
            yield Frame(found[1], int(found[2]), found[3], _code(lines, at + 1))
            continue
        found = _NOTEBOOK.match(line.strip()) or _BOXED.match(line.strip())
        if found is not None:
            number, code = _arrow(lines, at + 1)
            yield Frame(found[1], int(found[2] or number), found[3], code)


def _code(lines: list[str], at: int) -> str:
    """The source line below a frame, if it has one."""
    if at < len(lines):
        line = lines[at].strip()
        if line and not _PYTHON.search(line) and not _MARKS.match(line):
            return line[:200]
    return ""


def _arrow(lines: list[str], at: int) -> tuple[int, str]:
    """The marked line of a notebook's or a boxed traceback."""
    for line in lines[at : at + 12]:
        inner = line.strip("│| ")
        found = _ARROW.match(inner)
        if found is not None:
            return int(found[1]), found[2].strip("│ ")[:200]
        if _NOTEBOOK.match(inner) or _BOXED.match(inner):
            break
    return 0, ""


def _steps(lines: list[str], at: int) -> int | None:
    """The last number of a step above a message."""
    for line in reversed(lines[max(at - _LOOK_BACK, 0) : at]):
        found = list(_STEP.finditer(line[-400:]))
        if found and "File " not in line:
            return int(found[-1][1] or found[-1][3])
    return None
