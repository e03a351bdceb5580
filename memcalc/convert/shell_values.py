"""Words of a shell script with the place of each character, variables, sums, conditions and files that it writes."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from memcalc import catalog
from memcalc.convert.document import Document, KeyPath, Span, kind_of, parse_document
from memcalc.errors import FileError

LONGEST = 1 << 16
"""Characters of one value; a variable that doubles itself line after line ends here, as unknown."""
MOST_WORDS = 20_000
MOST_CHARACTERS = 1 << 21
"""Of all words together, variables put in."""
MARK = "\ue000"
"""Stands in a text for a part that only a run can tell; its place says which (:meth:`State.missing`)."""
_LISTS = re.compile(r"(^|_)(EXTRA|ARGS|ARGUMENTS|OPTS|OPTIONS|FLAGS|OVERRIDES)(_|$)", re.IGNORECASE)
"""Variables that a caller may fill with options; not set, they are none, as in the shell."""
_ALLOWED = re.compile(r"[0-9+\-*/%() <>=!&|]{1,300}")
_LARGEST = 10**13
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDERS = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
Status = Literal["yes", "no", "maybe", "likely"]
"""How a command ends: `likely` for those that succeed if the job is to run at all."""
_NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


@dataclass(frozen=True)
class Token:
    """One word of a command; `places` are those of its characters in the script, below 0 where it has none."""

    text: str
    positions: tuple[int, ...] = ()
    unknown: str = ""
    """The name of the variable, or the text, that only a run could tell; empty where the word is known."""
    unset: bool = False
    """Unknown, and nothing but variables that the script does not set."""

    @property
    def span(self) -> tuple[int, int] | None:
        """Where it stands in one piece, or None where it was put together."""
        positions = self.positions
        if not positions or any(after - before != 1 for before, after in itertools.pairwise(positions)):
            return None
        return (positions[0], positions[-1] + 1) if positions[0] >= 0 else None

    @property
    def no_argument(self) -> bool:
        """Whether it is an argument of the script, which has none."""
        return self.unset and self.unknown.startswith("$")

    @property
    def plain(self) -> Token:
        """It without the marks of unknown parts; known where it is a model in a folder that only a run knows."""
        if MARK not in self.text:
            return self
        folder, _, name = self.text.rpartition("/")
        if MARK in folder and MARK not in name and catalog.lookup(name) is not None:
            return replace(self, text=self.text.replace(MARK, "…"), unknown="", unset=False)
        known = [pair for pair in zip(self.text, self.positions, strict=True) if pair[0] != MARK]
        return replace(self, text="".join(letter for letter, _ in known), positions=tuple(at for _, at in known))


def doubtful(token: Token, name: str) -> Token:
    """Return a word that is there only if a condition holds that a run decides."""
    return replace(token, unknown=token.unknown or name)


@dataclass
class State:
    """Variables, and what is left of the bounds."""

    name: str = "script"
    scalars: dict[str, Token] = field(default_factory=dict)
    arrays: dict[str, tuple[Token, ...]] = field(default_factory=dict)
    arguments: tuple[Token, ...] | None = None
    """Of the function that is read; None in the script itself, whose own are not known."""
    tokens: int = MOST_WORDS
    characters: int = MOST_CHARACTERS
    named: frozenset[str] = frozenset()
    """Variables that the script sets somewhere, in a branch that is not taken too."""
    missed: list[tuple[str, bool]] = field(default_factory=list)
    """What is not known, and whether that is a variable that the script does not set."""

    def missing(self, name: str, *, unset: bool = False) -> Token:
        """The word of something that only a run can tell."""
        self.missed.append((name, unset))
        return Token(MARK, (-1 - len(self.missed),), name, unset)

    def part(self, text: str, positions: tuple[int, ...]) -> Token:
        """A word of characters and places, with what its marks say."""
        at = text.find(MARK)
        if at < 0:
            return Token(text, positions)
        marks = [self.missed[-2 - position] for letter, position in zip(text, positions, strict=True) if letter == MARK]
        return Token(text, positions, marks[0][0], len(marks) == len(text) and all(unset for _, unset in marks))

    def spend(self, tokens: int, characters: int) -> None:
        """Count against the bounds."""
        self.tokens -= tokens
        self.characters -= characters
        if self.tokens < 0 or self.characters < 0:
            limit = f"must be a script of at most {MOST_WORDS:,} words and {MOST_CHARACTERS:,} characters in them"
            raise FileError("file", self.name, f"{limit}, its variables put in")


class Value:
    """A word while it is read: characters, places, and whether anything was quoted."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.text: list[str] = []
        self.positions: list[int] = []
        self.quoted = False
        self.cuts: list[int] = []
        """Where an unquoted variable's blanks end a word."""

    def add(self, text: str, positions: Iterable[int]) -> None:
        """Append characters with their places."""
        self.state.spend(0, len(text))
        self.text.extend(text)
        self.positions.extend(positions)
        if len(self.text) > LONGEST:
            self.text, self.positions, self.cuts = [], [], []
            self.miss("a value of extraordinary length")

    def miss(self, name: str, *, unset: bool = False) -> None:
        """Note that a part is not known."""
        self.put(self.state.missing(name, unset=unset), quoted=True)

    def put(self, token: Token, *, quoted: bool) -> None:
        """Append the value of a variable."""
        begin = len(self.text)
        self.add(token.text, token.positions or (-1,) * len(token.text))
        if token.unknown and MARK not in token.text:
            self.miss(token.unknown)
        if not quoted and len(self.text) > begin:
            self.cuts += [begin + at for at, letter in enumerate(token.text) if letter.isspace()]

    def token(self) -> Token:
        """All of it as one word."""
        return self.state.part("".join(self.text), tuple(self.positions))

    def split(self) -> list[Token]:
        """The words of it: it is cut where an unquoted variable had blanks."""
        if not self.text:
            return [Token("")] if self.quoted else []
        token = self.token()
        unset = token.unset and token.unknown not in self.state.named
        if unset and not self.quoted and _LISTS.search(token.unknown):
            return []
        cuts = sorted({at for at in self.cuts if at < len(token.text)})
        if not cuts:
            return [token]
        edges = [-1, *cuts, len(token.text)]
        pieces = [(a + 1, b) for a, b in itertools.pairwise(edges) if b > a + 1]
        return [self.state.part(token.text[a:b], token.positions[a:b]) for a, b in pieces]


