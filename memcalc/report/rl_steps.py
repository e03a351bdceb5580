"""Jobs of post-training beside one another as documents: a difference of two, and a ladder of savings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from memcalc.report.diff import across, brief
from memcalc.report.estimate import MOODS, warned
from memcalc.report.palette import ROLES
from memcalc.report.plan_words import assumed
from memcalc.report.posttraining import head_of
from memcalc.report.tables import (
    Bars,
    BarsRow,
    Block,
    Code,
    Column,
    Line,
    Listing,
    Report,
    Table,
    facts,
    gib,
    header,
    in_one_row,
    made,
    said,
)
from memcalc.results.posttraining import RlDiff, RlFigures, RlLadder, RlStep, UpdateTime
from memcalc.units import GIB, format_count, signed

CUT = 2
"""A bar beyond this many times the capacity is cut, so that the others are seen."""
_DATA = header(
    "step > | change | verdict | binding | size [bytes] > | change [bytes] > | alone [bytes] > | host [bytes] > | "
    "rounds > | update [s] > | update, low [s] > | update, high [s] > | validated | impossible alone | command"
)


def phases_in(points: Sequence[RlFigures]) -> list[str]:
    """Return the phases of some jobs, each once, in their order."""
    return list(dict.fromkeys(phase.name for point in points for phase in point.phases))


def held(point: RlFigures, phase: str) -> int | None:
    """Return what one GPU holds in a phase [bytes]; None where a job does not have it."""
    return next((part.allocated for part in point.phases if part.name == phase), None)


def roles_at(point: RlFigures) -> tuple[tuple[str, int], ...]:
    """Return what each role holds in the binding phase [bytes], in the order in which they are stacked."""
    roles = next(phase.roles for phase in point.phases if phase.name == point.binding)
    return tuple((name, roles[name]) for name in ROLES if name in roles)


def _words(verdict: str) -> str:
    return verdict.replace("-", " ")


def _gib(size: int) -> str:
    return signed(size / GIB)


def _seconds(point: RlFigures) -> str:
    return "" if point.update is None else f"{point.update.seconds:.3g}"


def _rounds(point: RlFigures) -> str:
    return "" if point.rounds is None else str(point.rounds)


# --------------------------------------------------------------------------------------------------------- a difference


def of_diff(result: RlDiff) -> Report:
    """Return the answer of ``memcalc diff`` for two jobs of post-training."""
    points = (result.start, *(step.after for step in result.steps))
    end = points[-1]
    blocks: list[Block] = [Line(headline(result), "verdict", MOODS[end.verdict])]
    for index, name, side in (("A", result.names[0], result.a), ("B", result.names[1], result.b)):
        verdict, title, *_ = head_of(side)
        blocks += [Line(f"{index} · {name}: {verdict.text}", "title", verdict.mood), Line(title.text, "faint")]
    if result.fields:
        blocks += [_fields(result), _steps(result, points), *_notes(result), _phases(points), _roles(result)]
    blocks += [Line(f"Warning: {text}", "warning") for text in result.warnings]
    blocks += [Code(f"{index} by itself", side.command) for index, side in (("A", result.a), ("B", result.b))]
    if result.command:
        blocks.append(Code("Reproduce with", result.command))
    rows = tuple(_row(index, step) for index, step in enumerate(result.steps, 1))
    return made(result, Table("Steps", _DATA, rows), *blocks, screen=_diff_screen(result, points))


def _diff_screen(result: RlDiff, points: Sequence[RlFigures]) -> Iterator[Block]:
    """Yield what a terminal shows: what B costs, both sides in a line each, the steps, the phases, what to mind."""
    yield Line(headline(result), "verdict", MOODS[points[-1].verdict])
    titles: dict[str, None] = {}
    for index, name, side in (("A", result.names[0], result.a), ("B", result.names[1], result.b)):
        verdict, title, *_ = head_of(side)
        titles[title.text] = None
        yield said(index, name, *verdict.text.split(" · ")[1:])
    yield from (Line(text, "faint") for text in titles)
    if result.fields:
        hidden = {"verdict", "alone"}  # the first line has the one, and `-v` the other
        steps = _steps(result, points)
        shown = [index for index, column in enumerate(steps.columns) if column.title not in hidden]
        yield in_one_row(steps.keep(shown), total="GiB", then="", update="update s")
        yield in_one_row(_phases(points))
    yield from warned(result.warnings)
    yield Line("GiB per GPU; steps are cumulative. -v: each step alone, fields, roles, commands", "faint")


def headline(result: RlDiff) -> str:
    """Return what B costs beside A, in one sentence."""
    if not result.fields:
        return "No difference: A and B resolve to the same job."
    before, after = result.start, result.steps[-1].after
    more = after.allocated - before.allocated
    rooms = {gib(before.capacity, 1), gib(after.capacity, 1)}
    of = f" of {rooms.pop()} GiB" if len(rooms) == 1 else " GiB"
    verdicts = " → ".join(dict.fromkeys(_words(point.verdict) for point in (before, after)))
    size = f"{_gib(more)} GiB" if more else "the same memory"
    text = f"{verdicts} · B: {size} per GPU ({gib(before.allocated)} → {gib(after.allocated)}{of})"
    if before.update is None or after.update is None:
        return text
    share = 100 * (after.update.seconds / before.update.seconds - 1)
    return f"{text}, update {signed(share, 1)}%" if abs(share) >= 0.05 else f"{text}, update as long"


def _fields(result: RlDiff) -> Table:
    rows = [
        (
            ", ".join(
                str(at)
                for at, step in enumerate(result.steps, 1)
                if any(change.field == field.field for change in step.fields)
            ),
            field.option,
            field.was,
            field.now,
            "implied" if field.follows else "you",
        )
        for field in result.fields
    ]
    rows.sort(key=lambda row: int(row[0].partition(",")[0] or 0))
    return Table("Differences", header("step > | field | A | B | set by <1"), tuple(rows))


def _steps(result: RlDiff, points: Sequence[RlFigures]) -> Table:
    columns = (
        *header("step > | change | total [GiB] >"),
        Column("then", "GiB", right=True, meter=True, full=max(point.allocated for point in points) / GIB),
        *header("most in | verdict <3 | update [s] >1 | alone [GiB] >2"),
    )
    start, end = points[0], points[-1]
    rows = [
        ("A", "", "", *_figures(start), ""),
        *(
            (str(at), brief(step), _gib(step.change), *_figures(step.after), _alone(step))
            for at, step in enumerate(result.steps, 1)
        ),
        ("B", "total", _gib(end.allocated - start.allocated), *_figures(end), ""),
    ]
    return Table("Step by step from A to B, in the phase that holds most", columns, tuple(rows))


def _figures(point: RlFigures) -> tuple[str, ...]:
    return gib(point.allocated), point.binding, _words(point.verdict), _seconds(point)


def _alone(step: RlStep) -> str:
    return "impossible" if step.alone is None else _gib(step.alone)


def _notes(result: RlDiff) -> Iterator[Line]:
    for index, step in enumerate(result.steps, 1):
        if step.impossible:
            yield Line(f"Step {index} alone: {step.impossible}", "faint")
    if any(step.alone is not None and step.alone != step.change for step in result.steps):
        yield Line(
            "Steps are cumulative; alone: the step applied to A only. Savings interact, so they do not add up.", "faint"
        )
    before, after = result.start, result.steps[-1].after
    if before.host != after.host:
        yield Line(f"Host memory per node: {gib(before.host, 1)} → {gib(after.host, 1)} GiB.")
    if before.rounds != after.rounds and None not in (before.rounds, after.rounds):
        yield Line(f"Rounds of generation per step: {before.rounds} → {after.rounds}.")
    yield from _timed(result.samples, [before, *(step.after for step in result.steps)])


def _timed(samples: int, points: Sequence[RlFigures]) -> Iterator[Line]:
    """Yield what stands behind the times of updates."""
    times = [point.update for point in points if point.update is not None]
    for basis in dict.fromkeys(time.basis for time in times):
        yield Line(f"Updates of {samples:,} samples of the longest length: {basis}. Rollouts have no time.", "faint")


def _phases(points: Sequence[RlFigures]) -> Table:
    """From A to B across, phase by phase; a phase that a job does not have holds nothing."""
    rows: list[tuple[str, str, list[str], str, str]] = []
    for phase in phases_in(points):
        sizes = [held(point, phase) or 0 for point in points]
        steps = [_gib(now - was) for was, now in pairwise(sizes)]
        rows.append((phase, gib(sizes[0]), steps, gib(sizes[-1]), _gib(sizes[-1] - sizes[0])))
    return across("phase", "GiB", "Each phase of a step", rows)


def _roles(result: RlDiff) -> Table:
    before, after = result.start, result.steps[-1].after
    was, now = dict(roles_at(before)), dict(roles_at(after))
    rows: list[tuple[str, str, list[str], str, str]] = [
        (name, gib(was.get(name, 0)), [], gib(now.get(name, 0)), _gib(now.get(name, 0) - was.get(name, 0)))
        for name in ROLES
        if name in was or name in now
    ]
    places = " → ".join(dict.fromkeys((before.binding, after.binding)))
    return across("role", "GiB", f"Roles in the phase that holds most ({places})", rows)


# ------------------------------------------------------------------------------------------------------------- a ladder


def of_ladder(result: RlLadder) -> Report:
    """Return the answer of ``memcalc ladder --algorithm``."""
    rows = tuple(_row(index, step) for index, step in enumerate(result.steps))
    blocks = (*ladder_head(result), _bars(result), _stages(result), _stage_phases(result), *_foot(result))
    return made(result, Table("Ladder", _DATA, rows), *blocks, screen=_ladder_screen(result))


def _ladder_screen(result: RlLadder) -> Iterator[Block]:
    """Yield what a terminal shows: the bars, one row for each stage, what to mind."""
    yield from ladder_head(result)
    bars = _bars(result)
    yield bars._replace(rows=tuple(_unlike(bars.rows)), compact=True)
    stages = _stages(result)
    empty = {index for index in range(len(stages.columns)) if not any(row[index] for row in stages.rows)}
    hidden = {"total", "alone"}  # the bars have the one, and `-v` the other
    indices = [i for i, column in enumerate(stages.columns) if i not in empty and column.title not in hidden]
    yield in_one_row(stages.keep(indices), saved="saved GiB", update="update s", host="host GiB")
    for note in result.left_out:
        yield Line(f"Left out: {note}")
    yield from warned(result.warnings)
    yield from assumed(result.assumptions)
    yield Line("Stages are cumulative. -v: each phase by stage, each stage alone, commands", "faint")


def _unlike(rows: Sequence[BarsRow]) -> Iterator[BarsRow]:
    """Yield the first bar, and each that is seen to differ from the one before it."""
    yield from rows[:1]
    for before, row in pairwise(rows):
        if gib(before.size, 1) != gib(row.size, 1):
            yield row


def ladder_head(result: RlLadder) -> tuple[Line, Line]:
    """Return the first stage that fits, in one sentence, and what it is of."""
    capacity = f"{gib(result.steps[0].after.capacity, 1)} GiB"
    if result.first is None:
        least = min(result.steps, key=lambda step: step.after.allocated)
        text = f"does not fit · no stage fits; smallest is stage {result.steps.index(least)}"
        text = f"{text}, {gib(least.after.allocated, 1)} of {capacity}"
        mood = "bad"
    else:
        step = result.steps[result.first]
        where = f"from stage {result.first} ({step.name})" if step.name else "from the start"
        text = f"{step.after.verdict} · {where}, {gib(step.after.allocated, 1)} of {capacity}"
        later = [
            str(at)
            for at, after in enumerate(result.steps)
            if at > result.first and after.after.verdict == "does-not-fit"
        ]
        text = f"{text}; stage {', '.join(later)} does not" if later else text
        mood = MOODS[step.after.verdict]
    hardware = result.hardware
    subject = f"{result.algorithm} of {result.model.name} ({format_count(result.model.parameters)} parameters)"
    title = Line(f"{subject} on {hardware.gpus} × {hardware.gpu}: {result.framework}", "title")
    return Line(text, "verdict", mood), title


def stage_label(at: int, step: RlStep) -> str:
    """Return a stage's number and what it changes."""
    return f"{at}  {'+ ' + step.name if step.name else 'start'}"


