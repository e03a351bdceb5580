"""What the commands of a shell script do to its variables and files, and which of them run."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from memcalc.convert.shell_values import State, Status, Token, condition, doubtful, status_of
from memcalc.convert.shell_words import ASSIGNED, DEEPEST, NAME, Lexer
from memcalc.errors import FileError

DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ASKING = frozenset({"grep", "command", "which", "type", "read", "ping", "diff", "cmp", "pgrep", "hash", "nc"})
"""Commands that a script runs to learn something."""
_NOT: dict[Status, Status] = {"yes": "no", "no": "yes"}
_ENDINGS: dict[str, Status] = {"true": "yes", ":": "yes", "false": "no", "getopts": "no"}
_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
_TERMINALS = frozenset({"tmux", "screen"})


@dataclass(frozen=True)
class Command:
    """The words of one command, and the variables that are set for it alone."""

    tokens: tuple[Token, ...]
    variables: Mapping[str, Token] = field(default_factory=dict)
    begin: int = 0


@dataclass(frozen=True)
class Written:
    """A file that the script itself writes, by a here-document or an `echo`."""

    name: str
    text: Token


@dataclass
class Simple:
    """A simple command while it is read."""

    tokens: list[Token] = field(default_factory=list)
    begin: int = -1
    """Where it stands in the script."""
    target: Token | None = None
    heredoc: Token | None = None
    negated: bool = False


@dataclass
class Effects:
    """What the commands of a script came to, those in functions and inner shells too."""

    state: State
    flow: Flow
    read: Callable[[Lexer, int | None], None]
    """Reads an inner text."""
    commands: list[Command] = field(default_factory=list)
    comments: list[tuple[int, str]] = field(default_factory=list)
    files: list[Written] = field(default_factory=list)
    functions: dict[str, tuple[Lexer, int, int]] = field(default_factory=dict)
    """The text that each is in, and where its body begins and ends."""
    depth: int = 0

    def end(self, simple: Simple) -> Status:
        """Do what a command does that has been read to its end, and return how it ends."""
        tokens = simple.tokens
        settings: dict[str, Token] = {}
        while tokens and (match := ASSIGNED.match(tokens[0].text)):
            settings[match[1]] = self._after(tokens[0], match.end())
            tokens = tokens[1:]
        if not tokens or tokens[0].text in DECLARING:
            for token in tokens[1:]:
                if match := ASSIGNED.match(token.text):
                    settings[match[1]] = self._after(token, match.end())
            for name, value in settings.items():
                self.flow.assign(name, value)
            return "likely"
        status = self._called(tokens, settings, simple)
        return _NOT.get(status, status) if simple.negated else status

    def _after(self, token: Token, at: int) -> Token:
        return self.state.part(token.text[at:], token.positions[at:])

    def _called(self, tokens: list[Token], settings: dict[str, Token], simple: Simple) -> Status:
        name = tokens[0].text
        if name in ("[", "test"):
            return status_of(condition(tokens[1 : -1 if name == "[" else None]))
        if name in _ENDINGS:
            return _ENDINGS[name]
        if name in ("exit", "return"):
            self.flow.leave()
        if name == "unset":
            for token in tokens[1:]:
                self.flow.assign(token.text, None)
        elif [token.text for token in tokens[:2]] == ["set", "--"]:
            self.state.arguments = tuple(tokens[2:])
        elif name == "eval":
            self._inner(_joined(tokens[1:]), ())
        elif name in self.functions:
            self._function(name, tokens[1:])
        elif (
            name in _SHELLS | {"sbatch"} and simple.heredoc and all(token.text.startswith("-") for token in tokens[1:])
        ):
            self._inner(simple.heredoc, ())
        elif name == "read" and simple.heredoc and NAME.fullmatch(tokens[-1].text):
            self.flow.assign(tokens[-1].text, simple.heredoc)
        elif not self._shell(tokens) and not self._writes(tokens, simple):
            plain = {key: value.plain for key, value in settings.items()}
            self.commands.append(Command(tuple(token.plain for token in tokens), plain, simple.begin))
        return "maybe" if name in _ASKING else "likely"

    def _writes(self, tokens: list[Token], simple: Simple) -> bool:
        """Keep the file that `cat <<EOF > FILE`, `tee FILE <<EOF` or `echo … > FILE` writes."""
        name, target, text = tokens[0].text, simple.target, simple.heredoc
        if name == "tee" and len(tokens) > 1:
            target = tokens[-1]
        elif name == "echo":
            text = _joined([token for token in tokens[1:] if token.text not in ("-e", "-n")])
        elif name != "cat":
            return False
        if target is None or text is None:
            return False
        self.files.append(Written(target.plain.text, text))
        return True

    def _shell(self, tokens: list[Token]) -> bool:
        """Read what `bash -c TEXT`, `tmux new -d TEXT` and `bash <<EOF` run, after whatever starts the shell."""
        typed = [token for token in tokens if " " in token.text]
        if typed and tokens[0].text in _TERMINALS:
            return self._inner(typed[-1], ())
        for at, token in enumerate(tokens[:64]):
            if token.text.rpartition("/")[2] in _SHELLS:
                for after in range(at + 1, len(tokens)):
                    if not tokens[after].text.startswith("-"):
                        return False
                    if tokens[after].text[1:2] != "-" and "c" in tokens[after].text and after + 1 < len(tokens):
                        return self._inner(tokens[after + 1], tokens[:at])
        return False

    def _inner(self, text: Token, prefix: Sequence[Token]) -> bool:
        """Read the text of an inner shell; its commands keep what started it."""
        begin = len(self.commands)
        self._nested(Lexer(text.text, self.state, text.positions or (-1,) * len(text.text)), None)
        lead = [token.plain for token in prefix]
        for at, command in enumerate(self.commands[begin:], begin):
            self.commands[at] = replace(command, tokens=(*lead, *command.tokens))
        return True

    def _function(self, name: str, arguments: Sequence[Token]) -> None:
        """Read a function's body where it is called."""
        lexer, begin, end = self.functions[name]
        body = Lexer(lexer.text[:end], self.state, lexer.origin)
        body.at = begin
        before, self.state.arguments = self.state.arguments, tuple(arguments)
        self._nested(body, end)
        self.state.arguments = before

    def _nested(self, lexer: Lexer, end: int | None) -> None:
        if self.depth < DEEPEST:
            self.depth += 1
            waiting, frames = self.flow.waiting, len(self.flow.frames)
            self.read(lexer, end)
            while len(self.flow.frames) > frames:
                self.flow.close(self.flow.frames[-1].kind)
            self.flow.waiting = waiting
            self.depth -= 1


