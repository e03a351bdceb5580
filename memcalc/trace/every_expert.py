"""Experts that each run over every token: batched products of inputs that the router's scores have multiplied.

Source: Transformers 5.24 ``models/llama4/modeling_llama4.py`` (``Llama4Router``, ``Llama4TextMoe``,
``Llama4TextExperts``); PyTorch 2.13 ``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.specs.block import Mlp
from memcalc.trace import ops
from memcalc.trace.activation_steps import activation
from memcalc.trace.layers import WIDE, BlockConfig, linear
from memcalc.trace.routed import INDEX, dense, picked
from memcalc.trace.tape import Edge, Grads, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.block import MixtureOfExperts


def over_every_token(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """All experts' outputs added up, and the shared experts' over which that sum is added in place."""
    logits = linear(tape, x, setting, "router", spec.experts, "E")
    scores = scores_of_chosen(tape, logits, spec)
    copies = x.size._replace(elements=spec.experts * hidden, label="E·h")
    rows = ops.copy(tape, x, "tokens of every expert", copies)
    # Experts come before tokens in what they read, so that the scores are copied in that order
    rows = ops.mul(tape, rows, ops.copy(tape, scores, "scores by expert"), "weighted tokens")
    out = batched_experts(tape, rows, spec, setting, hidden)
    if not spec.shared_ffn:
        return added_up(tape, out, x.size.wide(WIDE if setting.autocast else out.size.width))
    alone = Mlp(ffn=spec.shared_ffn, gated=spec.gated, activation=spec.activation, packed=spec.shared_packed)
    shared = dense(tape, x, alone, setting, hidden, "shared experts'")
    total = added_up(tape, out, x.size.wide(WIDE if setting.autocast else out.size.width))
    del rows, out, logits, scores  # as variables of the function that runs, they live until here
    return ops.add(tape, shared, total, "experts' sum", in_place=True)


def scores_of_chosen(tape: Tape, logits: Tensor, spec: MixtureOfExperts) -> Tensor:
    """The sigmoid of the chosen experts' logits, in fp32 and cast back, and zeros of all others."""
    numbers = tape.new("chosen experts", Size(spec.topk, INDEX, "token", "none", "k"))
    best = picked(tape, logits, numbers, "chosen logits", [numbers])
    back = best.size

    def rule(_: Grads) -> Grads:
        return [tape.new("gradient of chosen logits", back)]

    only = tape.record(tape.new("logits of chosen experts", logits.size), [best], rule, [numbers.storage])
    del best
    scores = ops.saves_output(tape, ops.cast(tape, only, WIDE, "logits of chosen experts, fp32"), "router scores")
    return ops.cast(tape, scores, logits.size.width, "router scores, cast")


def batched_experts(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: BlockConfig, hidden: int) -> Tensor:
    """The experts' MLPs, gate and up in one product."""
    ffn, each = spec.ffn, spec.experts
    up = batched_linear(tape, x, setting, "experts' up projection", (spec, hidden, ffn * (1 + spec.gated)))
    if not spec.gated:
        inner = activation(tape, up, spec.activation, setting, "experts'")
        return batched_linear(tape, inner, setting, "experts' down projection", (spec, ffn, hidden))
    gate, value = ops.split(tape, up, [each * ffn] * 2, ["E·f"] * 2, "experts' gate and up")
    inner = activation(tape, gate, spec.activation, setting, "experts'")
    inner = ops.mul(tape, value, inner, "experts' product")
    out = batched_linear(tape, inner, setting, "experts' down projection", (spec, ffn, hidden))
    del up, gate, value  # variables of the function that runs
    return out


def batched_linear(
    tape: Tape, x: Tensor, setting: BlockConfig, name: str, shape: tuple[MixtureOfExperts, int, int]
) -> Tensor:
    """``torch.bmm`` with the weights of all experts, of which autocast makes a 16-bit copy.

    ``shape`` is the mixture, and the width of one row before and after.
    """
    spec, before, after = shape
    given = ops.cast(tape, x, setting.compute, f"{name} input, 16-bit copy")
    weight, autocast = Size(spec.experts * before * after, 1, "once", "ep"), setting.compute != setting.weight
    leaf = Leaf(f"{name} weight", keep=True) if setting.trainable else None
    edge: Edge | None = tape.cast_weight(leaf, weight) if leaf and autocast else leaf
    wanted, in_size = given.requires_grad, given.size

    def rule(_: Grads) -> Grads:
        grad = tape.new(f"gradient of {name} input", in_size) if wanted else None
        if leaf is None or not autocast:
            return [grad, tape.new(f"gradient of {name} weight", weight, "gradient") if leaf else None]
        return [grad, tape.new(f"gradient of {name} weight, 16-bit", weight.wide(2))]

    copied = tape.weight_copy(name, weight.wide(2)) if autocast else None
    size = given.size._replace(elements=spec.experts * after, label="E·f")
    out = tape.operator("bmm", lambda: tape.new(f"{name} output", size))
    return tape.record(out, [given, edge], rule, [given.storage if leaf else None, copied], reads=True)


def added_up(tape: Tape, rows: Tensor, size: Size) -> Tensor:
    """The sum over all experts; its gradient is expanded, and copied where experts and tokens become one dimension."""
    back = rows.size
    return tape.record(
        tape.new("sum of expert outputs", size), [rows], lambda _: [tape.new("gradient of expert outputs", back)]
    )
