"""Dataclasses that cost little to define: ``dataclass`` as the standard library has it, for as much of it as is used.

The standard library writes and compiles six functions for each frozen class, 0.6 ms, and a plan defines 140 classes
before it computes anything. Here one function serves all classes wherever it can, and a class's ``__init__``, which
alone is its own, is compiled when its first instance is made. ``fields``, ``replace`` and ``asdict`` of the standard
library take these classes as their own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, field, fields, is_dataclass, replace
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass
else:

    def dataclass(cls: Any = None, /, *, frozen: bool = False, eq: bool = True, slots: bool = False) -> Any:
        """Make a class a record, as :func:`dataclasses.dataclass` does; frozen ones have a hash where they have ``==``.

        >>> @dataclass(frozen=True)
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(1), Point(1) == Point(1, 0), replace(Point(1), y=2)
        (Point(x=1, y=0), True, Point(x=1, y=2))
        """
        if cls is None:
            return lambda cls: _record(cls, frozen=frozen, eq=eq, slots=slots)
        return _record(cls, frozen=frozen, eq=eq, slots=slots)


__all__ = ["asdict", "dataclass", "field", "fields", "is_dataclass", "replace"]

_NONE = object()
"""Stands for an argument that is not given."""


def _record(cls: Any, *, frozen: bool, eq: bool, slots: bool) -> Any:
    defined = set(vars(cls))
    cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
    methods: dict[str, Any] = {"__init__": _first_init(cls, frozen=frozen), "__repr__": _repr}
    if eq:
        methods |= _compared(cls, hashed=frozen)
    if frozen:
        methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
    if frozen and slots:
        methods["__setstate__"] = _restore
    for name, method in methods.items():
        if name not in defined:
            setattr(cls, name, method)
    return cls


def _compared(cls: Any, *, hashed: bool) -> dict[str, Any]:
    """Comparison, and the hash of what cannot change, by all fields that count."""
    names = [each.name for each in fields(cls) if each.compare]
    # of a single field attrgetter gives no tuple, in which what is the same object is equal
    values: Callable[[Any], Any] = (
        attrgetter(*names) if len(names) > 1 else lambda record: tuple(getattr(record, name) for name in names)
    )

    def equal(self: Any, other: Any) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def hash_(self: Any) -> int:
        return hash(values(self))

    return {"__eq__": equal, "__hash__": hash_ if hashed else None}


@recursive_repr("...")
def _repr(self: Any) -> str:
    shown = ", ".join(f"{each.name}={getattr(self, each.name)!r}" for each in fields(self) if each.repr)
    return f"{self.__class__.__qualname__}({shown})"


def _refuse_to_set(self: Any, name: str, value: Any) -> None:  # noqa: ARG001
    message = f"cannot assign to field {name!r}"
    raise dataclasses.FrozenInstanceError(message)


def _refuse_to_delete(self: Any, name: str) -> None:  # noqa: ARG001
    message = f"cannot delete field {name!r}"
    raise dataclasses.FrozenInstanceError(message)


def _restore(self: Any, state: tuple[None, dict[str, Any]]) -> None:
    """Fill a copy or an unpickled record whose attributes are slots."""
    for name, value in state[1].items():
        object.__setattr__(self, name, value)


def _first_init(cls: Any, *, frozen: bool) -> Callable[..., None]:
    """An ``__init__`` that compiles that of the class, and leaves it in its own place."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        cls.__init__ = compiled = _init(cls, frozen=frozen)
        compiled(self, *args, **given)

    return init


def _init(cls: Any, *, frozen: bool) -> Callable[..., None]:
    """Compile a class's ``__init__``."""
    known: dict[str, Any] = {"_none": _NONE, "_set": object.__setattr__}
    positional, named, body = ["self"], list[str](), list[str]()
    for each in fields(cls):
        name, value = each.name, each.name
        if each.default_factory is not dataclasses.MISSING:
            known[f"_made_{name}"] = each.default_factory
            value = f"_made_{name}() if {name} is _none else {name}" if each.init else f"_made_{name}()"
        elif not each.init:
            continue
        if each.init:
            has_default = each.default is not dataclasses.MISSING
            known[f"_default_{name}"] = each.default
            given = f"={f'_default_{name}' if has_default else '_none'}" if has_default or value != name else ""
            (named if each.kw_only else positional).append(name + given)
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    head = ", ".join([*positional, *(["*", *named] if named else [])])
    exec(f"def __init__({head}):\n " + "\n ".join(body or ["pass"]), known)  # noqa: S102 - of names of fields alone
    init: Callable[..., None] = known["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init
