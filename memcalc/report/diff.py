"""Two jobs beside one another as a document: the price first, then each change, then where the bytes went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memcalc.report.estimate import MOODS, head_of
from memcalc.report.render import Report
from memcalc.report.tables import Block, Code, Column, Document, Line, Table, gib
from memcalc.results import Diff, DiffCost, DiffFigures, DiffSide, DiffStep
from memcalc.units import GIB

__all__ = ["TERMS", "brief", "headline", "report", "signed"]

TERMS = 8
"""Terms that are listed where nothing else is asked for."""
_LONGEST = 36
"""Characters of a change's name in a table; the table of what is different has all of it."""
_DATA = (
    "step", "change", "follows", "device_bytes", "allocated_bytes", "reserved_bytes", "parameters_bytes",
    "gradients_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes", "reserve_bytes", "context_bytes",
    "host_memory_bytes", "tier_memory_bytes", "step_s", "tokens_per_second_per_gpu", "device_bytes_after",
    "verdict_after", "device_bytes_alone", "impossible_alone", "command_after",
)  # fmt: skip


def report(result: Diff, terms: int | None = TERMS) -> Report:
    """Return the answer of ``memcalc diff`` with the largest ``terms``, or all of them."""
    blocks = (
        Line(headline(result), "verdict", MOODS[result.b.figures.verdict]),
        *_side("A", result.a),
        *_side("B", result.b),
        *(_changes(result) if result.fields else ()),
        *_notes(result),
        *(_bytes(result, terms) if result.fields else ()),
        *_foot(result),
    )
    return Report(Document(blocks, _data(result)), result.model_dump(mode="json", by_alias=True))


def headline(result: Diff) -> str:
    """Return what B costs beside A, in one sentence."""
    if not result.fields:
        return "No difference: A and B are the same job once every default is resolved."
    before, after, total = result.a.figures, result.b.figures, result.total
    more = (
        f"{gib(abs(total.device))} GiB {'more' if total.device > 0 else 'less'} than" if total.device else "as much as"
    )
    rooms = {gib(before.capacity, 1), gib(after.capacity, 1)}
    of = f" of {rooms.pop()} GiB" if len(rooms) == 1 else " GiB"
    verdicts = " → ".join(dict.fromkeys(one.verdict.replace("-", " ") for one in (before, after)))
    sizes = f"{gib(before.device)} → {gib(after.device)}{of}"
    return f"{verdicts} · B needs {more} A on each GPU: {sizes} · {_speed(total)} on each GPU"


