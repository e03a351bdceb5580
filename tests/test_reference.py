"""The reference of records and words says what the program has: every field and every keyword, with its type.

Run as a script, this file writes the tables of docs/reference and docs/python.md anew from the records and the options.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from memcalc import results
from memcalc.specs.block import Attention, Block, LatentAttention, MixtureOfExperts, Mlp, Norm
from memcalc.specs.calibration import Calibration
from memcalc.specs.hardware import GPU, Node
from memcalc.specs.job import Sweep
from memcalc.specs.model import Model
from memcalc.specs.options import CHOICES, COMMAND_LINE, FIELDS, FLAGS, NUMBERS, SEARCHED, WORDS
from memcalc.specs.strategy import Strategy
from memcalc.specs.strict import Option

Record = type[BaseModel]
DOCS = Path(__file__).resolve().parents[1] / "docs"
ANSWERS, INPUTS, KEYWORDS = DOCS / "reference" / "answers.md", DOCS / "reference" / "inputs.md", DOCS / "python.md"
TABLES = re.compile(r"(<!-- records -->\n|<!-- words -->\n|<!-- settings -->\n).*?(<!-- end -->)", re.DOTALL)
VALUES = {
    "flag": "true, false",
    "count": "a whole number",
    "bytes": "a size, such as `64 MiB`",
    "fraction": "a number from 0 to below 1",
    "factor": "a number from 1",
    "version": "a version, such as `0.43`",
    "targets": "layers, as in `q,k,v,o`",
}
"""What each kind of field takes, where it is none of a few names."""
FIRST = ("memcalc.estimate/1", "memcalc.plan/1")
GIVEN = (Strategy, Model, GPU, Node, Calibration, Sweep)
"""What a user can hand over as a record or as a file."""


def schema_of(record: Record) -> str:
    """Return the schema that an answer names, or all of them; empty for a record that is a part of one."""
    field = record.model_fields.get("schema_")
    return ", ".join(get_args(field.annotation)) if field else ""


def answers() -> list[Record]:
    """Return the records that name a schema: estimate and plan, then by name."""
    modules = [import_module(info.name) for info in pkgutil.iter_modules(results.__path__, "memcalc.results.")]
    found = {thing for module in modules for thing in vars(module).values() if is_record(thing) and schema_of(thing)}
    return sorted(found, key=lambda record: ((*FIRST, schema_of(record)).index(schema_of(record)), schema_of(record)))


def is_record(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, BaseModel)


def with_parts(records: Iterable[Record], left_out: frozenset[Record] = frozenset()) -> list[Record]:
    """Return records, each followed by those that its fields are made of."""
    found: list[Record] = []
    for record in records:
        if record not in left_out and record not in found:
            found.append(record)
            within = [part for field in record.model_fields.values() for part in records_in(field.annotation)]
            found += [part for part in with_parts(within, left_out | {*found}) if part not in found]
    return found


def records_in(annotation: Any) -> list[Record]:
    if is_record(annotation):
        return [annotation]
    return [record for part in get_args(annotation) for record in records_in(part)]


@cache
def places() -> dict[Record, Path]:
    """Return the page that has each record."""
    inputs = with_parts(GIVEN)
    return dict.fromkeys(inputs, INPUTS) | dict.fromkeys(with_parts(answers(), frozenset(inputs)), ANSWERS)


def said(annotation: Any, page: Path) -> str:
    """Return a type in words, with a link to each record.

    >>> said(tuple[int, ...] | None, ANSWERS)
    'tuple of int, or None'
    >>> said(Literal["fits", "tight"], ANSWERS)
    '`"fits"` or `"tight"`'
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return said(inner[0], page)
    if origin is Literal:
        return " or ".join(f'`"{value}"`' if isinstance(value, str) else f"`{value}`" for value in inner)
    if origin in {Union, UnionType}:
        names = [said(part, page) for part in inner if part is not NoneType]
        return " or ".join(names) + (", or None" if NoneType in inner else "")
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"({', '.join(said(part, page) for part in inner)})"
    if origin in {tuple, frozenset}:
        return f"{origin.__name__} of {said(inner[0], page)}"
    if inner:
        return f"dict of {said(inner[0], page)} to {said(inner[1], page)}"
    if is_record(annotation):
        place = places()[annotation]
        return f"[{annotation.__name__}]({'' if place == page else place.name}#{annotation.__name__.lower()})"
    return "any" if annotation is Any else str(annotation.__name__)


