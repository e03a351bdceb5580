"""A rank's sequences shared out over micro-batches by their work, as verl does for a budget of tokens.

Source: verl 0.8.0.dev at b178a3c, verl/utils/seqlen_balancing.py (calculate_workload, karmarkar_karp,
rearrange_micro_batches): as many micro-batches as the tokens need at full budget, then the largest differencing method
of Karmarkar and Karp over 24576 s + s^2 of each sequence. What is balanced is work and not tokens, so that a
micro-batch of short sequences may hold more tokens than the budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

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