def _speed(cost: DiffCost) -> str:
    """Return how the throughput changes, in words."""
    share = 100 * cost.throughput
    if abs(share) < 0.05:
        return "as many tokens/s"
    if share >= 100:
        return f"{1 + cost.throughput:.1f} times the tokens/s"
    return f"{abs(share):.1f}% {'more' if share > 0 else 'fewer'} tokens/s"


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign, and nothing at all as 0.

    >>> signed(1.5), signed(-0.25), signed(0)
    ('+1.50', '−0.25', '0.00')
    """
    return f"{value:+.{digits}f}".replace("-", "−") if value else f"{0:.{digits}f}"


def _gib(size: int) -> str:
    return signed(size / GIB)


def _side(place: str, side: DiffSide) -> Iterator[Line]:
    verdict, title = head_of(side.estimate)
    yield Line(f"{place} · {side.name}: {verdict.text}", "title", verdict.mood)
    yield Line(title.text, "faint")


# -------------------------------------------------------------------------------------------------- changes and steps


def _changes(result: Diff) -> Iterator[Block]:
    yield _fields(result)
    yield _steps(result)


def _fields(result: Diff) -> Table:
    """All that differs, with the steps that change it."""
    columns = (Column("step", right=True), Column("field"), Column("A"), Column("B"), Column("said", priority=1))
    rows = [
        (_places(result.steps, one.field), one.option, one.was, one.now, "follows" if one.follows else "yes")
        for one in result.fields
    ]
    rows.sort(key=lambda row: int(row[0].partition(",")[0] or 0))
    return Table("What is different", columns, tuple(rows))


def _places(steps: Iterable[DiffStep], field: str) -> str:
    """The numbers of the steps that change a field."""
    return ", ".join(
        str(place) for place, step in enumerate(steps, 1) if any(one.field == field for one in step.fields)
    )


def brief(step: DiffStep) -> str:
    """Return a change in few words: as it is where it is short, else its first part, else names alone."""
    fields = [one for one in step.fields if not one.follows] or list(step.fields)
    names = ", ".join(one.option for one in fields)
    more = f", +{len(fields) - 1} more" if len(fields) > 1 else ""
    first = [f"{one.option} {one.was} → {one.now}{more}" for one in fields[:1]]
    last = f"{fields[0].option}{more}" if fields else ""
    return next((text for text in (step.name, *first, names) if len(text) <= _LONGEST), last)


def _steps(result: Diff) -> Table:
    """The way from A to B."""
    points = (result.a.figures, *(step.after for step in result.steps))
    columns = (
        Column("step", right=True),
        Column("change"),
        Column("device", "GiB", right=True),
        Column("then", "GiB", right=True, meter=True, whole=max(one.device for one in points) / GIB),
        Column("verdict", priority=3),
        Column("tok/s/GPU", right=True, priority=1),
        Column("speed", "%", right=True),
        Column("alone", "GiB", right=True, priority=2),
    )
    start, end, total = result.a.figures, result.b.figures, result.total
    rows = [
        ("A", "", "", gib(start.device), _words(start.verdict), f"{start.tokens_per_second_per_gpu:.0f}", "", ""),
        *(_step(place, step) for place, step in enumerate(result.steps, 1)),
        (
            "B", "in all", _gib(total.device), gib(end.device), _words(end.verdict),
            f"{end.tokens_per_second_per_gpu:.0f}", signed(100 * total.throughput, 1), "",
        ),
    ]  # fmt: skip
    return Table("Step by step from A to B", columns, tuple(rows))


def _step(place: int, step: DiffStep) -> tuple[str, ...]:
    after, alone = step.after, step.alone
    return (
        str(place), brief(step), _gib(step.cost.device), gib(after.device), _words(after.verdict),
        f"{after.tokens_per_second_per_gpu:.0f}", signed(100 * step.cost.throughput, 1),
        "impossible" if alone is None else _gib(alone.device),
    )  # fmt: skip


def _words(verdict: str) -> str:
    return verdict.replace("-", " ")


def _notes(result: Diff) -> Iterator[Line]:
    """What the tables cannot say."""
    for place, step in enumerate(result.steps, 1):
        if step.together:
            yield Line(f"Step {place} is several changes of which none is possible here without the others.")
        if step.impossible:
            yield Line(f"Step {place} alone: {step.impossible}", "faint")
    if any(step.alone and step.alone.device != step.cost.device for step in result.steps):
        yield Line(
            "Each step is applied to all before it; alone: to A by itself. Changes that meet do not add up.", "faint"
        )
    before, after = result.a.estimate.hardware.gpus, result.b.estimate.hardware.gpus
    if before != after:
        was, now = (
            one.figures.tokens_per_second_per_gpu * count for one, count in ((result.a, before), (result.b, after))
        )
        yield Line(f"All GPUs together: {was:.0f} tokens/s on {before}, {now:.0f} tokens/s on {after}.")
    yield from _ranges(result)
    for name, tier in (("host memory", "host_memory"), ("NVMe or CXL memory", "tier_memory")):
        was_size, now_size = (getattr(one.figures, tier) for one in (result.a, result.b))
        if was_size != now_size:
            yield Line(f"A node needs {gib(was_size)} → {gib(now_size)} GiB of {name}.")


def _ranges(result: Diff) -> Iterator[Line]:
    """What published runs say of predicted times; those that none validates have a warning."""
    times = [side.time for side in (result.a, result.b) if side.time.validated]
    for basis, time in {time.basis: time for time in times}.items():
        low, high = time.low / time.step, time.high / time.step
        said = f"Speeds are predicted, {basis}: a step may take {low:.1f} to {high:.1f} times as long."
        yield Line(said, "faint")


# --------------------------------------------------------------------------------------------------- where bytes went


def _bytes(result: Diff, terms: int | None) -> Iterator[Block]:
    yield _components(result)
    if result.terms:
        yield _terms(result, terms)


def _components(result: Diff) -> Table:
    """From A to B across, component by component; a single step is the change itself."""
    steps = result.steps if len(result.steps) > 1 else ()
    columns = (
        Column("component"),
        Column("A", "GiB", right=True),
        *(Column(f"step {place}", "GiB", right=True, priority=1) for place in range(1, len(steps) + 1)),
        Column("B", "GiB", right=True),
        Column("change", "GiB", right=True, priority=2 if steps else 0),
    )
    before, after = _sizes(result.a.figures), _sizes(result.b.figures)
    costs = [_sizes(step.cost) for step in steps]
    rows = tuple(
        (name, gib(was), *(_gib(cost[name]) for cost in costs), gib(after[name]), _gib(after[name] - was))
        for name, was in before.items()
    )
    places = " → ".join(dict.fromkeys((result.a.figures.phase, result.b.figures.phase)))
    return Table(f"At the peak, which stands at {places}", columns, rows)


def _sizes(of: DiffFigures | DiffCost) -> dict[str, int]:
    return {**of.components.model_dump(), "device": of.device}


def _terms(result: Diff, most: int | None) -> Table:
    shown = result.terms[:most]
    columns = (
        Column("component", priority=1),
        Column("term"),
        Column("A", "GiB", right=True),
        Column("B", "GiB", right=True),
        Column("change", "GiB", right=True),
        Column("kind", priority=2),
    )
    rows = tuple(
        (one.component, one.name, gib(one.before), gib(one.after), _gib(one.change), one.kind) for one in shown
    )
    count = f"the largest {len(shown)} of {len(result.terms)}" if len(shown) < len(result.terms) else "all"
    return Table(f"Terms at the peak that differ, {count}", columns, rows)


def _foot(result: Diff) -> Iterator[Block]:
    for warning in result.warnings:
        yield Line(f"Warning: {warning}", "warning")
    for place, side in (("A", result.a), ("B", result.b)):
        yield from (Line(f"{place}: {remark}", "warning") for remark in side.remarks)
    for place, side in (("A", result.a), ("B", result.b)):
        yield Code(f"{place} byte by byte", side.estimate.command)
    if result.command:
        yield Code("Reproduce with", result.command)


# --------------------------------------------------------------------------------------------------------------- data


def _data(result: Diff) -> Table:
    """One row a step and one for all, in bytes and seconds."""
    rows = [_row(place, step) for place, step in enumerate(result.steps, 1)]
    end = result.b
    last = (str(end.figures.device), end.figures.verdict, "", "", end.estimate.command)
    rows.append(("all", "", "", *_plain(result.total), *last))
    return Table("Steps", tuple(Column(name) for name in _DATA), tuple(rows))


def _row(place: int, step: DiffStep) -> tuple[str, ...]:
    follows = "; ".join(f"{one.option} {one.was} → {one.now}" for one in step.fields if one.follows)
    alone = "" if step.alone is None else str(step.alone.device)
    last = (str(step.after.device), step.after.verdict, alone, step.impossible, step.command)
    return (str(place), step.name, follows, *_plain(step.cost), *last)


def _plain(cost: DiffCost) -> tuple[str, ...]:
    parts = cost.components.model_dump().values()
    whole = (cost.device, cost.allocated, cost.reserved, *parts, cost.host_memory, cost.tier_memory)
    return (*map(str, whole), f"{cost.step:.6g}", f"{cost.tokens_per_second_per_gpu:.6g}")
