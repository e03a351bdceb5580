"""`memcalc.records` beside the standard library's dataclasses, whose behaviour is the truth."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from memcalc import records

Decorator = Callable[..., Any]


def classes(dataclass: Decorator) -> dict[str, Any]:
    """Return the same classes under either decorator: defaults, factories, inheritance, keywords alone, slots."""

    @dataclass(frozen=True)
    class Base:
        """A."""

        a: int
        b: list[int] = dataclasses.field(default_factory=list, compare=False)
        c: str = dataclasses.field(default="c", repr=False)

    @dataclass(frozen=True)
    class Child(Base):
        """B."""

        d: int = 0
        e: dict[str, int] = dataclasses.field(default_factory=dict, init=False, compare=False)
        f: int = dataclasses.field(default=7, kw_only=True)

    @dataclass
    class Open:
        """C."""

        a: int
        b: int = 2

        def __post_init__(self) -> None:
            self.b += self.a

    @dataclass(frozen=True, slots=True)
    class Slotted:
        """D."""

        a: int
        b: tuple[int, ...] = ()

    @dataclass(frozen=True, eq=False)
    class Same:
        """E."""

        a: int

    @dataclass(frozen=True)
    class Nothing:
        """F."""

    return {each.__name__: each for each in (Base, Child, Open, Slotted, Same, Nothing)}


OURS, THEIRS = classes(records.dataclass), classes(dataclasses.dataclass)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Base", (1,), {}),
    ("Base", (1, [2]), {"c": "d"}),
    ("Child", (1,), {"f": 3}),
    ("Child", (1, [1], "x", 4), {}),
    ("Open", (1,), {}),
    ("Open", (1, 5), {}),
    ("Slotted", (1, (2, 3)), {}),
    ("Slotted", (), {"a": 1}),
    ("Nothing", (), {}),
]


@pytest.mark.parametrize(("name", "args", "given"), CALLS)
def test_instances_look_and_compare_as_those_of_the_standard_library(name: str, args: Any, given: Any) -> None:
    ours, theirs = OURS[name](*args, **given), THEIRS[name](*args, **given)
    assert repr(ours) == repr(theirs)
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert ours == OURS[name](*args, **given)
    assert ours != theirs
    for other, there in zip(CALLS, CALLS, strict=True):
        assert (ours == OURS[other[0]](*other[1], **other[2])) == (theirs == THEIRS[there[0]](*there[1], **there[2]))
    if name == "Open":
        with pytest.raises(TypeError, match="unhashable"):
            hash(ours)
    else:
        assert hash(ours) == hash(theirs)


def test_replace_keeps_the_rest_and_runs_init_again() -> None:
    for name, change in (("Child", {"d": 9}), ("Open", {"a": 3}), ("Slotted", {"b": (4,)})):
        ours, theirs = (dataclasses.replace(kinds[name](1), **change) for kinds in (OURS, THEIRS))
        assert repr(ours) == repr(theirs)


@pytest.mark.parametrize(
    ("name", "args", "given"), [("Base", (), {}), ("Base", (1, 2, 3, 4), {}), ("Child", (1,), {"g": 1})]
)
def test_a_wrong_call_is_a_type_error(name: str, args: Any, given: Any) -> None:
    for kinds in (OURS, THEIRS):
        with pytest.raises(TypeError):
            kinds[name](*args, **given)


def test_what_is_frozen_cannot_be_set_or_deleted() -> None:
    for name in ("Base", "Child", "Slotted", "Same"):
        record = OURS[name](1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.a = 2
        with pytest.raises(dataclasses.FrozenInstanceError):
            del record.a


def test_without_equality_a_record_is_only_itself() -> None:
    record = OURS["Same"](1)
    assert record != OURS["Same"](1)
    assert hash(record) == object.__hash__(record)


def pickled(record: Any) -> Any:
    """Return what another process would get."""
    return pickle.loads(pickle.dumps(record))  # noqa: S301


@records.dataclass(frozen=True, slots=True)
class Point:
    """A class that pickle finds by its name."""

    x: int
    y: tuple[int, ...] = ()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
def test_copies_of_a_slotted_record_are_equal_to_it(again: Callable[[Point], Point]) -> None:
    assert again(Point(1, (2,))) == Point(1, (2,))


def test_a_value_that_is_not_equal_to_itself_is_found_in_equal_records_as_in_tuples() -> None:
    odd = float("nan")
    assert OURS["Same"](odd) != OURS["Same"](odd)
    assert OURS["Base"](odd) == OURS["Base"](odd)
    assert (OURS["Base"](odd) == OURS["Base"](float("nan"))) is (THEIRS["Base"](odd) == THEIRS["Base"](float("nan")))
