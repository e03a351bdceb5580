"""Imports point down the list of layers, never up or in a circle, and each outside library has one home."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "memcalc"
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """Return a module's syntax."""
    return ast.parse(path.read_text(encoding="utf-8"))


def layers() -> list[str]:
    """Return the layers, highest first, from the table of docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("\n## Layers\n")[2].partition("\n## ")[0]
    cells = re.findall(r"(?m)^\| (`.*?) \|", table)
    return ["__main__", *(name for cell in cells for name in re.findall(r"`(\w+)`", cell))]


LAYERS = layers()

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
    "uvicorn": {"ui"},
}
"""The only layers that may import each of these, at top level or inside a function."""

ONLY_LATE = {"torch", "transformers", "peft", "lightning", "prometheus_client", "scipy", "matplotlib", "uvicorn"}
LIVE = PACKAGE / "probe" / "live"
"""Modules that are about torch throughout, which may import it at their top: others import them inside functions."""

NOWHERE = {"requests", "pandas"}
"""Libraries that the package must do without."""


def name_of(path: Path) -> str:
    """Return a module's dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in MODULES}


def layer_of(module: str) -> str:
    """Return the layer of a module; the package itself is the layer of the public names."""
    return module.split(".")[1] if "." in module else module


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the dotted names of all that the statements import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def modules_used(module: str) -> set[str]:
    """Return the modules of the package that one imports anywhere, or names in a text to be imported later."""
    nodes = list(ast.walk(tree(PATHS[module])))
    texts = {
        node.value.partition(":")[0] for node in nodes if isinstance(node, ast.Constant) and type(node.value) is str
    }
    used = imported(nodes) | (texts & PATHS.keys() - {"memcalc"})
    own = {name if name in PATHS else name.rpartition(".")[0] for name in used}
    return (own & PATHS.keys()) - {module}


@pytest.mark.parametrize("module", PATHS)
def test_imports_point_down(module: str) -> None:
    """Late imports in a function, and those for types only, count as any other."""
    layer = layer_of(module)
    assert layer in LAYERS, f"give {layer} its row in docs/architecture.md"
    height = LAYERS.index(layer)
    upward = {used for used in modules_used(module) if LAYERS.index(layer_of(used)) < height}
    assert not upward, f"{module} imports from above: {sorted(upward)}"


def test_the_table_names_what_there_is() -> None:
    there = {layer_of(module) for module in PATHS}
    assert sorted(LAYERS) == sorted(there)


def test_no_module_imports_itself_by_a_detour() -> None:
    try:
        TopologicalSorter({module: modules_used(module) for module in PATHS}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_outside_libraries_stay_at_home(path: Path) -> None:
    used = {name.split(".")[0] for name in imported(ast.walk(tree(path)))}
    strangers = {name for name in used if name in HOMES and layer_of(name_of(path)) not in HOMES[name]}
    assert not strangers | (used & NOWHERE)
    if LIVE not in path.parents:
        above = imported(tree(path).body)
        assert not {name.split(".")[0] for name in above} & ONLY_LATE, "extras are imported inside functions"
        assert not any(name.startswith("memcalc.probe.live") for name in above), "so is what imports torch at its top"
