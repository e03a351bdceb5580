"""What a search may take on one axis: one value, some, a range, all but some, or any.

2          pinned             2/4/8      these             2..8  ..8  2..     a range
not:8      all but these      any        all there are
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from memcalc.errors import InputError

ANY, NOT, BETWEEN, OR = "any", "not:", "..", "/"


@dataclass(frozen=True)
class Choice:
    """Several values of one axis."""

    said: str
    listed: tuple[Any, ...] = ()
    """These and no others; empty where a range, an exclusion or ``any`` was given."""
    without: tuple[Any, ...] = ()
    least: int | None = None
    most: int | None = None
    every: bool = False
    """All values there are, beyond those that a search tries by itself."""

    def of(self, usual: Iterable[Any], every: Iterable[Any] | None = None) -> list[Any]:
        """Those of the usual values that are wanted; ``every`` is all there are, in the order of preference."""
        if self.listed:
            return list(self.listed)
        if self.every:
            return list(usual if every is None else every)
        bounded = self.least is not None or self.most is not None
        known = list(every) if bounded and every is not None else list(usual)
        return [value for value in known if self.takes(value)]

    def takes(self, value: Any) -> bool:
        """Whether a value is wanted."""
        if self.listed:
            return value in self.listed
        low = self.least is None or value >= self.least
        return low and (self.most is None or value <= self.most) and value not in self.without


def parse_choice(name: str, value: Any, one: Callable[[Any], Any], *, number: bool = False) -> Any:
    """One value, read by ``one``, or a :class:`Choice`.

    Raises the error of ``one`` for a wrong value, and :class:`InputError` for a range that is none.

    >>> parse_choice("tp", "2/4", int).listed
    (2, 4)
    >>> parse_choice("tp", "..4", int, number=True).most
    4
    """
    if isinstance(value, list | set | frozenset):
        return Choice(OR.join(map(str, value)), listed=_unique(map(one, value))) if len(value) != 1 else one(*value)
    if not isinstance(value, str):
        return one(value)
    text = value.strip()
    if text == ANY:
        return Choice(text, every=True)
    if text.startswith(NOT):
        return Choice(text, without=_unique(map(one, text.removeprefix(NOT).split(OR))))
    if number and BETWEEN in text:
        return _range(name, text, one)
    if OR in text:
        return Choice(text, listed=_unique(map(one, text.split(OR))))
    return one(value)


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def _range(name: str, text: str, one: Callable[[Any], Any]) -> Choice:
    low, _, high = text.partition(BETWEEN)
    least, most = (one(end) if end.strip() else None for end in (low, high))
    if (least is None and most is None) or (least is not None and most is not None and least > most):
        raise InputError(name, text, "a range is low..high, low.. or ..high, such as 2..8")
    return Choice(text, least=least, most=most)
