"""A calibration as a document: what it comes to, each figure before and after, what held-back rows say."""

from __future__ import annotations

from collections.abc import Iterator

from memcalc.report.render import Report
from memcalc.report.tables import Block, Column, Document, Line, Table
from memcalc.results import Calibrated, CalibratedFigure
from memcalc.specs.calibration import Gain
from memcalc.units import MIB

__all__ = ["report"]

_KINDS = {"step time": "Structural, by whichever constants hold", "workspace": "Not as the source says"}
_COLUMNS = (
    Column("part", priority=2),
    Column("figure"),
    Column("unit", priority=1),
    Column("shipped", right=True),
    Column("measured", right=True),
    Column("low", right=True, priority=1),
    Column("high", right=True, priority=1),
    Column("rows", right=True),
    Column("written"),
)
_GAIN = (
    Column("figure"),
    Column("unit"),
    Column("rows", right=True),
    Column("median", right=True),
    Column("p90", right=True),
    Column("in range", right=True, priority=1),
    Column("width", "%", right=True, priority=1),
    Column("better"),
)


def report(result: Calibrated) -> Report:
    """Return the answer of ``memcalc calibrate``."""
    table = Table("Figures", _COLUMNS, tuple(_row(figure) for figure in result.figures))
    return Report(Document(tuple(_blocks(result, table)), table), result.model_dump(mode="json", by_alias=True))


def _blocks(result: Calibrated, table: Table) -> Iterator[Block]:
    found = result.calibration
    yield Line(_said(result), "verdict", "bad" if found.empty else "good")
    yield table
    if found.gain:
        yield Table("Errors of held-back rows, before → after", _GAIN, tuple(_gain(gain) for gain in found.gain))
    for residual in found.residual:
        yield Line(f"{_KINDS.get(residual.kind, 'Structural, and in no figure')}: {residual.says}.", "warning")
    for left in found.left:
        yield Line(f"As shipped: {left.reason}.")
    for note in found.note:
        yield Line(f"Note: {note}", "faint")
    if result.not_predicted:
        count = len(result.not_predicted)
        yield Line(f"{count} rows cannot be predicted and are not used; memcalc validate says why.", "faint")


def _said(result: Calibrated) -> str:
    found = result.calibration
    rows = f"{found.basis}, {found.held_back} held back"
    if found.empty:
        return f"{result.gpu}: nothing predicts held-back rows better than what is shipped ({rows})"
    parts = dict.fromkeys(figure.part for figure in result.figures if figure.written)
    return f"{result.gpu} · {', '.join(parts)} · {rows} · {found.dates}"


def _row(figure: CalibratedFigure) -> tuple[str, ...]:
    size = figure.unit == "bytes"
    values = [figure.shipped, figure.fitted, figure.low, figure.high]
    cells = ["" if value is None else f"{value / MIB:.1f}" if size else f"{value:.4g}" for value in values]
    unit = "MiB" if size else figure.unit
    return figure.part, figure.name, unit, *cells, str(figure.rows), "yes" if figure.written else "no"


def _gain(gain: Gain) -> tuple[str, ...]:
    scale, unit = (MIB, "MiB") if gain.unit == "bytes" else (0.01, "%")
    errors = [_pair(pair, scale) for pair in (gain.median, gain.p90)]
    inside = "" if gain.covered is None else "{} → {}".format(*gain.covered)
    width = "" if gain.width is None else _pair(gain.width, 0.01)
    return gain.figure, unit, str(gain.rows), *errors, inside, width, "yes" if gain.better else "no"


def _pair(pair: tuple[float, float], scale: float) -> str:
    before, after = (value / scale for value in pair)
    return f"{before:.1f} → {after:.1f}"
