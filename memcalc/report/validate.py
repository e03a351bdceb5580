"""A comparison with measured runs: in brief for a terminal, in full for a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from memcalc.report import accuracy
from memcalc.report.accuracy import ERROR_COLUMNS, ROW_COLUMNS, brief, counted, error_cells, row_cells, signed
from memcalc.report.render import Report
from memcalc.report.tables import Block, Column, Document, Line, Table
from memcalc.results import RunScore, Validation

__all__ = ["report"]


def report(result: Validation, worst: int = 10, *, full: bool = False) -> Report:
    """Return the answer of ``memcalc validate``: with the `worst` rows, or in `full` the page of accuracy."""
    rows = Table("Runs", ROW_COLUMNS, tuple(row_cells(score) for score in result.runs))
    blocks = accuracy.blocks(result) if full else _brief(result, worst)
    return Report(Document(tuple(blocks), rows), result.model_dump(mode="json", by_alias=True))


def _brief(result: Validation, worst: int) -> Iterable[Block]:
    yield Line(_said(result), "verdict")
    yield from (Line(f"With the calibration {said}.", "faint") for said in result.calibrations)
    yield from (Line(text, mood=mood) for text, mood in _verdicts(result))
    if result.runs:
        groups = [group for group in result.groups if group.by == "group"]
        columns = (Column("group"), Column("figure"), *ERROR_COLUMNS)
        yield Table("By group", columns, tuple((g.name, g.figure, *error_cells(g)) for g in groups))
    if result.runs and worst:
        yield _worst(result.runs, worst)
    if result.not_modelled:
        yield _reasons(result)
    if result.left_out:
        yield Line(
            f"{counted(len(result.left_out), 'published run')} left out, each with its reason (--format markdown).",
            "faint",
        )


def _said(result: Validation) -> str:
    """Return the errors in one line."""
    total = result.summary
    if not total.count:
        return "no figure is scored"
    runs = len({score.id for score in result.runs})
    spread = ", ".join(
        f"{name} {signed(value, sign=False)}%"
        for name, value in (("median", total.median_abs_error), ("p90", total.p90_abs_error), ("worst", total.worst))
    )
    return f"{counted(total.count, 'figure')} of {counted(runs, 'run')}: |error| {spread} ({total.worst_id})"


def _verdicts(result: Validation) -> Iterable[tuple[str, str]]:
    """Return the wrong verdicts and the coverage of the interval, each with its mood."""
    total = result.summary
    if total.ran_out:
        mood = "bad" if total.false_fits else "good"
        yield f"said to fit, ran out of memory: {total.false_fits} of {total.ran_out}", mood
    if total.ran:
        yield f"said not to fit, ran: {total.false_rejects} of {total.ran}", "bad" if total.false_rejects else "good"
    if total.covered_of:
        claim = "no coverage is claimed" if total.coverage_claim is None else f"claim {100 * total.coverage_claim:.0f}%"
        yield f"reserved and device figures in the interval: {total.covered} of {total.covered_of} ({claim})", ""


def _worst(scores: Sequence[RunScore], count: int) -> Table:
    ranked = sorted(scores, key=lambda score: -abs(score.error))[:count]
    shown = [place for place, column in enumerate(ROW_COLUMNS) if column.title not in {"software", "source"}]
    return Table(f"Worst {len(ranked)}", ROW_COLUMNS, tuple(row_cells(score) for score in ranked)).keep(shown)


def _reasons(result: Validation) -> Table:
    """Return the runs without a prediction, counted by reason."""
    counted = Counter(entry.reason for entry in result.not_modelled).most_common()
    columns = (Column("runs", right=True), Column("reason"))
    return Table("Not modelled", columns, tuple((str(count), brief(reason)) for reason, count in counted))
