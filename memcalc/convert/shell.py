"""A shell script as the commands that it would run: read, and never executed.

Words, quotes, comments, continued lines, here-documents, assignments, arrays, ``$NAME``, ``${NAME}``,
``${NAME:-default}`` and ``$((a * b))`` are followed as POSIX.1-2017 (chapter 2, Shell Command Language) and bash read
them. Both branches of a condition are read, one after the other. What only a run could tell, such as the output of a
command, stays unknown. Each character of a word knows its place in the script, so that a value can be edited where it
was written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Command", "Script", "Word", "read_script"]

LONGEST = 1 << 16
"""Characters of one value; a variable that doubles itself line after line ends here, as unknown."""
MOST_WORDS = 20_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_RESERVED = frozenset(
    ("if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "in", "{", "}", "!",
     "time", "function", "select")
)  # fmt: skip
_DECLARING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ARITHMETIC = re.compile(r"[0-9+\-*/%() ]{1,200}")


@dataclass(frozen=True)
class Word:
    """One word of a command; `places` are those of its characters in the script."""

    text: str
    places: tuple[int, ...] = ()
    unknown: str = ""
    """The name of the variable, or the text, that only a run could tell; empty where the word is known."""

    @property
    def span(self) -> tuple[int, int] | None:
        """Where it stands in one piece, or None where it was put together."""
        places = self.places
        if not places or any(after - before != 1 for before, after in itertools.pairwise(places)):
            return None
        return places[0], places[-1] + 1


@dataclass(frozen=True)
class Command:
    """The words of one command, and the variables that are set for it alone."""

    words: tuple[Word, ...]
    settings: Mapping[str, Word] = field(default_factory=dict)
    begin: int = 0


@dataclass(frozen=True)
class Script:
    """The commands of a script in the order of its text, its comment lines, and the last value of each variable."""

    commands: tuple[Command, ...]
    comments: tuple[tuple[int, str], ...]
    """Those that fill a line: place of the #, and the line."""
    variables: Mapping[str, Word]


def read_script(text: str, known: Mapping[str, str] | None = None) -> Script:
    """Read a script; `known` are variables that the queue will set."""
    reader = _Reader(text, {name: Word(value) for name, value in (known or {}).items()})
    commands = tuple(reader.commands())
    return Script(commands, tuple(reader.comments), reader.scalars)


class _Value:
    """A word while it is read: characters, places, and whether anything was quoted."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.places: list[int] = []
        self.unknown = ""
        self.quoted = False
        self.cuts: list[int] = []
        """Where an unquoted variable's blanks end a word."""

    def add(self, text: str, places: Iterator[int] | tuple[int, ...] | range) -> None:
        self.text.extend(text)
        self.places.extend(places)
        if len(self.text) > LONGEST:
            self.text, self.places, self.unknown = [], [], "a value of extraordinary length"

    def word(self) -> Word:
        return Word("".join(self.text), tuple(self.places), self.unknown)


