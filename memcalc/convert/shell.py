"""A shell script as the commands that it would run: read, and never executed.

Its grammar is that of POSIX.1-2017 (chapter 2, Shell Command Language) and of bash: lists, conditions, cases, loops,
functions, here-documents, and `bash -c`. A condition that the script itself decides has its way; where only a run can
tell, both branches are read, and a variable that they set differently is unknown after them. The script is taken to be
called without arguments, and variables that it does not set to be empty where it gives a default for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from memcalc.convert.shell_flow import Flow, Run
from memcalc.convert.shell_sums import held, summed
from memcalc.convert.shell_words import ASSIGNED, DEEPEST, MARK, NAME, Lexer, State, Value, Word, closing

__all__ = ["Command", "Script", "Word", "Written", "read_script"]

Status = Literal["yes", "no", "maybe", "likely"]
"""How a command ends: `likely` for those that succeed if the job is to run at all."""
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ASKING = frozenset({"grep", "command", "which", "type", "read", "ping", "diff", "cmp", "pgrep", "hash", "nc"})
"""Commands that a script runs to learn something."""
_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", "((", "|", "&", ";", "(", ")")
_SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})
_REDIRECTED = re.compile(r"(?:\d+|\{[A-Za-z_]\w*\})?(<<<|<<-?|<>|<&|<|&>>?|>>|>&|>\||>)")


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


@dataclass(frozen=True)
class Script:
    """The commands of a script in the order of its text, its comment lines, and the last value of each variable."""

    commands: tuple[Command, ...]
    comments: tuple[tuple[int, str], ...]
    """Those that fill a line: place of the #, and the line."""
    variables: Mapping[str, Word]
    files: tuple[Written, ...] = ()


def read_script(text: str, known: Mapping[str, str | None] | None = None, name: str = "script") -> Script:
    """Read a script; `known` are variables that the queue sets, None those whose value only the job will know.

    Raises :class:`memcalc.errors.FileError` for one that comes to more words than any job has.
    """
    state = State(name)
    for key, value in (known or {}).items():
        state.scalars[key] = state.missing(key) if value is None else Word(value)
    reader = _Reader(Lexer(text.replace(MARK, "?"), state), _Found())
    reader.read()
    found = reader.found
    variables = {key: value.plain for key, value in state.scalars.items()}
    return Script(tuple(found.commands), tuple(found.comments), variables, tuple(found.files))


@dataclass
class _Found:
    """What has been read, in functions and inner scripts too."""

    commands: list[Command] = field(default_factory=list)
    comments: list[tuple[int, str]] = field(default_factory=list)
    files: list[Written] = field(default_factory=list)
    functions: dict[str, tuple[Lexer, int, int]] = field(default_factory=dict)
    """The text that each is in, and where its body begins and ends."""
    depth: int = 0


@dataclass
class _Simple:
    """A simple command while it is read."""

    words: list[Word] = field(default_factory=list)
    begin: int = -1
    target: Word | None = None
    heredoc: Word | None = None
    negated: bool = False


