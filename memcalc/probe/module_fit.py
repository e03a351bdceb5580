"""Sizes of storages by unit, from runs at several micro-batches and sequence lengths.

Six runs fix the six coefficients of 1, b, s, b·s, s² and b·s² exactly. A storage that is no such sum (filled up to a
multiple, shifted by one position) is bounded from above in the one unit that it follows best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, cast

from memcalc.specs.recorded import Execution, Kind, Mode, Storage, Treatment, Unit

if TYPE_CHECKING:
    from memcalc.probe.module_parts import Part

Point = tuple[int, int]
"""Micro-batch and sequence length."""
Sizes = list[tuple[tuple[Unit, int], ...]]
"""Of each storage the bytes by unit (elements, of a weight's gradient); the largest part first, at least one."""
UNITS: tuple[Unit, ...] = ("once", "sample", "row", "token", "square", "pair")
WIDTHS = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
}  # fmt: skip


def counts(point: Point) -> dict[Unit, int]:
    """How many of each unit a micro-batch has.

    >>> counts((2, 3))["pair"]
    18
    """
    batch, s = point
    return {"once": 1, "sample": batch, "row": s, "token": batch * s, "square": s * s, "pair": batch * s * s}


def polynomial(points: Sequence[Point], values: Sequence[float], *, by_length: bool) -> dict[Unit, Fraction]:
    """Coefficients by unit of the polynomial through the values; further points are not looked at.

    >>> points = [(b, s) for b in (2, 3) for s in (2, 4, 8)]
    >>> found = polynomial(points, [4.0 * b * s + 6 * b for b, s in points], by_length=True)
    >>> {unit: int(value) for unit, value in found.items() if value}
    {'sample': 6, 'token': 4}
    """
    if not by_length:
        (low_batch, first), (high_batch, second) = zip((points[0][0], points[1][0]), values, strict=False)
        slope = Fraction(second - first) / (high_batch - low_batch)
        return {"once": Fraction(first) - low_batch * slope, "sample": slope}
    (low_batch, high_batch), lengths = (points[0][0], points[3][0]), [s for _, s in points[:3]]
    rows = [_through(lengths, values[:3]), _through(lengths, values[3:6])]
    coefficients: dict[Unit, Fraction] = {}
    for (alone, with_batch), low, high in zip(
        (("once", "sample"), ("row", "token"), ("square", "pair")), *rows, strict=True
    ):
        slope = (high - low) / (high_batch - low_batch)
        coefficients[cast("Unit", alone)], coefficients[cast("Unit", with_batch)] = low - low_batch * slope, slope
    return coefficients


def _through(xs: Sequence[int], ys: Sequence[float]) -> tuple[Fraction, Fraction, Fraction]:
    """Coefficients of 1, x and x² of the parabola through three points."""
    a, b, c = (Fraction(x) for x in xs)
    p, q, r = (Fraction(y) for y in ys)
    first, second = (q - p) / (b - a), (r - q) / (c - b)
    square = (second - first) / (c - a)
    linear = first - square * (a + b)
    return p - linear * a - square * a * a, linear, square


def fitted(
    points: Sequence[Point],
    runs: Sequence[Sequence[int]],
    kinds: Sequence[str],
    dtypes: Sequence[str],
    *,
    by_length: bool,
) -> Sizes:
    """The sizes of a part's storages, from their bytes in each run."""
    sizes: Sizes = []
    for index, (kind, dtype) in enumerate(zip(kinds, dtypes, strict=True)):
        values = [run[index] for run in runs]
        if kind == "gradient":
            sizes.append((("once", max(values) // WIDTHS.get(dtype, 1)),))
            continue
        exact = polynomial(points, [float(value) for value in values], by_length=by_length)
        integral = all(value >= 0 and value.denominator == 1 for value in exact.values())
        parts = [(unit, int(value)) for unit, value in exact.items() if value] if integral else [bound(points, values)]
        parts.sort(key=lambda part: -part[1] * counts(points[-1])[part[0]])
        sizes.append(tuple(parts) or (("once", 0),))
    return sizes


def bound(points: Sequence[Point], values: Sequence[int]) -> tuple[Unit, int]:
    """The unit that a storage follows best, and the smallest integer of bytes per unit that bounds it everywhere.

    >>> bound([(2, 10), (3, 20)], [18, 57])
    ('token', 1)
    """

    def ratios(unit: Unit) -> list[float]:
        return [value / counts(point)[unit] for point, value in zip(points, values, strict=True)]

    best = min(UNITS, key=lambda unit: max(ratios(unit)) / max(min(ratios(unit)), 1e-9))
    return best, math.ceil(max(ratios(best)))


def relative_error(
    sizes: Sizes, point: Point, values: Sequence[int], kinds: Sequence[str], dtypes: Sequence[str]
) -> float:
    """Difference of a further run's storages from their fitted sizes, as a share of all their bytes."""
    number, off, total = counts(point), 0, 0
    for parts, value, kind, dtype in zip(sizes, values, kinds, dtypes, strict=True):
        predicted = sum(size * number[unit] for unit, size in parts)
        off += abs(predicted * (WIDTHS.get(dtype, 1) if kind == "gradient" else 1) - value)
        total += value
    return off / max(total, 1)


def execution_of(part: Part, sizes: Sizes, mode: Mode, treatment: Treatment) -> Execution:
    """A part's events over storages of one unit each: one that grows with several is as many storages."""
    records: list[Storage] = []
    further: dict[int, list[int]] = {}
    for name, kind, dtype, (first, *_) in zip(part.names, part.kinds, part.dtypes, sizes, strict=True):
        records.append(_storage(name, cast("Kind", kind), dtype, first))
    for index, (_, *others) in enumerate(sizes):
        for other in others:
            further.setdefault(index, []).append(len(records))
            records.append(_storage(part.names[index], cast("Kind", part.kinds[index]), part.dtypes[index], other))
    saved, passing = (
        [i for index in some for i in (index, *further.get(index, ()))] for some in (part.saved, part.passing)
    )
    forward = [*further.get(0, ()), *_spread(part.forward, further)]
    forward += _left(forward, further, set(saved))
    backward = [*further.get(part.incoming, ()), *_spread(part.backward, further)]
    backward += _left(backward, further, set(), set(saved))
    return Execution(
        mode=mode, treatment=treatment, records=tuple(records), forward=tuple(forward), backward=tuple(backward),
        kept=tuple(saved), passing=tuple(passing), output=part.output, incoming=part.incoming, outgoing=part.outgoing,
    )  # fmt: skip


def _storage(name: str, kind: Kind, dtype: str, size: tuple[Unit, int]) -> Storage:
    unit, bytes_ = size
    width = WIDTHS.get(dtype, 1) if kind != "gradient" else 1
    return Storage(name, kind, *((bytes_ // width, width) if bytes_ % width == 0 else (bytes_, 1)), unit)


def _spread(events: list[int], further: dict[int, list[int]]) -> list[int]:
    """Events of storages with those of their further parts."""
    out: list[int] = []
    for event in events:
        index = event if event >= 0 else ~event
        out += [event, *(i if event >= 0 else ~i for i in further.get(index, ()))]
    return out


def _left(
    events: list[int], further: dict[int, list[int]], saved: set[int], alive: set[int] | None = None
) -> list[int]:
    """The frees of further parts that are alive at the end, as where the storage itself goes on to the next part."""
    alive_now = set(alive or ())
    all_further = {i for parts in further.values() for i in parts}
    for event in events:
        if event >= 0:
            alive_now.add(event)
        else:
            alive_now.discard(~event)
    return [~index for index in sorted(alive_now & all_further - saved)]
