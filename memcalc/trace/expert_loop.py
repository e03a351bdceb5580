"""Routed experts one after another, each with modules of its own and the tokens sent to it.

Source: Transformers 4.48 models/mixtral/modeling_mixtral.py (``MixtralSparseMoeBlock.forward``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.trace import ops
from memcalc.trace.layers import Setting, linear
from memcalc.trace.mlp import activation
from memcalc.trace.router import INDEX, indexed, router
from memcalc.trace.tape import Grads, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.model import MixtureOfExperts


def looped(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: Setting, hidden: int) -> Tensor:
    """The experts' weighted sum, for balanced experts: each has one of ``experts / topk`` parts of the rows."""
    weights, chosen, logits = router(tape, x, spec, setting)
    total = tape.new("sum of expert outputs", x.size._replace(elements=hidden))
    mask = tape.new("chosen experts, one-hot", Size(spec.topk * spec.experts, INDEX, "token", "none", "k·E"))
    del chosen
    for number in range(spec.experts):
        total = _add_expert(tape, x, weights, total, spec, setting, f"expert {number}")
    del mask, logits
    return total


def _add_expert(
    tape: Tape, x: Tensor, weights: Tensor, total: Tensor, spec: MixtureOfExperts, setting: Setting, name: str
) -> Tensor:
    """Add one expert's outputs into the sum, in place: ``index_add_`` keeps what it adds."""
    parts = max(spec.experts // spec.topk, 1)
    index = tape.new(f"{name} tokens' numbers", Size(2, INDEX, "token", "none", "2").part(parts))
    rows = indexed(tape, x, index, x.size.part(parts), f"{name} tokens")
    out = _expert(tape, rows, spec, setting, x.size.elements, parts)
    share = indexed(tape, weights, index, weights.size._replace(elements=1).part(parts), f"{name} weights")
    out = ops.cast(tape, ops.mul(tape, out, share, f"{name} outputs, weighted"), x.size.width, f"{name} outputs, cast")
    size = out.size

    def rule(grads: Grads) -> Grads:
        return [grads[0], tape.new(f"gradient of {name} outputs", size)]

    return tape.record(Tensor(total.storage, total.size), [total, out], rule, [index.storage, out.storage])


def _expert(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: Setting, hidden: int, parts: int) -> Tensor:
    """An expert's MLP over its part of the rows."""
    up = linear(tape, x, setting, "expert gate" if spec.gated else "expert up", spec.ffn, "f", parts=parts)
    inner = activation(tape, up, spec.activation, setting, "expert")
    del up
    if spec.gated:
        inner = ops.mul(
            tape, inner, linear(tape, x, setting, "expert up", spec.ffn, "f", parts=parts), "expert product"
        )
    return linear(tape, inner, setting, "expert down projection", hidden, "h", parts=parts)
