"""An edit of a config changes what it is asked to and nothing else: other values, comments and lines stay."""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from drawing import drawn
from hypothesis import given
from hypothesis import strategies as st

from memcalc.convert.argument_source import flag_document
from memcalc.convert.document import Document, KeyPath, parse_document
from memcalc.convert.edits import edit_document, edit_parts
from memcalc.convert.shell import read_script
from memcalc.errors import CombinationError

KEYS = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(
    lambda key: key not in {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
)
SCALARS = st.one_of(
    st.integers(-(10**6), 10**12),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=12),
    st.sampled_from(["a: b", "1e-5", "no", "0x1f", "x # y", "a, b", "- x", "", "{", "it's", 'say "so"', "*a", "&b"]),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
TABLES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=4),
    lambda inner: st.dictionaries(KEYS, st.one_of(VALUES, inner), max_size=4),
    max_leaves=12,
)


def of(kind: str, text: str, name: str = "c") -> Document:
    return parse_document(Path(f"{name}.{kind}"), text, kind)  # type: ignore[arg-type]


def tables(data: dict[str, Any], at: KeyPath = ()) -> list[KeyPath]:
    return [at, *(one for key, value in data.items() if isinstance(value, dict) for one in tables(value, (*at, key)))]


def leaves(data: dict[str, Any], at: KeyPath = ()) -> list[KeyPath]:
    found = [(*at, key) for key, value in data.items() if not isinstance(value, dict)]
    return found + [one for key, value in data.items() if isinstance(value, dict) for one in leaves(value, (*at, key))]


def value_at(data: Any, place: KeyPath) -> Any:
    for key in place:
        data = data[key]
    return data


def put(data: dict[str, Any], place: KeyPath, value: Any) -> None:
    for key in place[:-1]:
        data = data.setdefault(key, {})
    if value is None:
        data.pop(place[-1], None)
    else:
        data[place[-1]] = value


@st.composite
def changes(draw: st.DrawFn, data: dict[str, Any]) -> dict[KeyPath, Any]:
    found: dict[KeyPath, Any] = {}
    for place in draw(st.lists(st.sampled_from(leaves(data)), max_size=3, unique=True)) if leaves(data) else []:
        found[place] = draw(st.one_of(st.none(), SCALARS))
    for table in draw(st.lists(st.sampled_from(tables(data)), max_size=2, unique=True)):
        key = draw(KEYS)
        taken = value_at(data, table)
        if key not in taken:
            below = draw(st.lists(KEYS, max_size=2))
            found[(*table, key, *below)] = draw(SCALARS)
    return found


def wanted_after(data: dict[str, Any], wanted: dict[KeyPath, Any]) -> dict[str, Any]:
    after: dict[str, Any] = json.loads(json.dumps(data))
    for place, value in wanted.items():
        put(after, place, value)
    return after


def lost(before: str, after: str) -> list[str]:
    """Lines of the old text that the new one does not have."""
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line[2:] for line in lines if line.startswith("- ")]


@given(st.data(), TABLES, st.sampled_from([None, 2, 4, "\t"]), st.booleans())
@drawn(80)
def test_json(data: st.DataObject, table: dict[str, Any], indent: Any, windows: bool) -> None:
    text = json.dumps(table, indent=indent)
    text = text.replace("\n", "\r\n") if windows else text
    wanted = data.draw(changes(table))
    after = edit_document(of("json", text), wanted)
    assert json.loads(after) == wanted_after(table, wanted)
    if indent is not None:
        # for each change the lines of its value, the one before it for its comma, and what an emptied table closes up
        olds = [value_at(table, place) for place in wanted if place in of("json", text).spans]
        lines = sum(len(json.dumps(old, indent=1).splitlines()) + 2 for old in olds)
        assert len(lost(text, after)) <= lines + 2 * len(wanted)


def commented(text: str) -> str:
    """Put a comment behind each key that has a table or a list, and one before every third key."""
    rows = [f"{row}  # {len(row)}" if row.endswith(":") else row for row in text.splitlines()]
    keys = [number % 3 == 0 and re.match(r" *[a-z_]+:", row) for number, row in enumerate(rows)]
    return "\n".join(f"# {number}\n{row}" if keys[number] else row for number, row in enumerate(rows)) + "\n"


@given(st.data(), TABLES, st.booleans(), st.booleans())
@drawn(80)
def test_yaml(data: st.DataObject, table: dict[str, Any], comments: bool, ended: bool) -> None:
    text = yaml.safe_dump(table, sort_keys=False, width=1000, allow_unicode=True)
    text = commented(text) if comments else text
    text = text if ended else text.rstrip("\n")
    document = of("yaml", text)
    assert document.data == table
    wanted = data.draw(changes(table))
    after = edit_document(document, wanted)
    assert yaml.safe_load(after) == wanted_after(table, wanted)
    if None not in wanted.values():
        kept = set(after.splitlines())
        assert all(line in kept for line in text.splitlines() if line.startswith("# "))


