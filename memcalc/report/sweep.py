"""A sweep as a document: how many jobs of each kind, and their rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memcalc.report.tables import Block, Column, Document, Line, Report, Table, gib, header
from memcalc.results.plans import Swept
from memcalc.specs.options import DEGREES
from memcalc.sweeps.rows import COLUMNS, STATUSES, text_of

_SHOWN = (
    (Column("#", right=True), "job"),
    (Column("model"), "model"),
    (Column("GPUs", right=True), "gpus"),
    (Column("GPU"), "gpu"),
    (Column("seq-len", right=True), "seq_len"),
    (Column("batch", right=True, priority=4), "global_batch"),
    (Column("status"), "status"),
    (Column("precision", priority=5), "precision"),
    (Column("ZeRO", right=True, priority=2), "zero"),
    (Column("TP", right=True, priority=2), "tp"),
    (Column("PP", right=True, priority=2), "pp"),
    (Column("CP", right=True, priority=6), "cp"),
    (Column("EP", right=True, priority=6), "ep"),
    (Column("replicas", right=True, priority=6), "dp_replicate"),
    (Column("recompute", priority=3), "recompute"),
    (Column("offload", priority=5), "offload"),
    (Column("micro", right=True, priority=3), "micro_batch"),
    (Column("peak", "GiB", right=True), "device_bytes"),
    (Column("tok/s/GPU", right=True, priority=1), "tokens_per_second_per_gpu"),
    (Column("MFU", "%", right=True, priority=7), "mfu"),
)
"""What a reader sees of a row; the data has every column."""
_RIGHT = {column.name for column in COLUMNS if column.kind in {"whole", "number"}}


def report(result: Swept, top: int, written: str = "") -> Report:
    """Return the answer of ``memcalc sweep``: the first `top` rows, or the name of the file where they were written."""
    columns = tuple(Column(name, right=name in _RIGHT) for name in result.columns)
    rows = tuple(tuple(text_of(value) for value in row.values()) for row in result.rows)
    document = Document(tuple(_blocks(result, top, written)), Table("Jobs", columns, rows))
    payload = result.model_dump(mode="json", by_alias=True)
    if written:
        del payload["rows"]
        payload["output"] = written
        document = Document(document.blocks, _counts(result))
    return Report(document, payload)


def _blocks(result: Swept, top: int, written: str) -> Iterator[Block]:
    yield Line(f"{result.jobs:,} jobs ({result.product.replace('_', '-')}), {result.mode} of each", "title")
    named = (_counted(status, result.counts[status]) for status in STATUSES if result.counts[status])
    yield Line(", ".join(named), "verdict")
    if written:
        yield Line(f"Written to {written}.")
    if result.rows and top:
        yield _rows(result, top)
        yield from _reasons(result.rows[:top])
        if top < len(result.rows):
            yield Line(f"{top:,} of {len(result.rows):,} rows (more: --top N; all: --output FILE)", "faint")


def _counted(status: str, count: int) -> str:
    """Return how many jobs have a status, in words.

    >>> _counted("fits", 1), _counted("fits", 12), _counted("does-not-fit", 2), _counted("error", 3)
    ('1 fits', '12 fit', '2 do not fit', '3 errors')
    """
    several = {"fits": "fit", "does-not-fit": "do not fit", "error": "errors"}
    return f"{count:,} {several.get(status, status) if count > 1 else status.replace('-', ' ')}"


def _counts(result: Swept) -> Table:
    columns = header("status | jobs >")
    return Table("Jobs", columns, tuple((status, str(count)) for status, count in result.counts.items()))


def _rows(result: Swept, top: int) -> Table:
    cells = [tuple(_cell(name, row[name]) for _, name in _SHOWN) for row in result.rows[:top]]
    # degrees that no plan uses are not worth a column
    used = [index for index, (_, name) in enumerate(_SHOWN) if name not in DEGREES or _used(cells, index)]
    return Table("Jobs", tuple(column for column, _ in _SHOWN), tuple(cells)).keep(used)


def _used(cells: Iterable[tuple[str, ...]], index: int) -> bool:
    return any(row[index] not in {"", "1"} for row in cells)


def _cell(name: str, value: object) -> str:
    if isinstance(value, int | float) and name == "device_bytes":
        return gib(value)
    if isinstance(value, float):
        return f"{100 * value:.1f}" if name == "mfu" else f"{value:.0f}"
    return text_of(value)


def _reasons(rows: Iterable[dict[str, object]]) -> Iterator[Line]:
    """Say each reason once, with the jobs that it is for."""
    jobs: dict[str, list[str]] = {}
    for row in rows:
        if row["reason"]:
            jobs.setdefault(str(row["reason"]), []).append(f"#{row['job']}")
    for reason, places in jobs.items():
        yield Line(f"{', '.join(places)}: {reason.rstrip('.')}.", "warning")
