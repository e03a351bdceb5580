"""Lengths of the sequences of a data set: read from a file within bounds, or a log-normal through two quantiles."""

from __future__ import annotations

import csv
import io
import json
import re
import tokenize
from dataclasses import dataclass
from functools import cached_property
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from memcalc.errors import FileError, InputError
from memcalc.files import regular
from memcalc.units import parse_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

MOST_BYTES = 64 * 2**20
"""Size of a file [bytes]."""
MOST_LENGTHS = 1_000_000
"""Lengths of a file [1]: a sample of a larger data set says the same."""
LONGEST = 100_000_000
"""A length [tokens]."""
QUANTILES = 65_536
"""Lengths that stand for a distribution [1]."""
COLUMNS = ("length", "lengths", "tokens", "num_tokens", "n_tokens", "seq_len")
"""Names of a CSV's column of lengths, where it has several."""
_DISTRIBUTION = re.compile(r"[^:/\\]+:[^:/\\]+:[^:/\\]+")
_ALLOWED = "must be a file of lengths, or p50:p99:max in tokens, as in 300:1800:4k"


@dataclass(frozen=True, eq=False)
class Lengths:
    """The sequences of a data set by their lengths."""

    text: str
    """A file's name, or the quantiles as typed."""
    tokens: NDArray[np.int64]
    """Of each sequence, in the file's order [tokens]."""

    @cached_property
    def ascending(self) -> NDArray[np.int64]:
        """The same, sorted [tokens]."""
        return np.sort(self.tokens)

    @property
    def most(self) -> int:
        """The longest [tokens]."""
        return int(self.ascending[-1])

    def quantile(self, share: float) -> int:
        """The length that this share of the sequences does not exceed [tokens]."""
        count = len(self.tokens)
        return int(self.ascending[min(max(int(np.ceil(share * count)) - 1, 0), count - 1)])

    def cut(self, length: int) -> NDArray[np.int64]:
        """The lengths, longer sequences cut at ``length`` [tokens]."""
        return np.minimum(self.tokens, length)


def parse_lengths(value: object) -> Lengths:
    """Return the lengths that a file has, or those of ``p50:p99:max``.

    >>> lengths = parse_lengths("300:1800:4k")
    >>> lengths.quantile(0.5), lengths.quantile(0.99), lengths.most
    (300, 1800, 4096)

    Raises :class:`memcalc.errors.InputError` for quantiles that do not ascend, and for a file that cannot be used.
    """
    if not isinstance(value, str | Path) or not str(value).strip() or "\0" in str(value):
        raise InputError("lengths", value, _ALLOWED)
    text = str(value).strip()
    if _DISTRIBUTION.fullmatch(text):
        return Lengths(text, log_normal(text))
    return Lengths(text, read_file(Path(text)))


def log_normal(text: str) -> NDArray[np.int64]:
    """Lengths at even steps of a log-normal's probability, what is longer than the largest cut there [tokens].

    ``text`` is ``p50:p99:max``: the median gives the mean of the logarithm, and the 99th percentile its deviation. The
    lengths are quantiles and no draws, so that they are the same on each machine; the last of them is the largest,
    whether or not the distribution comes near it.
    """
    median, high, most = (parse_tokens(part, "lengths") for part in text.split(":"))
    if not 1 <= median <= high <= most <= LONGEST:
        raise InputError("lengths", text, f"p50, p99 and max must ascend from 1 to {LONGEST:,} tokens")
    centre, deviation = log(median), (log(high) - log(median)) / NormalDist().inv_cdf(0.99)
    normal = NormalDist(centre, deviation) if deviation else None
    at = ((index + 0.5) / QUANTILES for index in range(QUANTILES))
    logs = (normal.inv_cdf(share) if normal else centre for share in at)
    lengths = [min(max(round(exp(min(value, log(LONGEST)))), 1), most) for value in logs]
    return np.array([*lengths[:-1], most], dtype=np.int64)


