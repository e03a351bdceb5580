"""What is read as a whole stays short: a function's body, and a module."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

PACKAGE = Path(__file__).resolve().parents[1] / "memcalc"
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
LONGEST_BODY, LONGEST_MODULE, MEDIAN = 50, 400, 6
"""Lines."""


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body, without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def bodies() -> dict[str, int]:
    """Return how long the body of each function is, by module and line."""
    return {
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}": body_lines(node)
        for path, text in TEXTS.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = bodies()
    assert [name for name, lines in lengths.items() if lines > LONGEST_BODY] == []
    assert median(lengths.values()) <= MEDIAN


def test_no_module_is_longer_than_is_read_at_once() -> None:
    long = {str(path.relative_to(PACKAGE)): text.count("\n") for path, text in TEXTS.items()}
    assert {name: lines for name, lines in long.items() if lines > LONGEST_MODULE} == {}
