"""The tensors of a rank one by one, and the groups of them that DeepSpeed's stage 3 updates at a time.

Linear layers, embedding and head are counted; norms and biases are too small to matter. Adapters are left out. Of a
recorded model all tensors are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.optimizer_states import shard
from memcalc.terms.tensors import block_matrices, outside_matrices

if TYPE_CHECKING:
    from memcalc.formulas.types import Array
    from memcalc.specs.recorded import Recording
    from memcalc.terms.model_on_grid import ModelOnGrid
    from memcalc.terms.tensors import Matrix


def tensors(census: ModelOnGrid, where: Array | bool) -> Iterator[tuple[Array, Array]]:
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


def recorded_tensors(census: ModelOnGrid, recording: Recording, ranks: Array) -> Iterator[tuple[Array, Array]]:
    """The same of a recorded model, whose tensors are known one by one."""
    single = np.int64(1)
    for layers, part in zip(census.layers, census.model.recorded_blocks, strict=True):
        yield from ((layers, shard(elements, ranks)) for elements in part.tensors)
    for end in (recording.entry, recording.head):
        yield from ((single, shard(elements, ranks)) for elements in end.tensors)


def _on_rank(census: ModelOnGrid, matrix: Matrix, where: Array | bool) -> tuple[Array, int, Array]:
    """Tensors of one block, the elements of each before sharding, and what divides them.

    The routed experts of a layer are one tensor, unless the framework has a module for each.
    """
    grid, elements = census.grid, matrix.inputs * matrix.outputs
    if not matrix.routed:
        return np.int64(matrix.count), elements, grid.degree("tp") * np.where(where, grid.ranks, 1)
    ranks = grid.expert_tp * np.where(where, grid.expert_ranks, 1)
    if grid.habits.expert_loop:
        return matrix.count // grid.degree("ep"), elements, ranks
    return np.int64(1), elements * matrix.count, ranks * grid.degree("ep")


def largest_group(census: ModelOnGrid, limit: int) -> Array:
    """Elements of the largest of the groups into which a rank's tensors are laid until each has ``limit`` or more.

    Source: DeepSpeed edaa722 runtime/zero/stage3.py, _create_fp16_sub_groups: a group ends behind the tensor that fills
    it, and the last one with the last tensor, so that a group is larger than ``limit`` by up to that tensor's part.
    """
    group: Array = np.int64(0)
    largest: Array = np.int64(0)
    for part in _in_order(census):
        group = group + part
        largest = np.maximum(largest, group)
        group = np.where(group >= limit, 0, group)
    return np.asarray(largest)


def _in_order(census: ModelOnGrid) -> Iterator[Array]:
    """A rank's part of each tensor under stage 3, as the modules have them: embedding, blocks, head."""
    model, ranks = census.model, census.grid.degree("tp") * census.grid.ranks
    if model.recording is not None:
        for layers, part in recorded_tensors(census, model.recording, ranks):
            yield from [part] * int(np.max(layers))
        return
    ends = {matrix.target == "embedding": shard(matrix.elements, ranks) for matrix in outside_matrices(model)}
    yield ends.get(True, np.int64(0))
    for group in model.groups:
        for _ in range(group.count):
            for matrix in block_matrices(group.block):
                count, elements, shares = _on_rank(census, matrix, where=True)
                yield from [shard(elements, shares)] * int(np.max(count))
    if not model.tied:
        yield ends.get(False, np.int64(0))
