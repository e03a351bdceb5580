"""Two jobs beside one another as a document: the price first, then each change, then where the bytes went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import floor, log10

from memcalc.report.estimate import MOODS, head_of
from memcalc.report.plan_words import part_name, speed, strategy_words, time_lines
from memcalc.report.tables import Block, Code, Column, Line, Report, Table, gib, header, in_one_row, made, said
from memcalc.results.changes import Diff, DiffCost, DiffFigures, DiffSide, DiffStep
from memcalc.results.names import component_name, phase_name
from memcalc.results.posttraining import RlStep
from memcalc.units import GIB, format_count, signed

_KINDS = {"vanishes": "removed", "appears": "new"}
TERMS = 8
"""Terms that are listed where nothing else is asked for."""
_LONGEST = 36
"""Characters of a change's name in a table; the table of what is different has all of it."""
_DATA = (
    "step", "change", "follows", "device_bytes", "allocated_bytes", "reserved_bytes", "parameters_bytes",
    "gradients_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes", "reserve_bytes", "context_bytes",
    "host_memory_bytes", "tier_memory_bytes", "step_s", "tokens_per_second_per_gpu", "compute_s", "host_s",
    "recompute_s", "tensor_messages_s", "context_messages_s", "expert_messages_s", "pipeline_messages_s",
    "data_messages_s", "bubble_s", "optimizer_s", "offload_s", "device_bytes_after", "verdict_after",
    "device_bytes_alone", "impossible_alone", "command_after",
)  # fmt: skip
_SEEN = 0.01
"""Share of the largest change of a component below which a screen does not list one."""
_TEXTS = frozenset({"step", "change", "follows", "verdict_after", "impossible_alone", "command_after"})
"""Columns of it that are no figures."""


def report(result: Diff, terms: int | None = TERMS) -> Report:
    """Return the answer of ``memcalc diff`` with the largest ``terms``, or all of them."""
    blocks = (
        Line(headline(result), "verdict", MOODS[result.b.figures.verdict]),
        *_side("A", result.a),
        *_side("B", result.b),
        *(_changes(result) if result.fields else ()),
        *_notes(result),
        *(_bytes(result, terms) if result.fields else ()),
        *(_time(result) if result.fields else ()),
        *_foot(result),
    )
    return made(result, _data(result), *blocks, screen=_screen(result))


def _screen(result: Diff) -> Iterator[Block]:
    """Yield what a terminal shows: the price, each job in a line, the steps, and the components that change."""
    yield Line(headline(result), "verdict", MOODS[result.b.figures.verdict])
    for index, side in (("A", result.a), ("B", result.b)):
        yield said(index, side.name, f"{speed(side.time)} tok/s/GPU")
    if result.fields:
        yield said("Job", *_common(result))
        yield _plainly(_steps(result))
        yield _plainly(_changed(_components(result)))
    yield from _hosts(result)
    for warning in result.warnings:
        yield Line(f"Warning: {warning}", "warning")
    for index, side in (("A", result.a), ("B", result.b)):
        yield from (Line(f"{index}: {remark}", "warning") for remark in side.remarks)
    alone = "" if len(_verdicts(result)) > 1 else "; alone: applied to A only"
    if result.steps:
        yield Line(f"Steps are cumulative{alone}. -v: terms, time, all {'steps and ' * (not alone)}parts", "faint")


def _verdicts(result: Diff) -> set[str]:
    return {point.verdict for point in (result.a.figures, *(step.after for step in result.steps))}


def _common(result: Diff) -> tuple[str, ...]:
    """Return what both jobs are, in few words."""
    a, b = (side.estimate for side in (result.a, result.b))
    sides = [
        (f"{job.model.name} ({format_count(job.model.parameters)})", f"{job.hardware.gpus} × {job.hardware.gpu}",
         *strategy_words(job.strategy), f"sequence length {job.workload.seq_len}")
        for job in (a, b)
    ]  # fmt: skip
    return tuple(item for item in sides[0] if item in sides[1])