def arithmetic(text: str, variables: Mapping[str, Token]) -> int | None:
    """Return the value of a sum, product or comparison of whole numbers; None where it is not known.

    The shell divides towards zero, unlike Python; nothing here is negative, so that both agree.
    """

    def digits(match: re.Match[str]) -> str:
        value = variables.get(match[1])
        known = value and not value.unknown and re.fullmatch(r"\s*\d{1,12}\s*", value.text)
        return f"{int(value.text)}" if value and known else "?"

    filled = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", digits, text.replace("\n", " ").strip()[:1000])
    if not _ALLOWED.fullmatch(filled):
        return None
    plain = re.sub(r"\b0+(?=\d)", "", filled).replace("/", "//").replace("&&", " and ").replace("||", " or ")
    try:
        return _evaluated(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError):
        return None


def _evaluated(node: object) -> int:
    number = -1
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        number = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        number = int(_OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right)))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _ORDERS:
        number = int(_ORDERS[type(node.ops[0])](_evaluated(node.left), _evaluated(node.comparators[0])))
    elif isinstance(node, ast.BoolOp):
        parts = [bool(_evaluated(part)) for part in node.values]
        number = int(all(parts) if isinstance(node.op, ast.And) else any(parts))
    if not 0 <= number < _LARGEST:
        raise ValueError
    return number


def condition(tokens: Sequence[Token]) -> bool | None:
    """Return whether the words of a test hold; None where only a run can tell.

    A variable that is not set is empty for `-z` and `-n`, as it is for `${NAME:-…}`.
    """
    for mark, empty in (("||", False), ("&&", True)):
        parts = _parted(tokens, mark)
        if len(parts) > 1:
            results = [condition(part) for part in parts]
            if (not empty) in results:
                return not empty
            return None if None in results else empty
    if len(tokens) > 1 and tokens[0].text == "!":
        inner = condition(tokens[1:])
        return None if inner is None else not inner
    if len(tokens) > 2 and tokens[0].text == "(" and tokens[-1].text == ")":
        return condition(tokens[1:-1])
    return _single(tokens)


def _parted(tokens: Sequence[Token], mark: str) -> list[Sequence[Token]]:
    """Cut words at a mark, `-o` and `-a` being the old names of the two."""
    names = {mark, {"||": "-o", "&&": "-a"}[mark]}
    parts: list[Sequence[Token]] = []
    depth = begin = 0
    for at, token in enumerate(tokens):
        depth += (token.text == "(") - (token.text == ")")
        if token.text in names and not depth and begin < at < len(tokens) - 1:
            parts.append(tokens[begin:at])
            begin = at + 1
    return [*parts, tokens[begin:]]


