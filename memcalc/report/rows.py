"""Rows as documents: those of presets, many or one in full with its sources, and those of a sweep's jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memcalc.report.tables import Block, Column, Document, Line, Report, Table, gib, header
from memcalc.specs.options import DEGREES
from memcalc.units import format_count

if TYPE_CHECKING:
    from memcalc.results.plans import Swept

Row = Mapping[str, Any]


class _Field(NamedTuple):
    column: Column
    value: Callable[[Row], str]


def _plain(title: str, key: str, priority: int = 0, *, right: bool = False, unit: str = "") -> _Field:
    return _Field(Column(title, unit, right=right, priority=priority), lambda row: _said(row[key]))


def _counted(title: str, key: str, priority: int = 0) -> _Field:
    return _Field(Column(title, right=True, priority=priority), lambda row: format_count(row[key]))


def _sized(title: str, key: str, priority: int = 0) -> _Field:
    return _Field(Column(title, "GiB", right=True, priority=priority), lambda row: gib(row[key]) if row[key] else "")


def _rate(title: str, key: str, priority: int = 0) -> _Field:
    column = Column(title, "GB/s", right=True, priority=priority)
    return _Field(column, lambda row: f"{row[key] / 1e9:.0f}" if row[key] else "")


_TITLES = {"models": "Models", "gpus": "GPUs", "nodes": "Nodes"}
_NOT_SHOWN = {"name", "groups"}
_SOURCE = _plain("source", "source", 9)
_ALIASES = _plain("also called", "aliases", 8)
_FIELDS: dict[str, tuple[_Field, ...]] = {
    "models": (
        _plain("name", "name"),
        _plain("family", "family", 3),
        _counted("parameters", "parameters"),
        _counted("active", "active_parameters", 2),
        _plain("blocks", "blocks", 1, right=True),
        _plain("longest sequence", "max_positions", 4, right=True, unit="tokens"),
        _ALIASES,
        _SOURCE,
    ),
    "gpus": (
        _plain("name", "name"),
        _plain("arch", "arch", 3),
        _sized("capacity", "capacity"),
        _sized("context", "context", 2),
        _rate("bandwidth", "bandwidth_bytes_per_s", 1),
        _rate("NVLink", "nvlink_bytes_per_s", 4),
        _plain("per node", "gpus_per_node", 5, right=True),
        _ALIASES,
        _SOURCE,
    ),
    "nodes": (
        _plain("name", "name"),
        _plain("GPU", "gpu"),
        _plain("GPUs", "gpus", right=True),
        _sized("host memory", "host_memory_bytes", 1),
        _rate("link in the node", "intra_link_bytes_per_s", 2),
        _rate("network per GPU", "internode_bytes_per_s_per_gpu", 3),
        _ALIASES,
        _SOURCE,
    ),
}


def listing(kind: str, rows: Sequence[Row]) -> Report:
    """Return the table of presets of a `kind`: models, gpus or nodes."""
    fields = _FIELDS[kind]
    cells = tuple(tuple(field.value(row) for field in fields) for row in rows)
    table = Table(_TITLES[kind], tuple(field.column for field in fields), cells)
    terminal = table.keep([index for index, field in enumerate(fields) if field is not _SOURCE])
    hint = Line(f"memcalc {kind} NAME shows one with its sources.", "faint")
    return Report(Document((terminal, hint), table), _payload(kind, rows))


def record(kind: str, row: Row) -> Report:
    """Return one preset in full: every field, and where it comes from."""
    shown = {key: value for key, value in row.items() if value not in (None, "", [], {}) and key not in _NOT_SHOWN}
    table, data = (
        Table(str(row["name"]), header("field | value"), tuple(say(key, value) for key, value in shown.items()))
        for say in (_fact, _datum)
    )
    return Report(Document((table,), data), _payload(kind, [row]))


def _fact(key: str, value: Any) -> tuple[str, str]:
    """Return a field and its value as a person reads them.

    >>> _fact("host_memory_bytes_per_s", 6e11), _fact("parameters", 8030261248), _fact("tied", False)
    (('host memory bandwidth', '600 GB/s'), ('parameters', '8,030,261,248 (8.03B)'), ('tied', 'no'))
    """
    name, text = _datum(key, value)
    if key == "host_memory_bytes_per_s":
        return f"{name} bandwidth", text
    if key == "tiers":
        return name, "; ".join(map(_tier, value))
    if isinstance(value, bool):
        return name, "yes" if value else "no"
    if key.endswith("parameters"):
        return name, f"{value:,} ({format_count(value)})"
    return name, f"{value:,}" if text == str(value) and isinstance(value, int) else text


def _datum(key: str, value: Any) -> tuple[str, str]:
    """Return the same for a table that programs read."""
    name = key.removesuffix("_bytes").replace("_bytes_per_s", "").replace("_", " ")
    if isinstance(value, int | float) and "bytes_per_s" in key:
        return name, f"{value / 1e9:g} GB/s"
    if isinstance(value, int) and (key.endswith("_bytes") or key in {"capacity", "context"}):
        return name, f"{gib(value)} GiB"
    if key == "peak_flops":
        return name, ", ".join(f"{dtype} {rate / 1e12:g} TFLOP/s" for dtype, rate in value.items())
    return name, _said(value)


def _tier(tier: Mapping[str, Any]) -> str:
    """Return a kind of memory off the GPU: its size, how fast it is reached, and where both are from."""
    facts = f"{gib(tier['capacity_bytes'], 0)} GiB, {tier['bandwidth_bytes_per_s'] / 1e9:g} GB/s"
    return f"{tier['name']}: {facts} ({tier['source']})"


def _payload(kind: str, rows: Sequence[Row]) -> dict[str, Any]:
    return {"schema": f"memcalc.{kind}/1", kind: [dict(row) for row in rows]}


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_said(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_said(part) for part in value)
    return str(value)


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
    (Column("offload", short=(("optimizer", "opt"), ("activations", "act"))), "offload"),
    (Column("micro", right=True, priority=3), "micro_batch"),
    (Column("peak", "GiB", right=True), "device_bytes"),
    (Column("tok/s/GPU", right=True, priority=1), "tokens_per_second_per_gpu"),
    (Column("MFU", "%", right=True, priority=7), "mfu"),
)
"""What a reader sees of a row; the data has every column."""


def report(result: Swept, top: int, written: str = "") -> Report:
    """Return the answer of ``memcalc sweep``: the first `top` rows, or the name of the file where they were written."""
    from memcalc.sweeps.rows import COLUMNS, text_of  # a list of presets needs nothing of a sweep

    right = {column.name for column in COLUMNS if column.kind in {"whole", "number"}}
    columns = tuple(Column(name, right=name in right) for name in result.columns)
    rows = tuple(tuple(text_of(value) for value in row.values()) for row in result.rows)
    document = Document(tuple(_blocks(result, top, written)), Table("Jobs", columns, rows))
    payload = result.model_dump(mode="json", by_alias=True)
    if written:
        del payload["rows"]
        payload["output"] = written
        document = Document(document.blocks, _counts(result))
    return Report(document, payload)


def _blocks(result: Swept, top: int, written: str) -> Iterator[Block]:
    from memcalc.sweeps.rows import STATUSES

    yield Line(f"{result.jobs:,} jobs ({result.product.replace('_', '-')}), {result.mode} of each", "title")
    named = (_jobs_of(status, result.counts[status]) for status in STATUSES if result.counts[status])
    yield Line(", ".join(named), "verdict")
    if written:
        yield Line(f"Written to {written}.")
    if result.rows and top:
        yield _rows(result, top)
        yield from _reasons(result.rows[:top])
        if top < len(result.rows):
            yield Line(f"{top:,} of {len(result.rows):,} rows (more: --top N; all: --output FILE)", "faint")


def _jobs_of(status: str, count: int) -> str:
    """Return how many jobs have a status, in words.

    >>> _jobs_of("fits", 1), _jobs_of("fits", 12), _jobs_of("does-not-fit", 2), _jobs_of("error", 3)
    ('1 fits', '12 fit', '2 do not fit', '3 errors')
    """
    several = {"fits": "fit", "does-not-fit": "do not fit", "error": "errors"}
    return f"{count:,} {several.get(status, status) if count > 1 else status.replace('-', ' ')}"


def _counts(result: Swept) -> Table:
    columns = header("status | jobs >")
    return Table("Jobs", columns, tuple((status, str(count)) for status, count in result.counts.items()))


def _rows(result: Swept, top: int) -> Table:
    cells = [tuple(_cell(name, row[name]) for _, name in _SHOWN) for row in result.rows[:top]]
    # a degree above 1 and what is offloaded are never hidden; where no job has one, it is not worth a column
    used = [index for index, (_, name) in enumerate(_SHOWN) if name not in (*DEGREES, "offload") or _used(cells, index)]
    return Table("Jobs", tuple(column for column, _ in _SHOWN), tuple(cells)).keep(used)


def _used(cells: Iterable[tuple[str, ...]], index: int) -> bool:
    return any(row[index] not in {"", "1", "none"} for row in cells)


def _cell(name: str, value: object) -> str:
    from memcalc.sweeps.rows import text_of

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