@given(st.data(), st.dictionaries(KEYS, st.dictionaries(KEYS, SCALARS, max_size=4), max_size=4), st.booleans())
@drawn(60)
def test_toml(data: st.DataObject, table: dict[str, Any], windows: bool) -> None:
    tomlkit = pytest.importorskip("tomlkit", reason="pip install tomlkit")
    text = "".join(
        f"[{name}]  # {name}\n"
        + "".join(f"{key} = {tomlkit.item(value).as_string()}  # {key}\n" for key, value in inner.items())
        + "\n"
        for name, inner in table.items()
    )
    text = text.replace("\n", "\r\n") if windows else text
    document = of("toml", text)
    wanted = {place: value for place, value in data.draw(changes(table)).items() if len(place) > 1}
    after = edit_document(document, wanted)
    assert of("toml", after).data == wanted_after(table, wanted)
    kept = [f"{key} =" for place, value in wanted.items() for key in place[-1:] if place in document.spans]
    assert all(any(line.lstrip().startswith(one) for one in kept) for line in lost(text, after) if line.strip())


@pytest.mark.parametrize(
    ("kind", "text", "wanted", "expected"),
    [
        ("json", '{\n  "a": 1\n}\n', {("a",): None}, "{}\n"),
        ("json", "{}", {("z", "s"): 3}, '{"z": {"s": 3}}'),
        ("json", '{"a": {}}', {("a", "b"): True, ("a", "c"): 2}, '{"a": {"b": true, "c": 2}}'),
        ("json", '{\r\n\t"a": 1\r\n}', {("b",): "x"}, '{\r\n\t"a": 1,\r\n\t"b": "x"\r\n}'),
        ("json", '{\n "a": 1, "b": 2\n}', {("c",): 3}, '{\n "a": 1, "b": 2, "c": 3\n}'),
        ("json", '{"a": null}', {("a", "b"): 1}, '{"a": {"b": 1}}'),
        ("yaml", "a: 1  # why\nb: 2\n", {("a",): 4}, "a: 4  # why\nb: 2\n"),
        ("yaml", "a: 1\nb: 2", {("c",): 3}, "a: 1\nb: 2\nc: 3\n"),
        ("yaml", "a: {x: 1, y: 2}  # c\n", {("a", "y"): None, ("a", "z"): 3}, "a: {x: 1, z: 3}  # c\n"),
        ("yaml", "a:\n  x: 1\n# last\nb: 2\n", {("a", "y"): 2}, "a:\n  x: 1\n  y: 2\n# last\nb: 2\n"),
        ("yaml", "a:\n- 1\n- 2\nb: 3\n", {("a",): 5}, "a: 5\nb: 3\n"),
        ("yaml", "t: |\n  one\n  two\nb: 3\n", {("t",): "x"}, "t: x\nb: 3\n"),
        ("yaml", "t: |\n  one\nb: 3\n", {("b",): 4, ("c",): 5}, "t: |\n  one\nb: 4\nc: 5\n"),
        ("yaml", "a:\r\n  x: 1\r\nb: 2\r\n", {("a", "y"): 2}, "a:\r\n  x: 1\r\n  y: 2\r\nb: 2\r\n"),
        (
            "yaml",
            "a: &k {x: 1}\nb:\n  <<: *k\n  y: 2\n",
            {("b", "x"): 9},
            "a: &k {x: 1}\nb:\n  <<: *k\n  y: 2\n  x: 9\n",
        ),
        ("yaml", "a: # empty\nb: 2\n", {("a",): 1}, "a: 1 # empty\nb: 2\n"),
        ("yaml", "a:\nb: 2\n", {("a", "x"): 1}, "a: {x: 1}\nb: 2\n"),
        ("yaml", "l:\n- name: x\n  n: 1\n", {("l", 0, "n"): 2}, "l:\n- name: x\n  n: 2\n"),
        ("yaml", "", {("a", "b"): 1}, "a: {b: 1}\n"),
        ("yaml", "lr: 1e-4\n", {("lr",): 1e-05}, "lr: 1.0e-05\n"),
        ("toml", "a = 1 # c\nt = {x = 1, y = 2}\n", {("t", "y"): 3}, "a = 1 # c\nt = {x = 1, y = 3}\n"),
        ("toml", "t = {x = 1}\n", {("t", "y"): 3}, "t = {x = 1,y = 3}\n"),
        ("toml", "[a]\nx = 1\n\n[b]\ny = 2", {("a", "z"): True}, "[a]\nx = 1\nz = true\n\n[b]\ny = 2"),
        ("toml", "a.b = 1\n", {("a", "b"): 2}, "a.b = 2\n"),
    ],
)
def test_each_way_of_writing(kind: str, text: str, wanted: dict[KeyPath, Any], expected: str) -> None:
    assert edit_document(of(kind, text), wanted) == expected


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("yaml", "a: &k 1\nb: *k\n", {("a",): 2}),
        ("yaml", "a: &k 1\nb: *k\n", {("b",): 2}),
        ("yaml", "l:\n- name: x\n  n: 1\n", {("l", 0, "name"): None}),
        ("json", '{"a": 5}', {("a", "b"): 1}),
        ("json", '{"a": [1]}', {("a", "b"): 1}),
        ("yaml", "a: 5\n", {("a", "b"): 1}),
    ],
)
def test_what_has_no_place_of_its_own_is_refused(kind: str, text: str, wanted: dict[KeyPath, Any]) -> None:
    with pytest.raises(CombinationError):
        edit_document(of(kind, text), wanted)


