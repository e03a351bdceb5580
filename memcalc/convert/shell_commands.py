"""What the simple commands of a shell script do: variables, files that they write, functions and inner shells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from memcalc.convert.shell_flow import Flow
from memcalc.convert.shell_sums import held
from memcalc.convert.shell_values import State, Word
from memcalc.convert.shell_words import ASSIGNED, DEEPEST, NAME, Lexer

__all__ = ["DECLARING", "Command", "Effects", "Simple", "Status", "Written", "status_of"]

Status = Literal["yes", "no", "maybe", "likely"]
"""How a command ends: `likely` for those that succeed if the job is to run at all."""
DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ASKING = frozenset({"grep", "command", "which", "type", "read", "ping", "diff", "cmp", "pgrep", "hash", "nc"})
"""Commands that a script runs to learn something."""
_ENDINGS: dict[str, Status] = {"true": "yes", ":": "yes", "false": "no", "getopts": "no"}
_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
_HEREDOC_SHELLS = _SHELLS | {"sbatch"}


@dataclass(frozen=True)
class Command:
    """The words of one command, and the variables that are set for it alone."""

    words: tuple[Word, ...]
    settings: Mapping[str, Word] = field(default_factory=dict)
    begin: int = 0


@dataclass(frozen=True)
class Written:
    """A file that the script itself writes, by a here-document or an `echo`."""

    name: str
    text: Word


@dataclass
class Simple:
    """A simple command while it is read."""

    words: list[Word] = field(default_factory=list)
    begin: int = -1
    """Where it stands in the script."""
    target: Word | None = None
    heredoc: Word | None = None
    negated: bool = False


def status_of(holds: bool | None) -> Status:
    """How a test ends."""
    return "maybe" if holds is None else "yes" if holds else "no"


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
        words = simple.words
        settings: dict[str, Word] = {}
        while words and (match := ASSIGNED.match(words[0].text)):
            settings[match[1]] = self._after(words[0], match.end())
            words = words[1:]
        if not words or words[0].text in DECLARING:
            for word in words[1:]:
                if match := ASSIGNED.match(word.text):
                    settings[match[1]] = self._after(word, match.end())
            for name, value in settings.items():
                self.flow.assign(name, value)
            return "likely"
        status = self._called(words, settings, simple)
        if simple.negated and status in ("yes", "no"):
            return "no" if status == "yes" else "yes"
        return status

    def _after(self, word: Word, at: int) -> Word:
        return self.state.part(word.text[at:], word.places[at:])

    def _called(self, words: list[Word], settings: dict[str, Word], simple: Simple) -> Status:
        name = words[0].text
        if name in ("[", "test"):
            return status_of(held(words[1 : -1 if name == "[" else None]))
        if name in _ENDINGS:
            return _ENDINGS[name]
        if name in ("exit", "return"):
            self.flow.leave()
        if name == "unset":
            for word in words[1:]:
                self.flow.assign(word.text, None)
        elif name == "eval":
            self._inner(_joined(words[1:]), ())
        elif name in self.functions:
            self._function(name, words[1:])
        elif name in _HEREDOC_SHELLS and simple.heredoc and all(word.text.startswith("-") for word in words[1:]):
            self._inner(simple.heredoc, ())
        elif name == "read" and simple.heredoc and NAME.fullmatch(words[-1].text):
            self.flow.assign(words[-1].text, simple.heredoc)
        elif not self._shell(words) and not self._writes(words, simple):
            plain = {key: value.plain for key, value in settings.items()}
            self.commands.append(Command(tuple(word.plain for word in words), plain, simple.begin))
        return "maybe" if name in _ASKING else "likely"

    def _writes(self, words: list[Word], simple: Simple) -> bool:
        """Keep the file that `cat <<EOF > FILE`, `tee FILE <<EOF` or `echo … > FILE` writes."""
        name, target, text = words[0].text, simple.target, simple.heredoc
        if name == "tee" and len(words) > 1:
            target = words[-1]
        elif name == "echo":
            text = _joined([word for word in words[1:] if word.text not in ("-e", "-n")])
        elif name != "cat":
            return False
        if target is None or text is None:
            return False
        self.files.append(Written(target.plain.text, text))
        return True

    def _shell(self, words: list[Word]) -> bool:
        """Read what `bash -c TEXT` and `bash <<EOF` run, after whatever starts the shell."""
        for at, word in enumerate(words[:64]):
            if word.text.rpartition("/")[2] in _SHELLS:
                for after in range(at + 1, len(words)):
                    if not words[after].text.startswith("-"):
                        return False
                    if words[after].text[1:2] != "-" and "c" in words[after].text and after + 1 < len(words):
                        return self._inner(words[after + 1], words[:at])
        return False

    def _inner(self, text: Word, prefix: Sequence[Word]) -> bool:
        """Read the text of an inner shell; its commands keep what started it."""
        begin = len(self.commands)
        self._nested(Lexer(text.text, self.state, text.places or (-1,) * len(text.text)), None)
        for at in range(begin, len(self.commands)):
            command = self.commands[at]
            words = (*(word.plain for word in prefix), *command.words)
            self.commands[at] = replace(command, words=words)
        return True

    def _function(self, name: str, arguments: Sequence[Word]) -> None:
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


def _joined(words: Sequence[Word]) -> Word:
    """Words with blanks between, as `eval` and `echo` join them."""
    text, places = "", list[int]()
    for word in words:
        lead = " " if text else ""
        text += lead + word.text
        places += [*((-1,) * len(lead)), *(word.places or (-1,) * len(word.text))]
    return Word(text, tuple(places), next((word.unknown for word in words if word.unknown), ""))
