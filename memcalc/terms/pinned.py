"""The tensors of a rank one by one: what the caching host allocator rounds up, and what is large enough to swap.

Linear layers, embedding and head are counted; norms and biases are too small to matter. Adapters are left out. Of a
recorded model all tensors are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.matrices import block_matrices, outside_matrices
from memcalc.formulas.offload import pinned_bytes
from memcalc.formulas.optimizer import shard

if TYPE_CHECKING:
    from memcalc.formulas.matrices import Matrix
    from memcalc.formulas.types import Array
    from memcalc.specs.recorded import Recording
    from memcalc.terms.census import Census

SMALLEST_SWAP = 1 << 20
"""Bytes below which DeepSpeed does not swap a tensor (``MIN_AIO_BYTES``, and the block size of its requests)."""


def tensors(census: Census, where: Array | bool) -> Iterator[tuple[Array, Array]]:
    """How many tensors of a kind a rank has, and the elements of its part of each; divided where ``where`` holds."""
    for group, layers in zip(census.model.groups, census.layers, strict=True):
        for matrix in block_matrices(group.block):
            count, elements, ranks = _on_rank(census, matrix, where)
            yield layers * count, shard(elements, ranks)
    grid = census.grid
    ranks = grid.degree("tp") * np.where(where, grid.ranks, 1)
    if census.model.recording is not None:
        yield from recorded_tensors(census, census.model.recording, ranks)
        return
    for matrix in outside_matrices(census.model):
        first = matrix.target == "embedding"
        if first or not census.model.tied:
            yield grid.is_first if first else grid.is_last, shard(matrix.elements, ranks)


def recorded_tensors(census: Census, recording: Recording, ranks: Array) -> Iterator[tuple[Array, Array]]:
    """The same of a recorded model, whose tensors are known one by one."""
    one = np.int64(1)
    for layers, part in zip(census.layers, census.model.recorded_blocks, strict=True):
        yield from ((layers, shard(elements, ranks)) for elements in part.tensors)
    for end in (recording.entry, recording.head):
        yield from ((one, shard(elements, ranks)) for elements in end.tensors)


def _on_rank(census: Census, matrix: Matrix, where: Array | bool) -> tuple[Array, int, Array]:
    """Tensors of one block, the elements of each before sharding, and what divides them.

    The routed experts of a layer are one tensor, unless the framework has a module for each.
    """
    grid, one = census.grid, matrix.inputs * matrix.outputs
    if not matrix.routed:
        return np.int64(matrix.count), one, grid.degree("tp") * np.where(where, grid.ranks, 1)
    ranks = grid.expert_tp * np.where(where, grid.expert_ranks, 1)
    if grid.habits.expert_loop:
        return matrix.count // grid.degree("ep"), one, ranks
    return np.int64(1), one * matrix.count, ranks * grid.degree("ep")


def units(census: Census, where: Array | bool) -> Iterator[tuple[Array, Array]]:
    """The same for FSDP 1, whose tensors are the flat parameters of blocks and root."""
    for layers, dense, experts in zip(census.layers, census.block_dense, census.block_experts, strict=True):
        yield layers, census.sharded(dense, experts if census.model.is_moe else np.int64(0), where)
    yield np.int64(1), census.sharded(census.root, np.int64(0), where)


def rounding(census: Census, width: Array, where: Array | bool) -> Array:
    """What one pinned copy of a rank's tensors takes beyond their bytes [bytes]."""
    if census.grid.fixed.lora is not None:
        return np.int64(0)
    each = (units if census.grid.habits.flat_units else tensors)(census, where)
    return sum((count * beyond(width * size) for count, size in each), np.int64(0))


def beyond(size: Array) -> Array:
    """What one pinned tensor takes beyond its bytes [bytes]."""
    return pinned_bytes(size) - size


def swappable(census: Census, width: Array, where: Array | bool) -> Array:
    """Elements of a rank in tensors that are large enough to be swapped, of ``width`` bytes each."""
    each = tensors(census, where)
    return sum((count * size * (width * size >= SMALLEST_SWAP) for count, size in each), np.int64(0))