def read_file(path: Path) -> NDArray[np.int64]:
    """Lengths of a file: a ``.npy`` array, a JSON list, a column of a CSV, or whole numbers line by line [tokens]."""
    data = _bytes_of(path)
    readers = {".npy": _from_npy, ".json": _from_json, ".csv": _from_csv}
    lengths = readers.get(path.suffix.lower(), _from_lines)(data, path)
    if not len(lengths):
        raise FileError("lengths", path, "must hold at least one length")
    if len(lengths) > MOST_LENGTHS:
        raise FileError("lengths", path, f"holds {len(lengths):,} lengths, at most {MOST_LENGTHS:,}: take a sample")
    low, high = int(lengths.min()), int(lengths.max())
    if low < 1 or high > LONGEST:
        wrong = low if low < 1 else high
        raise FileError("lengths", path, f"a length is {wrong}, and must be from 1 to {LONGEST:,} tokens")
    return lengths.astype(np.int64)


def _bytes_of(path: Path) -> bytes:
    try:
        with regular(path) as stream:
            data = stream.read(MOST_BYTES + 1)
    except FileError as error:
        raise FileError("lengths", path, f"{error.allowed.rstrip('.')}; {_ALLOWED}") from None
    if len(data) > MOST_BYTES:
        raise FileError("lengths", path, f"must have at most {MOST_BYTES // 2**20} MiB: take a sample")
    return data


def _text_of(data: bytes, path: Path) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileError("lengths", path, "must be UTF-8 text, or end in .npy") from None


def _from_lines(data: bytes, path: Path) -> NDArray[np.int64]:
    rows = enumerate(_text_of(data, path).splitlines(), 1)
    return _numbers(((number, line.strip()) for number, line in rows if line.strip()), path, "line")


def _from_json(data: bytes, path: Path) -> NDArray[np.int64]:
    try:
        values = json.loads(_text_of(data, path))
    except (ValueError, RecursionError):
        raise FileError("lengths", path, "must be JSON: a list of whole numbers") from None
    if not isinstance(values, list):
        raise FileError("lengths", path, "must be a JSON list of whole numbers")
    return _numbers(enumerate(values, 1), path, "entry")


def _from_csv(data: bytes, path: Path) -> NDArray[np.int64]:
    """The only column, or that of a known name."""
    try:
        rows = [row for row in csv.reader(io.StringIO(_text_of(data, path), newline="")) if row]
    except csv.Error:
        raise FileError("lengths", path, "must be CSV") from None
    if not rows:
        raise FileError("lengths", path, "must hold at least one length")
    header = [name.strip() for name in rows[0]]
    headed = not all(name.isdigit() for name in header)
    column = 0
    if len(header) > 1:
        known = [index for index, name in enumerate(header) if name.lower() in COLUMNS]
        if len(known) != 1:
            allowed = f"must have one column, or one named {', '.join(COLUMNS)}; it has {', '.join(header[:8])}"
            raise FileError("lengths", path, allowed)
        column = known[0]
    pairs = ((index + headed + 1, row[column : column + 1]) for index, row in enumerate(rows[headed:]))
    return _numbers(((number, cell[0].strip() if cell else "") for number, cell in pairs), path, "row")


def _from_npy(data: bytes, path: Path) -> NDArray[np.int64]:
    """One axis of whole numbers; the header must say no more than is there."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(stream)
    except (ValueError, KeyError, OSError, SyntaxError, TypeError, tokenize.TokenError):
        raise FileError("lengths", path, "must be an array that numpy.save wrote") from None
    body = data[stream.tell() :]
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.itemsize * shape[0] != len(body):
        raise FileError("lengths", path, "must be an array of one axis of whole numbers, as long as its header says")
    values = np.frombuffer(body, dtype=dtype)
    if dtype.kind == "u" and len(values) and int(values.max()) > LONGEST:
        raise FileError("lengths", path, f"a length is {int(values.max())}, and must be from 1 to {LONGEST:,} tokens")
    return values.astype(np.int64)


def _numbers(values: Iterable[tuple[int, Any]], path: Path, what: str) -> NDArray[np.int64]:
    """Whole numbers; the first that is none is named by its number."""
    numbers: list[int] = []
    for position, value in values:
        digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(LONGEST))
        if not digits and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LONGEST):
            shown = f"{value!r}"[:40] if isinstance(value, str | int | float | bool | None) else type(value).__name__
            allowed = f"{what} {position} is {shown}, and must be a whole number from 1 to {LONGEST:,}"
            raise FileError("lengths", path, allowed)
        numbers.append(int(value))
        if len(numbers) > MOST_LENGTHS:
            raise FileError("lengths", path, f"holds more than {MOST_LENGTHS:,} lengths: take a sample")
    return np.array(numbers, dtype=np.int64)
