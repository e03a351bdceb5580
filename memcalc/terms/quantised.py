"""Quantised matrices of a frozen base: which they are, and the bytes of their weights and scales."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from memcalc.formulas import quantization as q
from memcalc.terms.tensors import Matrix, block_matrices, linear_layers

if TYPE_CHECKING:
    from memcalc.specs.block import Block

SOURCE = "bitsandbytes 0.43.3 nn/modules.py; AutoGPTQ 0.7.1 nn_modules/qlinear/qlinear_tritonv2.py"


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


def quantised_layers(block: Block, kind: str, *, stacked: bool) -> tuple[Matrix, ...]:
    """The matrices of a block that a kind of quantisation takes; GPTQ leaves the router alone.

    bitsandbytes takes linear layers, and so neither ``stacked`` experts nor their router (Transformers 5.24
    integrations/bitsandbytes.py, replace_with_bnb_linear).
    """
    gptq = kind.startswith("gptq")
    listed = block_matrices(block) if gptq else linear_layers(block, stacked=stacked)
    return tuple(matrix for matrix in listed if not (matrix.target == "router" and (gptq or stacked)))


@lru_cache(maxsize=256)
def block_quantised(block: Block, kind: str, group: int, *, stacked: bool = False) -> Quantised:
    """Return the quantised matrices of one block."""
    return quantised(quantised_layers(block, kind, stacked=stacked), kind, group)


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
