"""An engine's start-up log as a document: why it failed, and each figure beside its prediction."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.tables import Block, Line, Report, Table, gib, header, made
from memcalc.results.serving import EngineLog, LoggedTerm


def report(result: EngineLog) -> Report:
    """Return the answer of ``memcalc triage`` about a start-up log."""
    return made(result, _table(result), *_head(result), _table(result), *_foot(result))


def _head(result: EngineLog) -> Iterator[Block]:
    served = result.served
    differs = f"{result.differs} differ from the prediction" if result.differs else "as predicted"
    agreed = differs if result.terms else "it has no figure to compare"
    yield Line(f"{result.failure or 'started'} · {agreed}", "verdict", "bad" if result.failure else "good")
    yield Line(
        f"{result.source}: {served.model.name} on {served.hardware.gpu}, {served.engine}, tp {served.tp}, utilization "
        f"{served.utilization:g}, {served.max_seqs} sequences of {served.max_len:,} tokens",
        "title",
    )
    yield from (Line(f"{text}.", label="Cause") for text in result.causes)
    yield from (Line(f"{text}.", label="Change") for text in result.changes)


def _table(result: EngineLog) -> Table:
    columns = header("figure | logged > | predicted > | logged less predicted > | as usual")
    return Table("A GPU of the first stage", columns, tuple(_row(term) for term in result.terms))


def _row(term: LoggedTerm) -> tuple[str, ...]:
    def shown(size: int) -> str:
        return f"{size:,}" if term.unit == "tokens" else f"{gib(size)} GiB"

    return (
        term.name,
        shown(term.logged),
        shown(term.predicted),
        shown(term.logged - term.predicted),
        ("yes" if term.agrees else "no"),
    )


def _foot(result: EngineLog) -> Iterator[Block]:
    yield from (Line(f"The log does not say {text}.", "warning") for text in result.unknown)
