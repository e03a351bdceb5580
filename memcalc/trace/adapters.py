"""One product of a linear layer, its weight trained, frozen or quantised, and the low-rank adapters beside it.

Adapters are those that PEFT and the fused kernels run; one adapter stands on the queries, keys and values of a packed
projection, or on some of them (litgpt ``LoRAQKVLinear``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memcalc.formulas.quantization import nf4_state_bytes
from memcalc.trace import ops
from memcalc.trace.tape import Edge, Grads, Leaf, Shard, Size, Tape, Tensor


class Product(NamedTuple):
    """What a linear layer makes: ``elements`` a token, in ``width`` bytes, of one of ``parts`` of the rows."""

    name: str
    width: int
    elements: int
    label: str
    shard: Shard = "none"
    parts: int = 1
    operator: str = "mm"

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
    out = tape.operator(to.operator, lambda: tape.new(f"{name} output", size))
    return tape.record(out, [given, edge], rule, saved, reads=True)


class Quantised(NamedTuple):
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


TARGETS = {
    "query projection": "q",
    "key projection": "k",
    "value projection": "v",
    "query-key-value projection": "qkv",
    "attention projection": "o",
    "query down projection": "q_a",
    "query up projection": "q_b",
    "key-value down projection": "kv_a",
    "key-value up projection": "kv_b",
    "mixer's input projection": "mixer_in",
    "mixer's gate projection": "mixer_in",
    "mixer's rate projection": "mixer_in",
    "mixer's step projection": "mixer_in",
    "mixer's decay down projection": "mixer_in",
    "mixer's decay up projection": "mixer_in",
    "mixer's gate down projection": "mixer_in",
    "mixer's gate up projection": "mixer_in",
    "mixer's output projection": "mixer_out",
    "MLP gate": "gate",
    "MLP up": "up",
    "MLP gate and up": "gate_up",
    "MLP down projection": "down",
    "shared experts' up": "up",
    "shared experts' gate and up": "gate_up",
    "shared experts' down projection": "down",
    "shared experts' gate": "gate",
    "gate of shared experts": "shared_gate",
    "expert gate": "gate",
    "expert up": "up",
    "expert down projection": "down",
    "router": "router",
    "logits": "head",
}
"""The interface's word for a linear layer, by the layer's name in the trace."""
PACKED_TARGETS = {
    "MLP up projection": ("gate_up", "up"),
    "MLP down projection": ("down",),
    "shared experts' up projection": ("gate_up", "up"),
    "shared experts' down projection": ("down",),
    "experts' up projection": ("gate_up", "up"),
    "experts' down projection": ("down",),
}
"""The same of Megatron-LM's layers: gate and up are one, and an expert's layers have the names of a dense MLP's."""


def target_of(name: str) -> str:
    """The interface's word for a linear layer; empty where it has none."""
    return TARGETS.get(name.removeprefix("cross-"), "")


class Lora(NamedTuple):
    """How adapters are run."""

    rank: int
    targets: frozenset[str]
    width: int = 4
    """Bytes of an adapter's parameter."""
    dropout: bool = False
    folds: bool = False
    """Adapters on a router, and on stacked experts, are folded into their weights (PEFT's ``ParamWrapper``)."""
    kernels: str = "model"
    """model: op by op (PEFT); fused: one autograd function a projection (unsloth, fms-acceleration), or as
    TransformerEngine fuses operators, MLPs too; dora: op by op, with a magnitude for each output."""
    classes: str = ""
    """Whose classes stand beside Megatron-LM's layers: bridge, bridge-each or swift."""

    @property
    def gathers(self) -> bool:
        """Adapters of split outputs read the whole sequence, and those of split inputs gather theirs."""
        return self.classes.startswith("bridge")

    def stands_on(self, name: str) -> bool:
        """Whether one of Megatron-LM's layers has an adapter, by the layer's name in the trace."""
        return not self.targets.isdisjoint(PACKED_TARGETS.get(name, (target_of(name),)))


