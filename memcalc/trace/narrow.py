"""Operands that TransformerEngine quantises for its products, as tensors of their own.

Each linear layer quantises its own input. Of an operand that forward and backward read along different directions there
are two copies, the second of which goes with the product; the GPU's matrix units may need only one. What is kept for
the gradient of the weight is one direction.

Source: TransformerEngine d0067d0d ``pytorch/module/linear.py``, ``layernorm_linear.py`` and ``grouped_linear.py``.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from memcalc.formulas.quantization import narrow_bytes
from memcalc.trace.tape import Shard, Size, Tape, Tensor


class Narrow(NamedTuple):
    """How operands are quantised."""

    width: Fraction
    """Bytes an element along one direction."""
    copies: int
    """Copies of an operand that is read along both."""
    gathers_rows: bool
    """Messages carry row-wise data alone, which is transposed after it has arrived (one scale a tensor)."""
    keeps_original: bool
    """The attention projection keeps its input as attention does."""

    def size(self, size: Size, copies: int = 1, shard: Shard | None = None) -> Size:
        """The extent of so many quantised copies."""
        each = narrow_bytes(size.elements, self.width.numerator, self.width.denominator)
        return size._replace(elements=copies * each, width=1, shard=size.shard if shard is None else shard)


def kept_input(
    tape: Tape, x: Tensor, name: str, narrow: Narrow | None, *, original: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """What a linear layer keeps of its input, and what goes with its product.

    Nothing is quantised without ``narrow``; with ``original`` the input itself is kept all the same.
    """
    if narrow is None:
        return x, []
    copies = [tape.new(f"{name} input, quantised", narrow.size(x.size))]
    if original:
        return x, copies
    if narrow.copies > 1:
        copies.append(tape.new(f"{name} input, quantised the other way", narrow.size(x.size)))
    return copies.pop(0), copies


def input_again(tape: Tape, size: Size, name: str, narrow: Narrow | None, *, original: bool) -> list[Tensor]:
    """The input of ``size`` for the gradient of the weight, where it was kept as it was: quantised anew."""
    if narrow is None or not original:
        return []
    copies = narrow.copies if narrow.gathers_rows else 1
    return [tape.new(f"{name} input, quantised again", narrow.size(size, copies))]


def operands(tape: Tape, size: Size, name: str, narrow: Narrow | None) -> list[Tensor]:
    """A gradient of ``size``, quantised along both directions for the two products of backward."""
    if narrow is None:
        return []
    return [tape.new(f"gradient of {name} output, quantised", narrow.size(size, narrow.copies))]


def gathered_input(tape: Tape, size: Size, name: str, narrow: Narrow | None, *, again: bool = False) -> list[Tensor]:
    """A column-parallel layer's input from all ranks; ``again`` for backward, which reads it along the other way."""
    full = size._replace(shard="full if sp")
    if narrow is None:
        return [tape.new(f"{name} input, gathered", full)]
    copies = narrow.copies if again and narrow.gathers_rows else 1
    return [tape.new(f"{name} input, gathered", narrow.size(full, copies))]
