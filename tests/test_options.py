"""An option stands once: in the table, from which every other list is computed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from memcalc.api import single
from memcalc.cli.app import app
from memcalc.differences.changes import facts_of
from memcalc.planner.request import check_words
from memcalc.specs.options import BY_NAME, FIELDS, OPTIONS, SharedSettings
from memcalc.specs.strategy import Strategy

ROOT = Path(__file__).resolve().parents[1]
TABLE = {"specs/strict.py", "specs/options.py", "specs/strategy.py"}
CHOSEN = "which settings this workflow may change, or must leave: a decision of its own"
SHOWN = "which settings stand in a line or a table for people: a selection"
ORDINARY = "what a default, a batch or a format's own edit follows from: a relation, not a list of options"
ALLOWED = {
    "cli/registry.py": "the options that most people need, which --help shows",
    "report/ladder.py": "what a screen's title says already, or has no room for",
    "ui/page.py": "the controls that stand in front, and their labels",
    "ui/answers.py": "what a search decides, so that changing it alone starts none",
    "ui/fit.py": "what the button that makes a job fit may change",
    "cli/options.py": CHOSEN,
    "differences/changes.py": ORDINARY,
    "frameworks/deepspeed.py": "what the pipeline engine lacks",
    "grid.py": "the axes of the arrays",
    "handoff/round_trip.py": CHOSEN,
    "handoff/saved.py": CHOSEN,
    "convert/formats/fsdp2.py": "what the writer states",
    "convert/formats/swift_megatron.py": "what says a layout, and the keys that verl has for it",
    "planner/direct.py": "the axes of a search, and the options that say which parallelism there is",
    "planner/idle.py": "which options one reason makes useless: a relation between options",
    "planner/recipe.py": "the remedies that are tried, each with its value",
    "frameworks/capability.py": "which fields part the blocks unevenly, and the kinds of parallelism of a layout",
    "frameworks/needs.py": "what each kind of parallelism needs",
    "planner/as_is.py": "what a recorded module fixes",
    "specs/posttraining.py": "what trained models of post-training may be told beside their roles",
    "posttraining/search.py": "what a framework takes where a search decides nothing",
    "report/inverse.py": SHOWN,
    "report/plan.py": SHOWN,
    "report/plan_words.py": "what stays of a job whose strategy does not fit, and what is said without its name",
    "planner/images.py": "what is not modelled beside a vision tower",
    "preflight/merge.py": "what a trainer takes from FSDP's config alone",
    "handoff/role_scripts.py": "what TRL's and verl's own settings have nothing for",
    "probe/calibrate/rows.py": SHOWN,
    "report/page/__init__.py": SHOWN,
    "frameworks/habits.py": "parallelisms with a communicator of their own",
}
"""Files with lists of three or more options by name, each with the reason why the table does not hold it."""
VALUES: dict[str, list[tuple[Any, Any]]] = {
    "flag": [(True, True), ("false", False)],
    "count": [("3", 3)],
    "bytes": [("64 MiB", 64 * 2**20)],
    "fraction": [("0.25", 0.25)],
    "factor": [("1.5", 1.5)],
    "version": [("0.40", "0.40")],
    "targets": [("q,v", ("q", "v"))],
}


def lists(tree: ast.Module) -> Iterator[list[str]]:
    """Yield the strings of each literal list, tuple or set of nothing else, and the keys of each table of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = [part.value for part in node.elts if isinstance(part, ast.Constant)]
            if len(parts) == len(node.elts):
                yield [part for part in parts if isinstance(part, str)]
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Dict):
            keys = [key.value for key in statement.value.keys if isinstance(key, ast.Constant)]
            yield [key for key in keys if isinstance(key, str)]


def test_no_second_list_names_the_options() -> None:
    names = {name for option in OPTIONS for name in (option.name, option.key)} - {"", "model", "gpu", "node", "set"}
    found = set()
    for path in sorted((ROOT / "memcalc").rglob("*.py")):
        for strings in lists(ast.parse(path.read_text(encoding="utf-8"))):
            options = [text for text in strings if text in names]
            if len(options) >= 3 and 3 * len(options) >= 2 * len(strings):
                found.add(str(path.relative_to(ROOT / "memcalc")))
    assert found - TABLE == set(ALLOWED), "compute the list from memcalc.specs.options, or give the reason here"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.word or option.name)
def test_every_option_can_be_told_and_is_documented(option: Any) -> None:
    """On the command line or by `--set`; in the tables of docs/python.md; with a meaning."""
    group: Any = typer.main.get_command(app)
    flags = {name for part in group.commands["plan"].params for name in part.opts}
    assert (f"--{option.name.replace('_', '-')}" in flags) == bool(option.panel)
    assert bool(option.panel) != (option.key in FIELDS)
    assert option.meaning.strip().endswith((".", ")"))
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert f"`{option.word}`" in page or option.name == "set"  # whose fields have a table of their own


@pytest.mark.parametrize("option", FIELDS.values(), ids=lambda option: option.key)
def test_a_field_is_read_by_its_kind(option: Any) -> None:
    """What `--set` says reaches the settings that all strategies share, under the field's own name."""
    for value, expected in [(name, name) for name in option.values] or VALUES[option.kind]:
        read = check_words({}, {option.key: value}).given["fields"]
        shared = SharedSettings(seq_len=1, global_batch=1, **read)
        assert getattr(shared, option.name) == expected


def test_a_number_has_its_unit() -> None:
    counted = [option for option in OPTIONS if option.kind in ("count", "bytes", "fraction", "batch")]
    assert [option.name for option in counted if not option.unit] == []


def test_a_difference_is_looked_for_in_every_option() -> None:
    facts = facts_of(single(model="gpt2", gpu="a100-80g"))
    told = {option.name for option in OPTIONS} - {"set"}
    assert told <= set(facts)


def test_the_defaults_are_those_of_the_records() -> None:
    """The table repeats none: a strategy made of nothing has them."""
    strategy = Strategy()
    for name in Strategy.model_fields:
        if name in BY_NAME:
            assert getattr(strategy, name) == BY_NAME[name].default
