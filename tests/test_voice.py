"""Sentences that a reader meets are plain: phrases that have to be read twice stay out of strings and pages.

Docstrings are not looked at. A phrase that goes into the list is first taken out everywhere.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORN = (
    "the peak stands", "bytes stand", "what stands", "stands against", "stands alone", "stand alone", "byte by byte",
    "nothing to remark", "had it fitted", "measured run of twenty", "said to fit", "said not to fit", "on each gpu",
    "was told", "not told", "nobody says", "given back", "must stand", "stand once", "stops at its start",
    "are missing", "would do", "alone has it", "beside #1", "goes on from", "only a run tells",
)  # fmt: skip
"""Things do not stand, tell or say; a number is said as a number; one word for one thing."""
UNSAID = ("nothing to remark", "had it fitted", "said to fit", "said not to fit")
"""Those that no page of the documentation has."""


def told(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings of a module that are no docstrings."""
    bodies = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, bodies)]
    docs = {id(line.value) for node in nodes for line in node.body if isinstance(line, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


def worn(text: str, phrases: tuple[str, ...] = WORN) -> list[str]:
    """Return the phrases of a list that a text has."""
    spaced = " ".join(text.lower().split())
    has = (phrase for phrase in phrases if phrase in spaced)  # an expression is a hundred times slower
    return [phrase for phrase in has if re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", spaced)]


def test_strings_are_plain() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}": phrases
        for path in sorted((ROOT / "memcalc").rglob("*.py"))
        for node in told(ast.parse(path.read_text(encoding="utf-8")))
        if (phrases := worn(node.value))
    }
    assert found == {}


KEYED = (*WORN, "counted as", "shared out", "has its way", "counts for nothing", "as told", "stands beside")
"""Those that no file of keys has: what it says of a key is shown as a finding."""


def texts(value: object) -> Iterator[str]:
    """Yield the strings of a TOML document; keys are other people's words."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)


def test_files_of_keys_are_plain() -> None:
    paths = sorted((ROOT / "memcalc").rglob("*.toml"))
    found = {
        f"{path.relative_to(ROOT)}: {text}": phrases
        for path in paths
        for text in texts(tomllib.loads(path.read_text(encoding="utf-8")))
        if (phrases := worn(text, KEYED))
    }
    assert len(paths) > 20
    assert found == {}


def test_pages_are_plain() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {page.relative_to(ROOT).as_posix(): worn(page.read_text(encoding="utf-8"), UNSAID) for page in pages}
    assert {page: phrases for page, phrases in found.items() if phrases} == {}


def test_a_worn_phrase_is_seen() -> None:
    tree = ast.parse('"""The peak stands here."""\nx = f"{y}: the  peak\\nstands at {z}"\n')
    assert [worn(node.value) for node in told(tree) if worn(node.value)] == [["the peak stands"]]
