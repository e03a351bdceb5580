"""A routed MLP: the router, the experts over the tokens sent to them, and shared experts.

Source: Transformers 5.23 ``integrations/moe.py`` (``grouped_mm_experts_forward``) and the routers of
``models/{mixtral,qwen3_moe,deepseek_v2,deepseek_v3}/modeling_*.py``; PyTorch 2.13 ``tools/autograd/derivatives.yaml``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.specs.model import Mlp
from memcalc.trace import ops
from memcalc.trace.expert_loop import looped
from memcalc.trace.layers import Setting, linear
from memcalc.trace.mlp import activation, dense
from memcalc.trace.router import INDEX, indexed, router
from memcalc.trace.tape import Grads, Leaf, Size, Tape, Tensor

if TYPE_CHECKING:
    from memcalc.specs.model import MixtureOfExperts


def routed(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: Setting, hidden: int) -> Tensor:
    """The experts' weighted sum and the shared experts' output."""
    writing = looped if setting.expert_loop else WRITINGS.get(setting.kernels, grouped)
    total = writing(tape, x, spec, setting, hidden)
    if not spec.shared_ffn:
        return total
    shared = dense(tape, x, _like(spec, spec.shared_ffn), setting, hidden, "shared experts'")
    if spec.shared_gate:
        gate = linear(tape, x, setting, "shared experts' gate", 1, "1")
        shared = ops.mul(
            tape, ops.saves_output(tape, gate, "shared experts' gate, sigmoid"), shared, "gated shared output"
        )
    return ops.add(tape, total, shared, "experts' sum")


def grouped(tape: Tape, x: Tensor, spec: MixtureOfExperts, setting: Setting, hidden: int) -> Tensor:
    """Tokens sorted by expert and multiplied by grouped matmuls; each token passes ``topk`` experts."""
    weights, experts, logits = router(tape, x, spec, setting)
    by_expert, order, counted, token = (tape.new(name, _rows(x, spec, 1, width)) for name, width in ROW_NUMBERS.items())
    tokens = indexed(tape, x, token, _rows(x, spec, hidden, x.size.width, "h"), "routed tokens")
    del token
    row_weights = indexed(tape, weights, order, weights.size, "weights of rows")
    ends = tape.new("ends of experts' rows", Size(spec.experts, 4, "once", "none", "E"))
    out = experts_mlp(tape, tokens, spec, setting, hidden, ends)
    if spec.expert_bias:  # both biases are gathered by expert and added in place
        out = tape.record(Tensor(out.storage, out.size), [out], lambda grads: grads, [by_expert.storage])
    out = ops.mul(tape, out, row_weights, "weighted expert outputs")
    back = tape.new("rows in the tokens' order", _rows(x, spec, 1, INDEX))
    out = indexed(tape, out, back, out.size, "expert outputs in the tokens' order")
    del back, weights, experts, logits, counted  # as variables of the functions that run, they live until here
    return ops.cast(tape, summed(tape, out, x.size.wide(out.size.width)), x.size.width, "sum of expert outputs, cast")


ROW_NUMBERS = {
    "sorted expert numbers": INDEX,
    "order by expert": INDEX,
    "expert numbers to count": 4,
    "token of each row": INDEX,
}
"""Names and bytes of the integers of each row; the counting of rows an expert takes 32-bit ones."""
WRITINGS = {"model": grouped}
"""How the experts run, by the kernels of the setting."""


def experts_mlp(
    tape: Tape, tokens: Tensor, spec: MixtureOfExperts, setting: Setting, hidden: int, ends: Tensor
) -> Tensor:
    """The experts' MLPs over rows sorted by expert."""
    name, k, ffn = "experts'", spec.topk, spec.ffn
    up = grouped_linear(tape, tokens, setting, f"{name} up projection", (spec, hidden, ffn * (1 + spec.gated)), ends)
    if spec.gated:
        gate, value = ops.split(tape, up, [k * ffn] * 2, ["k·f"] * 2, f"{name} gate and up")
        inner = ops.mul(tape, activation(tape, gate, spec.activation, setting, name), value, f"{name} product")
        del gate, value
    else:
        inner = activation(tape, up, spec.activation, setting, name)
    del up
    return grouped_linear(tape, inner, setting, f"{name} down projection", (spec, ffn, hidden), ends)


def grouped_linear(
    tape: Tape, x: Tensor, setting: Setting, name: str, shape: tuple[MixtureOfExperts, int, int], ends: Tensor
) -> Tensor:
    """``torch.nn.functional.grouped_mm``, which autocast leaves alone: the input takes the weight's dtype.

    ``shape`` is the mixture, and the width of one row before and after.
    """
    spec, before, after = shape
    given = ops.cast(tape, x, setting.weight, f"{name} input, cast")
    size, in_size = given.size._replace(elements=spec.topk * after, label="k·f"), given.size
    weight = Size(spec.experts * before * after, 1, "once", "ep")
    trained, wanted = setting.trainable, given.requires_grad
    leaf = Leaf(f"{name} weight", keep=True) if trained else None

    def rule(_: Grads) -> Grads:
        grad = tape.new(f"gradient of {name} input", in_size) if wanted else None
        return [grad, tape.new(f"gradient of {name} weight", weight, "gradient") if trained else None]

    saved = [given.storage if trained else None, ends.storage]
    return tape.record(
        tape.operator("grouped_mm", lambda: tape.new(f"{name} output", size)), [given, leaf], rule, saved
    )


def summed(tape: Tape, rows: Tensor, size: Size) -> Tensor:
    """The sum over a token's experts; its gradient is expanded, and copied where rows become one dimension again."""
    back = rows.size
    return tape.record(
        tape.new("sum of expert outputs", size), [rows], lambda _: [tape.new("gradient of expert outputs", back)]
    )


def _rows(x: Tensor, spec: MixtureOfExperts, elements: int, width: int, label: str = "") -> Size:
    """The size of a tensor with a row for each token and chosen expert."""
    return x.size._replace(
        elements=spec.topk * elements, width=width, shard="none", label=f"k·{label}" if label else "k"
    )


def _like(spec: MixtureOfExperts, ffn: int) -> Mlp:
    return Mlp(ffn=ffn, gated=spec.gated, activation=spec.activation)
