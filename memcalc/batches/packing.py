"""Bins of sequences, as the packers of the frameworks fill them: first fit, and best fit in descending order.

Sources: axolotl 0.18.0, src/axolotl/utils/samplers/multipack.py (pack_group); TRL 1.10.0.dev0 at f2cd577,
trl/data_utils.py (_pack_bfd, _pack_wrapped), which ``datasets`` calls with a thousand examples at a time.
"""

from __future__ import annotations

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