class _Reader:
    """Walks through one text, keeping what its commands do to the variables."""

    def __init__(self, lexer: Lexer, found: _Found, flow: Flow | None = None) -> None:
        self.lexer, self.found, self.state = lexer, found, lexer.state
        self.flow = flow or Flow(self.state)
        self.simple = _Simple()
        self.status: Status = "likely"
        self.heredocs: list[tuple[str, bool, bool, _Simple]] = []
        self.function = ""
        """The name of the function whose body comes next."""

    def read(self, end: int | None = None) -> None:
        """Read all commands, or those that begin before `end`."""
        end = len(self.lexer.text) if end is None else end
        while self.lexer.at < end:
            self.step()
        self._finish()

    def step(self) -> None:
        """Read one token."""
        if self._blank():
            if not self.flow.in_pattern():
                self._finish()
                self.flow.end_list()
        elif self.lexer.at >= len(self.lexer.text):
            return
        elif operator := self._operator():
            self._operate(operator)
        elif match := _REDIRECTED.match(self.lexer.text, self.lexer.at):
            self._redirect(match)
        else:
            self._word()

    # ---------------------------------------------------------------------------------------------------- tokens

    def _blank(self) -> bool:
        """Pass blanks, comments and continued lines; say whether a line ended."""
        lexer, text, ended = self.lexer, self.lexer.text, False
        while lexer.at < len(text) and not ended:
            if text[lexer.at] in " \t\r":
                lexer.at += 1
            elif text.startswith(("\\\n", "\\\r\n"), lexer.at):
                lexer.at = text.index("\n", lexer.at) + 1
            elif text[lexer.at] == "#":
                self._comment()
            elif text[lexer.at] == "\n":
                lexer.at, ended = lexer.at + 1, True
                self._take_heredocs()
            else:
                break
        return ended

    def _comment(self) -> None:
        text, begin = self.lexer.text, self.lexer.at
        end = text.find("\n", begin)
        self.lexer.at = len(text) if end < 0 else end
        if self.lexer.origin is None and not text[text.rfind("\n", 0, begin) + 1 : begin].strip():
            self.found.comments.append((begin, text[begin : self.lexer.at].rstrip()))

    def _operator(self) -> str:
        for operator in _OPERATORS:
            if self.lexer.text.startswith(operator, self.lexer.at):
                if operator == "((" and self.simple.words:
                    continue
                if operator == "&" and self.lexer.text.startswith("&>", self.lexer.at):
                    return ""
                self.lexer.at += len(operator)
                return operator
        return ""

    def _operate(self, operator: str) -> None:
        if operator == "((":
            self._arithmetic()
        elif operator == "(":
            self._opened()
        elif operator == ")":
            if not self.flow.pattern(self.simple.words):
                self._finish()
                self.flow.close("(")
            self.simple = _Simple()
        elif not self.flow.in_pattern():
            self._finish()
            if operator in ("&&", "||"):
                self.flow.go_on(operator, self.status)
            elif operator in (";;", ";;&", ";&"):
                self.flow.next_case()
            elif operator in (";", "&"):
                self.flow.end_list()

    def _arithmetic(self) -> None:
        """Take `(( … ))` as a command that holds, or not."""
        begin = self.lexer.at
        self.lexer.at = closing(self.lexer.text, begin - 2)
        number = summed(self.lexer.text[begin : max(begin, self.lexer.at - 2)], self.state.scalars)
        self._tested(None if number is None else bool(number))

    def _opened(self) -> None:
        """Take `(`: a subshell, the brackets of a function's name, or an optional one before a pattern."""
        words = self.simple.words
        if len(words) == 1 and NAME.fullmatch(words[0].text.replace("-", "_")):
            self._blank()
            self.lexer.at += self.lexer.text.startswith(")", self.lexer.at)
            self.function, self.simple = words[0].text, _Simple()
        elif not self.flow.in_pattern():
            self._finish()
            self.flow.open("(")

    def _redirect(self, match: re.Match[str]) -> None:
        """Take `> file`, `2>&1`, `<<EOF`; the text of a here-document is taken at the line's end."""
        lexer, operator = self.lexer, match[1]
        lexer.at = match.end()
        while lexer.at < len(lexer.text) and lexer.text[lexer.at] in " \t":
            lexer.at += 1
        if lexer.at >= len(lexer.text) or lexer.text[lexer.at] in "\n;&|()<>":
            if lexer.text.startswith("(", lexer.at):  # <( … )
                lexer.at = closing(lexer.text, lexer.at)
            return
        begin = lexer.at
        target = lexer.value(" \t\r\n;&|()<>").word()
        if operator in ("<<", "<<-"):
            literal = any(mark in lexer.text[begin : lexer.at] for mark in "'\"\\")
            end = target.text if literal or not target.unknown else lexer.text[begin : lexer.at]
            self.heredocs.append((end, operator == "<<-", literal, self.simple))
        elif operator in (">", ">|"):
            self.simple.target = target

    def _take_heredocs(self) -> None:
        lexer, text = self.lexer, self.lexer.text
        for end, indented, literal, simple in self.heredocs:
            begin = stop = lexer.at
            while lexer.at < len(text):
                stop = lexer.at
                line_end = text.find("\n", lexer.at)
                line_end = len(text) if line_end < 0 else line_end
                line = text[lexer.at : line_end].rstrip("\r")
                lexer.at = min(line_end + 1, len(text))
                if (line.lstrip("\t") if indented else line) == end:
                    break
                stop = lexer.at
            simple.heredoc = self._body(begin, stop, literal)
        self.heredocs = []

    def _body(self, begin: int, end: int, literal: bool) -> Word:
        """The text of a here-document, its variables put in unless its end was quoted."""
        if literal:
            return Word(self.lexer.text[begin:end], tuple(self.lexer.places(begin, end)))
        value = Value(self.state)
        inner = Lexer(self.lexer.text[:end], self.state, self.lexer.origin)
        inner.at = begin
        inner.quoted_text(value, "")
        return value.word()

    # -------------------------------------------------------------------------------------------------- commands

    def _word(self) -> None:
        """Read one word of a command, which may be a word of the grammar at its begin."""
        lexer, words = self.lexer, self.simple.words
        begin = lexer.at
        self.simple.begin = begin if self.simple.begin < 0 else self.simple.begin
        open_to_values = all(ASSIGNED.match(one.text) for one in words) or words[0].text in _DECLARING
        if open_to_values and not self.flow.in_pattern() and (match := ASSIGNED.match(lexer.text, begin)):
            if lexer.text.startswith("(", match.end()):
                self._array(match)
            elif match[2] is None:
                words.append(lexer.assigned(match))
            else:  # one item of an array
                lexer.at = match.end()
                lexer.words()
            return
        if not words and not self.flow.in_pattern() and self._keyword():
            return
        if words and words[0].text == "[[" and lexer.at < len(lexer.text):
            return
        words += lexer.words()

    def _keyword(self) -> bool:
        """Take a word of the grammar, if one comes."""
        match = re.compile(r"(\[\[|[a-z]+|[{}!])(?=[\s;&|()]|$)").match(self.lexer.text, self.lexer.at)
        word = match[1] if match else ""
        if word == "[[":
            self._test()
        elif word in {"for", "select"}:
            self.lexer.at += len(word)
            self._loop()
        elif word == "case":
            self.lexer.at += len(word)
            self._case()
        elif word == "function":
            self.lexer.at += len(word)
            self._blank()
            self.function = next(iter(self.lexer.words()), Word("")).text
            rest = re.compile(r"[ \t]*\([ \t]*\)").match(self.lexer.text, self.lexer.at)
            self.lexer.at = rest.end() if rest else self.lexer.at
        elif word == "!":
            self.lexer.at += 1
            self.simple.negated = not self.simple.negated
        elif word == "{" and self.function:
            self._define()
        elif word in ("if", "elif", "then", "else", "fi", "while", "until", "do", "done", "esac", "{", "}", "time"):
            self.lexer.at += len(word)
            negated, self.simple = self.simple.negated, _Simple()
            self.flow.keyword(word, self.status, negated)
        else:
            return False
        return True

    def _test(self) -> None:
        """Read `[[ … ]]`, in which < > && || ( ) are words."""
        lexer, words = self.lexer, list[Word]()
        lexer.at += 2
        while lexer.at < len(lexer.text):
            self._blank()
            match = re.compile(r"&&|\|\||[()<>;&|]").match(lexer.text, lexer.at)
            if match:
                words.append(Word(match[0]))
                lexer.at = match.end()
                continue
            found = lexer.words() if lexer.at < len(lexer.text) else []
            if found and found[0].text == "]]":
                break
            words += found or [Word("")]
        self._tested(held(words))

    def _tested(self, holds: bool | None) -> None:
        if holds is not None and self.simple.negated:
            holds = not holds
        self.simple = _Simple()
        self.status = "maybe" if holds is None else "yes" if holds else "no"

    def _define(self) -> None:
        """Keep the body of a function for its calls."""
        lexer = self.lexer
        lexer.at += 1
        begin, name = lexer.at, self.function
        self.function = ""
        skipped = _Reader(lexer, _Found(comments=self.found.comments), Flow(self.state, Run.OFF))
        skipped.flow.keyword("{", "yes", False)
        while skipped.flow.frames and lexer.at < len(lexer.text):
            skipped.step()
        self.heredocs += skipped.heredocs
        if self.flow.run != Run.OFF:
            self.found.functions[name] = (lexer, begin, max(begin, lexer.at - 1))

    def _loop(self) -> None:
        """Read the head of a `for`: with one item its variable is that, with several only a run tells."""
        lexer = self.lexer
        self._blank()
        if lexer.text.startswith("((", lexer.at):
            begin, lexer.at = lexer.at, closing(lexer.text, lexer.at)
            names, items = NAME.findall(lexer.text[begin : lexer.at])[:1], list[Word]()
        else:
            names, items = [word.text for word in lexer.words()], self._items()
        self.flow.open("loop")
        for name in names:
            only = items[0] if len(items) == 1 else self.state.missing(name)
            if NAME.fullmatch(name):
                self.flow.assign(name, only)
        self.status, self.simple = "yes", _Simple()

    def _items(self) -> list[Word]:
        lexer, items = self.lexer, list[Word]()
        self._blank()
        if not re.compile(r"in\b").match(lexer.text, lexer.at):
            return items
        lexer.at += 2
        while not self._blank() and lexer.at < len(lexer.text) and lexer.text[lexer.at] not in ";&|()<>":
            items += lexer.words()
        return items

    def _case(self) -> None:
        lexer = self.lexer
        self._blank()
        subject = lexer.value(" \t\r\n;&|()<>").word()
        self._blank()
        lexer.at += 2 if lexer.text.startswith("in", lexer.at) else 0
        self.simple = _Simple()
        self.flow.open("case", subject)

    def _array(self, match: re.Match[str]) -> None:
        """Read `NAME=( … )`."""
        lexer, name = self.lexer, match[1]
        lexer.at = match.end() + 1
        items: list[Word] = list(self.state.arrays.get(name, ())) if match[3] else []
        while lexer.at < len(lexer.text):
            while self._blank():
                pass
            if lexer.at >= len(lexer.text) or lexer.text[lexer.at] == ")":
                break
            items += lexer.words()
        lexer.at += 1
        self.flow.assign(name, tuple(items))

    def _finish(self) -> None:
        """End a simple command, and do what it does to variables."""
        simple, self.simple = self.simple, _Simple()
        if not simple.words or self.flow.run == Run.OFF:
            return
        words = simple.words
        settings: dict[str, Word] = {}
        while words and (match := ASSIGNED.match(words[0].text)):
            settings[match[1]] = self._after(words[0], match.end())
            words = words[1:]
        if not words or words[0].text in _DECLARING:
            for word in words[1:]:
                if match := ASSIGNED.match(word.text):
                    settings[match[1]] = self._after(word, match.end())
            for name, value in settings.items():
                self.flow.assign(name, value)
            self.status = "likely"
        else:
            self._called(words, settings, simple)
        if simple.negated and self.status in ("yes", "no"):
            self.status = "no" if self.status == "yes" else "yes"

    def _after(self, word: Word, at: int) -> Word:
        return self.state.part(word.text[at:], word.places[at:])

    def _called(self, words: list[Word], settings: dict[str, Word], simple: _Simple) -> None:
        name = words[0].text
        if name in ("[", "test"):
            holds = held(words[1 : -1 if name == "[" else None])
            self.status = "maybe" if holds is None else "yes" if holds else "no"
            return
        self.status = {"true": "yes", ":": "yes", "false": "no", "getopts": "no"}.get(name, "likely")  # type: ignore[assignment]
        if name in _ASKING:
            self.status = "maybe"
        if name == "unset":
            for word in words[1:]:
                self.flow.assign(word.text, None)
        elif name == "eval":
            self._inner(_joined(words[1:]), ())
        elif name in self.found.functions:
            self._function(name, words[1:])
        elif name == "read" and simple.heredoc and NAME.fullmatch(words[-1].text):
            self.flow.assign(words[-1].text, simple.heredoc)
        elif not self._shell(words) and not self._writes(words, simple):
            begin = next(iter(self.lexer.places(simple.begin, simple.begin + 1)), 0)
            plain = {key: value.plain for key, value in settings.items()}
            self.found.commands.append(Command(tuple(word.plain for word in words), plain, max(begin, 0)))

    def _writes(self, words: list[Word], simple: _Simple) -> bool:
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
        self.found.files.append(Written(target.plain.text, text))
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
        lexer = Lexer(text.text, self.state, text.places or (-1,) * len(text.text))
        begin = len(self.found.commands)
        self._nested(_Reader(lexer, self.found, self.flow), None)
        for at in range(begin, len(self.found.commands)):
            command = self.found.commands[at]
            words = (*(word.plain for word in prefix), *command.words)
            self.found.commands[at] = Command(words, command.settings, command.begin)
        return True

    def _function(self, name: str, arguments: Sequence[Word]) -> None:
        """Read a function's body where it is called."""
        lexer, begin, end = self.found.functions[name]
        body = Lexer(lexer.text[:end], self.state, lexer.origin)
        body.at = begin
        before, self.state.arguments = self.state.arguments, tuple(arguments)
        self._nested(_Reader(body, self.found, self.flow), end)
        self.state.arguments = before

    def _nested(self, reader: _Reader, end: int | None) -> None:
        if self.found.depth < DEEPEST:
            self.found.depth += 1
            waiting, frames = self.flow.waiting, len(self.flow.frames)
            reader.read(end)
            while len(self.flow.frames) > frames:
                self.flow.close(self.flow.frames[-1].kind)
            self.flow.waiting = waiting
            self.found.depth -= 1


def _joined(words: Sequence[Word]) -> Word:
    """Words with blanks between, as `eval` and `echo` join them."""
    text, places = "", list[int]()
    for word in words:
        lead = " " if text else ""
        text += lead + word.text
        places += [*((-1,) * len(lead)), *(word.places or (-1,) * len(word.text))]
    return Word(text, tuple(places), next((word.unknown for word in words if word.unknown), ""))
