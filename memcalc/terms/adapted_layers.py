"""Layers with adapters, by layer: Megatron-LM's pairs beside its linear ones, and quantised matrices of a frozen base.

Megatron-Bridge splits A and B over the tensor-parallel group, whatever the layer splits; ms-swift splits the one that
stands on the split side of the layer, and has the other on each rank. Of routed experts the former have one pair for
all experts of a rank unless told otherwise, the latter one for each expert.

Sources: NVIDIA-NeMo/Megatron-Bridge 067f987d ``peft/utils.py`` (``ParallelLinearAdapter``: A is column-parallel over
ranks or row-parallel, B column-parallel; ``GroupedExpertLinearAdapter``) and ``peft/lora.py``
(``share_expert_adapters``); modelscope/mcore-bridge f020e479 ``tuners/lora.py`` (``LoraParallelLinear.update_layer``).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memcalc.formulas import quantization as q
from memcalc.formulas.optimizer_states import shard
from memcalc.terms.tensors import Layout, Matrix, Tensor, block_matrices, block_tensors, linear_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memcalc.formulas import Array
    from memcalc.grid import Grid
    from memcalc.specs.adapters import Lora
    from memcalc.specs.block import Block


EACH = ("bridge-each", "swift")
"""Classes with a pair for each expert."""


class Low(NamedTuple):
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


SOURCE = "bitsandbytes 0.43.3 nn/modules.py; AutoGPTQ 0.7.1 nn_modules/qlinear/qlinear_tritonv2.py"


class Quantised(NamedTuple):
    """Bytes of the quantised matrices of a block, or of the head."""

    elements: int
    """Weights that are quantised [elements]."""
    payload: int
    """What FSDP shards: the weights themselves, and under GPTQ their zeros [bytes]."""
    state: int
    """Scales that every rank holds in full [bytes]."""
    largest: int
    """Weights of the largest matrix [elements]."""


def quantised_layers(block: Block, kind: str, *, stacked: bool, experts: bool = False) -> tuple[Matrix, ...]:
    """The matrices of a block that a kind of quantisation takes; GPTQ leaves the router alone.

    bitsandbytes takes linear layers, and so neither ``stacked`` experts nor their router (Transformers 5.24
    integrations/bitsandbytes.py, replace_with_bnb_linear); axolotl has it take the ``experts`` as they are loaded,
    still without the router, whose weight has two dimensions (067b021c8 monkeypatch/moe_quant.py).
    """
    gptq = kind.startswith("gptq")
    listed = block_matrices(block) if gptq else linear_layers(block, stacked=stacked and not experts)
    return tuple(matrix for matrix in listed if not (matrix.target == "router" and (gptq or stacked)))


@lru_cache(maxsize=256)
def block_quantised(block: Block, kind: str, group: int, *, stacked: bool = False, experts: bool = False) -> Quantised:
    """Return the quantised matrices of one block."""
    return quantised(quantised_layers(block, kind, stacked=stacked, experts=experts), kind, group)


def quantised(matrices: Iterable[Matrix], kind: str, group: int) -> Quantised:
    """Return the bytes of matrices under one of the quantisations of the interface."""
    linears = list(matrices)
    sizes = [(m.count, *matrix_bytes(m.inputs, m.outputs, kind, group)) for m in linears]
    return Quantised(
        elements=sum(m.elements for m in linears),
        payload=sum(count * payload for count, payload, _ in sizes),
        state=sum(count * state for count, _, state in sizes),
        largest=max((m.inputs * m.outputs for m in linears), default=0),
    )


def matrix_bytes(inputs: int, outputs: int, kind: str, group: int) -> tuple[int, int]:
    """Return the weights and the scales of one matrix [bytes]; ``kind`` is a word of ``--quantize``."""
    elements = inputs * outputs
    if kind.startswith("gptq"):
        bits = 4 if kind.endswith("int4") else 8
        return q.gptq_bytes(inputs, outputs, bits, group), q.gptq_state_bytes(inputs, outputs, group)
    if kind == "int8":
        return elements, q.int8_bytes(inputs, outputs) - elements
    return q.four_bit_bytes(elements), q.nf4_state_bytes(elements, int(kind == "nf4-dq"))


NONE = Quantised(0, 0, 0, 0)
