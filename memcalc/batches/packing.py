"""Bins of sequences: as packers fill them, first fit and best fit in descending order, and as verl balances their work.

Sources: axolotl 0.18.0, src/axolotl/utils/samplers/multipack.py (pack_group); TRL 1.10.0.dev0 at f2cd577,
trl/data_utils.py (_pack_bfd, _pack_wrapped), which ``datasets`` calls with a thousand examples at a time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

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
