"""Weights in Megatron-LM's buffers: made apart, laid into one tensor, of which each rank's optimizer has a part.

Source: Megatron-LM 23e00ed core/distributed/param_and_grad_buffer.py (``_ParamAndGradBuffer``: the buffer is made while
the weights are there, from the last to the first; ``bucket_size`` is None without ``--overlap-grad-reduce``) and
core/optimizer/distrib_optimizer.py (``_build_model_and_main_param_groups``: a main weight for each part of a weight in
the rank's range, as the optimizer is made).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from memcalc.terms.moments import end_weights, layout_of, weight_of_block
from memcalc.terms.tensors import block_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from memcalc.formulas import Array
    from memcalc.specs.block import Block
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.moments import RankWeight


Rank = Literal["first", "middle", "last"]
"""One of the ranks that share a buffer."""


def weights_of_rank(
    census: ModelOnGrid, blocks: Sequence[Block], scalar: Callable[[Array | int], int]
) -> tuple[list[int], list[int]]:
    """Elements of each weight of a rank with these blocks, in the order of the modules: dense ones, and experts'.

    Norms and biases are one more of each, so that their sums are the census's.
    """

    def listed(weights: Iterable[RankWeight]) -> list[tuple[bool, int]]:
        return [(w.routed, scalar(w.weight.elements)) for w in weights for _ in range(scalar(w.number))]

    inside = {block: listed(_of_block(census, block)) for block in set(blocks)}
    ends = listed(end_weights(census, "first")), listed(end_weights(census, "last"))
    in_order = [*ends[0], *(weight for block in blocks for weight in inside[block]), *ends[1]]
    sizes = {routed: [size for each, size in in_order if each == routed] for routed in (False, True)}
    totals = {False: scalar(census.blocks + census.root), True: scalar(census.experts_or_none)}
    for routed, total in totals.items():
        rest = total - sum(sizes[routed])
        sizes[routed] += [rest] * (rest > 0)
    return sizes[False], sizes[True]


def _of_block(census: ModelOnGrid, block: Block) -> Iterator[RankWeight]:
    """A block's weights; attention makes its output projection first (core/transformer/attention.py)."""
    tensors = block_tensors(block, layout_of(census.grid.habits))
    for tensor in sorted(tensors, key=lambda tensor: tensor.target != "o"):
        yield weight_of_block(census, tensor, np.int64(1))


def telling_ranks(census: ModelOnGrid, stage: int) -> list[Rank]:
    """The ranks whose parts tell what all of them reserve: one with weights of blocks, as most have, and an end's.

    The first rank has the head, and the last one the embedding: large tensors that leave large holes.
    """
    grid = census.grid
    ranks = int(np.max(grid.ranks))
    if not grid.habits.persistent_gradients or not np.any(grid.zero) or ranks == 1:
        return ["middle"]
    ends: list[Rank] = ["last"] * (stage == 0 and ranks > 2) or ["first"] * (0 < stage == grid.num_stages - 1)
    return ["middle", *ends]


def part_of_rank(weights: list[int], ranks: int, rank: Rank = "middle") -> list[int]:
    """The parts of weights that one of several ranks has of their buffer, which begins with the last weight.

    They are made in the order of the buffer (distrib_optimizer.py, ``_build_optimizer_group_ranges``).

    >>> part_of_rank([4, 6, 2], 1), part_of_rank([4, 6, 2], 3), part_of_rank([4, 6, 2], 4)
    ([2, 6, 4], [4], [2, 1])
    >>> part_of_rank([4, 6, 2], 3, "first"), part_of_rank([4, 6, 2], 3, "last")
    ([2, 2], [4])
    """
    size = -(-sum(weights) // ranks)
    first = {"first": 0, "middle": ranks // 2, "last": ranks - 1}[rank] * size
    after = first + size
    parts, at = list[int](), 0
    for weight in reversed(weights):
        inside = min(at + weight, after) - max(at, first)
        parts += [inside] * (inside > 0)
        at += weight
    return parts
