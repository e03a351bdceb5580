"""The words of a shell script: quotes, variables, defaults, arrays, sums, as POSIX.1-2017 (2.2, 2.6) and bash say.

Nothing is executed. What only a run could tell, such as the output of a command, stays unknown. Each character of a
word knows its place in the script, so that a value can be edited where it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from memcalc.convert.shell_values import MARK, State, Token, Value, arithmetic, doubtful
from memcalc.errors import FileError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[([^]\s]{1,40})\])?(\+?)=")
ENDS = " \t\r\n;&|()<>"
_PLAIN = re.compile(r"[^\s;&|()<>'\"\\$`}~]+")
_ARRAY = re.compile(r'"?\$\{([A-Za-z_]\w*)\[[@*]\]\}"?')
_ARGUMENTS = re.compile(r'"?(?:\$[@*]|\$\{[@*][^}]{0,20}\})"?')
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(@|\*|\d+)\])?")
HERE = "."
"""The script's folder, in which it is taken to be started."""
_FOLDERS = ("PWD", "SLURM_SUBMIT_DIR")
_THIS = r'"?\$(?:0|\{0\}|BASH_SOURCE|\{BASH_SOURCE(?:\[0\])?(?::-\$0)?\})"?'
_DIRNAME = rf'dirname (?:-- )?(?:{_THIS}|"?\$\( ?(?:readlink -f|realpath) {_THIS} ?\)"?)'
_EXPR = re.compile(r"expr ([\w$ {}*/+%()\\'\"-]{1,200})")
_COUNT = re.compile(
    r"""echo ["']?\$(?:(\w+)|\{(\w+)\})["']? ?\| ?(?:awk -F ?["']?,["']? ["']\{ ?print NF;? ?\}["']"""
    r"""|tr ["']?,["']? ["']\\n["'] ?\| ?wc -[lw])"""
)
"""The number of a variable's parts between commas."""
_HERE_STRING = re.compile(r"((?:awk|tr) [^|<]*?) ?<<< ?(\S+)")
_FOLDER = re.compile(
    rf'pwd(?: -[LP])?|{_DIRNAME}|cd (?:-- )?"?(?:\$\( ?{_DIRNAME} ?\)|`{_DIRNAME}`)"?(?P<up>(?:/\.\.?)*)"?'
    r"(?: ?&?> ?/dev/null(?: 2>&1)?)? ?&& ?pwd(?: -[LP])?"
)
_PATH = re.compile(
    r'(?:(?P<parent>dirname)|realpath(?: -m)?|readlink -[fm]|(?P<cd>cd)) (?:-- )?"?\$(?:(\w+)|\{(\w+)\})'
    r'(?P<down>(?:/[\w.-]+)*)/?"?'
    r"(?(cd)(?: ?&?> ?/dev/null(?: 2>&1)?)? ?&& ?pwd(?: -[LP])?)"
)
"""A command that prints the path of a folder which a variable names."""
DEEPEST = 16
"""Expansions within expansions, functions within functions."""


