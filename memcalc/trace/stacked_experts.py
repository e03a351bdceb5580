"""Experts whose weights are stacked: a mixture as Megatron-LM runs it, and adapters that PEFT folds into such weights.

Megatron-LM's has an all-to-all token dispatcher, fused permutation and grouped GEMM. The peak of a model with experts
often stands inside the forward of its last routed layer, because the locals of ``MoELayer.forward`` (the permuted and
the exchanged tokens, the experts' output) stay referenced until it returns.

For each forward PEFT makes the weights of stacked experts and their router anew, ``W + B A``: of experts in one product
of 16-bit copies of the adapters' factors, of a router by way of the difference itself. ``register_parametrization``
makes the sum once to look at it; then it is made when the module reads it, and is kept until the module returns, and
for backward. The gradient of all weights is made there, and of it those of the factors.

Sources: Megatron-LM 23e00ed ``core/transformer/moe/moe_layer.py`` (``custom_forward``), ``token_dispatcher.py``,
``experts.py`` (``TEGroupedMLP``), ``router.py``; TransformerEngine c188b533 ``pytorch/permutation.py``,
``module/grouped_linear.py``; PEFT 0.21 ``tuners/lora/layer.py`` (``ParamWrapper``, ``_LoraFactorsProxy``,
``_LoraParameterProxy``); PyTorch 2.13 ``torch/nn/utils/parametrize.py`` (``register_parametrization``, ``cached``),
``tools/autograd/derivatives.yaml`` (``baddbmm``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from memcalc.specs.adapters import rank_on_stack
from memcalc.trace import ops
from memcalc.trace.checkpoint import discarding
from memcalc.trace.layers import input_again, kept_input, operands
from memcalc.trace.parallel_linear import column_parallel, frozen_grouped, row_parallel
from memcalc.trace.tape import Edge, Grads, Kind, Leaf, Shard, Size, Storage, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import MixtureOfExperts
    from memcalc.trace.layers import BlockConfig


def experts(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """Router, exchange, experts, exchange back, and the sum with the shared experts."""
    width = x.size.width
    rows = Size(hidden, width, "routed", "rows", "h")
    probs = router(tape, x, spec, trained=setting.trainable)
    permuted = permute(tape, x, probs, rows)
    sent = moved(tape, permuted, "tokens, exchanged", "rows if sorted", "rows if ep")
    # the experts read a copy sorted by expert; what came before stays referenced by the caller's locals
    given = moved(tape, sent, "experts' input", "rows", "rows if sorted")
    shared = shared_experts(tape, x, spec, setting, hidden)
    made = grouped(tape, given, probs, spec, setting, hidden)
    del given
    unsorted = moved(tape, made, "experts' output, in order of arrival", "rows", "rows if sorted")
    del made
    back = moved(tape, unsorted, "experts' output, returned", "rows if ep", "rows")
    out = unpermute(tape, back, x.size)
    del back
    if shared is not None:
        out = ops.add(tape, out, shared, "experts' sum")
    del permuted, sent, unsorted
    return out


def router(tape: Tape, x: Tensor, spec: MixtureOfExperts, *, trained: bool) -> Tensor:
    """Two fp32 softmaxes (of the choice and of the balancing loss), two masks, the map of rows and the choice.

    A frozen weight changes nothing: ``RouterGatingLinearFunction`` keeps its input, and makes its gradient all the
    same (Megatron-LM d98e8a64 ``core/transformer/moe/moe_utils.py``).
    """
    size, experts_ = x.size, spec.experts
    saved = [
        tape.new("router scores", size._replace(elements=2 * experts_, width=4, label="2·E")),
        tape.new("router masks", size._replace(elements=2 * experts_, width=1, label="2·E")),
        tape.new("map of routed rows", size._replace(elements=2 * experts_ + 1, width=4, label="2·E + 1")),
        tape.new("chosen experts", size._replace(elements=3 * spec.topk, width=8, label="3·topk")),
    ]
    probs = Tensor(saved[0].storage, saved[0].size)
    weight = Size(experts_ * size.elements, 1, "once", "none")

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient of router input", size), tape.new("gradient of router weight", weight, "gradient")]

    leaf = Leaf("router weight", keep=True) if trained else None
    return tape.record(probs, [x, leaf], rule, [x.storage, *(tensor.storage for tensor in saved)])


def permute(tape: Tape, x: Tensor, probs: Tensor, rows: Size) -> Tensor:
    """The tokens in the order of their experts: keeps the map of rows, which the router's entry counts."""
    size, weights = x.size, probs.size
    out = tape.new("tokens, permuted", rows._replace(shard="rows if ep"))

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient of permuted tokens", size), tape.new("gradient of probabilities", weights)]

    return tape.record(out, [x, probs], rule)


