"""Every formula documents itself in the same form, and what it documents is what it takes.

Run as a script, this file writes the tables of docs/formulas.md anew from the docstrings.
"""

import doctest
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from memcalc import formulas

SECTIONS = ("Parameters", "Returns", "Examples", "References")
UNITS = {"1", "bit", "bytes", "bytes/s", "tokens", "tokens/s", "FLOP", "FLOP/s", "s"}
SELF_EVIDENT = {
    "linear_parameters",
    "mlp_bias_parameters",
    "qkv_bias_parameters",
    "norm_parameters",
    "embedding_parameters",
    "slower",
}
"""Counts that follow from the shapes alone and need no source."""


def formula_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions of memcalc.formulas that map numbers or columns to one."""
    for info in pkgutil.iter_modules(formulas.__path__, "memcalc.formulas."):
        module = import_module(info.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            own = function.__module__ == module.__name__ and not name.startswith("_")
            if own and function.__annotations__.get("return") == "Number":
                yield f"{info.name.rpartition('.')[2]}.{name}", function


FORMULAS = dict(formula_functions())


def section(function: Callable[..., Any], title: str) -> str:
    """Return the text below a heading of the docstring, up to the next heading."""
    doc = inspect.getdoc(function) or ""
    match = re.search(rf"^{title}\n-+\n(.*?)(?=^\w+\n---|\Z)", doc, re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else ""


def documented(function: Callable[..., Any]) -> list[tuple[str, str]]:
    """Return the names under Parameters, in their order, each with its unit ('' where none stands)."""
    found = []
    for entry in re.split(r"\n(?=\S)", section(function, "Parameters")):
        names, _, meaning = entry.partition(" : ")
        unit = re.search(r"\[([^\]]+)\]$", meaning.strip())
        found += [(name.strip(), unit[1] if unit else "") for name in names.split(",")]
    return found


def test_formulas_are_found() -> None:
    """The search above reaches every formula module."""
    modules = {name.partition(".")[0] for name in FORMULAS}
    assert modules >= {
        "activations", "bubbles", "communication", "flops", "gradients", "offload", "optimizer", "parameters",
        "pipeline",
    }  # fmt: skip
    assert len(FORMULAS) > 50


@pytest.mark.parametrize("name", FORMULAS)
def test_names_equal_the_signature(name: str) -> None:
    expected = list(inspect.signature(FORMULAS[name]).parameters)
    assert [parameter for parameter, _ in documented(FORMULAS[name])] == expected


@pytest.mark.parametrize("name", FORMULAS)
def test_each_quantity_has_a_known_unit(name: str) -> None:
    assert {unit for _, unit in documented(FORMULAS[name])} <= UNITS
    result = re.search(r"(?:\[([^\]]+)\]|in the unit of \w+, \[1\])$", section(FORMULAS[name], "Returns"))
    assert result
    assert (result[1] or "1") in UNITS


@pytest.mark.parametrize("name", FORMULAS)
def test_the_formula_stands_in_the_docstring(name: str) -> None:
    assert ".. math::" in (FORMULAS[name].__doc__ or "")


@pytest.mark.parametrize("name", FORMULAS)
def test_an_example_runs_the_function(name: str) -> None:
    assert f"{name.partition('.')[2]}(" in section(FORMULAS[name], "Examples")


@pytest.mark.parametrize("name", [name for name in FORMULAS if name.partition(".")[2] not in SELF_EVIDENT])
def test_a_numbered_source_can_be_looked_up(name: str) -> None:
    sources = section(FORMULAS[name], "References")
    assert sources.startswith("[1] ")
    for source in re.split(r"\n(?=\[\d+\])", sources):
        assert re.search(r"arXiv:\d{4}\.\d{5}|doi:10\.|@\w|\.io/|PyTorch \d", source), source


@pytest.mark.parametrize("name", FORMULAS)
def test_sections_stand_in_order(name: str) -> None:
    doc = inspect.getdoc(FORMULAS[name]) or ""
    places = [doc.find(f"\n{title}\n---") for title in SECTIONS if f"\n{title}\n---" in doc]
    assert places == sorted(places)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_short(name: str) -> None:
    """A formula is one to five lines, and never a loop over values."""
    lines = inspect.getsource(FORMULAS[name]).split('"""')[-1].strip().splitlines()
    assert len(lines) <= 6
    assert "np.vectorize" not in "".join(lines)
    assert not any(line.lstrip().startswith(("for ", "while ")) for line in lines)


PAGE = Path(__file__).parent.parent / "docs" / "formulas.md"


def row(name: str) -> str:
    """Return one formula's row: name, formula, what its symbols are, sources."""
    doc = inspect.getdoc(FORMULAS[name]) or ""
    math = " ".join(
        line.strip() for line in re.findall(r"^\.\. math:: (.*(?:\n +.*)*)", doc, re.MULTILINE)[0].splitlines()
    )
    entries = re.split(r"\n(?=\S)", section(FORMULAS[name], "Parameters") + "\n" + section(FORMULAS[name], "Returns"))
    symbols = "; ".join(re.sub(r"^([\w, ]+) : ", r"`\1` ", " ".join(entry.split())) for entry in entries)
    sources = " ".join(section(FORMULAS[name], "References").split()) or "follows from the shapes"
    return f"| `{name.partition('.')[2]}` | $`{math}`$ | {symbols} | {sources} |"


def table(module: str) -> str:
    """Return the table of one module's formulas in the order of the source."""
    names = [name for name in FORMULAS if name.startswith(f"{module}.")]
    names.sort(key=lambda name: FORMULAS[name].__code__.co_firstlineno)
    return "\n".join(["| function | formula | symbols | source |", "| --- | --- | --- | --- |", *map(row, names)])


def filled(page: str) -> str:
    """Return the page with each table between its two comments written anew."""
    return re.sub(
        r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{table(match[2])}\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


def test_the_page_of_formulas_is_current() -> None:
    """docs/formulas.md says what the docstrings say; `python tests/test_docstrings.py` writes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page


def test_the_page_has_every_formula() -> None:
    modules = re.findall(r"<!-- table: (\w+) -->", PAGE.read_text(encoding="utf-8"))
    assert sorted(modules) == sorted({name.partition(".")[0] for name in FORMULAS})


def test_the_examples_of_the_page_run() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert results.attempted > 10
    assert not results.failed


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
