"""The how-tos for contributors show diffs that were made: each line that they add stands in the file that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "howto").glob("add-*.md"))
DIFF = re.compile(r"^```diff\n--- a/(?P<file>\S+)\n\+\+\+ b/(?P=file)\n(?P<lines>.*?)^```$", re.MULTILINE | re.DOTALL)
DIFFS = [(page.name, match["file"], match["lines"]) for page in PAGES for match in DIFF.finditer(page.read_text())]


def missing(lines: str, text: str) -> list[str]:
    """Return the lines of a diff, without their first sign, that do not stand in a text in this order."""
    rest = iter(text.splitlines())
    return [line for line in lines.splitlines() if line[1:] not in rest]


@pytest.mark.parametrize(("page", "file", "lines"), DIFFS, ids=[f"{page}:{file}" for page, file, _ in DIFFS])
def test_what_a_diff_adds_is_there(page: str, file: str, lines: str) -> None:
    assert missing(lines, (ROOT / file).read_text(encoding="utf-8")) == [], page


def test_each_kind_of_addition_has_its_diff() -> None:
    pages = {page for page, _, _ in DIFFS}
    assert {f"add-{name}.md" for name in ("an-option", "an-optimizer", "an-era", "a-format", "a-family")} <= pages
    assert sum(page.read_text().count("```diff") for page in PAGES) == len(DIFFS), "a diff without its file's name"


def test_every_how_to_is_a_short_walk_from_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES if f"howto/{page.name}" not in text] == []


def test_a_line_that_is_gone_is_found() -> None:
    assert missing("+a\n+c\n b\n", "a\nb\nc") == [" b"]
