"""What would make a job fit, as a table: grouped by what it costs where there is little room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from textwrap import fill

from memcalc.report.plan_words import fewest_line
from memcalc.report.tables import Block, Code, Column, Line, Table, gib, said
from memcalc.results.plans import Nearest, Plans
from memcalc.units import GIB

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
FIELD = "strategy.expandable_segments=true"
_SCREEN = 80
"""Columns of the narrowest common terminal, which the table is made for."""
_GAPS = 8
"""Blanks between its columns."""
MOST = 3
"""Changes that a screen shows beside plans."""
_VERDICT = {"does-not-fit": "over by {}"}
_COLUMNS = (
    Column("change"),
    Column("costs"),
    Column("peak", "GiB", right=True),
    Column("verdict"),
    Column("host", "GiB per node", right=True),
    Column("tok/s/GPU", right=True),
    Column("range", "90%"),
)
_NARROW = (
    Column("change"),
    Column("GiB", right=True),
    Column("host", right=True),
    Column("verdict"),
    Column("tok/s/GPU", right=True),
)


def remedy_blocks(result: Plans, *, brief: bool = False) -> Iterator[Block]:
    """The table, what an environment variable is called, and the first remedy as a command.

    ``brief``: without groups, and beside plans the cheapest change of each group alone.
    """
    if not result.nearest:
        if not result.plans:
            yield Code("Next, the fewest GPUs that fit", fewest_line(result.job))
        return
    shown = _chosen(result) if brief else result
    if brief:
        yield from _brief_table(shown, len(result.nearest) - len(shown.nearest))
    else:
        rows = tuple(_row(answer, result.capacity) for answer in result.nearest)
        narrow = Table(_title(result), _NARROW, tuple(_grouped(result)))
        yield replace(Table(_title(result), _COLUMNS, rows), narrow=narrow)
    if any(FIELD in answer.change for answer in shown.nearest):
        yield Line(f"expandable segments: {VARIABLE}", "faint")
    unknown = sorted({name for answer in shown.nearest for name in answer.unknown})
    if unknown and not (brief and any(plan.unknown for plan in result.plans)):  # which has a warning already
        yield Line(f"?: {' and '.join(unknown)} of node {result.hardware.node} is unknown.", "warning")
    known = (answer for answer in result.nearest if answer.verdict == "fits" and not answer.unknown)
    first = None if result.plans else next(known, None)
    if first is not None:
        yield Code("Next, the first that fits", first.command)
    elif not result.plans:
        yield Code("Next, the fewest GPUs that fit", fewest_line(result.job))


def _chosen(result: Plans) -> Plans:
    """Return what a screen shows of the changes: beside plans the best of a group, of at most three groups."""
    if not result.plans:
        return result
    best = [_best(list(answers)) for _, answers in groupby(result.nearest, key=lambda answer: answer.group)]
    order = sorted(range(len(best)), key=lambda at: (best[at].verdict != "fits", at))
    return result.model_copy(update={"nearest": tuple(best[at] for at in sorted(order[:MOST]))})


def _brief_table(result: Plans, more: int) -> Iterator[Block]:
    """Yield the table without groups, its title in its heading; what is not enough stands below it in one line."""
    title = _title(result) + (f" ({more} more: -v)" if more else "")
    columns = (replace(_NARROW[0], title=title[:1].lower() + title[1:]), *_NARROW[1:])
    enough = [answer for answer in result.nearest if answer.verdict != "does-not-fit"]
    rows = tuple((short(answer.change), *_figures(answer, result.capacity)) for answer in enough)
    hosted = any(answer.host_memory for answer in enough)
    indices = [index for index, column in enumerate(columns) if hosted or column.title != "host"]
    if rows:
        yield Table(title, columns, rows, titled=False).keep(indices)
    others = [answer for answer in result.nearest if answer not in enough]
    if others:
        over = ((short(answer.change), gib(answer.device - result.capacity, 1)) for answer in others)
        yield said("Too large", *(f"{change} (by {size} GiB)" for change, size in over))


def short(change: str) -> str:
    """Return a change in fewer words.

    >>> short("--gpus 8 --set strategy.expandable_segments=true")
    '--gpus 8, expandable segments'
    """
    return change.replace(f" --set {FIELD}", ", expandable segments").replace(f"--set {FIELD}", "expandable segments")


def _best(answers: list[Nearest]) -> Nearest:
    """The first that fits: they stand in the order of what they cost."""
    return next((answer for answer in answers if answer.verdict == "fits"), answers[0])


def _title(result: Plans) -> str:
    fewest = min((plan.gpus for plan in result.plans), default=0)
    offloads = all(plan.strategy.offload for plan in result.plans if plan.gpus == fewest)
    safe = all(plan.verdict == "fits" for plan in result.plans[:1])
    why = "Faster" if safe and not offloads else "To fit safely"
    if offloads:
        why = "Alternatives" if any(answer.host_memory for answer in result.nearest) else "Alternatives to offload"
    return f"{why} on {fewest} GPU{'s' * (fewest > 1)}" if result.plans else "What would fit"


def _row(answer: Nearest, capacity: int) -> tuple[str, ...]:
    fits = answer.verdict != "does-not-fit"
    speed, span = (_speed(answer), _range(answer)) if fits else ("", "")
    return (
        answer.change, answer.group, gib(answer.device, 1), _verdict(answer, capacity), _host(answer), speed, span,
    )  # fmt: skip


def _grouped(result: Plans) -> Iterator[tuple[str, ...]]:
    figures = [_figures(answer, result.capacity) for answer in result.nearest]
    titles = [column.title for column in _NARROW[1:]]
    widest = _SCREEN - _GAPS - sum(max(map(len, cells)) for cells in zip(titles, *figures, strict=True))
    for group, answers in groupby(result.nearest, key=lambda answer: answer.group):
        yield group, "", "", "", ""
        for answer in answers:
            change = short(answer.change)
            cell = fill(change, widest, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
            yield cell, *_figures(answer, result.capacity)


def _figures(answer: Nearest, capacity: int) -> tuple[str, ...]:
    speed = f"{_speed(answer)} {_range(answer)}" if answer.verdict != "does-not-fit" else ""
    return gib(answer.device, 1), _host(answer), _verdict(answer, capacity), speed


def _host(answer: Nearest) -> str:
    return gib(answer.host_memory, 0) + "?" * bool(answer.unknown) if answer.host_memory else ""


def _verdict(answer: Nearest, capacity: int) -> str:
    over = f"{(answer.device - capacity) / GIB:.1f}"
    return _VERDICT.get(answer.verdict, answer.verdict).format(over)


def _speed(answer: Nearest) -> str:
    return f"{answer.tokens_per_second_per_gpu:.0f}"


def _range(answer: Nearest) -> str:
    low, high = (10 * round(value / 10) for value in (answer.slowest, answer.fastest))
    return f"({low}–{high})"
