"""The time of a step as it is said beside memory: throughput with its range, and what the step is spent on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memcalc.report.tables import Column, Line, Table, percent
from memcalc.results.estimates import Estimate, StepTime
from memcalc.units import format_seconds

UNMET = "if it fit: "
"""What stands before the speed of what does not fit."""
LARGEST = 2
"""Parts of a step that one line names."""
SMALLEST = 0.01
"""Share of the step below which a line does not name a part."""
_PARTS = {
    "compute": "forward and backward",
    "host": "launches, data and the loop itself",
    "recompute": "forward passes again, for backward",
    "tensor": "between tensor-parallel ranks",
    "context": "keys and values beyond attention's time",
    "expert": "tokens to experts and back",
    "pipeline": "between stages",
    "data": "weights gathered, gradients reduced",
    "bubble": "waits for other stages",
    "optimizer": "the update, on the GPU",
    "offload": "transfers, and an update on the CPU",
}
"""What a step is spent on."""
_NAMES = {
    "tensor": "TP messages",
    "context": "CP messages",
    "expert": "EP messages",
    "pipeline": "PP messages",
    "data": "DP messages",
}


class StepPart(NamedTuple):
    """One part of a step."""

    name: str
    """As it is said."""
    seconds: float
    says: str
    """What it is."""


def parts_of(time: StepTime) -> tuple[StepPart, ...]:
    """Return what a step is spent on, messages by kind: all parts, which add up to the step."""
    return tuple(StepPart(part_name(name), seconds, _PARTS[name]) for name, seconds in time.parts.items())


def part_name(name: str) -> str:
    """Return a part of a step as it is said.

    >>> part_name("bubble"), part_name("tensor")
    ('bubble', 'TP messages')
    """
    return _NAMES.get(name, name)


def speed(time: StepTime) -> str:
    """Return the throughput with its 90% range."""
    rate = time.tokens_per_second_per_gpu
    return rate_range(rate, *(rate * time.step / end if end else None for end in (time.high, time.low)))


def rate_range(rate: float, slowest: float | None, fastest: float | None) -> str:
    """Return a throughput with the ends of its range.

    >>> rate_range(3185.2, 2493.0, 3697.2)
    '3185 (2490–3700)'
    """
    low, high = ("?" if end is None else _rounded(end) for end in (slowest, fastest))
    return f"{rate:.0f} ({low}–{high})"


def _rounded(rate: float) -> str:
    """Return a rate to ten where that is finer than one percent.

    >>> _rounded(3697.2), _rounded(87.4)
    ('3700', '87')
    """
    return f"{rate:.0f}" if rate < 1000 else f"{10 * round(rate / 10)}"


def time_lines(result: Estimate) -> Iterator[Line]:
    """Yield the line below a verdict: throughput, the step and its largest parts; none where no time is known."""
    time = result.time
    if time is None:
        return
    unmet = UNMET if result.verdict == "does-not-fit" else ""
    doubt = () if time.validated else (time.basis,)
    items = (f"{unmet}{speed(time)} tok/s/GPU", f"{format_seconds(time.step)}/step", _spent(time), *doubt)
    yield Line(" · ".join(items), "verdict", items=items)


def _spent(time: StepTime) -> str:
    most = sorted(parts_of(time), key=lambda part: -part.seconds)[:LARGEST]
    named = [part for part in most if part.seconds >= SMALLEST * time.step]
    return ", ".join(f"{part.name} {percent(part.seconds, time.step)}%" for part in named)


def parts_table(time: StepTime) -> Table:
    """Return what a step is spent on, part by part, without parts that take no time."""
    columns = (
        Column("part"),
        Column("time", right=True),
        Column("share", "%", right=True, meter=True, priority=1),
        Column("spent on", priority=2),
    )
    rows = [
        (part.name, format_seconds(part.seconds), percent(part.seconds, time.step), part.says)
        for part in parts_of(time)
        if part.seconds
    ]
    rows.append(("step", format_seconds(time.step), percent(time.step, time.step), "one update of the weights"))
    return Table("Time of a step (messages and transfers: what is not overlapped)", columns, tuple(rows))


def stands_on(time: StepTime) -> Line:
    """Return the range of a step, how busy the GPU is, and what that stands on."""
    items = (
        f"{format_seconds(time.low)} to {format_seconds(time.high)} per step",
        f"MFU {100 * time.mfu:.1f}%",
        f"HFU {100 * time.hfu:.1f}%",
        time.basis,
    )
    return Line(f"Time: {', '.join(items)}.", label="Time", items=items)


def time_facts(time: StepTime) -> dict[str, str]:
    """Return all that is said of a step by name: its range, its parts, throughput, how busy the GPU is, the basis."""
    values = {"step": f"{format_seconds(time.step)} ({format_seconds(time.low)} to {format_seconds(time.high)})"}
    for part in parts_of(time):
        if part.seconds:
            values[part.name] = f"{format_seconds(part.seconds)}, {percent(part.seconds, time.step)}%"
    return {
        **values,
        "throughput": f"{time.tokens_per_second_per_gpu:.0f} tokens/s per GPU",
        "MFU": f"{100 * time.mfu:.1f}%",
        "basis": time.basis,
    }
