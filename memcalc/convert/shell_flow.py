"""Which commands of a shell script run: conditions, cases, loops, and what is left of variables where a run decides."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from memcalc.convert.shell_values import State, Word, doubtful
from memcalc.errors import FileError

__all__ = ["Flow", "Run"]

DEEPEST = 64
"""Conditions within conditions."""
_OPENS = {"fi": "if", "done": "loop", "esac": "case", "}": "{", ")": "("}


class Run(IntEnum):
    """Whether a command runs."""

    OFF = 0
    MAYBE = 1
    ON = 2


_RUNS = {"yes": Run.ON, "no": Run.OFF, "maybe": Run.MAYBE, "likely": Run.MAYBE}
_NOT = {"yes": "no", "no": "yes"}
_Key = tuple[bool, str]
"""Whether it is an array, and its name."""
_Kept = Word | tuple[Word, ...] | None


@dataclass
class _Frame:
    """One open condition, case, loop, group or subshell."""

    kind: str
    outer: Run
    run: Run
    waiting: Run
    """That of the list in which it stands."""
    taken: Run = Run.OFF
    """Whether an earlier branch was."""
    until: bool = False
    subject: Word | None = None
    patterns: bool = False
    """Whether the next words are the patterns of a case."""
    body: bool = False
    """Whether a branch is read, and not the condition before it."""
    left: bool = False
    """Whether the branch ends the script, so that what it sets counts for nothing."""
    before: dict[_Key, _Kept] = field(default_factory=dict)
    outcomes: list[dict[_Key, _Kept]] = field(default_factory=list)
    old: dict[_Key, _Kept] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether what it sets may have to be taken back."""
        return self.kind == "(" or self.run == Run.MAYBE