def _plainly(table: Table) -> Table:
    """Return the table without a title, its units in one row with its headings.

    A verdict that all share is not shown, and where they differ no step alone is.
    """
    titles = [column.title for column in table.columns]
    verdicts = {row[index] for row in table.rows for index, title in enumerate(titles) if title == "verdict"}
    hidden = "alone" if len(verdicts) > 1 else "verdict"
    indices = [index for index, title in enumerate(titles) if title != hidden]
    return in_one_row(table.keep(indices), total="GiB", speed="%")


def _changed(table: Table) -> Table:
    """Return the table without rows whose change, the last column, is nothing beside the largest of a component."""
    changes = [abs(float(row[-1].replace("−", "-"))) for row in table.rows]
    least = max(_SEEN * max(changes[:-1]), 0.005)
    last = len(changes) - 1
    return table._replace(rows=tuple(row for i, row in enumerate(table.rows) if i == last or changes[i] >= least))


def headline(result: Diff) -> str:
    """Return what B costs beside A, in one sentence."""
    if not result.fields:
        return "No difference: A and B resolve to the same job."
    before, after, total = result.a.figures, result.b.figures, result.total
    digits = 1 if abs(total.device) >= GIB else 2
    more = f"{signed(total.device / GIB, digits)} GiB" if total.device else "the same memory"
    rooms = {gib(before.capacity, 1), gib(after.capacity, 1)}
    of = f" of {rooms.pop()}" if len(rooms) == 1 else ""
    verdicts = " → ".join(dict.fromkeys(item.verdict.replace("-", " ") for item in (before, after)))
    sizes = f"{gib(before.device, digits)} → {gib(after.device, digits)}{of}"
    return f"{verdicts} · B: {more} per GPU ({sizes}), {_speed(total)}"


def _speed(cost: DiffCost) -> str:
    share = 100 * cost.throughput
    if abs(share) < 0.05:
        return "the same speed"
    if share >= 100:
        return f"{1 + cost.throughput:.1f}× speed"
    return f"{signed(share, 1)}% speed"


def _gib(size: int) -> str:
    return signed(size / GIB)


def _side(index: str, side: DiffSide) -> Iterator[Line]:
    verdict, title = head_of(side.estimate)
    yield Line(f"{index} · {side.name}: {verdict.text}", "title", verdict.mood)
    yield from (Line(line.text, items=line.items) for line in time_lines(side.estimate))
    yield Line(title.text, "faint")


def _changes(result: Diff) -> Iterator[Block]:
    yield _fields(result)
    yield _steps(result)


def _fields(result: Diff) -> Table:
    rows = [
        (_places(result.steps, field.field), field.option, field.was, field.now, "implied" if field.follows else "you")
        for field in result.fields
    ]
    rows.sort(key=lambda row: int(row[0].partition(",")[0] or 0))
    return Table("Differences", header("step > | field | A | B | set by <1"), tuple(rows))


def _places(steps: Iterable[DiffStep], field: str) -> str:
    return ", ".join(
        str(index) for index, step in enumerate(steps, 1) if any(change.field == field for change in step.fields)
    )


def brief(step: DiffStep | RlStep) -> str:
    """Return a change in few words: as it is where it is short, else its first part, else names alone."""
    fields = [field for field in step.fields if not field.follows] or list(step.fields)
    names = ", ".join(field.option for field in fields)
    more = f", +{len(fields) - 1} more" if len(fields) > 1 else ""
    first = [f"{field.option} {field.was} → {field.now}{more}" for field in fields[:1]]
    last = f"{fields[0].option}{more}" if fields else ""
    return next((text for text in (step.name, *first, names) if len(text) <= _LONGEST), last)