def _single(tokens: Sequence[Token]) -> bool | None:
    texts = [token.plain.text for token in tokens]
    if len(tokens) == 1:
        return _filled(tokens[0])
    if len(tokens) == 2 and texts[0] in ("-n", "-z", "-v"):
        filled = _filled(tokens[1])
        return None if filled is None or texts[0] == "-v" else filled == (texts[0] == "-n")
    if len(tokens) != 3 or any(token.unknown and not token.no_argument for token in tokens):
        return None
    left, how, right = texts
    if how in ("=", "==", "!="):
        if any(letter in right for letter in "*?[") and len(right) > 64:
            return None
        return fnmatch.fnmatchcase(left, right) == (how != "!=")
    if how in _NUMBERS:
        number = arithmetic(f"{left}{_NUMBERS[how]}{right}", {})
        return None if number is None else bool(number)
    return None


def _filled(token: Token) -> bool | None:
    if token.unset:
        return False
    return bool(token.plain.text) or (None if token.unknown else False)


def status_of(holds: bool | None) -> Status:
    """How a test ends."""
    return "maybe" if holds is None else "yes" if holds else "no"


_ASSIGNED = re.compile(r"(?:-[ex]|--env=|--export=)?(?P<pairs>(?:[A-Za-z_]\w*,)*[A-Za-z_]\w*=.*)", re.DOTALL)


def assigned(tokens: Iterable[Token]) -> dict[str, Token]:
    """Variables that the words before a command set for it, by name, as the options of what runs it have them.

    Words of env and sudo; -e and --env of docker, --env of Apptainer and --export of srun with several between commas,
    -x of mpirun. A name alone is handed on as it is.
    """
    variables: dict[str, Token] = {}
    for token in tokens:
        if match := _ASSIGNED.fullmatch(token.text):
            at = match.start("pairs")
            for pair in re.split(r"(?<=,)(?=[A-Za-z_]\w*(?:=|,|$))", match["pairs"]):
                name, equals, value = pair.removesuffix(",").partition("=")
                begin = at + len(name) + 1
                if equals:
                    variables[name] = Token(value, token.positions[begin : begin + len(value)], token.unknown)
                at += len(pair)
    return variables


_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|' + MARK)


def written_document(path: Path, text: str, name: str, content: Token) -> Document:
    """Return what a script writes to a file; `path` and `text` are the script's own.

    A value that only a run can tell is unknown, and an edit of a value goes where it stands in the script.
    """
    kind = kind_of(Path(name), content.text)
    body = _quoted(content) if kind in ("json", "toml") else content
    inner = parse_document(Path(f"{path.name}: {Path(name).name}"), body.text, kind)
    unknown: dict[KeyPath, str] = {}
    data = _known(inner.data, (), unknown, content.unknown)
    return Document(path, kind, text, data, lambda: _moved(inner.spans, body.positions), unknown, part=True)


def _quoted(token: Token) -> Token:
    """Put quotes around the marks of unknown parts that have none: JSON and TOML need them."""
    if MARK not in token.text:
        return token
    text, positions, at = list[str](), list[int](), 0
    for match in _QUOTED.finditer(token.text):
        if match[0] == MARK:
            text += [token.text[at : match.start()], f'"{MARK}"']
            positions += [*token.positions[at : match.start()], -1, -1, -1]
            at = match.end()
    return replace(token, text="".join([*text, token.text[at:]]), positions=(*positions, *token.positions[at:]))


def _known(data: Any, key_path: KeyPath, unknown: dict[KeyPath, str], name: str) -> Any:
    """The data without what is not known, whose places are noted."""
    if isinstance(data, dict):
        inner = {key: _known(value, (*key_path, key), unknown, name) for key, value in data.items()}
        return {key: value for key, value in inner.items() if (*key_path, key) not in unknown}
    if isinstance(data, str) and MARK in data:
        unknown[key_path] = name
    return data


def _moved(spans: dict[KeyPath, Span], positions: tuple[int, ...]) -> dict[KeyPath, Span]:
    """Spans in the script of values in what it writes; begin is -1 where a value is not written in one piece."""
    moved: dict[KeyPath, Span] = {}
    for key_path, span in spans.items():
        inner = positions[span.begin : span.end]
        contiguous = bool(inner) and inner[0] >= 0 and inner == tuple(range(inner[0], inner[0] + len(inner)))
        key = positions[span.key] if span.key < len(positions) else -1
        moved[key_path] = Span(max(key, 0), *((inner[0], inner[-1] + 1) if contiguous else (-1, -1)))
    return moved
