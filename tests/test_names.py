"""Names of values say what they hold: words that fit anything name nothing new.

tests/names.toml counts those left in each module, and only shrinks: `python tests/test_names.py` writes it anew
once some have gone, and refuses while there are more than before.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT = ROOT / "tests" / "names.toml"
VAGUE = frozenset(
    "said told asked found one place whole own kept held every room reading words".split()  # noqa: SIM905 - a sentence
)
"""A text, a match, an index, a total, a position and a saved tensor have names of their own."""


def assigned(tree: ast.AST) -> list[str]:
    """Return the names that are assigned, looped over or taken as parameters."""
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return [*names, *(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))]


def counted() -> dict[str, int]:
    """Return how many such names each module has, those without any left out."""
    counts = {}
    for path in sorted((ROOT / "memcalc").rglob("*.py")):
        vague = sum(name in VAGUE for name in assigned(ast.parse(path.read_text(encoding="utf-8"))))
        if vague:
            counts[path.relative_to(ROOT).as_posix()] = vague
    return counts


def test_names_say_what_they_hold() -> None:
    left, there = tomllib.loads(LEFT.read_text(encoding="utf-8")), counted()
    more = {path: count for path, count in there.items() if count > left.get(path, 0)}
    assert not more, f"none of {', '.join(sorted(VAGUE))} names a new value"
    assert left == there, "some have gone: python tests/test_names.py"


if __name__ == "__main__":
    now = counted()
    before = sum(tomllib.loads(LEFT.read_text(encoding="utf-8")).values()) if LEFT.exists() else None
    if before is not None and sum(now.values()) > before:
        sys.exit(f"{sum(now.values())} names where {before} are allowed")
    LEFT.write_text("".join(f'"{path}" = {count}\n' for path, count in now.items()), encoding="utf-8")