def _steps(result: Diff) -> Table:
    points = (result.a.figures, *(step.after for step in result.steps))
    columns = (
        *header("step > | change | total [GiB] >"),
        Column("then", "GiB", right=True, meter=True, full=max(point.device for point in points) / GIB),
        *header("verdict <3 | tok/s/GPU >1 | speed [%] > | alone [GiB] >2"),
    )
    start, end, total = result.a.figures, result.b.figures, result.total
    rows = [
        ("A", "", "", gib(start.device), _words(start.verdict), f"{start.tokens_per_second_per_gpu:.0f}", "", ""),
        *(_step(index, step) for index, step in enumerate(result.steps, 1)),
        (
            "B", "total", _gib(total.device), gib(end.device), _words(end.verdict),
            f"{end.tokens_per_second_per_gpu:.0f}", signed(100 * total.throughput, 1), "",
        ),
    ]  # fmt: skip
    return Table("Step by step from A to B", columns, tuple(rows))


def _step(index: int, step: DiffStep) -> tuple[str, ...]:
    after, alone = step.after, step.alone
    return (
        str(index), brief(step), _gib(step.cost.device), gib(after.device), _words(after.verdict),
        f"{after.tokens_per_second_per_gpu:.0f}", signed(100 * step.cost.throughput, 1),
        "impossible" if alone is None else _gib(alone.device),
    )  # fmt: skip


def _words(verdict: str) -> str:
    return verdict.replace("-", " ")


def _notes(result: Diff) -> Iterator[Line]:
    for index, step in enumerate(result.steps, 1):
        if step.together:
            yield Line(f"Step {index} groups changes that are only valid together.")
        if step.impossible:
            yield Line(f"Step {index} alone: {step.impossible}", "faint")
    if any(step.alone and step.alone.device != step.cost.device for step in result.steps):
        yield Line(
            "Steps are cumulative; alone: the step applied to A only. Savings interact, so they do not add up.", "faint"
        )
    before, after = result.a.estimate.hardware.gpus, result.b.estimate.hardware.gpus
    if before != after:
        was, now = (
            item.figures.tokens_per_second_per_gpu * count for item, count in ((result.a, before), (result.b, after))
        )
        yield Line(f"All GPUs together: {was:.0f} tokens/s on {before}, {now:.0f} tokens/s on {after}.")
    yield from _ranges(result)
    yield from _hosts(result)


def _hosts(result: Diff) -> Iterator[Line]:
    """Yield what a node needs off its GPUs, where that differs."""
    for name, tier in (("host memory", "host_memory"), ("NVMe or CXL memory", "tier_memory")):
        was_size, now_size = (getattr(item.figures, tier) for item in (result.a, result.b))
        if was_size != now_size:
            yield Line(f"{name[:1].upper()}{name[1:]} per node: {gib(was_size)} → {gib(now_size)} GiB.")


def _ranges(result: Diff) -> Iterator[Line]:
    """What published runs say of predicted times; those that none validates have a warning."""
    times = [side.time for side in (result.a, result.b) if side.time.validated]
    for basis, time in {time.basis: time for time in times}.items():
        low, high = time.low / time.step, time.high / time.step
        text = f"Step times: × {low:.1f} to × {high:.1f} ({basis})."
        yield Line(text, "faint")


def _bytes(result: Diff, terms: int | None) -> Iterator[Block]:
    yield _components(result)
    if result.terms:
        yield _terms(result, terms)


def _components(result: Diff) -> Table:
    """From A to B across, component by component."""
    before, after = _sizes(result.a.figures), _sizes(result.b.figures)
    costs = [_sizes(step.cost) for step in result.steps]
    rows = tuple(
        (
            component_name(name),
            gib(was),
            [_gib(cost[name]) for cost in costs],
            gib(after[name]),
            _gib(after[name] - was),
        )
        for name, was in before.items()
    )
    places = " → ".join(dict.fromkeys(phase_name(item.figures.phase) for item in (result.a, result.b)))
    return across("component", "GiB", f"At the peak ({places})", rows)


