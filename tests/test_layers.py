"""Imports point down the list of layers, never up, and each outside library has one home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "memcalc"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")

LAYERS = [
    "errors",
    "files",
    "toml_text",
    "units",
    "specs",
    "results",
    "catalog",
    "calibrations",
    "frameworks",
    "formulas",
    "trace",
    "stages",
    "grid",
    "layouts",
    "sums",
    "ledger",
    "terms",
    "timing",
    "events",
    "allocator",
    "estimate",
    "planner",
    "api",
    "sweeps",
    "validation",
    "probe",
    "convert",
    "preflight",
    "handoff",
    "differences",
    "report",
    "cli",
    "__main__",
]
"""Lowest first; a module may import from its own layer and from those before it."""

HOMES = {
    "typer": {"cli"},
    "click": {"cli"},
    "rich": {"report"},
    "tabulate": {"report"},
    "matplotlib": {"report"},
    "torch": {"probe"},
    "distributed": {"sweeps"},
    "pyarrow": {"sweeps"},
    "yaml": {"convert"},
    "tomlkit": {"convert"},
    "scipy": {"probe"},
    "transformers": {"probe"},
    "peft": {"probe"},
    "lightning": {"probe"},
    "prometheus_client": {"probe"},
}
"""The only layers that may import each of these, at top level or inside a function."""

ONLY_LATE = {"torch", "transformers", "peft", "lightning", "prometheus_client", "scipy", "matplotlib"}
LIVE = PACKAGE / "probe" / "live"
"""Modules that are about torch throughout, which may import it at their top: others import them inside functions."""

NOWHERE = {"requests", "pandas"}
"""Libraries that the package must do without."""


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(nodes: list[ast.stmt] | Iterator[ast.AST]) -> set[str]:
    """Return the dotted names of all modules that the statements import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_top_level_imports_point_down(path: Path) -> None:
    """A late import in a function, or one for types only, may point anywhere."""
    layer = layer_of(path)
    assert layer in LAYERS, f"give {layer} its place in LAYERS, and in docs/architecture.md"
    names = imported(ast.parse(path.read_text(encoding="utf-8")).body)
    used = {name.split(".")[1] for name in names if name.startswith("memcalc.")} - {"__version__"}
    upward = {name for name in used if LAYERS.index(name) > LAYERS.index(layer)}
    assert not upward, f"{path.name} is in {layer} and imports from above: {sorted(upward)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_outside_libraries_stay_at_home(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {name.split(".")[0] for name in imported(ast.walk(tree))}
    strangers = {name for name in used if name in HOMES and layer_of(path) not in HOMES[name]}
    assert not strangers | (used & NOWHERE)
    if LIVE not in path.parents:
        above = imported(tree.body)
        assert not {name.split(".")[0] for name in above} & ONLY_LATE, "extras are imported inside functions"
        assert not any(name.startswith("memcalc.probe.live") for name in above), "so is what imports torch at its top"
