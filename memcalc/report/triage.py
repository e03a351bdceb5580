"""An explained failure as a document: the cause first, then the facts, then where the bytes went, then what helps."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.render import Report
from memcalc.report.tables import Block, Code, Column, Document, Line, Listing, Table, gib, percent
from memcalc.results import Triage, TriageCause, TriageFailure, TriageShare, TriageSite
from memcalc.units import GIB, KIB, MIB, format_bytes

__all__ = ["report"]

_MOODS = {"certain": "bad", "likely": "bad", "possible": "close"}
_SHARE = Column("share", "%", right=True, meter=True, priority=1)
_MOST_RANKS = 16


def report(result: Triage) -> Report:
    """Return the answer of ``memcalc triage``."""
    blocks = (
        Line(result.summary, "verdict", "bad" if result.failures else "good" if result.answered else "close"),
        Line(_what(result), "text"),
        *_failures(result),
        *_causes(result),
        *_memory(result),
        *_job(result),
        *(Line(f"Not known: {one}.", "faint") for one in result.unknown),
        *_record(result),
    )
    return Report(Document(blocks, _data(result)), result.model_dump(mode="json", by_alias=True))


def _what(result: Triage) -> str:
    if result.kind == "message":
        first = result.failures[0]
        return f"{result.source}, line {first.line}: {first.backend} message, form {first.form}"
    memory = result.memory
    assert memory is not None  # noqa: S101  # a snapshot has one
    count = f"{memory.steps} step{'s' if memory.steps > 1 else ''}"
    found = f", {count} found by {memory.steps_by}" if memory.steps else ""
    entries = f"{memory.entries:,} trace entries" if memory.entries else "no trace"
    return f"{result.source}: memory snapshot of device {memory.device}, {memory.segments} segments, {entries}{found}"


def _size(size: int | None) -> str:
    """A size in the unit that suits it.

    >>> _size(3 << 30), _size(20 << 20), _size(2048), _size(None)
    ('3.00 GiB', '20.0 MiB', '2.0 KiB', '')
    """
    if size is None:
        return ""
    for unit, least, digits in (("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", KIB, 1)):
        if abs(size) >= least:
            return format_bytes(size, unit, digits)
    return format_bytes(size, "B", 0)


_FACTS = (
    ("tried", "asked for"),
    ("capacity", "capacity"),
    ("limit", "allowed"),
    ("free", "free in the driver"),
    ("allocated", "allocated by PyTorch"),
    ("private_pools", "in private pools"),
    ("unallocated", "reserved but unallocated"),
    ("reserved", "reserved by PyTorch"),
    ("this_process", "this process"),
    ("outside", "this process, outside PyTorch"),
)


def _failures(result: Triage) -> Iterator[Block]:
    for one in result.failures[:_MOST_RANKS]:
        named = f"rank {one.rank}, " if one.rank else ""
        device = f"device {one.device}" if one.device is not None else "device not said"
        facts = [f"{label} {_size(getattr(one, name))}" for name, label in _FACTS if getattr(one, name) is not None]
        others = [f"process {other.pid} {_size(other.bytes)}" for other in one.others]
        told = [*facts, *others] or ["no figures"]
        yield Line(f"Read ({named}{device}): {', '.join(told)}.", label="Read", items=(f"{named}{device}", *told))
        yield from _place(one)
    if len(result.failures) > _MOST_RANKS:
        yield Line(f"… and {len(result.failures) - _MOST_RANKS} more.", "faint")


def _place(one: TriageFailure) -> Iterator[Block]:
    if one.phase or one.site:
        by = f", by {one.evidence}" if one.evidence else ", since autograd's engine has no Python frame"
        during = f"Phase: {one.phase}{by}" if one.phase else "Phase: not told by the stack"
        said = f"{during}; called at {one.site}" if one.site else during
        yield Line(f"{said}.", label="Phase", items=(said.removeprefix("Phase: "),))


def _causes(result: Triage) -> Iterator[Block]:
    if result.causes:
        yield Line("Causes", "title")
    for number, one in enumerate(result.causes, 1):
        yield Line(f"{number}. {one.confidence}: {one.title} ({one.code})", "text", _MOODS[one.confidence])
        yield from (Line(f"   {evidence}") for evidence in one.evidence)
        if one.confidence != "possible" or number == 1:
            yield Line(f"   → {one.remedy}")


def _memory(result: Triage) -> Iterator[Block]:
    memory = result.memory
    if memory is None:
        return
    yield from _shares(result)
    if result.growth:
        rows = tuple(
            (one.site, _size(round(one.bytes_per_step)), f"{one.blocks_per_step:.3g}", str(one.steps))
            for one in result.growth
        )
        titles = ("growth a step", "blocks a step", "steps")
        yield Table(
            "Growing in every step", (Column("call site"), *(Column(name, right=True) for name in titles)), rows
        )
    yield Line(
        f"At the end: {_size(memory.end_allocated)} allocated of {_size(memory.end_reserved)} reserved, "
        f"{_size(memory.holes)} in holes, the largest {_size(memory.largest_hole)}."
    )
    if memory.replay_reserved is not None and memory.replay_expandable is not None:
        yield Line(
            f"A replay of the trace reserves {_size(memory.replay_reserved)} at its peak, "
            f"{_size(memory.replay_expandable)} with expandable segments{_replay(result)}."
        )


def _replay(result: Triage) -> str:
    memory = result.memory
    if memory is None or not result.failures:
        return ""
    fails = "fails there too" if memory.replay_repeats else "does not fail there, so that the replay is not the run"
    return f"; the failed request {fails}, and with them it is {'served' if memory.replay_serves else 'not served'}"


def _shares(result: Triage) -> Iterator[Block]:
    """Where the bytes stand, by category and by call site."""
    memory = result.memory
    assert memory is not None  # noqa: S101  # a snapshot has one
    unit, whole = ("GiB", GIB) if memory.allocated >= 4 * GIB else ("MiB", MIB)
    columns = (Column("size", unit, right=True), _SHARE, Column("blocks", right=True))

    def figures(one: TriageShare | TriageSite) -> tuple[str, ...]:
        return f"{one.bytes / whole:.2f}", percent(one.bytes, memory.allocated), f"{one.blocks:,}"

    rows = tuple((one.category, *figures(one)) for one in result.shares)
    yield Table(f"Alive at {memory.moment}", (Column("category"), *columns), rows)
    rows = tuple((one.site, one.category, *figures(one)) for one in result.sites)
    yield Table("By call site", (Column("call site"), Column("category"), *columns), rows)


def _job(result: Triage) -> Iterator[Block]:
    if not result.estimate:
        return
    yield Line(f"The job: {result.estimate}.")
    rows = tuple(
        (one.name, gib(one.measured, 3), gib(one.estimated, 3), gib(one.measured - one.estimated, 3))
        for one in result.comparison
    )
    columns = tuple(
        Column(name, "GiB" if at else "", right=bool(at))
        for at, name in enumerate(("figure", "measured", "estimate", "difference"))
    )
    yield Table("Measured beside the estimate", columns, rows)
    if result.changes:
        changes = tuple(
            (one.change, gib(one.device), gib(one.saves), str(one.verdict), "yes" if one.enough else "no")
            for one in result.changes
        )
        columns = (
            Column("change"), Column("peak", "GiB", right=True), Column("saves", "GiB", right=True), Column("verdict"),
            Column("enough"),
        )  # fmt: skip
        yield Table("Changes, proved by the estimate", columns, changes)
    else:
        yield Line(
            "No single change of the job makes its estimate smaller; memcalc plan searches all strategies.", "warning"
        )
    yield Code("The job as an estimate, byte by byte", result.command)


def _record(result: Triage) -> Iterator[Block]:
    if result.record:
        says = (
            "To know more, record this"
            if result.answered
            else "Cannot tell from this alone. Record this, and give it to triage"
        )
        yield Listing(says, "python", "\n".join(result.record))


def _data(result: Triage) -> Table:
    """The causes, as CSV."""
    columns = (
        Column("rank", right=True), Column("code"), Column("confidence"), Column("size", "bytes", right=True),
        Column("cause"), Column("evidence"), Column("remedy"),
    )  # fmt: skip
    return Table("Causes", columns, tuple(_row(number, one) for number, one in enumerate(result.causes, 1)))


def _row(number: int, one: TriageCause) -> tuple[str, ...]:
    size = "" if one.bytes is None else str(one.bytes)
    return str(number), one.code, one.confidence, size, one.title, "; ".join(one.evidence), one.remedy
