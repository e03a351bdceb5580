"""What low-rank adapters add to a model, and what a quantised base occupies, matrix by matrix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from memcalc.formulas import quantization as q
from memcalc.formulas.matrices import Matrix, block_matrices, outside_matrices
from memcalc.formulas.parameters import lora_parameters

if TYPE_CHECKING:
    from memcalc.specs.model import Block, Model


@dataclass(frozen=True, slots=True)
class Quantised:
    """Bytes of the quantised matrices of a block, or of the head."""

    elements: int
    """Weights that are quantised [elements]."""
    payload: int
    """What FSDP shards: the weights themselves, and under GPTQ their zeros [bytes]."""
    state: int
    """Scales that every rank holds in full [bytes]."""
    largest: int
    """Weights of the largest matrix [elements]."""


def adapter_parameters(matrices: Iterable[Matrix], rank: int, targets: Iterable[str]) -> int:
    """Return the parameters of the adapters on the matrices that the targets name [elements]."""
    named, found = set(targets), list(matrices)
    whole = [(m, m.outputs) for m in found if m.target in named]
    parts = [(m, outputs) for m in found for target, outputs in m.parts if target in named]
    return sum(m.count * lora_parameters(rank, m.inputs, outputs) for m, outputs in (*whole, *parts))


@lru_cache(maxsize=256)
def block_adapters(block: Block, rank: int, targets: tuple[str, ...]) -> tuple[int, int]:
    """Return the adapters' parameters of one block: outside the routed experts, and in them [elements]."""
    matrices = block_matrices(block)
    whole = adapter_parameters(matrices, rank, targets)
    routed = adapter_parameters((m for m in matrices if m.routed), rank, targets)
    return whole - routed, routed


def outside_adapters(model: Model, rank: int, targets: Iterable[str], name: str) -> int:
    """Return the adapter's parameters of the ``embedding`` or the ``head`` [elements]."""
    wanted = {name} & set(targets)
    return adapter_parameters(outside_matrices(model), rank, wanted)


@lru_cache(maxsize=256)
def block_quantised(block: Block, kind: str, group: int) -> Quantised:
    """Return the quantised matrices of one block; GPTQ leaves the router alone."""
    named = [m for m in block_matrices(block) if not (m.target == "router" and kind.startswith("gptq"))]
    return quantised(named, kind, group)


def quantised(matrices: Iterable[Matrix], kind: str, group: int) -> Quantised:
    """Return the bytes of matrices under one of the quantisations of the interface."""
    found = list(matrices)
    sizes = [(m.count, *matrix_bytes(m.inputs, m.outputs, kind, group)) for m in found]
    return Quantised(
        elements=sum(m.elements for m in found),
        payload=sum(count * payload for count, payload, _ in sizes),
        state=sum(count * state for count, _, state in sizes),
        largest=max((m.inputs * m.outputs for m in found), default=0),
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
