"""How many words of the documents are written by hand, page by page: `python tests/words.py`.

Counted is what a person wrote and a reader is meant to read: prose, headings, lists, and tables that are written by
hand, cell by cell, of every page of `docs`, of README.md and of CONTRIBUTING.md. A word is what stands between spaces
and has a letter or a digit.

Not counted are fenced blocks (commands, files, outputs: run by tests, and looked at rather than read), what a script
writes between two comments, the tables of a page that a script writes as a whole (its prose counts, since somebody
wrote it in the script), and the address of a link, of which the text counts. CHANGELOG.md is a record, not a page.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST = 45_000
"""Hand-written words in all."""
FENCED = re.compile(r"^ *(```+)[^\n]*\n.*?^ *\1 *$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(
    r"<!-- (?P<name>options|table|records|words|settings|contents|experts|errors|everyday|runs|outcomes|logs|left_out"
    r"|seven|vision|recipes|accuracy)\b[^\n]*-->\n.*?<!-- (?:end(?: of \w+)?|/everyday) -->",
    re.DOTALL,
)
"""Regions that a script writes anew; CONTRIBUTING.md says which script."""
WRITTEN_WHOLE = {"docs/accuracy.md", "docs/reference/runs.md"}
"""Pages that a script writes from the first line to the last."""
TABLE_ROW = re.compile(r"^ *\|[^\n]*\n?", re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->|</?\w[^<>]*>", re.DOTALL)
ADDRESS = re.compile(r"\]\([^)\s]*\)|\bhttps?://\S+")
WORD = re.compile(r"\S*\w\S*")


@dataclass(frozen=True)
class Count:
    """The words of one page: by hand, written by a script, and in fenced blocks."""

    page: str
    by_hand: int
    generated: int
    fenced: int


def count(page: str, text: str) -> Count:
    """Return the words of a page."""
    prose = FENCED.sub("", text)
    kept = GENERATED.sub("", prose)
    if page in WRITTEN_WHOLE:
        kept = TABLE_ROW.sub("", kept)
    by_hand = words(kept)
    return Count(page, by_hand, words(prose) - by_hand, len(WORD.findall(text)) - len(WORD.findall(prose)))


def words(text: str) -> int:
    """Return the number of words of a text, without comments and the addresses of its links."""
    return len(WORD.findall(ADDRESS.sub("]", COMMENT.sub("", text))))


def counts() -> list[Count]:
    """Return the words of every page, in the order of their names."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    named = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    return [count(page, text) for page, text in named]


if __name__ == "__main__":
    pages = counts()
    sums = (
        sum(numbers) for numbers in zip(*((page.by_hand, page.generated, page.fenced) for page in pages), strict=True)
    )
    rows = [*pages, Count(f"{len(pages)} pages, at most {MOST:,} by hand", *sums)]
    sys.stdout.write(f"{'page':42}{'by hand':>9}{'generated':>11}{'fenced':>9}\n")
    sys.stdout.writelines(f"{row.page:42}{row.by_hand:9,}{row.generated:11,}{row.fenced:9,}\n" for row in rows)