class _Reader:
    """Walks through the text once."""

    def __init__(self, text: str, scalars: dict[str, Word]) -> None:
        self.text, self.at = text, 0
        self.scalars = scalars
        self.arrays: dict[str, tuple[Word, ...]] = {}
        self.comments: list[tuple[int, str]] = []
        self.heredocs: list[tuple[str, bool]] = []
        self.words_left = MOST_WORDS

    # ------------------------------------------------------------------------------------------------- commands

    def commands(self) -> Iterator[Command]:
        """Yield each simple command; assignments take effect in the order of the text."""
        words: list[Word] = []
        begin = -1
        while True:
            separated = self._blank()
            if self.at >= len(self.text) or separated or self.text[self.at] in ";&|()":
                if not separated and self.at < len(self.text):
                    self.at += 1
                if words and (command := self._command(words, begin)):
                    yield command
                words, begin = [], -1
                if self.at >= len(self.text):
                    return
                continue
            if self.text[self.at] in "<>" or self._redirected():
                self._redirection()
                continue
            begin = self.at if begin < 0 else begin
            words += self._words(first=all(_ASSIGNED.match(word.text) for word in words))

    def _command(self, words: list[Word], begin: int) -> Command | None:
        """Take reserved words and assignments off the front."""
        while words and (words[0].text in _RESERVED or words[0].text in _DECLARING):
            words = words[1:]
        settings: dict[str, Word] = {}
        while words and (match := _ASSIGNED.match(words[0].text)):
            settings[match[1]] = _after(words[0], match.end())
            words = words[1:]
        if words:
            return Command(tuple(words), settings, begin)
        for name, value in settings.items():
            self.scalars[name] = value
        return None

    def _blank(self) -> bool:
        """Pass blanks, comments and continued lines; say whether a line ended."""
        text, ended = self.text, False
        while self.at < len(text):
            if text[self.at] in " \t\r":
                self.at += 1
            elif text.startswith(("\\\n", "\\\r\n"), self.at):
                self.at = text.index("\n", self.at) + 1
            elif text[self.at] == "#":
                self._comment()
            elif text[self.at] == "\n":
                self.at, ended = self.at + 1, True
                self._skip_heredocs()
            else:
                break
        return ended

    def _comment(self) -> None:
        end = self.text.find("\n", self.at)
        end = len(self.text) if end < 0 else end
        line_begin = self.text.rfind("\n", 0, self.at) + 1
        if not self.text[line_begin : self.at].strip():
            self.comments.append((self.at, self.text[self.at : end].rstrip()))
        self.at = end

    def _redirected(self) -> bool:
        return bool(re.compile(r"\d+[<>]").match(self.text, self.at))

    def _redirection(self) -> None:
        """Pass `> file`, `2>&1`, `<<EOF`; the text of a here-document is passed at the line's end."""
        match = re.compile(r"\d*(<<-?|<<<|[<>]+[&|]?|<)").match(self.text, self.at)
        operator = match[1] if match else ""
        self.at = match.end() if match else self.at + 1
        self._blank_in_line()
        target = self._words(first=False) if self.at < len(self.text) and self.text[self.at] not in "\n;&|()<>" else []
        if operator in ("<<", "<<-") and target:
            self.heredocs.append((target[0].text, operator == "<<-"))

    def _blank_in_line(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1

    def _skip_heredocs(self) -> None:
        for end, indented in self.heredocs:
            while self.at < len(self.text):
                line_end = self.text.find("\n", self.at)
                line_end = len(self.text) if line_end < 0 else line_end
                line = self.text[self.at : line_end]
                self.at = min(line_end + 1, len(self.text))
                if (line.lstrip("\t") if indented else line) == end:
                    break
        self.heredocs = []

    # ---------------------------------------------------------------------------------------------------- words

    def _words(self, *, first: bool) -> list[Word]:
        """Read one word; as an unquoted variable it may become none or several."""
        begin = self.at
        if first and (match := _ASSIGNED.match(self.text, self.at)):
            if self.text.startswith("(", match.end()):
                self._array(match)
                return []
            return self._counted([self._assignment(match)])
        if match := re.compile(r'"?\$\{([A-Za-z_]\w*)\[[@*]\]\}"?').match(self.text, self.at):
            self.at = match.end()
            return self._counted(list(self.arrays.get(match[1], (Word("", unknown=match[1]),))))
        value = self._value(" \t\r\n;&|()<>")
        if self.at == begin:
            self.at += 1
        return self._counted(_split(value))

    def _counted(self, words: list[Word]) -> list[Word]:
        self.words_left -= len(words)
        return words if self.words_left >= 0 else []

    def _assignment(self, match: re.Match[str]) -> Word:
        """Return `NAME=value` as one word; `+=` adds to what the name had."""
        self.at = match.end()
        value = self._value(" \t\r\n;&|()<>")
        if match[2] and match[1] in self.scalars:
            before = self.scalars[match[1]]
            value.text[:0], value.places[:0] = before.text, before.places
            value.unknown = value.unknown or before.unknown
        name = f"{match[1]}="
        word = value.word()
        return Word(name + word.text, (*range(match.start(), match.start() + len(name)), *word.places), word.unknown)

    def _array(self, match: re.Match[str]) -> None:
        """Read `NAME=( … )`."""
        self.at = match.end() + 1
        items: list[Word] = list(self.arrays.get(match[1], ())) if match[2] else []
        while True:
            self._blank()
            if self.at >= len(self.text) or self.text[self.at] == ")":
                break
            items += self._words(first=False)
        self.at += 1
        self.arrays[match[1]] = tuple(items)
        self.scalars[match[1]] = items[0] if items else Word("")

    def _value(self, ends: str) -> _Value:
        """Read up to an unquoted end character."""
        value = _Value()
        text = self.text
        while self.at < len(text) and text[self.at] not in ends:
            letter = text[self.at]
            if letter == "'":
                self._single(value)
            elif letter == '"':
                self._double(value)
            elif letter == "\\":
                if not text.startswith("\\\n", self.at):
                    value.add(text[self.at + 1 : self.at + 2], range(self.at + 1, min(self.at + 2, len(text))))
                self.at += 2
            elif letter in "$`":
                self._expansion(value, quoted=False)
            else:
                value.add(letter, (self.at,))
                self.at += 1
        return value

    def _single(self, value: _Value) -> None:
        end = self.text.find("'", self.at + 1)
        end = len(self.text) if end < 0 else end
        value.add(self.text[self.at + 1 : end], range(self.at + 1, end))
        value.quoted, self.at = True, end + 1

    def _double(self, value: _Value) -> None:
        value.quoted = True
        self.at += 1
        text = self.text
        while self.at < len(text) and text[self.at] != '"':
            if text[self.at] == "\\" and text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                if text[self.at + 1] != "\n":
                    value.add(text[self.at + 1], (self.at + 1,))
                self.at += 2
            elif text[self.at] in "$`":
                self._expansion(value, quoted=True)
            else:
                value.add(text[self.at], (self.at,))
                self.at += 1
        self.at += 1

    # ----------------------------------------------------------------------------------------------- expansions

    def _expansion(self, value: _Value, *, quoted: bool) -> None:
        """Put a variable's value in; a command's output stays unknown."""
        text, begin = self.text, self.at
        if text.startswith("$((", begin):
            self.at = _closing(text, begin + 1)
            value.add(*self._arithmetic(text[begin + 3 : self.at - 2], value))
        elif text.startswith("$(", begin) or text[begin] == "`":
            self.at = _closing(text, begin + 1) if text[begin] == "$" else text.find("`", begin + 1) + 1 or len(text)
            value.unknown = value.unknown or text[begin : min(self.at, begin + 40)]
        elif text.startswith("${", begin):
            end = _closing(text, begin + 1)
            self.at = end
            self._named(value, text[begin + 2 : end - 1], quoted)
        elif match := _NAME.match(text, begin + 1):
            self.at = match.end()
            self._named(value, match[0], quoted)
        else:
            self.at = begin + 2
            value.unknown = value.unknown or text[begin : begin + 2]

    def _named(self, value: _Value, inner: str, quoted: bool) -> None:
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:\[[@*]\])?(?::?[-=]([^$`]*))?", inner)
        name = match[1] if match else inner[:40]
        found = self.scalars.get(name) if match else None
        if found is None and match and match[2] is not None:
            found = Word(match[2].strip("\"'"))
        if found is None or found.unknown:
            value.unknown = value.unknown or (found.unknown if found else name)
            return
        begin = len(value.text)
        value.add(found.text, found.places or (-1,) * len(found.text))
        if not quoted:
            value.cuts += [begin + at for at, letter in enumerate(found.text) if letter.isspace()]

    def _arithmetic(self, inner: str, value: _Value) -> tuple[str, tuple[int, ...]]:
        """Return the value of sums and products of whole numbers; all else stays unknown."""
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: self._digits(match[1]), inner)
        number = _sum(filled) if _ARITHMETIC.fullmatch(filled) else None
        if number is None:
            value.unknown = value.unknown or inner[:40]
            return "", ()
        return str(number), (-1,) * len(str(number))

    def _digits(self, name: str) -> str:
        found = self.scalars.get(name)
        return found.text if found and not found.unknown and found.text.isdigit() and len(found.text) < 13 else "?"


def _after(word: Word, at: int) -> Word:
    return Word(word.text[at:], word.places[at:], word.unknown)


def _split(value: _Value) -> list[Word]:
    """Return the words of a value: it is cut where an unquoted variable had blanks."""
    if not value.text and not value.quoted and not value.unknown:
        return []
    whole = value.word()
    cuts = sorted({at for at in value.cuts if at < len(whole.text)})
    if not cuts:
        return [whole]
    edges = [-1, *cuts, len(whole.text)]
    pieces = [(a + 1, b) for a, b in itertools.pairwise(edges) if b > a + 1]
    return [Word(whole.text[a:b], whole.places[a:b], whole.unknown) for a, b in pieces]


def _closing(text: str, begin: int) -> int:
    """Return the place after the bracket that closes the one at `begin`; quotes inside are passed."""
    opening = text[begin]
    closing = {"(": ")", "{": "}"}[opening]
    depth, at = 0, begin
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif letter in "'\"" and (end := text.find(letter, at + 1)) > 0:
            at = end
        elif letter == opening:
            depth += 1
        elif letter == closing:
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return len(text)


def _sum(text: str) -> int | None:
    """Return the value of an expression of whole numbers, + - * / % and brackets, by Python's own parser."""
    import ast

    try:
        return _evaluated(ast.parse(text.replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None


def _evaluated(node: object) -> int:
    import ast
    import operator

    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < 10**13:
        return node.value
    if isinstance(node, ast.BinOp):
        how = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
               ast.Mod: operator.mod}.get(type(node.op))  # fmt: skip
        if how is not None:
            return int(how(_evaluated(node.left), _evaluated(node.right)))
    raise ValueError
