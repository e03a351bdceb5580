"""The router of a mixture of experts: scores, the choice of experts, and their weights.

Source: Transformers 5.23 ``models/{mixtral,qwen3_moe,deepseek_v2,deepseek_v3}/modeling_*.py``; PyTorch 2.13
``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.layers import Setting, linear
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.model import MixtureOfExperts

INDEX = 8
"""Bytes of an index: ``torch.topk``, ``sort`` and advanced indexing use 64-bit integers."""


def router(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the chosen experts, their numbers, and the logits, which the caller holds while experts run."""
    logits = router_logits(tape, x, spec, setting)
    width = logits.size.width
    numbers = Size(spec.topk, INDEX, "token", "none", "k")
    if spec.scores == "sigmoid":
        scores = ops.saves_output(tape, logits, "router scores")
        experts = tape.new("chosen experts", numbers)
        weights = picked(tape, scores, experts, "weights of experts", [scores, experts])
    else:
        scores = ops.saves_output(tape, logits, "router scores", 4)
        if spec.group_limited:
            scores = masked(tape, scores, "router scores of the best groups")
        experts = tape.new("chosen experts", numbers)
        weights = picked(tape, scores, experts, "weights of experts", [experts])
    del scores
    if spec.normalised:
        weights = normalised(tape, weights, setting)
    if spec.narrow_weights:
        weights = ops.cast(tape, weights, width, "weights of experts, cast")
    return ops.plain(tape, weights, "weights of experts, scaled") if spec.scaled else weights, experts, logits


def router_logits(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: Setting) -> Tensor:
    """One number an expert; where the model asks for fp32, of fp32 copies of input and weight."""
    if not spec.fp32_router:
        return linear(tape, x, setting, "router", spec.experts, "E")
    wide = ops.cast(tape, x, 4, "router input, fp32")
    if setting.weight == 4:
        return linear(tape, wide, setting, "router", spec.experts, "E")
    elements, in_size = spec.experts * x.size.elements, wide.size
    copy = tape.new("router weight, fp32", Size(elements, 4, "once", "none", "E·h"), "weight copy")
    leaf = Leaf("router weight", keep=True) if setting.trainable else None

    def rule(_: Grads) -> Grads:
        grad = tape.new("gradient of router input", in_size)
        if leaf is None:
            return [grad, None]
        wide_gradient = tape.new("gradient of router weight, fp32", Size(elements, 4, "once"))
        del wide_gradient
        return [grad, tape.new("gradient of router weight", Size(elements, 1, "once"), "gradient")]

    out = tape.new("router output", wide.size._replace(elements=spec.experts, label="E"))
    return tape.record(out, [wide, leaf], rule, [wide.storage if leaf else None, copy.storage])


def picked(tape: Tape, scores: Tensor, experts: Tensor, name: str, saved: list[Tensor]) -> Tensor:
    """``topk`` or ``gather``: the backward scatters into zeros."""
    size = scores.size
    out = tape.new(name, experts.size.wide(size.width))
    return tape.record(out, [scores], lambda _: [tape.new(f"gradient before {name}", size)], [t.storage for t in saved])


def masked(tape: Tape, x: Tensor, name: str) -> Tensor:
    """``masked_fill``: keeps the mask."""
    mask, size = tape.new(f"{name}, mask", x.size.wide(1)), x.size
    return tape.record(tape.new(name, size), [x], lambda _: [tape.new(f"gradient before {name}", size)], [mask.storage])


def normalised(tape: Tape, weights: Tensor, setting: Setting) -> Tensor:
    """``weights /= weights.sum()``: in place, so that autograd keeps a clone of what is overwritten, and the sum."""
    size = weights.size
    width = 4 if setting.autocast else size.width  # autocast sums in fp32
    total = tape.new("sum of weights", size._replace(elements=1, width=width, label="1"))
    before = tape.new("weights before their division", size)

    def rule(_: Grads) -> Grads:
        quotient, product = (tape.new(f"gradient of weights, {part}", size) for part in ("divided", "of the sum"))
        del product
        return [quotient]

    return tape.record(Tensor(weights.storage, size), [weights], rule, [total.storage, before.storage])


def indexed(tape: Tape, x: Tensor, index: Tensor, size: Size, name: str) -> Tensor:
    """``x[index]``: keeps the index; the backward adds rows into zeros."""
    back = x.size
    return tape.record(
        tape.new(name, size), [x], lambda _: [tape.new(f"gradient before {name}", back)], [index.storage]
    )