def _joined(tokens: Sequence[Token]) -> Token:
    """Words with blanks between, as `eval` and `echo` join them."""
    text, positions = "", list[int]()
    for token in tokens:
        lead = " " if text else ""
        text += lead + token.text
        positions += (-1,) * len(lead) + (token.positions or (-1,) * len(token.text))
    return Token(text, tuple(positions), next((token.unknown for token in tokens if token.unknown), ""))


MOST_NESTED = 64
"""Conditions within conditions."""
_OPENS = {"fi": "if", "done": "loop", "esac": "case", "}": "{", ")": "("}


class Run(IntEnum):
    """Whether a command runs."""

    OFF = 0
    MAYBE = 1
    ON = 2


_RUNS = {"yes": Run.ON, "no": Run.OFF, "maybe": Run.MAYBE, "likely": Run.MAYBE}
_Key = tuple[bool, str]
"""Whether it is an array, and its name."""
_Variable = Token | tuple[Token, ...] | None


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
    subject: Token | None = None
    patterns: bool = False
    """Whether the next words are the patterns of a case."""
    body: bool = False
    """Whether a branch is read, and not the condition before it."""
    left: bool = False
    """Whether the branch ends the script: what it sets counts for nothing."""
    before: dict[_Key, _Variable] = field(default_factory=dict)
    outcomes: list[dict[_Key, _Variable]] = field(default_factory=list)
    old: dict[_Key, _Variable] = field(default_factory=dict)

    @property
    def reversible(self) -> bool:
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

    def go_on(self, operator: str, status: Status) -> None:
        """Go on after && or ||: a command that the job needs is taken to succeed."""
        ended = _RUNS["yes" if status == "likely" else status]
        self.waiting = ended if operator == "&&" else Run(Run.ON - ended)

    def end_list(self) -> None:
        """Begin a new list."""
        self.waiting = Run.ON

    def open(self, kind: str, subject: Token | None = None) -> None:
        """Open a frame."""
        if len(self.frames) >= MOST_NESTED:
            raise FileError("file", self.state.name, f"must nest at most {MOST_NESTED} conditions")
        run, body = self.run, kind == "("
        self.frames.append(_Frame(kind, run, run, self.waiting, subject=subject, patterns=kind == "case", body=body))
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

    def keyword(self, keyword: str, status: Status, negated: bool = False) -> None:
        """Take a word of the grammar; `status` is how the command before it ended."""
        if keyword in ("if", "while", "until", "{"):
            self.open({"while": "loop", "until": "loop"}.get(keyword, keyword))
            self.frames[-1].until = (keyword == "until") != negated
        elif keyword in _OPENS:
            self.close(_OPENS[keyword])
        elif self.frames and self.frames[-1].kind in ("if", "loop"):
            frame = self.frames[-1]
            if keyword in ("then", "do"):
                self._branch(_RUNS[_NOT.get(status, status) if frame.until else status])
            elif keyword in ("else", "elif"):
                self._end_branch()
                frame.run = min(frame.outer, Run(Run.ON - frame.taken))
                if keyword == "else":
                    self._branch(Run.ON)
        if keyword in ("then", "do", "else", "elif"):
            self.end_list()

    def in_pattern(self) -> bool:
        """Whether the patterns of a case are read."""
        return bool(self.frames) and self.frames[-1].patterns

    def pattern(self, tokens: Sequence[Token]) -> bool:
        """Take the patterns of a branch of a case, if that is where we are."""
        if not self.in_pattern():
            return False
        frame = self.frames[-1]
        frame.patterns = False
        subject = frame.subject or self.state.missing("case")
        texts = [token.text for token in tokens if token.text != "|"]
        if "*" in texts:
            self._branch(Run.ON)
        elif (subject.unknown and not subject.no_argument) or any(t.unknown or len(t.text) > 64 for t in tokens):
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
        if frame.reversible and frame.body:
            if not frame.left:
                frame.outcomes.append({key: self._get(key) for key in frame.before})
            for key, value in frame.before.items():
                frame.old.setdefault(key, value)
                self._put(key, value)
        frame.before, frame.left, frame.body, frame.run = {}, False, False, Run.OFF

    def leave(self) -> None:
        """Take `exit` or `return`."""
        if self.frames and self.frames[-1].reversible and self.waiting == Run.ON:
            self.frames[-1].left = True

    def assign(self, name: str, value: Token | tuple[Token, ...] | None) -> None:
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
            self._put((False, name), value[0] if value else Token(""))

    def _record(self, key: _Key) -> None:
        for frame in self.frames:
            if frame.reversible:
                frame.before.setdefault(key, self._get(key))

    def _get(self, key: _Key) -> _Variable:
        return self.state.arrays.get(key[1]) if key[0] else self.state.scalars.get(key[1])

    def _merged(self, name: str, values: Sequence[_Variable]) -> _Variable:
        """What a variable is where a run decides between values: the words that differ are doubtful."""
        if all(_same(values[0], value) for value in values):
            return values[0]
        if not any(isinstance(value, tuple) for value in values):
            return self.state.missing(name)
        return _in_common(name, [value if isinstance(value, tuple) else () for value in values])

    def _put(self, key: _Key, value: _Variable) -> None:
        if isinstance(value, tuple):
            self.state.arrays[key[1]] = value
        elif isinstance(value, Token):
            self.state.scalars[key[1]] = value
        else:
            (self.state.arrays if key[0] else self.state.scalars).pop(key[1], None)


def _in_common(name: str, lists: Sequence[tuple[Token, ...]]) -> tuple[Token, ...]:
    """What lists have in common, then the rest of each, doubtful."""
    common = 0
    while all(len(tokens) > common and _same(lists[0][common], tokens[common]) for tokens in lists):
        common += 1
    rest: dict[tuple[str, tuple[int, ...]], Token] = {}
    for items in lists:
        rest |= {(token.text, token.positions): doubtful(token, name) for token in items[common:]}
    return (*lists[0][:common], *rest.values())


def _same(first: _Variable, other: _Variable) -> bool:
    if isinstance(first, Token) and isinstance(other, Token):
        return first.text == other.text and first.unknown == other.unknown
    if isinstance(first, tuple) and isinstance(other, tuple):
        return len(first) == len(other) and all(map(_same, first, other))
    return first is None and other is None
