"""Adapters beside Megatron-LM's linear layers: the pairs of a block, and what a rank has of each.

Megatron-Bridge splits A and B over the tensor-parallel group, whatever the layer splits; ms-swift splits the one that
stands on the split side of the layer, and has the other on each rank. Of routed experts the former have one pair for
all experts of a rank unless told otherwise, the latter one for each expert.

Sources: NVIDIA-NeMo/Megatron-Bridge 067f987d ``peft/utils.py`` (``ParallelLinearAdapter``: A is column-parallel over
ranks or row-parallel, B column-parallel; ``GroupedExpertLinearAdapter``) and ``peft/lora.py``
(``share_expert_adapters``); modelscope/mcore-bridge f020e479 ``tuners/lora.py`` (``LoraParallelLinear.update_layer``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from memcalc.formulas.optimizer_states import shard
from memcalc.terms.tensors import Layout, Tensor, block_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.adapters import Lora
    from memcalc.specs.block import Block

EACH = ("bridge-each", "swift")
"""Classes with a pair for each expert."""


@dataclass(frozen=True, slots=True)
class Low:
    """A or B of equal adapters, on one rank."""

    rows: Array
    columns: Array
    count: Array
    """How many there are in one block."""
    routed: bool

    @property
    def elements(self) -> Array:
        """Of all of them [elements]."""
        return self.count * self.rows * self.columns


@lru_cache(maxsize=256)
def adapted_tensors(block: Block, targets: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The weights of a block that have an adapter, queries beside keys and values, gate beside up."""
    return tuple(t for t in block_tensors(block, Layout(packed=True)) if t.linear and t.target in targets)


def adaptable_targets(blocks: Iterable[Block]) -> tuple[str, ...]:
    """The layers of Megatron-LM's blocks that can have an adapter: all linear ones but the router."""
    tensors = (tensor for block in blocks for tensor in block_tensors(block, Layout(packed=True)))
    return tuple(dict.fromkeys(t.target for t in tensors if t.linear and t.target not in ("router", "shared_gate")))


def pairs_of(block: Block, lora: Lora, grid: Grid) -> Iterator[Low]:
    """A and B of each adapter of one block, as a rank has them."""
    for tensor in adapted_tensors(block, lora.targets):
        yield from _pair(tensor, lora.rank, grid)


def _pair(tensor: Tensor, rank: int, grid: Grid) -> tuple[Low, Low]:
    classes = grid.fixed.lora_classes
    outputs, inputs = tensor.shape[-2:]
    ranks, undivided = grid.expert_tp if tensor.routed else grid.degree("tp"), np.int64(1)
    by_rows, by_columns = tensor.divided == "rows", tensor.divided == "columns"
    replicated = classes == "swift"
    a = shard(rank, undivided if by_columns or replicated else ranks), shard(inputs, ranks if by_columns else undivided)
    b = shard(outputs, ranks if by_rows or not replicated else undivided)
    count = shard(tensor.count, grid.degree("ep")) if classes in EACH and tensor.routed else np.int64(1)
    return Low(*a, count, tensor.routed), Low(b, np.int64(rank), count, tensor.routed)


def block_parameters(block: Block, lora: Lora, grid: Grid) -> tuple[Array, Array]:
    """A rank's adapters of one block: outside the routed experts, and on them [elements]."""
    listed = tuple(pairs_of(block, lora, grid))
    dense, routed = (sum((p.elements for p in listed if p.routed is at), np.int64(0)) for at in (False, True))
    return dense, routed


def active_parameters(block: Block, lora: Lora) -> int:
    """Adapters of one block that a token passes: of those on experts, as many as it has experts [elements]."""
    topk = getattr(block.mlp, "topk", 1)
    tensors = adapted_tensors(block, lora.targets)
    many = ((t, topk if t.routed else t.count) for t in tensors)
    return sum(n * lora.rank * sum(t.shape[-2:]) for t, n in many)
