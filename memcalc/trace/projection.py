"""One matrix multiplication of a linear layer: with a trained, a frozen, or a frozen and quantised weight."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.formulas.quantization import nf4_state_bytes
from memcalc.trace import ops
from memcalc.trace.tape import Edge, Grads, Leaf, Shard, Size, Tape, Tensor


@dataclass(frozen=True)
class Product:
    """What a linear layer makes: ``elements`` a token, in ``width`` bytes, of one of ``parts`` of the rows."""

    name: str
    width: int
    elements: int
    label: str
    shard: Shard = "none"
    parts: int = 1

    def output(self, given: Tensor) -> Size:
        """The extent of the output."""
        elements = self.elements // self.parts
        return given.size._replace(elements=elements, width=self.width, label=self.label, shard=self.shard)

    def weight(self, given: Tensor, width: int = 1) -> Size:
        """The extent of the weight."""
        shard: Shard = "tp" if {"tp", "gathered"} & {self.shard, given.size.shard} else "none"
        return Size(self.elements * given.size.elements * self.parts, width, "once", shard)


def project(tape: Tape, x: Tensor, to: Product, *, trained: bool, autocast: bool = False) -> Tensor:
    """``x @ W.T``: keeps x where W is trained; backward makes the weight's gradient and then the input's.

    That is a view, since the product runs over all rows of all sequences (``MmBackward0`` has mat2 before self).
    Autocast multiplies by a 16-bit copy of the weight (a term of its own), whose gradient is cast afterwards.
    """
    given = ops.cast(tape, x, to.width, f"{to.name} input, 16-bit copy")
    in_size, wanted, weight, name = given.size, given.requires_grad, to.weight(given), to.name
    leaf = Leaf(f"{name} weight", keep=True) if trained else None
    edge: Edge | None = tape.cast_weight(leaf, weight) if leaf and autocast else leaf

    def rule(_: Grads) -> Grads:
        of_weight: Tensor | None = None
        if leaf is not None and autocast:
            of_weight = tape.new(f"gradient of {name} weight, 16-bit", weight.wide(2))
        elif leaf is not None:
            of_weight = tape.new(f"gradient of {name} weight", weight, "gradient")
        return [tape.new(f"gradient of {name} input", in_size).as_view() if wanted else None, of_weight]

    size = to.output(given)
    copied = tape.weight_copy(name, weight.wide(2)) if autocast else None
    saved = [given.storage if trained else None, copied]
    out = tape.operator("mm", lambda: tape.new(f"{name} output", size))
    return tape.record(out, [given, edge], rule, saved, reads=True)


@dataclass(frozen=True)
class Quantised:
    """How a product with a quantised weight runs."""

    kind: str
    keeps_input: bool = False
    """As an attribute of its function, which lives as long as the graph (bitsandbytes until 0.42; int8 always)."""
    keeps_narrow: bool = False
    """So is an 8-bit copy of the input kept (int8, bitsandbytes until 0.44)."""
    cast_again: bool = False
    """The weight was quantised from fp16: what comes out of it is cast to the input's dtype."""


def project_quantised(tape: Tape, x: Tensor, to: Product, how: Quantised) -> Tensor:
    """A frozen quantised weight, which is turned into 16 bits for the product, and again for the input's gradient.

    The output has the input's width. Source: bitsandbytes 0.43.3 autograd/_functions.py (``MatMul4Bit``;
    ``MatMul8bitLt``, which multiplies 8-bit integers in forward) and nn/modules.py (``Linear4bit.forward``);
    AutoGPTQ 0.7.1 nn_modules/triton_utils/dequant.py (``QuantLinearFunction``).
    """
    given = ops.cast(tape, x, to.width, f"{to.name} input, 16-bit copy")
    in_size, wanted, name = given.size, given.requires_grad, to.name
    weight, scales = to.weight(given, 2), _scales(to.weight(given), how.kind)
    copies = 1 + how.cast_again
    saved = [given.storage] if how.keeps_input else []
    if how.keeps_input and wanted:
        tape.hold_with_graph(given.storage)
    narrow = tape.new(f"{name} input, 8-bit", in_size.wide(1)) if how.kind == "int8" else None
    if narrow is not None and how.keeps_narrow:
        saved.append(narrow.storage)

    def rule(_: Grads) -> Grads:
        return [_with_weight(tape, f"gradient of {name} input", in_size, weight, scales, copies) if wanted else None]

    if narrow is None:
        out = _with_weight(tape, f"{name} output", to.output(given), weight, scales, copies)
    else:
        out = _of_integers(tape, f"{name} output", to.output(given))
    del narrow
    return ops.cast(tape, tape.record(out, [given], rule, saved), x.size.width, f"{name} output, cast")


def _with_weight(tape: Tape, name: str, size: Size, weight: Size, scales: Size | None, copies: int) -> Tensor:
    """A product that first makes the 16-bit weight, with the help of fp32 scales where those are quantised too."""
    wide = tape.new("scales, fp32", scales, "dequantised") if scales else None
    copy = tape.new("weight, dequantised", weight, "dequantised")
    del wide
    for _ in range(copies - 1):
        copy = tape.new("weight, dequantised and cast", weight, "dequantised")
    out = tape.operator("mm", lambda: tape.new(name, size))
    del copy
    return out


def _of_integers(tape: Tape, name: str, size: Size) -> Tensor:
    """A product of 8-bit integers, as 32-bit ones that are scaled afterwards."""
    wide = tape.new(f"{name}, 32-bit integers", size.wide(4))
    out = tape.operator("mm", lambda: tape.new(name, size))
    del wide
    return out


def _scales(weight: Size, kind: str) -> Size | None:
    return Size(nf4_state_bytes(weight.elements), 1, "once", weight.shard) if kind == "nf4-dq" else None
