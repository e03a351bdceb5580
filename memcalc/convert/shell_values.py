"""Words of a shell script, with the place of each character, the variables that hold them, and the bounds on both."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from memcalc.errors import FileError

__all__ = ["MARK", "State", "Value", "Word", "doubtful"]

LONGEST = 1 << 16
"""Characters of one value; a variable that doubles itself line after line ends here, as unknown."""
MOST_WORDS = 20_000
MOST_CHARACTERS = 1 << 21
"""Of all words together, variables put in."""
MARK = "\ue000"
"""Stands in a text for a part that only a run can tell; its place says which (:meth:`State.missing`)."""
_LISTS = re.compile(r"(^|_)(EXTRA|ARGS|ARGUMENTS|OPTS|OPTIONS|FLAGS|OVERRIDES)(_|$)", re.IGNORECASE)
"""Variables that a caller may fill with options; not set, they are none, as in the shell."""


@dataclass(frozen=True)
class Word:
    """One word of a command; `places` are those of its characters in the script, below 0 where it has none."""

    text: str
    places: tuple[int, ...] = ()
    unknown: str = ""
    """The name of the variable, or the text, that only a run could tell; empty where the word is known."""
    unset: bool = False
    """Unknown, and nothing but variables that the script does not set."""

    @property
    def span(self) -> tuple[int, int] | None:
        """Where it stands in one piece, or None where it was put together."""
        places = self.places
        if not places or any(after - before != 1 for before, after in itertools.pairwise(places)):
            return None
        return (places[0], places[-1] + 1) if places[0] >= 0 else None

    @property
    def no_argument(self) -> bool:
        """Whether it is an argument of the script, which has none."""
        return self.unset and self.unknown.startswith("$")

    @property
    def plain(self) -> Word:
        """It without the marks of unknown parts."""
        if MARK not in self.text:
            return self
        kept = [(letter, place) for letter, place in zip(self.text, self.places, strict=True) if letter != MARK]
        return replace(self, text="".join(letter for letter, _ in kept), places=tuple(place for _, place in kept))


def doubtful(word: Word, name: str) -> Word:
    """Return a word that is there only if a condition holds that a run decides."""
    return replace(word, unknown=word.unknown or name)


@dataclass
class State:
    """Variables, and what is left of the bounds."""

    name: str = "script"
    scalars: dict[str, Word] = field(default_factory=dict)
    arrays: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    arguments: tuple[Word, ...] | None = None
    """Of the function that is read; None in the script itself, whose own are not known."""
    words: int = MOST_WORDS
    characters: int = MOST_CHARACTERS
    missed: list[tuple[str, bool]] = field(default_factory=list)
    """What is not known, and whether that is a variable that the script does not set."""

    def missing(self, name: str, *, unset: bool = False) -> Word:
        """The word of something that only a run can tell."""
        self.missed.append((name, unset))
        return Word(MARK, (-1 - len(self.missed),), name, unset)

    def part(self, text: str, places: tuple[int, ...]) -> Word:
        """A word of characters and places, with what its marks say."""
        at = text.find(MARK)
        if at < 0:
            return Word(text, places)
        marks = [self.missed[-2 - place] for letter, place in zip(text, places, strict=True) if letter == MARK]
        return Word(text, places, marks[0][0], len(marks) == len(text) and all(unset for _, unset in marks))

    def spend(self, words: int, characters: int) -> None:
        """Count against the bounds."""
        self.words -= words
        self.characters -= characters
        if self.words < 0 or self.characters < 0:
            said = f"must be a script of at most {MOST_WORDS:,} words and {MOST_CHARACTERS:,} characters in them"
            raise FileError("file", self.name, f"{said}, its variables put in")


class Value:
    """A word while it is read: characters, places, and whether anything was quoted."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.text: list[str] = []
        self.places: list[int] = []
        self.quoted = False
        self.cuts: list[int] = []
        """Where an unquoted variable's blanks end a word."""

    def add(self, text: str, places: Iterable[int]) -> None:
        """Append characters with their places."""
        self.state.spend(0, len(text))
        self.text.extend(text)
        self.places.extend(places)
        if len(self.text) > LONGEST:
            self.text, self.places, self.cuts = [], [], []
            self.miss("a value of extraordinary length")

    def miss(self, name: str, *, unset: bool = False) -> None:
        """Note that a part is not known."""
        self.put(self.state.missing(name, unset=unset), quoted=True)

    def put(self, word: Word, *, quoted: bool) -> None:
        """Append the value of a variable."""
        begin = len(self.text)
        self.add(word.text, word.places or (-1,) * len(word.text))
        if word.unknown and MARK not in word.text:
            self.miss(word.unknown)
        if not quoted and len(self.text) > begin:
            self.cuts += [begin + at for at, letter in enumerate(word.text) if letter.isspace()]

    def word(self) -> Word:
        """All of it as one word."""
        return self.state.part("".join(self.text), tuple(self.places))

    def split(self) -> list[Word]:
        """The words of it: it is cut where an unquoted variable had blanks."""
        if not self.text:
            return [Word("")] if self.quoted else []
        whole = self.word()
        if whole.unset and not self.quoted and _LISTS.search(whole.unknown):
            return []
        cuts = sorted({at for at in self.cuts if at < len(whole.text)})
        if not cuts:
            return [whole]
        edges = [-1, *cuts, len(whole.text)]
        pieces = [(a + 1, b) for a, b in itertools.pairwise(edges) if b > a + 1]
        return [self.state.part(whole.text[a:b], whole.places[a:b]) for a, b in pieces]
