"""Adapters on weights that belong to no linear layer: stacked experts and their router, as PEFT folds them in.

For each forward PEFT makes the weights anew, ``W + B A``: of stacked experts in one product of 16-bit copies of the
adapters' factors, of a router by way of the difference itself. ``register_parametrization`` makes the sum once to look
at it; then it is made when the module reads it, and is kept until the module returns, and for backward. The gradient of
all weights is made there, and of it those of the factors.

Sources: PEFT 0.21 ``tuners/lora/layer.py`` (``ParamWrapper``, ``_LoraFactorsProxy``, ``_LoraParameterProxy``); PyTorch
2.13 ``torch/nn/utils/parametrize.py`` (``register_parametrization``, ``cached``), ``tools/autograd/derivatives.yaml``
(``baddbmm``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memcalc.specs.adapters import rank_on_stack
from memcalc.trace import ops
from memcalc.trace.tape import Edge, Grads, Kind, Leaf, Size, Storage, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import MixtureOfExperts
    from memcalc.trace.layers import BlockConfig

INNER, DOWN = "experts' up projection", "experts' down projection"
"""Products of experts, by the names that the trace has for them."""


@dataclass
class Stacks:
    """Stacked weights of a block's experts under adapters: the factors, and the weights once they have been read."""

    factors: dict[str, Factors] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def read(self, tape: Tape, name: str) -> None:
        """Make the weights of one product, if adapters are on them."""
        if name in self.factors:
            self.weights[name] = _sum(tape, self.factors[name])


@dataclass(frozen=True)
class Factors:
    """The factors of adapters on a stack of weights: their places in the graph, and what is kept of each."""

    name: str
    weight: Size
    """Of all experts' weights."""
    sizes: tuple[Size, Size]
    edges: tuple[Edge | None, Edge | None]
    saved: tuple[Storage | None, Storage | None]


def stacks(tape: Tape, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Stacks:
    """Factors for the weights of a block's experts that have adapters; the wrapper of the last one is outermost."""
    made = Stacks()
    if setting.lora is None or not setting.lora.folds:
        return made
    inner = spec.ffn * (1 + spec.gated)
    for name, inputs, outputs in ((DOWN, spec.ffn, hidden), (INNER, hidden, inner)):
        rank = rank_on_stack(setting.lora.rank, setting.lora.targets, down=name == DOWN)
        if not rank:
            continue
        weight = Size(spec.experts * inputs * outputs, setting.weight, "once", "ep", "E·h·f")
        ranks = spec.experts * rank
        second = _factor(tape, setting, f"{name} adapter B", ranks * outputs, strided=True)
        first = _factor(tape, setting, f"{name} adapter A", ranks * inputs, strided=False)
        (b_edge, b_kept, b_size), (a_edge, a_kept, a_size) = second, first
        made.factors[name] = Factors(name, weight, (b_size, a_size), (b_edge, a_edge), (b_kept, a_kept))
        registered = tape.new(f"{name} weight with adapters, looked at", weight)
        del registered
    return made


def _factor(
    tape: Tape, setting: BlockConfig, name: str, elements: int, *, strided: bool
) -> tuple[Edge | None, Storage | None, Size]:
    """A factor in the weights' dtype; the gradient of a ``strided`` view is copied for the parameter's form."""
    width = setting.lora.width if setting.lora is not None else setting.weight
    leaf, size = Leaf(f"{name} weight", keep=True), Size(elements, setting.weight, "once", "none", "E·r·n")
    if width == setting.weight:
        return (tape.cast_weight(leaf, size.wide(1)) if strided else leaf), None, size

    def rule(grads: Grads) -> Grads:
        wide = tape.new(f"gradient of {name}, cast", size.wide(width)) if strided else None
        grads.clear()
        grad = tape.new(f"gradient of {name} weight", size.wide(1), "gradient")
        del wide
        return [grad]

    out = tape.record(tape.new(f"{name}, cast", size), [leaf], rule)
    return out.edge, out.storage, size


def _sum(tape: Tape, of: Factors) -> Tensor:
    """``baddbmm(W, B, A, alpha=scaling)``: keeps both factors; W needs no gradient."""

    def rule(_: Grads) -> Grads:
        parts: Grads = []
        for size, edge in zip(of.sizes, of.edges, strict=True):
            product = tape.new(f"gradient of {of.name} adapter, before scaling", size)
            # a parameter that is not cast takes the product as it is
            final: tuple[Size, Kind] = (size.wide(1), "gradient") if isinstance(edge, Leaf) else (size, "activation")
            parts.append(tape.new(f"gradient of {of.name} adapter", *final))
            del product
        return parts

    out = tape.new(f"{of.name} weight with adapters", of.weight)
    return tape.record(out, of.edges, rule, of.saved)


def router_weight(tape: Tape, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> list[Tensor]:
    """The weight of a router with its adapter and their difference, which live until the router returns; else nothing.

    As a matrix of two dimensions, it is the sum with a product that is made first: ``W + (B A) * scaling``.
    """
    lora = setting.lora
    if lora is None or not lora.folds or "router" not in lora.targets:
        return []
    wide = lora.width > setting.compute and setting.autocast
    size = Size(spec.experts * hidden, setting.compute if wide else lora.width, "once", "none", "E·h")
    sizes = [Size(lora.rank * elements, 1, "once") for elements in (spec.experts, hidden)]
    leaves = [Leaf(f"router adapter {part} weight", keep=True) for part in "BA"]
    copies = [tape.new("router adapter, 16-bit copy", part.wide(2)).storage for part in sizes] if wide else []
    edges = [tape.cast_weight(leaf, part) for leaf, part in zip(leaves, sizes, strict=True)] if wide else leaves

    def rule(_: Grads) -> Grads:
        kind: Kind = "activation" if wide else "gradient"
        return [tape.new("gradient of router adapter", part.wide(2) if wide else part, kind) for part in sizes]

    product = tape.record(tape.new("router adapter product", size), edges, rule, copies, reads=True)
    copies.clear()
    scaled = ops.plain(tape, product, "router adapter product, scaled")
    del product
    delta = ops.cast(tape, scaled, setting.weight, "router adapter, cast")
    del scaled
    registered = tape.new("router weight with adapter, looked at", delta.size)
    del registered
    weight = tape.record(tape.new("router weight with adapter", delta.size), [delta], lambda grads: [grads[0]])
    return [weight, delta]


def routed_by(tape: Tape, x: Tensor, weight: Tensor, setting: BlockConfig, elements: int, *, wide: bool) -> Tensor:
    """The router's product with such a weight, ``wide`` in fp32: keeps both."""
    width = 4 if wide and not setting.autocast else setting.compute
    given = ops.cast(tape, x, width, "router input, cast")
    factor = ops.cast(tape, weight, width, "router weight with adapter, cast")
    in_size, wanted, full = given.size, given.requires_grad, factor.size

    def rule(_: Grads) -> Grads:
        grad = tape.new("gradient of router input", in_size) if wanted else None
        return [grad, tape.new("gradient of router weight with adapter", full)]

    saved = [given.storage if factor.requires_grad else None, factor.storage if wanted else None]
    out = tape.new("router output", given.size._replace(elements=elements, width=width, label="E"))
    return tape.record(out, [given, factor], rule, saved, reads=True)