def adapted(
    tape: Tape, x: Tensor, lora: Lora, to: Product, base: Callable[[], Tensor], *, quantised: bool, autocast: bool
) -> Tensor:
    """``base(x) + B(A(dropout(x))) * scaling``.

    Over a 16-bit base x takes the adapter's dtype and the sum is cast back; over a quantised one the conversion is left
    to autocast where that is on. Source: PEFT 0.13.2 tuners/lora/layer.py (``Linear.forward``) and bnb.py
    (``Linear4bit.forward``, which clones the base's output).
    """
    if lora.kernels == "fused":
        return _fused(tape, x, lora, to, base)
    result = base()
    width = result.size.width
    if quantised:
        result = ops.copy(tape, result, f"{to.name} output, cloned")
    given = x if quantised and autocast else ops.cast(tape, x, lora.width, f"{to.name} adapter input, cast")
    if lora.kernels == "dora":
        result = _decomposed(tape, given, lora, to, result, autocast=autocast)
        return ops.cast(tape, result, width, f"{to.name} output with adapter, cast")
    delta = _low_rank(tape, given, lora, to, to.width if autocast else lora.width)
    if quantised:
        delta = ops.cast(tape, delta, width, f"{to.name} adapter output, cast")
    result = ops.add(tape, result, delta, f"{to.name} output with adapter")
    del delta
    return ops.cast(tape, result, width, f"{to.name} output with adapter, cast")


def _decomposed(tape: Tape, x: Tensor, lora: Lora, to: Product, base: Tensor, *, autocast: bool) -> Tensor:
    """``base + (m - 1) * base + m * B(A(x)) * scaling`` with m the magnitudes over the norms of the merged weight.

    With dropout the base runs again over the dropped x, with a copy of its weight in the adapter's dtype. What the
    norms are made of lives until both products are done. Source: PEFT 0.21.2 tuners/lora/variants.py
    (``DoraLinearVariant.forward``) and dora.py (``DoraLinearLayer.forward``, which holds two weights meanwhile).
    """
    name, narrow = to.name, to.width if autocast else lora.width
    dropped = ops.dropout(tape, x, f"{name} adapter dropout", active=lora.dropout)
    merged = _norms(tape, x, to, narrow, lora.width)
    low = _low_rank(tape, dropped, lora._replace(dropout=False), to, narrow)
    again = _beside_copy(tape, dropped, to._replace(width=narrow)) if lora.dropout else base
    del dropped
    wide = max(lora.width, again.size.width)
    moved = _weighted(tape, again, wide, f"{name} output, weighted")
    del again
    low = _weighted(tape, low, wide, f"{name} adapter output, weighted")
    low = ops.plain(tape, low, f"{name} adapter output, scaled")
    moved = ops.add(tape, moved, low, f"{name} output of magnitudes")
    del low, merged
    return ops.add(tape, base, moved, f"{name} output with adapter, wide")


def _norms(tape: Tape, x: Tensor, to: Product, narrow: int, width: int) -> list[Tensor]:
    """The norms of the merged weight, from an identity that the adapters turn into their product.

    Returns the tensors that stay: the identity in the products' graph, what they make, and the weight in ``width``.
    """
    weight, inputs = to.weight(x, width), x.size.elements
    identity = tape.new(f"{to.name} identity", Size(inputs * inputs, width, "once"))
    standing = [ops.cast(tape, identity, narrow, f"{to.name} identity, cast")]
    product = tape.new(f"{to.name} product of adapters", weight.wide(narrow))
    del identity
    standing.append(ops.cast(tape, product, width, f"{to.name} product of adapters, cast"))
    del product
    standing.append(tape.new(f"{to.name} weight, cast", weight))
    merged = [tape.new(f"{to.name} {name}", weight) for name in ("product of adapters, scaled", "merged weight")]
    merged.clear()
    return standing


def _beside_copy(tape: Tape, x: Tensor, to: Product) -> Tensor:
    """``F.linear`` with a copy of the frozen weight, which is kept for the input's gradient."""
    given = ops.cast(tape, x, to.width, f"{to.name} dropped input, 16-bit copy")
    copied = tape.new(f"{to.name} weight beside it, cast", to.weight(given, to.width))
    size, name = given.size, f"gradient of {to.name} dropped input"
    out = tape.new(f"{to.name} output of dropped input", to.output(given))
    return tape.record(out, [given], lambda _: [tape.new(name, size)], [copied.storage])


