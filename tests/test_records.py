"""What goes in and what comes out is explained where it is declared: each field of a public record has its meaning."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "memcalc"
FILES = sorted(
    path
    for part in ("specs", "results", "frameworks", "formulas", "grid.py", "ledger.py", "stages.py")
    for path in ((PACKAGE / part).glob("*.py") if not part.endswith(".py") else [PACKAGE / part])
)


ELSEWHERE = {
    field.target.id
    for name in ("model", "block", "mixers")
    for record in ast.parse((PACKAGE / "specs" / f"{name}.py").read_text(encoding="utf-8")).body
    if isinstance(record, ast.ClassDef)
    for field in record.body
    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
}
"""Fields of a model's records, which explain those of the same name in the flat form."""


def unexplained(tree: ast.Module) -> Iterator[str]:
    """Yield the fields of public classes that neither a docstring below them nor an option's annotation explains.

    ``schema_`` is explained by the base of all answers.
    """
    for record in ast.walk(tree):
        if not isinstance(record, ast.ClassDef) or record.name.startswith("_"):
            continue
        for field, after in zip(record.body, [*record.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or ast.unparse(field.target).startswith(("_", "schema_")):
                continue
            text = after.value if isinstance(after, ast.Expr) else None
            explained = isinstance(text, ast.Constant) and str(text.value).strip()
            if not explained and "Option(" not in ast.unparse(field.annotation):
                yield f"{record.name}.{ast.unparse(field.target)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_field_has_its_meaning(path: Path) -> None:
    left = unexplained(ast.parse(path.read_text(encoding="utf-8")))
    same = ELSEWHERE if path.name in {"flat.py", "flat_tables.py"} else set()
    assert [name for name in left if name.partition(".")[2] not in same] == []


def test_a_field_without_a_meaning_is_found() -> None:
    tree = ast.parse('class A:\n    x: int\n    y: int\n    """Of y."""\n    z: Annotated[int, Option("of z")] = 1\n')
    assert list(unexplained(tree)) == ["A.x"]
