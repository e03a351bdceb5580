"""The published fields of an answer: what docs/reference says of its JSON, read from the pages themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
PAGES = ("answers.md", "inputs.md", "runs.md")
_ROW = re.compile(r"\| `(\w+)` \| ((?:[^|`]|`[^`]*`)*?) \| (.*)")
UNWRITTEN = "not written"
"""What is said of a field that Python has and JSON has not."""
_LINK = re.compile(r"\[(\w+)\]\([^)]*\)")
SCALARS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}


@cache
def records() -> dict[str, dict[str, str]]:
    """The type of each field, by the name of its record."""
    found: dict[str, dict[str, str]] = {}
    for page in PAGES:
        for section in re.split(r"^#{2,4} ", (REFERENCE / page).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            rows = [match for line in section.splitlines() if (match := _ROW.match(line))]
            if rows:
                fields = {row[1]: row[2] for row in rows if UNWRITTEN not in row[3]}
                found.setdefault(section.split()[0], fields)
    return found


def departures(value: Any, kind: str, at: str = "") -> Iterator[str]:
    """Yield where a value of JSON is not what the pages say of its type."""
    if kind.endswith(", or None"):
        if value is None:
            return
        kind = kind.removesuffix(", or None")
    if kind.startswith("tuple of "):
        inside = kind.removeprefix("tuple of ")
        if not isinstance(value, list):
            yield f"{at} is no array: {value!r}"
            return
        for index, part in enumerate(value):
            yield from departures(part, inside, f"{at}[{index}]")
    elif kind.startswith("("):
        kinds = kind[1:-1].split(", ")
        if not isinstance(value, list) or len(value) != len(kinds):
            yield f"{at} is no {kind}: {value!r}"
            return
        for part, inside in zip(value, kinds, strict=True):
            yield from departures(part, inside, at)
    elif kind.startswith("dict of "):
        _, _, inside = kind.removeprefix("dict of ").partition(" to ")
        if not isinstance(value, dict):
            yield f"{at} is no object: {value!r}"
            return
        for name, part in value.items():
            yield from departures(part, inside, f"{at}.{name}")
    elif link := _LINK.fullmatch(kind):
        yield from _record(value, link[1], at)
    elif kind != "any" and not any(_is(value, one) for one in re.split(r" or ", kind)):
        yield f"{at} is {value!r}, and not {kind}"


def _record(value: Any, name: str, at: str) -> Iterator[str]:
    fields = records()[name]
    if not isinstance(value, dict):
        yield f"{at} is no object: {value!r}"
        return
    if value.keys() != fields.keys():
        yield f"{at} has other fields than {name}: {sorted(value.keys() ^ fields.keys())}"
    for field in value.keys() & fields.keys():
        yield from departures(value[field], fields[field], f"{at}.{field}")


def _is(value: Any, kind: str) -> bool:
    if kind in SCALARS:
        return isinstance(value, SCALARS[kind]) and (kind == "bool") == isinstance(value, bool)
    return kind in {f'`"{value}"`', f"`{value}`"}