def moved(tape: Tape, x: Tensor, name: str, shard: Shard, before: Shard) -> Tensor:
    """An all-to-all or a sort by chunks: keeps nothing; it is no copy where there is nothing to move."""
    back = x.size._replace(shard=before)
    return tape.record(
        tape.new(name, x.size._replace(shard=shard)), [x], lambda _: [tape.new(f"gradient before {name}", back)]
    )


def grouped(tape: Tape, x: Tensor, probs: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """Two grouped products around an activation that is weighted by the tokens' probabilities."""
    wide = (2 if spec.gated else 1) * spec.ffn
    size = Size(wide, x.size.width, "routed", "routed ffn", "f_e")
    up = grouped_linear(tape, x, setting, "experts' up projection", size)
    again = "moe_act" in setting.checkpointed
    inner = weighted_activation(tape, up, probs, spec.ffn)
    del up
    size = Size(hidden, x.size.width, "routed", "rows if sorted", "h")
    out = grouped_linear(tape, inner, setting, "experts' down projection", size, original=again)
    if again:
        return discarding(tape, inner, out)
    return out


def grouped_linear(
    tape: Tape, x: Tensor, setting: BlockConfig, name: str, size: Size, *, original: bool = False
) -> Tensor:
    """``GroupedLinear``: keeps its input, as it is with ``original``; backward makes the gradient contiguous."""
    if not setting.trainable:
        return frozen_grouped(tape, x, setting, name, size)
    narrow = setting.narrow
    given, weight = x.size, Size(x.size.elements * size.elements, 1, "once", "experts")
    full = size._replace(shard="rows" if size.shard == "rows if sorted" else size.shard)
    saved, other = kept_input(tape, x, name, narrow, original=original)

    def rule(_: Grads) -> Grads:
        copied = [tape.new(f"gradient of {name} output, contiguous", full)]
        copied += operands(tape, full, name, narrow)
        copied += input_again(tape, given, name, narrow, original=original)
        inner = tape.new(f"gradient of {name} input", given)
        grad = tape.new(f"gradient of {name} weight", weight, "gradient")
        copied.clear()
        return [inner, grad]

    leaf, out = Leaf(f"{name} weight", keep=True), tape.new(f"{name} output", size)
    other.clear()
    return tape.record(out, [x, leaf], rule, [saved.storage])


def weighted_activation(tape: Tape, x: Tensor, probs: Tensor, ffn: int) -> Tensor:
    """``WeightedSwiGLUFunction``: keeps its input and the probabilities of the rows."""
    size, weights = x.size, probs.size
    rows = tape.new("probabilities of the rows", Size(1, 4, "routed", "rows", "1"))
    out = tape.new("experts' activation", size._replace(elements=ffn, label="f_e"))

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient before experts' activation", size), tape.new("gradient of probabilities", weights)]

    return tape.record(out, [x, probs], rule, [x.storage, rows.storage])


def unpermute(tape: Tape, x: Tensor, size: Size) -> Tensor:
    """The experts' outputs, added up a token: keeps nothing, because the weights were applied before."""
    rows = x.size._replace(shard="rows if ep")
    return tape.record(
        tape.new("sum of routed outputs", size), [x], lambda _: [tape.new("gradient of routed outputs", rows)]
    )


def shared_experts(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor | None:
    """A dense MLP on the same normalised input."""
    if not spec.shared_ffn:
        return None
    wide = (2 if spec.gated else 1) * spec.shared_ffn
    original = "layernorm" in setting.checkpointed
    up = column_parallel(tape, x, setting, "shared experts' up projection", wide, "f_s", original=original)
    size = up.size
    inner = tape.new("shared experts' activation", size._replace(elements=spec.shared_ffn, label="f_s"))
    saved = [up.storage]
    inner = tape.record(inner, [up], lambda _: [tape.new("gradient before shared experts' activation", size)], saved)
    del up, saved
    return row_parallel(tape, inner, setting, "shared experts' down projection", hidden)


INNER, DOWN = "experts' up projection", "experts' down projection"
"""Products of experts, by the names that the trace has for them."""


@dataclass
class Stacks:
    """Stacked weights of a block's experts that are made anew: of what, and the weights once they have been read."""

    narrow: dict[str, Size] = field(default_factory=dict)
    """What is stored in fewer bits, with its size once it is whole."""
    factors: dict[str, Factors] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def read(self, tape: Tape, name: str) -> None:
        """Make the weights of one product, if they are quantised or adapters are on them."""
        base = dequantised(tape, name, self.narrow[name]) if name in self.narrow else None
        made = _sum(tape, self.factors[name]) if name in self.factors else base
        if made is not None:
            self.weights[name] = made


def dequantised(tape: Tape, name: str, size: Size) -> Tensor:
    """All experts' weights of one product, which need no gradient; 8-bit ones become fp32, by two products.

    Sources: bitsandbytes 0.49 nn/parametrize.py (``Bnb4bitParametrization``, cached until the module returns),
    backends/default/ops.py (``int8_vectorwise_dequant``); axolotl 067b021c8 monkeypatch/moe_quant.py
    (``Bnb8bitParametrization``).
    """
    scaled = tape.new(f"{name} weight, times its scales", size) if size.width == 4 else None
    made = tape.new(f"{name} weight, dequantised", size)
    del scaled
    return made


class Factors(NamedTuple):
    """The factors of adapters on a stack of weights: their places in the graph, and what is kept of each."""

    name: str
    weight: Size
    """Of all experts' weights."""
    sizes: tuple[Size, Size]
    edges: tuple[Edge | None, Edge | None]
    saved: tuple[Storage | None, Storage | None]


def stacks(tape: Tape, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Stacks:
    """Weights of a block's experts that are quantised or have adapters; the wrapper of the last one is outermost."""
    made = Stacks()
    if setting.lora is None or not setting.lora.folds:
        return made
    inner = spec.ffn * (1 + spec.gated)
    for name, inputs, outputs in ((DOWN, spec.ffn, hidden), (INNER, hidden, inner)):
        if setting.quantised_experts:
            width = 4 if setting.quantize == "int8" else setting.weight
            made.narrow[name] = Size(spec.experts * inputs * outputs, width, "once", "ep", "E·h·f")
        rank = rank_on_stack(setting.lora.rank, setting.lora.targets, down=name == DOWN)
        if not rank:
            continue
        weight = Size(spec.experts * inputs * outputs, setting.weight, "once", "ep", "E·h·f")
        ranks = spec.experts * rank
        second = _factor(tape, setting, f"{name} adapter B", ranks * outputs, strided=True)
        first = _factor(tape, setting, f"{name} adapter A", ranks * inputs, strided=False)
        (b_edge, b_kept, b_size), (a_edge, a_kept, a_size) = second, first
        made.factors[name] = Factors(name, weight, (b_size, a_size), (b_edge, a_edge), (b_kept, a_kept))
        base = dequantised(tape, name, made.narrow[name]) if name in made.narrow else None
        registered = tape.new(f"{name} weight with adapters, looked at", weight)
        del registered, base
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