@cache
def meanings(record: Record) -> dict[str, str]:
    """Return what each field's option says, or the docstring below it in the source, of the class and its bases."""
    parts = [(name, part) for name, field in record.model_fields.items() for part in field.metadata]
    found = {name: with_unit(part) for name, part in parts if isinstance(part, Option)}
    for base in reversed(record.__mro__):
        if is_record(base) and base.__module__.startswith("memcalc."):
            body = ast.parse(inspect.getsource(base)).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, text in zip(body.body, body.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return found


@cache
def of_models() -> dict[str, str]:
    """Return the meanings of a model's fields by name, which are those of the same name in its flat form."""
    records = (Norm, LatentAttention, Mlp, MixtureOfExperts, Attention, Block, Model)
    return {name: text for record in records for name, text in meanings(record).items()}


def with_unit(option: Option) -> str:
    """Return an option's meaning, with its unit where the sentence does not name it."""
    return option.meaning if option.unit.lower() in option.meaning.lower() else f"{option.meaning} [{option.unit}]"


def prose(text: str) -> str:
    """Return a docstring's text as Markdown in one line."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?([^`]+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def table(record: Record, page: Path) -> str:
    """Return a record's heading, what it is, and its fields."""
    schemas = " or ".join(f"`{name}`" for name in schema_of(record).split(", ") if name)
    level = "##" if schemas or record in GIVEN else "###"
    about = (inspect.getdoc(record) or "").split("\n\n")
    lines = [
        f"{level} {record.__name__}", "",
        f"`{record.__module__}.{record.__name__}`{', schema ' if schemas else ''}{schemas}", "",
        "\n\n".join(map(prose, about)), "",
        "| field | type | meaning |", "| --- | --- | --- |",
    ]  # fmt: skip
    for name, field in record.model_fields.items():
        key = field.alias or name
        same = of_models().get(name, "") if record.__module__ == "memcalc.specs.flat" else ""
        meaning = prose(meanings(record).get(name, same))
        lines.append(f"| `{key}` | {said(field.annotation, page)} | {meaning} |")
    return "\n".join([*lines, "", ""])


def words() -> str:
    """Return the table of keywords that estimate, plan and the others take."""
    lines = ["| word | type | value | several |", "| --- | --- | --- | --- |"]
    for option in COMMAND_LINE:
        if option.name in WORDS:
            kind = "int" if option.name in NUMBERS else "bool" if option.name in FLAGS else "str"
            kind = "float" if option.kind == "factor" else kind
            kind = {"zero": "int", "global_batch": "int or str", "offload": "str or tuple"}.get(option.name, kind)
            several = "yes" if option.name in SEARCHED else ""
            lines.append(f"| `{option.name}` | {kind} | {prose(option.text)} | {several} |")
    return "\n".join([*lines, ""])


def settings() -> str:
    """Return the table of fields that `--set` alone takes."""
    lines = ["| field | value | meaning |", "| --- | --- | --- |"]
    for key, option in FIELDS.items():
        value = ", ".join(f"`{name}`" for name in option.values) or VALUES[option.kind]
        lines.append(f"| `{key}` | {value} | {prose(with_unit(option))} |")
    return "\n".join([*lines, ""])


def filled(path: Path) -> str:
    """Return a page with its tables written anew."""
    makers = {"words": words, "settings": settings, "records": lambda: records(path)}
    return TABLES.sub(
        lambda match: match[1] + makers[match[1].split()[1]]() + match[2], path.read_text(encoding="utf-8")
    )


def records(path: Path) -> str:
    """Return the tables of the records that stand on a page."""
    return "".join(table(record, path) for record, place in places().items() if place == path)


@pytest.mark.parametrize("path", [ANSWERS, INPUTS, KEYWORDS], ids=lambda path: path.name)
def test_the_tables_are_current(path: Path) -> None:
    """`python tests/test_reference.py` writes them."""
    assert filled(path) == path.read_text(encoding="utf-8")


def test_every_answer_is_found_by_its_schema() -> None:
    """Those that the command line prints, and a saved plan."""
    schemas = {name for record in answers() for name in schema_of(record).split(", ")}
    printed = {"estimate", "plan", "max", "min", "check", "sweep", "validate", "probe", "calibrate", "triage"}
    assert schemas >= {f"memcalc.{name}/1" for name in printed} | {"memcalc.saved-plan/2"}


@pytest.mark.parametrize("record", [record for record, page in places().items() if page == ANSWERS])
def test_every_field_of_an_answer_is_explained(record: Record) -> None:
    """With its unit, where it has one and the record does not say it for all."""
    assert [name for name in record.model_fields if not meanings(record).get(name)] == []


def test_the_table_has_every_word() -> None:
    """A keyword that the library takes is an option of the command line."""
    assert {option.name for option in COMMAND_LINE} >= set(WORDS)


@pytest.mark.parametrize("name", CHOICES)
def test_a_word_tells_all_its_values(name: str) -> None:
    """The meaning of an option names each value that is taken."""
    told = next(option.text for option in COMMAND_LINE if option.name == name)
    assert [value for value in CHOICES[name] if not re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", told)] == []


if __name__ == "__main__":
    for page_path in (ANSWERS, INPUTS, KEYWORDS):
        page_path.write_text(filled(page_path), encoding="utf-8")
