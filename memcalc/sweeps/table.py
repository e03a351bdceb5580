"""The table as a file: CSV, JSON, JSON lines or Parquet, row by row, so that a million rows need no memory."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from memcalc.errors import UnknownNameError
from memcalc.files import OutputError, output_path, replacing
from memcalc.sweeps.rows import Column, Row

if TYPE_CHECKING:
    from pyarrow import DataType

__all__ = ["FORMATS", "checked", "text_of", "write"]

_GROUP = 10_000
"""Rows of a group of a Parquet file."""
Head = dict[str, Any]
"""What a JSON file says before its rows."""


def checked(name: str, force: bool) -> Path:
    """Return the place of a table, before anything is computed: the ending is known, and can be written here."""
    path = output_path(name, force)
    ending = Path(name).suffix.lower()
    if ending not in FORMATS:
        raise UnknownNameError("output ending", ending, f"must be one of {', '.join(FORMATS)}", FORMATS)
    if ending == ".parquet" and find_spec("pyarrow") is None:
        raise OutputError(
            "output", name, "Parquet needs pyarrow (pip install 'memcalc[parquet]'); .csv and .json do not"
        )
    return path


def write(path: Path, ending: str, head: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    """Write a table beside `path`, and move it into place."""
    with replacing(path) as stream:
        FORMATS[ending](stream, head, columns, rows)


def text_of(value: object) -> str:
    """Return a cell as text; nothing where there is no value.

    >>> text_of(None), text_of(True), text_of(0.25)
    ('', 'true', '0.25')
    """
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _csv(stream: BinaryIO, _: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="backslashreplace", newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    writer.writerows([text_of(value) for value in row] for row in rows)
    text.flush()
    text.detach()


def _json(stream: BinaryIO, head: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    stream.write(json.dumps(head, indent=2).removesuffix("\n}").encode() + b',\n  "rows": [')
    between = b"\n    "
    for line in _objects(columns, rows):
        stream.write(between + line)
        between = b",\n    "
    stream.write(b"\n  ]\n}\n")


def _jsonl(stream: BinaryIO, _: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    stream.writelines(line + b"\n" for line in _objects(columns, rows))


def _objects(columns: Sequence[Column], rows: Iterable[Row]) -> Iterator[bytes]:
    names = [column.name for column in columns]
    return (json.dumps(dict(zip(names, row, strict=True))).encode() for row in rows)


def _parquet(stream: BinaryIO, _: Head, columns: Sequence[Column], rows: Iterable[Row]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    kinds: dict[str, DataType] = {
        "text": pa.string(),
        "whole": pa.int64(),
        "number": pa.float64(),
        "flag": pa.bool_(),
    }
    schema = pa.schema([(column.name, kinds[column.kind]) for column in columns])
    left = iter(rows)
    with parquet.ParquetWriter(stream, schema) as writer:
        while group := list(islice(left, _GROUP)):
            cells = zip(schema, zip(*group, strict=True), strict=True)
            writer.write_table(pa.table([pa.array(values, field.type) for field, values in cells], schema))


FORMATS: dict[str, Callable[[BinaryIO, Head, Sequence[Column], Iterable[Row]], None]] = {
    ".csv": _csv,
    ".json": _json,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
}
"""By the ending of the file."""