class Lexer:
    """Reads words at a place of a text; `places` are those of its characters in the script that it came from."""

    def __init__(self, text: str, state: State, positions: tuple[int, ...] | None = None) -> None:
        self.text, self.at, self.state = text, 0, state
        self.origin = positions
        self.depth = 0

    def positions(self, begin: int, end: int) -> Iterable[int]:
        """The places in the script of a part of the text."""
        return range(begin, end) if self.origin is None else self.origin[begin:end]

    def tokens(self) -> list[Token]:
        """Read one word; as an unquoted variable it may become none or several."""
        begin = self.at
        if match := _ARRAY.match(self.text, begin):
            self.at = match.end()
            scalar = self.state.scalars.get(match[1]) or self.state.missing(match[1], unset=True)
            items = self.state.arrays.get(match[1], (scalar,))
            quoted = match[0].startswith('"') and not scalar.unset
            return self._counted(list(items) if quoted else [piece for token in items for piece in self._pieces(token)])
        if (match := _ARGUMENTS.match(self.text, begin)) and self.text[match.end() : match.end() + 1] in {"", *ENDS}:
            self.at = match.end()
            return self._counted(list(self.state.arguments or ()))
        value = self.value(ENDS)
        if self.at == begin:
            self.at += 1
        return self._counted(value.split())

    def _pieces(self, token: Token) -> list[Token]:
        value = Value(self.state)
        value.put(replace(token, unknown=""), quoted=False)
        pieces = value.split()
        return [doubtful(piece, token.unknown) for piece in pieces] if MARK not in token.text else pieces

    def _counted(self, tokens: list[Token]) -> list[Token]:
        self.state.spend(len(tokens), 0)
        return tokens

    def assigned(self, match: re.Match[str]) -> Token:
        """Return `NAME=value` as one word, with what `+=` adds to put behind what the name had."""
        self.at = match.end()
        value = self.value(ENDS)
        if match[3] and (before := self.state.scalars.get(match[1])):
            self.state.spend(0, len(before.text))
            value.text[:0], value.positions[:0] = before.text, before.positions or (-1,) * len(before.text)
            value.add("", ())
        name = f"{match[1]}="
        token = value.token()
        begin = tuple(self.positions(match.start(), match.start() + len(name)))
        self.state.spend(1, len(name))
        return replace(token, text=name + token.text, positions=(*begin, *token.positions))

    def value(self, ends: str) -> Value:
        """Read up to an unquoted end character."""
        value = Value(self.state)
        text = self.text
        while self.at < len(text) and text[self.at] not in ends:
            letter = text[self.at]
            if letter == "'":
                self._single(value)
            elif letter == '"':
                self._double(value)
            elif letter == "\\":
                self._escaped(value)
            elif letter in "$`":
                self.expansion(value, quoted=False)
            else:
                match = _PLAIN.match(text, self.at)
                end = match.end() if match else self.at + 1
                value.add(text[self.at : end], self.positions(self.at, end))
                self.at = end
        return value

    def _escaped(self, value: Value) -> None:
        length = 3 if self.text.startswith("\\\r\n", self.at) else 2
        if self.text[self.at + 1 : self.at + length] not in ("\n", "\r\n"):
            begin, end = self.at + 1, min(self.at + 2, len(self.text))
            value.add(self.text[begin:end], self.positions(begin, end))
            length = 2
        self.at += length

    def _single(self, value: Value) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            self._open("quote", self.at)
            end = len(self.text)
        value.add(self.text[self.at + 1 : end], self.positions(self.at + 1, end))
        value.quoted, self.at = True, end + 1

    def _double(self, value: Value) -> None:
        value.quoted = True
        begin = self.at
        self.at += 1
        self.quoted_text(value, '"')
        if self.at >= len(self.text):
            self._open("quote", begin)
        self.at += 1

    def _open(self, what: str, at: int) -> None:
        """Refuse a script in which something is not closed, as a shell does; an inner text may be known in part."""
        if self.origin is None:
            line = self.text.count("\n", 0, at) + 1
            raise FileError("file", self.state.name, f"must be a shell script: a {what} of line {line} is not closed")

    def quoted_text(self, value: Value, end: str) -> None:
        """Read as between double quotes, up to an end character or the end."""
        text = self.text
        special = '$`"\\\n' if end else "$`\\\n"
        while self.at < len(text) and (not end or text[self.at] != end):
            if text[self.at] == "\\" and text[self.at + 1 : self.at + 2] in tuple(special):
                if text[self.at + 1] != "\n":
                    value.add(text[self.at + 1], self.positions(self.at + 1, self.at + 2))
                self.at += 2
            elif text[self.at] in "$`":
                self.expansion(value, quoted=True)
            else:
                value.add(text[self.at], self.positions(self.at, self.at + 1))
                self.at += 1

    def expansion(self, value: Value, *, quoted: bool) -> None:
        """Put a variable's value in; a command's output stays unknown."""
        text, begin = self.text, self.at
        if text.startswith(("$(", "${"), begin) and closing(text, begin + 1) > len(text):
            self._open("bracket", begin + 1)
        if text.startswith("$((", begin):
            self.at = closing(text, begin + 1)
            self._sum(value, text[begin + 3 : self.at - 2])
        elif text.startswith("$(", begin) or text[begin] == "`":
            self.at = closing(text, begin + 1) if text[begin] == "$" else text.find("`", begin + 1) + 1 or len(text)
            command = text[begin + (2 if text[begin] == "$" else 1) : self.at - 1]
            variables = self.state.scalars
            output = folder_of(command) or path_of(command, variables) or number_of(command, variables)
            if output:
                value.add(output, (-1,) * len(output))
            elif any(line.lstrip()[:1] not in ("", "#") for line in command.split("\n")):  # a remark has no output
                value.miss(text[begin : min(self.at, begin + 40)])
        elif text.startswith("${", begin):
            self._braced(value, quoted)
        elif match := re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]").match(text, begin + 1):
            self.at = match.end()
            self._put(value, self._named(match[0]), match[0], quoted)
        elif text[begin + 1 : begin + 2] in ("'", '"') and not quoted:
            self.at = begin + 1
        else:
            self.at = begin + 1
            value.add("$", self.positions(begin, begin + 1))

    def _named(self, name: str, index: str = "") -> Token | None:
        """The value of a variable, an item of an array, or an argument; None where it is not set."""
        state = self.state
        if name == "#":
            return Token(str(len(state.arguments or ())))
        if name.isdigit():
            at = int(name) if len(name) < 6 else 0
            return state.arguments[at - 1] if state.arguments is not None and 0 < at <= len(state.arguments) else None
        if name in "@*?$!-":
            return Token("") if name in "@*" and not state.arguments else state.missing(f"${name}")
        if index in ("@", "*") and name in state.arrays:
            return self._joined(state.arrays[name])
        if index.isdigit() and name in state.arrays:
            items = state.arrays[name]
            return items[int(index)] if len(index) < 6 and int(index) < len(items) else None
        return state.scalars.get(name) or (Token(HERE, (-1,)) if name in _FOLDERS else None)

    def _joined(self, items: tuple[Token, ...]) -> Token:
        value = Value(self.state)
        for number, item in enumerate(items):
            if number:
                value.add(" ", (-1,))
            value.put(item, quoted=True)
        return value.token()

    def _put(self, value: Value, variable: Token | None, name: str, quoted: bool) -> None:
        if variable is None:
            value.miss(f"${name}" if name.isdigit() else name, unset=True)
        else:
            value.put(variable, quoted=quoted)

    def _braced(self, value: Value, quoted: bool) -> None:
        """Read `${NAME}`, its length, and its other values: `:-`, `-`, `:=`, `=`, `:+`, `+`, `:?`, `?`."""
        text, begin = self.text, self.at
        match = _PARAMETER.match(text, begin + 2)
        at = match.end() if match else begin + 2
        operator = re.compile(r":?[-=+?]").match(text, at)
        if match and text.startswith("}", at):
            self.at = at + 1
            of = self._length if match[1] else self._named
            self._put(value, of(match[2], match[3] or ""), match[2], quoted)
        elif match and operator and not match[1] and self.depth < DEEPEST:
            self.at = operator.end()
            self.depth += 1
            other = self.value("}")
            self.depth -= 1
            self.at += 1
            self._other(value, self._named(match[2], match[3] or ""), match[2], operator[0], other, quoted)
        else:
            self.at = closing(text, begin + 1)
            value.miss(text[begin : min(self.at, begin + 40)])

    def _other(self, value: Value, variable: Token | None, name: str, how: str, other: Value, quoted: bool) -> None:
        missing = variable is None or variable.unset or (how[0] == ":" and not variable.text)
        if how[-1] == "+":
            if variable is not None and variable.unknown and not variable.unset:
                value.miss(variable.unknown)
            elif not missing and variable is not None and not variable.unset:
                value.put(other.token(), quoted=quoted)
            return
        if missing and how[-1] in "-=":
            value.put(other.token(), quoted=quoted or other.quoted)
            value.quoted = value.quoted or other.quoted
            if how[-1] == "=" and NAME.fullmatch(name):
                self.state.scalars[name] = other.token()
        else:
            self._put(value, variable, name, quoted)

    def _length(self, name: str, index: str) -> Token | None:
        if index in ("@", "*"):
            items = self.state.arrays.get(name)
            return None if items is None else Token(str(len(items)))
        variable = self._named(name)
        return None if variable is None or variable.unknown else Token(str(len(variable.text)))

    def _sum(self, value: Value, inner: str) -> None:
        """Put in the value of a sum of whole numbers; all else stays unknown."""
        number = arithmetic(inner, self.state.scalars)
        if number is None:
            value.miss(inner.strip()[:40])
        else:
            value.add(str(number), (-1,) * len(str(number)))


