"""Presets as documents: a table of many, or one in full with its sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from memcalc.report.tables import Column, Document, Line, Report, Table, gib, header
from memcalc.units import format_count

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
    cells = tuple(_fact(key, value) for key, value in shown.items())
    table = Table(str(row["name"]), header("field | value"), cells)
    return Report(Document((table,), table), _payload(kind, [row]))


def _fact(key: str, value: Any) -> tuple[str, str]:
    name = key.removesuffix("_bytes").replace("_bytes_per_s", "").replace("_", " ")
    if isinstance(value, int | float) and "bytes_per_s" in key:
        return name, f"{value / 1e9:g} GB/s"
    if isinstance(value, int) and (key.endswith("_bytes") or key in {"capacity", "context"}):
        return name, f"{gib(value)} GiB"
    if key == "peak_flops":
        return name, ", ".join(f"{dtype} {rate / 1e12:g} TFLOP/s" for dtype, rate in value.items())
    return name, _said(value)


def _payload(kind: str, rows: Sequence[Row]) -> dict[str, Any]:
    return {"schema": f"memcalc.{kind}/1", kind: [dict(row) for row in rows]}


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_said(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_said(part) for part in value)
    return str(value)