# -------------------------------------------------------------------------------------------------------------- flags


def flags_of(text: str, *, pairs: bool = False) -> Document:
    command = read_script(text).commands[-1]
    return flag_document(Path("run.sh"), text, command.tokens[1:], pairs=pairs)


SCRIPT = """#!/bin/bash
MICRO=4   # sequences
ARGS=(
    --hidden-size 4096
    --bf16
)
python train.py "${ARGS[@]}" \\
    --micro-batch-size $MICRO \\
    --lr=1e-4 \\
    --name "a run" \\
    --seq-length 2048
"""


@pytest.mark.parametrize(
    ("wanted", "old", "new"),
    [
        ({("micro_batch_size",): 2}, "MICRO=4 ", "MICRO=2 "),
        ({("lr",): "2e-4"}, "--lr=1e-4", "--lr=2e-4"),
        ({("lr",): None}, "    --lr=1e-4 \\\n", ""),
        ({("seq_length",): None}, "    --seq-length 2048\n", "\n"),
        ({("name",): None}, '    --name "a run" \\\n', ""),
        ({("hidden_size",): 8192}, "4096", "8192"),
        ({("bf16",): None}, "    --bf16\n", "\n"),
        ({("recompute_granularity",): "full"}, "--seq-length 2048", "--seq-length 2048 --recompute-granularity full"),
        ({("seq_length",): 4096, ("micro_batch_size",): 1}, "", ""),
    ],
)
def test_flags_are_edited_where_they_were_written(wanted: dict[KeyPath, Any], old: str, new: str) -> None:
    after = edit_document(flags_of(SCRIPT), wanted)
    if old:
        assert after == SCRIPT.replace(old, new)
    expected = {**flags_of(SCRIPT).data, **{str(place[0]): str(value) for place, value in wanted.items()}}
    expected = {key: value for key, value in expected.items() if value != "None"}
    assert flags_of(after).data == expected


@pytest.mark.parametrize("place", ["micro_batch_size"])
def test_a_flag_apart_from_its_value_is_not_taken_away(place: str) -> None:
    with pytest.raises(CombinationError, match="put together"):
        edit_document(flags_of(SCRIPT), {(place,): None})


def test_two_documents_of_one_script_are_edited_together() -> None:
    text = "torchrun --nproc_per_node 8 t.py --a 1 --b 2\n"
    words = read_script(text).commands[0].tokens
    own = flag_document(Path("r.sh"), text, words[1:3])
    rest = flag_document(Path("r.sh"), text, words[4:])
    after = edit_parts([(own, {("nproc_per_node",): 4}), (rest, {("b",): 7})])
    assert after == "torchrun --nproc_per_node 4 t.py --a 1 --b 7\n"


@given(
    st.dictionaries(
        KEYS, st.one_of(st.just(True), st.from_regex(r"[a-z0-9.:/]{1,9}", fullmatch=True)), min_size=1, max_size=6
    ),
    st.data(),
    st.sampled_from([" ", " \\\n    ", " \\\r\n  "]),
    st.booleans(),
)
@drawn(60)
def test_flags(table: dict[str, Any], data: st.DataObject, between: str, equals: bool) -> None:
    sign = "=" if equals else " "
    text = "python t.py" + "".join(
        f"{between}--{key}" + ("" if value is True else f"{sign}{value}") for key, value in table.items()
    )
    document = flags_of(text + "\n")
    assert document.data == table
    key = data.draw(st.sampled_from(sorted(table)))
    value = data.draw(st.one_of(st.none(), st.from_regex(r"[a-z0-9 '$]{1,9}", fullmatch=True)))
    after = flags_of(edit_document(document, {(key,): value}))
    assert after.data == {name: one for name, one in {**table, key: value}.items() if one is not None}