class Flow:
    """The frames that are open, and the variables as they are set within them."""

    def __init__(self, state: State, base: Run = Run.ON) -> None:
        self.state, self.base = state, base
        self.frames: list[_Frame] = []
        self.waiting = Run.ON
        """Whether the next command of a list with && and || runs."""

    @property
    def run(self) -> Run:
        """Whether a command here runs."""
        return min(self.frames[-1].run if self.frames else self.base, self.waiting)

    # ----------------------------------------------------------------------------------------------------- lists

    def go_on(self, operator: str, status: str) -> None:
        """Go on after && or ||: a command that the job needs is taken to succeed."""
        ended = _RUNS["yes" if status == "likely" else status]
        self.waiting = ended if operator == "&&" else Run(Run.ON - ended)

    def end_list(self) -> None:
        """Begin a new list."""
        self.waiting = Run.ON

    # --------------------------------------------------------------------------------------------- compound commands

    def open(self, kind: str, subject: Word | None = None) -> None:
        """Open a frame."""
        if len(self.frames) >= DEEPEST:
            raise FileError("file", self.state.name, f"must nest at most {DEEPEST} conditions")
        frame = _Frame(kind, self.run, self.run, self.waiting, subject=subject, patterns=kind == "case")
        frame.body = kind == "("
        self.frames.append(frame)
        self.waiting = Run.ON

    def close(self, kind: str) -> None:
        """Close the frame, and join what its branches did."""
        if not self.frames or self.frames[-1].kind != kind:
            return
        self._end_branch()
        frame = self.frames.pop()
        self.waiting = frame.waiting
        if kind == "(":
            return
        for key, old in frame.old.items():
            values = [outcome.get(key, old) for outcome in frame.outcomes]
            values += [] if frame.taken == Run.ON else [old]
            if values:
                self._put(key, self._merged(key[1], values))

    def keyword(self, word: str, status: str, negated: bool = False) -> None:
        """Take a word of the grammar; `status` is how the command before it ended."""
        if word in ("if", "while", "until", "{"):
            self.open({"while": "loop", "until": "loop"}.get(word, word))
            self.frames[-1].until = (word == "until") != negated
        elif word in _OPENS:
            self.close(_OPENS[word])
        elif self.frames and self.frames[-1].kind in ("if", "loop"):
            frame = self.frames[-1]
            if word in ("then", "do"):
                self._branch(_RUNS[_NOT.get(status, status) if frame.until else status])
            elif word in ("else", "elif"):
                self._end_branch()
                frame.run = min(frame.outer, Run(Run.ON - frame.taken))
                if word == "else":
                    self._branch(Run.ON)
        self.end_list() if word in ("then", "do", "else", "elif") else None

    def in_pattern(self) -> bool:
        """Whether the patterns of a case are read."""
        return bool(self.frames) and self.frames[-1].patterns

    def pattern(self, words: Sequence[Word]) -> bool:
        """Take the patterns of a branch of a case, if that is where we are."""
        if not self.in_pattern():
            return False
        frame = self.frames[-1]
        frame.patterns = False
        subject = frame.subject or self.state.missing("case")
        texts = [word.text for word in words if word.text != "|"]
        if "*" in texts:
            self._branch(Run.ON)
        elif (subject.unknown and not subject.no_argument) or any(
            word.unknown or len(word.text) > 64 for word in words
        ):
            self._branch(Run.MAYBE)
        else:
            self._branch(Run.ON if any(fnmatch.fnmatchcase(subject.plain.text, text) for text in texts) else Run.OFF)
        return True

    def next_case(self) -> None:
        """End a branch of a case."""
        self.end_list()
        if self.frames and self.frames[-1].kind == "case":
            self._end_branch()
            self.frames[-1].patterns = True

    def _branch(self, holds: Run) -> None:
        """Begin a branch, which is taken if its condition holds and no earlier one was."""
        frame = self.frames[-1]
        frame.before, frame.body = {}, True
        frame.run = min(frame.outer, holds, Run(Run.ON - frame.taken))
        frame.taken = max(frame.taken, holds) if frame.kind != "loop" else holds

    def _end_branch(self) -> None:
        frame = self.frames[-1]
        if frame.kept and frame.body:
            if not frame.left:
                frame.outcomes.append({key: self._get(key) for key in frame.before})
            for key, value in frame.before.items():
                frame.old.setdefault(key, value)
                self._put(key, value)
        frame.before, frame.left, frame.body = {}, False, False
        frame.run = Run.OFF

    def leave(self) -> None:
        """Take `exit` or `return`."""
        if self.frames and self.frames[-1].kept and self.waiting == Run.ON:
            self.frames[-1].left = True

    # ------------------------------------------------------------------------------------------------- variables

    def assign(self, name: str, value: Word | tuple[Word, ...] | None) -> None:
        """Set a variable or an array as the commands around say; None takes it away."""
        if self.run == Run.OFF:
            return
        key = (isinstance(value, tuple), name)
        if self.waiting == Run.MAYBE:
            value = self._merged(name, [self._get(key), value])
        self._record(key)
        self._put(key, value)
        if isinstance(value, tuple):
            self._record((False, name))
            self._put((False, name), value[0] if value else Word(""))

    def _record(self, key: _Key) -> None:
        for frame in self.frames:
            if frame.kept:
                frame.before.setdefault(key, self._get(key))

    def _get(self, key: _Key) -> _Kept:
        return self.state.arrays.get(key[1]) if key[0] else self.state.scalars.get(key[1])

    def _merged(self, name: str, values: Sequence[_Kept]) -> _Kept:
        """What a variable is where a run decides between values: the words that differ are doubtful."""
        if all(_same(values[0], value) for value in values):
            return values[0]
        if not any(isinstance(value, tuple) for value in values):
            return self.state.missing(name)
        return _joined(name, [value if isinstance(value, tuple) else () for value in values])

    def _put(self, key: _Key, value: _Kept) -> None:
        if isinstance(value, tuple):
            self.state.arrays[key[1]] = value
        elif isinstance(value, Word):
            self.state.scalars[key[1]] = value
        else:
            (self.state.arrays if key[0] else self.state.scalars).pop(key[1], None)


def _joined(name: str, lists: Sequence[tuple[Word, ...]]) -> tuple[Word, ...]:
    """What lists have in common, then the rest of each, doubtful."""
    common = 0
    while all(len(one) > common and _same(lists[0][common], one[common]) for one in lists):
        common += 1
    rest: dict[tuple[str, tuple[int, ...]], Word] = {}
    for one in lists:
        rest |= {(word.text, word.places): doubtful(word, name) for word in one[common:]}
    return (*lists[0][:common], *rest.values())


def _same(first: _Kept, other: _Kept) -> bool:
    if isinstance(first, Word) and isinstance(other, Word):
        return first.text == other.text and first.unknown == other.unknown
    if isinstance(first, tuple) and isinstance(other, tuple):
        return len(first) == len(other) and all(map(_same, first, other))
    return first is None and other is None
