"""Cases in which any few values of some axes meet: most of what their whole product shows, in a part of its time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def covering(strength: int, *axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return cases in which any values of ``strength`` of the axes occur together; the same ones each time.

    >>> covering(2, "ab", [1, 2], "xy")
    [('a', 1, 'x'), ('a', 2, 'y'), ('b', 1, 'y'), ('b', 2, 'x')]
    """
    cases = list(product(*axes))
    columns = list(combinations(range(len(axes)), strength))
    meetings = {case: {(at, tuple(case[i] for i in at)) for at in columns} for case in cases}
    missing = set[Any]().union(*meetings.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(meetings[case] & missing))
        chosen.append(best)
        missing -= meetings[best]
    return sorted(chosen, key=cases.index)
