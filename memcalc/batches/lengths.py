"""Lengths of the sequences of a data set, read or drawn, and the bins that packers put them into.

They are read from a file within bounds, or of a log-normal through two quantiles. Bins are filled as packers do, first
fit and best fit in descending order, and as verl balances their work.

Sources: axolotl 0.18.0, src/axolotl/utils/samplers/multipack.py (pack_group); TRL 1.10.0.dev0 at f2cd577,
trl/data_utils.py (_pack_bfd, _pack_wrapped), which ``datasets`` calls with a thousand examples at a time.
"""

from __future__ import annotations

import csv
import heapq
import io
import json
import re
import tokenize
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
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


Bins = list[list[int]]
"""Indices of the sequences of each bin."""


def first_fit(lengths: Sequence[int], capacity: int, most: int) -> Bins:
    """Each sequence goes to the first bin with room for it that has fewer than ``most``, else to a new bin.

    ``lengths`` and ``capacity`` are in [tokens], ``most`` counts sequences. What is longer than a bin is left out.

    >>> first_fit([5, 6, 4, 3, 2], 10, 200)
    [[0, 2], [1, 3], [4]]
    >>> first_fit([5, 6, 4, 3, 2], 10, 1)
    [[0], [1], [2], [3], [4]]
    """
    bins: Bins = []
    size = 1 << max(len(lengths) - 1, 1).bit_length()
    left = [0] * (2 * size)  # a tree of the largest space below each node; its leaves are the bins
    for index, length in enumerate(lengths):
        if length > capacity:
            continue
        node = _first(left, size, length)
        if node is None:
            node = size + len(bins)
            bins.append([])
            left[node] = capacity
        chosen = bins[node - size]
        chosen.append(index)
        left[node] = left[node] - length if len(chosen) < most else 0
        while node > 1:
            node >>= 1
            left[node] = max(left[2 * node], left[2 * node + 1])
    return bins


def _first(left: Sequence[int], size: int, length: int) -> int | None:
    """The leaf of the first bin with that much space."""
    if left[1] < length:
        return None
    node = 1
    while node < size:
        node = 2 * node if left[2 * node] >= length else 2 * node + 1
    return node


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> Bins:
    """The longest first, each to the bin that it leaves least space in; of bins with equal space the older one.

    >>> best_fit_decreasing([4, 2, 3, 1], 4)
    [[0], [2, 3], [1]]
    """
    bins: Bins = []
    spaces: list[int] = []  # those that some bin has, ascending
    with_space: dict[int, deque[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        at = bisect_left(spaces, length)
        if at == len(spaces):
            bins.append([])
            number, space = len(bins) - 1, capacity
        else:
            space = spaces[at]
            number = with_space[space].popleft()
            if not with_space[space]:
                spaces.pop(at)
        bins[number].append(index)
        rest = space - length
        waiting = with_space.setdefault(rest, deque())
        if rest and not waiting:
            insort(spaces, rest)
        waiting.append(number)
    return bins


def parts_of(lengths: Sequence[int], capacity: int) -> list[int]:
    """Sequences cut into parts of at most ``capacity`` [tokens].

    >>> parts_of([5, 3, 8], 4)
    [4, 1, 3, 4, 4]
    """
    parts: list[int] = []
    for length in lengths:
        parts += [capacity] * (length // capacity) + ([length % capacity] if length % capacity else [])
    return parts


# Source: verl 0.8.0.dev at b178a3c, verl/utils/seqlen_balancing.py (calculate_workload, karmarkar_karp,
# rearrange_micro_batches): as many micro-batches as the tokens need at full budget, then the largest differencing
# method of Karmarkar and Karp over 24576 s + s^2 of each sequence. What is balanced is work and not tokens, so that a
# micro-batch of short sequences may hold more tokens than the budget.

LINEAR = 24_576
"""Work of a token beside that of attention, in verl's units [1]."""
_Sets = list[tuple[int, list[int]]]
"""Sums, the largest first, with their indices."""


def workload(length: int) -> int:
    """Work of a sequence in verl's units, ``length`` in [tokens].

    >>> workload(2)
    49156
    """
    return LINEAR * length + length**2


def balanced(weights: Sequence[int], count: int) -> list[list[int]]:
    """Indices of the weights in ``count`` sets of nearly equal sums: the two most uneven partitions are joined first.

    >>> sorted(sorted(part) for part in balanced([8, 7, 6, 5, 4], 2))
    [[0, 2], [1, 3, 4]]
    """
    heap: list[tuple[int, int, int, _Sets]] = []
    for turn, index in enumerate(sorted(range(len(weights)), key=lambda i: weights[i])):
        heap.append(_state([(weights[index], [index]), *((0, list[int]()) for _ in range(count - 1))], turn))
    heapq.heapify(heap)
    turn = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[3], heapq.heappop(heap)[3]
        pairs = zip(first, reversed(second), strict=True)
        sets = sorted(((a + b, left + right) for (a, left), (b, right) in pairs), key=lambda pair: -pair[0])
        heapq.heappush(heap, _state(sets, turn))
        turn += 1
    return [indices for _, indices in heap[0][3]]


def _state(sets: _Sets, turn: int) -> tuple[int, int, int, _Sets]:
    """A partition where the heap orders it: by its spread, then by its largest sum, both largest first."""
    return (sets[-1][0] - sets[0][0], -sets[0][0], turn, sets)


def micro_batches_of(lengths: Sequence[int], budget: int, least: int = 1) -> list[int]:
    """Tokens of each micro-batch of a rank's sequences, at least ``least`` of them [tokens].

    >>> sorted(micro_batches_of([6, 5, 4, 3], 10))
    [9, 9]
    """
    count = max(min(len(lengths), -(-sum(lengths) // budget)), least)
    parts = balanced([workload(length) for length in lengths], count)
    return [sum(lengths[index] for index in part) for part in parts]
