"""An explained failure as a document: the cause first, then the facts, then where the bytes went, then what helps."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from memcalc.report.tables import Block, Code, Column, Line, Listing, Report, Table, gib, header, made, percent, said
from memcalc.results.names import component_name
from memcalc.results.triage import DOUBT, Triage, TriageCause, TriageComparison, TriageFailure, TriageShare, TriageSite
from memcalc.units import GIB, KIB, MIB, format_bytes, signed

_MOODS = {"certain": "bad", "likely": "bad", "possible": "close"}
_SHARE = Column("share", "%", right=True, meter=True, priority=1)
_MOST_RANKS = 16
LISTED = 3
"""Changes that a screen has: those that come first are the ones that fit."""
MOST = 3
"""Categories of a snapshot that a screen names."""
_NONE_ENOUGH = "No single change is enough; memcalc plan searches all strategies."
_EVIDENCE = 2
"""Lines of evidence on a screen."""


def report(result: Triage, path: str = "") -> Report:
    """Return the answer of ``memcalc triage``; `path` is the file as it was given."""
    blocks = (
        Line(result.summary, "verdict", "bad" if result.failures else "good" if result.answered else "close"),
        Line(_what(result), "text"),
        *_failures(result),
        *_causes(result),
        *_memory(result),
        *_job(result),
        *(Line(f"Unknown: {item}.", "faint") for item in result.unknown),
        *_record(result),
    )
    return made(result, _data(result), *blocks, screen=_screen(result, path or result.source))


def _screen(result: Triage, path: str) -> Iterator[Block]:
    """Yield what a terminal shows: the cause, two lines of facts, what would help, and what to do next."""
    yield Line(result.summary, "verdict", "bad" if result.failures else "good" if result.answered else "close")
    if result.failures:
        yield from _read(result, result.failures[0])
    else:
        yield Line(_what(result), "text")
    yield from _causes(result, brief=True)
    yield from _alive(result)
    doubts = [f"Unknown: {item}." for item in result.unknown if item.startswith(DOUBT) and result.answered]
    yield from (Line(doubt, "warning") for doubt in doubts)
    if result.changes:
        yield _changes(result, LISTED)._replace(titled=False)
    on_gpu = not any(failure.backend == "host" for failure in result.failures)
    if result.estimate and on_gpu and not (doubts or any(change.enough for change in result.changes)):
        yield Line(_NONE_ENOUGH, "warning")
    if not result.answered:
        yield from (Line(f"Unknown: {item}.", "faint") for item in result.unknown)
        yield from _record(result)
        return
    if result.failures and on_gpu and not result.estimate:
        asks = f"memcalc triage {shlex.quote(path)} --model NAME --gpu NAME --gpus N"
        yield Code("Next, what would make the job fit", asks)
    more = {
        "each cause": len(result.causes) > 1,
        "all changes": len(result.changes) > LISTED,
        "measured vs. estimate": bool(result.comparison),
        "all facts": True,
    }
    yield Line(f"-v: {', '.join(name for name, there in more.items() if there)}, how to record", "faint")


def _alive(result: Triage) -> Iterator[Line]:
    """Yield what is alive in a snapshot: its largest categories and call sites, and how many there are besides."""
    memory = result.memory
    if memory is None:
        return
    listed = (("Alive", MOST, [(share.category, share) for share in result.shares]),
              ("Made by", 1, [(site.site, site) for site in result.sites]))  # fmt: skip
    for label, most, parts in listed:
        named = [f"{name} {_size(part.bytes)} ({percent(part.bytes, memory.allocated)}%)" for name, part in parts]
        more = [f"{len(named) - most} more: -v"] * (len(named) > most)
        if named:
            yield said(label, *named[:most], *more)


def _read(result: Triage, failure: TriageFailure) -> Iterator[Block]:
    """Yield what a message says, in two lines: the request and the GPU, then who holds its memory."""
    device = f"GPU {failure.device}" if failure.device is not None else "Host" if failure.backend == "host" else "GPU"
    free = f"{_size(failure.free)} of {_size(failure.capacity)} free" if failure.free and failure.capacity else ""
    tried = f"requested {_size(failure.tried)}" if failure.tried else ""
    yield said(device, *filter(None, (tried, free, _where(result, failure))))
    named = (("PyTorch allocated", failure.allocated), ("cached", failure.unallocated), ("outside", failure.outside))
    holders = [f"{name} {_size(size)}" for name, size in named if size is not None]
    if holders:
        yield said("Held", *holders, *(f"process {other.pid} {_size(other.bytes)}" for other in failure.others))


def _where(result: Triage, failure: TriageFailure) -> str:
    """Where the run was: the phase, the line of the script, the line of the log."""
    site = failure.site.partition(" in ")[0].strip() if failure.site else ""
    where = ", ".join(filter(None, (site, f"{result.source}:{failure.line}" if failure.line else "")))
    return f"{failure.phase or 'phase unknown'} ({where})" if where else failure.phase or ""


def _what(result: Triage) -> str:
    if result.kind == "message":
        first = result.failures[0]
        return f"{result.source}, line {first.line}: {first.backend} message, form {first.form}"
    memory = result.memory
    assert memory is not None  # noqa: S101  # a snapshot has one
    count = f"{memory.steps} step{'s' if memory.steps > 1 else ''}"
    match = f", {count} found by {memory.steps_by}" if memory.steps else ""
    entries = f"{memory.entries:,} trace entries" if memory.entries else "no trace"
    return f"{result.source}: memory snapshot of device {memory.device}, {memory.segments} segments, {entries}{match}"


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
    ("tried", "requested"),
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
    for failure in result.failures[:_MOST_RANKS]:
        named = f"rank {failure.rank}, " if failure.rank else ""
        device = f"device {failure.device}" if failure.device is not None else "device unknown"
        facts = [
            f"{label} {_size(getattr(failure, name))}" for name, label in _FACTS if getattr(failure, name) is not None
        ]
        others = [f"process {other.pid} {_size(other.bytes)}" for other in failure.others]
        figures_read = [*facts, *others] or ["no figures"]
        yield Line(
            f"Read ({named}{device}): {', '.join(figures_read)}.",
            label="Read",
            items=(f"{named}{device}", *figures_read),
        )
        yield from _place(failure)
    if len(result.failures) > _MOST_RANKS:
        yield Line(f"… and {len(result.failures) - _MOST_RANKS} more.", "faint")


def _place(item: TriageFailure) -> Iterator[Block]:
    if item.phase or item.site:
        by = f", by {item.evidence}" if item.evidence else ", since autograd's engine has no Python frame"
        during = f"Phase: {item.phase}{by}" if item.phase else "Phase: unknown (no stack trace)"
        text = f"{during}; called at {item.site}" if item.site else during
        yield Line(f"{text}.", label="Phase", items=(text.removeprefix("Phase: "),))


def _causes(result: Triage, *, brief: bool = False) -> Iterator[Block]:
    """Yield the causes with what speaks for them and what helps; ``brief``: of those after the first the name alone."""
    if result.causes:
        yield Line("Causes", "title")
    for number, cause in enumerate(result.causes, 1):
        code = "" if brief else f" ({cause.code})"
        yield Line(f"{number}. {cause.confidence}: {cause.title}{code}", "text", _MOODS[cause.confidence])
        if brief and number > 1:
            continue
        yield from (Line(f"   {evidence}") for evidence in cause.evidence[: _EVIDENCE if brief else None])
        if cause.confidence != "possible" or number == 1:
            yield Line(f"   → {cause.remedy}")


def _memory(result: Triage) -> Iterator[Block]:
    memory = result.memory
    if memory is None:
        return
    yield from _shares(result)
    if result.growth:
        rows = tuple(
            (item.site, _size(round(item.bytes_per_step)), f"{item.blocks_per_step:.3g}", str(item.steps))
            for item in result.growth
        )
        titles = ("growth per step", "blocks per step", "steps")
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
    fails = "fails there too" if memory.replay_repeats else "does not fail there: the replay is not the run"
    return f"; the failed request {fails}, and with them it is {'served' if memory.replay_serves else 'not served'}"


def _shares(result: Triage) -> Iterator[Block]:
    memory = result.memory
    assert memory is not None  # noqa: S101  # a snapshot has one
    unit, total = ("GiB", GIB) if memory.allocated >= 4 * GIB else ("MiB", MIB)
    columns = (Column("size", unit, right=True), _SHARE, Column("blocks", right=True))

    def figures(share: TriageShare | TriageSite) -> tuple[str, ...]:
        return f"{share.bytes / total:.2f}", percent(share.bytes, memory.allocated), f"{share.blocks:,}"

    rows = tuple((share.category, *figures(share)) for share in result.shares)
    yield Table(f"Alive at {memory.moment}", (Column("category"), *columns), rows)
    rows = tuple((share.site, share.category, *figures(share)) for share in result.sites)
    yield Table("By call site", (*header("call site | category"), *columns), rows)


def _job(result: Triage) -> Iterator[Block]:
    if not result.estimate:
        return
    yield Line(f"The job: {result.estimate}.")
    rows = tuple(
        (component_name(change.name), gib(change.measured, 3), gib(change.estimated, 3), _gap(change))
        for change in result.comparison
    )
    columns = tuple(
        Column(name, "GiB" if at else "", right=bool(at))
        for at, name in enumerate(("figure", "measured", "estimate", "difference"))
    )
    yield Table("Measured vs. estimate", columns, rows)
    if result.changes:
        yield _changes(result)
    if not any(change.enough for change in result.changes):
        yield Line(_NONE_ENOUGH, "warning")
    yield Code("Same job as an estimate", result.command)


def _gap(change: TriageComparison) -> str:
    return signed((change.measured - change.estimated) / GIB, 3)


def _changes(result: Triage, most: int | None = None) -> Table:
    rows = tuple(
        (
            f"{change.change} (your own code)" if change.own_code else change.change,
            gib(change.device),
            gib(change.saves),
            str(change.verdict).replace("-", " "),
            "yes" if change.enough else "no",
        )
        for change in result.changes[:most]
    )
    columns = header("change | peak [GiB] > | saves [GiB] > | verdict | enough <1")
    return Table("Changes that help (estimated)", columns, rows)


def _record(result: Triage) -> Iterator[Block]:
    if result.record:
        says = (
            "To know more, record this"
            if result.answered
            else "Not enough information. Record a snapshot and run memcalc triage on it"
        )
        yield Listing(says, "python", "\n".join(result.record))


def _data(result: Triage) -> Table:
    columns = header("rank > | code | confidence | size [bytes] > | cause | evidence | remedy")
    return Table("Causes", columns, tuple(_row(number, cause) for number, cause in enumerate(result.causes, 1)))


def _row(number: int, cause: TriageCause) -> tuple[str, ...]:
    size = "" if cause.bytes is None else str(cause.bytes)
    return str(number), cause.code, cause.confidence, size, cause.title, "; ".join(cause.evidence), cause.remedy