def _bars(result: RlLadder) -> Bars:
    capacity = result.steps[0].after.capacity
    rows = tuple(
        BarsRow(
            stage_label(at, step),
            roles_at(step.after),
            f"{gib(step.after.allocated, 1)} GiB in {step.after.binding}, {_words(step.after.verdict)}",
            MOODS[step.after.verdict],
        )
        for at, step in enumerate(result.steps)
    )
    end = max(capacity, min(CUT * capacity, max(row.size for row in rows)))
    return Bars(rows, capacity, end, result.hardware.gpu)


def _stages(result: RlLadder) -> Table:
    columns = header(
        "# > | stage | most in | total [GiB] > | saved [GiB] > | alone [GiB] >1 | rounds >1 | update [s] > | "
        "host [GiB/node] >2 | verdict"
    )
    rows = tuple(
        (
            str(at),
            step.name or "start",
            step.after.binding,
            gib(step.after.allocated),
            _gib(-step.change) if step.name else "",
            "" if step.alone is None else _gib(-step.alone),
            _rounds(step.after),
            _seconds(step.after),
            gib(step.after.host, 1) if step.after.host else "",
            _words(step.after.verdict),
        )
        for at, step in enumerate(result.steps)
    )
    return Table("Stages", columns, rows)


def _stage_phases(result: RlLadder) -> Table:
    """What each phase holds at each stage."""
    phases = phases_in([step.after for step in result.steps])
    columns = (Column("#", right=True), *(Column(phase, "GiB", right=True) for phase in phases))
    rows = []
    for at, step in enumerate(result.steps):
        sizes = [held(step.after, phase) for phase in phases]
        rows.append((str(at), *("" if size is None else gib(size) for size in sizes)))
    return Table("Each phase by stage", columns, tuple(rows))


