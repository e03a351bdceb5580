"""One adapter on the queries, keys and values of a packed projection, or on some of them (litgpt ``LoRAQKVLinear``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memcalc.trace import ops
from memcalc.trace.adapters import Lora
from memcalc.trace.projection import Product, project
from memcalc.trace.tape import Grads, Tape, Tensor

PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class Packed:
    """A packed projection: what it makes, and the outputs of its queries, keys and values [elements]."""

    to: Product
    outputs: tuple[int, int, int]

    def chosen(self, lora: Lora) -> list[int]:
        """Outputs of the parts that have an adapter."""
        return [size for name, size in zip(PARTS, self.outputs, strict=True) if name in lora.targets]


def adapted_parts(tape: Tape, x: Tensor, lora: Lora, packed: Packed, base: Callable[[], Tensor]) -> Tensor:
    """``base(x) + pad(conv(A(dropout(x)))) * scaling``: one A for all parts, one convolution for the parts' B.

    Where a part has no adapter the others are copied into zeros by an index, which keeps them for their gradient's
    shape. Source: Lightning-AI/litgpt lora.py at 069f6584 and f84b6109 (``LoRAQKVLinear.forward``, ``zero_pad``);
    derivatives.yaml, ``index_copy``.
    """
    result, parts = base(), packed.chosen(lora)
    delta = _low_rank(tape, x, lora, packed, parts)
    if len(parts) < len(PARTS):
        delta = _padded(tape, delta, packed.to)
    delta = ops.plain(tape, delta, f"{packed.to.name} adapter output, scaled")
    return ops.add(tape, result, delta, f"{packed.to.name} output with adapter")


def _low_rank(tape: Tape, x: Tensor, lora: Lora, packed: Packed, parts: list[int]) -> Tensor:
    to, name, rank = packed.to, f"{packed.to.name} adapter", lora.rank
    dropped = ops.dropout(tape, x, f"{name} dropout", active=lora.dropout)
    low = project(tape, dropped, Product(f"{name} A", lora.width, rank * len(parts), "n·r"), trained=True)
    del dropped
    if len(set(packed.outputs)) == 1:  # a grouped convolution
        return project(tape, low, replace(to, name=f"{name} B", elements=sum(parts), label="n·q"), trained=True)
    pieces = ops.split(tape, low, [rank] * len(parts), ["r"] * len(parts), f"{name} A")
    del low
    high = [
        project(tape, piece, replace(to, name=f"{name} B of part {index}", elements=size, label="q"), trained=True)
        for index, (piece, size) in enumerate(zip(pieces, parts, strict=True))
    ]
    pieces.clear()
    return ops.cat(tape, high, f"{name} output", "n·q") if len(high) > 1 else high.pop()


def _padded(tape: Tape, x: Tensor, to: Product) -> Tensor:
    """``index_copy`` into zeros: keeps what it copies."""
    size = x.size

    def rule(_: Grads) -> Grads:
        return [tape.new(f"gradient of {to.name} adapter output", size)]

    out = tape.new(f"{to.name} adapter output, padded", to.output(x))
    return tape.record(out, [x], rule, [x.storage])