def _time(result: Diff) -> Iterator[Block]:
    """From A to B across, part of the step by part; those that take no time in any are left out."""
    points = (result.a.figures, *(step.after for step in result.steps), result.b.figures)
    names = [name for name in result.total.parts if any(point.parts[name] for point in points)]
    before, after = _seconds(result.a.figures), _seconds(result.b.figures)
    costs = [_seconds(step.cost) for step in result.steps]
    digits = max(0, 3 - floor(log10(max(point.step for point in points))))
    rows = tuple(
        (part_name(name), f"{before[name]:.{digits}f}", [signed(cost[name], digits) for cost in costs],
         f"{after[name]:.{digits}f}", signed(after[name] - before[name], digits))
        for name in (*names, "step")
    )  # fmt: skip
    yield across("part", "s", "Time of a step", rows)


def across(name: str, unit: str, title: str, rows: Iterable[tuple[str, str, list[str], str, str]]) -> Table:
    """Return figures of A and B with every step between them; a single step is the change itself."""
    listed = list(rows)
    steps = range(1, len(listed[0][2]) + 1) if len(listed[0][2]) > 1 else range(0)
    columns = (
        Column(name),
        Column("A", unit, right=True),
        *(Column(f"step {index}", unit, right=True, priority=1) for index in steps),
        Column("B", unit, right=True),
        Column("change", unit, right=True, priority=2 if steps else 0),
    )
    filled = tuple((head, was, *(costs if steps else ()), now, change) for head, was, costs, now, change in listed)
    return Table(title, columns, filled)


def _seconds(of: DiffFigures | DiffCost) -> dict[str, float]:
    return {**of.parts, "step": of.step}


def _sizes(of: DiffFigures | DiffCost) -> dict[str, int]:
    return {**of.components.model_dump(), "device": of.device}


def _terms(result: Diff, most: int | None) -> Table:
    shown = result.terms[:most]
    columns = header("component <1 | term | A [GiB] > | B [GiB] > | change [GiB] > | kind <2")
    rows = tuple(
        (
            component_name(item.component),
            item.name,
            gib(item.before),
            gib(item.after),
            _gib(item.change),
            _KINDS.get(item.kind, item.kind),
        )
        for item in shown
    )
    count = f"{len(shown)} of {len(result.terms)}"
    return Table(f"Largest changes at the peak ({count})", columns, rows)


def _foot(result: Diff) -> Iterator[Block]:
    for warning in result.warnings:
        yield Line(f"Warning: {warning}", "warning")
    for index, side in (("A", result.a), ("B", result.b)):
        yield from (Line(f"{index}: {remark}", "warning") for remark in side.remarks)
    for index, side in (("A", result.a), ("B", result.b)):
        yield Code(f"{index} as an estimate", side.estimate.command)
    if result.command:
        yield Code("Reproduce with", result.command)


def _data(result: Diff) -> Table:
    rows = [_row(index, step) for index, step in enumerate(result.steps, 1)]
    end = result.b
    last = (str(end.figures.device), end.figures.verdict, "", "", end.estimate.command)
    rows.append(("all", "", "", *_plain(result.total), *last))
    return Table("Steps", tuple(Column(name, right=name not in _TEXTS) for name in _DATA), tuple(rows))


def _row(index: int, step: DiffStep) -> tuple[str, ...]:
    follows = "; ".join(f"{field.option} {field.was} → {field.now}" for field in step.fields if field.follows)
    alone = "" if step.alone is None else str(step.alone.device)
    last = (str(step.after.device), step.after.verdict, alone, step.impossible, step.command)
    return (str(index), step.name, follows, *_plain(step.cost), *last)


def _plain(cost: DiffCost) -> tuple[str, ...]:
    parts = cost.components.model_dump().values()
    total = (cost.device, cost.allocated, cost.reserved, *parts, cost.host_memory, cost.tier_memory)
    times = (cost.step, cost.tokens_per_second_per_gpu, *cost.parts.values())
    return (*map(str, total), *(f"{value:.6g}" for value in times))