def _foot(result: RlLadder) -> Iterator[Block]:
    for note in result.left_out:
        yield Line(f"Left out: {note}")
    for at, step in enumerate(result.steps):
        follows = [f"{field.option} {field.was} → {field.now}" for field in step.fields if field.follows]
        if follows:
            yield Line(f"Stage {at} also changes: {', '.join(follows)}.")
    yield Line("Stages are cumulative; alone: the stage applied to the start only.", "faint")
    yield from _timed(result.samples, [step.after for step in result.steps])
    for warning in result.warnings:
        yield Line(f"Warning: {warning}", "warning")
    yield from facts("Assumed", result.assumptions)
    yield Code("Reproduce with", result.command)
    yield Listing("Stage commands", "sh", "\n".join(step.command for step in result.steps))


def _row(at: int, step: RlStep) -> tuple[str, ...]:
    point = step.after
    time = point.update
    return (
        str(at),
        step.name,
        point.verdict,
        point.binding,
        str(point.allocated),
        str(step.change),
        "" if step.alone is None else str(step.alone),
        str(point.host),
        _rounds(point),
        *(["", "", "", ""] if time is None else _timing(time)),
        step.impossible,
        step.command,
    )


def _timing(time: UpdateTime) -> list[str]:
    """Return the update with its range [s], and whether runs validate it."""
    return [*(f"{value:.4g}" for value in (time.seconds, time.low, time.high)), str(time.validated).lower()]
