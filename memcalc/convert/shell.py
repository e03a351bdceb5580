"""A shell script as the commands that it would run: read, and never executed.

Its grammar is that of POSIX.1-2017 (chapter 2, Shell Command Language) and of bash: lists, conditions, cases, loops,
functions, here-documents, and `bash -c`. A condition that the script itself decides has its way; where only a run can
tell, both branches are read, and a variable that they set differently is unknown after them. The script is taken to be
called without arguments, and variables that it does not set to be empty where it gives a default for them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from memcalc.convert.shell_commands import DECLARING, Command, Effects, Flow, Run, Simple, Written
from memcalc.convert.shell_values import MARK, State, Status, Token, Value, arithmetic, condition, status_of
from memcalc.convert.shell_words import ASSIGNED, NAME, Lexer, closing

_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", "((", "|", "&", ";", "(", ")")
_REDIRECTED = re.compile(r"(?:\d+|\{[A-Za-z_]\w*\})?(<<<|<<-?|<>|<&|<|&>>?|>>|>&|>\||>)")


@dataclass(frozen=True)
class Script:
    """The commands of a script in the order of its text, its comment lines, and the last value of each variable."""

    commands: tuple[Command, ...]
    comments: tuple[tuple[int, str], ...]
    """Those that fill a line: place of the #, and the line."""
    variables: Mapping[str, Token]
    files: tuple[Written, ...] = ()


def read_script(text: str, known: Mapping[str, str | None] | None = None, name: str = "script") -> Script:
    """Read a script; `known` are variables that the queue sets, None those whose value only the job will know.

    Raises :class:`memcalc.errors.FileError` for one that comes to more words than any job has.
    """
    state = State(name, named=frozenset(re.findall(r"(?m)(?:^|[\s;])(\w+)\+?=", text)))
    for key, value in (known or {}).items():
        state.scalars[key] = state.missing(key) if value is None else Token(value.replace(MARK, "?"))
    effects = Effects(state, Flow(state), lambda lexer, end: _Reader(lexer, effects, effects.flow).read(end))
    effects.read(Lexer(text.replace(MARK, "?"), state), None)
    variables = {key: value.plain for key, value in state.scalars.items()}
    return Script(tuple(effects.commands), tuple(effects.comments), variables, tuple(effects.files))