def folder_of(command: str) -> str:
    """The path that a command's output is, from the script's folder, in which it is taken to run; empty for others.

    >>> folder_of('cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." &> /dev/null && pwd'), folder_of("pwd")
    ('./..', '.')
    """
    match = _FOLDER.fullmatch(" ".join(command[:300].split()))
    return HERE + (match["up"] or "") if match else ""


def path_of(command: str, variables: Mapping[str, Token]) -> str:
    """The path that a command prints of a variable's; empty for other commands, and where that is not known.

    >>> path_of('realpath "$here/../.."', {"here": Token("./a")}), path_of("dirname ${here}", {"here": Token("./a")})
    ('./a/../..', './a/..')
    """
    match = _PATH.fullmatch(" ".join(command[:300].split()))
    named = variables.get(match[3] or match[4]) if match else None
    if match is None or named is None or named.unknown or not named.text:
        return ""
    return named.text + match["down"] + ("/.." if match["parent"] else "")


def number_of(command: str, variables: Mapping[str, Token]) -> str:
    """What `expr` prints for a sum of whole numbers, or a count of what commas part; empty for other commands.

    >>> number_of("expr 32 / $each / 2", {"each": Token("4")}), number_of("expr length abc", {})
    ('4', '')
    >>> number_of("echo $D | awk -F',' '{print NF}'", {"D": Token("4,5")})
    '2'
    """
    line = _HERE_STRING.sub(r"echo \2 | \1", " ".join(command[:300].split()), count=1)
    if listed := _COUNT.fullmatch(line):
        named = variables.get(listed[1] or listed[2])
        return str(len(named.text.split(","))) if named and named.text and not named.unknown else ""
    match = _EXPR.fullmatch(line)
    number = arithmetic(re.sub(r"[\\'\"]", "", match[1]), variables) if match else None
    return "" if number is None else str(number)


def closing(text: str, begin: int) -> int:
    """Return the place after the bracket that closes the one at `begin`, beyond the end where none does."""
    closes = {"(": ")", "{": "}", '"': '"'}
    waiting = [text[begin]]
    at = begin + 1
    while at < len(text):
        letter, inner = text[at], waiting[-1]
        if letter == "\\":
            at += 1
        elif letter == closes[inner]:
            waiting.pop()
            if not waiting:
                return at + 1
        elif letter == "$" and text[at + 1 : at + 2] in ("(", "{"):
            at += 1
            waiting.append(text[at])
        elif inner != '"' and letter == "'":
            end = text.find("'", at + 1)
            at = end if end > 0 else at
        elif inner != '"' and letter in ('"', inner):
            waiting.append(letter)
        at += 1
    return len(text) + 1