def _weighted(tape: Tape, x: Tensor, width: int, name: str) -> Tensor:
    """A product with a trained number for each output: keeps x for the numbers' gradient, which is made whole first."""
    size, wide, wanted, leaf = x.size, x.size.wide(width), x.requires_grad, Leaf(f"{name} magnitudes", keep=True)

    def rule(_: Grads) -> Grads:
        of_tokens = tape.new(f"gradient of magnitudes of {name}", wide)
        grad = tape.new(f"gradient before {name}", wide) if wanted else None
        tape.release()
        small = tape.new(f"gradient of {name} magnitudes", Size(size.elements, width, "once", size.shard), "gradient")
        del of_tokens
        return [ops.cast(tape, grad, size.width, f"gradient before {name}, cast") if grad else None, small]

    return tape.record(tape.new(name, wide), [x, leaf], rule, [x.storage])


def _low_rank(tape: Tape, x: Tensor, lora: Lora, to: Product, width: int) -> Tensor:
    """``B(A(dropout(x))) * scaling``."""
    down = Product(f"{to.name} adapter A", width, lora.rank, "r", "none", to.parts)
    up = to._replace(name=f"{to.name} adapter B", width=width)
    dropped = ops.dropout(tape, x, f"{to.name} adapter dropout", active=lora.dropout)
    low = project(tape, dropped, down, trained=True)
    del dropped
    high = project(tape, low, up, trained=True)
    del low
    return ops.plain(tape, high, f"{to.name} adapter output")


def _fused(tape: Tape, x: Tensor, lora: Lora, to: Product, base: Callable[[], Tensor]) -> Tensor:
    """One function: keeps x and, with dropout, the dropped x; no mask, and nothing of the low rank.

    Source: fms-acceleration plugins/fused-ops-and-kernels fused_ops/unsloth_lora/bnb/fast_lora.py (``LoRA_QKV``,
    ``LoRA_W``) and utils.py (``matmul_lora``).
    """
    with tape.no_grad():
        out = base()
        dropped = _dropped(tape, x, to.name) if lora.dropout else x
        delta = tape.new(f"{to.name} adapter output", out.size)
        del delta
    size = x.size
    weights = [Size(lora.rank * n, 1, "once") for n in (size.elements, to.elements)]
    leaves = [Leaf(f"{to.name} adapter {part} weight", keep=True) for part in "AB"]

    def rule(_: Grads) -> Grads:
        parts = [tape.new(f"gradient of {to.name} adapter", weight, "gradient") for weight in weights]
        grad = tape.new(f"gradient of {to.name} input", size)
        gradient = tape.new(f"gradient of {to.name} adapter's input", size)
        del gradient
        return [grad, *parts]

    return tape.record(Tensor(out.storage, out.size), [x, *leaves], rule, [x.storage, dropped.storage])


def _dropped(tape: Tape, x: Tensor, name: str) -> Tensor:
    mask = tape.new(f"{name} adapter dropout mask", x.size.wide(1))
    dropped = tape.new(f"{name} adapter dropout", x.size)
    del mask
    return dropped


PARTS = ("q", "k", "v")


class Packed(NamedTuple):
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
    delta = _packed_low_rank(tape, x, lora, packed, parts)
    if len(parts) < len(PARTS):
        delta = _padded(tape, delta, packed.to)
    delta = ops.plain(tape, delta, f"{packed.to.name} adapter output, scaled")
    return ops.add(tape, result, delta, f"{packed.to.name} output with adapter")


def _packed_low_rank(tape: Tape, x: Tensor, lora: Lora, packed: Packed, parts: list[int]) -> Tensor:
    to, name, rank = packed.to, f"{packed.to.name} adapter", lora.rank
    dropped = ops.dropout(tape, x, f"{name} dropout", active=lora.dropout)
    low = project(tape, dropped, Product(f"{name} A", lora.width, rank * len(parts), "n·r"), trained=True)
    del dropped
    if len(set(packed.outputs)) == 1:  # a grouped convolution
        return project(tape, low, to._replace(name=f"{name} B", elements=sum(parts), label="n·q"), trained=True)
    pieces = ops.split(tape, low, [rank] * len(parts), ["r"] * len(parts), f"{name} A")
    del low
    high = [
        project(tape, piece, to._replace(name=f"{name} B of part {index}", elements=size, label="q"), trained=True)
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