class _Reader:
    """Walks through one text, keeping what its commands do to the variables."""

    def __init__(self, lexer: Lexer, effects: Effects, flow: Flow) -> None:
        self.lexer, self.effects, self.state, self.flow = lexer, effects, lexer.state, flow
        self.simple = Simple()
        self.status: Status = "likely"
        self.heredocs: list[tuple[str, bool, bool, Simple]] = []
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
            begin = self.lexer.at
            self._word()
            self.lexer.at = max(self.lexer.at, begin + 1)  # whatever it is, it is passed

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
            self.effects.comments.append((begin, text[begin : self.lexer.at].rstrip()))

    def _operator(self) -> str:
        for operator in _OPERATORS:
            if self.lexer.text.startswith(operator, self.lexer.at):
                if operator == "((" and self.simple.tokens:
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
            if not self.flow.pattern(self.simple.tokens):
                self._finish()
                self.flow.close("(")
            self.simple = Simple()
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
        number = arithmetic(self.lexer.text[begin : max(begin, self.lexer.at - 2)], self.state.scalars)
        self._tested(None if number is None else bool(number))

    def _opened(self) -> None:
        """Take `(`: a subshell, the brackets of a function's name, or an optional one before a pattern."""
        tokens = self.simple.tokens
        if len(tokens) == 1 and NAME.fullmatch(tokens[0].text.replace("-", "_")):
            self._blank()
            self.lexer.at += self.lexer.text.startswith(")", self.lexer.at)
            self.function, self.simple = tokens[0].text, Simple()
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
        target = lexer.value(" \t\r\n;&|()<>").token()
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

    def _body(self, begin: int, end: int, literal: bool) -> Token:
        """The text of a here-document, its variables put in unless its end was quoted."""
        if literal:
            return Token(self.lexer.text[begin:end], tuple(self.lexer.positions(begin, end)))
        value = Value(self.state)
        inner = Lexer(self.lexer.text[:end], self.state, self.lexer.origin)
        inner.at = begin
        inner.quoted_text(value, "")
        return value.token()

    def _word(self) -> None:
        """Read one word of a command, which may be a word of the grammar at its begin."""
        lexer, tokens = self.lexer, self.simple.tokens
        begin = lexer.at
        if self.simple.begin < 0:
            self.simple.begin = max(next(iter(lexer.positions(begin, begin + 1)), 0), 0)
        open_to_values = all(ASSIGNED.match(token.text) for token in tokens) or tokens[0].text in DECLARING
        if open_to_values and not self.flow.in_pattern() and (match := ASSIGNED.match(lexer.text, begin)):
            if lexer.text.startswith("(", match.end()):
                self._array(match)
            elif match[2] is None:
                tokens.append(lexer.assigned(match))
            else:  # one item of an array
                lexer.at = match.end()
                lexer.tokens()
            return
        if not tokens and self._keyword():
            return
        tokens += lexer.tokens()

    def _keyword(self) -> bool:
        """Take a word of the grammar, if one comes."""
        match = re.compile(r"(\[\[|[a-z]+|[{}!])(?=[\s;&|()]|$)").match(self.lexer.text, self.lexer.at)
        keyword = match[1] if match and (match[1] == "esac" or not self.flow.in_pattern()) else ""
        if keyword == "[[":
            self._test()
        elif keyword in {"for", "select"}:
            self.lexer.at += len(keyword)
            self._loop()
        elif keyword == "case":
            self.lexer.at += len(keyword)
            self._case()
        elif keyword == "function":
            self.lexer.at += len(keyword)
            self._blank()
            self.function = next(iter(self.lexer.tokens()), Token("")).text
            rest = re.compile(r"[ \t]*\([ \t]*\)").match(self.lexer.text, self.lexer.at)
            self.lexer.at = rest.end() if rest else self.lexer.at
        elif keyword == "!":
            self.lexer.at += 1
            self.simple.negated = not self.simple.negated
        elif keyword == "{" and self.function:
            self._define()
        elif keyword in ("if", "elif", "then", "else", "fi", "while", "until", "do", "done", "esac", "{", "}", "time"):
            self.lexer.at += len(keyword)
            negated, self.simple = self.simple.negated, Simple()
            self.flow.keyword(keyword, self.status, negated)
        else:
            return False
        return True

    def _test(self) -> None:
        """Read `[[ … ]]`, in which < > && || ( ) are words."""
        lexer, tokens = self.lexer, list[Token]()
        lexer.at += 2
        while lexer.at < len(lexer.text):
            self._blank()
            match = re.compile(r"&&|\|\||[()<>;&|]").match(lexer.text, lexer.at)
            if match:
                tokens.append(Token(match[0]))
                lexer.at = match.end()
                continue
            read = lexer.tokens() if lexer.at < len(lexer.text) else []
            if read and read[0].text == "]]":
                break
            tokens += read or [Token("")]
        self._tested(condition(tokens))

    def _tested(self, holds: bool | None) -> None:
        if holds is not None and self.simple.negated:
            holds = not holds
        self.simple = Simple()
        self._ended(status_of(holds))

    def _ended(self, status: Status) -> None:
        """Take how a command ended; one that did not run leaves what was, one that may have run leaves a doubt."""
        if self.flow.waiting == Run.MAYBE:
            self.status = "maybe"
        elif self.flow.waiting == Run.ON:
            self.status = status

    def _define(self) -> None:
        """Keep the body of a function for its calls."""
        lexer = self.lexer
        lexer.at += 1
        begin, name = lexer.at, self.function
        self.function = ""
        skipped = _Reader(lexer, self.effects, Flow(self.state, Run.OFF))
        skipped.flow.keyword("{", "yes", False)
        while skipped.flow.frames and lexer.at < len(lexer.text):
            skipped.step()
        self.heredocs += skipped.heredocs
        if self.flow.run != Run.OFF:
            self.effects.functions[name] = (lexer, begin, max(begin, lexer.at - 1))

    def _loop(self) -> None:
        """Read the head of a `for`: with one item its variable is that, with several only a run tells."""
        lexer = self.lexer
        self._blank()
        if lexer.text.startswith("((", lexer.at):
            begin, lexer.at = lexer.at, closing(lexer.text, lexer.at)
            names, items = NAME.findall(lexer.text[begin : lexer.at])[:1], list[Token]()
        else:
            names, items = [token.text for token in lexer.tokens()], self._items()
        self.flow.open("loop")
        for name in names:
            only = items[0] if len(items) == 1 else self.state.missing(name)
            if NAME.fullmatch(name):
                self.flow.assign(name, only)
        self.status, self.simple = "yes", Simple()

    def _items(self) -> list[Token]:
        lexer, items = self.lexer, list[Token]()
        self._blank()
        if not re.compile(r"in\b").match(lexer.text, lexer.at):
            return items
        lexer.at += 2
        while not self._blank() and lexer.at < len(lexer.text) and lexer.text[lexer.at] not in ";&|()<>":
            items += lexer.tokens()
        return items

    def _case(self) -> None:
        lexer = self.lexer
        self._blank()
        subject = lexer.value(" \t\r\n;&|()<>").token()
        self._blank()
        lexer.at += 2 if lexer.text.startswith("in", lexer.at) else 0
        self.simple = Simple()
        self.flow.open("case", subject)

    def _array(self, match: re.Match[str]) -> None:
        """Read `NAME=( … )`."""
        lexer, name = self.lexer, match[1]
        lexer.at = match.end() + 1
        items: list[Token] = list(self.state.arrays.get(name, ())) if match[3] else []
        while lexer.at < len(lexer.text):
            while self._blank():
                pass
            if lexer.at >= len(lexer.text) or lexer.text[lexer.at] == ")":
                break
            items += lexer.tokens()
        lexer.at += 1
        self.flow.assign(name, tuple(items))

    def _finish(self) -> None:
        """End a simple command."""
        simple, self.simple = self.simple, Simple()
        if simple.tokens and self.flow.run != Run.OFF:
            self._ended(self.effects.end(simple))
